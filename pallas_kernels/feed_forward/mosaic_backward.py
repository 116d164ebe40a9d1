"""Backward pass of `linear_gelu` and `linear_relu_squared` on Hopper (Pallas Mosaic GPU).

Library: not used by the shipped models, which call `mlp`, whose backward pass is
`mosaic.mlp_du`.

Each of two warpgroups computes 64 rows of a tile of dx. The warpgroup computes du in registers, as
the left operand of the matmul. One more warpgroup loads. A thread block (CTA) computes tiles of one
column of tiles. The thread blocks that share rows store alternate groups of K columns of du, called
shares. A matmul sums each share over the rows: the left operand has ones in one row, a different
row for each share. (Mosaic's reduction over rows uses scratch memory that the warpgroups of a
thread block share: two concurrent reductions give wrong results.)

| barrier | number | arrivals | who arrives | who waits |
| --- | --- | --- | --- | --- |
| `full` | stages | 3 | the copies of dy, the derivative, and w | both computing warpgroups |
| `empty` | stages | 2 | each computing warpgroup | loading warpgroup |
| `db_stored` | 1 | 1 | computing warpgroup 0 | computing warpgroup 1, with bias |

Shapes: N rows, I inputs, O outputs; a tile of dx is M×P, and its matmul runs over K outputs at a
time.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ring, pl, plgpu, swizzled

HALF = 64
"""Rows of one computing warpgroup."""


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """Tile sizes of `backward`.

    Attributes:
        columns: columns of dx in a tile of 128 rows.
        depth: outputs in one step.
        stages: steps in shared memory.
        registers: keep the left operands in registers. False: store the left operands in shared
            memory, as the CPU interpreter requires.
    """

    columns: int = 256
    depth: int = 64
    stages: int = 3
    registers: bool = True

    def divide(self, n: int, i: int, o: int) -> bool:
        # A tile's share of du is at most 64 steps: each step needs one row of an accumulator.
        shares = -(-o // self.depth // max(1, i // self.columns))
        return n % 128 == 0 and o % self.depth == 0 and i % self.columns == 0 and shares <= 64


# Fastest first (H200, bf16).
BACKWARD = (BackwardTiles(), BackwardTiles(columns=128, stages=4))


def backward_tiles(n: int, i: int, o: int) -> BackwardTiles | None:
    """Return the first of `BACKWARD` that divides the sizes, or None."""
    return next((tiles for tiles in BACKWARD if tiles.divide(n, i, o)), None)


class Scratch(NamedTuple):
    """Shared memory and barriers, in the order of their allocation. `ones` is None if the left
    operands stay in registers."""

    dy: Any
    derivative: Any
    w: Any
    out: Any
    db: Any
    ones: Any
    full: Any
    empty: Any
    db_stored: Any


@functools.partial(jax.jit, static_argnames=("bias", "tiles"))
def backward(dy_NO, derivative_NO, w_IO, *, bias: bool, tiles: BackwardTiles | None = None):
    """Return dx = du wᵀ, du = dy · derivative, and db = Σ_N du in fp32, or None without `bias`."""
    n, o = dy_NO.shape
    i = w_IO.shape[0]
    dtype = dy_NO.dtype
    tiles = tiles or backward_tiles(n, i, o)
    depth, columns = tiles.depth, tiles.columns
    row_tiles, column_tiles = n // (2 * HALF), i // columns
    row_blocks = max(1, min(_mosaic.num_sms() // column_tiles, row_tiles))

    def kernel(dy_gmem, g_gmem, w_gmem, dx_gmem, du_gmem, db_gmem, scratch):
        wg, column, first_row = (
            lax.axis_index("wg"),
            lax.axis_index("column"),
            lax.axis_index("row"),
        )
        block = _Block(
            tiles=tiles,
            bias=bias,
            column_tiles=column_tiles,
            row_blocks=row_blocks,
            steps=o // depth,
            dtype=dtype,
            dy=dy_gmem,
            derivative=g_gmem,
            w=w_gmem,
            dx=dx_gmem,
            du=du_gmem,
            db=db_gmem,
            scratch=scratch,
            ring=Ring(tiles.stages, scratch.full, scratch.empty),
            wg=wg,
            column=column,
            first_row=first_row,
            local=lax.div(row_tiles - first_row + row_blocks - 1, jnp.int32(row_blocks)),
            dx_columns=pl.ds(column * columns, columns),
        )
        pl.when(wg == 2)(block.load)
        pl.when(wg < 2)(block.compute)

    f = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((n, i), dtype),
            jax.ShapeDtypeStruct((n, o), dtype),
            jax.ShapeDtypeStruct((row_blocks, 2, column_tiles, HALF, depth), jnp.float32),
        ],
        scratch_types=[
            Scratch(
                dy=swizzled((tiles.stages, 2 * HALF, depth), dtype),
                derivative=swizzled((tiles.stages, 2 * HALF, depth), dtype),
                w=swizzled((tiles.stages, columns, depth), dtype),
                out=swizzled((2, HALF, depth), dtype),
                db=plgpu.SMEM((HALF, depth) if bias else (1, 1), jnp.float32),
                ones=None if tiles.registers else swizzled((2, HALF, HALF), dtype),
                full=plgpu.Barrier(num_arrivals=3, num_barriers=tiles.stages),
                empty=plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),
                db_stored=plgpu.Barrier(),
            )
        ],
        grid=(row_blocks, column_tiles),
        grid_names=("row", "column"),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    dx_NI, du_NO, db_RWCSK = f(dy_NO, derivative_NO, w_IO)
    if not bias:
        return dx_NI, du_NO, None
    # Share s of column c is step s·column_tiles + c.
    return dx_NI, du_NO, db_RWCSK.sum((0, 1)).transpose(1, 0, 2).reshape(-1)[:o]


@dataclasses.dataclass(frozen=True)
class _Block:
    """The kernel of one thread block: sizes, refs, and the two roles of a warpgroup.

    Attributes:
        row_blocks: number of thread blocks of one column of tiles.
        steps: number of steps of the matmul of one tile, `tiles.depth` outputs each.
        column, first_row: the thread block's column of tiles, and its first tile of the column.
        local: number of this thread block's tiles.
    """

    tiles: BackwardTiles
    bias: bool
    column_tiles: int
    row_blocks: int
    steps: int
    dtype: Any
    dy: Any
    derivative: Any
    w: Any
    dx: Any
    du: Any
    db: Any
    scratch: Scratch
    ring: Ring
    wg: jax.Array
    column: jax.Array
    first_row: jax.Array
    local: jax.Array
    dx_columns: pl.Slice

    def at(self, k):
        """Return the outputs of step k."""
        return pl.ds(k * self.tiles.depth, self.tiles.depth)

    def load(self) -> None:
        """Load the operands of all tiles."""
        plgpu.set_max_registers(40, action="decrease")
        ring, scratch, steps = self.ring, self.scratch, self.steps

        @pl.loop(0, self.local * steps)
        def _step(step):
            slot, tile, k = (
                ring.slot(step),
                lax.div(step, jnp.int32(steps)),
                lax.rem(step, jnp.int32(steps)),
            )
            ring.wait_empty(step, slot=slot)
            rows = pl.ds((tile * self.row_blocks + self.first_row) * 2 * HALF, 2 * HALF)
            for source, target in (
                (lambda: self.dy.at[rows, self.at(k)], scratch.dy),
                (lambda: self.derivative.at[rows, self.at(k)], scratch.derivative),
                (lambda: self.w.at[self.dx_columns, self.at(k)], scratch.w),
            ):
                plgpu.copy_gmem_to_smem(source(), target.at[slot], ring.full.at[slot])

        ring.drain(self.local * steps)

    def compute(self) -> None:
        """Compute and store this warpgroup's rows of all tiles, and the sums for db."""
        plgpu.set_max_registers(232, action="increase")
        mine = pl.ds(self.wg * HALF, HALF)

        def one_tile(tile, db):
            rows = pl.ds(((tile * self.row_blocks + self.first_row) * 2 + self.wg) * HALF, HALF)
            shapes = [(HALF, self.tiles.columns)] + [(HALF, self.tiles.depth)] * self.bias
            dx_MP, *more = pl.run_scoped(
                lambda dx_acc, *db_acc: self.matmul(tile, rows, mine, dx_acc, *db_acc),
                *[plgpu.ACC(shape, jnp.float32) for shape in shapes],
            )
            self.store_dx(rows, dx_MP)
            return [one + other for one, other in zip(db, more, strict=True)]

        zeros = plgpu.layout_cast(
            jnp.zeros((HALF, self.tiles.depth), jnp.float32), plgpu.Layout.WGMMA
        )
        db = lax.fori_loop(0, self.local, one_tile, [zeros] * self.bias)
        if self.bias:
            self.store_db(db[0])
        plgpu.wait_smem_to_gmem(0)

    def matmul(self, tile, rows, mine, dx_acc, db_acc=None):
        """Compute du, and accumulate du wᵀ and, with `db_acc`, the sums of du. Return the
        accumulated values."""
        ring, scratch = self.ring, self.scratch

        def step(k, _):
            slot = ring.slot(tile * self.steps + k)
            ring.wait_full(slot)
            du_MK = scratch.dy[slot, mine] * scratch.derivative[slot, mine]
            plgpu.wgmma(
                dx_acc,
                self.left_operand(du_MK, scratch.dy.at[slot, mine]),
                scratch.w.at[slot].transpose((1, 0)),
            )

            @pl.when(lax.rem(jnp.int32(k), jnp.int32(self.column_tiles)) == self.column)
            def _share():
                self.store_share(k, rows, du_MK, db_acc)

            # Release the slot only after the matmul, although dy and the derivative are in
            # registers earlier. If the slot is released right after the reads, some operands are
            # overwritten too early (observed in dx).
            plgpu.wgmma_wait(0)
            ring.release(slot)

        lax.fori_loop(0, self.steps, step, None)
        return tuple(acc[...] for acc in (dx_acc, db_acc) if acc is not None)

    def left_operand(self, array, smem):
        """Return the array as a left operand of wgmma: in registers, or stored in `smem`."""
        if self.tiles.registers:
            return array
        smem[...] = array
        plgpu.commit_smem()
        return smem

    def store_share(self, k, rows, du_MK, db_acc) -> None:
        """Store du of step k, and add its column sums to row k // column_tiles of `db_acc`."""
        out, wg = self.scratch.out, self.wg
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out[wg] = du_MK
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out.at[wg], self.du.at[rows, self.at(k)])
        if self.bias:
            row_MM = plgpu.broadcasted_iota(jnp.int32, (HALF, HALF), 0, layout=plgpu.Layout.WGMMA)
            row = lax.div(jnp.int32(k), jnp.int32(self.column_tiles))
            ones_MM = (row_MM == row).astype(self.dtype)
            smem = None if self.scratch.ones is None else self.scratch.ones.at[wg]
            plgpu.wgmma(db_acc, self.left_operand(ones_MM, smem), out.at[wg])

    def store_dx(self, rows, dx_MP) -> None:
        """Store this warpgroup's rows of a tile of dx."""
        out, wg, depth = self.scratch.out, self.wg, self.tiles.depth
        for p in range(0, self.tiles.columns, depth):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out[wg] = dx_MP[:, p : p + depth].astype(self.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                out.at[wg], self.dx.at[rows, self.dx_columns].at[:, p : p + depth]
            )

    def store_db(self, db_SK) -> None:
        """Store the sums of both warpgroups, one after the other, through one shared buffer."""
        scratch = self.scratch

        @pl.when(self.wg == 1)
        def _():
            plgpu.barrier_wait(scratch.db_stored)

        scratch.db[...] = db_SK
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.db, self.db.at[self.first_row, self.wg, self.column])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(self.wg == 0)
        def _():
            plgpu.barrier_arrive(scratch.db_stored)
