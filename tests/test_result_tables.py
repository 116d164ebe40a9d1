"""The tables of docs/ are those of benchmarks/results."""

import json
import re
from pathlib import Path

import pytest
import result_tables as tool

ROOT = Path(__file__).parents[1]
# A cell with a measured quantity: a number with a unit.
QUANTITY = re.compile(r"\d ?(ms|µs|GiB|TFLOP/s|tokens/s)\b")


@pytest.fixture
def triton():
    """One table lists back ends: those of Triton need the package."""
    pytest.importorskip("jax_triton", reason="needs jax_triton: pip install -e '.[test]'")


def test_the_tables_are_current(triton, capsys):
    """If this fails: python benchmarks/tools/tool.py"""
    assert (tool.main(["--check"]), *capsys.readouterr()) == (0, "", "")


def test_the_table_of_back_ends_is_what_select_returns(triton):
    table = tool.generate("back_ends")
    mlp = "**triton**, xla | **mosaic**, triton, xla | **triton**, xla |"
    assert f"| `mlp`, `swiglu` | fp8 | – | {mlp}" in table
    assert "| `linear` | fp8 | – | **xla** |" in table
    linear = "`linear_gelu`, `linear_relu_squared`"
    assert f"| {linear}, `mlp`, `swiglu` | bf16 | **triton**, xla | {mlp}" in table
    norms = "`cached_attention`, `layer_norm`, `rms_norm`"
    assert f"| {norms} | fp32, tf32, bf16 | **triton**, xla |" in table


def test_a_changed_figure_and_a_missing_table_are_found(tmp_path, monkeypatch, capsys):
    page = ROOT / "docs" / "training.md"
    text = page.read_text(encoding="utf-8")
    changed = text.replace("| 3.091 ±", "| 3.081 ±")
    assert tool.current(page, changed) == text != changed
    with pytest.raises(ValueError, match=r"expected the tables \['learning'\], found \[\]"):
        tool.current(page, tool.TABLE.sub("", text))
    copy = tmp_path / "docs" / "training.md"
    copy.parent.mkdir(parents=True)
    copy.write_text(changed, encoding="utf-8")
    monkeypatch.setattr(tool, "pages", lambda: [copy])
    monkeypatch.setattr(tool, "current", lambda page, text: text.replace("3.081", "3.091"))
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert tool.main(["--check"]) == 1 and copy.read_text(encoding="utf-8") == changed
    assert tool.main([]) == 0 and copy.read_text(encoding="utf-8") != changed
    assert "docs/training.md: not current" in capsys.readouterr().out


def test_a_caption_has_the_origin_as_the_files_have_it():
    """One link a table: to the result, or the folder of all results."""
    folder = tool.ROOT / "benchmarks/results"
    first, last = (
        json.loads((folder / f"step/{name}.json").read_text())
        for name in ("bf16_64", "llama3_1b_16_torch_h100")
    )
    link = "[step](../benchmarks/results/step)"
    origin = f"{first['device']}; {last['device']}, {first['date']} to {last['date']}: {link}"
    assert f"\n\n{origin}\n" in tool.generate("steps")
    result = json.loads((folder / "step/recompute_64.json").read_text())
    link = "[recompute_64.json](../benchmarks/results/step/recompute_64.json)"
    assert f"\n\n{result['device']}, {result['date']}: {link}\n" in tool.generate("recompute")
    assert f"; 1 and 2 × {first['device']}; 2 × " in tool.generate("scaling")


def kernel_pages():
    return [page for page in (ROOT / "docs" / "kernels").glob("*.md") if page.name != "README.md"]


def test_a_table_that_is_not_generated_has_no_measured_quantity():
    rows = [
        (page.name, line)
        for page in [*(ROOT / "docs").glob("*.md"), *kernel_pages()]
        if page.name not in ("tried.md", "speedrun.md")
        for line in tool.TABLE.sub("", page.read_text(encoding="utf-8")).splitlines()
        if line.startswith("|") and QUANTITY.search(line)
    ]
    assert rows == []


def test_every_page_of_a_kernel_has_an_example_and_its_default_back_end():
    """tests/test_readme.py runs the example."""
    assert len(kernel_pages()) >= 10
    for page in kernel_pages():
        text = page.read_text(encoding="utf-8")
        assert "```python\n" in text and "implementation" in text, page.name
        assert re.search("[Dd]efault", text), page.name
