"""Triton: how kernels of attention read and write rows of a head, B·T·H·D, a block of them at a
time.

Shapes: R rows of a block, P the head dimension padded to a power of two.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


def padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


@triton.jit
def offsets(R: tl.constexpr, P: tl.constexpr, ROW: tl.constexpr):
    return tl.arange(0, R)[:, None] * ROW + tl.arange(0, P)[None, :]


@triton.jit
def load_rows(
    ptr, start, ROW: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Rows start … start + R−1, with zeros for columns from D on and, if CHECKED, for rows from T
    on."""
    # The way to the tile in 64 bits, the way inside it in 32.
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
    """One number for each row, and 0 as in `load_rows`."""
    rows_R = start + tl.arange(0, R)
    if CHECKED:
        return tl.load(ptr + rows_R, mask=rows_R < T, other=0)
    else:
        return tl.load(ptr + rows_R)
