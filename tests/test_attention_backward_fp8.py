"""The backward kernel of flash attention that stores dqkv in FP8, compared with the one that stores
16 bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import Options, flash_attention_qkv, mosaic_backward

SCALE = 64.0


def gradients(batch, time, heads, head_dim):
    """Return ((dqkv,), Σ dq, Σ dO) in 16 bits, and ((rows, transposed), Σ dq, Σ dO) in FP8."""
    rng = np.random.default_rng(0)
    qkv, dout = (
        jnp.asarray(rng.standard_normal((batch, time, *rest, heads, head_dim)), jnp.bfloat16)
        for rest in ((3,), ())
    )
    out, lse = flash_attention_qkv(qkv, return_lse=True, implementation="xla")
    how = {"options": Options(scale=head_dim**-0.5), "bias": True, "whole_heads": True}
    backward = functools.partial(mosaic_backward.backward, **how)
    operands = ((qkv,), None, lse, dout, out, None)
    return backward(*operands), backward(*operands, fp8_scale=jnp.float32(SCALE))


def check(*shape):
    ((plain,), dq, dout), ((rows, transposed), dq8, dout8) = gradients(*shape)
    assert rows.dtype == transposed.dtype == jnp.float8_e5m2 and rows.shape == plain.shape
    bits, transposed_bits = (
        np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint8)) for x in (rows, transposed)
    )
    np.testing.assert_array_equal(bits, transposed_bits.transpose(3, 4, 0, 1, 2))
    # Half a step of e5m2 is 1/8 of a number, and a step of its smallest numbers is 2⁻¹⁶; rounding
    # to bf16 first moves a number by 1/256.
    plain = np.asarray(plain, np.float32) * SCALE
    wrong = np.abs(np.asarray(rows, np.float32) - plain)
    assert (wrong <= (1 / 8 + 1 / 128) * np.abs(plain) + 2.0**-17).all()
    # Relative error of rounding to e5m2, RMS: 2 bits of mantissa, 1/(4·√12) of a power of two.
    assert 0.01 < np.linalg.norm(wrong) / np.linalg.norm(plain) < 0.08
    np.testing.assert_array_equal(dout8, dout)
    exact = np.asarray(rows, np.float32)[:, :, 0].sum((0, 1)) / SCALE
    np.testing.assert_allclose(dq8, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("time, head_dim", [(384, 64), (128, 128)])
def test_on_a_cpu(mosaic_on_cpu, time, head_dim):
    check(1, time, 2, head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize("batch, time, heads, head_dim", [(22, 1152, 12, 64), (32, 512, 8, 128)])
def test_on_a_gpu(batch, time, heads, head_dim):
    check(batch, time, heads, head_dim)
