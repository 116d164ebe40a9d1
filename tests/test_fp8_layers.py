"""The layers with FP8 matmuls against fp64, compared with fp64 of operands rounded to FP8."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_tools import XLAS_DEFAULT, assert_fp8, matmuls
from kernel_tools import h200, triton_kernels
from reference.torch_gpt2 import assert_within_twice, rms

from gptjax.training.compilation import compiler_options
from pallas_kernels import (
    _dispatch,
    linear,
    linear_relu_squared,
    mlp,
    projected_attention,
    rms_norm,
    swiglu,
)
from pallas_kernels.feed_forward import activated_mlp, triton
from pallas_kernels.gated_mlp import triton as gated_mlp_triton
from pallas_kernels.gemm import E4M3, E5M2, Fp8, largest

FP8 = Fp8()
ACTIVATION_SCALE, GRADIENT_HEADROOM, DERIVATIVE_SCALE = FP8.activation_scale, FP8.headroom, 256.0
HIDDEN_SCALE = 1.0
N, C, F = 48, 32, 80  # 80: no multiple of a tile
GELU = 2 * (2 / np.pi) ** 0.5


def arrays(rows, inputs, outputs, dtype=jnp.bfloat16):
    """x, w, b, w2, and dy like x."""
    rng = np.random.default_rng(0)
    draw = lambda size, *shape: jnp.asarray(rng.standard_normal(shape) * size, jnp.float32)
    x, w, w2 = draw(1, rows, inputs), draw(0.3, inputs, outputs), draw(0.3, outputs, inputs)
    return x.astype(dtype), w, draw(0.5, outputs), w2, draw(1e-5, rows, inputs).astype(dtype)


def fp64(*args):
    return [np.asarray(a, np.float64) for a in args]


def fake(x, scale, dtype):
    q = np.clip(np.asarray(x, np.float64) * scale, -largest(dtype), largest(dtype))
    return q.astype(np.float32).astype(dtype).astype(np.float64) / scale


def power_of_two(x, dtype):
    return 2.0 ** np.floor(np.log2(largest(dtype) / np.abs(x).max()))


def own_scale(x, dtype, headroom=1):
    return fake(x, power_of_two(x * headroom, dtype), dtype)


def weight(w):
    """A weight in e4m3, which is rounded to bf16 first."""
    return own_scale(np.asarray(w, np.float32).astype(jnp.bfloat16).astype(np.float64), E4M3)


def gelu(u):
    """GELU and its derivative."""
    # Not 1/(1 + exp(-2z)): exp overflows at u = -20, and a warning fails a test.
    sigma = (1 + np.tanh(GELU / 2 * (u + 0.044715 * u**3))) / 2
    return u * sigma, sigma + u * sigma * (1 - sigma) * GELU * (1 + 3 * 0.044715 * u**2)


def exact_linear(x, w, b, dy, rounded, backend):
    """y, dx, dw and db in fp64."""
    db = dy.sum(0)
    if rounded:
        x, w = fake(x, ACTIVATION_SCALE, E4M3), weight(w)
        dy = own_scale(dy, E5M2, GRADIENT_HEADROOM)
    return x @ w + b, dy @ w.T, x.T @ dy, db


def exact_mlp(x, w, b, w2, dy, rounded, backend):
    """y, dx, dw, db and dw2 in fp64; db is the sum of du before or after it is rounded."""
    scale = power_of_two(dy * GRADIENT_HEADROOM, E5M2)
    if rounded:
        x, w, w2 = fake(x, ACTIVATION_SCALE, E4M3), weight(w), weight(w2)
        dy = fake(dy, scale, E5M2)
    y, slope = gelu(x @ w + b)
    if rounded:
        y, slope = fake(y, ACTIVATION_SCALE, E4M3), fake(slope, DERIVATIVE_SCALE, E4M3)
    du = dy @ w2.T * slope
    db = du.sum(0)
    if rounded:
        du = fake(du, scale, E5M2)
        db = du.sum(0) if backend == "mosaic" else db
    return y @ w2, du @ w.T, x.T @ du, db, y.T @ dy


def exact_swiglu(x, w_gate, w_up, w_down, dy, rounded, backend):
    """y, dx, dw_gate, dw_up and dw_down in fp64."""
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


def exact_relu_squared(x, w, w2, dy, rounded, backend):
    """y, dx, dw and dw2 in fp64."""
    scale = power_of_two(dy * GRADIENT_HEADROOM, E5M2)
    if rounded:
        x, w, w2 = fake(x, ACTIVATION_SCALE, E4M3), weight(w), weight(w2)
        dy = fake(dy, scale, E5M2)
    r = np.maximum(x @ w, 0)
    y = fake(r**2, HIDDEN_SCALE, E4M3) if rounded else r**2
    du = dy @ w2.T * 2 * (y**0.5 if rounded else r)
    du = fake(du, scale, E5M2) if rounded else du
    return y @ w2, du @ w.T, x.T @ du, y.T @ dy


def relu_squared(x, w, w2, implementation):
    how = {"activation": "relu_squared", "implementation": implementation, "output_major": True}
    how["numerics"] = "fp8"
    return activated_mlp(x, w.T, None, w2, **how)


# The function, its results in fp64, their names, and their error: at most that of rounding the
# operands, and of what differs from the rounded ones, a part of it. That is bf16's rounding (of the
# matmul's result before the bias is added, unless cuBLASLt adds the bias), sums of 14 bits, and
# numbers next to a tie. On a CPU it is 0.06 of the error for a linear layer and 0.2 to 0.3 for the
# MLP, which rounds GELU's output after bf16's rounding.
LAYERS = {
    "linear": (
        lambda x, w, b, implementation: linear(x, w, b, numerics="fp8"),
        exact_linear, ("y", "dx", "dw", "db"), 0.5,
    ),
    "mlp": (functools.partial(mlp, numerics="fp8"), exact_mlp, ("y", "dx", "dw", "db", "dw2"), 0.5),
    "swiglu": (
        functools.partial(swiglu, numerics="fp8"),
        exact_swiglu, ("y", "dx", "dw_gate", "dw_up", "dw_down"), 0.6,
    ),
    "relu_squared": (relu_squared, exact_relu_squared, ("y", "dx", "dw", "dw2"), 0.6),
}  # fmt: skip


def check(name, backend, sizes, options=None):
    """Fail unless each result is near the exact result of the rounded operands. Return the
    executable of y and all gradients."""
    f, exact, names, share = LAYERS[name]
    x, w, b, w2, dy = arrays(*sizes)
    rng = np.random.default_rng(1)
    if name == "linear":
        dy = jnp.asarray(rng.standard_normal((x.shape[0], w.shape[1])), x.dtype)
    args = {"linear": (x, w, b), "mlp": (x, w, b, w2)}.get(name)
    if args is None:  # without a bias, and with weights of a size that the width does not change
        shapes = [(sizes[1], sizes[2])] * (2 if name == "swiglu" else 1) + [(sizes[2], sizes[1])]
        draw = lambda s: jnp.asarray(rng.standard_normal(s) * 1.5 / s[0] ** 0.5, jnp.float32)
        args = (x, *map(draw, shapes))

    def run(dy, *args):
        y, pull = jax.vjp(functools.partial(f, implementation=backend), *args)
        return y, *pull(dy)

    compiled = jax.jit(run).lower(dy, *args).compile(compiler_options=options)
    found = compiled(dy, *args)
    assert found[0].dtype == found[1].dtype == x.dtype and found[2].dtype == jnp.float32
    theirs, exact = (exact(*fp64(*args, dy), rounded, backend) for rounded in (True, False))
    for label, *results in zip(names, found, theirs, exact, strict=True):
        ours, rounded, truth = fp64(*results)
        if (name, label) == ("linear", "db"):
            # A sum of bf16 numbers in fp32: nothing is rounded to FP8.
            np.testing.assert_allclose(ours, truth, rtol=1e-3, atol=1e-4)
            continue
        assert_within_twice(ours, rounded, truth, norm=rms, name=label)
        if rms(rounded - truth) > 0.01 * rms(truth):
            apart = rms(ours - rounded) / rms(rounded - truth)
            assert apart < share, f"{label}: {apart:.3g} of the error of rounding, allowed {share}"
    return compiled


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("linear", (N, C, F)),
        ("mlp", (N, C, 64)),
        ("mlp", (16, 768, 64)),  # large u
        ("swiglu", (N, C, F)),
        ("relu_squared", (N, C, F)),
    ],
)
def test_in_xla(name, sizes):
    check(name, "xla", sizes)


# 80 rows: the last tile is partly out of bounds.
@pytest.mark.parametrize(
    "name, sizes", [("mlp", (80, C, 136)), ("swiglu", (N, C, F)), ("relu_squared", (80, C, F))]
)
def test_in_kernels(triton_on_cpu, name, sizes):
    check(name, "triton", sizes)


def test_a_call_without_a_gradient_is_not_rounded():
    x, w, b, w2, _ = arrays(N, C, F)
    for f, args in ((linear, (x, w, b)), (mlp, (x, w, b, w2)), (swiglu, (x, w, w, w2))):
        np.testing.assert_array_equal(f(*args, numerics="fp8"), f(*args))
        assert (jax.vjp(functools.partial(f, numerics="fp8"), *args)[0] != f(*args)).any()
    how = {"activation": "relu_squared", "numerics": "fp8"}
    y = activated_mlp(x, w, None, w2, **how)
    np.testing.assert_array_equal(y, linear_relu_squared(x, w) @ w2.astype(x.dtype))
    np.testing.assert_array_equal(activated_mlp(x, w.T, None, w2, output_major=True, **how), y)


def normal(*shapes):
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


PLAIN_CALLS = {
    "linear": (linear, (4, 16), (16, 32), (32,)),
    "mlp": (mlp, (4, 16), (16, 32), (32,), (32, 16)),
    "swiglu": (swiglu, (4, 16), (16, 32), (16, 32), (32, 16)),
    "relu_squared": (
        functools.partial(activated_mlp, activation="relu_squared", numerics="fp8"),
        *((4, 16), (16, 32), (32,), (32, 16)),
    ),
    "projected_attention": (
        functools.partial(projected_attention, heads=2),
        *((2, 4, 16), (16, 48), (48,)),
    ),
}


@pytest.mark.parametrize("name", PLAIN_CALLS)
def test_a_call_without_a_gradient_has_the_precision_of_the_call(name):
    f, *shapes = PLAIN_CALLS[name]
    f = f if name == "relu_squared" else functools.partial(f, numerics="fp8")
    jaxpr = jax.make_jaxpr(functools.partial(f, precision="highest"))(*normal(*shapes))
    text = str(jaxpr)
    assert text.count("dot_general[") == text.count("precision=(Precision.HIGHEST") > 0


@pytest.mark.parametrize("name", ["mlp", "swiglu", "relu_squared"])
def test_a_call_without_a_gradient_uses_the_named_back_end(name, monkeypatch):
    asked, select = [], _dispatch.select

    def watched(operation, implementation="auto", **facts):
        asked.append((operation, implementation))
        return select(operation, implementation, **facts)

    monkeypatch.setattr(_dispatch, "select", watched)
    f, *shapes = PLAIN_CALLS[name]
    f = f if name == "relu_squared" else functools.partial(f, numerics="fp8")
    f(*normal(*shapes), implementation="xla")
    chosen = {implementation for operation, implementation in asked if operation != "linear"}
    assert chosen == {"xla"}


def test_mosaic_without_a_gradient():
    """JAX also traces the call without a gradient for the gradient of a jitted function."""
    shapes = ((256, 256), (256, 256), (256,), (256, 256))
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    loss = jax.jit(lambda *args: mlp(*args, numerics="fp8", implementation="mosaic").sum())
    with h200():
        jax.jit(jax.grad(loss)).trace(*args)


def test_the_choice_depends_on_all_arrays(monkeypatch):
    """The compiler may shard x and not the weights."""
    seen = []
    monkeypatch.setattr(_dispatch, "partitioned", lambda *arrays: seen.append(arrays) or False)
    args = normal((4, 16), (16, 32), (32,), (32, 16))
    mlp(*args, numerics="fp8", implementation="xla")
    assert len(jax.tree.leaves(seen[0])) == len(args)


def test_several_matrices_side_by_side():
    x, w, *_ = arrays(N, C, 64)
    f = functools.partial(linear, numerics="fp8")
    parts = (w[:, :24], w[:, 24:])
    y, pull = jax.vjp(lambda x, w: f(x, w), x, w)
    y_of_parts, pull_parts = jax.vjp(lambda x, w: f(x, w), x, parts)
    np.testing.assert_array_equal(y_of_parts, y)
    dx, dw = pull(y)
    dx_of_parts, dws = pull_parts(y)
    np.testing.assert_array_equal(dx_of_parts, dx)
    np.testing.assert_array_equal(jnp.concatenate(dws, axis=1), dw)


def test_projected_attention():
    """Its projection is `linear`."""
    x, w, b, *_ = arrays(32, 16, 48)
    x = x.reshape(2, 16, 16)
    call = lambda **how: jax.vjp(lambda *a: projected_attention(*a, heads=2, **how), x, w, b)
    y, pull = call(numerics="fp8")
    plain, pull_plain = call()
    assert 0 < rms(np.asarray(y - plain, np.float64)) < 0.1 * rms(np.asarray(plain, np.float64))
    for a, b in zip(pull(plain), pull_plain(plain), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert rms(a - b) < 0.2 * rms(b)


def test_gradients_of_any_size():
    """The scale of a gradient follows it: 2⁻⁴⁰ times the gradient has the same bits."""
    x, w, *_ = arrays(N, C, 64)
    y, pull = jax.vjp(functools.partial(linear, numerics="fp8"), x, w)
    for a, b in zip(pull(y * 2.0**-40), pull(y), strict=True):
        np.testing.assert_array_equal(a * 2.0**40, b)


def test_the_scale_of_a_gradient_is_from_some_columns_of_every_row():
    dy = jnp.zeros((4, 512)).at[2, 260].set(3.0).at[1, 100].set(170.0)
    q = FP8.gradient(dy)
    scale = q.scale.value
    assert scale == 2.0**8  # 57344/(3·64) = 298
    np.testing.assert_array_equal(q.rows.astype(jnp.float32) / scale, dy.at[1, 100].set(160.0))
    # 64 times the largest of the sample is still in range; more is clipped.
    q = FP8.gradient(dy.at[1, 100].set(500.0))
    assert q.rows.astype(jnp.float32)[1, 100] / q.scale.value == 224


def with_gradients(f, dy, *args):
    @jax.jit
    def both(dy, *args):
        y, pull = jax.vjp(f, *args)
        return y, *pull(dy)

    return both(dy, *args)


def test_a_projection_reads_the_rows_of_a_norm():
    """As a projection that converts the rows itself."""
    x, w, *_, dy = arrays(N, C, F)
    dy = jnp.tile(dy, 3)[:, :F]

    def call(w, x, fused):
        rows = rms_norm(x, numerics="fp8" if fused else None, out_dtype=jnp.float32)
        return linear(rows, (w[:, :30], w[:, 30:]), numerics="fp8")

    expected, found = (
        with_gradients(functools.partial(call, fused=fused), dy.astype(jnp.float32), w, x)
        for fused in (False, True)
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * float(jnp.abs(b).max()))


def test_refusals():
    x, w, _, w2, _ = arrays(N, C, F)
    with pytest.raises(ValueError, match="swiglu: implementation 'reference' has no fp8 matmuls"):
        swiglu(x, w, w, w2, numerics="fp8", implementation="reference")
    with pytest.raises(ValueError, match="rms_norm: implementation 'reference' has no fp8 matmuls"):
        rms_norm(x, numerics="fp8", implementation="reference")


def test_compiled_kernels():
    array = lambda columns, dtype: jax.ShapeDtypeStruct((65536, columns), dtype)
    x, scale = array(2432, jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.float32)
    silu = {"stored": FP8.hidden_format("silu", jnp.bfloat16)}
    backward = functools.partial(gated_mlp_triton.activated_backward, **silu)
    forward = functools.partial(gated_mlp_triton.activated, **silu)
    kernels = triton_kernels(backward, array(4864, jnp.bfloat16), x, scale)
    assert kernels[0].registers <= 128
    kernels += triton_kernels(forward, array(4864, jnp.bfloat16))
    u, b, q = (
        array(6400, jnp.bfloat16),
        jax.ShapeDtypeStruct((6400,), jnp.float32),
        array(6400, E4M3),
    )
    for activation in ("gelu", "relu_squared"):
        how = {"activation": activation, "stored": FP8.hidden_format(activation, jnp.bfloat16)}
        kernels += triton_kernels(functools.partial(triton.activated_pass, **how), u, b)
        kernels += triton_kernels(
            functools.partial(triton.gradient, again=False, **how), u, q, b, scale
        )
    assert all(kernel.spill_bytes == 0 for kernel in kernels)


# ---------------------------------------------------------------------------------------------- GPU


def transposes(compiled):
    r"""The instructions with which XLA transposes FP8 operands.

    A pattern that begins with \S+ is tried from every character of a Mosaic kernel's text, and did
    not end in five minutes.
    """
    return re.findall(r" = f8e\S+ transpose\(", compiled.as_text())


def test_transposes_beside_the_text_of_a_kernel():
    text = " x = f8e5m2[2,3] transpose(y)\n kernel = " + "a" * 500_000
    assert len(transposes(types.SimpleNamespace(as_text=lambda: text))) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, backend, sizes",
    [
        ("mlp", "triton", (1024, 1600, 6400)),
        ("swiglu", "triton", (2048, 768, 2432)),
        *(("relu_squared", backend, (2048, 768, 3072)) for backend in ("mosaic", "triton", "xla")),
    ],
)
def test_on_the_gpu(name, backend, sizes):
    check(name, backend, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["mosaic", "xla"])
def test_mlp_on_the_gpu(backend):
    """Six FP8 matmuls; two of them are Mosaic kernels."""
    compiled = check("mlp", backend, (2048, 768, 3072), compiler_options())
    assert_fp8(compiled, 4 if backend == "mosaic" else 6)
    assert not (found := transposes(compiled)), f"XLA transposes operands: {found}"


@pytest.mark.gpu
def test_linear_on_the_gpu():
    """Three FP8 matmuls in cuBLASLt, no other, no transpose by XLA. The matmul's result is rounded
    after cuBLASLt adds the bias."""
    compiled = check("linear", "xla", (2048, 768, 2304), compiler_options())
    assert_fp8(compiled, 3)
    assert not (found := transposes(compiled)), f"XLA transposes operands: {found}"
    epilogues = re.findall(r'"epilogue":"(\w+)"', compiled.as_text())
    assert sorted(epilogues) == ["BIAS", "DEFAULT", "DEFAULT"], (
        f"epilogues {epilogues} of {matmuls(compiled)}"
    )


@pytest.mark.gpu
def test_linear_with_xlas_default_options():
    """Matmuls that XLA compiles with Triton have FP8 operands too."""
    assert_fp8(check("linear", "xla", (2048, 768, 2304), XLAS_DEFAULT), 3, cublaslt=False)
