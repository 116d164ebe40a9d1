"""Triton kernels that convert arrays to FP8, functions of kernels that store FP8 tiles, and sums of
rows.

A program converts one tile, and transposes it in shared memory. `quantize` has a given scale. For
`quantize_by_largest`, one kernel stores maxima of parts of x, and the programs of the conversion
compute the scale from these maxima.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _triton
from pallas_kernels.transpose.triton import transpose_copy

# Not tuned.
ROWS, COLS, WARPS = 64, 128, 8
# Not tuned. A program of `part_maxima` reads PARTS groups at a time. All programs of the conversion
# read all maxima, at most MOST_MAXIMA.
PARTS, MOST_MAXIMA, MAXIMA_WARPS = 256, 512, 8
UNSAMPLED = 16
"""Size of a group of which all numbers are read."""
# Rows and columns of a tile of `sum_some_rows`, largest number of programs along the rows, warps.
M, P, SUMS, SUM_WARPS = 16, 256, 64, 2


@triton.jit
def larger(a, b):
    """Return the larger number; NaN if one is NaN. `tl.max` would ignore NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(x):
    """Return the largest number of a tile."""
    return tl.reduce(tl.reduce(x, 1, larger), 0, larger)


@triton.jit
def clipped(x, LARGEST: tl.constexpr):
    """Clip x to ±LARGEST. NaN remains NaN."""
    nan: tl.constexpr = tl.PropagateNan.ALL
    return tl.minimum(tl.maximum(x, -LARGEST, propagate_nan=nan), LARGEST, propagate_nan=nan)


@triton.jit
def rounded(x):
    """Convert x to fp32, rounded to bf16 if x is fp32."""
    return (x.to(tl.bfloat16) if x.dtype == tl.float32 else x).to(tl.float32)


@triton.jit
def tile_of(
    R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, INDEX: tl.constexpr
):
    """Return rows, columns, offsets and mask of this program's tile.

    Consecutive programs have the tiles of a column: together they write complete rows of a
    transposed copy.
    """
    row_tiles: tl.constexpr = (R + ROWS - 1) // ROWS
    program = tl.program_id(0)
    r = program % row_tiles * ROWS + tl.arange(0, ROWS)
    c = program // row_tiles * COLS + tl.arange(0, COLS)
    return r, c, r.to(INDEX)[:, None] * C + c[None, :], (r < R)[:, None] & (c < C)[None, :]


@triton.jit
def store_transposed(ptr, q, r, c, R: tl.constexpr, C: tl.constexpr, INDEX: tl.constexpr):
    """Store the transpose of the tile with rows r and columns c."""
    offset = c.to(INDEX)[:, None] * R + r[None, :]
    tl.store(ptr + offset, tl.trans(q), mask=(c < C)[:, None] & (r < R)[None, :])


@triton.jit
def quantize_tile(
    x_ptr, scale_ptr, rows_ptr, transposed_ptr, amax_ptr, R: tl.constexpr, C: tl.constexpr,
    LARGEST: tl.constexpr, STORE_ROWS: tl.constexpr, STORE_TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    r, c, offset, inside = tile_of(R, C, ROWS, COLS, INDEX)
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(amax_ptr + tl.program_id(0), largest_of(tl.abs(x)))
    q = clipped(x * tl.load(scale_ptr), LARGEST).to(rows_ptr.dtype.element_ty)
    if STORE_ROWS:
        tl.store(rows_ptr + offset, q, mask=inside)
    if STORE_TRANSPOSED:
        store_transposed(transposed_ptr, q, r, c, R, C, INDEX)


@triton.jit
def part_maxima(
    x_ptr, maxima_ptr, SIZE: tl.constexpr, GROUP: tl.constexpr, READ: tl.constexpr,
    PARTS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Store the largest |x| of this program's groups: of the first READ of each GROUP numbers."""
    groups: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    largest = tl.zeros((PARTS, READ), tl.float32)
    for first in range(tl.program_id(0) * PARTS, groups, tl.num_programs(0) * PARTS):
        group = (first + tl.arange(0, PARTS)).to(INDEX)
        offset = group[:, None] * GROUP + tl.arange(0, READ)[None, :]
        x = rounded(tl.load(x_ptr + offset, mask=offset < SIZE, other=0.0))
        largest = larger(largest, tl.abs(x))
    tl.store(maxima_ptr + tl.program_id(0), largest_of(largest))


@triton.jit
def scale_of(maxima_ptr, MAXIMA: tl.constexpr, PADDED: tl.constexpr, RATIO: tl.constexpr):
    """Return the scale of the largest of the maxima, as `scale_for`."""
    i = tl.arange(0, PADDED)
    amax = tl.reduce(tl.load(maxima_ptr + i, mask=i < MAXIMA, other=0.0), 0, larger)
    # The exponent of a quotient: its bits without those of the mantissa. No sign.
    bits = tl.div_rn(tl.full((), RATIO, tl.float32), amax).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum((bits >> 23) - 127, -60), 60)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)


@triton.jit
def quantize_own(
    x_ptr, maxima_ptr, rows_ptr, transposed_ptr, scale_ptr, inverse_ptr, over_factor_ptr,
    R: tl.constexpr, C: tl.constexpr, LARGEST: tl.constexpr, RATIO: tl.constexpr,
    FACTOR: tl.constexpr, MAXIMA: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    r, c, offset, inside = tile_of(R, C, ROWS, COLS, INDEX)
    # Issued before the maxima are read: one latency hides the other one.
    x = rounded(tl.load(x_ptr + offset, mask=inside, other=0.0))
    scale = scale_of(maxima_ptr, MAXIMA, PADDED, RATIO)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
        tl.store(inverse_ptr, 1.0 / scale)
        tl.store(over_factor_ptr, 1.0 / (FACTOR * scale))
    q = clipped(x * scale, LARGEST).to(rows_ptr.dtype.element_ty)
    tl.store(rows_ptr + offset, q, mask=inside)
    store_transposed(transposed_ptr, q, r, c, R, C, INDEX)


@triton.jit
def sum_some_rows(
    x_ptr, sums_ptr, n: tl.constexpr, o: tl.constexpr, TIMES: tl.constexpr, M: tl.constexpr,
    P: tl.constexpr
):  # fmt: skip
    """Sum TIMES·M rows."""
    COLUMN_TILES: tl.constexpr = (o + P - 1) // P
    part, columns = (
        tl.program_id(0) // COLUMN_TILES,
        tl.program_id(0) % COLUMN_TILES * P + tl.arange(0, P),
    )
    sums_MP = tl.full((M, P), 0.0, tl.float32)
    for time in range(TIMES):
        rows = (part * TIMES + time) * M + tl.arange(0, M)
        mask = (rows < n)[:, None] & (columns < o)[None, :]
        sums_MP += tl.load(
            x_ptr + rows.to(tl.int64)[:, None] * o + columns[None, :], mask=mask, other=0.0
        )
    tl.store(sums_ptr + part.to(tl.int64) * o + columns, tl.sum(sums_MP, axis=0), mask=columns < o)


def launch(kernel, shape, *arrays, out, tile=(ROWS, COLS), num_warps=WARPS, **constexprs):
    """Launch a kernel that calls `tile_of`: a program for each tile of a matrix of this shape."""
    (r, c), (rows, cols) = shape, tile
    grid = (triton.cdiv(r, rows) * triton.cdiv(c, cols),)
    sizes = {"R": r, "C": c, "ROWS": rows, "COLS": cols, "INDEX": index_type(r * c)}
    how = {"out": out, "grid": grid, "num_warps": num_warps} | sizes | constexprs
    return _triton.call(kernel, *arrays, **how)


def index_type(size: int):
    """Return the type of the offsets in an array: 64 bits only if needed."""
    return tl.int64 if size > 2**31 - 1 else tl.int32


def quantize(x, scale, *, dtype, rows, transposed):
    """Return (rows or None, transposed or None, amax)."""
    r, c = x.shape
    # A copy that is not stored is an array of one element.
    shapes = [(r, c) if rows else (1,), (c, r) if transposed else (1,)]
    programs = triton.cdiv(r, ROWS) * triton.cdiv(c, COLS)
    q, turned, amax = launch(
        quantize_tile,
        x.shape,
        x,
        scale.reshape(1),
        out=[
            *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes),
            jax.ShapeDtypeStruct((programs,), jnp.float32),
        ],
        LARGEST=float(jnp.finfo(dtype).max),
        STORE_ROWS=rows,
        STORE_TRANSPOSED=transposed,
    )
    return q if rows else None, turned if transposed else None, amax.max()


def transposed(q):
    """Return a transposed copy of an 8-bit matrix."""
    # Bitcast to integers: the kernel moves bytes.
    q_1RC = jax.lax.bitcast_convert_type(q, jnp.uint8)[None]
    return jax.lax.bitcast_convert_type(transpose_copy(q_1RC, dtype=jnp.uint8)[0], q.dtype)


def quantize_by_largest(x, *, dtype, headroom, factor, group, sampled):
    """Return rows, transposed, scale, 1 / scale and 1 / (factor · scale).

    Args:
        group: size of the groups of columns of which the first `sampled` are read, or None.
    """
    r, c = x.shape
    group, read = (group, sampled) if group else (UNSAMPLED, UNSAMPLED)
    maxima = min(triton.cdiv(triton.cdiv(r * c, group), PARTS), MOST_MAXIMA)
    (maxima_P,) = _triton.call(
        part_maxima,
        x,
        out=[jax.ShapeDtypeStruct((maxima,), jnp.float32)],
        grid=(maxima,),
        num_warps=MAXIMA_WARPS,
        SIZE=r * c,
        GROUP=group,
        READ=read,
        PARTS=PARTS,
        INDEX=index_type(r * c),
    )
    largest = float(jnp.finfo(dtype).max)
    scalar = jax.ShapeDtypeStruct((1,), jnp.float32)
    rows, transposed, *scale = launch(
        quantize_own,
        x.shape,
        x,
        maxima_P,
        out=[jax.ShapeDtypeStruct(s, dtype) for s in ((r, c), (c, r))] + [scalar] * 3,
        LARGEST=largest,
        RATIO=largest / headroom,
        FACTOR=factor,
        MAXIMA=maxima,
        PADDED=triton.next_power_of_2(maxima),
    )
    return rows, transposed, *(s.reshape(()) for s in scale)


def sum_rows(x_NO):
    """Return Σ_n x in fp32. Each program sums a few rows, and XLA adds the partial sums."""
    n, o = x_NO.shape
    times = triton.cdiv(n, M * SUMS)
    parts = triton.cdiv(n, M * times)
    (sums_SO,) = _triton.call(
        sum_some_rows,
        x_NO,
        out=[jax.ShapeDtypeStruct((parts, o), jnp.float32)],
        grid=(parts * triton.cdiv(o, P),),
        n=n,
        o=o,
        TIMES=times,
        M=M,
        P=P,
        num_warps=SUM_WARPS,
    )
    return sums_SO.sum(0)
