"""The table printer of every bench command: a narrow terminal shows all figures in full."""

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Sequence

from gptjax.terminal import printable

_GAP = "  "


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table. A row without figures is a heading, a failure or an empty line."""

    label: str = ""
    figures: Sequence[str] = ()
    note: str = ""
    """Text without a column, such as the kernels or an error."""


def print_table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Print the title, the names of the figures, and the rows, for the terminal's width."""
    # A file has no width: there each row is one line.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    print(printable("\n".join([*_wrapped(title, width), *lines(columns, rows, width)])))


def lines(columns: Sequence[str], rows: Sequence[Row], width: int) -> list[str]:
    """Lay out the rows under the names of the columns.

    Label, figures and note share a line if that fits for all rows. If not, notes get lines of their
    own; if label and figures alone do not fit, labels do, too.
    """
    rows = [Row("", columns), *rows]
    measured = [row for row in rows if row.figures]
    sizes = [
        max(map(len, column)) for column in zip(*(row.figures for row in measured), strict=True)
    ]
    label_size = max(len(row.label) for row in measured)
    with_label = label_size + sum(len(_GAP) + size for size in sizes)
    beside = with_label <= width
    one_line = all(with_label + len(_GAP + row.note) <= width for row in measured if row.note)

    found = []
    for row in rows:
        if not row.figures:
            found += _wrapped(f"{row.label}{_GAP}{row.note}".rstrip(), width) or [""]
            continue
        line = "".join(
            f"{_GAP}{text:>{size}}" for text, size in zip(row.figures, sizes, strict=True)
        )
        if beside:
            line = f"{row.label:<{label_size}}{line}"
        else:
            found += _wrapped(row.label, width)
        found.append((f"{line}{_GAP}{row.note}" if one_line else line).rstrip())
        if not one_line and row.note:
            found += _wrapped(2 * _GAP + row.note, width)
    return found


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=2 * _GAP, break_on_hyphens=False)
