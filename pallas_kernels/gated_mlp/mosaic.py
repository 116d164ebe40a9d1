"""Mosaic GPU back end of `swiglu` for Hopper: epilogues of pallas_kernels/gemm/mosaic.py.

The columns of [w_gate | w_up], and of its result [g | u], alternate in blocks of `BLOCK` columns
(`gemm.numerics.Interleaved`). A tile of the first matmul then has g and u of the same channels:
`gated` stores both, and h = silu(g) · u. `gated_gradient` is the matmul that computes dh. It reads
g and u, and stores dg, du and h.

FP8 results are stored times their scale, clipped and rounded to nearest even; the backward pass
stores them K-major too.

| barrier | number | arrivals | who arrives | who waits |
| --- | --- | --- | --- | --- |
| `full` | 2 × slots | 1 | the copy of a part of [g \\| u] | the warpgroup that started the copy |

Shapes: M rows, F hidden channels, K or C contracted.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import pl, plgpu, store_transposed, swizzled
from pallas_kernels.gemm import mosaic
from pallas_kernels.gemm.mosaic import (
    COMPUTING,
    PART_ROWS,
    Tiles,
    copy_to_gmem,
    product,
    scalars,
    times,
)
from pallas_kernels.gemm.numerics import BLOCK, HiddenFormat

# By the bytes of an operand's number. A part is 64 columns of [g | u], or 32 channels of dh. The
# fastest of six on an H100. Forward and backward in bf16, 16384×2048×8192: 6.71 ms; with Triton's
# passes between XLA's matmuls 7.10, XLA 7.87, the six matmuls alone 6.37 (gated_mlp.json).
FORWARD = {2: Tiles(group=8, cluster=1), 1: Tiles(group=8)}
BACKWARD = {
    2: Tiles(group=8, slots=1, part_columns=BLOCK),
    1: Tiles(columns=128, group=8, part_columns=BLOCK),
}


def why_not(m: int, inputs: int, hidden: int, outputs: int, itemsize: int) -> str | None:
    """Return None if the tiles divide the sizes of both matmuls, else the reason."""
    forward, backward = FORWARD[itemsize], BACKWARD[itemsize]
    fits = forward.divide(m, 2 * hidden, inputs, itemsize)
    if fits and backward.divide(m, hidden, outputs, itemsize):
        return None
    rows = max(tiles.rows * tiles.cluster for tiles in (forward, backward))
    return (
        f"has no tiles for {m} rows, {inputs} inputs, {hidden} hidden channels and {outputs} "
        f"outputs: needs rows a multiple of {rows}, inputs and outputs a "
        f"multiple of {forward.depth(itemsize)}, and hidden channels a multiple of {BLOCK} "
        f"a little below a multiple of {backward.columns}"
    )


# jit: trace and lower a kernel once for all layers.
@functools.partial(jax.jit, static_argnames=("dtype", "stored", "save", "tiles"))
def gated(
    x_MK,
    w,
    scale: tuple = (),
    *,
    dtype: jax.typing.DTypeLike,
    stored: HiddenFormat,
    save: bool = True,
    tiles: Tiles | None = None,
):
    """Return h as `stored` says, and scale · x w in `dtype`, or None without `save`.

    Args:
        w: K×2F, or 2F×K if `stored.k_major`; interleaved.
    """
    tiles = tiles or FORWARD[x_MK.dtype.itemsize]
    m, n = x_MK.shape[0], w.shape[0 if stored.k_major else 1]
    scales = scalars(scale)

    def finish(at, acc_RP, others, out_gmem, scratch):
        factor = product(others)
        for part, (rows, columns) in enumerate(tiles.parts()):

            @at.unless_out_of_bounds(columns)
            def _part(slot=part % tiles.slots, rows=rows, columns=columns):
                middle = columns.start + BLOCK
                g = times(acc_RP[rows, columns.start : middle], factor)
                u = times(acc_RP[rows, middle : columns.stop], factor)
                h = times(g * jax.nn.sigmoid(g) * u, stored.scale).astype(stored.dtype)
                plgpu.wait_smem_to_gmem(tiles.slots - 1, wait_read_only=True)
                h_smem = scratch.h.at[at.wg, slot]
                h_smem[...] = h
                first = lax.div(at.columns.start, jnp.int32(2)) + columns.start // 2
                copies = [(h_smem, _slice(out_gmem[0], at, rows, first))]
                if save:
                    gu_smem = scratch.gu.at[at.wg, slot]
                    gu_smem[...] = times(acc_RP[rows, columns], factor).astype(dtype)
                    first = at.columns.start + columns.start
                    copies.append((gu_smem, _slice(out_gmem[1], at, rows, first, 2 * BLOCK)))
                copy_to_gmem(copies)

    part = (COMPUTING, tiles.slots, PART_ROWS)
    h_MF, *gu_M2F = mosaic.matmul(
        x_MK,
        w,
        *scales,
        tiles=tiles,
        k_major=stored.k_major,
        begin=lambda at, others, scratch: None,
        finish=finish,
        out_type=[
            jax.ShapeDtypeStruct((m, n // 2), stored.dtype),
            *[jax.ShapeDtypeStruct((m, n), dtype)] * save,
        ],
        scratch=_mosaic.scratch(
            h=swizzled((*part, BLOCK), stored.dtype),
            gu=swizzled((*part, 2 * BLOCK), dtype) if save else None,
        ),
    )
    return h_MF, gu_M2F[0] if save else None


@functools.partial(jax.jit, static_argnames=("stored", "tiles"))
def gated_gradient(
    dy_MC,
    w_down_FC,
    gu_M2F,
    scale: tuple = (),
    out_scale=None,
    *,
    stored: HiddenFormat,
    tiles: Tiles | None = None,
):
    """Return [dg | du] and its transpose, and h and its transpose, of dh = scale · dy w_downᵀ.

    [dg | du] is interleaved as [g | u]. In FP8 it is multiplied by `out_scale`, and h is stored
    transposed only; otherwise both transposes are None.
    """
    tiles = tiles or BACKWARD[dy_MC.dtype.itemsize]
    (m, f), slots, k_major = (gu_M2F.shape[0], w_down_FC.shape[0]), tiles.slots, stored.k_major
    scales, out_scales, parts = scalars(scale), scalars(out_scale), tiles.parts()

    def fetch(at, gu_gmem, scratch, part):
        if part < len(parts):
            rows, columns = parts[part]

            @at.unless_out_of_bounds(columns)
            def _fetch():
                plgpu.copy_gmem_to_smem(
                    _slice(gu_gmem, at, rows, 2 * (at.columns.start + columns.start), 2 * BLOCK),
                    scratch.gu.at[at.wg, part % slots],
                    scratch.full.at[at.wg, part % slots],
                )

    def begin(at, others, scratch):
        for part in range(slots):
            fetch(at, others[0], scratch, part)

    def finish(at, acc_RP, others, out_gmem, scratch):
        gu_gmem, *factors = others
        out_factor = product(factors[: len(out_scales)])
        factor = product(factors[len(out_scales) :])
        for part, (rows, columns) in enumerate(parts):

            @at.unless_out_of_bounds(columns)
            def _part(part=part, rows=rows, columns=columns):
                slot = part % slots
                plgpu.barrier_wait(scratch.full.at[at.wg, slot])
                gu = plgpu.load(scratch.gu.at[at.wg, slot], layout=plgpu.Layout.WGMMA)
                # The copy overwrites g and u: wait until all threads of the warpgroup have read.
                plgpu.commit_smem()
                fetch(at, gu_gmem, scratch, part + slots)
                g, u = gu[:, :BLOCK].astype(jnp.float32), gu[:, BLOCK:].astype(jnp.float32)
                dh = times(acc_RP[rows, columns], factor)
                sigma = jax.nn.sigmoid(g)
                silu = g * sigma
                h = times(silu * u, stored.scale).astype(stored.dtype)
                dg = times(dh * u * (sigma + silu * (1 - sigma)), out_factor)
                du = times(dh * silu, out_factor)
                gradients = [x.astype(stored.gradient_dtype) for x in (dg, du)]
                plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                channel, copies = at.columns.start + columns.start, []
                for i, x in enumerate(gradients):
                    first = 2 * channel + i * BLOCK
                    smem = scratch.gradients.at[at.wg, slot, i]
                    smem[...] = x
                    copies.append((smem, _slice(out_gmem[0], at, rows, first)))
                    if k_major:
                        smem = scratch.transposed.at[at.wg, slot, i]
                        store_transposed(smem, x)
                        copies.append((smem, _slice(out_gmem[1], at, rows, first, turned=True)))
                h_smem = scratch.h.at[at.wg, slot]
                if k_major:
                    store_transposed(h_smem, h)
                else:
                    h_smem[...] = h
                copies.append((h_smem, _slice(out_gmem[-1], at, rows, channel, turned=k_major)))
                copy_to_gmem(copies)

    slot, part = (COMPUTING, slots), (PART_ROWS, BLOCK)
    turned = part[::-1]
    outs = mosaic.matmul(
        dy_MC,
        w_down_FC,
        gu_M2F,
        *out_scales,
        *scales,
        tiles=tiles,
        k_major=True,
        begin=begin,
        finish=finish,
        out_type=[
            jax.ShapeDtypeStruct((m, 2 * f), stored.gradient_dtype),
            *[jax.ShapeDtypeStruct((2 * f, m), stored.gradient_dtype)] * k_major,
            jax.ShapeDtypeStruct((f, m) if k_major else (m, f), stored.dtype),
        ],
        scratch=_mosaic.scratch(
            gu=swizzled((*slot, PART_ROWS, 2 * BLOCK), gu_M2F.dtype),
            gradients=swizzled((*slot, 2, *part), stored.gradient_dtype),
            h=swizzled((*slot, *(turned if k_major else part)), stored.dtype),
            transposed=swizzled((*slot, 2, *turned), stored.gradient_dtype) if k_major else None,
            full=plgpu.Barrier(num_barriers=(COMPUTING, slots)),
        ),
    )
    return (*outs[:2], None, outs[2]) if k_major else (outs[0], None, outs[1], None)


def _slice(gmem, at, rows, first, columns: int = BLOCK, *, turned: bool = False):
    """Return the slice of an array for a part: `columns` columns from `first` on, a multiple of
    `columns`; of the transposed array if `turned`."""
    row = at.rows.start + rows.start
    starts = pl.multiple_of(row, PART_ROWS), pl.multiple_of(first, columns)
    index = pl.ds(starts[0], PART_ROWS), pl.ds(starts[1], columns)
    return gmem.at[index[::-1] if turned else index]
