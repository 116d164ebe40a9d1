"""Tile sizes and shared memory of the backward kernel of flash attention on Hopper."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels._mosaic import SHARED_BYTES, plgpu, swizzled
from pallas_kernels.attention.mosaic_masks import HALF

KEYS = 128
"""Keys of a work item. Each multiplying warpgroup has HALF keys, and adds HALF×HALF parts to dQ."""
MULTIPLIERS = 2


class Scratch(NamedTuple):
    """Shared memory and barriers, in the order of their allocation."""

    q: Any
    dout: Any
    rows: Any
    k: Any
    v: Any
    ds: Any
    sums: Any
    out: Any
    columns: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    ds_full: Any
    ds_empty: Any
    sums_full: Any


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes and options of the kernel.

    Attributes:
        stages: blocks of queries in shared memory.
        key_stages: blocks of keys in shared memory.
        score_stages: tiles of dS in shared memory.
        slots: 64×64 parts of results in shared memory for each warpgroup, in addition to the parts
            in the tiles of dS.
        more_barriers: whether Mosaic adds barriers around each access to shared memory, in addition
            to the barriers that the kernel needs.
        whole_heads: True sums dQ by whole heads, False by split heads. None selects by an estimate.
    """

    stages: int = 2
    key_stages: int = 1
    score_stages: int = 1
    slots: int = 1
    more_barriers: bool = True
    whole_heads: bool | None = None


def why_not_tiles(tiles: Tiles, head_dim: int) -> str | None:
    """Return None if the kernel can be compiled, else the reason."""
    if min(tiles.stages, tiles.key_stages, tiles.score_stages, tiles.slots) < 1:
        return "at least one of each stage and slot is needed"
    queries = queries_in_a_block(head_dim)
    if tiles.slots > (most := 1 + (2 * head_dim - queries) // HALF):
        return f"only {most} of the slots would be used"
    arrays = [
        *[tiles.stages * queries * head_dim * 2] * 2,
        tiles.stages * 2 * queries * 4,
        *[tiles.key_stages * KEYS * head_dim * 2] * 2,
        tiles.score_stages * KEYS * queries * 2,
        MULTIPLIERS * HALF * HALF * 4,
        MULTIPLIERS * tiles.slots * HALF * HALF * 2,
        MULTIPLIERS * queries * 4,
    ]
    barriers = 8 * (2 * (tiles.stages + tiles.key_stages + tiles.score_stages) + MULTIPLIERS)
    total = sum(-(-size // 1024) * 1024 for size in arrays) + barriers
    if total > SHARED_BYTES:
        return f"{total} bytes of shared memory are needed, and there are {SHARED_BYTES}"
    return None


def queries_in_a_block(head_dim: int) -> int:
    """Return the number of queries in a block: the registers of two warpgroups limit this number,
    since dK and dV are in registers too."""
    return 8192 // head_dim


def scratch_types(tiles: Tiles, head_dim: int, dtype, fp8: bool) -> Scratch:
    """Return the types of the shared memory and the barriers; `fp8` as in `Block`."""
    queries = queries_in_a_block(head_dim)
    part = (2, HALF, HALF) if fp8 else (HALF, HALF)
    stages, key_stages, score_stages = tiles.stages, tiles.key_stages, tiles.score_stages
    return Scratch(
        q=swizzled((stages, queries, head_dim), dtype),
        dout=swizzled((stages, queries, head_dim), dtype),
        rows=plgpu.SMEM((stages, 2, queries), jnp.float32),
        k=swizzled((key_stages, KEYS, head_dim), dtype),
        v=swizzled((key_stages, KEYS, head_dim), dtype),
        ds=swizzled((score_stages, queries // HALF, KEYS, HALF), dtype),
        sums=swizzled((MULTIPLIERS, HALF, HALF), jnp.float32),
        out=swizzled((MULTIPLIERS, tiles.slots, *part), jnp.float8_e5m2 if fp8 else dtype),
        columns=plgpu.SMEM((MULTIPLIERS, queries), jnp.int32),
        q_full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        q_empty=plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=stages),
        k_full=plgpu.Barrier(num_arrivals=2, num_barriers=key_stages),
        k_empty=plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=key_stages),
        ds_full=plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=score_stages),
        ds_empty=plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=score_stages),
        sums_full=plgpu.Barrier(num_barriers=MULTIPLIERS),
    )
