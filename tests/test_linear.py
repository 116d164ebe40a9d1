"""pallas_kernels.linear, and the matmuls of `Plain` for every layout of the operands."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import lower_for_h200

from pallas_kernels import _dispatch
from pallas_kernels.gemm import Operand, Plain
from pallas_kernels.gemm.sums import sum_rows
from pallas_kernels.linear import linear

PRECISIONS = [jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGH, None]


def product(x, w, precision, dtype):
    return Plain(precision).product(Operand(x), Operand(w), dtype)


def weight_gradient(x, dy, precision):
    return Plain(precision).weight_gradient(Operand(x), Operand(dy))


def weight_and_bias_gradient(x, dy, w, precision):
    return Plain(precision).gradients(Operand(x), Operand(w), dy, bias=True)[1:]


def arrays(n, i, o, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((n, i), (i, o), (n, o))]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize(
    "n, bias, kernels",
    [(96, True, False), (96, False, False), (3, True, False), (3, True, True), (130, True, True)],
)
def test_linear_and_its_gradients(precision, n, bias, kernels, request):
    """With the kernel that reads dy once, and without."""
    if kernels:
        request.getfixturevalue("triton_on_cpu")
    x, w, dy = arrays(n, 24, 40)
    b = jnp.linspace(-1, 1, 40) if bias else None
    y, pull = jax.vjp(lambda *args: linear(*args, precision), x, w, b)
    dx, dw, db = pull(dy)
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    np.testing.assert_allclose(y, x @ w + (0 if b is None else np.asarray(b)), atol=1e-4)
    np.testing.assert_allclose(dx, dy @ w.T, atol=1e-4)
    np.testing.assert_allclose(dw, x.T @ dy, atol=1e-4)
    assert (db is None) == (b is None)
    if bias:
        np.testing.assert_allclose(db, dy.sum(0), atol=1e-4)


def test_dtypes_of_bf16():
    x, w, dy = arrays(8, 16, 24, jnp.bfloat16)
    _, pull = jax.vjp(lambda w, b: linear(x, w, b, None), w, w[0])
    assert [g.dtype for g in pull(dy)] == [jnp.bfloat16, jnp.bfloat16]
    assert product(x, w, precision=None, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert weight_gradient(x, dy, precision=None).dtype == jnp.float32


SUMS = [*((n, 7) for n in (1, 63, 192, 200)), (100, 300), (4096, 40)]


# The dtype changes loads alone.
@pytest.mark.parametrize(
    "shape, dtype",
    [*((shape, jnp.float32) for shape in SUMS), *((shape, jnp.bfloat16) for shape in SUMS[3:5])],
    ids=str,
)
@pytest.mark.parametrize("back_end", ["xla", "triton"])
def test_rows_are_summed_in_fp32(back_end, shape, dtype, request):
    if back_end == "triton":
        request.getfixturevalue("triton_on_cpu")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, *shape)), dtype)
    found = jax.vmap(sum_rows)(x)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.asarray(x, np.float64).sum(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("split", [False, True])
def test_tf32_reads_the_gradient_once_on_an_h200(monkeypatch, split):
    """Its transpose and its sum come out of one kernel, also if the compiler may split arrays over
    devices."""
    monkeypatch.setattr(_dispatch, "partitioned", lambda *arrays: split)
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16384, 64), (16384, 96), (64, 96))]

    def operations(precision):
        text = lower_for_h200(
            lambda *args: weight_and_bias_gradient(*args, precision=precision), *shapes
        )
        sums = re.findall(r"stablehlo\.reduce\(%\w+ init.*\(tensor<16384x96xf32>", text)
        return sorted(re.findall(r"custom_call @(\w+)", text)), len(sums)

    assert operations(jax.lax.Precision.HIGH) == (["transpose", "transpose"], 0)
    assert operations(jax.lax.Precision.HIGHEST) == ([], 1)


def test_tf32_sums_over_the_last_axis_of_both_operands():
    x, w, dy = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 64), (64, 96), (512, 96)))
    axes = {PRECISIONS[0]: ("[1] x [0]", "[0] x [0]"), PRECISIONS[1]: ("[1] x [1]",) * 2}
    for precision, expected in axes.items():
        forward = functools.partial(product, precision=precision, dtype=jnp.float32)
        gradient = functools.partial(weight_gradient, precision=precision)
        texts = lower_for_h200(forward, x, w), lower_for_h200(gradient, x, dy)
        found = [re.findall(r"contracting_dims = (.*?),", text) for text in texts]
        assert found == [[each] for each in expected]
