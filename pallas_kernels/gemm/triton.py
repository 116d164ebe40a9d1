"""Triton kernel of `quantize`: a program converts one tile, and transposes it in shared memory."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _triton
from pallas_kernels.transpose.triton import transpose_copy

# Not tuned.
ROWS, COLS, WARPS = 64, 128, 8


@triton.jit
def larger(a, b):
    """Return the larger number; NaN if one is NaN. `tl.max` would ignore NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(x):
    """Return the largest number of a tile."""
    return tl.reduce(tl.reduce(x, 1, larger), 0, larger)


@triton.jit
def quantize_tile(
    x_ptr,
    scale_ptr,
    rows_ptr,
    transposed_ptr,
    amax_ptr,
    R: tl.constexpr,
    C: tl.constexpr,
    LARGEST: tl.constexpr,
    STORE_ROWS: tl.constexpr,
    STORE_TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INDEX: tl.constexpr,
):
    # Consecutive programs convert the tiles of a column of x: together they write complete rows of
    # the transposed copy.
    row_tiles: tl.constexpr = (R + ROWS - 1) // ROWS
    program = tl.program_id(0)
    r = program % row_tiles * ROWS + tl.arange(0, ROWS)
    c = program // row_tiles * COLS + tl.arange(0, COLS)
    offset = r.to(INDEX)[:, None] * C + c[None, :]
    inside = (r < R)[:, None] & (c < C)[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(amax_ptr + program, largest_of(tl.abs(x)))
    nan: tl.constexpr = tl.PropagateNan.ALL
    q = tl.maximum(x * tl.load(scale_ptr), -LARGEST, propagate_nan=nan)
    q = tl.minimum(q, LARGEST, propagate_nan=nan)
    if STORE_ROWS:
        tl.store(rows_ptr + offset, q.to(rows_ptr.dtype.element_ty), mask=inside)
    if STORE_TRANSPOSED:
        turned = tl.trans(q.to(transposed_ptr.dtype.element_ty))
        offset = c.to(INDEX)[:, None] * R + r[None, :]
        tl.store(transposed_ptr + offset, turned, mask=(c < C)[:, None] & (r < R)[None, :])


def quantize(x, scale, *, dtype, rows, transposed):
    """Return (rows or None, transposed or None, amax)."""
    r, c = x.shape
    programs = triton.cdiv(r, ROWS) * triton.cdiv(c, COLS)
    # A copy that is not stored is an array of one element.
    shapes = [(r, c) if rows else (1,), (c, r) if transposed else (1,)]
    out = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    q, turned, amax = _triton.call(
        quantize_tile,
        x,
        scale.reshape(1),
        out=[*out, jax.ShapeDtypeStruct((programs,), jnp.float32)],
        grid=(programs,),
        num_warps=WARPS,
        R=r,
        C=c,
        LARGEST=float(jnp.finfo(dtype).max),
        STORE_ROWS=rows,
        STORE_TRANSPOSED=transposed,
        ROWS=ROWS,
        COLS=COLS,
        INDEX=tl.int64 if r * c > 2**31 - 1 else tl.int32,
    )
    return q if rows else None, turned if transposed else None, amax.max()


def transposed(q):
    """Return a transposed copy of an 8-bit matrix."""
    # Bitcast to integers: the kernel moves bytes.
    q_1RC = jax.lax.bitcast_convert_type(q, jnp.uint8)[None]
    return jax.lax.bitcast_convert_type(transpose_copy(q_1RC, dtype=jnp.uint8)[0], q.dtype)
