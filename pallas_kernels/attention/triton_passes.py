"""Triton passes around the backward pass of `triton` and `mosaic`: D, sums of dO, conversion of dQ.

Shapes as in triton.py: M rows of a block, P the head dimension padded to a power of two.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _triton
from pallas_kernels.attention.triton_rows import load_each, load_rows, padded, place, store_rows
from pallas_kernels.row_softmax.triton import LOG2E


def delta(out_BTHD, dout_BTHD, lse_BHT=None, *, rows: int = 0, zeros: int = 0, sums: bool = False):
    """Compute D of each query and allocate zeroed sums, in fp32 and one launch.

    Args:
        lse_BHT: the log-sum-exp L for `mosaic`, or None.
        rows: number of queries in the result for `mosaic`, including the padding from T on.
        zeros: number of queries of the zeroed array.
        sums: whether to sum dO over all queries.

    Returns:
        Σ_d dO·O, B·H·T. With `lse_BHT`: (log2(e)·L, −Σ_d dO·O), B·H·2·rows, zero from T on.
        Zeros, B·zeros·H·D, or an unused array of one number.
        The sum of dO, H·D, or None.
    """
    b, t, h, d = out_BTHD.shape
    m = 128 if d <= 128 else 32
    blocks = triton.cdiv(max(t, rows, zeros), m)
    delta, zeros_BTHD, sums_PHD = _triton.call(
        delta_kernel,
        out_BTHD,
        dout_BTHD,
        dout_BTHD if lse_BHT is None else lse_BHT,
        out=[
            jax.ShapeDtypeStruct((b, h, t) if lse_BHT is None else (b, h, 2, rows), jnp.float32),
            jax.ShapeDtypeStruct((b, zeros, h, d) if zeros else (1,), jnp.float32),
            jax.ShapeDtypeStruct((b * blocks, h, d) if sums else (1,), jnp.float32),
        ],
        grid=(blocks * b * h,),
        T=t,
        H=h,
        D=d,
        P=padded(d),
        ROWS=0 if lse_BHT is None else rows,
        ZEROS=zeros,
        SUMS=sums,
        BLOCKS=blocks,
        M=m,
    )
    return delta, zeros_BTHD, sums_PHD.sum(0) if sums else None


def into_packed(sums_BTHD, dqkv_BT3HD, *, scale: float):
    """Store dq = scale · sums in dqkv, in place. Return (dqkv, Σ dq).

    Σ dq is the sum over all queries, H·D in fp32.
    """
    b, t, h, d = sums_BTHD.shape
    rows, columns, parts = 16, 256, 256
    times = triton.cdiv(b * t, rows * parts)
    parts = triton.cdiv(b * t, rows * times)
    dqkv_BT3HD, sums_SHD = _triton.call(
        into_packed_kernel,
        sums_BTHD,
        dqkv_BT3HD,
        in_place=(1,),
        out=[jax.ShapeDtypeStruct((parts, h, d), jnp.float32)],
        grid=(parts * triton.cdiv(h * d, columns),),
        num_warps=2,
        N=b * t,
        O=h * d,
        SCALE=scale,
        TIMES=times,
        M=rows,
        P=columns,
    )
    return dqkv_BT3HD, sums_SHD.sum(0)


@triton.jit
def delta_kernel(
    out_ptr, dout_ptr, lse_ptr, delta_ptr, zeros_ptr, sums_ptr,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, ZEROS: tl.constexpr, SUMS: tl.constexpr, BLOCKS: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    h, t0, b = place(H, BLOCKS, M)
    at = b * T * H * D + h * D
    CHECKED: tl.constexpr = T < BLOCKS * M
    out_MP = load_rows(out_ptr + at, t0, H * D, T, D, M, P, CHECKED).to(tl.float32)
    dout_MP = load_rows(dout_ptr + at, t0, H * D, T, D, M, P, CHECKED).to(tl.float32)
    rows_M = t0 + tl.arange(0, M)
    delta_M = tl.sum(out_MP * dout_MP, 1)
    if ROWS:
        lse_M = load_each(lse_ptr + (b * H + h) * T, t0, T, M, CHECKED)
        delta_ptr += (b * H + h) * (2 * ROWS)
        tl.store(delta_ptr + rows_M, lse_M * LOG2E, mask=rows_M < ROWS)
        tl.store(delta_ptr + ROWS + rows_M, -delta_M, mask=rows_M < ROWS)
    else:
        tl.store(delta_ptr + (b * H + h) * T + rows_M, delta_M, mask=rows_M < T)
    if ZEROS:
        zeros_ptr += b * ZEROS * H * D + h * D
        store_rows(zeros_ptr, tl.full((M, P), 0.0, tl.float32), t0, H * D, ZEROS, D, M, P)
    if SUMS:
        columns_P = tl.arange(0, P)
        tl.store(
            sums_ptr + (tl.program_id(0) // H).to(tl.int64) * (H * D) + h * D + columns_P,
            tl.sum(dout_MP, 0),
            mask=columns_P < D,
        )


@triton.jit
def into_packed_kernel(
    sums_ptr, dqkv_ptr, parts_ptr,
    N: tl.constexpr, O: tl.constexpr,  # noqa: E741
    SCALE: tl.constexpr, TIMES: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Round dQ from its fp32 sums, N·O, into N·3O, and sum TIMES·M rows of dQ."""
    COLUMN_TILES: tl.constexpr = (O + P - 1) // P
    part, columns = (
        tl.program_id(0) // COLUMN_TILES,
        tl.program_id(0) % COLUMN_TILES * P + tl.arange(0, P),
    )
    total_MP = tl.full((M, P), 0.0, tl.float32)
    for time in range(TIMES):
        rows = ((part * TIMES + time) * M + tl.arange(0, M)).to(tl.int64)
        mask = (rows < N)[:, None] & (columns < O)[None, :]
        dq_MP = (
            tl.load(sums_ptr + rows[:, None] * O + columns[None, :], mask=mask, other=0.0) * SCALE
        )
        tl.store(
            dqkv_ptr + rows[:, None] * (3 * O) + columns[None, :],
            dq_MP.to(dqkv_ptr.dtype.element_ty),
            mask=mask,
        )
        total_MP += dq_MP
    tl.store(
        parts_ptr + part.to(tl.int64) * O + columns, tl.sum(total_MP, axis=0), mask=columns < O
    )
