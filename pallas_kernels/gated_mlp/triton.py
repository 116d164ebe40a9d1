"""Triton kernels between the matmuls of `swiglu`: h from [g | u], and its backward pass.

Shapes: N rows, F hidden channels. A program computes a tile of M rows and P columns of h.
"""

import jax
import triton
import triton.language as tl

from pallas_kernels import _triton

# A thread holds 16 numbers of each array: two vectors of 16 bytes in a 16-bit dtype. Not tuned.
M, P, WARPS = 8, 256, 4


def activated(gu_N2F):
    """Return h = silu(g) · u."""
    return _launch(forward_kernel, gu_N2F, widths=(1,))[0]


def activated_backward(gu_N2F, dh_NF):
    """Return ([dg | du], h)."""
    return _launch(backward_kernel, gu_N2F, dh_NF, widths=(2, 1))


def _launch(kernel, gu_N2F, *arrays, widths):
    """Launch a kernel whose outputs have widths · F columns."""
    n, f = gu_N2F.shape[0], gu_N2F.shape[1] // 2
    return _triton.call(
        kernel,
        gu_N2F,
        *arrays,
        out=[jax.ShapeDtypeStruct((n, width * f), gu_N2F.dtype) for width in widths],
        grid=(triton.cdiv(n, M) * triton.cdiv(f, P),),
        N=n,
        F=f,
        M=M,
        P=P,
        num_warps=WARPS,
    )


# N and F are constants: jax-triton does not tell the compiler that a run-time size is a multiple of
# 16, and the kernel would read single elements.
@triton.jit
def forward_kernel(
    gu_ptr, h_ptr, N: tl.constexpr, F: tl.constexpr, M: tl.constexpr, P: tl.constexpr
):
    wide, narrow, mask = tile(N, F, M, P)
    g = tl.load(gu_ptr + wide, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gu_ptr + F + wide, mask=mask, other=0.0).to(tl.float32)
    tl.store(h_ptr + narrow, g * tl.sigmoid(g) * u, mask=mask)


@triton.jit
def backward_kernel(
    gu_ptr, dh_ptr, dgu_ptr, h_ptr, N: tl.constexpr, F: tl.constexpr, M: tl.constexpr,
    P: tl.constexpr
):  # fmt: skip
    wide, narrow, mask = tile(N, F, M, P)
    g = tl.load(gu_ptr + wide, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gu_ptr + F + wide, mask=mask, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + narrow, mask=mask, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(g)
    silu = g * sigma
    tl.store(dgu_ptr + wide, dh * u * (sigma + silu * (1 - sigma)), mask=mask)
    tl.store(dgu_ptr + F + wide, dh * silu, mask=mask)
    tl.store(h_ptr + narrow, silu * u, mask=mask)


@triton.jit
def tile(N: tl.constexpr, F: tl.constexpr, M: tl.constexpr, P: tl.constexpr):
    """Return the offsets of this program's tile in rows of 2·F and of F columns, and its mask."""
    COLUMN_TILES: tl.constexpr = (F + P - 1) // P
    row, column = tl.program_id(0) // COLUMN_TILES, tl.program_id(0) % COLUMN_TILES
    rows, columns = row * M + tl.arange(0, M), column * P + tl.arange(0, P)
    # The offset of the tile needs 64 bits, offsets inside the tile 32.
    corner = (row * M).to(tl.int64)
    wide = (
        corner * (2 * F)
        + column * P
        + tl.arange(0, M)[:, None] * (2 * F)
        + tl.arange(0, P)[None, :]
    )
    narrow = corner * F + column * P + tl.arange(0, M)[:, None] * F + tl.arange(0, P)[None, :]
    return wide, narrow, (rows < N)[:, None] & (columns < F)[None, :]
