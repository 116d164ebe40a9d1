"""gptjax.optim.polar_express against its equations in float64, and against the singular value
decomposition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference.normuon import polar_express as exact

from gptjax.optim import newton_schulz, polar_express
from gptjax.optim.polar_express import NEWTON_SCHULZ

# Terms of 8, 22 and 16 cancel to 1 in a step, which costs fp32 some thirty units in the last place,
# and the next step more.
FP32 = 1e-4

SHAPES = [(16, 16), (24, 40), (40, 24), (1, 9), (9, 1), (1, 1), (2, 3, 12, 20)]


def to_bf16(x):
    return x.astype(jnp.bfloat16).astype(np.float64)


def normal(shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def relative_error(found, true):
    """In the Frobenius norm."""
    return np.linalg.norm(np.asarray(found, np.float64) - true) / np.linalg.norm(true)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("steps", [1, 5, 7])
def test_follows_the_equations(shape, steps):
    x = normal(shape)
    found = jax.jit(lambda x: polar_express(x, steps=steps, dtype="float32"))(x)
    assert found.shape == x.shape and found.dtype == x.dtype
    assert relative_error(found, exact(x, steps=steps)) < FP32
    if steps == 5:
        found = jax.jit(lambda x: newton_schulz(x, dtype=jnp.float32))(x)
        assert relative_error(found, exact(x, NEWTON_SCHULZ, margin=1.0)) < FP32


@pytest.mark.parametrize("shape", [(48, 48), (32, 80), (80, 32), (2, 3, 24, 40)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_in_bf16_every_matrix_is_rounded_once(shape, dtype):
    x = normal(shape, dtype)
    found = jax.jit(polar_express)(x)
    assert found.dtype == dtype
    ours, once = (relative_error(y, exact(x)) for y in (found, exact(x, rounded=to_bf16)))
    assert 0.8 * once < ours < 1.2 * once < 0.022


def test_the_band_holds_all_the_way():
    """Two singular values a matrix, whose squares add up to (1/1.02)²: over the range the band is
    stated for."""
    small = np.linspace(1e-3, 1 / 1.02 / np.sqrt(2), 4000)
    x = np.zeros((4000, 2, 2))
    x[:, 0, 0], x[:, 1, 1] = small, np.sqrt(1 / 1.02**2 - small**2)
    found = np.asarray(polar_express(jnp.asarray(x, jnp.float32), dtype=jnp.float32))
    both = np.stack([found[:, 0, 0], found[:, 1, 1]])
    assert both.min() > 0.859 - 1e-3 and both.max() < 1.141 + 1e-3
    assert both.min() < 0.87 and both.max() > 1.13  # the band is no wider than it need be


def test_zero_stays_zero_and_what_is_not_finite_becomes_nan_in_its_own_matrix_only():
    x = normal((4, 8, 12)).at[0, 3, 4].set(np.nan).at[1, 3, 4].set(np.inf).at[2].set(0)
    found = np.asarray(polar_express(x))
    assert np.isnan(found[0]).any() and np.isnan(found[1]).any() and (found[2] == 0).all()
    np.testing.assert_array_equal(found[3], polar_express(x[3]))


@pytest.mark.parametrize("size", [1e-20, 1e-4, 1e4, 1e18])
def test_the_scale_does_not_matter(size):
    """Down to norms at which the 1e-6 in the denominator shows."""
    x = normal((12, 20))
    found = polar_express(x * size, dtype=jnp.float32)
    assert relative_error(found, exact(np.asarray(x, np.float64) * size)) < FP32


def test_works_under_vmap_and_on_two_devices():
    x = normal((4, 12, 20))
    np.testing.assert_allclose(
        jax.vmap(lambda x: polar_express(x, dtype=jnp.float32))(x), exact(x), atol=FP32
    )
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    found = jax.jit(lambda x: polar_express(x, dtype=jnp.float32))(split)
    assert found.sharding.is_equivalent_to(split.sharding, 3)
    np.testing.assert_allclose(found, exact(x), atol=FP32)


def test_errors():
    with pytest.raises(
        ValueError, match=r"expected matrices \(..., M, N\) of floating-point numbers, got \(3,\)"
    ):
        polar_express.__wrapped__(jnp.zeros(3))
    with pytest.raises(ValueError, match="expected at least one step, got 0"):
        polar_express(jnp.zeros((3, 3)), steps=0)
    with pytest.raises(ValueError, match="xxt: unknown implementation 'cublas'"):
        polar_express(jnp.zeros((3, 3)), implementation="cublas")
