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
# Versions that a caption names, where the result has them.
PACKAGES = ("jax", "triton", "torch", "transformers")
# Options that name files to write.
OUTPUTS = r" --(?:out|picture|page) \S+"
# Scripts that moved after a measurement. A caption has the command for the current path.
MOVED = [
    (
        r"benchmarks/(attacks/\w+|fast_and_plain|learning|layers)\.py",
        r"benchmarks/experiments/\1.py",
    ),
    (r"benchmarks/(mosaic_sass|sanitize)\.py", r"benchmarks/tools/\1.py"),
    (r"(bench kernels) flash_attention$", r"\1 benchmarks/kernels/attention.py"),
    (r"(bench kernels) fused_classifier$", r"\1 benchmarks/kernels/classifier.py"),
    (r"(bench kernels) linear_gelu$", r"\1 benchmarks/kernels/feed_forward.py"),
    (r"(bench kernels) linear_cross_entropy$", r"\1 benchmarks/kernels/lm_head.py"),
    (r"(bench kernels) layer_norm$", r"\1 benchmarks/kernels/norm.py"),
    (r"(bench kernels) softmax$", r"\1 benchmarks/kernels/row_softmax.py"),
    (r"(bench kernels) (symmetric|transpose)$", r"\1 benchmarks/kernels/\2.py"),
    (r"(bench kernels) polar_express$", r"\1 benchmarks/experiments/polar_express.py"),
]


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

    def log(self, name: str) -> list[dict]:
        """Return the lines of the run log benchmarks/results/NAME.jsonl."""
        text = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        self.read[f"{name}.jsonl"] = lines[0]
        return lines

    def link(self, name: str, text: str | None = None) -> str:
        """Return a link from the page to the file of a result."""
        path = FOLDER / (name if name.endswith(".jsonl") else f"{name}.json")
        target = os.path.relpath(path, self.page.parent)
        return f"[{text or path.name}]({target})"

    def caption(self) -> str:
        """Return one list item for each group of results with the same origin.

        The item has the command, date, hardware, versions and commit of the measurement.
        """
        items: dict[str, list[str]] = {}
        for name, result in self.read.items():
            items.setdefault(origin(name, result), []).append(self.link(name))
        return "\n".join(f"- {', '.join(links)}: {text}" for text, links in items.items())


def origin(name: str, result: dict) -> str:
    """Return command, date, hardware, versions and commit of a result, as its file has them."""
    versions = result["versions"]
    commits = [name for name in (result.get("commit") or "").split(", ") if name]
    short = [name[:7] + "-dirty" * name.endswith("-dirty") for name in commits]
    commit = f"commit{'s' * (len(short) > 1)} {', '.join(short) or 'not recorded'}"
    parts = [
        command(result["command"]) if "command" in result else "command not recorded",
        result.get("date", "date not recorded"),
        hardware(name, result),
        ", ".join(f"{package} {versions[package]}" for package in PACKAGES if package in versions),
        commit,
        *(f"{variable}={value}" for variable, value in result.get("environment", {}).items()),
    ]
    # The commit is in the caption already.
    note = re.sub(r"^Of (commit )?\w{7}[.;,]? ?", "", result.get("note", "")).rstrip(".")
    return "; ".join(parts) + (f". {note[0].upper()}{note[1:]}." if note else "")


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


def command(text: str) -> str:
    """Return the command of a result as code, with the current path of its script."""
    text = re.sub(OUTPUTS, "", text)
    # Equivalent in a shell, and not read as options of the command itself.
    text = re.sub(r"--options=([^\s\"']+)", r'--options="\1"', text)
    for old, new in MOVED:
        text = re.sub(old, new, text)
    # A remark that follows the command, such as "(the 124M rows; …)".
    return re.sub(r"python [^,(]*[^,( ]", lambda found: f"`{found[0]}`", text)


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
