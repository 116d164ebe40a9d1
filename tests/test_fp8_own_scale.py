"""`quantize_by_largest`: both ways to compute the scale, and the compiled kernels."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import triton_kernels

from pallas_kernels.gemm import E4M3, E5M2, quantize, scale_for
from pallas_kernels.gemm.operands import quantize_by_largest

HOW = {"headroom": 4.0, "factor": 8.0}


def check(x, dtype, sampled, expected_scale):
    """Bits of `quantize` with the expected scale, x rounded to bf16."""
    found = quantize_by_largest(x, dtype, sampled=sampled, **HOW)
    how = {"transposed": True, "implementation": "xla"}
    expected = quantize(x.astype(jnp.bfloat16), expected_scale, dtype, **how)
    scale = float(expected_scale)
    assert found.scale.value.shape == ()
    assert [float(s) for s in found.scale] == [scale, 1 / scale, 1 / (8 * scale)]
    for ours, theirs in ((found.rows, expected.rows), (found.k_major, expected.transposed)):
        bits = [jax.lax.bitcast_convert_type(a, jnp.uint8) for a in (ours, theirs)]
        np.testing.assert_array_equal(*bits)


@pytest.mark.parametrize(
    "shape, dtype, largest",
    [
        # several programs with several tiles each, the last of which is partly out of bounds
        ((70, 130), E4M3, 3.0),
        ((4, 130), E5M2, 2.0**-70),
        ((2, 3), E4M3, 0.0),
    ],
)
def test_whole(backend, monkeypatch, shape, dtype, largest):
    if backend == "triton":
        monkeypatch.setattr("pallas_kernels.gemm.triton.MOST_MAXIMA", 2)
    x = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, shape), jnp.float32)
    x = (x * largest / 2).at[-1, -1].set(-largest)  # in the last group
    check(x, dtype, False, scale_for(jnp.abs(x).max(), dtype, 4.0))


def test_exact_ratios(backend):
    """448/(4·7) = 16 exactly, a number just above 7 in bf16, and one that bf16 rounds to 7."""
    for largest, scale in ((7.0, 16.0), (7.03125, 8.0), (7.01, 16.0)):
        x = jnp.zeros((4, 16)).at[1, 2].set(largest)
        assert float(quantize_by_largest(x, E4M3, headroom=4.0).scale.value) == scale


def test_sampled(backend):
    """Of 512 columns, the first 16 of each 256; of another number of columns, all."""
    x = jnp.zeros((4, 512), jnp.bfloat16).at[2, 271].set(3.0).at[1, 272].set(1e6)
    check(x, E5M2, True, scale_for(jnp.float32(3), E5M2, 4.0))
    check(x[:, 256:511], E5M2, True, scale_for(jnp.abs(x).max(), E5M2, 4.0))


@pytest.mark.parametrize("largest", [1e-36, 3e38])
def test_limits_of_the_scale(backend, largest):
    x = jnp.full((4, 16), largest, jnp.bfloat16)
    check(x, E5M2, False, jnp.float32(2.0**60 if largest < 1 else 2.0**-60))


def test_nan(backend, monkeypatch):
    """The scale of numbers that are not all finite is 1, and NaN stays NaN."""
    shape = (2, 3)  # on a CPU, the maximum of XLA 0.12.0 ignores NaN in larger arrays
    if backend == "triton":
        shape = (70, 130)
        monkeypatch.setattr("pallas_kernels.gemm.triton.MOST_MAXIMA", 2)
    for place in ((0, 0), (-1, -1)):
        for odd in (-jnp.nan, jnp.inf):
            check(jnp.ones(shape).at[place].set(odd), E4M3, False, jnp.float32(1))


@pytest.mark.parametrize("shape", [(0, 512), (4, 0)], ids=str)
def test_empty(backend, shape):
    for sampled in (False, True):
        check(jnp.zeros(shape), E5M2, sampled, jnp.float32(1))


def test_compiled_code():
    """The sizes of GPT-2's gradients and weights."""
    for x, sampled in (((65536, 2304), True), ((768, 3072), False)):
        arrays = jax.ShapeDtypeStruct(x, jnp.bfloat16 if sampled else jnp.float32)
        dtype = E5M2 if sampled else E4M3
        kernels = triton_kernels(
            lambda x, s=sampled, d=dtype: quantize_by_largest(x, d, sampled=s, **HOW), arrays
        )
        assert [k.name for k in kernels] == ["part_maxima", "quantize_own"]
        assert all(k.spill_bytes == 0 for k in kernels)
        assert re.search(r"ld\.global\S*\.v4", kernels[0].ptx)


@pytest.mark.gpu
@pytest.mark.parametrize("sampled", [False, True])
def test_on_the_gpu(sampled):
    x = jax.random.normal(jax.random.key(0), (4096, 2304), jnp.bfloat16)
    amax = jnp.abs(x.reshape(-1, 9, 256)[..., : 16 if sampled else 256]).max()
    check(x, E5M2, sampled, scale_for(amax, E5M2, 4.0))
