"""Triton kernels of `softmax`.

Masks of loads and stores have the granularity of a vector of K columns (16 bytes): a mask inside a
vector would split the vector into single columns.
"""

import math
from typing import NamedTuple

import jax
import triton
import triton.language as tl

from pallas_kernels import _dispatch, _triton

LOG2E = tl.constexpr(1.4426950408889634)
# Below every finite fp32 and above −∞: −∞ − LOWEST is −∞, and no lane needs a guard against ∞ − ∞.
LOWEST = tl.constexpr(-3.4028234663852886e38)

# Short rows: share of the copy rate at 131072×1024 bf16 by (rows per program, warps). Forward
# (1, 1) 97 %, (8, 8) 96 %, (1, 4) 93 %; backward 100 to 102 % for all. Causal forward (1, 1) 84 %,
# (2, 4) 72 %; causal backward (2, 4) 92 %, (1, 1) 85 %. A causal pass cannot reach the copy rate:
# two of three bytes are stores, and a memset alone runs at 80 % of the copy rate.
LONGEST_SHORT_ROW = 16384
# Long rows, forward: two programs of 32 warps occupy an SM, and the rows stay in the L2 cache for
# the second read. With 50304 columns, the rows in progress are 26 MB of an H200's 60 MB: 99 % of
# the copy rate. Four programs of 16 warps, 52 MB, reach 80 %.
FORWARD_WARPS = 32
# If 264 rows do not fit into the L2 cache, a program keeps a part of the row in registers, and one
# program occupies an SM. Share of the copy rate with and without registers: 98304 columns 93 % and
# 83 %; 131072 columns 80 % and 74 %; but 65536 columns 86 % and 96 %.
TWO_ROWS_FIT = 1 << 17  # bytes of a row
FORWARD_KEPT = 6
# Backward: y stays in registers until the sum of dy·y is complete, and only dy is read again: 102 %
# of the copy rate. Reading both again: 85 %. One program of 16 warps occupies an SM, since y needs
# most of the registers.
BACKWARD_WARPS = 16
MOST_KEPT = 12  # blocks of y, 4 registers per thread each
# For rows that are not aligned to 16 bytes, on compute capability 10 (B200): the addresses of
# single columns need registers, and 8 blocks spill. Compiled, not measured.
MOST_KEPT_UNALIGNED_10 = 6


class Rows(NamedTuple):
    """Static description of a call.

    Attributes:
        S: columns.
        SCALE: factor of x, in the forward pass times log₂ e.
        K: columns in one thread; their loads are one vector.
        N, B, C: number of short rows, and rows and columns of a tile.
        R, KEPT: a block of a long row is R·K columns; KEPT blocks stay in registers.
    """

    S: int
    SCALE: float
    CAUSAL: bool
    K: int
    N: int = 0
    B: int = 0
    C: int = 0
    R: int = 0
    KEPT: int = 0


def forward(x, *, scale, causal):
    """Return y, shaped like x."""
    kept = FORWARD_KEPT if x.shape[-1] * x.dtype.itemsize > TWO_ROWS_FIT else 0
    long = long_forward_kernel, FORWARD_WARPS, kept
    return _launch(scale * LOG2E.value, causal, x, None, tile=1024, warps=1, long=long)


def backward(y, dy, *, scale, causal):
    """Return dx, shaped like y."""
    kept, unaligned = MOST_KEPT, y.shape[-1] * y.dtype.itemsize % 16 != 0
    if unaligned and (_dispatch.capability() or (9, 0))[0] == 10:
        kept = MOST_KEPT_UNALIGNED_10
    long = long_backward_kernel, BACKWARD_WARPS, kept
    return _launch(scale, causal, y, dy, tile=2048, warps=4, long=long)


def _launch(scale, causal, x, dy, *, tile, warps, long):
    """Launch the kernel for short or long rows.

    Args:
        tile, warps: entries of a tile of short rows, and warps per tile. A program has as many rows
            as a tile contains, or more warps for a longer row.
        long: kernel for long rows, warps per row, and the largest number of blocks in registers.
    """
    programs, s = math.prod(x.shape[:-1]), x.shape[-1]
    rows = Rows(s, scale, causal, 16 // x.dtype.itemsize)
    if s <= LONGEST_SHORT_ROW:
        c = triton.next_power_of_2(s)
        b = max(1, tile // c)
        rows, arrays = rows._replace(N=programs, B=b, C=c), (x, dy)
        kernel, programs, warps = short_kernel, triton.cdiv(programs, b), warps * (b * c // tile)
    else:
        kernel, warps, kept = long
        kept = 0 if causal else min(kept, s // (32 * warps * rows.K))
        rows, arrays = rows._replace(R=32 * warps, KEPT=kept), (x,) if dy is None else (x, dy)
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    return _triton.call(kernel, *arrays, out=out, grid=(programs,), num_warps=warps, ROWS=rows)[0]


@triton.jit
def short_kernel(x_ptr, dy_ptr, out_ptr, ROWS: tl.constexpr):
    """Store softmax(x) of B rows; with dy_ptr, the gradient dx, and x_ptr points to y."""
    row_B = tl.program_id(0) * ROWS.B + tl.arange(0, ROWS.B)
    column_C = tl.arange(0, ROWS.C)
    offset_BC = row_B.to(tl.int64)[:, None] * ROWS.S + column_C[None, :]
    inside_BC = (row_B < ROWS.N)[:, None] & (column_C < ROWS.S)[None, :]
    visible_BC, vector_BC = inside_BC, inside_BC
    if ROWS.CAUSAL:  # vectors of which the row sees at least one entry
        t_B1 = (row_B % ROWS.S)[:, None]
        visible_BC = column_C[None, :] <= t_B1
        vector_BC = inside_BC & ((column_C // ROWS.K * ROWS.K)[None, :] <= t_B1)
    if dy_ptr is None:
        x_BC = tl.load(x_ptr + offset_BC, mask=vector_BC, other=float("-inf")).to(tl.float32)
        if ROWS.CAUSAL:
            x_BC = tl.where(visible_BC, x_BC, float("-inf"))
        exp_BC = tl.exp2((x_BC - tl.max(x_BC, 1)[:, None]) * ROWS.SCALE)
        out_BC = exp_BC * (1 / tl.sum(exp_BC, 1))[:, None]
    else:
        y_BC = tl.load(x_ptr + offset_BC, mask=vector_BC, other=0.0).to(tl.float32)
        dy_BC = tl.load(dy_ptr + offset_BC, mask=vector_BC, other=0.0).to(tl.float32)
        if ROWS.CAUSAL:  # dy may have any value in masked columns
            dy_BC = tl.where(visible_BC, dy_BC, 0.0)
        out_BC = y_BC * (dy_BC - tl.sum(y_BC * dy_BC, 1)[:, None]) * ROWS.SCALE
    if ROWS.CAUSAL:
        out_BC = tl.where(visible_BC, out_BC, 0.0)
    tl.store(out_ptr + offset_BC, out_BC, mask=inside_BC)


@triton.jit
def long_forward_kernel(x_ptr, y_ptr, ROWS: tl.constexpr):
    BLOCK: tl.constexpr = ROWS.R * ROWS.K
    KEPT: tl.constexpr = ROWS.KEPT  # Triton 3.6 unrolls loops over variables only
    SCALE: tl.constexpr = ROWS.SCALE
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * ROWS.S
    y_ptr += row.to(tl.int64) * ROWS.S
    column_RK = block_columns(ROWS.R, ROWS.K, ROWS.S)
    columns = row % ROWS.S + 1 if ROWS.CAUSAL else ROWS.S
    full = columns // BLOCK * BLOCK  # columns that need no mask

    m_R = tl.full((ROWS.R,), LOWEST, tl.float32)
    s_R = tl.full((ROWS.R,), 0.0, tl.float32)
    for start in range(KEPT * BLOCK, full, BLOCK):
        x_RK = tl.load(x_ptr + start + column_RK, eviction_policy="evict_last").to(tl.float32)
        m_R, s_R = online(m_R, s_R, x_RK, SCALE)
    kept = ()
    for i in tl.static_range(KEPT):
        kept = kept + (tl.load(x_ptr + i * BLOCK + column_RK),)
    for i in tl.static_range(KEPT):
        m_R, s_R = online(m_R, s_R, kept[i].to(tl.float32), SCALE)
    last_RK = load_visible(x_ptr, full, column_RK, columns, ROWS.S, float("-inf"))
    m_R, s_R = online(m_R, s_R, last_RK, SCALE)
    m, s = together(m_R, s_R, SCALE)

    weight = 1 / s
    for i in tl.static_range(KEPT):
        y_RK = tl.exp2((kept[i].to(tl.float32) - m) * SCALE) * weight
        tl.store(y_ptr + i * BLOCK + column_RK, y_RK, eviction_policy="evict_first")
    for start in range(KEPT * BLOCK, full, BLOCK):
        x_RK = tl.load(x_ptr + start + column_RK, eviction_policy="evict_first").to(tl.float32)
        at_RK = y_ptr + start + column_RK
        tl.store(at_RK, tl.exp2((x_RK - m) * SCALE) * weight, eviction_policy="evict_first")
    last_RK = tl.exp2((last_RK - m) * SCALE) * weight
    store_last(y_ptr, last_RK, full, column_RK, columns, ROWS)


@triton.jit
def long_backward_kernel(y_ptr, dy_ptr, dx_ptr, ROWS: tl.constexpr):
    BLOCK: tl.constexpr = ROWS.R * ROWS.K
    KEPT: tl.constexpr = ROWS.KEPT
    row = tl.program_id(0)
    y_ptr += row.to(tl.int64) * ROWS.S
    dy_ptr += row.to(tl.int64) * ROWS.S
    dx_ptr += row.to(tl.int64) * ROWS.S
    column_RK = block_columns(ROWS.R, ROWS.K, ROWS.S)
    columns = row % ROWS.S + 1 if ROWS.CAUSAL else ROWS.S
    full = columns // BLOCK * BLOCK

    sum_R = tl.full((ROWS.R,), 0.0, tl.float32)
    for start in range(KEPT * BLOCK, full, BLOCK):
        y_RK = tl.load(y_ptr + start + column_RK, eviction_policy="evict_last").to(tl.float32)
        dy_RK = tl.load(dy_ptr + start + column_RK, eviction_policy="evict_last").to(tl.float32)
        sum_R += tl.sum(y_RK * dy_RK, 1)
    kept = ()
    for i in tl.static_range(KEPT):
        kept = kept + (tl.load(y_ptr + i * BLOCK + column_RK),)
        dy_RK = tl.load(dy_ptr + i * BLOCK + column_RK, eviction_policy="evict_last").to(tl.float32)
        sum_R += tl.sum(kept[i].to(tl.float32) * dy_RK, 1)
    last_y_RK = load_visible(y_ptr, full, column_RK, columns, ROWS.S, 0.0)
    last_dy_RK = load_visible(dy_ptr, full, column_RK, columns, ROWS.S, 0.0)
    total = tl.sum(sum_R + tl.sum(last_y_RK * last_dy_RK, 1), 0)

    last_RK = last_y_RK * (last_dy_RK - total) * ROWS.SCALE
    store_last(dx_ptr, last_RK, full, column_RK, columns, ROWS)
    for i in tl.static_range(KEPT):
        at_RK = dy_ptr + i * BLOCK + column_RK
        dy_RK = tl.load(at_RK, eviction_policy="evict_first").to(tl.float32)
        dx_RK = kept[i].to(tl.float32) * (dy_RK - total) * ROWS.SCALE
        tl.store(dx_ptr + i * BLOCK + column_RK, dx_RK, eviction_policy="evict_first")
    for start in range(KEPT * BLOCK, full, BLOCK):
        y_RK = tl.load(y_ptr + start + column_RK, eviction_policy="evict_first").to(tl.float32)
        dy_RK = tl.load(dy_ptr + start + column_RK, eviction_policy="evict_first").to(tl.float32)
        at_RK = dx_ptr + start + column_RK
        tl.store(at_RK, y_RK * (dy_RK - total) * ROWS.SCALE, eviction_policy="evict_first")


@triton.jit
def block_columns(R: tl.constexpr, K: tl.constexpr, S: tl.constexpr):
    """Return the columns of a block of rows of S.

    The K columns of a thread are one vector. If rows are not aligned to vectors, neighbouring
    columns are in neighbouring threads.
    """
    if S % K == 0:
        return tl.arange(0, R)[:, None] * K + tl.arange(0, K)[None, :]
    else:
        return tl.arange(0, R)[:, None] + tl.arange(0, K)[None, :] * R


@triton.jit
def load_visible(ptr, start, column_RK, columns, S: tl.constexpr, OTHER: tl.constexpr):
    """Load the block at `start` in fp32, with OTHER from column `columns` on."""
    x_RK = tl.load(ptr + start + column_RK, mask=start + column_RK < S, other=OTHER).to(tl.float32)
    return tl.where(start + column_RK < columns, x_RK, OTHER)


@triton.jit
def store_last(ptr, x_RK, start, column_RK, columns, ROWS: tl.constexpr):
    """Store the last visible block, at `start`, and zeros in the masked columns after it."""
    if ROWS.CAUSAL:
        x_RK = tl.where(start + column_RK < columns, x_RK, 0.0)
    tl.store(ptr + start + column_RK, x_RK, mask=start + column_RK < ROWS.S)
    if ROWS.CAUSAL:
        for hidden in range(start + ROWS.R * ROWS.K, ROWS.S, ROWS.R * ROWS.K):
            zero_RK = tl.full(column_RK.shape, 0.0, ptr.dtype.element_ty)
            tl.store(ptr + hidden + column_RK, zero_RK, mask=hidden + column_RK < ROWS.S)


@triton.jit
def online(m_R, s_R, x_RK, SCALE: tl.constexpr):
    """Update the maximum of x and the sum of exp2(SCALE·(x − maximum)) of each of R threads.

    Threads do not communicate.
    """
    new_R = tl.maximum(m_R, tl.max(x_RK, 1))
    s_R = s_R * tl.exp2((m_R - new_R) * SCALE) + tl.sum(tl.exp2((x_RK - new_R[:, None]) * SCALE), 1)
    return new_R, s_R


@triton.jit
def together(m_R, s_R, SCALE: tl.constexpr):
    """Combine maximum and sum over all R."""
    m = tl.max(m_R, 0)
    return m, tl.sum(s_R * tl.exp2((m_R - m) * SCALE), 0)


@triton.jit
def add_pairs(a, b, c, d):
    """Combine two sums of one reduction."""
    return a + c, b + d
