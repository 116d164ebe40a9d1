"""benchmarks/experiments/fp8_clipping.py: counts at each conversion, and conversions as before
afterwards."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from gptjax.models import gpt2
from pallas_kernels.fp8 import conversion, layers

ROOT = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def clipping(monkeypatch):
    # As when it is run: the modules that it imports are in the same folder.
    monkeypatch.syspath_prepend(ROOT / "experiments")
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("fp8_clipping")


def test_counts(clipping):
    before = conversion._quantize_in_xla, gpt2.ACTIVATION_SCALE
    x = jnp.ones((4, 8)).at[1, 2].set(112.0)

    def conversions(x):
        return layers.activations(x).rows, layers.quantized_weights(x).io

    expected = jax.jit(conversions)(x)
    with clipping.counting() as counts:
        found = jax.jit(lambda x: conversions(x))(x)
        jax.effects_barrier()
    assert (conversion._quantize_in_xla, gpt2.ACTIVATION_SCALE) == before
    for a, b in zip(expected, found, strict=True):
        assert (a == b).all()
    activations, weights = counts.values()
    assert activations == clipping.Counts(1, 2.0, 1, 32)
    assert weights == clipping.Counts(1, 1.0, 0, 32)  # 112 · 4 of 448
    # The names of the table.
    places = importlib.import_module("_result_fp8").PLACES
    assert {where for where, _ in counts} <= places.keys()
    for where in places:
        path, function = where.split(": ")
        assert hasattr(
            importlib.import_module(f"pallas_kernels.{path.replace('/', '.')}"), function
        )
