"""Triton kernels of `decode_step` for several sequences without a launch for the second LayerNorm.

The output projection adds to the residual stream and stores, for each row, the sums of its columns
and of their squares. The matmul that follows normalises its input with them.

Shapes: B sequences, M ≥ B rows of a tile, N columns and K rows of a matmul, T tiles of the columns
of the projection.
"""

import triton
import triton.language as tl

from pallas_kernels.decode.triton_functions import gelu
from pallas_kernels.decode.triton_many import request


@triton.jit
def decode_add_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    old_ptr,
    ahead_ptr,
    layer,
    y_ptr,
    sums_ptr,
    B: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    STRIDE: tl.constexpr,
    AHEAD_LINES: tl.constexpr,
):
    """Columns of y = old + x Wᵀ + b (B, N), and each row's sums of them and of their squares,
    (2, T, B). Grid (T,); N is a multiple of BN."""
    RESIDUAL: tl.constexpr = y_ptr.dtype.element_ty
    row_M = tl.arange(0, M)
    column_N = tl.program_id(0) * BN + tl.arange(0, BN)
    inside_M1 = (row_M < B)[:, None]
    offset_MN = row_M[:, None] * N + column_N[None, :]
    request(ahead_ptr + tl.full((), layer, tl.int64) * STRIDE, AHEAD_LINES, STRIDE)
    old_MN = tl.load(old_ptr + offset_MN, mask=inside_M1, other=0.0).to(tl.float32)
    bias_N = tl.load(bias_ptr + layer * N + column_N).to(tl.float32)
    w_ptr += tl.full((), layer, tl.int64) * N * K + column_N[:, None] * K
    w_ptr += tl.arange(0, BK)[None, :]
    x_ptr += row_M[:, None] * K + tl.arange(0, BK)[None, :]
    y_MN = tl.zeros((M, BN), tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        x_MK = tl.load(x_ptr + k, mask=inside_M1, other=0.0)
        y_MN = tl.dot(x_MK, tl.trans(tl.load(w_ptr + k)), y_MN, input_precision="ieee")
    y_MN = (old_MN + y_MN.to(RESIDUAL).to(tl.float32) + bias_N[None, :]).to(RESIDUAL)
    tl.store(y_ptr + offset_MN, y_MN, mask=inside_M1)
    y_MN = y_MN.to(tl.float32)
    sums_ptr += tl.program_id(0) * B + row_M
    tl.store(sums_ptr, tl.sum(y_MN, 1), mask=row_M < B)
    tl.store(sums_ptr + N // BN * B, tl.sum(y_MN * y_MN, 1), mask=row_M < B)


@triton.jit
def decode_norm_gelu_kernel(
    x_ptr,
    sums_ptr,
    scale_ptr,
    norm_bias_ptr,
    w_ptr,
    bias_ptr,
    layer,
    y_ptr,
    B: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    TP: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    EPS: tl.constexpr,
):
    """Columns of gelu(LayerNorm(x) Wᵀ + b) (B, N), with the sums of x (2, T, B); TP ≥ T is a power
    of two. Grid (N / BN,)."""
    DTYPE: tl.constexpr = w_ptr.dtype.element_ty
    row_M, tile_T = tl.arange(0, M), tl.arange(0, TP)
    column_N = tl.program_id(0) * BN + tl.arange(0, BN)
    inside_M1, inside_N = (row_M < B)[:, None], column_N < N
    sums_ptr += tile_T[:, None] * B + row_M[None, :]
    inside_TM = (tile_T < T)[:, None] & (row_M < B)[None, :]
    sum_M = tl.sum(tl.load(sums_ptr, mask=inside_TM, other=0.0), 0)
    square_M = tl.sum(tl.load(sums_ptr + T * B, mask=inside_TM, other=0.0), 0)
    mean_M = sum_M / K
    rstd_M = tl.rsqrt(tl.maximum(square_M / K - mean_M * mean_M, 0.0) + EPS)
    mean_M1, rstd_M1 = mean_M[:, None], rstd_M[:, None]
    channel_K = tl.arange(0, BK)
    w_ptr += tl.full((), layer, tl.int64) * N * K + column_N[:, None] * K + channel_K[None, :]
    x_ptr += row_M[:, None] * K + channel_K[None, :]
    scale_ptr += layer * K + channel_K
    norm_bias_ptr += layer * K + channel_K
    y_MN = tl.zeros((M, BN), tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        x_MK = tl.load(x_ptr + k, mask=inside_M1, other=0.0).to(tl.float32)
        scale_K, norm_bias_K = tl.load(scale_ptr + k), tl.load(norm_bias_ptr + k)
        w_NK = tl.load(w_ptr + k, mask=inside_N[:, None], other=0.0)
        x_MK = (x_MK - mean_M1) * rstd_M1 * scale_K.to(tl.float32)[None, :]
        x_MK += norm_bias_K.to(tl.float32)[None, :]
        y_MN = tl.dot(x_MK.to(DTYPE), tl.trans(w_NK), y_MN, input_precision="ieee")
    bias_N = tl.load(bias_ptr + layer * N + column_N, mask=inside_N, other=0.0)
    y_MN = gelu(y_MN + bias_N.to(tl.float32)[None, :])
    offset_MN = row_M[:, None] * N + column_N[None, :]
    tl.store(y_ptr + offset_MN, y_MN, mask=inside_M1 & inside_N[None, :])
