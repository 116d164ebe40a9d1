"""`python -m gptjax.bench compare BEFORE.json AFTER.json`: the times of two results, row by row."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from gptjax.bench import BenchError, results
from gptjax.bench.configs import OWN_DEFAULT
from gptjax.bench.results import Row, label, print_table
from gptjax.terminal import print_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare two results of step, ladder or kernels: the time after over the time before."""

    before: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="BEFORE.json")]]
    """The older result, the reference: JSON that one of these commands wrote with --out."""
    after: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="AFTER.json")]]
    """The newer result, of the same command."""
    fail_above: Annotated[float | None, OWN_DEFAULT] = None
    """Exit code 1 if a row takes more than this many times as long as before, no longer runs, or is
    absent from AFTER.json."""

    def run(self) -> None:
        before, after = results.read(self.before), results.read(self.after)
        pairs = compare(before["rows"], after["rows"])
        show(pairs, before, after)
        if not any("ratio" in pair for pair in pairs):
            raise BenchError(f"{self.before} and {self.after} have no measured row in common")
        limit = self.fail_above
        worse = [
            f"{pair['name']}: {pair['before']} → {pair['after']}"
            for pair in pairs
            if limit and (pair["broken"] or pair.get("ratio", 0) > limit)
        ]
        if worse:
            raise BenchError("\n".join([f"worse than {limit:g} × in {self.after}:", *worse]))


def compare(before: list[dict], after: list[dict]) -> list[dict]:
    """Pair the rows of two results, in the order of `before`; rows of `after` alone come last.

    Returns:
        For each row its name, both outcomes in words, the ratio after/before of the times, and
        whether it is "broken": it has a time in `before` alone.
    """
    old, new = ({label(row): row for row in rows} for rows in (before, after))
    pairs = []
    for name in {**old, **new}:
        one, other = old.get(name, {"error": "absent"}), new.get(name, {"error": "absent"})
        pair = {"name": name, "before": _outcome(one)}
        pair |= {"after": _outcome(other), "broken": "ms" in one and "ms" not in other}
        if "ms" in one and "ms" in other:
            pair["ratio"] = other["ms"] / one["ms"]
        pairs.append(pair)
    return pairs


def _outcome(row: dict) -> str:
    return f"{row['ms']:.4g} ms" if "ms" in row else row.get("error", "no time")


def show(pairs: list[dict], before: dict, after: dict) -> None:
    """Print the differences of machine and command, then a row for each measurement."""
    for what in ("command", "commit", "date", "device", *before["versions"] | after["versions"]):
        one, other = (result.get(what, result["versions"].get(what)) for result in (before, after))
        if one != other:
            print_line(f"{what}: {one or 'absent'} → {other or 'absent'}")
    table = [
        Row(pair["name"], (pair["before"], pair["after"], f"{pair['ratio']:.3f} ×"))
        if "ratio" in pair
        else Row(pair["name"], note=f"{pair['before']} → {pair['after']}")
        for pair in pairs
    ]
    print_table("", ("before", "after", "after / before"), table)
