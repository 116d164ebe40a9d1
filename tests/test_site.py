"""The site: every public name has a page with its docstring."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = (
    "gptjax gptjax.data gptjax.evaluation gptjax.optim gptjax.weights pallas_kernels "
    "pallas_kernels.extend pallas_kernels.gemm"
).split()


for module in MODULES:
    importlib.import_module(module)


def test_every_public_name_has_a_page(monkeypatch):
    pytest.importorskip("griffe", reason="griffe is in the extra `docs`")
    monkeypatch.syspath_prepend(ROOT / "docs/site")
    pages = importlib.import_module("api").pages(ROOT, "https://host/sources")
    monkeypatch.delitem(sys.modules, "api")
    names = {(module, name) for module in MODULES for name in sys.modules[module].__all__}
    assert len(names) > 150
    for module, name in names:
        text = pages[f"{module}/{name}.md"]
        assert f"}} {module}.{name}" in text or f"`{module}.{name}` is [" in text, text
        assert "{py:module}" not in text, name  # gptjax.optim.normuon is a module and a function
    meaning = "{py:function} pallas_kernels.layer_norm(x: Float[Array, '*N C'], "
    assert meaning in pages["pallas_kernels/layer_norm.md"]
    assert "`scale, bias`\n: both fp32" in pages["pallas_kernels/layer_norm.md"]
