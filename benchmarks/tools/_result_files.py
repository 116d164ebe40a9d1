"""Results of benchmarks/results as tables: reading, formatting, and the caption of a table."""

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"


class Results:
    """The results that a table reads, in the order of the first reading."""

    def __init__(self, page: Path):
        self.page = page
        self.read: dict[str, dict] = {}

    def __getitem__(self, name: str) -> dict:
        """Return the result benchmarks/results/NAME.json."""
        if name not in self.read:
            self.read[name] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        return self.read[name]

    def link(self, name: str, text: str | None = None) -> str:
        """Return a link from the page to the file of a result."""
        path = FOLDER / f"{name}.json"
        target = os.path.relpath(path, self.page.parent)
        return f"[{text or path.name}]({target})"

    def caption(self) -> str:
        """Return one list item for each device and date, with links to the results.

        The files have the command, the versions, the commit and a note on other processes.
        """
        items: dict[str, list[str]] = {}
        for name, result in self.read.items():
            origin = f"{hardware(name, result)}, {result['date']}"
            items.setdefault(origin, []).append(self.link(name))
        return "\n".join(f"- {origin}: {', '.join(links)}" for origin, links in items.items())


def hardware(name: str, result: dict) -> str:
    """Return the devices: their number is in the rows, or in the name of a file with several."""
    if result.get("kind") == "prediction":
        return f"predicted for {result['device']}"
    counts = {row["devices"] for row in result.get("rows", []) if "devices" in row}
    if found := re.search(r"devices_(\d+)$", name):
        counts |= {int(found[1])}
    if max(counts, default=1) == 1:
        return result["device"]
    return f"{' and '.join(map(str, sorted(counts)))} × {result['device']}"


def figure(value: float, digits: int = 4) -> str:
    """Return a number with this many significant digits, and commas from 1,000 on."""
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(places, 0)}f}"


def percent(share: float, places: int = 1) -> str:
    return f"{100 * share:.{places}f} %".replace("-", "−")


def ratio(value: float) -> str:
    return f"{figure(value)} ×"


def markdown(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    if wrong := [row for row in rows if len(row) != len(names)]:
        raise ValueError(f"expected {len(names)} cells, got {wrong[0]}")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
