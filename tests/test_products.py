"""pallas_kernels.products: the same numbers in every order of operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernel_tools import lower_for_h200
from pallas_kernels.products import product, sum_rows, weight_gradient

PRECISIONS = [jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGH, None]


def arrays(n, i, o, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((n, i), (i, o), (n, o))]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("n", [3, 96])
def test_products_are_those_of_numpy(n, precision):
    x, w, dy = arrays(n, 24, 40)
    np.testing.assert_allclose(product(x, w, precision=precision, dtype=jnp.float32), np.asarray(x) @ w, atol=1e-4)
    np.testing.assert_allclose(weight_gradient(x, dy, precision=precision), np.asarray(x).T @ dy, atol=1e-4)


def test_bf16_comes_out_in_the_dtype_asked_for():
    x, w, dy = arrays(8, 16, 24, jnp.bfloat16)
    assert product(x, w, precision=None, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert weight_gradient(x, dy, precision=None).dtype == jnp.float32


@pytest.mark.parametrize("n", [1, 63, 64, 192, 200])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_are_summed_in_fp32(n, dtype):
    x = arrays(n, 5, 7, dtype)[2]
    found = sum_rows(x)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.asarray(x, np.float64).sum(0), rtol=1e-5, atol=1e-5)


def test_tf32_sums_over_the_last_axis_of_both_operands():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 64), (64, 96), (512, 96))]

    def contracted(precision):
        how = {"precision": precision}
        text = lower_for_h200(
            lambda x, w, dy: (product(x, w, dtype=jnp.float32, **how), weight_gradient(x, dy, **how)), *shapes
        )
        return [
            line.split("contracting_dims = ")[1].split(",")[0] for line in text.splitlines() if "dot_general" in line
        ]

    assert contracted(jax.lax.Precision.HIGH) == ["[1] x [1]", "[1] x [1]"]
    assert contracted(jax.lax.Precision.HIGHEST) == ["[1] x [0]", "[1] x [0]"]
