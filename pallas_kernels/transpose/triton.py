"""Triton kernels that transpose: a program moves one tile and transposes it in shared memory."""

import jax
import triton
import triton.language as tl

from pallas_kernels import _triton

# Rows and columns of a tile, and warps, by the item size of src. Tuned for 768×50304 on an H200
# (docs/kernels/transpose.md); the tile of 8-bit types is not tuned.
TILES = {1: (128, 128, 8), 2: (64, 64, 4), 4: (64, 64, 8)}


@triton.jit
def transpose(
    src_ptr, dst_ptr, sums_ptr, out_ptr, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Store srcᵀ, plus dst unless `dst_ptr` is None. If `out_ptr` is None, overwrite dst. Unless
    `sums_ptr` is None, also store the sums of each ROWS rows of src."""
    # Consecutive programs move the tiles of a column of src: together they write complete rows
    # of the result.
    row_tiles: tl.constexpr = (R + ROWS - 1) // ROWS
    tiles: tl.constexpr = row_tiles * ((C + COLS - 1) // COLS)
    batch, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    start = batch.to(tl.int64) * R * C
    r = tile % row_tiles * ROWS + tl.arange(0, ROWS)
    c = tile // row_tiles * COLS + tl.arange(0, COLS)
    src_offset = start + (r.to(INDEX)[:, None] * C + c[None, :])
    src = tl.load(src_ptr + src_offset, mask=(r < R)[:, None] & (c < C)[None, :], other=0.0)
    offset = start + (c.to(INDEX)[:, None] * R + r[None, :])
    inside = (c < C)[:, None] & (r < R)[None, :]
    if dst_ptr is None:
        out = tl.trans(src)
    else:
        # Issue this load before the wait for src.
        dst = tl.load(dst_ptr + offset, mask=inside, other=0.0)
        out = dst.to(tl.float32) + tl.trans(src).to(tl.float32)
    out_ptr = dst_ptr if out_ptr is None else out_ptr
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)
    if sums_ptr is not None:
        row = (batch * row_tiles + tile % row_tiles).to(tl.int64)
        tl.store(sums_ptr + row * C + c, tl.sum(src.to(tl.float32), axis=0), mask=c < C)


def transpose_copy(src_BRC, *, dtype):
    """Return srcᵀ in `dtype`, shape (B, C, R)."""
    b, r, c = src_BRC.shape
    out = [jax.ShapeDtypeStruct((b, c, r), dtype)]
    return _triton.call(transpose, src_BRC, None, None, out=out, **_launch(src_BRC))[0]


def transpose_sum_rows(src_BRC):
    """Return srcᵀ, and the sum of src's rows in fp32, shape (B, C)."""
    (b, r, c), launch = src_BRC.shape, _launch(src_BRC)
    shapes = (((b, triton.cdiv(r, launch["ROWS"]), c), "float32"), ((b, c, r), src_BRC.dtype))
    out = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    sums_BSC, out_BCR = _triton.call(transpose, src_BRC, None, out=out, **launch)
    return out_BCR, sums_BSC.sum(1)


def transpose_add(dst_BCR, src_BRC, *, in_place):
    """Return dst + srcᵀ; `in_place` overwrites dst if dst is not used afterwards."""
    args = (src_BRC, dst_BCR, None, *([None] if in_place else []))
    out = [] if in_place else [jax.ShapeDtypeStruct(dst_BCR.shape, dst_BCR.dtype)]
    how = {"out": out, "in_place": (1,) if in_place else ()} | _launch(src_BRC)
    return _triton.call(transpose, *args, **how)[0]


def _launch(src_BRC):
    b, r, c = src_BRC.shape
    rows, cols, warps = TILES[src_BRC.dtype.itemsize]
    return {
        "grid": (b * triton.cdiv(r, rows) * triton.cdiv(c, cols),),
        "num_warps": warps,
        "R": r,
        "C": c,
        "ROWS": rows,
        "COLS": cols,
        # Offsets within one matrix use 64 bits only if needed.
        "INDEX": tl.int64 if r * c > 2**31 - 1 else tl.int32,
    }
