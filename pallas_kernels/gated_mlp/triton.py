"""Triton kernels between the matmuls of `swiglu`: h from [g | u], and its backward pass.

Shapes: N rows, F hidden channels. A program computes a tile of h: of M rows and P columns, or of
ROWS and COLS if it transposes its results in shared memory.
"""

import jax
import triton
import triton.language as tl

from pallas_kernels import _triton
from pallas_kernels.gemm.numerics import HiddenFormat
from pallas_kernels.gemm.operands import largest
from pallas_kernels.gemm.triton import clipped, index_type, launch, store_transposed, tile_of

# A thread holds 16 numbers of each array: two vectors of 16 bytes in a 16-bit dtype. Not tuned.
M, P, WARPS = 8, 256, 4
# Tile of the pass that transposes three arrays. Not tuned.
ROWS, COLS, TRANSPOSING_WARPS = 64, 64, 8


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


@triton.jit
def gradients(gu_ptr, dh_ptr, wide, narrow, mask, F: tl.constexpr):
    """Return dg, du and h of a tile, in fp32."""
    g = tl.load(gu_ptr + wide, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gu_ptr + F + wide, mask=mask, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + narrow, mask=mask, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(g)
    silu = g * sigma
    return dh * u * (sigma + silu * (1 - sigma)), dh * silu, silu * u


# N and F are constants: jax-triton does not tell the compiler that a run-time size is a multiple of
# 16, and the kernel would read single elements.
@triton.jit
def forward_kernel(
    gu_ptr, h_ptr, N: tl.constexpr, F: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr,
    M: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    wide, narrow, mask = tile(N, F, M, P)
    g = tl.load(gu_ptr + wide, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gu_ptr + F + wide, mask=mask, other=0.0).to(tl.float32)
    h = g * tl.sigmoid(g) * u
    if LARGEST is not None:
        h = clipped(h * SCALE, LARGEST)
    tl.store(h_ptr + narrow, h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    gu_ptr, dh_ptr, dgu_ptr, h_ptr, N: tl.constexpr, F: tl.constexpr, M: tl.constexpr,
    P: tl.constexpr
):  # fmt: skip
    wide, narrow, mask = tile(N, F, M, P)
    dg, du, h = gradients(gu_ptr, dh_ptr, wide, narrow, mask, F)
    tl.store(dgu_ptr + wide, dg, mask=mask)
    tl.store(dgu_ptr + F + wide, du, mask=mask)
    tl.store(h_ptr + narrow, h, mask=mask)


@triton.jit
def transposing_backward_kernel(
    gu_ptr, dh_ptr, scale_ptr, dgu_ptr, dgu_transposed_ptr, h_transposed_ptr, R: tl.constexpr,
    C: tl.constexpr, H_SCALE: tl.constexpr, H_LARGEST: tl.constexpr, LARGEST: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    r, c, narrow, inside = tile_of(R, C, ROWS, COLS, INDEX)
    wide = r.to(INDEX)[:, None] * (2 * C) + c[None, :]
    dg, du, h = gradients(gu_ptr, dh_ptr, wide, narrow, inside, C)
    scale = tl.load(scale_ptr)
    dg = clipped(dg * scale, LARGEST).to(dgu_ptr.dtype.element_ty)
    tl.store(dgu_ptr + wide, dg, mask=inside)
    store_transposed(dgu_transposed_ptr, dg, r, c, R, C, INDEX)
    du = clipped(du * scale, LARGEST).to(dgu_ptr.dtype.element_ty)
    tl.store(dgu_ptr + C + wide, du, mask=inside)
    last = tl.full((), C, INDEX) * R
    store_transposed(dgu_transposed_ptr + last, du, r, c, R, C, INDEX)
    h = clipped(h * H_SCALE, H_LARGEST).to(h_transposed_ptr.dtype.element_ty)
    store_transposed(h_transposed_ptr, h, r, c, R, C, INDEX)


def activated(gu_N2F, *, stored: HiddenFormat):
    """Return h = silu(g) · u."""
    shape = gu_N2F.shape[0], gu_N2F.shape[1] // 2
    limit = largest(stored.dtype) if stored.k_major else None
    out = [jax.ShapeDtypeStruct(shape, stored.dtype)]
    return _launch(forward_kernel, gu_N2F, out=out, SCALE=stored.scale, LARGEST=limit)[0]


def activated_backward(gu_N2F, dh_NF, scale, *, stored: HiddenFormat):
    """Return [dg | du] and its transposed copy, and h and its transposed copy; None for what is not
    stored.

    Args:
        scale: factor of [dg | du] in FP8.
    """
    n, f = dh_NF.shape
    dgu = jax.ShapeDtypeStruct((n, 2 * f), stored.gradient_dtype)
    if not stored.k_major:
        out = [dgu, jax.ShapeDtypeStruct((n, f), stored.dtype)]
        dgu_N2F, h_NF = _launch(backward_kernel, gu_N2F, dh_NF, out=out)
        return dgu_N2F, None, h_NF, None
    dgu_N2F, dgu_2FN, h_FN = launch(
        transposing_backward_kernel,
        (n, f),
        gu_N2F,
        dh_NF,
        scale.reshape(1),
        out=[
            dgu,
            jax.ShapeDtypeStruct((2 * f, n), stored.gradient_dtype),
            jax.ShapeDtypeStruct((f, n), stored.dtype),
        ],
        tile=(ROWS, COLS),
        num_warps=TRANSPOSING_WARPS,
        INDEX=index_type(2 * n * f),
        H_SCALE=stored.scale,
        H_LARGEST=largest(stored.dtype),
        LARGEST=largest(stored.gradient_dtype),
    )
    return dgu_N2F, dgu_2FN, None, h_FN


def _launch(kernel, gu_N2F, *arrays, out, **constexprs):
    n, f = gu_N2F.shape[0], gu_N2F.shape[1] // 2
    grid = (triton.cdiv(n, M) * triton.cdiv(f, P),)
    sizes = {"N": n, "F": f, "M": M, "P": P} | constexprs
    return _triton.call(kernel, gu_N2F, *arrays, out=out, grid=grid, num_warps=WARPS, **sizes)
