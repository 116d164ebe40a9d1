"""Stochastic rounding of blocks to e5m2 in PTX (pallas_kernels/gemm/triton_e5m2.py), run by
ptx_tools. tests/test_lm_head_fp8.py tests the kernel that uses the PTX."""

import jax.numpy as jnp
import numpy as np
import ptx_tools

from pallas_kernels.gemm import E5M2, largest, stochastic_e5m2
from pallas_kernels.gemm.triton_e5m2 import ROUND

MASK = 0x00FF00FF


def rounded(x, mask=MASK):
    masks = np.full(x.shape, mask, np.uint32)
    return ptx_tools.run(ROUND.value, [x, masks], np.dtype(np.uint8), 4)


def expected(x):
    clipped = jnp.asarray(x).clip(-largest(E5M2), largest(E5M2))
    return np.asarray(stochastic_e5m2(clipped)).view(np.uint8)


def numbers():
    """Every fp16 number except NaN, the fp32 numbers near it, ties, and random bits of fp32."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[~np.isnan(halves)].astype(np.float32)
    ulps = np.array([-4097, -4096, -1, 0, 1, 4096, 4097], np.int32)
    near = (halves[:, None].view(np.int32) + ulps).view(np.float32)
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 19, dtype=np.uint32)
    x = np.concatenate([near.ravel(), bits.view(np.float32)])
    x = x[~np.isnan(x)]
    return x[: x.size // 4 * 4]


def test_the_ptx_computes_the_definition():
    """Its mean error is zero: test_fp8.py::test_stochastic_rounding."""
    x = numbers()
    for order in (x, x.reshape(4, -1).T.ravel()):  # every place in a group of four
        np.testing.assert_array_equal(rounded(order), expected(order))


def test_nan_remains_nan_without_noise():
    """And numbers are rounded towards zero."""
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(rounded(nan, mask=0).view(E5M2).astype(np.float32)).all()
    assert not np.isnan(rounded(nan).view(E5M2).astype(np.float32)).any()  # as documented
    x = numbers()
    magnitude = np.abs(rounded(x, mask=0).view(E5M2).astype(np.float32))
    half = np.abs(x).clip(0, largest(E5M2)).astype(np.float16)
    assert (magnitude <= half).all()
