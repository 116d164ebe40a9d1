"""Documents packed into one sequence: the keys that each token sees, and the order of work items.

A document is a run of equal segment ids. Without `causal` a token sees its whole document. With
`causal` query t sees the document up to itself, or its last `window` keys. Either way query t sees
keys first_t … t (causal) or first_t … last_t, and both bounds never decrease with t. Kernels read
the bounds of a tile from its first and last row, and skip tiles outside.

Shapes: B batch, T time; P time padded to a multiple of the largest tile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

TILE = 128
"""Multiple of the rows of every tile of the kernels that read padded bounds."""
ROWS_TOGETHER = 4
"""Items of each thread block that are sorted by cost together, if it has many."""
STEPS = 2**15
"""Costs are compared in steps of this fraction of the largest."""


class Documents(NamedTuple):
    """Bounds of what each token sees, int32, non-decreasing along time.

    Attributes:
        first_BT: first key that query t sees.
        last_BT: last query that sees key t; without `causal` also the last key that query t sees.
    """

    first_BT: jax.Array
    last_BT: jax.Array


def document_bounds(segment_ids_BT, *, window: int | None = None) -> Documents:
    """Return the bounds of documents, which are runs of equal ids.

    Args:
        window: number of keys that a causal query sees at most, or None.
    """
    length = segment_ids_BT.shape[1]
    t_1T = jnp.arange(length, dtype=jnp.int32)[None]
    edges_BT = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    edge_B1 = jnp.ones_like(segment_ids_BT[:, :1], bool)
    starts_BT = jnp.concatenate([edge_B1, edges_BT], axis=1)
    ends_BT = jnp.concatenate([edges_BT, edge_B1], axis=1)
    # One scan for both: the last positions are the first ones of the reversed sequence.
    both_2BT = jnp.where(jnp.stack([starts_BT, ends_BT[:, ::-1]]), t_1T[None], 0)
    first_BT, last_BT = lax.cummax(both_2BT, axis=2)
    last_BT = length - 1 - last_BT[:, ::-1]
    if window is not None:
        first_BT = jnp.maximum(first_BT, t_1T - (window - 1))
        last_BT = jnp.minimum(last_BT, t_1T + (window - 1))
    return Documents(first_BT, last_BT)


def padded(bounds: Documents) -> Documents:
    """Repeat the last token's bounds up to a multiple of `TILE`."""
    pad = [(0, 0), (0, -bounds.first_BT.shape[1] % TILE)]
    return Documents(*(jnp.pad(x, pad, mode="edge") for x in bounds))


def schedule_by_cost(costs_BI: jax.Array, heads: int, blocks: int) -> jax.Array:
    """Return a table of work items like `_mosaic.schedule`, for costs known on the device only.

    The items of a few heads at a time, so that their keys and values stay in the L2 cache, are
    sorted by cost and assigned to the thread blocks back and forth: the longest first. Each thread
    block gets the same number of items, ±1.

    Args:
        costs_BI: cost of each item of a head, positive integers.
        heads: number of heads of each element of the batch.
    """
    costs_N = jnp.repeat(costs_BI, heads, axis=0).reshape(-1)
    number = costs_N.shape[0]
    rows = -(-number // blocks)
    # Items that fill the last row have no cost: they come last, and no thread block counts them.
    costs_N = jnp.pad(costs_N, (0, rows * blocks - number)).astype(jnp.float32)
    together = rows if rows <= 3 * ROWS_TOGETHER else ROWS_TOGETHER
    place_N = jnp.arange(rows * blocks, dtype=jnp.int32)
    rounds_N = jnp.minimum(place_N // (together * blocks), max(0, rows // together - 1))
    # One key: XLA sorts one key, and one value with it, in few launches.
    cheapness_N = (STEPS * (1 - costs_N / costs_N.max())).astype(jnp.int32)
    keys_N = rounds_N * (STEPS + 1) + cheapness_N
    _, order_N = lax.sort((keys_N, place_N), num_keys=1)
    order_RB = order_N.reshape(rows, blocks)
    # Back and forth, and each pair of rows from another thread block on: the costliest item of
    # each pair is with another thread block.
    row_R1, block_1B = jnp.arange(rows)[:, None], jnp.arange(blocks)[None]
    shift_R1 = row_R1 // 2 * max(1, blocks * 3 // 8)
    from_RB = (block_1B + shift_R1) % blocks
    from_RB = jnp.where(row_R1 % 2 == 1, blocks - 1 - from_RB, from_RB)
    table_RB = jnp.take_along_axis(order_RB, from_RB, axis=1)
    counts_1B = (table_RB < number).sum(0, keepdims=True, dtype=jnp.int32)
    # One more item than the longest list: an item is read during the item before it.
    table_RB = jnp.where(table_RB < number, table_RB, 0)
    return jnp.concatenate([counts_1B, table_RB, jnp.zeros_like(counts_1B)]).T
