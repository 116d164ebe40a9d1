"""The tables of docs/ are those of benchmarks/results, and the pages of results are short."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_WORDS = 800
# A cell with a measured quantity: a number with a unit.
QUANTITY = re.compile(r"\d ?(ms|µs|GiB|TFLOP/s|tokens/s)\b")


@pytest.fixture(scope="module")
def tool():
    path = ROOT / "benchmarks" / "tools" / "result_tables.py"
    spec = importlib.util.spec_from_file_location("result_tables", path)
    module = importlib.util.module_from_spec(spec)
    before = [*sys.path]
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


def test_the_tables_are_current(tool, capsys):
    """If this fails: python benchmarks/tools/result_tables.py"""
    assert (tool.main(["--check"]), *capsys.readouterr()) == (0, "", "")


def test_a_changed_figure_and_a_missing_table_are_found(tool, tmp_path, monkeypatch, capsys):
    page = ROOT / "docs" / "kernels" / "transpose.md"
    text = page.read_text(encoding="utf-8")
    found = re.search(r"\d\.\d{3,} \(\d+ %\)", text)
    changed = text.replace(found[0], found[0].replace("0.0", "0.1"))
    assert tool.current(page, changed) == text != changed
    with pytest.raises(ValueError, match=r"expected the tables \['transpose'\], found \[\]"):
        tool.current(page, tool.TABLE.sub("", text))
    copy = tmp_path / "docs" / "kernels" / "transpose.md"
    copy.parent.mkdir(parents=True)
    copy.write_text(changed, encoding="utf-8")
    monkeypatch.setattr(tool, "pages", lambda: [copy])
    monkeypatch.setattr(tool, "current", lambda page, text: text.replace("0.1", "0.0"))
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert tool.main(["--check"]) == 1 and copy.read_text(encoding="utf-8") == changed
    assert tool.main([]) == 0 and copy.read_text(encoding="utf-8") != changed
    assert "docs/kernels/transpose.md: not current" in capsys.readouterr().out


def test_a_caption_has_the_origin_as_the_file_has_it(tool):
    result = json.loads((tool.ROOT / "benchmarks/results/step/bf16_64.json").read_text())
    caption = tool.generate("steps")
    assert f"`{result['command']}`; {result['date']}; {result['device']}; jax " in caption
    assert f"commit {result['commit'][:7]}" in caption
    files = importlib.import_module("_result_files")
    unknown = files.origin("x", {"device": "cpu", "versions": {}})
    assert unknown.startswith("command not recorded; date not recorded; cpu")


def test_the_pages_of_results_are_short_and_their_figures_generated(tool):
    """Without the generated tables; a table outside of them has no measured quantity."""
    pages = tool.pages()
    written = {page: tool.TABLE.sub("", page.read_text(encoding="utf-8")) for page in pages}
    lengths = {
        page.name: len(re.sub(r"\||:?-{3,}:?", " ", text).split()) for page, text in written.items()
    }
    assert {name: n for name, n in lengths.items() if n > MOST_WORDS} == {}
    assert len(lengths) > 15
    rows = [
        (page.name, line)
        for page, text in written.items()
        for line in text.splitlines()
        if line.startswith("|") and QUANTITY.search(line)
    ]
    assert rows == []


def test_every_page_of_a_kernel_has_an_example_and_its_default_back_end(tool):
    """tests/test_readme.py runs the example."""
    pages = [page for page in tool.pages() if page.parent.name == "kernels"]
    assert len(pages) >= 10
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "```python\n" in text and "implementation" in text, page.name
        assert re.search("[Dd]efault", text), page.name
