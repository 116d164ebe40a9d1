"""The manual in docs/: every page is in the index and short, every option has a text, and the
messages of the troubleshooting page exist."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import document_options
import draw

from gptjax import Config, OptimizerConfig

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# The words of each page, of its tables' cells too: long enough to be used, short enough to be read.
MOST_WORDS = {
    "README": 300, "install": 400, "getting_started": 600, "training": 800, "data": 900,
    "several_gpus": 700, "precision": 900, "checkpoints": 600, "finetuning": 500,
    "generation": 900, "normuon": 600, "speedrun": 900, "benchmarks": 1200,
    "troubleshooting": 1200, "coming_from": 700, "conventions": 650, "cards": 500, "tried": 2450,
    "kernels/README": 800,
}  # fmt: skip
MOST_OF_A_KERNEL, MOST_OF_EXTENDING = 500, 2600
# All words of Markdown files: the course and tried.md are not read as a manual.
MOST_IN_ALL, MOST_TO_READ = 35_000, 22_000


def words(text):
    """The number of words, without the lines of tables and the generated tables of results."""
    text = re.sub(r"<!-- table: \w+ -->\n.*?<!-- end -->", "", text, flags=re.DOTALL)
    return len(re.sub(r"\||:?-{3,}:?", " ", text).split())


def test_the_index_has_every_page():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((\w+\.md)\)", index)
    pages = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    assert pages == {*links} and len(links) == len(pages)


def test_the_pages_are_short():
    lengths = {
        path.relative_to(DOCS).with_suffix("").as_posix(): words(path.read_text(encoding="utf-8"))
        for path in [*DOCS.glob("*.md"), *DOCS.glob("kernels/*.md")]
    }
    extending = [name for name in lengths if name.startswith("extending")]
    assert sum(map(lengths.pop, extending)) <= MOST_OF_EXTENDING
    kernels = {name: MOST_OF_A_KERNEL for name in lengths if name.startswith("kernels/")}
    most = kernels | MOST_WORDS
    assert lengths.keys() == most.keys() and len(lengths) > 20
    assert {name: n for name, n in lengths.items() if n > most[name]} == {}


def prose(path):
    """The text of a page; of a notebook, without its code."""
    text = path.read_text(encoding="utf-8")
    if path.parent.name == "notebooks":
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return text


def test_the_manual_is_short():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    pages += (ROOT / "examples").rglob("*.md")
    counts = {path: len(prose(path).split()) for path in pages}
    course = {path for path in pages if DOCS / "course" in path.parents}
    beside = sum(counts[path] for path in course | {DOCS / "tried.md"})
    assert sum(counts.values()) <= MOST_IN_ALL
    assert sum(counts.values()) - beside <= MOST_TO_READ


def test_the_page_of_options_has_every_option():
    page = document_options.page()
    flags = [f"--{f.name}" for f in fields(Config) if f.name not in ("model", "optimizer")]
    flags += [f"--optimizer.{f.name}" for f in fields(OptimizerConfig)]
    assert [flag for flag in flags if f"| `{flag.replace('_', '-')}` | " not in page] == []
    assert "|  |" not in page and page.count("\n| `") > len(flags)


def test_the_picture_of_the_speed_is_drawn_from_the_results(tmp_path):
    steps = ROOT / "benchmarks" / "results" / "step"
    speeds = [draw.throughput(steps / file, *sizes) for _, file, *sizes in draw.SPEEDS]
    assert all({*speed} == {"gptjax", "llm.c", "PyTorch 2.11, compiled"} for speed in speeds)
    assert [round(speed["llm.c"] / 1000) for speed in speeds] == [569, 186]
    assert draw.main([str(steps), str(tmp_path)]) == 0
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def messages():
    """Every text in the sources, … for a value."""
    for path in [
        ROOT / "train.py",
        *(ROOT / "src").rglob("*.py"),
        *ROOT.glob("pallas_kernels/*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                yield "".join(parts)


def test_the_messages_of_the_troubleshooting_page_exist():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)`", page, flags=re.MULTILINE)
    # The command line's parser, not gptjax, prints this one.
    rows.remove("Unrecognized options")
    known = [*messages()]
    patterns = {row: ".*".join(map(re.escape, re.split(" *… *", row))) for row in rows}
    missing = [
        row
        for row, pattern in patterns.items()
        if not any(re.search(pattern, text, flags=re.DOTALL) for text in known)
    ]
    assert len(rows) > 30 and missing == []
