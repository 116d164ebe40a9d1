"""Chapter 8: the online softmax.

Softmax and its weighted sum of values, computed tile by tile, without storing all scores.

Shapes: T queries (rows), S keys of one tile, D head dimension.
"""

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
    max_T = jnp.maximum(state.max_T, scores_TS.max(axis=1))
    correction_T = exp_difference(state.max_T, max_T)
    weights_TS = exp_difference(scores_TS, max_T[:, None])
    sum_T = correction_T * state.sum_T + weights_TS.sum(axis=1)
    out_TD = correction_T[:, None] * state.out_TD + weights_TS @ v_SD
    return State(max_T, sum_T, out_TD)


def finish(state):
    """Return Σ softmax(score) · v, of shape (T, D), and the log-sum-exp of each row."""
    return state.out_TD / state.sum_T[:, None], state.max_T + jnp.log(state.sum_T)


def tiled_attention(q_TD, k_TD, v_TD, tile):
    """Return the causal attention of one head, reading `tile` keys at a time."""
    time, head_dim = q_TD.shape
    state = start(time, head_dim)
    for first in range(0, time, tile):
        keys = slice(first, first + tile)
        scores_TS = q_TD @ k_TD[keys].T / head_dim**0.5
        visible_TS = jnp.arange(time)[:, None] >= jnp.arange(time)[None, keys]
        state = update(state, jnp.where(visible_TS, scores_TS, -jnp.inf), v_TD[keys])
    return finish(state)[0]
