"""Symmetric matmuls on Hopper (Pallas Mosaic GPU): TMA, wgmma, a persistent grid with one thread
block (CTA) per SM.

A work item is two 128×128 tiles (s, p) and (s, q) of one matrix, which share the 128 rows s. These
128×256 results need three blocks of operands instead of four, or two blocks if one of the tiles is
on the diagonal. One warpgroup loads. Two warpgroups multiply, 64 of the rows each. Alternatives
that were measured: docs/kernels/symmetric.md.

| barrier | slots | arrivals | who arrives | who waits |
| --- | --- | --- | --- | --- |
| `full` | 4 | 3 | the copies of p, q, s, or see below | each multiplying warpgroup |
| `empty` | 4 | 2 | each multiplying warpgroup | loading warpgroup |

If s is p or q, the loading warpgroup arrives on `full` instead of the copy of s. If the slot
contains a part of a for b·a, two copies and the loading warpgroup arrive.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ring, compiler_params, pl, plgpu, swizzled

TILE = 128
# Rows of one multiplying warpgroup, and columns of a part of the result that is stored at a time:
# 128 bytes, the swizzle.
HALF = 64
MULTIPLIERS = 2
# Width of a slice of the contracted axis, and number of slices in shared memory. A slice is three
# blocks: 192 KB in total, plus 32 KB of results. With three slices, aᵀ a of 24×3072×768 is 10 %
# slower.
DEPTH, STAGES = 64, 4


def schedule(n: int) -> np.ndarray:
    """Return the work items of one matrix of n×n tiles: rows (s, p, q, place of s), int32.

    Each tile on or above the diagonal belongs to one row of the table, as {s, p} or {s, q}. A row
    with a single tile has q = −1. The operand blocks are stored in the places p: 0, q: 1, s: 2. If
    s is the same block as p or q, the place of s is 0 or 1.
    """
    work = []
    for s in range(n):
        work += [(s, p, p + 1) for p in range(s, n - 1, 2)]
    # Pair the last tiles of matrix rows with an odd number of tiles: these tiles are in the last
    # column, and share the block of that column.
    left = [s for s in range(n) if (n - s) % 2]
    work += [
        (n - 1, *left[i : i + 2]) if len(left) > i + 1 else (n - 1, left[i], -1)
        for i in range(0, len(left), 2)
    ]
    return np.array([(s, p, q, 0 if p == s else 1 if q == s else 2) for s, p, q in work], np.int32)


def symmetric_matmul(
    a_BXY: jax.Array, bcd: jax.Array | None = None, *, transposed: bool
) -> jax.Array:
    """Return a aᵀ of each matrix, or aᵀ a if `transposed`.

    With `bcd`, return b·a + c·a aᵀ, plus d on the diagonal if `bcd` has three numbers.

    Args:
        a_BXY: bf16 or fp16, X and Y multiples of 64, as Mosaic's swizzled tiles require. Half of a
            last tile may be out of bounds: TMA loads zeros there, and stores nothing.
        bcd: two or three fp32 numbers, or None; not if `transposed`.
    """
    batch, *sides = a_BXY.shape
    k, m = sides if transposed else sides[::-1]
    table = schedule(pl.cdiv(m, TILE))
    total = batch * len(table)
    blocks, slices = min(_mosaic.num_sms(), total), pl.cdiv(k, DEPTH)
    coefficients = 0 if bcd is None else len(bcd)
    # For b·a, the part of a at the position of the result follows the operands through the same
    # slots, in two fills.
    steps = slices + (2 if coefficients else 0)

    def kernel(a, table_gmem, *refs):
        *bcd_gmem, out, scratch = refs
        bcd_gmem = bcd_gmem[0] if bcd_gmem else None
        me, first = lax.axis_index("warpgroup"), lax.axis_index("block")
        items = (total - first + blocks - 1) // blocks
        ring = Ring(STAGES, scratch.full, scratch.empty)

        def item(i):
            """Return work item i of this thread block: matrix, s, p, q, place of s."""
            number, table_items = first + i * blocks, jnp.int32(len(table))
            b, entry = lax.div(number, table_items), lax.rem(number, table_items)
            return b, *(table_gmem[entry, j] for j in range(4))

        def columns(p, q, j):
            """Return the first column of part j of four. If the work item is a single tile, parts 2
            and 3 repeat p and are not stored."""
            return (p if j < 2 else jnp.where(q < 0, p, q)) * TILE + j % 2 * HALF

        @pl.when(me == MULTIPLIERS)
        def _load():
            plgpu.set_max_registers(40, action="decrease")

            def copy(source, slot, place):
                where = place if transposed else pl.ds(place * TILE, TILE)
                target = scratch.operands.at[slot, where]
                plgpu.copy_gmem_to_smem(a.at[source], target, ring.full.at[slot])

            @pl.loop(0, items)
            def _(i):
                b, s, p, q, where = item(i)

                @pl.loop(0, slices)
                def _(step):
                    done = i * steps + step
                    slot = ring.slot(done)
                    ring.wait_empty(done)

                    def load(tile, place):
                        rows, inner = pl.ds(tile * TILE, TILE), pl.ds(step * DEPTH, DEPTH)
                        copy((b, inner, rows) if transposed else (b, rows, inner), slot, place)

                    load(p, 0)
                    load(jnp.where(q < 0, p, q), 1)
                    pl.when(where == 2)(lambda: load(s, 2))
                    pl.when(where != 2)(lambda: plgpu.barrier_arrive(ring.full.at[slot]))

                for half in range(steps - slices):
                    done = i * steps + slices + half
                    slot = ring.slot(done)
                    ring.wait_empty(done)
                    for place in range(2):
                        span = pl.ds(columns(p, q, 2 * half + place), HALF)
                        copy((b, pl.ds(s * TILE, TILE), span), slot, place)
                    plgpu.barrier_arrive(ring.full.at[slot])

            ring.drain_unrolled(items * steps)

        def contraction(acc, i, where):
            """Return the matmuls of work item i, summed over all slices."""
            operands = scratch.operands

            @pl.loop(0, slices)
            def _(step):
                done = i * steps + step
                slot = ring.slot(done)
                ring.wait_full(slot)
                if transposed:
                    left = operands.at[slot, where, :, pl.ds(me * HALF, HALF)].transpose((1, 0))
                    plgpu.wgmma(acc.at[:, pl.ds(0, TILE)], left, operands.at[slot, 0])
                    plgpu.wgmma(acc.at[:, pl.ds(TILE, TILE)], left, operands.at[slot, 1])
                    plgpu.wgmma_wait(2)
                else:
                    left = operands.at[slot, pl.ds(where * TILE + me * HALF, HALF)]
                    plgpu.wgmma(acc, left, operands.at[slot, pl.ds(0, 2 * TILE)].transpose((1, 0)))
                    plgpu.wgmma_wait(1)

                # The matmuls of the previous slice are complete.
                @pl.when(step > 0)
                def _():
                    ring.release(ring.slot(done + STAGES - 1))

            return acc[...]

        def add_scaled(part, i, j):
            """Return b·a + c·part for part j of work item i."""
            slot = ring.slot(i * steps + slices + j // 2)
            if j % 2 == 0:
                ring.wait_full(slot)
            place = scratch.operands.at[slot, pl.ds(j % 2 * TILE + me * HALF, HALF)]
            own = plgpu.load(place, layout=plgpu.Layout.WGMMA)
            if j % 2 == 1:
                plgpu.commit_smem()  # Complete the reads before TMA overwrites the slot.
                ring.release(slot)
            return bcd_gmem[0] * own.astype(jnp.float32) + bcd_gmem[1] * part

        def add_diagonal(part, s, p, q, j):
            """Add d to the elements of part j that are on the diagonal of the matrix."""
            row, column = (
                plgpu.broadcasted_iota(jnp.int32, (HALF, HALF), axis, layout=plgpu.Layout.WGMMA)
                for axis in (0, 1)
            )
            apart = columns(p, q, j) - s * TILE - me * HALF
            return jnp.where(row == column + apart, part + bcd_gmem[2], part)

        def store(b, s, tile, column, part) -> None:
            """Start the copy of a part to global memory, and of the part's transpose if the tile is
            not on the diagonal."""
            direct, mirror = scratch.direct, scratch.mirror
            rows, span = pl.ds(s * TILE + me * HALF, HALF), pl.ds(column, HALF)

            @pl.when(tile >= 0)
            def _():
                @pl.when(tile != s)
                def _():
                    # All copies except the newest are complete, including the previous transpose.
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    mirror.at[me].transpose((1, 0))[...] = part
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(mirror.at[me], out.at[b, span, rows])
                    # The copy of the previous part is complete too.
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)

                @pl.when(tile == s)
                def _():
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                direct[me] = part
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(direct.at[me], out.at[b, rows, span])

        @pl.when(me < MULTIPLIERS)
        def _multiply():
            plgpu.set_max_registers(232, action="increase")

            @pl.loop(0, items)
            def _(i):
                b, s, p, q, where = item(i)
                sums = pl.run_scoped(
                    lambda acc: contraction(acc, i, where),
                    plgpu.ACC((HALF, 2 * TILE), jnp.float32),
                )
                ring.release(ring.slot(i * steps + slices - 1))
                for j in range(4):
                    part = sums[:, j * HALF : (j + 1) * HALF]
                    if coefficients:
                        part = add_scaled(part, i, j)
                    if coefficients == 3:
                        part = add_diagonal(part, s, p, q, j)
                    column = columns(p, q, j)
                    store(b, s, p if j < 2 else q, column, part.astype(out.dtype))

            plgpu.wait_smem_to_gmem(0)

    dtype = a_BXY.dtype
    operands = (STAGES, 3, DEPTH, TILE) if transposed else (STAGES, 3 * TILE, DEPTH)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, m, m), dtype),
        scratch_types=[
            _mosaic.scratch(
                operands=swizzled(operands, dtype),
                direct=swizzled((MULTIPLIERS, HALF, HALF), dtype),
                mirror=swizzled((MULTIPLIERS, HALF, HALF), dtype),
                full=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
                empty=plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=STAGES),
            )
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        compiler_params=compiler_params(),
    )
    return run(a_BXY, jnp.asarray(table), *([] if bcd is None else [bcd]))
