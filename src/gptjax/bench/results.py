"""Result files: the schema of every JSON file that bench and the benchmarks write, and its table.

A result is an object with these fields:

    date      YYYY-MM-DD
    device    kind of the device, in JAX's words
    versions  package → version
    commit    Git commit of the measured sources, "-dirty" appended if a tracked file differs from
              it; null outside a checkout
    command   the command line, typed in the repository's root
    rows      list of objects, one for each measurement

Further fields belong to one command, such as the `ceilings` of `kernels`. A row describes its
measurement, and has the figures or the "error".
"""

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gptjax.bench import BenchError
from gptjax.doctor import machine
from gptjax.files import output, write_atomically
from gptjax.provenance import commit, versions
from gptjax.terminal import hint, print_line

# Fields of a label. Rows with one label are the same measurement.
KEYS = (
    *("kernel", "case", "implementation", "system", "rung", "model", "precision", "batch"),
    *("sequence_length", "micro_batches", "pass", "algorithm", "recompute", "devices", "parallel"),
    *("reduce_dtype", "overlap_reduce", "reshard_after_forward", "moments", "asked"),
)
# Values that a label leaves out.
_DEFAULTS = {"pass": "train", "algorithm": "adamw", "recompute": "none", "reduce_dtype": "fp32"}
_DEFAULTS |= {"reshard_after_forward": True, "overlap_reduce": True, "devices": 1}


def new(
    command: str, rows: Sequence[dict], *, device: str, packages: Sequence[str] = (), **fields: Any
) -> dict:
    """Return a result with the current date, versions and commit.

    Args:
        packages: names whose versions matter too, where they are installed.
        fields: further fields, of the command itself.
    """
    installed = {name: version for name in packages if (version := machine.installed(name))}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "versions": versions() | installed,
        "commit": commit(),
        "command": command,
        **fields,
        "rows": list(rows),
    }


def check_file(path: Path | None) -> None:
    """Create the folder of a file, if the file is given. Called before a measurement.

    Raises:
        OSError: the folder cannot be created, or the path is not a regular file.
    """
    if path:
        output(path).parent.mkdir(parents=True, exist_ok=True)


def write(path: Path, result: dict) -> None:
    """Write a result, atomically; create the folder if it is absent."""
    check_file(path)
    write_atomically(path, f"{compact_json(result)}\n".encode())


def report(result: dict, out: Path | None, show: Callable[[dict], None]) -> None:
    """Write a result to `out`, if given, then print its table with `show`: standard output may be
    closed."""
    if out:
        write(out, result)
    show(result)
    if out:
        print(f"wrote {out}")
        hint(shlex.join(["gptjax", "bench", "compare", str(out), "OTHER.json"]), piped=False)


def compact_json(value: Any, depth: int = 0) -> str:
    """Return JSON in which objects and lists without nested ones are on one line."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(each, dict | list) and each for each in inner):
        return json.dumps(value, ensure_ascii=False)
    texts = [compact_json(each, depth + 1) for each in inner]
    if isinstance(value, dict):
        names = (json.dumps(str(name), ensure_ascii=False) for name in value)
        texts = [f"{name}: {text}" for name, text in zip(names, texts, strict=True)]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    indent = "\n" + " " * depth
    return begin + ",".join(f"{indent} {text}" for text in texts) + indent + end


def read(path: Path) -> dict:
    """Read a result.

    Raises:
        OSError: the file cannot be read.
        BenchError: the contents do not have the schema.
    """
    try:
        result = json.loads(path.read_text())
        kinds = {"date": str, "device": str, "versions": dict, "command": str, "rows": list}
        for name, kind in kinds.items():
            if not isinstance(result.get(name), kind) or not result[name] and name == "rows":
                raise ValueError(f"no {name}")
    except (AttributeError, ValueError, RecursionError) as error:
        expected = "a result of gptjax.bench or benchmarks/"
        raise BenchError(f"{path}: expected {expected} ({error})") from error
    return result


def command(script: str, arguments: Sequence[str] | None = None) -> str:
    """Return the command line of this process.

    Args:
        script: its path from the repository's root, or "-m MODULE".
        arguments: the arguments of this process if None.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", *script.split(), *words])


def label(row: dict) -> str:
    """Return the description of a row's measurement in words.

    Defaults are left out, and the options of a rung, which the rung's name implies.
    """
    row = {field: row[field] for field in KEYS if field in row}
    asked = [f"{part}={value}" for part, value in row.pop("asked", {}).items() if "rung" not in row]
    forms = {
        "batch": f"batch {row.get('batch')}",
        "micro_batches": f"{row.get('micro_batches')} micro-batches",
        "devices": f"{row.get('devices')} devices",
        "moments": f"moments {row.get('moments')}",
        "reshard_after_forward": "gathered once",
        "overlap_reduce": "no overlap",
    }
    if "sequence_length" in row:
        forms["batch"] = f"{row['batch']} × {row.pop('sequence_length')}"
    given = {field: value for field, value in row.items() if value != _DEFAULTS.get(field, "")}
    return " · ".join([*(forms.get(field, str(value)) for field, value in given.items()), *asked])


def say(line: str) -> None:
    """Print progress to standard error: standard output has the results."""
    print(line, file=sys.stderr, flush=True)


def raise_failures(rows: Sequence[dict]) -> None:
    """Raise BenchError with the rows that have an error, if there are any."""
    if failed := [f"{label(row)}: {row['error']}" for row in rows if "error" in row]:
        raise BenchError("\n".join(["did not run:", *failed]))


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table. A row without figures is a heading, a failure or an empty line."""

    label: str = ""
    figures: Sequence[str] = ()
    note: str = ""
    """Text without a column, such as the kernels or an error."""


def print_table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Print the title, the names of the figures, and the rows."""
    rows = [Row("", columns), *rows]
    measured = [row for row in rows if row.figures]
    width = max((len(row.label) for row in measured), default=0)
    sizes = [max(map(len, cells)) for cells in zip(*(r.figures for r in measured), strict=True)]
    lines = [title]
    for row in rows:
        pairs = zip(row.figures, sizes, strict=True) if row.figures else ()
        cells = [f"{row.label:<{width if row.figures else 0}}", *(f"{t:>{n}}" for t, n in pairs)]
        lines.append("  ".join([*cells, row.note]).rstrip())
    print_line("\n".join(lines))
