"""Chapter 5: AdamW, and the training step.

A tree is a nested dict of arrays, such as the parameters. Shapes: B batch, T time.
"""

# ruff: noqa: F401 (the TODOs use the imports)

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
    raise NotImplementedError("TODO: sum the squares of all leaves")


def clip(grads, largest=1.0):
    """Return g · min(1, largest/‖g‖), where ‖g‖ is the global norm."""
    raise NotImplementedError("TODO: multiply every leaf by one factor")


def adamw(grads, state, params, lr, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1):
    """Return the parameters and the state after one update of AdamW.

    Update t = 1, 2, … computes

        m ← b1·m + (1 − b1)·g        v ← b2·v + (1 − b2)·g²
        p ← p − lr · ( m/(1 − b1ᵗ) / (√(v/(1 − b2ᵗ)) + eps) + decay·p )

    decay is weight_decay for arrays of two axes, and 0 for the others.
    """
    raise NotImplementedError("TODO: the three lines of the equation")


def train_step(params, state, windows_BT1, heads, lr):
    """Return the parameters and the state after one step, and the loss before the step."""
    raise NotImplementedError("TODO: jax.value_and_grad, clip, adamw")
