"""Sums over the rows of a matrix.

Each Triton program sums a few rows, and XLA adds the partial sums.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _triton

# Rows and columns of a program's tile, the largest number of programs along the rows, and warps.
M, P, PARTS, WARPS = 16, 256, 64, 2


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


def sum_rows(x_NO):
    """Return Σ_n x in fp32."""
    n, o = x_NO.shape
    times = triton.cdiv(n, M * PARTS)
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
        num_warps=WARPS,
    )
    return sums_SO.sum(0)
