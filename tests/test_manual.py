"""The manual in docs/: every page is in the index and short, every option has a text, and the
messages of the troubleshooting pages exist."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import document_options
import draw_speed

from gptjax import Config, OptimizerConfig

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# A report of an experiment.
LONG = {"speedrun.md"}
MOST_WORDS = 800
# One line for each rejected idea.
MOST_WORDS_OF = {"tried.md": 3000}


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
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("kernels/*.md")]
    lengths = {
        path.relative_to(ROOT): words(path.read_text(encoding="utf-8"))
        for path in pages
        if path.name not in LONG
    }
    most = {name: MOST_WORDS_OF.get(name.name, MOST_WORDS) for name in lengths}
    assert {name: n for name, n in lengths.items() if n > most[name]} == {}
    assert {*MOST_WORDS_OF} <= {name.name for name in lengths} and len(lengths) > 20


def test_the_page_of_options_has_every_option():
    page = document_options.page()
    flags = [f"--{f.name}" for f in fields(Config) if f.name not in ("model", "optimizer")]
    flags += [f"--optimizer.{f.name}" for f in fields(OptimizerConfig)]
    assert [flag for flag in flags if f"| `{flag.replace('_', '-')}` | " not in page] == []
    assert "|  |" not in page and page.count("\n| `") > len(flags)


def test_the_picture_of_the_speed_is_drawn_from_the_results(tmp_path):
    speeds = [draw_speed.throughput(*case) for _, *case in draw_speed.CASES]
    assert all({*speed} == {"gptjax", "llm.c", "PyTorch 2.11, compiled"} for speed in speeds)
    assert [round(speed["llm.c"] / 1000) for speed in speeds] == [569, 186]
    assert draw_speed.main(["--out", str(tmp_path / "speed.png")]) == 0
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


def test_the_messages_of_the_troubleshooting_pages_exist():
    page = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("troubleshooting*.md"))
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
