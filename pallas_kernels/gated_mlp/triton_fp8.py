"""Triton kernels between the FP8 matmuls of `swiglu`: h in e4m3 from [g | u], and the backward
pass, which stores [dg | du] in e5m2 both ways round, and h transposed.

Shapes: N rows, F hidden channels.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _triton
from pallas_kernels.feed_forward.triton_fp8 import clipped
from pallas_kernels.gated_mlp.triton import WARPS, M, P, tile

# Tile of the backward pass, which transposes three arrays in shared memory. Not tuned.
ROWS, COLS, BACKWARD_WARPS = 64, 64, 8
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@triton.jit
def forward_kernel(
    gu_ptr, h_ptr, N: tl.constexpr, F: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
    SCALE: tl.constexpr
):  # fmt: skip
    wide, narrow, mask = tile(N, F, M, P)
    g = tl.load(gu_ptr + wide, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gu_ptr + F + wide, mask=mask, other=0.0).to(tl.float32)
    h = clipped(g * tl.sigmoid(g) * u * SCALE, 448.0)
    tl.store(h_ptr + narrow, h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    gu_ptr,
    dh_ptr,
    scale_ptr,
    dgu_ptr,
    dgu_transposed_ptr,
    h_transposed_ptr,
    N: tl.constexpr,
    F: tl.constexpr,
    H_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INDEX: tl.constexpr,
):
    # Consecutive programs have the tiles of a column: together they write complete rows of the
    # transposed copies.
    row_tiles: tl.constexpr = (N + ROWS - 1) // ROWS
    r = (tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)).to(INDEX)
    c = (tl.program_id(0) // row_tiles * COLS + tl.arange(0, COLS)).to(INDEX)
    inside = (r < N)[:, None] & (c < F)[None, :]
    turned = (c < F)[:, None] & (r < N)[None, :]
    wide, across = r[:, None] * (2 * F) + c[None, :], c[:, None] * N + r[None, :]
    g = tl.load(gu_ptr + wide, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gu_ptr + F + wide, mask=inside, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + r[:, None] * F + c[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr)
    sigma = tl.sigmoid(g)
    silu = g * sigma
    e5m2 = dgu_ptr.dtype.element_ty
    dg = clipped(dh * u * (sigma + silu * (1 - sigma)) * scale, 57344.0).to(e5m2)
    tl.store(dgu_ptr + wide, dg, mask=inside)
    tl.store(dgu_transposed_ptr + across, tl.trans(dg), mask=turned)
    du = clipped(dh * silu * scale, 57344.0).to(e5m2)
    tl.store(dgu_ptr + F + wide, du, mask=inside)
    last = tl.full((), F, INDEX) * N
    tl.store(dgu_transposed_ptr + last + across, tl.trans(du), mask=turned)
    h = clipped(silu * u * H_SCALE, 448.0).to(h_transposed_ptr.dtype.element_ty)
    tl.store(h_transposed_ptr + across, tl.trans(h), mask=turned)


def activated(gu_N2F, *, scale: float):
    """Return h = silu(g) · u times the scale, in e4m3."""
    n, f = gu_N2F.shape[0], gu_N2F.shape[1] // 2
    return _triton.call(
        forward_kernel,
        gu_N2F,
        out=[jax.ShapeDtypeStruct((n, f), E4M3)],
        grid=(triton.cdiv(n, M) * triton.cdiv(f, P),),
        num_warps=WARPS,
        N=n,
        F=f,
        M=M,
        P=P,
        SCALE=scale,
    )[0]


def activated_backward(gu_N2F, dh_NF, scale, *, h_scale: float):
    """Return [dg | du] times the scale in e5m2, its transposed copy, and hᵀ · h_scale in e4m3."""
    n, f = dh_NF.shape
    return _triton.call(
        backward_kernel,
        gu_N2F,
        dh_NF,
        scale.reshape(1),
        out=[
            jax.ShapeDtypeStruct((n, 2 * f), E5M2),
            jax.ShapeDtypeStruct((2 * f, n), E5M2),
            jax.ShapeDtypeStruct((f, n), E4M3),
        ],
        grid=(triton.cdiv(n, ROWS) * triton.cdiv(f, COLS),),
        num_warps=BACKWARD_WARPS,
        N=n,
        F=f,
        H_SCALE=h_scale,
        ROWS=ROWS,
        COLS=COLS,
        INDEX=tl.int64 if 2 * n * f > 2**31 - 1 else tl.int32,
    )
