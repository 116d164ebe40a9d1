"""Triton kernels of `quantize_by_largest`: maxima of parts of x, and the conversion, whose programs
compute the scale from these maxima."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _triton
from pallas_kernels.gemm.triton import COLS, ROWS, WARPS, larger, largest_of

# Not tuned. A program of `part_maxima` reads PARTS groups at a time. All programs of the conversion
# read all maxima, at most MOST_MAXIMA.
PARTS, MOST_MAXIMA, MAXIMA_WARPS = 256, 512, 8
UNSAMPLED = 16
"""Size of a group of which all numbers are read."""


@triton.jit
def rounded(x):
    """Convert x to fp32, rounded to bf16 if x is fp32."""
    return (x.to(tl.bfloat16) if x.dtype == tl.float32 else x).to(tl.float32)


@triton.jit
def part_maxima(
    x_ptr,
    maxima_ptr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    READ: tl.constexpr,
    PARTS: tl.constexpr,
    INDEX: tl.constexpr,
):
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
    x_ptr,
    maxima_ptr,
    rows_ptr,
    transposed_ptr,
    scale_ptr,
    inverse_ptr,
    over_factor_ptr,
    R: tl.constexpr,
    C: tl.constexpr,
    LARGEST: tl.constexpr,
    RATIO: tl.constexpr,
    FACTOR: tl.constexpr,
    MAXIMA: tl.constexpr,
    PADDED: tl.constexpr,
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
    # Issued before the maxima are read: one latency hides the other one.
    x = rounded(tl.load(x_ptr + offset, mask=inside, other=0.0))
    scale = scale_of(maxima_ptr, MAXIMA, PADDED, RATIO)
    if program == 0:
        tl.store(scale_ptr, scale)
        tl.store(inverse_ptr, 1.0 / scale)
        tl.store(over_factor_ptr, 1.0 / (FACTOR * scale))
    nan: tl.constexpr = tl.PropagateNan.ALL
    q = tl.maximum(x * scale, -LARGEST, propagate_nan=nan)
    q = tl.minimum(q, LARGEST, propagate_nan=nan).to(rows_ptr.dtype.element_ty)
    tl.store(rows_ptr + offset, q, mask=inside)
    offset = c.to(INDEX)[:, None] * R + r[None, :]
    inside = (c < C)[:, None] & (r < R)[None, :]
    tl.store(transposed_ptr + offset, tl.trans(q), mask=inside)


def quantize_by_largest(x, *, dtype, headroom, factor, group, sampled):
    """Return rows, transposed, scale, 1 / scale and 1 / (factor · scale).

    Args:
        group: size of the groups of columns of which the first `sampled` are read, or None.
    """
    r, c = x.shape
    group, read = (group, sampled) if group else (UNSAMPLED, UNSAMPLED)
    maxima = min(triton.cdiv(triton.cdiv(r * c, group), PARTS), MOST_MAXIMA)
    index = tl.int64 if r * c > 2**31 - 1 else tl.int32
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
        INDEX=index,
    )
    largest = float(jnp.finfo(dtype).max)
    scalar = jax.ShapeDtypeStruct((1,), jnp.float32)
    rows, transposed, *scale = _triton.call(
        quantize_own,
        x,
        maxima_P,
        out=[jax.ShapeDtypeStruct(s, dtype) for s in ((r, c), (c, r))] + [scalar] * 3,
        grid=(triton.cdiv(r, ROWS) * triton.cdiv(c, COLS),),
        num_warps=WARPS,
        R=r,
        C=c,
        LARGEST=largest,
        RATIO=largest / headroom,
        FACTOR=factor,
        MAXIMA=maxima,
        PADDED=triton.next_power_of_2(maxima),
        ROWS=ROWS,
        COLS=COLS,
        INDEX=index,
    )
    return rows, transposed, *(s.reshape(()) for s in scale)
