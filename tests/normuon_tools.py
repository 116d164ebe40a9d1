"""One call of an optimizer of gptjax.optim.normuon, and Polar Express in fp32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gptjax.optim import polar_express

in_fp32 = functools.partial(polar_express, dtype=jnp.float32)
# Polar Express in fp32 is known to a few parts in 10⁵ (test_polar_express.py); the rest of the
# chain adds nothing to that.
FP32 = 1e-4


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def as_jax(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def run(tx, grads, params=None):
    """The updates for each of the gradients, with the parameters as they are."""
    params = as_jax(grads[0]) if params is None else as_jax(params)
    state, found = tx.init(params), []
    update = jax.jit(tx.update)
    for g in grads:
        updates, state = update(as_jax(g), state, params)
        found.append(updates)
    return found
