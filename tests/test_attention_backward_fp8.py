"""The backward kernel of flash attention that stores dqkv in FP8, compared with the one that stores
16 bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import forget_races, lower_for_h200

from pallas_kernels.attention import Options, flash_attention_qkv, mosaic_backward
from pallas_kernels.attention.projected import projected_attention

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


def projected_gradients(batch, time, heads):
    """Return the gradients of x, W and b of `projected_attention` with FP8 matmuls."""
    rng = np.random.default_rng(0)
    channels = 64 * heads
    shapes = (batch, time, channels), (channels, 3 * channels), (3 * channels,)
    x, w, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    direction = jnp.asarray(rng.standard_normal((batch, time, heads, 64)), jnp.float32)

    def loss(x, w, b):
        out = projected_attention(
            x.astype(jnp.bfloat16), w, b, heads=heads, numerics="fp8", implementation="mosaic"
        )
        return (out.astype(jnp.float32) * direction).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2)))(x, 1.4 * w / channels**0.5, 0.7 * b)


def check_projected(monkeypatch, batch, time, heads):
    """Compare with dqkv in 16 bits that another pass converts. Scales are powers of two and do not
    change the rounding to e5m2. Rounding to bf16 first moves one of 64 numbers by a step of e5m2, a
    fifth of the number: 0.2/√64 = 0.025."""
    monkeypatch.setattr(mosaic_backward, "stores_fp8", lambda *sizes: True)
    found = projected_gradients(batch, time, heads)
    monkeypatch.setattr(mosaic_backward, "stores_fp8", lambda *sizes: False)
    for ours, expected in zip(found, projected_gradients(batch, time, heads), strict=True):
        difference = float(jnp.linalg.norm(ours - expected))
        assert 0 < difference < 0.04 * float(jnp.linalg.norm(expected))


def test_projected_on_a_cpu(mosaic_on_cpu, monkeypatch):
    monkeypatch.setattr(mosaic_backward, "whole_heads_are_faster", lambda *sizes: True)
    check_projected(monkeypatch, 1, 128, 2)
    forget_races()


@pytest.mark.gpu
def test_projected_on_a_gpu(monkeypatch):
    monkeypatch.setattr(mosaic_backward, "whole_heads_are_faster", lambda *sizes: True)
    check_projected(monkeypatch, 22, 1024, 12)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_lowers_for_an_h200(head_dim):
    """Nothing but the kernel writes or transposes dqkv."""
    batch, time, heads = 64, 1024, 12

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def f(qkv, lse, dout, out, scale):
        operands = ((qkv,), None, lse, dout, out, None)
        return mosaic_backward.backward(
            *operands, options=Options(scale=0.1), bias=True, fp8_scale=scale
        )

    text = lower_for_h200(
        f,
        shape(batch, time, 3, heads, head_dim),
        shape(batch, heads, time, dtype=jnp.float32),
        shape(batch, time, heads, head_dim),
        shape(batch, time, heads, head_dim),
        shape(dtype=jnp.float32),
    )
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.transpose" not in text and "f8E5M2" in text


def test_where_it_can_be_stored(monkeypatch):
    monkeypatch.setattr(mosaic_backward._mosaic, "num_sms", lambda: 132)
    assert mosaic_backward.stores_fp8(64, 1024, 12)
    assert mosaic_backward.stores_fp8(16, 1024, 25)  # four rounds, 76 % busy
    assert not mosaic_backward.stores_fp8(64, 1000, 12)
    assert not mosaic_backward.stores_fp8(4, 16384, 12)


@pytest.mark.gpu
@pytest.mark.parametrize("batch, time, heads, head_dim", [(22, 1152, 12, 64), (32, 512, 8, 128)])
def test_on_a_gpu(batch, time, heads, head_dim):
    check(batch, time, heads, head_dim)
