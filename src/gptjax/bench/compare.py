"""`python -m gptjax.bench compare BEFORE.json AFTER.json`: the times of two results, row by row."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro

from gptjax.bench import results
from gptjax.bench.configs import OWN_DEFAULT
from gptjax.bench.errors import BenchError
from gptjax.bench.rows import KEYS, identity, label
from gptjax.bench.table import Row, print_table
from gptjax.ranges import PositiveFloat
from gptjax.terminal import printable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare two results of step, ladder or kernels: the time after over the time before."""

    before: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="BEFORE.json")]]
    """The older result, the reference: JSON that one of these commands wrote with --out."""
    after: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="AFTER.json")]]
    """The newer result, of the same command."""
    fail_above: Annotated[PositiveFloat | None, OWN_DEFAULT] = None
    """Exit code 1 if a row takes more than this many times as long as before, no longer runs, or is
    absent from AFTER.json."""

    def run(self) -> None:
        before, after = (results.read(path, times=True) for path in (self.before, self.after))
        rows = compare(before["rows"], after["rows"])
        show(rows, before, after)
        if not any("ratio" in row for row in rows):
            raise BenchError(f"{self.before} and {self.after} have no measured row in common")
        if self.fail_above is None:
            return
        slower = [
            f"{row['name']}: {row['after'] if row.get('broken') else f'{row["ratio"]:.3f} ×'}"
            for row in rows
            if row.get("broken") or row.get("ratio", 0) > self.fail_above
        ]
        if slower:
            title = f"worse than {self.fail_above:g} × in {self.after}:"
            raise BenchError("\n".join([title, *slower]))


def compare(before: list[dict], after: list[dict]) -> list[dict]:
    """Pair the rows of two results, in the order of `before`; rows of `after` alone come last.

    Returns:
        For each row its name, both outcomes in words, and the ratio after/before of the times. A
        row that has a time in `before` alone is "broken".
    """
    old, new = ({key(row): row for row in rows} for rows in (before, after))
    pairs = []
    for k in {**old, **new}:
        one, other = old.get(k), new.get(k)
        row = {"name": label(one or other), "before": _outcome(one), "after": _outcome(other)}
        if one and "ms" in one:
            measured = other and "ms" in other
            row |= {"ratio": other["ms"] / one["ms"]} if measured else {"broken": True}
        pairs.append(row)
    return pairs


def key(row: dict) -> tuple:
    """Return the key that identifies a row in its result."""
    return tuple(json.dumps(identity(row).get(field, ""), sort_keys=True) for field in KEYS)


def _outcome(row: dict | None) -> str:
    if row is None:
        return "absent"
    return f"{row['ms']:.4g} ms" if "ms" in row else row["error"]


def show(rows: list[dict], before: dict, after: dict) -> None:
    """Print the differences of machine and command, then a row for each measurement."""
    for what in ("command", "commit", "date", "device", *before["versions"] | after["versions"]):
        one, other = (result.get(what, result["versions"].get(what)) for result in (before, after))
        if one != other:
            print(printable(f"{what}: {one or 'absent'} → {other or 'absent'}"))
    table = [
        Row(row["name"], (row["before"], row["after"], f"{row['ratio']:.3f} ×"))
        if "ratio" in row
        else Row(row["name"], note=f"{row['before']} → {row['after']}")
        for row in rows
    ]
    print_table("", ("before", "after", "after / before"), table)
