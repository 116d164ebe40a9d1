"""Chapter 5: AdamW, and the training step.

A tree is a nested dict of arrays, such as the parameters. Shapes: B batch, T time.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from ch04_loss.solution import loss_fn


class AdamState(NamedTuple):
    """The number of updates, and the running means of g and of g²: trees like the parameters."""

    step: jax.Array
    m: dict
    v: dict


def init_adam(params):
    """Return the state before the first update: zeros."""
    m = jax.tree.map(jnp.zeros_like, params)
    # Not the arrays of m: chapter 12 overwrites both in place.
    v = jax.tree.map(jnp.zeros_like, params)
    return AdamState(step=jnp.zeros((), jnp.int32), m=m, v=v)


def global_norm(grads):
    """Return √(Σ g²) over all elements of all arrays of the tree."""
    return jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))


def clip(grads, largest=1.0):
    """Return g · min(1, largest/‖g‖), where ‖g‖ is the global norm."""
    factor = jnp.minimum(1.0, largest / global_norm(grads))
    return jax.tree.map(lambda g: g * factor, grads)


def adamw(grads, state, params, lr, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1):
    """Return the parameters and the state after one update of AdamW.

    Update t = 1, 2, … computes

        m ← b1·m + (1 − b1)·g        v ← b2·v + (1 − b2)·g²
        p ← p − lr · ( m/(1 − b1ᵗ) / (√(v/(1 − b2ᵗ)) + eps) + decay·p )

    decay is weight_decay for arrays of two axes, and 0 for the others.
    """
    step = state.step + 1
    t = step.astype(jnp.float32)
    m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.m, grads)
    v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.v, grads)

    def updated(p, m, v):
        direction = m / (1 - b1**t) / (jnp.sqrt(v / (1 - b2**t)) + eps)
        decay = weight_decay if p.ndim == 2 else 0.0
        return p - lr * (direction + decay * p)

    return jax.tree.map(updated, params, m, v), AdamState(step, m, v)


def train_step(params, state, windows_BT1, heads, lr):
    """Return the parameters and the state after one step, and the loss before the step."""
    loss, grads = jax.value_and_grad(loss_fn)(params, windows_BT1, heads)
    params, state = adamw(clip(grads), state, params, lr)
    return params, state, loss
