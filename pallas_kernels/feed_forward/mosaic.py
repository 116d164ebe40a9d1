"""Mosaic GPU back end for Hopper: TMA, wgmma, a persistent grid of thread blocks (CTAs). In each
thread block one warpgroup loads and two compute.

A work item is a tile of the result, M×P, of one computing warpgroup. While one warpgroup activates
and stores a tile, the matmul of the other warpgroup runs. Both warpgroups read one ring of
operands, in the order of the tiles.

| barrier | number | arrivals | who arrives | who waits |
| --- | --- | --- | --- | --- |
| `full` | 2 × stages | 2 | the copies of x and w | computing warpgroup 0 or 1 |
| `empty` | stages | cluster | the reading warpgroup of each thread block | loading warpgroup |
| `bias_full` | 2 | 1 | the copy of b | the computing warpgroup that started the copy |
| `derivative_full` | 2 × slots | 1 | the copy of a part | the warpgroup that started the copy |

`cluster` is the number of thread blocks that share w. A slot is free once all thread blocks of the
cluster have released the slot. `forward` uses `bias_full`, `mlp_du` uses `derivative_full`.

Shapes: N rows, I inputs, O outputs; a tile of the result is M×P, and its matmul runs over K inputs
at a time.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ring, pl, plgpu, swizzled


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes of `forward` and `mlp_du`.

    Attributes:
        rows, columns: size of the tile of one warpgroup.
        depth: inputs in one step.
        stages: steps in shared memory.
        cluster: number of thread blocks with consecutive rows that share each tile of w.
        part_rows, part_columns: size of the part of a tile that is activated and stored at a time.
        slots: parts in shared memory for each warpgroup. `slots` divides the number of parts with
            the same columns. Then, for any last columns of a tile, the slot of the next tile's
            first part is free once all but the newest `slots` − 1 copies are complete.
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
        # The last tile of a row may be partly out of bounds: TMA reads zeros there.
        wasted = pl.cdiv(o, self.columns) * self.columns - o
        divisible = (
            n % (self.rows * self.cluster) == 0
            and i % self.depth == 0
            and o % self.part_columns == 0
        )
        return divisible and wasted <= MOST_WASTED * o

    def parts(self) -> list[tuple[slice, slice]]:
        """Return rows and columns of each part of a tile. Parts with the same columns are
        consecutive."""
        return [
            (slice(m, m + self.part_rows), slice(p, p + self.part_columns))
            for p in range(0, self.columns, self.part_columns)
            for m in range(0, self.rows, self.part_rows)
        ]


# Largest fraction of a row's tiles that may be out of bounds. GPT-2's other widths: 1 to 3 %.
MOST_WASTED = 0.05
# Fastest first (H200, bf16). Forward pass of 65536×768×3072: the matmul alone takes 0.44 ms, 192
# columns 0.50 ms, without the cluster 0.535, parts of 64×32 0.50–0.55, 128 or 256 columns more.
# At the other widths 192 columns take 3 to 9 % less time than 128, forward and for du, although the
# last tile is partly out of bounds.
FORWARD = (Tiles(cluster=2), Tiles(columns=128, stages=5))


def forward_tiles(n: int, i: int, o: int) -> Tiles | None:
    """Return the first of `FORWARD` that divides the sizes, or None."""
    return next((tiles for tiles in FORWARD if tiles.divide(n, i, o)), None)


def why_not(n: int, i: int, o: int) -> str | None:
    """Return None if there are tiles for the forward pass, else the reason."""
    if forward_tiles(n, i, o) is None:
        return (
            f"has no tiles that divide N={n}, I={i}, O={o}: N must be a multiple of 128, I of 64 "
            "and O of 128, or N of 256, I of 64 and O of 64 with O a little below a multiple of "
            f"{FORWARD[0].columns}"
        )
    return None


class ForwardScratch(NamedTuple):
    """Scratch of `forward`'s epilogue, in the order of its allocation."""

    bias: Any
    out: Any
    bias_full: Any


class DuScratch(NamedTuple):
    """Scratch of `mlp_du`'s epilogue, in the order of its allocation."""

    derivative: Any
    du: Any
    db: Any
    derivative_full: Any


class Operands(NamedTuple):
    """The ring of operands of `_matmul`, in the order of its allocation."""

    x: Any
    w: Any
    full: Any
    empty: Any


# jit: trace and lower `forward` once for all layers. Tracing and lowering for each layer took 28 s
# of a step's compilation, and no cache of JAX covers this time.
@functools.partial(jax.jit, static_argnames=("epilogue", "save", "tiles"))
def forward(x_NI, w_IO, b_O, epilogue, *, save: bool, tiles: Tiles | None = None):
    """Return (y, derivative) = epilogue(x w + b), or (y,); each N×O in x's dtype.

    Args:
        b_O: fp32.
        epilogue: maps an fp32 tile to two fp32 tiles.
        save: also return the derivative.
    """
    n, o, dtype = x_NI.shape[0], w_IO.shape[1], x_NI.dtype
    tiles = tiles or forward_tiles(*x_NI.shape, o)
    outputs = 1 + save

    def begin(at, b_gmem, scratch):
        bias, full = scratch.bias.at[at.wg], scratch.bias_full.at[at.wg]
        plgpu.copy_gmem_to_smem(b_gmem.at[at.columns], bias, full)

    def finish(at, acc_MP, b_gmem, out_gmem, scratch):
        plgpu.barrier_wait(scratch.bias_full.at[at.wg])
        for part, (rows, columns) in enumerate(tiles.parts()):

            @at.unless_out_of_bounds(columns)
            def _part(slot=part % tiles.slots, rows=rows, columns=columns):
                b_P = plgpu.load(
                    scratch.bias.at[at.wg, columns],
                    layout=plgpu.Layout.WGMMA.reduce(0),
                    optimized=False,
                )
                part_MP = acc_MP[rows, columns]
                results = epilogue(part_MP + lax.broadcast_in_dim(b_P, part_MP.shape, [1]))[
                    :outputs
                ]
                plgpu.wait_smem_to_gmem(tiles.slots - 1, wait_read_only=True)
                for which, result in enumerate(results):
                    scratch.out[at.wg, slot, which] = result.astype(dtype)
                plgpu.commit_smem()
                for which in range(outputs):
                    plgpu.copy_smem_to_gmem(
                        scratch.out.at[at.wg, slot, which],
                        out_gmem[which].at[at.rows, at.columns].at[rows, columns],
                        commit_group=which == outputs - 1,
                    )

    return _matmul(
        x_NI,
        w_IO,
        b_O,
        tiles=tiles,
        begin=begin,
        finish=finish,
        out_type=[jax.ShapeDtypeStruct((n, o), dtype)] * outputs,
        scratch=ForwardScratch(
            bias=plgpu.SMEM((2, tiles.columns), jnp.float32),
            out=swizzled((2, tiles.slots, outputs, tiles.part_rows, tiles.part_columns), dtype),
            bias_full=plgpu.Barrier(num_barriers=2),
        ),
    )


@functools.partial(jax.jit, static_argnames="tiles")
def mlp_du(dy_NC, w2_OC, derivative_NO, *, tiles: Tiles | None = None):
    """Return du = (dy w₂ᵀ) · derivative, N×O in dy's dtype, and db = Σ_N du in fp32.

    The matmul is the matmul of `forward`, followed by the multiplication instead of the activation.
    To sum over rows inside a warp, a warpgroup reads each part of du transposed from shared memory.
    The same shared memory is the source of the copy of du.
    """
    n, o, dtype = dy_NC.shape[0], w2_OC.shape[0], dy_NC.dtype
    tiles = tiles or forward_tiles(*dy_NC.shape, o)
    parts = tiles.parts()
    part_shape = (2, tiles.slots, tiles.part_rows, tiles.part_columns)
    part_sums = tiles.rows // tiles.part_rows

    def fetch(at, g_gmem, scratch, part):
        if part < len(parts):
            g = g_gmem.at[at.rows, at.columns].at[parts[part]]
            slot = part % tiles.slots

            @at.unless_out_of_bounds(parts[part][1])
            def _fetch():
                g_smem, full = scratch.derivative, scratch.derivative_full
                plgpu.copy_gmem_to_smem(g, g_smem.at[at.wg, slot], full.at[at.wg, slot])

    def begin(at, g_gmem, scratch):
        for part in range(tiles.slots):
            fetch(at, g_gmem, scratch, part)

    def finish(at, acc_MP, g_gmem, out_gmem, scratch):
        du_gmem, db_gmem = out_gmem
        for first in range(0, len(parts), part_sums):
            columns = parts[first][1]

            @at.unless_out_of_bounds(columns)
            def _columns(first=first, columns=columns):
                sum_P = None
                for part in range(first, first + part_sums):
                    rows, slot, last = (
                        parts[part][0],
                        part % tiles.slots,
                        part == first + part_sums - 1,
                    )
                    out, g = scratch.du.at[at.wg, slot], scratch.derivative.at[at.wg, slot]
                    plgpu.barrier_wait(scratch.derivative_full.at[at.wg, slot])
                    du_MP = acc_MP[rows, columns] * plgpu.load(g, layout=plgpu.Layout.WGMMA).astype(
                        jnp.float32
                    )
                    plgpu.wait_smem_to_gmem(tiles.slots - 1, wait_read_only=True)
                    out[...] = du_MP.astype(dtype)
                    # After the commit, all threads of the warpgroup have also read the derivative.
                    plgpu.commit_smem()
                    target = du_gmem.at[at.rows, at.columns].at[rows, columns]
                    plgpu.copy_smem_to_gmem(out, target, commit_group=not last)
                    fetch(at, g_gmem, scratch, part + tiles.slots)
                    du_PM = plgpu.load(out.transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED)
                    part_P = du_PM.astype(jnp.float32).sum(1)
                    sum_P = part_P if sum_P is None else sum_P + part_P
                # The copy of the last tile's sums is complete, since all groups of copies except
                # the newest `slots` are complete.
                scratch.db[at.wg, columns] = sum_P
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    scratch.db.at[at.wg, columns], db_gmem.at[at.row_tile, at.columns].at[columns]
                )

    du_NO, db_RO = _matmul(
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
        scratch=DuScratch(
            derivative=swizzled(part_shape, dtype),
            du=swizzled(part_shape, dtype),
            db=plgpu.SMEM((2, tiles.columns), jnp.float32),
            derivative_full=plgpu.Barrier(num_barriers=(2, tiles.slots)),
        ),
    )
    return du_NO, db_RO.sum(0)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Tile of a warpgroup: rows and columns as slices, and the index of the tile's row of tiles.

    Attributes:
        columns_left: columns from the tile's first to the last of the matrix, if the tile may be
            partly out of bounds; else None.
    """

    wg: jax.Array
    rows: pl.Slice
    columns: pl.Slice
    row_tile: jax.Array
    columns_left: jax.Array | None

    def unless_out_of_bounds(self, columns: slice):
        """Decorator that calls the function immediately if these columns are in bounds."""
        if self.columns_left is None:
            return lambda f: f()
        return pl.when(columns.start < self.columns_left)


def _matmul(
    x_NI, w, other, *, tiles: Tiles, begin, finish, out_type, scratch, transposed: bool = False
):
    """Compute x w tile by tile, and call `finish` on each tile.

    Args:
        w: I×O, or O×I if `transposed`.
        other: one more array, for `begin` and `finish`.
        begin: (tile, other, scratch) → None: starts the copies that `finish` waits for.
        finish: (tile, fp32 tile of x w, other, outputs, scratch) → None.
        scratch: a named tuple of scratch types.
    """
    (n, i), dtype = x_NI.shape, x_NI.dtype
    o = w.shape[0 if transposed else 1]
    row_tiles, column_tiles = n // (tiles.rows * tiles.cluster), pl.cdiv(o, tiles.columns)
    clusters = _mosaic.num_sms() // tiles.cluster
    total = row_tiles * column_tiles

    def kernel(x_gmem, w_gmem, other_gmem, *refs):
        *out_gmem, scratch_refs, operands = refs
        wg = lax.axis_index("wg")
        cluster, peer = lax.axis_index("cluster"), lax.axis_index("peer")
        block = _Block(
            tiles=tiles,
            transposed=transposed,
            column_tiles=column_tiles,
            steps=i // tiles.depth,
            columns=o,
            clusters=clusters,
            begin=lambda at: begin(at, other_gmem, scratch_refs),
            finish=lambda at, acc_MP: finish(at, acc_MP, other_gmem, out_gmem, scratch_refs),
            x=x_gmem,
            w=w_gmem,
            operands=operands,
            ring=Ring(tiles.stages, operands.full, operands.empty),
            wg=wg,
            cluster=cluster,
            peer=peer,
            local=lax.div(total - cluster + clusters - 1, jnp.int32(clusters)),
        )
        pl.when(wg == 2)(block.load)
        pl.when(wg < 2)(block.compute)

    empty = plgpu.Barrier(num_barriers=tiles.stages)
    if tiles.cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("peer",), num_barriers=tiles.stages)
    w_tile = (tiles.columns, tiles.depth) if transposed else (tiles.depth, tiles.columns)
    f = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=[
            scratch,
            Operands(
                x=swizzled((tiles.stages, tiles.rows, tiles.depth), dtype),
                w=swizzled((tiles.stages, *w_tile), dtype),
                full=plgpu.Barrier(num_arrivals=2, num_barriers=(2, tiles.stages)),
                empty=empty,
            ),
        ],
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(tiles.cluster,),
        cluster_names=("peer",),
        num_threads=3,
        thread_name="wg",
        # Sums stay inside a warp.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return tuple(f(x_NI, w, other))


@dataclasses.dataclass(frozen=True)
class _Block:
    """The kernel of one thread block: sizes, refs, and the two roles of a warpgroup.

    Tiles cluster, cluster + clusters, … of the result belong to this thread block. The computing
    warpgroups alternate: warpgroup 0 computes the first tile, warpgroup 1 the second tile.

    Attributes:
        steps: number of steps of the matmul of one tile, `tiles.depth` inputs each.
        columns: number of columns of the result.
        cluster, peer: index of the cluster, and of the thread block in the cluster.
        local: number of this thread block's tiles.
    """

    tiles: Tiles
    transposed: bool
    column_tiles: int
    steps: int
    columns: int
    clusters: int
    begin: Any
    finish: Any
    x: Any
    w: Any
    operands: Operands
    ring: Ring
    wg: jax.Array
    cluster: jax.Array
    peer: jax.Array
    local: jax.Array

    def position(self, tile) -> _Tile:
        """Return the position in the result of this thread block's tile number `tile`."""
        tiles = self.tiles
        index = tile * self.clusters + self.cluster
        row = lax.div(index, jnp.int32(self.column_tiles)) * tiles.cluster + self.peer
        column = lax.rem(index, jnp.int32(self.column_tiles))
        first_row, first_column = row * tiles.rows, column * tiles.columns
        rows, columns = pl.ds(first_row, tiles.rows), pl.ds(first_column, tiles.columns)
        cut = self.columns % tiles.columns != 0
        return _Tile(self.wg, rows, columns, row, self.columns - first_column if cut else None)

    def load(self) -> None:
        """Load the operands of all tiles."""
        plgpu.set_max_registers(40, action="decrease")
        tiles, ring, operands, steps = self.tiles, self.ring, self.operands, self.steps

        @pl.loop(0, self.local * steps)
        def _step(step):
            slot, tile, k = (
                ring.slot(step),
                lax.div(step, jnp.int32(steps)),
                lax.rem(step, jnp.int32(steps)),
            )
            at = self.position(tile)
            depth = pl.ds(k * tiles.depth, tiles.depth)
            ring.wait_empty(step, slot=slot)
            full = ring.full.at[lax.rem(tile, jnp.int32(2)), slot]
            plgpu.copy_gmem_to_smem(self.x.at[at.rows, depth], operands.x.at[slot], full)
            plgpu.copy_gmem_to_smem(
                self.w.at[at.columns, depth] if self.transposed else self.w.at[depth, at.columns],
                operands.w.at[slot],
                full,
                collective_axes="peer" if tiles.cluster > 1 else None,
            )

        # A thread block must not end while another thread block of the cluster may still arrive on
        # the barriers of the former.
        ring.drain(self.local * steps)

    def compute(self) -> None:
        """Compute and store this warpgroup's tiles."""
        plgpu.set_max_registers(232, action="increase")

        @pl.loop(0, lax.div(self.local - self.wg + 1, jnp.int32(2)))
        def _tile(n):
            tile = n * 2 + self.wg
            at = self.position(tile)
            self.begin(at)
            acc_MP = pl.run_scoped(
                lambda acc_ref: self.matmul(acc_ref, tile),
                plgpu.ACC((self.tiles.rows, self.tiles.columns), jnp.float32),
            )
            self.ring.release(self.ring.slot(tile * self.steps + self.steps - 1))
            self.finish(at, acc_MP)

        plgpu.wait_smem_to_gmem(0)

    def matmul(self, acc_ref, tile):
        """Return the tile of x w, in fp32. The slot of the last step is not released yet."""
        ring, operands = self.ring, self.operands
        first = tile * self.steps

        def step(k, _):
            slot = ring.slot(first + k)
            ring.wait_full(slot, self.wg)
            w = operands.w.at[slot]
            w_KP = w.transpose((1, 0)) if self.transposed else w
            plgpu.wgmma(acc_ref, operands.x.at[slot], w_KP)
            # The matmul of this step runs while the operands of the last step are released.
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _():
                ring.release(ring.slot(first + k - 1))

        lax.fori_loop(0, self.steps, step, None)
        return acc_ref[...]
