"""Positions in the work of the backward kernel of flash attention: items, steps and results."""

import dataclasses
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Item:
    """A work item of one multiplying warpgroup.

    Attributes:
        head, j: key head and block of keys.
        first, stop: the blocks of queries that see the keys.
        k_slot: slot of the keys and values.
        steps: number of blocks of queries over all heads of the group.
        key, mine: the warpgroup's first key, and the warpgroup's slice of the block.
        fills: number of fills of the query slots before this item.
        seen_by: with documents, the first and the last query that see all of these keys.
    """

    b: Any
    head: Any
    j: Any
    first: Any
    stop: Any
    k_slot: Any
    steps: Any
    key: Any
    fills: Any
    mine: Any
    seen_by: Any


@dataclasses.dataclass(frozen=True)
class Step:
    """One block of queries of a work item.

    Attributes:
        number, fill: index of the step in the work item, and in the thread block.
        slot, k_slot: slots of the queries, and of the keys.
        h, query: query head, and first query.
        sums: this warpgroup's part of the sums of dQ in global memory.
        starts, ends: whether this block of keys is the sums' first, last; None with split heads.
    """

    number: Any
    fill: Any
    slot: Any
    k_slot: Any
    h: Any
    query: Any
    sums: Any
    starts: Any
    ends: Any


class Place(NamedTuple):
    """Position of 64×64 results in the gradients of q, k or v (which = 0, 1, 2)."""

    which: int
    b: Any
    tokens: Any
    head: Any
    columns: Any
