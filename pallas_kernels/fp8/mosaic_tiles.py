"""Matmul a bᵀ of two FP8 matrices on Hopper (Pallas Mosaic GPU), tile by tile, with an epilogue.

A persistent grid of thread blocks (CTAs): one warpgroup loads with TMA, two compute with wgmma.
Both operands are K-major, as wgmma requires of 8-bit types: a is M×K, b is N×K.

A work item is a tile of the result over a share of K. With `cooperative` tiles the computing
warpgroups split the rows of one work item. Otherwise each warpgroup computes different work items:
the matmul of one warpgroup runs while the other warpgroup runs its epilogue.

The FP8 tensor core keeps about 14 bits of a sum. With `promote` = p, sums over p steps are added to
fp32 registers.

| barrier | number | arrivals | who arrives | who waits |
| --- | --- | --- | --- | --- |
| `full` | readers × stages | 2 | the copies of a and b | the computing warpgroup, or both |
| `empty` | stages | cluster × 1 or 2 | each reading warpgroup of the cluster | loading warpgroup |

`readers` is 1 with cooperative tiles, else 2: one for each computing warpgroup. `cluster` is the
number of thread blocks that share b. A slot is free once all thread blocks of the cluster have
released the slot.

Shapes: M rows, N columns; the tile of one warpgroup is R×P, and its matmul runs over K.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ring, pl, plgpu, swizzled

DEPTH = 128
"""K of one step: 128 bytes, the largest swizzle."""
COMPUTING = 2
"""Number of computing warpgroups."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes.

    Attributes:
        rows, columns: size of the tile of one computing warpgroup.
        stages: steps in shared memory.
        cluster: number of thread blocks with consecutive rows that share each tile of b.
        cooperative: the computing warpgroups split the rows of a work item.
        promote: steps after which a sum is added to fp32 registers; 0: the whole sum stays in the
            tensor core's accumulator.
        split: number of shares of K, each with a separate partial result.
        group: number of rows of work items that run at nearly the same time, for the L2 cache.
        part_columns: columns of the part of a tile that is stored at a time, with 64 rows.
        slots: parts in shared memory for each warpgroup.
    """

    rows: int = 128
    columns: int = 192
    stages: int = 4
    cluster: int = 2
    cooperative: bool = False
    promote: int = 0
    split: int = 1
    group: int = 8
    part_columns: int = 64
    slots: int = 2

    @property
    def block_rows(self) -> int:
        """Rows of a work item."""
        return self.rows * (COMPUTING if self.cooperative else 1)

    def parts(self) -> list[tuple[slice, slice]]:
        """Return rows and columns of each part of a tile. Parts with the same columns are
        consecutive."""
        return [
            (slice(m, m + 64), slice(p, p + self.part_columns))
            for p in range(0, self.columns, self.part_columns)
            for m in range(0, self.rows, 64)
        ]

    def why_not(self, m: int, n: int, k: int) -> str | None:
        """Return None if the tiles divide the sizes, else the reason."""
        rows = self.block_rows * self.cluster
        if m % rows or n % self.columns or k % DEPTH:
            return (
                f"needs M a multiple of {rows}, N of {self.columns} and K of {DEPTH}, got M={m}, "
                f"N={n}, K={k}"
            )
        return None


class Operands(NamedTuple):
    """The ring of operands, in the order of its allocation."""

    a: Any
    b: Any
    full: Any
    empty: Any


class At(NamedTuple):
    """Position of the tile of a warpgroup: rows and columns as slices, the share of K, and the
    index of the warpgroup's row of tiles."""

    wg: jax.Array
    rows: pl.Slice
    columns: pl.Slice
    share: jax.Array
    row_tile: jax.Array


def tiled(
    a_MK: jax.Array,
    b_NK: jax.Array,
    *others: jax.Array,
    tiles: Tiles,
    begin: Callable[..., None],
    finish: Callable[..., Any],
    out_type: list[jax.ShapeDtypeStruct],
    scratch: Any,
) -> tuple[jax.Array, ...]:
    """Compute a bᵀ tile by tile, and call `finish` on each tile.

    Args:
        others: more arrays, for the callbacks.
        begin: (position, others, scratch) → None: starts the copies that `finish` waits for.
        finish: (position, fp32 tile of a bᵀ, others, outputs, scratch) → None: stores the tile.
        scratch: a named tuple of scratch types.
    """
    (m, k), n = a_MK.shape, b_NK.shape[0]
    row_items, column_items = m // (tiles.block_rows * tiles.cluster), n // tiles.columns
    clusters = _mosaic.num_sms() // tiles.cluster
    total = row_items * column_items * tiles.split

    def kernel(a_gmem, b_gmem, *refs):
        other_gmem, refs = refs[: len(others)], refs[len(others) :]
        *out_gmem, scratch_refs, operands = refs
        wg = lax.axis_index("wg")
        cluster, peer = lax.axis_index("cluster"), lax.axis_index("peer")
        block = _Block(
            tiles=tiles,
            row_items=row_items,
            column_items=column_items,
            steps=pl.cdiv(k // DEPTH, tiles.split),
            clusters=clusters,
            begin=lambda at: begin(at, other_gmem, scratch_refs),
            finish=lambda at, acc: finish(at, acc, other_gmem, out_gmem, scratch_refs),
            a=a_gmem,
            b=b_gmem,
            operands=operands,
            ring=Ring(tiles.stages, operands.full, operands.empty),
            wg=wg,
            cluster=cluster,
            peer=peer,
            local=lax.div(total - cluster + clusters - 1, jnp.int32(clusters)),
        )
        pl.when(wg == COMPUTING)(block.load)
        pl.when(wg < COMPUTING)(block.compute)

    arrivals = COMPUTING if tiles.cooperative else 1
    empty = plgpu.Barrier(num_arrivals=arrivals, num_barriers=tiles.stages)
    if tiles.cluster > 1:
        empty = plgpu.ClusterBarrier(
            collective_axes=("peer",), num_arrivals=arrivals, num_barriers=tiles.stages
        )
    readers = 1 if tiles.cooperative else COMPUTING
    f = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=[
            scratch,
            Operands(
                a=swizzled((tiles.stages, tiles.block_rows, DEPTH), a_MK.dtype),
                b=swizzled((tiles.stages, tiles.columns, DEPTH), b_NK.dtype),
                full=plgpu.Barrier(num_arrivals=2, num_barriers=(readers, tiles.stages)),
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
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return tuple(f(a_MK, b_NK, *others))


@dataclasses.dataclass(frozen=True)
class _Block:
    """The kernel of one thread block: sizes, refs, and the two roles of a warpgroup.

    Work items cluster, cluster + clusters, … belong to this thread block.

    Attributes:
        row_items, column_items: number of work items of a share along M and N.
        steps: number of steps of a work item.
        cluster, peer: index of the cluster, and of the thread block in the cluster.
        local: number of this thread block's work items.
    """

    tiles: Tiles
    row_items: int
    column_items: int
    steps: int
    clusters: int
    begin: Any
    finish: Any
    a: Any
    b: Any
    operands: Operands
    ring: Ring
    wg: jax.Array
    cluster: jax.Array
    peer: jax.Array
    local: jax.Array

    def place(self, item) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the share, row and column of this thread block's work item `item`."""
        share, rest = _divmod(
            item * self.clusters + self.cluster, self.row_items * self.column_items
        )
        group, rest = _divmod(rest, self.tiles.group * self.column_items)
        first = group * self.tiles.group
        rows = jnp.minimum(self.tiles.group, self.row_items - first)
        column = lax.div(rest, rows)
        row = (first + rest - column * rows) * self.tiles.cluster + self.peer
        return share, row, column

    def load(self) -> None:
        """Load the operands of all work items."""
        plgpu.set_max_registers(40, action="decrease")
        tiles, ring, operands = self.tiles, self.ring, self.operands

        @pl.loop(0, self.local)
        def _item(item):
            share, row, column = self.place(item)
            rows = pl.ds(row * tiles.block_rows, tiles.block_rows)
            columns = pl.ds(column * tiles.columns, tiles.columns)
            reader = 0 if tiles.cooperative else lax.rem(item, jnp.int32(COMPUTING))

            # The last steps of the last share of K may be out of bounds: TMA reads zeros there.
            @pl.loop(0, self.steps)
            def _step(k):
                step = item * self.steps + k
                slot = ring.slot(step)
                ring.wait_empty(step, slot=slot)
                depth = pl.ds((share * self.steps + k) * DEPTH, DEPTH)
                full = ring.full.at[reader, slot]
                plgpu.copy_gmem_to_smem(self.a.at[rows, depth], operands.a.at[slot], full)
                plgpu.copy_gmem_to_smem(
                    self.b.at[columns, depth],
                    operands.b.at[slot],
                    full,
                    collective_axes="peer" if tiles.cluster > 1 else None,
                )

        # A thread block must not end while another thread block of the cluster may still arrive on
        # the barriers of the former.
        ring.drain(self.local * self.steps)

    def compute(self) -> None:
        """Compute and store this warpgroup's tiles."""
        plgpu.set_max_registers(232, action="increase")
        tiles = self.tiles
        both = tiles.cooperative
        number = self.local if both else lax.div(self.local - self.wg + 1, jnp.int32(COMPUTING))

        @pl.loop(0, number)
        def _one(i):
            item = i if both else i * COMPUTING + self.wg
            share, row, column = self.place(item)
            row_tile = row * COMPUTING + self.wg if both else row
            at = At(
                wg=self.wg,
                rows=pl.ds(row_tile * tiles.rows, tiles.rows),
                columns=pl.ds(column * tiles.columns, tiles.columns),
                share=share,
                row_tile=row_tile,
            )
            self.begin(at)
            sums = self.promoted if tiles.promote else self.unpromoted
            self.finish(at, sums(item * self.steps))

        plgpu.wait_smem_to_gmem(0)

    def unpromoted(self, first):
        """Return the tile of the steps from `first` on, summed by the tensor core."""
        acc_RP = pl.run_scoped(
            lambda acc_ref: self.matmul(acc_ref, first, self.steps), self.accumulator
        )
        self.ring.release(self.ring.slot(first + self.steps - 1))
        return acc_RP

    def promoted(self, first):
        """Return the tile of the steps from `first` on: fp32 sums of sums over `promote` steps."""
        promote, shape = self.tiles.promote, (self.tiles.rows, self.tiles.columns)
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)

        def add(sum_RP, first, steps):
            acc_RP = pl.run_scoped(
                lambda acc_ref: self.matmul(acc_ref, first, steps), self.accumulator
            )
            self.ring.release(self.ring.slot(first + steps - 1))
            return sum_RP + acc_RP

        whole, left = divmod(self.steps, promote)
        sum_RP = lax.fori_loop(
            0, whole, lambda i, sum_RP: add(sum_RP, first + i * promote, promote), zeros
        )
        return add(sum_RP, first + whole * promote, left) if left else sum_RP

    @property
    def accumulator(self):
        return plgpu.ACC((self.tiles.rows, self.tiles.columns), jnp.float32)

    def matmul(self, acc_ref, first, steps: int):
        """Return the sum over the steps. The slot of the last step is not released yet."""
        ring, operands, tiles = self.ring, self.operands, self.tiles
        reader = 0 if tiles.cooperative else self.wg

        def step(k, _):
            slot = ring.slot(first + k)
            ring.wait_full(slot, reader)
            a = operands.a.at[slot]
            if tiles.cooperative:
                a = operands.a.at[slot, pl.ds(self.wg * tiles.rows, tiles.rows)]
            plgpu.wgmma(acc_ref, a, operands.b.at[slot].transpose((1, 0)))
            # The matmul of this step runs while the operands of the last step are released.
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _():
                ring.release(ring.slot(first + k - 1))

        lax.fori_loop(0, steps, step, None)
        return acc_ref[...]


def _divmod(x, y: int):
    quotient = lax.div(x, jnp.int32(y))
    return quotient, x - quotient * y
