"""Chapter 8: the online softmax.

Softmax and its weighted sum of values, computed tile by tile, without storing all scores.

Shapes: T queries (rows), S keys of one tile, D head dimension.
"""

# ruff: noqa: F401 (the TODOs use the imports)

from typing import NamedTuple

import jax
import jax.numpy as jnp


class State(NamedTuple):
    """Three numbers or vectors of each row, over the keys read so far.

    max_T: largest score m; sum_T: Σ exp(s − m); out_TD: Σ exp(s − m) · v.
    """

    max_T: jax.Array
    sum_T: jax.Array
    out_TD: jax.Array


def start(rows, head_dim):
    """Return the state before the first key: m = −∞ and empty sums."""
    return State(jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros((rows, head_dim)))


def exp_difference(x, max_x):
    """Return exp(x − max), and 0 where x is −∞, also if the maximum is −∞ too."""
    return jnp.where(x == -jnp.inf, 0.0, jnp.exp(x - max_x))


def update(state, scores_TS, v_SD):
    """Return the state after one more tile of keys. A masked score is −∞.

    m' = max(m, max_s score)
    sum' = exp(m − m') · sum + Σ_s exp(score − m')
    out' = exp(m − m') · out + Σ_s exp(score − m') · v
    """
    raise NotImplementedError("TODO: the three equations")


def finish(state):
    """Return Σ softmax(score) · v, of shape (T, D), and the log-sum-exp of each row."""
    raise NotImplementedError("TODO: divide by the sum, and add log(sum) to the maximum")


def tiled_attention(q_TD, k_TD, v_TD, tile):
    """Return the causal attention of one head, reading `tile` keys at a time."""
    raise NotImplementedError("TODO: start, one update for each tile of keys, finish")
