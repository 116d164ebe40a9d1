"""Triton kernels on GPUs that this machine does not have: a few compiled here, all in
benchmarks/results/cards.json."""

import importlib
from pathlib import Path

import jax.numpy as jnp
import pytest

from gptjax.bench import results
from pallas_kernels import _dispatch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cards.json"


@pytest.fixture(scope="module")
def tool():
    return importlib.import_module("compile_for_cards")


@pytest.mark.parametrize(
    "capability, operation, number, dtype",
    [
        (80, "linear_gelu", 0, jnp.bfloat16),
        (86, "linear_relu_squared", 0, jnp.bfloat16),
        (89, "transpose_sum_rows", 0, jnp.float32),
        # Two that spill there with the tiles of other GPUs.
        (100, "layer_norm", 0, jnp.float32),
        (100, "softmax", 1, jnp.bfloat16),
        (120, "fused_classifier", 0, jnp.bfloat16),
    ],
)
def test_a_kernel_fits(tool, capability, operation, number, dtype):
    example = _dispatch.OPERATIONS[operation].examples[number](tool.ROWS, dtype)
    row = tool._row(example, capability)
    assert row["error"] == "" and row["spill_bytes"] == 0
    assert row["shared_kb"] <= tool.CARDS[capability].shared_kb


def test_a_kernel_that_does_not_fit_is_found(tool, monkeypatch):
    """The limit of a GPU with less shared memory than any."""
    (make,) = _dispatch.OPERATIONS["transpose_copy"].examples
    monkeypatch.setitem(tool.CARDS, 89, tool.Card("small", 4))
    row = tool._row(make(tool.ROWS, jnp.bfloat16), 89)
    assert row["error"] == "needs 8.0 KB of shared memory, the GPU has 4"
    # Without a kernel in Triton.
    (make,) = _dispatch.OPERATIONS["xxt"].examples
    assert tool._row(make(tool.ROWS, jnp.float32), 89) is None


def test_the_results_have_every_kernel_on_every_card(tool):
    """After a new example or operation, run the tool again."""
    rows = results.read(RESULTS)["rows"]
    assert [row for row in rows if row["error"] or row["spill_bytes"]] == []
    keys = ("operation", "example", "capability")
    found = {tuple(row[key] for key in keys) for row in rows}
    expected = {
        (name, _dispatch.title(make), capability)
        for name, entry in _dispatch.OPERATIONS.items()
        for make in entry.examples
        for capability in tool.CARDS
        if any(back_end.name == "triton" for back_end in entry.back_ends)
    }
    assert found == expected
