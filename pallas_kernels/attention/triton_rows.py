"""Triton loads of blocks of rows of a head from B·T·H·D, and stores.

Shapes: R or M rows of a block, P the head dimension padded to a power of two.
"""

import triton
import triton.language as tl


def padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


@triton.jit
def place(HEADS: tl.constexpr, BLOCKS: tl.constexpr, M: tl.constexpr):
    """Return this program's head, first row and sequence.

    Heads of the same rows run concurrently: the rows of all heads are contiguous in memory.
    """
    block = tl.program_id(0) // HEADS
    return tl.program_id(0) % HEADS, block % BLOCKS * M, (block // BLOCKS).to(tl.int64)


@triton.jit
def offsets(R: tl.constexpr, P: tl.constexpr, ROW: tl.constexpr):
    return tl.arange(0, R)[:, None] * ROW + tl.arange(0, P)[None, :]


@triton.jit
def load_rows(
    ptr, start, ROW: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Load rows start … start + R−1.

    Columns from D on are zeros, and rows from T on if CHECKED.
    """
    # The offset of the tile needs 64 bits, offsets inside the tile 32.
    at_RP = ptr + tl.cast(start, tl.int64) * ROW + offsets(R, P, ROW)
    row_R1, column_1P = start + tl.arange(0, R)[:, None], tl.arange(0, P)[None, :]
    if CHECKED and D < P:
        return tl.load(at_RP, mask=(row_R1 < T) & (column_1P < D), other=0.0)
    elif CHECKED:
        return tl.load(at_RP, mask=row_R1 < T, other=0.0)
    elif D < P:
        return tl.load(at_RP, mask=column_1P < D, other=0.0)
    else:
        return tl.load(at_RP)


@triton.jit
def store_rows(
    ptr, x_RP, start, ROW: tl.constexpr, T: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr
):  # fmt: skip
    at_RP = ptr + tl.cast(start, tl.int64) * ROW + offsets(R, P, ROW)
    row_R1, column_1P = start + tl.arange(0, R)[:, None], tl.arange(0, P)[None, :]
    x_RP = x_RP.to(ptr.dtype.element_ty)
    if T % R and D < P:
        tl.store(at_RP, x_RP, mask=(row_R1 < T) & (column_1P < D))
    elif T % R:
        tl.store(at_RP, x_RP, mask=row_R1 < T)
    elif D < P:
        tl.store(at_RP, x_RP, mask=column_1P < D)
    else:
        tl.store(at_RP, x_RP)


@triton.jit
def load_each(ptr, start, T: tl.constexpr, R: tl.constexpr, CHECKED: tl.constexpr):
    """Load one number for each row, and 0 out of bounds as in `load_rows`."""
    rows_R = start + tl.arange(0, R)
    if CHECKED:
        return tl.load(ptr + rows_R, mask=rows_R < T, other=0)
    else:
        return tl.load(ptr + rows_R)
