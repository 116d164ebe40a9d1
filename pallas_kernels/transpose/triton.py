"""Triton kernels that transpose: a program moves one tile and transposes it in shared memory."""

import jax
import triton
import triton.language as tl

from pallas_kernels import _triton


@triton.jit
def move_tile(
    src_ptr,
    dst_ptr,
    out_ptr,
    R: tl.constexpr,
    C: tl.constexpr,
    HAS_DST: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Return the tile of src, with 0 out of bounds."""
    # Consecutive programs move the tiles of a column of src: together they write complete rows
    # of the result.
    row_tiles: tl.constexpr = (R + ROWS - 1) // ROWS
    column_tiles: tl.constexpr = (C + COLS - 1) // COLS
    batch, tile = (
        tl.program_id(0) // (row_tiles * column_tiles),
        tl.program_id(0) % (row_tiles * column_tiles),
    )
    start = batch.to(tl.int64) * R * C
    r, c = (
        tile % row_tiles * ROWS + tl.arange(0, ROWS),
        tile // row_tiles * COLS + tl.arange(0, COLS),
    )
    src_offset = start + (r.to(INDEX)[:, None] * C + c[None, :])
    src = tl.load(src_ptr + src_offset, mask=(r < R)[:, None] & (c < C)[None, :], other=0.0)
    offset = start + (c.to(INDEX)[:, None] * R + r[None, :])
    inside = (c < C)[:, None] & (r < R)[None, :]
    if HAS_DST:
        # Issue this load before the wait for src.
        dst = tl.load(dst_ptr + offset, mask=inside, other=0.0)
    out = tl.trans(src)
    if HAS_DST:
        out = dst.to(tl.float32) + out.to(tl.float32)
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)
    return src


@triton.jit
def transpose(
    src_ptr,
    dst_ptr,
    out_ptr,
    R: tl.constexpr,
    C: tl.constexpr,
    HAS_DST: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INDEX: tl.constexpr,
):
    move_tile(src_ptr, dst_ptr, out_ptr, R, C, HAS_DST, ROWS, COLS, INDEX)


@triton.jit
def add_in_place(
    src_ptr,
    dst_ptr,
    R: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INDEX: tl.constexpr,
):
    move_tile(src_ptr, dst_ptr, dst_ptr, R, C, True, ROWS, COLS, INDEX)


@triton.jit
def transpose_sum(
    src_ptr,
    out_ptr,
    sums_ptr,
    R: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Transpose src and sum each ROWS rows of src."""
    src = move_tile(src_ptr, src_ptr, out_ptr, R, C, False, ROWS, COLS, INDEX)
    row_tiles: tl.constexpr = (R + ROWS - 1) // ROWS
    column_tiles: tl.constexpr = (C + COLS - 1) // COLS
    batch, tile = (
        tl.program_id(0) // (row_tiles * column_tiles),
        tl.program_id(0) % (row_tiles * column_tiles),
    )
    c = tile // row_tiles * COLS + tl.arange(0, COLS)
    sums_ptr += (batch * row_tiles + tile % row_tiles).to(tl.int64) * C
    tl.store(sums_ptr + c, tl.sum(src.to(tl.float32), axis=0), mask=c < C)


# Tuned for 768×50304 on an H200 (docs/kernels/transpose.md).
ROWS, COLS = 64, 64
# Warps by the item size of src.
WARPS = {2: 4, 4: 8}


def transpose_copy(src_BRC, *, dtype):
    """Return srcᵀ in `dtype`, shape (B, C, R)."""
    b, r, c = src_BRC.shape
    out = [jax.ShapeDtypeStruct((b, c, r), dtype)]
    return _triton.call(transpose, src_BRC, src_BRC, out=out, HAS_DST=False, **_launch(src_BRC))[0]


def transpose_sum_rows(src_BRC):
    """Return srcᵀ, and the sum of src's rows in fp32, shape (B, C)."""
    b, r, c = src_BRC.shape
    out_BCR, sums_BSC = _triton.call(
        transpose_sum,
        src_BRC,
        out=[
            jax.ShapeDtypeStruct((b, c, r), src_BRC.dtype),
            jax.ShapeDtypeStruct((b, triton.cdiv(r, ROWS), c), "float32"),
        ],
        **_launch(src_BRC),
    )
    return out_BCR, sums_BSC.sum(1)


def transpose_add(dst_BCR, src_BRC, *, in_place):
    """Return dst + srcᵀ; `in_place` overwrites dst if dst is not used afterwards."""
    if in_place:
        return _triton.call(
            add_in_place, src_BRC, dst_BCR, out=[], in_place=(1,), **_launch(src_BRC)
        )[0]
    out = [jax.ShapeDtypeStruct(dst_BCR.shape, dst_BCR.dtype)]
    return _triton.call(transpose, src_BRC, dst_BCR, out=out, HAS_DST=True, **_launch(src_BRC))[0]


def _launch(src_BRC):
    b, r, c = src_BRC.shape
    return {
        "grid": (b * triton.cdiv(r, ROWS) * triton.cdiv(c, COLS),),
        "num_warps": WARPS[src_BRC.dtype.itemsize],
        "R": r,
        "C": c,
        "ROWS": ROWS,
        "COLS": COLS,
        # Offsets within one matrix use 64 bits only if needed.
        "INDEX": tl.int64 if r * c > 2**31 - 1 else tl.int32,
    }
