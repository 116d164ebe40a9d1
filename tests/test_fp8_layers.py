"""pallas_kernels.fp8.layers against fp64, compared with fp64 of operands rounded to FP8."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_tools import XLAS_DEFAULT, assert_fp8, matmuls
from kernel_tools import h200
from reference.torch_gpt2 import assert_within_twice, rms

from gptjax.training.compilation import compiler_options
from pallas_kernels import _dispatch, linear, mlp, projected_attention, swiglu
from pallas_kernels.fp8 import E4M3, E5M2, largest
from pallas_kernels.fp8.activations import DERIVATIVE_SCALE
from pallas_kernels.fp8.layers import (
    ACTIVATION_SCALE,
    GRADIENT_HEADROOM,
    activated_mlp,
    quantized_gradient,
)

N, I, O = 48, 32, 64  # noqa: E741  the names of the shapes
GELU = 2 * (2 / np.pi) ** 0.5


def arrays(rows, inputs, outputs, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs))
    w, w2 = (rng.standard_normal(shape) * 0.3 for shape in ((inputs, outputs), (outputs, inputs)))
    b = rng.standard_normal(outputs) * 0.5
    dy = rng.standard_normal((rows, inputs)) * 1e-5
    fp32 = [jnp.asarray(a, jnp.float32) for a in (w, b, w2)]
    return jnp.asarray(x, dtype), *fp32, jnp.asarray(dy, dtype)


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


def exact_linear(x, w, b, dy, rounded):
    """y, dx, dw and db in fp64."""
    x, w, b, dy = (np.asarray(a, np.float64) for a in (x, w, b, dy))
    db = dy.sum(0)
    if rounded:
        x, w, dy = (
            fake(x, ACTIVATION_SCALE, E4M3),
            weight(w),
            own_scale(dy, E5M2, GRADIENT_HEADROOM),
        )
    return x @ w + b, dy @ w.T, x.T @ dy, db


def exact_mlp(x, w, b, w2, dy, rounded, sums_rounded):
    """y, dx, dw, db and dw2 in fp64; db is the sum of du before or after it is rounded."""
    x, w, b, w2, dy = (np.asarray(a, np.float64) for a in (x, w, b, w2, dy))
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
        db = du.sum(0) if sums_rounded else db
    return y @ w2, du @ w.T, x.T @ du, db, y.T @ dy


def compare(found, rounded, exact, names):
    """Fail unless each result is near the exact result of the rounded operands.

    The error is at most twice that of rounding the operands. Results are nearer to the rounded ones
    than those to the truth: what differs is bf16's rounding (of the matmul's result before the
    bias is added, unless cuBLASLt adds the bias), sums of 14 bits, and numbers next to a tie. On a
    CPU, the difference is 0.06 of the error for a linear layer and 0.2 to 0.3 for the MLP, which
    rounds GELU's output after bf16's rounding.
    """
    for name, *results in zip(names, found, rounded, exact, strict=True):
        ours, theirs, truth = (np.asarray(a, np.float64) for a in results)
        assert_within_twice(ours, theirs, truth, norm=rms, name=name)
        if rms(theirs - truth) > 0.01 * rms(truth):
            apart = rms(ours - theirs) / rms(theirs - truth)
            assert apart < 0.5, f"{name}: {apart:.3g} of the error of rounding, allowed 0.5"


def check_linear(sizes, options=None):
    """Compare with `exact_linear`. Return the executable of y, dx, dw and db."""
    x, w, b, w2, _ = arrays(*sizes)
    dy = jnp.asarray(np.random.default_rng(1).standard_normal((x.shape[0], w.shape[1])), x.dtype)

    def f(x, w, b, dy):
        y, pull = jax.vjp(functools.partial(linear, fp8=True), x, w, b)
        return y, *pull(dy)

    compiled = jax.jit(f).lower(x, w, b, dy).compile(compiler_options=options)
    plain, right = (exact_linear(x, w, b, dy, rounded) for rounded in (True, False))
    # db is a sum of bf16 numbers in fp32: nothing is rounded to FP8.
    *found, db = compiled(x, w, b, dy)
    compare(found, plain[:3], right[:3], ("y", "dx", "dw"))
    np.testing.assert_allclose(db, right[3], rtol=1e-3, atol=1e-4)
    assert found[0].dtype == found[1].dtype == x.dtype and found[2].dtype == jnp.float32
    return compiled


def check_mlp(sizes, backend, options=None):
    """Compare with `exact_mlp`. Return the executable of y and all gradients."""
    *args, dy = arrays(*sizes)

    def f(dy, *args):
        y, pull = jax.vjp(functools.partial(mlp, fp8=True, implementation=backend), *args)
        return y, *pull(dy)

    compiled = jax.jit(f).lower(dy, *args).compile(compiler_options=options)
    plain, right = (exact_mlp(*args, dy, rounded, backend == "mosaic") for rounded in (True, False))
    compare(compiled(dy, *args), plain, right, ("y", "dx", "dw", "db", "dw2"))
    return compiled


def test_linear():
    check_linear((N, I, O))


@pytest.mark.parametrize("sizes", [(N, I, O), (16, 768, 64)], ids=["small", "large u"])
def test_mlp(sizes):
    check_mlp(sizes, "xla")


def test_a_call_without_a_gradient_is_not_rounded():
    x, w, b, w2, _ = arrays(N, I, O)
    for f, args in ((linear, (x, w, b)), (mlp, (x, w, b, w2))):
        np.testing.assert_array_equal(f(*args, fp8=True), f(*args))
        assert (jax.vjp(functools.partial(f, fp8=True), *args)[0] != f(*args)).any()


def normal(*shapes):
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


PLAIN_CALLS = {
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


@pytest.mark.parametrize("name", PLAIN_CALLS)
def test_a_call_without_a_gradient_has_the_precision_of_the_call(name):
    f, *shapes = PLAIN_CALLS[name]
    f = f if name == "relu_squared" else functools.partial(f, fp8=True)
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
    f = f if name == "relu_squared" else functools.partial(f, fp8=True)
    f(*normal(*shapes), implementation="xla")
    chosen = {implementation for operation, implementation in asked if operation != "linear"}
    assert chosen == {"xla"}


def test_mosaic_without_a_gradient():
    """JAX also traces the call without a gradient for the gradient of a jitted function."""
    shapes = ((256, 256), (256, 256), (256,), (256, 256))
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    loss = jax.jit(lambda *args: mlp(*args, fp8=True, implementation="mosaic").sum())
    with h200():
        jax.jit(jax.grad(loss)).trace(*args)


def test_the_choice_depends_on_all_arrays(monkeypatch):
    """The compiler may shard x and not the weights."""
    seen = []
    monkeypatch.setattr(_dispatch, "partitioned", lambda *arrays: seen.append(arrays) or False)
    args = normal((4, 16), (16, 32), (32,), (32, 16))
    mlp(*args, fp8=True, implementation="xla")
    assert len(jax.tree.leaves(seen[0])) == len(args)


def test_several_matrices_side_by_side():
    x, w, *_ = arrays(N, I, O)
    f = functools.partial(linear, fp8=True)
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
    y, pull = call(fp8=True)
    plain, pull_plain = call()
    assert 0 < rms(np.asarray(y - plain, np.float64)) < 0.1 * rms(np.asarray(plain, np.float64))
    for a, b in zip(pull(plain), pull_plain(plain), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert rms(a - b) < 0.2 * rms(b)


def test_gradients_of_any_size():
    """The scale of a gradient follows it: 2⁻⁴⁰ times the gradient has the same bits."""
    x, w, *_ = arrays(N, I, O)
    y, pull = jax.vjp(functools.partial(linear, fp8=True), x, w)
    for a, b in zip(pull(y * 2.0**-40), pull(y), strict=True):
        np.testing.assert_array_equal(a * 2.0**40, b)


def test_the_scale_of_a_gradient_is_from_some_columns_of_every_row():
    dy = jnp.zeros((4, 512)).at[2, 260].set(3.0).at[1, 100].set(170.0)
    q, scale = quantized_gradient(dy)
    assert scale == 2.0**8  # 57344/(3·64) = 298
    np.testing.assert_array_equal(q.rows.astype(jnp.float32) / scale, dy.at[1, 100].set(160.0))
    # 64 times the largest of the sample is still in range; more is clipped.
    q, scale = quantized_gradient(dy.at[1, 100].set(500.0))
    assert q.rows.astype(jnp.float32)[1, 100] / scale == 224


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
@pytest.mark.parametrize("backend", ["mosaic", "xla"])
def test_mlp_on_the_gpu(backend):
    """Six FP8 matmuls; two of them are Mosaic kernels."""
    compiled = check_mlp((2048, 768, 3072), backend, compiler_options())
    assert_fp8(compiled, 4 if backend == "mosaic" else 6)
    assert not (found := transposes(compiled)), f"XLA transposes operands: {found}"


@pytest.mark.gpu
def test_linear_on_the_gpu():
    """Three FP8 matmuls in cuBLASLt, no other, no transpose by XLA. The matmul's result is rounded
    after cuBLASLt adds the bias."""
    compiled = check_linear((2048, 768, 2304), compiler_options())
    assert_fp8(compiled, 3)
    assert not (found := transposes(compiled)), f"XLA transposes operands: {found}"
    epilogues = re.findall(r'"epilogue":"(\w+)"', compiled.as_text())
    assert sorted(epilogues) == ["BIAS", "DEFAULT", "DEFAULT"], (
        f"epilogues {epilogues} of {matmuls(compiled)}"
    )


@pytest.mark.gpu
def test_linear_with_xlas_default_options():
    """Matmuls that XLA compiles with Triton have FP8 operands too."""
    assert_fp8(check_linear((2048, 768, 2304), XLAS_DEFAULT), 3, cublaslt=False)
