"""`python -m gptjax.bench compare A.json B.json`: two results of bench step, ladder or kernels beside each other."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from gptjax.bench.kernels import BenchError
from gptjax.bench.step import OWN_DEFAULT

# What makes a row the same measurement in both; a field that a row lacks counts as empty. A rung is its name, whatever it asks for.
KEYS = (
    *("kernel", "case", "implementation", "system", "rung", "model", "precision", "batch", "sequence_length"),
    *("pass", "algorithm", "recompute", "asked"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Two results of step, ladder or kernels beside each other: of every row in both the time of B over that of A."""

    a: tyro.conf.Positional[Path]
    """JSON that bench step, ladder or kernels wrote."""
    b: tyro.conf.Positional[Path]
    """Another of the same kind."""
    fail_above: Annotated[float | None, OWN_DEFAULT] = None
    """Exit code 1 where a row of B takes more than this many times as long as in A, or no longer runs."""

    def run(self) -> None:
        a, b = (_read(path) for path in (self.a, self.b))
        rows = compare(a["rows"], b["rows"])
        show(rows, a, b)
        if not any("ratio" in row for row in rows):
            raise BenchError(f"{self.a} and {self.b} have no measured row in common")
        if self.fail_above is None:
            return
        slower = [
            f"{row['name']}: {row['ratio']:.3f} ×" for row in rows if "ratio" in row and row["ratio"] > self.fail_above
        ]
        slower += [f"{row['name']}: {row['b']}" for row in rows if row.get("broken")]
        if slower:
            raise BenchError("\n".join([f"worse than {self.fail_above:g} × in {self.b}:", *slower]))


def compare(a: list[dict], b: list[dict]) -> list[dict]:
    """A row for each of A's, in their order, then for each that B alone has: its name, what both found, the ratio b/a of the times."""
    of_a, of_b = ({key(row): row for row in rows} for rows in (a, b))
    found = []
    for k in [*of_a, *(k for k in of_b if k not in of_a)]:
        one, other = of_a.get(k), of_b.get(k)
        row = {"name": name(one or other), "a": _found(one), "b": _found(other)}
        if one and other and "ms" in one and "ms" in other:
            row["ratio"] = other["ms"] / one["ms"]
        elif one and other and "ms" in one:
            row["broken"] = True
        found.append(row)
    return found


def key(row: dict) -> tuple:
    """What a row measures, told from every other row of its result."""
    return tuple(json.dumps(_identity(row).get(field, ""), sort_keys=True) for field in KEYS)


def name(row: dict) -> str:
    """The same in words."""
    row = _identity(row)
    asked = [f"{part}={value}" for part, value in row.get("asked", {}).items()]
    return " · ".join([str(row[field]) for field in KEYS if row.get(field) and field != "asked"] + asked)


def _identity(row: dict) -> dict:
    return {field: value for field, value in row.items() if field != "asked"} if "rung" in row else row


def _found(row: dict | None) -> str:
    if row is None:
        return "absent"
    return f"{row['ms']:.4g} ms" if "ms" in row else row["error"]


def _read(path: Path) -> dict:
    try:
        result = json.loads(path.read_text())
        if all("ms" in row or "error" in row for row in result["rows"]):
            return result
        raise ValueError("a row has neither ms nor error")
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: expected JSON of bench step, ladder or kernels ({error})") from error


def show(rows: list[dict], a: dict, b: dict) -> None:
    differing = [(what, a.get(what), b.get(what)) for what in ("command", "date", "device")]
    packages = sorted({*a["versions"], *b["versions"]})
    differing += [(package, *(result["versions"].get(package) for result in (a, b))) for package in packages]
    for what, one, other in differing:
        if one != other:
            print(f"{what}: {one or 'absent'} → {other or 'absent'}")
    table = Table("row", "A", "B", "B / A")
    for row in rows:
        table.add_row(row["name"], row["a"], row["b"], f"{row['ratio']:.3f} ×" if "ratio" in row else "")
    Console(width=None if sys.stdout.isatty() else 180).print(table)
