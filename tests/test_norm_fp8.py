"""layer_norm that stores FP8: the rows of a conversion of y, in every back end."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import triton_kernels

from pallas_kernels import layer_norm, mlp
from pallas_kernels.gemm import E4M3, Fp8, Operand, quantize

SCALE = Fp8().activation_scale


@pytest.fixture(params=["xla", "triton"])
def backend(request):
    if request.param == "triton":
        request.getfixturevalue("triton_on_cpu")
    return request.param


def inputs(n=36, c=48, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    rows = [jnp.asarray(rng.standard_normal((2, n // 2, c)), dtype) for _ in range(2)]
    vectors = [jnp.asarray(rng.standard_normal(c), jnp.float32) for _ in range(3)]
    # One gain is so large that the conversion clips.
    return *rows, vectors[0].at[3].set(90.0), *vectors[1:]


def norm(x, residual, scale, bias, residual_bias, **how):
    return layer_norm(x, scale, bias, residual=residual, residual_bias=residual_bias, **how)


def check(backend, n, c):
    args = inputs(n, c)
    f = functools.partial(norm, implementation=backend)
    y, total = jax.jit(f)(*args)
    fp32 = f(*args, out_dtype=jnp.float32)[0].reshape(n, c)
    expected = quantize(fp32, SCALE, E4M3, implementation="xla").rows.astype(jnp.float32)

    # Not differentiated, y is not rounded.
    plain, same_total = jax.jit(functools.partial(f, numerics="fp8"))(*args)
    np.testing.assert_array_equal(plain.exact, y)
    np.testing.assert_array_equal(same_total, total)

    @jax.jit
    def differentiated(*args):
        out, pull = jax.vjp(functools.partial(f, numerics="fp8"), *args)
        zeros = jax.tree.map(jnp.zeros_like, out)
        return out, pull((dataclasses.replace(zeros[0], exact=y), total))

    (rows, new_total), grads = differentiated(*args)
    assert isinstance(rows, Operand) and rows.rows.dtype == rows.k_major.dtype == E4M3
    np.testing.assert_array_equal(new_total, total)
    np.testing.assert_array_equal(rows.rows.astype(jnp.float32), expected)
    np.testing.assert_array_equal(rows.k_major.astype(jnp.float32), expected.T)
    np.testing.assert_array_equal(rows.exact.reshape(n, c).astype(jnp.float32), expected / SCALE)
    assert float(expected.max()) == 448
    for ours, theirs in zip(
        grads, jax.jit(lambda *a: jax.vjp(f, *a)[1]((y, total)))(*args), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_rows(backend):
    check(backend, 36, 48)


def test_no_rows(backend):
    args = [a[:, :0] if a.ndim > 1 else a for a in inputs()]
    y, _ = norm(*args, numerics="fp8", implementation=backend)
    assert (y.exact.shape, y.rows.shape, y.k_major.shape) == ((2, 0, 48), (0, 48), (48, 0))


def test_a_layer_reads_the_rows():
    """As it would convert y itself."""
    x, _, scale, bias, _ = inputs()
    rng = np.random.default_rng(1)
    w, w2 = (jnp.asarray(rng.standard_normal(s) * 0.2, jnp.float32) for s in ((48, 64), (64, 48)))
    b = jnp.zeros(64)

    def loss(numerics, x, w, w2):
        y = layer_norm(x, scale.at[3].set(1.0), bias, numerics=numerics)
        return (mlp(y, w, b, w2, numerics="fp8").astype(jnp.float32) ** 2).sum()

    fused, separate = (
        jax.jit(jax.value_and_grad(functools.partial(loss, s), (0, 1, 2)))(x, w, w2)
        for s in ("fp8", None)
    )
    # y is rounded to bf16 before it is converted; the results differ where that crosses a tie.
    for a, b in zip(jax.tree.leaves(fused), jax.tree.leaves(separate), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) < 0.06 * np.linalg.norm(b), np.linalg.norm(
            a - b
        ) / np.linalg.norm(b)


def test_a_frozen_norm():
    """A layer whose norm is not differentiated reads the same rows."""
    x, _, scale, bias, _ = inputs()
    w = jnp.asarray(np.random.default_rng(1).standard_normal((48, 64)) * 0.2, jnp.float32)
    b, w2 = jnp.zeros(64), jnp.ones((64, 48)) * 0.1

    def loss(w, x):
        y = layer_norm(x, scale.at[3].set(1.0), bias, numerics="fp8")
        return (mlp(y, w, b, w2, numerics="fp8").astype(jnp.float32) ** 2).sum()

    alone, both = jax.grad(loss)(w, x), jax.grad(loss, (0, 1))(w, x)[0]
    assert np.linalg.norm(alone - both) < 0.02 * np.linalg.norm(both) > 0


def test_errors():
    x, _, scale, bias, _ = inputs()
    with pytest.raises(ValueError, match="'reference' has no fp8 matmuls"):
        layer_norm(x, scale, bias, numerics="fp8", implementation="reference")


def test_compiled_code():
    x, p = (
        jax.ShapeDtypeStruct((65536, 768), jnp.bfloat16),
        jax.ShapeDtypeStruct((768,), jnp.float32),
    )
    f = functools.partial(norm, implementation="triton", numerics="fp8")
    kernels = triton_kernels(lambda *a: jax.vjp(f, *a)[0], x, x, p, p, p)
    (kernel,) = [k for k in kernels if k.name == "norm_forward"]
    assert kernel.spill_bytes == 0 and "cvt.rn.satfinite.e4m3x2.f32" in kernel.ptx


@pytest.mark.gpu
def test_on_the_gpu():
    check("triton", 4096, 768)
