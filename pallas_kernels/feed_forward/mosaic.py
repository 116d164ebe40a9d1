"""Mosaic GPU back end for Hopper: epilogues of pallas_kernels/gemm/mosaic.py.

`activated` applies the activation to the tiles of a matmul, and stores the result and the
derivative. `du` multiplies the tiles of a matmul by the derivative, and sums the result over rows.
FP8 results are stored in both layouts, and have a scale:

    quantize(v) = v · scale, clipped to the largest finite value, rounded to nearest even

The scale of a matmul is a tuple of fp32 scalars whose product is the scale. XLA would launch a
kernel to multiply two scalars.

| barrier | number | arrivals | who arrives | who waits |
| --- | --- | --- | --- | --- |
| `bias_full` | 2 | 1 | the copy of b | the computing warpgroup that started the copy |
| `saved_full` | 2 × slots | 1 | the copy of a part | the warpgroup that started the copy |

Shapes: M rows, N or O columns of the result, K or C contracted; R×P the tile of a warpgroup, which
it stores in parts of 64×Q.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import plgpu, store_transposed, swizzled
from pallas_kernels.feed_forward.activations import ACTIVATIONS
from pallas_kernels.gemm import mosaic
from pallas_kernels.gemm.mosaic import COMPUTING, PART_ROWS, Tiles
from pallas_kernels.gemm.numerics import HiddenFormat


# jit: trace and lower a kernel once for all layers. Tracing and lowering for each layer took 28 s
# of a step's compilation, and no cache of JAX covers this time.
@functools.partial(jax.jit, static_argnames=("activation", "stored", "save", "tiles"))
def activated(
    x_MK,
    w,
    b_N,
    scale: tuple = (),
    *,
    activation: str,
    stored: HiddenFormat,
    save: bool = True,
    tiles: Tiles | None = None,
):
    """Return (y, yᵀ, derivative) of the activation of u = scale · x w + b; each as `stored` says,
    and None if it is not stored.

    Args:
        w: K×N, or N×K if `stored.k_major`.
        b_N: fp32, or None.
        save: whether to return the derivative.
    """
    (m, k), n = x_MK.shape, w.shape[0 if stored.k_major else 1]
    tiles = tiles or mosaic.tiles_for(m, n, k, x_MK.dtype.itemsize)
    scales, bias = mosaic.scalars(scale), [] if b_N is None else [b_N]
    save = save and stored.saved_dtype is not None

    def begin(at, others, scratch):
        if bias:
            plgpu.copy_gmem_to_smem(
                others[-1].at[at.columns], scratch.bias.at[at.wg], scratch.bias_full.at[at.wg]
            )

    def finish(at, acc_RP, others, out_gmem, scratch):
        y_gmem, *rest = out_gmem
        if bias:
            plgpu.barrier_wait(scratch.bias_full.at[at.wg])
        for part, (rows, columns) in enumerate(tiles.parts()):

            @at.unless_out_of_bounds(columns)
            def _part(slot=part % tiles.slots, rows=rows, columns=columns):
                u = mosaic.times(acc_RP[rows, columns], mosaic.product(others[: len(scales)]))
                if bias:
                    b_Q = plgpu.load(
                        scratch.bias.at[at.wg, columns],
                        layout=plgpu.Layout.WGMMA.reduce(0),
                        optimized=False,
                    )
                    u = u + lax.broadcast_in_dim(b_Q, u.shape, [1])
                y, derivative = ACTIVATIONS[activation](u)
                y = mosaic.times(y, stored.scale).astype(stored.dtype)
                plgpu.wait_smem_to_gmem(tiles.slots - 1, wait_read_only=True)
                y_smem = scratch.y.at[at.wg, slot]
                copies = [(y_smem, y_gmem.at[at.rows, at.columns].at[rows, columns])]
                y_smem[...] = y
                if save:
                    smem = scratch.derivative.at[at.wg, slot]
                    smem[...] = mosaic.times(derivative, stored.saved_scale).astype(
                        stored.saved_dtype
                    )
                    copies.append((smem, rest[0].at[at.rows, at.columns].at[rows, columns]))
                if stored.k_major:
                    smem = scratch.transposed.at[at.wg, slot]
                    store_transposed(smem, y)
                    copies.append((smem, rest[-1].at[at.columns, at.rows].at[columns, rows]))
                mosaic.copy_to_gmem(copies)

    part_shape = (COMPUTING, tiles.slots, PART_ROWS, tiles.part_columns)
    y_MN, *rest = mosaic.matmul(
        x_MK,
        w,
        *scales,
        *bias,
        tiles=tiles,
        k_major=stored.k_major,
        begin=begin,
        finish=finish,
        out_type=[
            jax.ShapeDtypeStruct((m, n), stored.dtype),
            *([jax.ShapeDtypeStruct((m, n), stored.saved_dtype)] if save else []),
            *[jax.ShapeDtypeStruct((n, m), stored.dtype)] * stored.k_major,
        ],
        scratch=_mosaic.scratch(
            bias=plgpu.SMEM((COMPUTING, tiles.columns), jnp.float32) if bias else None,
            y=swizzled(part_shape, stored.dtype),
            transposed=swizzled(_transposed(part_shape), stored.dtype) if stored.k_major else None,
            derivative=swizzled(part_shape, stored.saved_dtype) if save else None,
            bias_full=plgpu.Barrier(num_barriers=COMPUTING) if bias else None,
        ),
    )
    return y_MN, rest[-1] if stored.k_major else None, rest[0] if save else None


@functools.partial(jax.jit, static_argnames=("stored", "bias", "tiles"))
def du(
    dy_MC,
    w2_OC,
    saved_MO,
    scale: tuple = (),
    du_scale=None,
    *,
    stored: HiddenFormat,
    bias: bool = True,
    tiles: Tiles | None = None,
):
    """Return (du, duᵀ, db) with v = (scale · dy w₂ᵀ) ∘ derivative.

    du is v in `stored.gradient_dtype`, times `du_scale` if there is one, and duᵀ its transposed
    copy, or None. db is the sum over M of du / du_scale in fp32, or None without `bias`. To sum
    over rows inside a warp, a warpgroup reads each part of du transposed from shared memory.

    Args:
        saved_MO: what `activated` stored for the backward pass.
        du_scale: fp32 scalar, or None.
    """
    (m, c), o = dy_MC.shape, w2_OC.shape[0]
    tiles = tiles or mosaic.tiles_for(m, o, c, dy_MC.dtype.itemsize)
    parts, slots, per_column = tiles.parts(), tiles.slots, tiles.column_parts
    dtype, k_major = stored.gradient_dtype, stored.k_major
    scales, du_scales = mosaic.scalars(scale), mosaic.scalars(du_scale)

    def fetch(at, saved_gmem, scratch, part):
        if part < len(parts):

            @at.unless_out_of_bounds(parts[part][1])
            def _fetch():
                plgpu.copy_gmem_to_smem(
                    saved_gmem.at[at.rows, at.columns].at[parts[part]],
                    scratch.saved.at[at.wg, part % slots],
                    scratch.saved_full.at[at.wg, part % slots],
                )

    def begin(at, others, scratch):
        for part in range(slots):
            fetch(at, others[0], scratch, part)

    def finish(at, acc_RP, others, out_gmem, scratch):
        saved_gmem, *scalars = others
        du_gmem, *rest = out_gmem
        # The scales are powers of two: one factor for both is exact.
        du_factor, factor = mosaic.product(scalars[: len(du_scales)]), mosaic.product(scalars)
        if stored.derivative_scale != 1.0:
            factor = (1.0 if factor is None else factor) * (1 / stored.derivative_scale)
        for first in range(0, len(parts), per_column):
            columns = parts[first][1]

            @at.unless_out_of_bounds(columns)
            def _columns(first=first, columns=columns):
                sum_Q = None
                for part in range(first, first + per_column):
                    rows, slot = parts[part][0], part % slots
                    du_smem, saved_smem = scratch.du.at[at.wg, slot], scratch.saved.at[at.wg, slot]
                    plgpu.barrier_wait(scratch.saved_full.at[at.wg, slot])
                    saved = plgpu.load(saved_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                    # The copy overwrites the part: wait until all threads have read the part.
                    plgpu.commit_smem()
                    fetch(at, saved_gmem, scratch, part + slots)
                    v = mosaic.times(acc_RP[rows, columns], factor) * stored.derivative(saved)
                    v = v.astype(dtype)
                    plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                    du_smem[...] = v
                    copies = [(du_smem, du_gmem.at[at.rows, at.columns].at[rows, columns])]
                    if k_major:
                        smem = scratch.transposed.at[at.wg, slot]
                        store_transposed(smem, v)
                        copies.append((smem, rest[0].at[at.columns, at.rows].at[columns, rows]))
                    last = part == first + per_column - 1
                    # The copy of the sums is the last of the group.
                    mosaic.copy_to_gmem(copies, commit_group=not (bias and last))
                    if bias:
                        if k_major:
                            du_QR = plgpu.load(smem, layout=plgpu.Layout.WGMMA)
                        else:
                            turned = plgpu.Layout.WGMMA_TRANSPOSED
                            du_QR = plgpu.load(du_smem.transpose((1, 0)), layout=turned)
                        part_Q = du_QR.astype(jnp.float32).sum(1)
                        sum_Q = part_Q if sum_Q is None else sum_Q + part_Q
                if bias:
                    # The copy of the last tile's sums is complete, since all groups of copies
                    # except the newest `slots` are complete.
                    smem = scratch.db.at[at.wg, columns]
                    smem[...] = sum_Q if du_factor is None else sum_Q * (1 / du_factor)
                    mosaic.copy_to_gmem([(smem, rest[-1].at[at.row_tile, at.columns].at[columns])])

    part_shape = (COMPUTING, slots, PART_ROWS, tiles.part_columns)
    du_MO, *rest = mosaic.matmul(
        dy_MC,
        w2_OC,
        saved_MO,
        *du_scales,
        *scales,
        tiles=tiles,
        k_major=True,
        begin=begin,
        finish=finish,
        out_type=[
            jax.ShapeDtypeStruct((m, o), dtype),
            *[jax.ShapeDtypeStruct((o, m), dtype)] * k_major,
            *[jax.ShapeDtypeStruct((m // tiles.rows, o), jnp.float32)] * bias,
        ],
        scratch=_mosaic.scratch(
            saved=swizzled(part_shape, saved_MO.dtype),
            du=swizzled(part_shape, dtype),
            transposed=swizzled(_transposed(part_shape), dtype) if k_major else None,
            db=plgpu.SMEM((COMPUTING, tiles.columns), jnp.float32) if bias else None,
            saved_full=plgpu.Barrier(num_barriers=(COMPUTING, slots)),
        ),
    )
    return du_MO, rest[0] if k_major else None, rest[-1].sum(0) if bias else None


def _transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])
