"""The layers with FP8 matmuls against fp64, compared with fp64 of operands rounded to FP8."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison_tools import assert_within_twice, rms
from fp8_tools import XLAS_DEFAULT, assert_fp8, fake, matmuls, power_of_two
from kernel_tools import h200, on_gpu, triton_kernels

from gptjax.training.compilation import compiler_options
from pallas_kernels import _dispatch, linear, linear_relu_squared, mlp, projected_attention, swiglu
from pallas_kernels.feed_forward import activated_mlp, triton
from pallas_kernels.gated_mlp import triton as gated_mlp_triton
from pallas_kernels.gemm import E4M3, E5M2, Fp8, mosaic

FP8 = Fp8()
N, C, F = 48, 32, 80  # 80: no multiple of a tile
GELU = 2 * (2 / np.pi) ** 0.5


# Each activation in fp64: a(u), which `e4m3` rounds, and the function from its gradient to du.


def gelu(u, e4m3):
    # Not 1/(1 + exp(-2z)): exp overflows at u = -20, and a warning fails a test.
    sigma = (1 + np.tanh(GELU / 2 * (u + 0.044715 * u**3))) / 2
    slope = e4m3(sigma + u * sigma * (1 - sigma) * GELU * (1 + 3 * 0.044715 * u**2), 256.0)
    return e4m3(u * sigma, FP8.activation_scale), lambda dh: dh * slope


def relu_squared(u, e4m3):
    y = e4m3(np.maximum(u, 0) ** 2, 1.0)
    return y, lambda dh: dh * 2 * np.sqrt(y)


def silu(gu, e4m3):
    g, u = np.split(gu, 2, axis=1)
    s = 1 / (1 + np.exp(-g))
    both = lambda dh: np.concatenate([dh * u * s * (1 + g * (1 - s)), dh * g * s], 1)
    return e4m3(g * s * u, 1.0), both


def exact(activation, x, ws, b, w2, dy, rounded, backend):
    """Return y, dx, dws, db and dw2 in fp64, of a(x w + b) w2 or x w + b.

    Args:
        rounded: whether operands are rounded to FP8.
    """
    scale = power_of_two(dy * FP8.headroom, E5M2)
    e4m3 = lambda x, scale: fake(x, scale, E4M3) if rounded else x
    e5m2 = lambda x: fake(x, scale, E5M2) if rounded else x

    def weight(w):
        bf16 = np.asarray(w, np.float32).astype(jnp.bfloat16).astype(np.float64)
        return fake(bf16, power_of_two(bf16, E4M3), E4M3) if rounded else w

    ends = np.cumsum([w.shape[1] for w in ws])[:-1]
    x, w = e4m3(x, FP8.activation_scale), weight(np.concatenate(ws, 1))
    u, dw2 = x @ w + b, []
    du, db, dy = dy, dy.sum(0), e5m2(dy)
    if activation is not None:
        w2 = weight(w2)
        h, pull = activation(u, e4m3)
        du, dw2 = pull(dy @ w2.T), [h.T @ dy]
        db = (e5m2(du) if backend == "mosaic" else du).sum(0)
        u = h @ w2
    du = e5m2(du)
    return u, du @ w.T, *np.split(x.T @ du, ends, axis=1), db, *dw2


# The function of x, weights and bias, its activation in fp64, and its error: at most that of
# rounding the operands, and of what differs from the rounded ones, a part of it. That is bf16's
# rounding (of the matmul's result before the bias is added, unless cuBLASLt adds the bias), sums of
# 14 bits, and numbers next to a tie. On a CPU it is 0.06 of the error for a linear layer and 0.2 to
# 0.3 for the MLP, which rounds GELU's output after bf16's rounding.
squared = functools.partial(activated_mlp, activation="relu_squared", output_major=True)
LAYERS = {
    "linear": (lambda x, w, b, w2, **how: linear(x, w, b, **how), None, 0.5),
    "mlp": (mlp, gelu, 0.5),
    "swiglu": (lambda x, g, u, b, w2, **how: swiglu(x, g, u, w2, **how), silu, 0.6),
    "relu_squared": (
        lambda x, w, b, w2, **how: squared(x, w.T, None, w2, **how), relu_squared, 0.6
    ),
}  # fmt: skip


BIASED, KERNELS = ("linear", "mlp"), ("mosaic", "triton")


@pytest.fixture
def small_tiles(request, monkeypatch):
    """On a CPU, tiles of Mosaic's kernels that it can go through."""
    if "gpu" not in request.keywords:
        small = mosaic.Tiles(rows=64, columns=64, stages=2, cluster=1, slots=1, group=1)
        pairs = dataclasses.replace(small, cluster=2, group=2)
        monkeypatch.setattr(mosaic, "TILES_8", (pairs, small))


def arrays(name, rows, inputs, outputs):
    """Return dy, x, weights, b and w2."""
    rng = np.random.default_rng(0)
    draw = lambda size, *shape: jnp.asarray(rng.standard_normal(shape) * size, jnp.float32)
    # Without a bias, the sizes of the results do not change with the width.
    sizes = (0.3, 0.3) if name in BIASED else (1.5 * inputs**-0.5, 1.5 * outputs**-0.5)
    ws = [draw(sizes[0], inputs, outputs) for _ in range(2 if name == "swiglu" else 1)]
    b, w2 = draw(0.5, outputs * len(ws)), draw(sizes[1], outputs, inputs)
    dy = draw(1.0, rows, outputs) if name == "linear" else draw(1e-5, rows, inputs)
    return dy.astype(jnp.bfloat16), draw(1, rows, inputs).astype(jnp.bfloat16), *ws, b, w2


def fp64(*args):
    return [np.asarray(a, np.float64) for a in args]


def check(name, backend, sizes, options=None):
    """Fail unless each result is near the exact result of the rounded operands. Return the
    executable of y and all gradients."""
    f, activation, share = LAYERS[name]
    dy, x, *ws, b, w2 = args = arrays(name, *sizes)

    def run(dy, *args):
        y, pull = jax.vjp(functools.partial(f, numerics="fp8", implementation=backend), *args)
        return y, *pull(dy)

    compiled = jax.jit(run).lower(*args).compile(compiler_options=options)
    found = compiled(*args)
    assert found[0].dtype == found[1].dtype == x.dtype and found[2].dtype == jnp.float32
    dy, x, *ws, b, w2 = fp64(*args)
    b = b if name in BIASED else 0
    theirs, truths = (
        exact(activation, x, ws, b, w2, dy, rounded, backend) for rounded in (True, False)
    )
    labels = "y", "dx", *["dw"] * len(ws), "db", "dw2"
    for label, *results in zip(labels, found, theirs, truths, strict=name != "linear"):
        ours, rounded, truth = fp64(*results)
        if label == "db" and name not in BIASED:
            continue
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
    "name, back_end, sizes",
    [
        ("linear", "xla", (N, C, F)),
        ("mlp", "xla", (N, C, 64)),
        ("mlp", "xla", (16, 768, 64)),  # large u
        ("swiglu", "xla", (N, C, F)),
        ("relu_squared", "xla", (N, C, F)),
        ("mlp", "triton", (80, C, 136)),  # the last tile is partly out of bounds
        ("swiglu", "triton", (N, C, F)),
        ("relu_squared", "triton", (80, C, F)),
        # One warpgroup with a tile each; pairs of thread blocks that share weights.
        ("mlp", "mosaic", (128, 128, 64)),
        ("mlp", "mosaic", (384, 128, 192)),
        ("relu_squared", "mosaic", (128, 256, 64)),
        ("relu_squared", "mosaic", (384, 128, 192)),
        *on_gpu(
            # The sizes of GPT-2 XL, with numbers that are clipped; and of GPT-2 774M, whose last
            # tile is cut.
            *(("mlp", back_end, (1024, 1600, 6400)) for back_end in KERNELS),
            *((name, "mosaic", (4096, 1280, 5120)) for name in ("mlp", "relu_squared")),
            *((name, "mosaic", (512, 1536, 768)) for name in ("mlp", "relu_squared")),
            *(("swiglu", back_end, (2048, 768, 2432)) for back_end in KERNELS),
            *(("relu_squared", back_end, (2048, 768, 3072)) for back_end in (*KERNELS, "xla")),
        ),
    ],
)
def test_output_and_gradients(interpreter, small_tiles, name, back_end, sizes):
    check(name, back_end, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, back_end, sizes, fp8_matmuls",
    [
        ("mlp", "mosaic", (2048, 768, 3072), 4),  # two of the six are Mosaic kernels
        ("mlp", "xla", (2048, 768, 3072), 6),
        ("linear", "xla", (2048, 768, 2304), 3),
    ],
)
def test_matmuls_of_cublaslt_on_the_gpu(name, back_end, sizes, fp8_matmuls):
    """FP8 matmuls in cuBLASLt, no other, no transpose by XLA. The result of linear's matmul is
    rounded after cuBLASLt adds the bias. With XLA's default options linear's matmuls, which may be
    Triton's, have FP8 operands too."""
    compiled = check(name, back_end, sizes, compiler_options())
    assert_fp8(compiled, fp8_matmuls)
    # A pattern that begins with \S+ would be tried from every character of a Mosaic kernel's text.
    transposes = re.findall(r" = f8e\S+ transpose\(", compiled.as_text())
    assert not transposes, f"XLA transposes operands: {transposes}"
    if name == "linear":
        epilogues = re.findall(r'"epilogue":"(\w+)"', compiled.as_text())
        assert sorted(epilogues) == ["BIAS", "DEFAULT", "DEFAULT"], matmuls(compiled)
        assert_fp8(check(name, back_end, sizes, XLAS_DEFAULT), fp8_matmuls, cublaslt=False)


# ----------------------------------------------------------------- calls without a gradient


def normal(*shapes):
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


CALLS = {
    "linear": (linear, (4, 16), (16, 32), (32,)),
    "mlp": (mlp, (4, 16), (16, 32), (32,), (32, 16)),
    "swiglu": (swiglu, (4, 16), (16, 32), (16, 32), (32, 16)),
    "relu_squared": (
        functools.partial(activated_mlp, activation="relu_squared"),
        *((4, 16), (16, 32), (32,), (32, 16)),
    ),
    "projected_attention": (
        functools.partial(projected_attention, heads=2),
        *((2, 4, 16), (16, 48), (48,)),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_without_a_gradient(name, monkeypatch):
    """It is not rounded, and has the precision and the back end of the call. The choice of the back
    end depends on all arrays: the compiler may shard x and not the weights."""
    (f, *shapes), seen, asked, select = CALLS[name], [], [], _dispatch.select
    args, call = normal(*shapes), functools.partial(f, numerics="fp8")
    np.testing.assert_array_equal(call(*args), f(*args))
    assert (jax.vjp(call, *args)[0] != f(*args)).any()
    text = str(jax.make_jaxpr(functools.partial(call, precision="highest"))(*args))
    assert text.count("dot_general[") == text.count("precision=(Precision.HIGHEST") > 0

    def watched(operation, implementation="auto", **facts):
        asked.append((operation, implementation))
        return select(operation, implementation, **facts)

    monkeypatch.setattr(_dispatch, "select", watched)
    monkeypatch.setattr(_dispatch, "devices_of", lambda *arrays: seen.append(arrays) or 1)
    call(*args, implementation="xla")
    assert len(jax.tree.leaves(seen[0])) == len(args)
    if name != "projected_attention":  # the projection has its own choice
        others = {name for operation, name in asked if operation != "linear"}
        assert others == ({"xla"} if name != "linear" else set())


def test_output_major_without_a_gradient():
    x, w, w2 = normal((4, 16), (16, 32), (32, 16))
    x, how = x.astype(jnp.bfloat16), {"activation": "relu_squared", "numerics": "fp8"}
    y = activated_mlp(x, w, None, w2, **how)
    np.testing.assert_array_equal(y, linear_relu_squared(x, w) @ w2.astype(x.dtype))
    np.testing.assert_array_equal(activated_mlp(x, w.T, None, w2, output_major=True, **how), y)


def test_mosaic_without_a_gradient():
    """JAX also traces the call without a gradient for the gradient of a jitted function."""
    shapes = ((256, 256), (256, 256), (256,), (256, 256))
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    loss = jax.jit(lambda *args: mlp(*args, numerics="fp8", implementation="mosaic").sum())
    with h200():
        jax.jit(jax.grad(loss)).trace(*args)


def test_the_scale_of_a_gradient_is_from_some_columns_of_every_row():
    dy = jnp.zeros((4, 512)).at[2, 260].set(3.0).at[1, 100].set(170.0)
    q = FP8.gradient(dy)
    scale = q.scale.value
    assert scale == 2.0**8  # 57344/(3·64) = 298
    np.testing.assert_array_equal(q.rows.astype(jnp.float32) / scale, dy.at[1, 100].set(160.0))
    # 64 times the largest of the sample is still in range; more is clipped.
    q = FP8.gradient(dy.at[1, 100].set(500.0))
    assert q.rows.astype(jnp.float32)[1, 100] / q.scale.value == 224


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
