"""The Mosaic GPU back end for Hopper: TMA, wgmma, persistent blocks of a warpgroup that loads and
two that compute.

Shapes: N rows, I inputs, O outputs; a tile of the result is M×P, its products run over K inputs at
a time.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import pl, plgpu, swizzled


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the forward product is cut.

    Attributes:
        rows, columns: of the tile that one warpgroup computes.
        depth: inputs in one step.
        stages: steps that shared memory holds.
        cluster: blocks, one below another, that share each tile of w.
        part_rows, part_columns: of the tile are activated and written at a time.
        slots: parts that wait to be written, for each warpgroup. They divide the parts that lie one
            below the other: so the next tile's first part finds its slot free when all but the
            newest `slots` − 1 copies are done, whichever columns were the last.
    """

    rows: int = 128
    columns: int = 192
    depth: int = 64
    stages: int = 4
    cluster: int = 1
    part_rows: int = 64
    part_columns: int = 64
    slots: int = 2

    def __post_init__(self):
        parts = self.rows // self.part_rows
        if parts % self.slots:
            raise ValueError(
                f"linear_gelu: {self.slots} slots do not divide the {parts} parts of a column"
            )

    def divide(self, n: int, i: int, o: int) -> bool:
        # The last tile of a row may be cut. TMA reads zeros past the end.
        wasted = pl.cdiv(o, self.columns) * self.columns - o
        whole = (
            n % (self.rows * self.cluster) == 0
            and i % self.depth == 0
            and o % self.part_columns == 0
        )
        return whole and wasted <= MOST_WASTED * o

    def parts(self) -> list[tuple[slice, slice]]:
        """Rows and columns of each part of a tile, those with the same columns one after the
        other."""
        return [
            (slice(m, m + self.part_rows), slice(p, p + self.part_columns))
            for p in range(0, self.columns, self.part_columns)
            for m in range(0, self.rows, self.part_rows)
        ]


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """Tile sizes of `backward`. Library: not used by the shipped models.

    Attributes:
        columns: of dx in a tile of 128 rows.
        depth, stages: as in `Tiles`.
        registers: the left operands stay in registers; else they pass through shared memory, as the
            CPU's interpreter wants.
    """

    columns: int = 256
    depth: int = 64
    stages: int = 3
    registers: bool = True

    def divide(self, n: int, i: int, o: int) -> bool:
        # A tile's share of du is at most 64 steps, a row of an accumulator for each.
        shares = -(-o // self.depth // max(1, i // self.columns))
        return n % 128 == 0 and o % self.depth == 0 and i % self.columns == 0 and shares <= 64


# Of a row, the share that its tiles may have past the end. GPT-2's other widths: 1 to 3 %.
MOST_WASTED = 0.05
# The fastest first (H200, bf16). Forward of 65536×768×3072, where a bare product took 0.44 ms: 0.50
# ms with 192 columns, 0.535 without the cluster, 0.50–0.55 in parts of 64×32, more with 128 or 256
# columns. At the other widths 192 columns take 3 to 9 % less than 128, forward and for du, though
# the last tile is cut.
FORWARD = (Tiles(cluster=2), Tiles(columns=128, stages=5))
BACKWARD = (BackwardTiles(), BackwardTiles(columns=128, stages=4))


def forward_tiles(n: int, i: int, o: int) -> Tiles | None:
    """The first of `FORWARD` that divides the sizes; None where none does."""
    return next((tiles for tiles in FORWARD if tiles.divide(n, i, o)), None)


def backward_tiles(n: int, i: int, o: int) -> BackwardTiles | None:
    """The first of `BACKWARD` that divides the sizes; None where none does."""
    return next((tiles for tiles in BACKWARD if tiles.divide(n, i, o)), None)


def why_not(n: int, i: int, o: int) -> str | None:
    """None where there are tiles for the forward pass, else the reason."""
    if forward_tiles(n, i, o) is None:
        return (
            f"has no tiles that divide N={n}, I={i}, O={o}: it takes N of 128, I of 64, O of 128, "
            "or N of 256 and O of 64 "
            f"a little below a multiple of {FORWARD[0].columns}"
        )
    return None


# One trace and one lowering however many layers call it: these took 28 s of a step's compilation,
# and no cache spares them.
@functools.partial(jax.jit, static_argnames=("epilogue", "save", "tiles"))
def forward(x_NI, w_IO, b_O, epilogue, *, save: bool, tiles: Tiles | None = None):
    """(y, derivative) = epilogue(x w + b), or y alone; each N×O in x's dtype.

    Args:
        b_O: fp32.
        epilogue: fp32 tile → the two fp32 tiles.
        save: whether the derivative is written too.
    """
    n, o, dtype = x_NI.shape[0], w_IO.shape[1], x_NI.dtype
    tiles = tiles or forward_tiles(*x_NI.shape, o)
    outputs = 1 + save

    def begin(at, refs):
        b_gmem, *_, b_smem, _, filled = refs
        plgpu.copy_gmem_to_smem(b_gmem.at[at.columns], b_smem.at[at.wg], filled.at[at.wg])

    def finish(at, acc_MP, refs):
        _, *out_gmem, b_smem, out_smem, filled = refs
        plgpu.barrier_wait(filled.at[at.wg])
        for part, (rows, columns) in enumerate(tiles.parts()):

            @at.unless_past_the_end(columns)
            def _part(slot=part % tiles.slots, rows=rows, columns=columns):
                b_P = plgpu.load(
                    b_smem.at[at.wg, columns], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
                )
                part_MP = acc_MP[rows, columns]
                results = epilogue(part_MP + lax.broadcast_in_dim(b_P, part_MP.shape, [1]))[
                    :outputs
                ]
                plgpu.wait_smem_to_gmem(tiles.slots - 1, wait_read_only=True)
                for which, result in enumerate(results):
                    out_smem[at.wg, slot, which] = result.astype(dtype)
                plgpu.commit_smem()
                for which in range(outputs):
                    plgpu.copy_smem_to_gmem(
                        out_smem.at[at.wg, slot, which],
                        out_gmem[which].at[at.rows, at.columns].at[rows, columns],
                        commit_group=which == outputs - 1,
                    )

    return _product(
        x_NI,
        w_IO,
        b_O,
        tiles=tiles,
        begin=begin,
        finish=finish,
        out_type=[jax.ShapeDtypeStruct((n, o), dtype)] * outputs,
        scratch_types=[
            plgpu.SMEM((2, tiles.columns), jnp.float32),
            swizzled((2, tiles.slots, outputs, tiles.part_rows, tiles.part_columns), dtype),
            plgpu.Barrier(num_barriers=2),
        ],
    )


@functools.partial(jax.jit, static_argnames="tiles")
def through_product(dy_NC, w2_OC, derivative_NO, *, tiles: Tiles | None = None):
    """(du, db): du = (dy w₂ᵀ) · derivative, N×O in dy's dtype, and db = Σ_N du in fp32.

    The product is `forward`'s, with the multiplication behind it in place of the activation. A
    warpgroup reads each part of du across, out of the shared memory that it is written from: so a
    sum over its rows stays inside of a warp.
    """
    n, o, dtype = dy_NC.shape[0], w2_OC.shape[0], dy_NC.dtype
    tiles = tiles or forward_tiles(*dy_NC.shape, o)
    parts = tiles.parts()
    part_shape = (2, tiles.slots, tiles.part_rows, tiles.part_columns)
    part_sums = tiles.rows // tiles.part_rows

    def fetch(at, refs, part):
        if part < len(parts):
            g_gmem, g_smem, filled = refs[0], refs[-4], refs[-1]
            g = g_gmem.at[at.rows, at.columns].at[parts[part]]
            slot = part % tiles.slots

            @at.unless_past_the_end(parts[part][1])
            def _fetch():
                plgpu.copy_gmem_to_smem(g, g_smem.at[at.wg, slot], filled.at[at.wg, slot])

    def begin(at, refs):
        for part in range(tiles.slots):
            fetch(at, refs, part)

    def finish(at, acc_MP, refs):
        _, du_gmem, db_gmem, g_smem, out_smem, db_smem, filled = refs
        for first in range(0, len(parts), part_sums):
            columns = parts[first][1]

            @at.unless_past_the_end(columns)
            def _columns(first=first, columns=columns):
                sum_P = None
                for part in range(first, first + part_sums):
                    rows, slot, last = (
                        parts[part][0],
                        part % tiles.slots,
                        part == first + part_sums - 1,
                    )
                    out, g = out_smem.at[at.wg, slot], g_smem.at[at.wg, slot]
                    plgpu.barrier_wait(filled.at[at.wg, slot])
                    du_MP = acc_MP[rows, columns] * plgpu.load(g, layout=plgpu.Layout.WGMMA).astype(
                        jnp.float32
                    )
                    plgpu.wait_smem_to_gmem(tiles.slots - 1, wait_read_only=True)
                    out[...] = du_MP.astype(dtype)
                    # Behind this the whole warpgroup has read the derivative, too.
                    plgpu.commit_smem()
                    target = du_gmem.at[at.rows, at.columns].at[rows, columns]
                    plgpu.copy_smem_to_gmem(out, target, commit_group=not last)
                    fetch(at, refs, part + tiles.slots)
                    du_PM = plgpu.load(out.transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED)
                    part_P = du_PM.astype(jnp.float32).sum(1)
                    sum_P = part_P if sum_P is None else sum_P + part_P
                # What the last tile had here has left: all but the newest `slots` groups of copies
                # have.
                db_smem[at.wg, columns] = sum_P
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    db_smem.at[at.wg, columns], db_gmem.at[at.row_tile, at.columns].at[columns]
                )

    du_NO, db_RO = _product(
        dy_NC,
        w2_OC,
        derivative_NO,
        tiles=tiles,
        transposed=True,
        begin=begin,
        finish=finish,
        out_type=[
            jax.ShapeDtypeStruct((n, o), dtype),
            jax.ShapeDtypeStruct((n // tiles.rows, o), jnp.float32),
        ],
        scratch_types=[
            swizzled(part_shape, dtype),
            swizzled(part_shape, dtype),
            plgpu.SMEM((2, tiles.columns), jnp.float32),
            plgpu.Barrier(num_barriers=(2, tiles.slots)),
        ],
    )
    return du_NO, db_RO.sum(0)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Which tile a warpgroup has: its rows and columns as slices, and its rows as an index of
    tiles."""

    wg: jax.Array
    rows: pl.Slice
    columns: pl.Slice
    row_tile: jax.Array
    columns_left: jax.Array | None
    """From its first column to the end, where that may be less than its width; else None."""

    def unless_past_the_end(self, columns: slice):
        """Decorator: runs the function at once where these of the tile's columns exist."""
        if self.columns_left is None:
            return lambda f: f()
        return pl.when(columns.start < self.columns_left)


def _product(
    x_NI,
    w,
    other,
    *,
    tiles: Tiles,
    begin,
    finish,
    out_type,
    scratch_types,
    transposed: bool = False,
):
    """Runs over the tiles of x w.

    Each of the two warpgroups has its own tiles: one finishes and writes while the other's products
    run. Both eat from one ring of operands, in the order of the tiles.

    Args:
        w: I×O, or O×I where `transposed`.
        other: one more array, for `begin` and `finish`.
        begin: (tile, refs) → nothing: starts copies of what `finish` wants. The refs are those of
            `other`, the outputs and `scratch_types`.
        finish: (tile, fp32 product, refs) → nothing.
    """
    (n, i), dtype = x_NI.shape, x_NI.dtype
    o = w.shape[0 if transposed else 1]
    row_tiles, column_tiles, steps = (
        n // (tiles.rows * tiles.cluster),
        pl.cdiv(o, tiles.columns),
        i // tiles.depth,
    )
    clusters = _mosaic.num_sms() // tiles.cluster
    total = row_tiles * column_tiles

    def kernel(x_gmem, w_gmem, *refs):
        *refs, x_smem, w_smem, filled, consumed = refs
        wg = lax.axis_index("wg")
        cluster, peer = lax.axis_index("cluster"), lax.axis_index("peer")
        # Tiles cluster, cluster + clusters, … of the whole are this block's; warpgroup 0 takes the
        # first, 1 the second, …
        local = lax.div(total - cluster + clusters - 1, jnp.int32(clusters))

        def position(tile):
            index = tile * clusters + cluster
            row = lax.div(index, jnp.int32(column_tiles)) * tiles.cluster + peer
            column = lax.rem(index, jnp.int32(column_tiles))
            first_row, first_column = row * tiles.rows, column * tiles.columns
            rows, columns = pl.ds(first_row, tiles.rows), pl.ds(first_column, tiles.columns)
            return _Tile(wg, rows, columns, row, o - first_column if o % tiles.columns else None)

        def slot_of(step):
            return lax.rem(step, jnp.int32(tiles.stages))

        @pl.when(wg == 2)
        def _load():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, local * steps)
            def _step(step):
                slot, tile, k = (
                    slot_of(step),
                    lax.div(step, jnp.int32(steps)),
                    lax.rem(step, jnp.int32(steps)),
                )
                at = position(tile)
                depth = pl.ds(k * tiles.depth, tiles.depth)

                @pl.when(step >= tiles.stages)
                def _():
                    plgpu.barrier_wait(consumed.at[slot])

                barrier = filled.at[lax.rem(tile, jnp.int32(2)), slot]
                plgpu.copy_gmem_to_smem(x_gmem.at[at.rows, depth], x_smem.at[slot], barrier)
                plgpu.copy_gmem_to_smem(
                    w_gmem.at[at.columns, depth] if transposed else w_gmem.at[depth, at.columns],
                    w_smem.at[slot],
                    barrier,
                    collective_axes="peer" if tiles.cluster > 1 else None,
                )

            # No block ends while another of its cluster may still signal to it.
            @pl.loop(jnp.maximum(local * steps - tiles.stages, 0), local * steps)
            def _drain(step):
                plgpu.barrier_wait(consumed.at[slot_of(step)])

        @pl.when(wg < 2)
        def _compute():
            plgpu.set_max_registers(232, action="increase")

            @pl.loop(0, lax.div(local - wg + 1, jnp.int32(2)))
            def _tile(turn):
                tile = turn * 2 + wg
                at = position(tile)
                begin(at, refs)

                def products(acc_ref):
                    first = tile * steps

                    def step(k, _):
                        slot = slot_of(first + k)
                        plgpu.barrier_wait(filled.at[wg, slot])
                        w_KP = w_smem.at[slot].transpose((1, 0)) if transposed else w_smem.at[slot]
                        plgpu.wgmma(acc_ref, x_smem.at[slot], w_KP)
                        # This step's product runs while the last one's operands are given back.
                        plgpu.wgmma_wait(1)

                        @pl.when(k > 0)
                        def _():
                            plgpu.barrier_arrive(consumed.at[slot_of(first + k - 1)])

                    lax.fori_loop(0, steps, step, None)
                    return acc_ref[...]

                acc_MP = pl.run_scoped(
                    products, plgpu.ACC((tiles.rows, tiles.columns), jnp.float32)
                )
                plgpu.barrier_arrive(consumed.at[slot_of(tile * steps + steps - 1)])
                finish(at, acc_MP, refs)

            plgpu.wait_smem_to_gmem(0)

    consumed = plgpu.Barrier(num_barriers=tiles.stages)
    if tiles.cluster > 1:
        consumed = plgpu.ClusterBarrier(collective_axes=("peer",), num_barriers=tiles.stages)
    f = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=[
            *scratch_types,
            swizzled((tiles.stages, tiles.rows, tiles.depth), dtype),
            swizzled(
                (
                    tiles.stages,
                    *((tiles.columns, tiles.depth) if transposed else (tiles.depth, tiles.columns)),
                ),
                dtype,
            ),
            plgpu.Barrier(num_arrivals=2, num_barriers=(2, tiles.stages)),
            consumed,
        ],
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(tiles.cluster,),
        cluster_names=("peer",),
        num_threads=3,
        thread_name="wg",
        # Sums stay inside of a warp.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return tuple(f(x_NI, w, other))


@functools.partial(jax.jit, static_argnames=("bias", "tiles"))
def backward(dy_NO, derivative_NO, w_IO, *, bias: bool, tiles: BackwardTiles | None = None):
    """(dx, du, db): du = dy · derivative, dx = du wᵀ, db = Σ_N du in fp32 or None.

    Library: the backward pass of `linear_gelu` and `linear_relu_squared` by themselves. The shipped
    models call `mlp`, whose backward pass is `through_product`.

    Two warpgroups have 64 rows of a tile each and form du in registers, where it is the product's
    left operand. A block keeps to one column of tiles. The blocks that share rows take turns, K
    columns of du at a time, to write them; such a share's sums are a product too, with a left
    operand of ones in one row, another for each share. (Mosaic's own sums over rows go through
    scratch memory that the warpgroups of a block share: two at once came out wrong.)
    """
    n, o = dy_NO.shape
    i = w_IO.shape[0]
    dtype = dy_NO.dtype
    tiles = tiles or backward_tiles(n, i, o)
    half, depth, columns = 64, tiles.depth, tiles.columns
    row_tiles, column_tiles, steps = n // (2 * half), i // columns, o // depth
    row_blocks = max(1, min(_mosaic.num_sms() // column_tiles, row_tiles))

    def kernel(
        dy_gmem, g_gmem, w_gmem, dx_gmem, du_gmem, db_gmem, dy_smem, g_smem, w_smem, out_smem,
        db_smem, *rest
    ):  # fmt: skip
        *ones_smem, filled, consumed, db_written = rest
        wg, column, first_row = (
            lax.axis_index("wg"),
            lax.axis_index("column"),
            lax.axis_index("row"),
        )
        local = lax.div(row_tiles - first_row + row_blocks - 1, jnp.int32(row_blocks))
        our_columns = pl.ds(column * columns, columns)

        def slot_of(step):
            return lax.rem(step, jnp.int32(tiles.stages))

        def at(k):
            return pl.ds(k * depth, depth)

        @pl.when(wg == 2)
        def _load():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, local * steps)
            def _step(step):
                slot, tile, k = (
                    slot_of(step),
                    lax.div(step, jnp.int32(steps)),
                    lax.rem(step, jnp.int32(steps)),
                )

                @pl.when(step >= tiles.stages)
                def _():
                    plgpu.barrier_wait(consumed.at[slot])

                rows = pl.ds((tile * row_blocks + first_row) * 2 * half, 2 * half)
                plgpu.copy_gmem_to_smem(dy_gmem.at[rows, at(k)], dy_smem.at[slot], filled.at[slot])
                plgpu.copy_gmem_to_smem(g_gmem.at[rows, at(k)], g_smem.at[slot], filled.at[slot])
                plgpu.copy_gmem_to_smem(
                    w_gmem.at[our_columns, at(k)], w_smem.at[slot], filled.at[slot]
                )

            @pl.loop(jnp.maximum(local * steps - tiles.stages, 0), local * steps)
            def _drain(step):
                plgpu.barrier_wait(consumed.at[slot_of(step)])

        @pl.when(wg < 2)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(wg * half, half)

            def left_operand(array, smem):
                if tiles.registers:
                    return array
                smem[...] = array
                plgpu.commit_smem()
                return smem

            def one_tile(tile, db):
                rows = pl.ds(((tile * row_blocks + first_row) * 2 + wg) * half, half)

                def products(dx_acc, *db_acc):
                    def step(k, _):
                        slot = slot_of(tile * steps + k)
                        plgpu.barrier_wait(filled.at[slot])
                        du_MK = dy_smem[slot, mine] * g_smem[slot, mine]
                        plgpu.wgmma(
                            dx_acc,
                            left_operand(du_MK, dy_smem.at[slot, mine]),
                            w_smem.at[slot].transpose((1, 0)),
                        )

                        @pl.when(lax.rem(k, jnp.int32(column_tiles)) == column)
                        def _share():
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                            out_smem[wg] = du_MK
                            plgpu.commit_smem()
                            plgpu.copy_smem_to_gmem(out_smem.at[wg], du_gmem.at[rows, at(k)])
                            if bias:
                                row_MM = plgpu.broadcasted_iota(
                                    jnp.int32, (half, half), 0, layout=plgpu.Layout.WGMMA
                                )
                                ones_MM = (row_MM == lax.div(k, jnp.int32(column_tiles))).astype(
                                    dtype
                                )
                                ones = left_operand(
                                    ones_MM, ones_smem[0].at[wg] if ones_smem else None
                                )
                                plgpu.wgmma(db_acc[0], ones, out_smem.at[wg])

                        # Not before the product is done, though dy and the derivative are in
                        # registers long since: given back right after they were read, some were
                        # overwritten before (seen in dx).
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(consumed.at[slot])

                    lax.fori_loop(0, steps, step, None)
                    return tuple(acc[...] for acc in (dx_acc, *db_acc))

                shapes = [(half, columns)] + [(half, depth)] * bias
                dx_MP, *more = pl.run_scoped(
                    products, *[plgpu.ACC(shape, jnp.float32) for shape in shapes]
                )
                for p in range(0, columns, depth):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_smem[wg] = dx_MP[:, p : p + depth].astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        out_smem.at[wg], dx_gmem.at[rows, our_columns].at[:, p : p + depth]
                    )
                return [one + other for one, other in zip(db, more, strict=True)]

            zeros = plgpu.layout_cast(jnp.zeros((half, depth), jnp.float32), plgpu.Layout.WGMMA)
            db = lax.fori_loop(0, local, one_tile, [zeros] * bias)
            if bias:
                # There is memory for the sums of one warpgroup.
                @pl.when(wg == 1)
                def _():
                    plgpu.barrier_wait(db_written)

                db_smem[...] = db[0]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(db_smem, db_gmem.at[first_row, wg, column])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                @pl.when(wg == 0)
                def _():
                    plgpu.barrier_arrive(db_written)

            plgpu.wait_smem_to_gmem(0)

    f = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((n, i), dtype),
            jax.ShapeDtypeStruct((n, o), dtype),
            jax.ShapeDtypeStruct((row_blocks, 2, column_tiles, half, depth), jnp.float32),
        ],
        scratch_types=[
            swizzled((tiles.stages, 2 * half, depth), dtype),
            swizzled((tiles.stages, 2 * half, depth), dtype),
            swizzled((tiles.stages, columns, depth), dtype),
            swizzled((2, half, depth), dtype),
            plgpu.SMEM((half, depth) if bias else (1, 1), jnp.float32),
            *([] if tiles.registers else [swizzled((2, half, half), dtype)]),
            plgpu.Barrier(num_arrivals=3, num_barriers=tiles.stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),
            plgpu.Barrier(),
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
