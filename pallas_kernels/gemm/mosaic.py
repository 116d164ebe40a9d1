"""Matmul with an epilogue on Hopper (Pallas Mosaic GPU): TMA, wgmma, a persistent grid of thread
blocks (CTAs). In each thread block one warpgroup loads and two compute.

A work item is a tile of the result of one computing warpgroup. The matmul of one warpgroup runs
while the other warpgroup runs its epilogue. Both warpgroups read one ring of operands, in the order
of the tiles.

| barrier | number | arrivals | who arrives | who waits |
| --- | --- | --- | --- | --- |
| `full` | 2 × stages | 2 | the copies of a and b | computing warpgroup 0 or 1 |
| `empty` | stages | cluster | the reading warpgroup of each thread block | loading warpgroup |

`cluster` is the number of thread blocks that share b. A slot is free once all thread blocks of the
cluster have released the slot.

Operands have 8 or 16 bits. wgmma reads 8-bit operands K-major only: b is then N×K.

Shapes: M rows, N columns of the result, K contracted; the tile of one warpgroup is R×P, in parts of
64×Q, and a step of its matmul runs over D numbers of K.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ring, compiler_params, pl, plgpu, swizzled

PART_ROWS = 64
"""Rows of the part of a tile that an epilogue stores at a time."""
COMPUTING = 2
"""Number of computing warpgroups."""
MOST_WASTED = 0.05
"""Largest fraction of a row's tiles that may be out of bounds. GPT-2's widths: 0 to 3 %."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes.

    Attributes:
        rows, columns: size of the tile of one warpgroup.
        stages: steps in shared memory.
        cluster: number of thread blocks with consecutive rows that share each tile of b.
        group: number of rows of tiles that run at nearly the same time, for the L2 cache.
        part_columns: columns of the part of a tile that is stored at a time.
        slots: parts in shared memory for each warpgroup. `slots` divides the number of parts with
            the same columns. Then, for any last columns of a tile, the slot of the next tile's
            first part is free once all but the newest `slots` − 1 copies are complete.
        depth_bytes: bytes of K in one step, a swizzle: at most 128.
    """

    rows: int = 128
    columns: int = 192
    stages: int = 4
    cluster: int = 2
    group: int = 1
    part_columns: int = 64
    slots: int = 2
    depth_bytes: int = 128

    def __post_init__(self):
        if self.column_parts % self.slots:
            raise ValueError(
                f"{self.slots} slots do not divide the {self.column_parts} parts of a column"
            )

    @property
    def column_parts(self) -> int:
        """Number of parts with the same columns."""
        return self.rows // PART_ROWS

    def parts(self) -> list[tuple[slice, slice]]:
        """Return rows and columns of each part of a tile. Parts with the same columns are
        consecutive."""
        return [
            (slice(m, m + PART_ROWS), slice(p, p + self.part_columns))
            for p in range(0, self.columns, self.part_columns)
            for m in range(0, self.rows, PART_ROWS)
        ]

    def depth(self, itemsize: int) -> int:
        """Return the numbers of K in one step."""
        return self.depth_bytes // itemsize

    def divide(self, m: int, n: int, k: int, itemsize: int) -> bool:
        """Return whether the tiles divide the sizes; the last columns may be a cut tile."""
        # The last tile of a row may be partly out of bounds: TMA reads zeros there.
        wasted = pl.cdiv(n, self.columns) * self.columns - n
        return (
            m % (self.rows * self.cluster) == 0
            and k % self.depth(itemsize) == 0
            and n % self.part_columns == 0
            and wasted <= MOST_WASTED * n
        )


# Fastest first. bf16 on an H200, 65536×768×3072: the matmul alone takes 0.44 ms, 192 columns
# 0.50 ms, without the cluster 0.535, parts of 64×32 0.50–0.55, 128 or 256 columns more. At the
# other widths 192 columns take 3 to 9 % less time than 128, forward and for du, although the last
# tile is partly out of bounds.
TILES_16 = (Tiles(), Tiles(columns=128, stages=5, cluster=1))
TILES_8 = (
    Tiles(group=8),
    Tiles(columns=128, stages=5, group=8),
    # GPT-2 XL's 1,600 inputs are no multiple of 128.
    Tiles(stages=8, group=8, depth_bytes=64),
)


def tiles_for(m: int, n: int, k: int, itemsize: int) -> Tiles:
    """Return the first tiles that divide the sizes.

    Args:
        itemsize: bytes of an operand's number, 1 or 2.

    Raises:
        ValueError: no tiles divide the sizes, such as those of a shard.
    """
    if (why := why_not(m, n, k, itemsize)) is not None:
        raise ValueError(f"mosaic {why}, on each device; use another implementation")
    choices = TILES_8 if itemsize == 1 else TILES_16
    return next(tiles for tiles in choices if tiles.divide(m, n, k, itemsize))


def why_not(m: int, n: int, k: int, itemsize: int) -> str | None:
    """Return None if there are tiles for M×N results over K, else the reason."""
    if any(x.divide(m, n, k, itemsize) for x in (TILES_8 if itemsize == 1 else TILES_16)):
        return None
    fewest = TILES_8[1] if itemsize == 1 else TILES_16[1]
    shallowest = min(x.depth(itemsize) for x in (TILES_8 if itemsize == 1 else TILES_16))
    return (
        f"has no tiles for {m} rows, {n} columns and {k} contracted: needs rows a multiple of "
        f"{fewest.rows * fewest.cluster}, contracted a multiple of {shallowest}, and "
        f"columns a multiple of {fewest.columns}, or with rows a multiple of "
        f"{TILES_16[0].rows * TILES_16[0].cluster} a multiple of {TILES_16[0].part_columns} a "
        f"little below a multiple of {TILES_16[0].columns}"
    )


@dataclasses.dataclass(frozen=True)
class At:
    """Position of the tile of a warpgroup: rows and columns as slices, and the index of the tile's
    row of tiles.

    Attributes:
        columns_left: columns from the tile's first to the last of the matrix, if the tile may be
            partly out of bounds; else None.
    """

    wg: jax.Array
    rows: pl.Slice
    columns: pl.Slice
    row_tile: jax.Array
    columns_left: jax.Array | None

    def unless_out_of_bounds(self, columns: slice) -> Callable:
        """Decorator that calls the function immediately if these columns are in bounds."""
        if self.columns_left is None:
            return lambda f: f()
        return pl.when(columns.start < self.columns_left)


def matmul(
    a_MK: jax.Array,
    b: jax.Array,
    *others: jax.Array,
    tiles: Tiles,
    k_major: bool,
    begin: Callable[..., None],
    finish: Callable[..., Any],
    out_type: list[jax.ShapeDtypeStruct],
    scratch: Any,
) -> tuple[jax.Array, ...]:
    """Compute a b tile by tile, and call `finish` on each tile.

    Args:
        b: K×N, or N×K if `k_major`.
        others: more arrays, for the callbacks.
        begin: (position, others, scratch) → None: starts the copies that `finish` waits for.
        finish: (position, fp32 tile of a b, others, outputs, scratch) → None: stores the tile.
        scratch: a named tuple of scratch types.
    """
    (m, k), n = a_MK.shape, b.shape[0 if k_major else 1]
    depth = tiles.depth(a_MK.dtype.itemsize)
    row_items, column_items = m // (tiles.rows * tiles.cluster), pl.cdiv(n, tiles.columns)
    clusters = _mosaic.num_sms() // tiles.cluster
    total, steps = row_items * column_items, k // depth

    def kernel(a_gmem, b_gmem, *refs):
        # Tiles cluster, cluster + clusters, … of the result belong to this thread block. The
        # computing warpgroups alternate: warpgroup 0 computes the first tile, 1 the second tile.
        other_gmem, refs = refs[: len(others)], refs[len(others) :]
        *out_gmem, scratch_refs, operands = refs
        ring = Ring(tiles.stages, operands.full, operands.empty)
        wg = lax.axis_index("wg")
        cluster, peer = lax.axis_index("cluster"), lax.axis_index("peer")
        own_tiles = lax.div(total - cluster + clusters - 1, jnp.int32(clusters))

        def position(tile) -> At:
            """Return the position in the result of this thread block's tile number `tile`."""
            at, per_group = tile * clusters + cluster, tiles.group * column_items
            group = lax.div(at, jnp.int32(per_group))
            rest = at - group * per_group
            if tiles.group == 1:
                row, column = group, rest
            else:
                first = group * tiles.group
                height = jnp.minimum(tiles.group, row_items - first)
                column = lax.div(rest, height)
                row = first + rest - column * height
            row = row * tiles.cluster + peer
            first_column = column * tiles.columns
            return At(
                wg=wg,
                rows=pl.ds(row * tiles.rows, tiles.rows),
                columns=pl.ds(first_column, tiles.columns),
                row_tile=row,
                columns_left=n - first_column if n % tiles.columns else None,
            )

        @pl.when(wg == COMPUTING)
        def _load():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, own_tiles)
            def _tile(tile):
                at = position(tile)
                reader = lax.rem(tile, jnp.int32(COMPUTING))

                @pl.loop(0, steps)
                def _step(k):
                    step = tile * steps + k
                    slot = ring.slot(step)
                    ring.wait_empty(step, slot=slot)
                    part, full = pl.ds(k * depth, depth), ring.full.at[reader, slot]
                    plgpu.copy_gmem_to_smem(a_gmem.at[at.rows, part], operands.a.at[slot], full)
                    plgpu.copy_gmem_to_smem(
                        b_gmem.at[at.columns, part] if k_major else b_gmem.at[part, at.columns],
                        operands.b.at[slot],
                        full,
                        collective_axes="peer" if tiles.cluster > 1 else None,
                    )

            # A thread block must not end while another thread block of the cluster may still arrive
            # on the barriers of the former.
            ring.drain(own_tiles * steps)

        def sums(acc_ref, first):
            """Return the tile of the steps from `first` on. The slot of the last step is not
            released yet."""

            def step(k, _):
                slot = ring.slot(first + k)
                ring.wait_full(slot, wg)
                b = operands.b.at[slot]
                plgpu.wgmma(acc_ref, operands.a.at[slot], b.transpose((1, 0)) if k_major else b)
                # The matmul of this step runs while the operands of the last step are released.
                plgpu.wgmma_wait(1)

                @pl.when(k > 0)
                def _():
                    ring.release(ring.slot(first + k - 1))

            lax.fori_loop(0, steps, step, None)
            return acc_ref[...]

        @pl.when(wg < COMPUTING)
        def _compute():
            plgpu.set_max_registers(232, action="increase")

            @pl.loop(0, lax.div(own_tiles - wg + 1, jnp.int32(COMPUTING)))
            def _tile(i):
                tile = i * COMPUTING + wg
                at = position(tile)
                begin(at, other_gmem, scratch_refs)
                acc_RP = pl.run_scoped(
                    lambda acc_ref: sums(acc_ref, tile * steps),
                    plgpu.ACC((tiles.rows, tiles.columns), jnp.float32),
                )
                ring.release(ring.slot(tile * steps + steps - 1))
                finish(at, acc_RP, other_gmem, out_gmem, scratch_refs)

            plgpu.wait_smem_to_gmem(0)

    empty = plgpu.Barrier(num_barriers=tiles.stages)
    if tiles.cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("peer",), num_barriers=tiles.stages)
    b_tile = (tiles.columns, depth) if k_major else (depth, tiles.columns)
    f = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=[
            scratch,
            _mosaic.scratch(
                a=swizzled((tiles.stages, tiles.rows, depth), a_MK.dtype),
                b=swizzled((tiles.stages, *b_tile), b.dtype),
                full=plgpu.Barrier(num_arrivals=2, num_barriers=(COMPUTING, tiles.stages)),
                empty=empty,
            ),
        ],
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(tiles.cluster,),
        cluster_names=("peer",),
        num_threads=COMPUTING + 1,
        thread_name="wg",
        # Sums stay inside a warp.
        compiler_params=compiler_params(approx_math=True, reduction_scratch_bytes=0),
    )
    return tuple(f(a_MK, b, *others))


# ------------------------------------------------------------------------------ parts of epilogues


def scalars(scale) -> list[jax.Array]:
    """Return the factors of a scale as arrays of one element."""
    return [jnp.asarray(factor, jnp.float32).reshape(1) for factor in jax.tree.leaves(scale)]


def product(refs):
    """Return the product of scalars in global memory; None for none."""
    return functools.reduce(lax.mul, [ref[0] for ref in refs]) if refs else None


def times(x, factor):
    """Return x times a factor; x if the factor is None or 1.0."""
    return x if factor is None or (isinstance(factor, float) and factor == 1.0) else x * factor


def copy_to_gmem(copies, commit_group: bool = True) -> None:
    """Copy the warpgroup's stores from shared to global memory.

    Args:
        commit_group: whether these are the last copies of their commit group.
    """
    plgpu.commit_smem()
    for i, (smem, target) in enumerate(copies):
        last = i == len(copies) - 1
        plgpu.copy_smem_to_gmem(smem, target, commit_group=commit_group and last)
