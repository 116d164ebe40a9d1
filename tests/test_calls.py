"""pallas_kernels._calls: kernel launches under `jax.vmap` and differentiation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _calls
from pallas_kernels._partition import Rule


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def test_differentiating_a_kernel_names_the_public_function():
    x = normal(0, 4, 8)
    rule = Rule("n* c, -> n* c", over="n*")
    for wrap in (_calls.looped, functools.partial(_calls.batched, rule=rule)):
        kernel = wrap("softmax", lambda x, nothing: 2 * x)
        np.testing.assert_array_equal(jax.jit(kernel)(x, None), 2 * x)
        with pytest.raises(NotImplementedError, match="softmax: .*implementation='reference'"):
            jax.jit(jax.grad(lambda x, kernel=kernel: kernel(x, None).sum()))(x)


def test_vmap_of_launches():
    """`looped` calls each element, `batched` all at once, but for a mapped argument
    without the name with a star."""
    shapes = []

    def kernel(x_BC, scale, *, add=0.0):
        shapes.append(x_BC.shape)
        return {"out": x_BC * scale + add, "sums": x_BC.sum(1)}

    rule = Rule("b* c, -> b* c, b*", over="b*")
    batched = functools.partial(_calls.batched, rule=rule)
    x, scale = normal(30, 5, 3, 4), normal(31, 5)
    for wrap, f, in_axes, shape in [
        (_calls.looped, kernel, (0, None), (3, 4)),
        (batched, kernel, (0, None), (15, 4)),
        (batched, kernel, (None, 0), (3, 4)),
        (batched, kernel, (0, 0), (3, 4)),
    ]:
        arrays = [a if axis == 0 else a[0] for a, axis in zip((x, scale), in_axes, strict=True)]
        shapes.clear()
        out = jax.vmap(wrap("softmax", f), in_axes)(*arrays)
        assert shapes[-1] == shape and {*shapes} <= {(3, 4), shape}
        expected = jax.vmap(kernel, in_axes)(*arrays)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), out, expected)
