"""Metrics of an optimizer: a transformation keeps them in its state, and the step logs them."""

from typing import NamedTuple

import jax
import optax
from jaxtyping import Array


class Metrics(NamedTuple):
    """State, or part of the state, of a transformation: metrics of the last update, by name.

    Attributes:
        values: numbers or arrays, the same names in every update.
    """

    values: dict[str, Array]


def metrics_of(state: optax.OptState) -> dict[str, Array]:
    """Return the values of all `Metrics` in an optimizer's state."""
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Metrics))
    return {k: v for x in found if isinstance(x, Metrics) for k, v in x.values.items()}
