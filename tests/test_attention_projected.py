"""pallas_kernels.projected_attention, compared with a separate projection and attention; the
gradient of the bias without a pass over dqkv; and the backward kernel that stores dqkv in FP8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import forget_races, lower_for_h200, on_gpu
from rule_tools import check, refused

from pallas_kernels.attention import Options, flash_attention_qkv, mosaic_backward, reference
from pallas_kernels.attention.projected import projected_attention

HIGHEST = jax.lax.Precision.HIGHEST


def inputs(batch, time, channels, heads, head_dim=64, dtype=jnp.bfloat16, seed=0):
    """x, W, b: scores have a standard deviation near 2, and biases are half as large as what they
    are added to."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((batch, time, channels)), dtype)
    w = jnp.asarray(
        rng.standard_normal((channels, 3 * heads * head_dim)) * 1.4 / channels**0.5, dtype
    )
    return x, w, jnp.asarray(rng.standard_normal(3 * heads * head_dim) * 0.7, dtype)


def split(x, w, b, heads):
    qkv = jnp.matmul(x, w, precision=HIGHEST) + b[None, None]
    return qkv.reshape(*x.shape[:2], 3, heads, -1)


def check_all(implementation, *sizes, heads, **how):
    """Output and the three gradients, by the 2× rule: of the inputs' own dtype, the scores
    materialized."""
    attend = functools.partial(flash_attention_qkv, implementation="xla", precision=HIGHEST)
    check(
        functools.partial(projected_attention, heads=heads, implementation=implementation),
        lambda *args: attend(split(*args, heads)),
        lambda *args: reference(*jnp.moveaxis(split(*args, heads), 2, 0)),
        inputs(*sizes, heads, **how),
    )


def test_on_a_cpu():
    check_all("xla", 2, 24, 40, heads=3, head_dim=16)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("triton", [True, False])
def test_mosaic_on_a_cpu(mosaic_on_cpu, monkeypatch, request, triton, whole):
    """Without Triton's passes around Mosaic's kernel, and with them as on a GPU."""
    if triton:
        request.getfixturevalue("triton_on_cpu")
    monkeypatch.setattr(mosaic_backward, "whole_heads_are_faster", lambda *sizes, **passes: whole)
    # The backward pass is traced once for these shapes, whatever was patched then.
    jax.clear_caches()
    check_all("mosaic", 2, 67 if triton else 136, 64, heads=1 + triton)
    forget_races()
    jax.clear_caches()


def mosaic(*args, heads):
    """In fp32, for a scalar loss."""
    out = projected_attention(*args, heads=heads, implementation="mosaic")
    return jnp.sin(out.astype(jnp.float32))


def test_vmap(mosaic_on_cpu, triton_on_cpu):
    x, w, b = inputs(3, 40, 64, 1)
    f = functools.partial(mosaic, heads=1)
    each = lambda w, b: jax.vmap(f, (0, None, None))(x[:, None], w, b).sum()
    pairs = jax.grad(each, (0, 1))(w, b), jax.grad(lambda w, b: f(x, w, b).sum(), (0, 1))(w, b)
    for ours, theirs in zip(*pairs, strict=True):
        ours, theirs = (a.astype(jnp.float32) for a in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.1)


def test_vmap_lowers_for_an_h200():
    """Triton's kernels have no rule for vmap."""
    gradient = jax.grad(lambda *args: mosaic(*args, heads=12).sum(), (0, 1, 2))
    sizes = ((2, 4, 1024, 768), (768, 2304), (2304,))
    args = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
    text = lower_for_h200(jax.vmap(gradient, (0, None, None)), *args)
    assert text.count("custom_call @delta_kernel") == 1


def test_a_bias_of_the_keys_has_no_gradient(mosaic_on_cpu):
    x, w, b = inputs(1, 64, 64, 2)
    db = jax.grad(lambda b: mosaic(x, w, b, heads=2).sum())(b)
    of_q, of_k, of_v = np.asarray(db, np.float32).reshape(3, -1)
    assert not of_k.any() and of_q.any() and of_v.any()


@pytest.mark.parametrize("batch, extra", [(64, 0), (4, 1)])
def test_what_is_launched_on_an_h200(batch, extra):
    """Whole heads at B = 64; split ones at 4. Nothing reads all of dqkv but the two products."""
    args = [jax.ShapeDtypeStruct((batch, 1024, 768), jnp.bfloat16)]
    args += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((768, 2304), (2304,))]
    loss = lambda *args: mosaic(*args, heads=12).sum()
    text = lower_for_h200(jax.grad(loss, (0, 1, 2)), *args)
    for kernel, launches in (("mosaic_gpu", 2), ("delta_kernel", 1), ("into_packed_kernel", extra)):
        assert text.count(f"custom_call @{kernel}") == launches
    assert f"tensor<{batch * 1024}x2304xf32>" not in text


def test_errors():
    x, w, b = inputs(1, 8, 16, 1, head_dim=16)
    refused(projected_attention, x, w, b, heads=0, match="with H=0")
    message = r"expected x \(B, T, C\), W \(C, 3·H·D\) and b .* with H=1, got"
    for bad in ((x[0], w, b), (x, w[:8], b), (x, w, b[:-1]), (x, w[:, :-1], b[:-1])):
        refused(projected_attention, *bad, heads=1, match=message)


@pytest.mark.gpu
@pytest.mark.parametrize("batch, time, heads", [(4, 1024, 12), (64, 256, 12), (2, 1000, 3)])
def test_mosaic_on_a_gpu(batch, time, heads):
    check_all("mosaic", batch, time, 64 * heads, heads=heads)


# ---------------------------------------------------------------------------------------------- FP8


@pytest.mark.parametrize(
    "back_end, batch, time, heads, head_dim",
    [
        ("mosaic", 1, 384, 2, 64),
        ("mosaic", 1, 128, 1, 128),
        *on_gpu(("mosaic", 22, 1152, 12, 64), ("mosaic", 32, 512, 8, 128)),
    ],
)
def test_fp8(back_end, batch, time, heads, head_dim, interpreter, monkeypatch):
    """Compared with dqkv in 16 bits that another pass converts. Scales are powers of two and do not
    change the rounding to e5m2. Rounding to bf16 first moves one of 64 numbers by a step of e5m2, a
    fifth of the number: 0.2/√64 = 0.025."""
    rng = np.random.default_rng(0)
    channels = heads * head_dim
    shapes = (batch, time, channels), (channels, 3 * channels), (3 * channels,)
    x, w, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    args = x, 1.4 * w / channels**0.5, 0.7 * b
    direction = jnp.asarray(rng.standard_normal((batch, time, heads, head_dim)), jnp.float32)

    def loss(x, w, b):
        how = {"heads": heads, "numerics": "fp8", "implementation": back_end}
        out = projected_attention(x.astype(jnp.bfloat16), w, b, **how)
        return (out.astype(jnp.float32) * direction).sum()

    def gradients(stored):
        monkeypatch.setattr(mosaic_backward, "stores_fp8", lambda *sizes: stored)
        return jax.jit(jax.grad(lambda *args: loss(*args), (0, 1, 2)))(*args)

    monkeypatch.setattr(mosaic_backward, "whole_heads_are_faster", lambda *sizes, **passes: True)
    for ours, expected in zip(gradients(True), gradients(False), strict=True):
        difference = float(jnp.linalg.norm(ours - expected))
        assert 0 < difference < 0.04 * float(jnp.linalg.norm(expected))
    forget_races()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_fp8_lowers_for_an_h200(head_dim):
    """Nothing but the kernel writes or transposes dqkv."""
    batch, time, heads = 64, 1024, 12

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def f(qkv, lse, dout, out, scale):
        how = {"options": Options(scale=0.1), "bias": True, "fp8_scale": scale}
        return mosaic_backward.backward((qkv,), None, lse, dout, out, None, **how)

    fp32 = {"dtype": jnp.float32}
    args = shape(batch, time, 3, heads, head_dim), shape(batch, heads, time, **fp32)
    args += (shape(batch, time, heads, head_dim),) * 2
    text = lower_for_h200(f, *args, shape(**fp32))
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.transpose" not in text and "f8E5M2" in text


def test_where_fp8_can_be_stored(monkeypatch):
    monkeypatch.setattr(mosaic_backward._mosaic, "num_sms", lambda: 132)
    assert mosaic_backward.stores_fp8(64, 1024, 12)
    assert mosaic_backward.stores_fp8(16, 1024, 25)  # four rounds, 76 % busy
    assert not mosaic_backward.stores_fp8(64, 1000, 12)
    assert not mosaic_backward.stores_fp8(4, 16384, 12)
