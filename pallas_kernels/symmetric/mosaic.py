"""Symmetric products on Hopper: TMA, wgmma, one persistent block of threads per multiprocessor
(Pallas Mosaic GPU).

One piece of work is two tiles (s, p) and (s, q) of 128×128 of one matrix, which share the 128 rows
s: 128×256 results from three blocks of operands instead of four, two where one of the tiles lies on
the diagonal. One warpgroup loads, two multiply, 64 of the rows each. What was tried beside this:
docs/kernels/symmetric.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import pl, plgpu

TILE = 128
# rows of one multiplying warpgroup, and the width of a piece of results: 128 bytes, one swizzle
HALF = 64
MULTIPLIERS = 2
# Slices of the sum that are under way, of three blocks each: 192 KB, beside 32 KB of results. Three
# cost aᵀ a 24×3072×768 10 %.
DEPTH, STAGES = 64, 4


def schedule(n: int) -> np.ndarray:
    """The work on one matrix of n×n tiles: rows (s, p, q, where s lies), int32.

    Every tile on or above the diagonal belongs to one row, as {s, p} or {s, q}; q = −1 where one
    tile was left over. Operand blocks are kept as p, q, s; s is taken from p's or q's place (0, 1)
    if it is the same block, else from its own (2).
    """
    work = []
    for s in range(n):
        work += [(s, p, p + 1) for p in range(s, n - 1, 2)]
    # Rows with an odd number of tiles leave their last one, and all of those are in the last
    # column: they share that block.
    left = [s for s in range(n) if (n - s) % 2]
    work += [
        (n - 1, *left[i : i + 2]) if len(left) > i + 1 else (n - 1, left[i], -1)
        for i in range(0, len(left), 2)
    ]
    return np.array([(s, p, q, 0 if p == s else 1 if q == s else 2) for s, p, q in work], np.int32)


def product(a_BXY: jax.Array, bcd: jax.Array | None, *, contract: int) -> jax.Array:
    """a aᵀ (contract=2) or aᵀ a (contract=1) of each matrix; with `bcd`, b·a + c·a aᵀ, and d on the
    diagonal where there are three.

    Args:
        a_BXY: bf16 or fp16, X and Y multiples of 64, as Mosaic's swizzled tiles ask. Half of a last
            tile may lie past the edge:
            TMA reads zeros there, and writes nothing.
        bcd: two or three fp32 numbers, or None; only with contract=2.
    """
    batch, *sides = a_BXY.shape
    m, k = (sides[0], sides[1]) if contract == 2 else (sides[1], sides[0])
    scaled = bcd is not None
    slices = pl.cdiv(k, DEPTH)
    # With b·a, the tiles' own part of a follows the operands through the same slots, two of its
    # four pieces at a time.
    steps = slices + 2 * scaled
    table = schedule(pl.cdiv(m, TILE))
    total = batch * len(table)
    blocks = min(_mosaic.num_sms(), total)
    dtype = a_BXY.dtype

    def kernel(a_ref, table_ref, *refs):
        bcd_ref, out_ref, operands, direct, mirror, full, empty = refs if scaled else (None, *refs)
        me, first = lax.axis_index("warpgroup"), lax.axis_index("block")
        mine = (total - first + blocks - 1) // blocks

        def work(i):
            """This block's i-th piece of work: matrix, s, p, q, where s lies."""
            b, entry = (
                lax.div(first + i * blocks, len(table)),
                lax.rem(first + i * blocks, len(table)),
            )
            return b, *(table_ref[entry, j] for j in range(4))

        def columns(p, q, j):
            """Where the j-th of the four pieces starts. A lone tile's other half is p's again;
            nothing of it is stored."""
            return (p if j < 2 else jnp.where(q < 0, p, q)) * TILE + j % 2 * HALF

        def store(b, s, tile, column, piece):
            """Sends a piece of results on its way, and its mirror image if it is not from the
            diagonal."""
            rows, span = pl.ds(s * TILE + me * HALF, HALF), pl.ds(column, HALF)

            @pl.when(tile >= 0)
            def _():
                @pl.when(tile != s)
                def _():
                    # All but the last to be sent have left: the mirror image of the piece before
                    # this.
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    mirror.at[me].transpose((1, 0))[...] = piece
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(mirror.at[me], out_ref.at[b, span, rows])
                    # Now the piece before this itself.
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)

                @pl.when(tile == s)
                def _():
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                direct[me] = piece
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(direct.at[me], out_ref.at[b, rows, span])

        @pl.when(me == MULTIPLIERS)
        def _load():
            plgpu.set_max_registers(40, action="decrease")

            def wait_until_empty(done):
                @pl.when(done >= STAGES)
                def _():
                    plgpu.barrier_wait(empty.at[lax.rem(done, STAGES)])

            def block(slot, place):
                return (
                    operands.at[slot, pl.ds(place * TILE, TILE)]
                    if contract == 2
                    else operands.at[slot, place]
                )

            @pl.loop(0, mine)
            def _(i):
                b, s, p, q, where = work(i)

                @pl.loop(0, slices)
                def _(step):
                    done = i * steps + step
                    slot = lax.rem(done, STAGES)
                    wait_until_empty(done)

                    def load(tile, place):
                        rows, inner = pl.ds(tile * TILE, TILE), pl.ds(step * DEPTH, DEPTH)
                        source = a_ref.at[(b, rows, inner) if contract == 2 else (b, inner, rows)]
                        plgpu.copy_gmem_to_smem(source, block(slot, place), full.at[slot])

                    load(p, 0)
                    load(jnp.where(q < 0, p, q), 1)
                    pl.when(where == 2)(lambda: load(s, 2))
                    pl.when(where != 2)(lambda: plgpu.barrier_arrive(full.at[slot]))

                for half in range(2 * scaled):
                    done = i * steps + slices + half
                    slot = lax.rem(done, STAGES)
                    wait_until_empty(done)
                    for place in range(2):
                        span = pl.ds(columns(p, q, 2 * half + place), HALF)
                        source = a_ref.at[b, pl.ds(s * TILE, TILE), span]
                        plgpu.copy_gmem_to_smem(source, block(slot, place), full.at[slot])
                    plgpu.barrier_arrive(full.at[slot])

            # Every arrival is waited for before the block ends.
            for extra in range(STAGES):
                wait_until_empty(mine * steps + extra)

        @pl.when(me < MULTIPLIERS)
        def _multiply():
            plgpu.set_max_registers(232, action="increase")

            @pl.loop(0, mine)
            def _(i):
                b, s, p, q, where = work(i)

                def sum_up(acc):
                    @pl.loop(0, slices)
                    def _(step):
                        done = i * steps + step
                        slot = lax.rem(done, STAGES)
                        plgpu.barrier_wait(full.at[slot])
                        if contract == 2:
                            left = operands.at[slot, pl.ds(where * TILE + me * HALF, HALF)]
                            plgpu.wgmma(
                                acc, left, operands.at[slot, pl.ds(0, 2 * TILE)].transpose((1, 0))
                            )
                            plgpu.wgmma_wait(1)
                        else:
                            left = operands.at[slot, where, :, pl.ds(me * HALF, HALF)].transpose(
                                (1, 0)
                            )
                            plgpu.wgmma(acc.at[:, pl.ds(0, TILE)], left, operands.at[slot, 0])
                            plgpu.wgmma(acc.at[:, pl.ds(TILE, TILE)], left, operands.at[slot, 1])
                            plgpu.wgmma_wait(2)

                        # The products of the slice before this one are done.
                        @pl.when(step > 0)
                        def _():
                            plgpu.barrier_arrive(empty.at[lax.rem(done + STAGES - 1, STAGES)])

                    return acc[...]

                sums = pl.run_scoped(sum_up, plgpu.ACC((HALF, 2 * TILE), jnp.float32))
                plgpu.barrier_arrive(empty.at[lax.rem(i * steps + slices - 1, STAGES)])
                for j in range(4):
                    piece = sums[:, j * HALF : (j + 1) * HALF]
                    if scaled:
                        slot = lax.rem(i * steps + slices + j // 2, STAGES)
                        if j % 2 == 0:
                            plgpu.barrier_wait(full.at[slot])
                        place = operands.at[slot, pl.ds(j % 2 * TILE + me * HALF, HALF)]
                        own = plgpu.load(place, layout=plgpu.Layout.WGMMA)
                        if j % 2 == 1:
                            plgpu.commit_smem()  # read, before TMA writes there again
                            plgpu.barrier_arrive(empty.at[slot])
                        piece = bcd_ref[0] * own.astype(jnp.float32) + bcd_ref[1] * piece
                    if scaled and len(bcd) == 3:
                        row, column = (
                            plgpu.broadcasted_iota(
                                jnp.int32, (HALF, HALF), axis, layout=plgpu.Layout.WGMMA
                            )
                            for axis in (0, 1)
                        )
                        apart = columns(p, q, j) - s * TILE - me * HALF
                        piece = jnp.where(row == column + apart, piece + bcd_ref[2], piece)
                    store(b, s, p if j < 2 else q, columns(p, q, j), piece.astype(dtype))

            plgpu.wait_smem_to_gmem(0)

    def shared(shape):
        return plgpu.SMEM(
            shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        )

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, m, m), dtype),
        scratch_types=[
            shared((STAGES, 3 * TILE, DEPTH) if contract == 2 else (STAGES, 3, DEPTH, TILE)),
            shared((MULTIPLIERS, HALF, HALF)),
            shared((MULTIPLIERS, HALF, HALF)),
            plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=STAGES),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
    )
    return run(a_BXY, jnp.asarray(table), *([bcd] if scaled else []))
