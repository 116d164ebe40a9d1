"""Keys that each query sees: documents packed into one sequence, and ranges; the order of work
items.

A document is a run of equal segment ids. Without `causal`, query t sees the keys first_t … last_t:
all keys of the query's document. With `causal`, query t sees the keys first_t … t: the keys of the
document up to t, at most `window` of them. Both bounds are non-decreasing in t. Kernels read the
bounds of a tile from the tile's first and last row, and skip tiles outside the bounds.

Ranges describe every other mask: each query sees the keys of its range, in any order of the bounds,
and of these, with ids, the keys of its id.

Shapes: B batch, T queries, S keys; P time padded to a multiple of the largest tile; I blocks of
keys, J blocks of queries.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

TILE = 256
"""Multiple of the rows of every tile of the kernels that read padded bounds."""
ROWS_TOGETHER = 4
"""Items per thread block that are sorted together, if a thread block has more than 3 times that."""
STEPS = 2**15
"""Number of levels to which costs are quantized before the sort."""


class Documents(NamedTuple):
    """Bounds of the keys that each query sees, int32, non-decreasing along time.

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
    # One scan for both bounds: the last positions are the first positions of the reversed sequence.
    both_2BT = jnp.where(jnp.stack([starts_BT, ends_BT[:, ::-1]]), t_1T[None], 0)
    first_BT, last_BT = lax.cummax(both_2BT, axis=2)
    last_BT = length - 1 - last_BT[:, ::-1]
    if window is not None:
        first_BT = jnp.maximum(first_BT, t_1T - (window - 1))
        last_BT = jnp.minimum(last_BT, t_1T + (window - 1))
    return Documents(first_BT, last_BT)


class Ranges(NamedTuple):
    """Keys that each query sees, int32. A query with first > last sees none.

    Attributes:
        first_BT, last_BT: first key in 0…S, last key in −1…S−1.
        query_ids_BT, key_ids_BS: None, or the query sees only keys with an equal id.
    """

    first_BT: jax.Array
    last_BT: jax.Array
    query_ids_BT: jax.Array | None = None
    key_ids_BS: jax.Array | None = None


def ranges(batch: int, length: int, keys: int, start: int, window, others=(), ids=None):
    """Return the intersection of masks.

    Args:
        start: position of query 0 among the keys.
        window: (left, right): query t sees the keys start + t − left … start + t + right. None: no
            limit.
        others: pairs of first and last keys, B·T.
        ids: ids of queries B·T and of keys B·S, or None.
    """
    position_T = jnp.arange(start, start + length, dtype=jnp.int32)
    left, right = window
    first_1T = 0 * position_T if left is None else position_T - left
    last_1T = 0 * position_T + keys if right is None else position_T + right
    bounds = [(first_1T[None], last_1T[None]), *others]
    if ids is not None:
        ids = tuple(x.astype(jnp.int32) for x in ids)
        bounds.append(jax.vmap(_range_of_id)(*ids))
    first_BT, last_BT = (
        functools.reduce(pick, [x.astype(jnp.int32) for x in side])
        for pick, side in zip((jnp.maximum, jnp.minimum), zip(*bounds, strict=True), strict=True)
    )
    shape = (batch, length)
    first_BT = jnp.broadcast_to(jnp.clip(first_BT, 0, keys), shape)
    return Ranges(first_BT, jnp.broadcast_to(jnp.clip(last_BT, -1, keys - 1), shape), *(ids or ()))


def _range_of_id(queries_T, keys_S):
    """Return the first and the last key whose id equals that of each query."""
    order_S = jnp.argsort(keys_S, stable=True)
    first_T, stop_T = (
        jnp.searchsorted(keys_S[order_S], queries_T, side=x) for x in ("left", "right")
    )
    size, none_T = keys_S.shape[0], first_T == stop_T
    first_T = jnp.where(none_T, size, order_S[jnp.minimum(first_T, size - 1)])
    return first_T, jnp.where(none_T, -1, order_S[stop_T - 1])


def query_blocks(bounds: Ranges, keys: int, m: int, n: int) -> jax.Array:
    """Return for each block of n keys the blocks of m queries that see one of the keys, B·I·4.

    The four numbers are the first query of the blocks, their end, and the first query and the end
    of adjacent blocks whose queries see all of the keys.
    """
    length = bounds.first_BT.shape[1]
    pad = [(0, 0), (0, -length % m)]
    first_BJM, last_BJM = (
        jnp.pad(x, pad, mode="edge").reshape(x.shape[0], 1, -1, m) for x in bounds[:2]
    )
    key_1I1 = jnp.arange(0, keys, n, dtype=jnp.int32)[None, :, None]
    some_BIJ = (first_BJM.min(-1) < key_1I1 + n) & (last_BJM.max(-1) >= key_1I1)
    # A block of keys that ends out of bounds needs no mask there.
    end_1I1 = jnp.minimum(key_1I1 + n, keys) - 1
    all_BIJ = (first_BJM.max(-1) <= key_1I1) & (last_BJM.min(-1) >= end_1I1)
    blocks = some_BIJ.shape[-1]

    def first(x_BIJ):  # the number of blocks if there is none
        return jnp.where(x_BIJ.any(-1), x_BIJ.argmax(-1), blocks)

    end_BI = blocks - first(some_BIJ[..., ::-1])
    full_BI = first(all_BIJ)
    after_BIJ = ~all_BIJ & (jnp.arange(blocks)[None, None] >= full_BI[..., None])
    numbers = (first(some_BIJ), end_BI, full_BI, first(after_BIJ))
    return (jnp.stack(numbers, -1) * m).astype(jnp.int32)


def padded(bounds: Documents) -> Documents:
    """Pad the bounds to a multiple of `TILE`. No query sees a key of the padding, whose score 0 may
    be infinitely more likely than the scores of the other keys."""
    length = bounds.first_BT.shape[1]
    pad = [(0, 0), (0, -length % TILE)]
    first_BT = jnp.pad(bounds.first_BT, pad, constant_values=length)
    return Documents(first_BT, jnp.pad(bounds.last_BT, pad, mode="edge"))


def schedule_by_cost(costs_BI: jax.Array, heads: int, blocks: int) -> jax.Array:
    """Return a table of work items like `_mosaic.schedule`, for costs known on the device only.

    The items are sorted by cost, longest first, in groups of a few heads, so that the keys and
    values of a group stay in the L2 cache. Even rows of sorted items are assigned to the thread
    blocks in ascending order, odd rows in descending order. The numbers of items of two thread
    blocks differ by at most 1.

    Args:
        costs_BI: cost of each item of a head, positive integers.
        heads: number of heads of each element of the batch.
    """
    costs_N = jnp.repeat(costs_BI, heads, axis=0).reshape(-1)
    number = costs_N.shape[0]
    rows = -(-number // blocks)
    # The padding of the last row has cost 0: it is sorted last, and the counts exclude it.
    costs_N = jnp.pad(costs_N, (0, rows * blocks - number)).astype(jnp.float32)
    together = rows if rows <= 3 * ROWS_TOGETHER else ROWS_TOGETHER
    place_N = jnp.arange(rows * blocks, dtype=jnp.int32)
    rounds_N = jnp.minimum(place_N // (together * blocks), max(0, rows // together - 1))
    # Group and cost in one key: XLA sorts one key with one value in few launches.
    cheapness_N = (STEPS * (1 - costs_N / costs_N.max())).astype(jnp.int32)
    keys_N = rounds_N * (STEPS + 1) + cheapness_N
    _, order_N = lax.sort((keys_N, place_N), num_keys=1)
    order_RB = order_N.reshape(rows, blocks)
    # Reverse every second row, and shift each pair of rows: the costliest item of each pair is
    # assigned to another thread block.
    row_R1, block_1B = jnp.arange(rows)[:, None], jnp.arange(blocks)[None]
    shift_R1 = row_R1 // 2 * max(1, blocks * 3 // 8)
    from_RB = (block_1B + shift_R1) % blocks
    from_RB = jnp.where(row_R1 % 2 == 1, blocks - 1 - from_RB, from_RB)
    table_RB = jnp.take_along_axis(order_RB, from_RB, axis=1)
    counts_1B = (table_RB < number).sum(0, keepdims=True, dtype=jnp.int32)
    # One more item than the longest list: the next item is read during the current item.
    table_RB = jnp.where(table_RB < number, table_RB, 0)
    return jnp.concatenate([counts_1B, table_RB, jnp.zeros_like(counts_1B)]).T
