"""SwiGLU and ReLU² with FP8 matmuls against fp64, compared with fp64 of operands rounded to FP8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import lower_for_h200, triton_kernels
from reference.torch_gpt2 import assert_within_twice, rms
from test_fp8_layers import check_mlp, fake, power_of_two, weight

from pallas_kernels import linear, linear_relu_squared, rms_norm, swiglu
from pallas_kernels.fp8 import E4M3, E5M2, layers
from pallas_kernels.fp8.activations import GELU, RELU_SQUARED
from pallas_kernels.fp8.gated import HIDDEN_SCALE
from pallas_kernels.fp8.layers import (
    ACTIVATION_SCALE,
    GRADIENT_HEADROOM,
    activated_mlp,
)

N, C, F = 48, 32, 80  # 80: no multiple of a tile


def arrays(n, c, f, matrices):
    """x, matrices (C, F) but the last, which is (F, C), and dy."""
    rng = np.random.default_rng(0)
    shapes = [(c, f)] * (matrices - 1) + [(f, c)]
    ws = [jnp.asarray(rng.standard_normal(s) * 1.5 / s[0] ** 0.5, jnp.float32) for s in shapes]
    x, dy = (jnp.asarray(rng.standard_normal((n, c)) * s, jnp.bfloat16) for s in (1, 1e-5))
    return x, *ws, dy


def fp64(*args):
    return [np.asarray(a, np.float64) for a in args]


def exact_swiglu(x, w_gate, w_up, w_down, dy, rounded):
    """y, dx, dw_gate, dw_up and dw_down in fp64."""
    x, w_gate, w_up, w_down, dy = fp64(x, w_gate, w_up, w_down, dy)
    scale, f = power_of_two(dy * GRADIENT_HEADROOM, E5M2), w_gate.shape[1]
    w = np.concatenate([w_gate, w_up], 1)
    if rounded:
        x, w, w_down = fake(x, ACTIVATION_SCALE, E4M3), weight(w), weight(w_down)
        dy = fake(dy, scale, E5M2)
    g, u = np.split(x @ w, 2, axis=1)
    sigma = 1 / (1 + np.exp(-g))
    h, dh = g * sigma * u, dy @ w_down.T
    dgu = np.concatenate([dh * u * sigma * (1 + g * (1 - sigma)), dh * g * sigma], 1)
    if rounded:
        h, dgu = fake(h, HIDDEN_SCALE, E4M3), fake(dgu, scale, E5M2)
    dw = x.T @ dgu
    return h @ w_down, dgu @ w.T, dw[:, :f], dw[:, f:], h.T @ dy


def exact_relu_squared(x, w, w2, dy, rounded):
    """y, dx, dw and dw2 in fp64."""
    x, w, w2, dy = fp64(x, w, w2, dy)
    scale = power_of_two(dy * GRADIENT_HEADROOM, E5M2)
    if rounded:
        x, w, w2 = fake(x, ACTIVATION_SCALE, E4M3), weight(w), weight(w2)
        dy = fake(dy, scale, E5M2)
    r = np.maximum(x @ w, 0)
    y = fake(r**2, RELU_SQUARED.scale, E4M3) if rounded else r**2
    du = dy @ w2.T * 2 * (y**0.5 if rounded else r)
    du = fake(du, scale, E5M2) if rounded else du
    return y @ w2, du @ w.T, x.T @ du, y.T @ dy


def compare(found, rounded, exact, names):
    for name, *results in zip(names, found, rounded, exact, strict=True):
        ours, theirs, truth = fp64(*results)
        assert_within_twice(ours, theirs, truth, norm=rms, name=name)
        # What differs from the rounded operands is bf16's rounding and numbers next to a tie.
        assert rms(ours - theirs) < 0.6 * rms(theirs - truth), name


def with_gradients(f, dy, *args):
    @jax.jit
    def both(dy, *args):
        y, pull = jax.vjp(f, *args)
        return y, *pull(dy)

    return both(dy, *args)


def check_swiglu(n, c, f, backend):
    *args, dy = arrays(n, c, f, 3)
    found = with_gradients(functools.partial(swiglu, fp8=True, implementation=backend), dy, *args)
    rounded, exact = (exact_swiglu(*args, dy, rounded) for rounded in (True, False))
    compare(found, rounded, exact, ("y", "dx", "dw_gate", "dw_up", "dw_down"))


def check_relu_squared(n, c, f, backend):
    x, w, w2, dy = arrays(n, c, f, 2)
    how = {"activation": "relu_squared", "implementation": backend, "output_major": True}
    call = lambda x, w_OI, w2: activated_mlp(x, w_OI, None, w2, **how)
    y, dx, dw_OI, dw2 = with_gradients(call, dy, x, w.T, w2)
    rounded, exact = (exact_relu_squared(x, w, w2, dy, rounded) for rounded in (True, False))
    compare((y, dx, dw_OI.T, dw2), rounded, exact, ("y", "dx", "dw", "dw2"))


def test_swiglu():
    check_swiglu(N, C, F, "xla")


def test_swiglu_in_kernels(triton_on_cpu):
    check_swiglu(N, C, F, "triton")


def test_relu_squared():
    check_relu_squared(N, C, F, "xla")


# 80 rows: the last tile is partly out of bounds.
def test_relu_squared_in_kernels(triton_on_cpu):
    check_relu_squared(80, C, F, "triton")


def test_gelu_in_kernels(triton_on_cpu):
    check_mlp((80, C, 136), "triton")


def test_not_differentiated():
    """The plain functions, on x as it is."""
    x, w, w2, _ = arrays(N, C, F, 2)
    how = {"activation": "relu_squared"}
    y = activated_mlp(x, w, None, w2, **how)
    np.testing.assert_array_equal(y, linear_relu_squared(x, w) @ w2.astype(x.dtype))
    np.testing.assert_array_equal(activated_mlp(x, w.T, None, w2, output_major=True, **how), y)
    np.testing.assert_array_equal(swiglu(x, w, w, w2, fp8=True), swiglu(x, w, w, w2))


def test_a_projection_reads_the_rows_of_a_norm():
    """As a projection that converts the rows itself."""
    x, w, _, dy = arrays(N, C, F, 2)
    dy = jnp.tile(dy, 3)[:, :F]

    def call(w, x, fused):
        rows = rms_norm(x, fp8_scale=ACTIVATION_SCALE if fused else None, out_dtype=jnp.float32)
        return linear(rows, (w[:, :30], w[:, 30:]), fp8=True)

    expected, found = (
        with_gradients(functools.partial(call, fused=fused), dy.astype(jnp.float32), w, x)
        for fused in (False, True)
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * float(jnp.abs(b).max()))


def test_switches(monkeypatch):
    """A constant scale of the weights gives nearly the same results; a projection with its bias in
    one kernel."""
    x, w, _, dy = arrays(N, C, F, 2)
    w = w.astype(jnp.bfloat16).astype(w.dtype)  # to which the other scale rounds
    call = functools.partial(linear, fp8=True)
    dy = jnp.tile(dy, 3)[:, :F]
    expected = with_gradients(call, dy, x, w, jnp.ones(F))
    monkeypatch.setattr(layers, "WEIGHT_SCALE", 32.0)
    for a, b in zip(with_gradients(call, dy, x, w, jnp.ones(F)), expected, strict=True):
        a, b = fp64(a, b)
        assert rms(a - b) < 0.01 * rms(b)

    monkeypatch.setattr(layers, "BIAS_IN_KERNEL", True)
    sizes = ((4096, 768), jnp.bfloat16), ((768, 2304), jnp.float32), ((2304,), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(*size) for size in sizes]
    f = lambda *args: jax.vjp(call, *args)[0]
    text = lower_for_h200(f, *shapes)
    assert text.count("custom_call @mosaic_gpu") == 1 and "dot_general" not in text

    # Only dW sums more than 4,096 terms.
    monkeypatch.setattr(layers, "LONG_SUMS_IN_KERNEL", True)
    f = lambda *args: jax.vjp(call, *args)[1](jnp.zeros((8192, 2304), jnp.bfloat16))
    x = jax.ShapeDtypeStruct((8192, 768), jnp.bfloat16)
    text = lower_for_h200(f, x, *shapes[1:])
    assert text.count("custom_call @mosaic_gpu") == 1 and text.count("dot_general") == 1


def test_refusals():
    x, w, w2, _ = arrays(N, C, F, 2)
    with pytest.raises(ValueError, match="swiglu: implementation 'reference' has no FP8 matmuls"):
        swiglu(x, w, w, w2, fp8=True, implementation="reference")
    with pytest.raises(ValueError, match="rms_norm: implementation 'reference' has no FP8 result"):
        rms_norm(x, fp8_scale=8.0, implementation="reference")


def test_compiled_kernels():
    gu, dh = (jax.ShapeDtypeStruct((65536, f), jnp.bfloat16) for f in (4864, 2432))
    from pallas_kernels.fp8 import triton_activation
    from pallas_kernels.gated_mlp import triton_fp8

    scale = jax.ShapeDtypeStruct((), jnp.float32)
    backward = functools.partial(triton_fp8.activated_backward, h_scale=1.0)
    (kernel,) = triton_kernels(backward, gu, dh, scale)
    assert kernel.spill_bytes == 0 and kernel.registers <= 128
    (kernel,) = triton_kernels(functools.partial(triton_fp8.activated, scale=1.0), gu)
    assert kernel.spill_bytes == 0
    u, b, q = (
        jax.ShapeDtypeStruct(*s)
        for s in (((65536, 6400), jnp.bfloat16), ((6400,), jnp.float32), ((65536, 6400), E4M3))
    )
    for activation in (GELU, RELU_SQUARED):
        how = {"activation": activation}
        forward = functools.partial(triton_activation.activated, **how)
        backward = functools.partial(triton_activation.activated_backward, bias=True, **how)
        kernels = triton_kernels(forward, u, b) + triton_kernels(backward, u, q, scale)
        assert all(kernel.spill_bytes == 0 for kernel in kernels)


# ---------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
def test_gelu_in_kernels_on_the_gpu():
    check_mlp((1024, 1600, 6400), "triton")


@pytest.mark.gpu
def test_swiglu_on_the_gpu():
    check_swiglu(2048, 768, 2432, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["mosaic", "triton", "xla"])
def test_relu_squared_on_the_gpu(backend):
    check_relu_squared(2048, 768, 3072, backend)
