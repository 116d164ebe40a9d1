"""Triton kernels of `decode_step` for several sequences without launches for the LayerNorms.

A matmul adds to the residual stream and stores, for each row, the sums of its columns and of their
squares. The matmul that follows normalises its input with them.

Shapes: B sequences, M ≥ B rows of a tile, N columns and K rows of a matmul, P parts of its sum, T
tiles of the columns of the residual stream.
"""

import triton
import triton.language as tl

from pallas_kernels.decode.triton_functions import gelu
from pallas_kernels.decode.triton_many import request, request_keys


@triton.jit
def decode_add_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    old_ptr,
    ahead_ptr,
    length_ptr,
    k_ptr,
    v_ptr,
    layer,
    ahead_layer,
    key_layer,
    ticket_ptr,
    y_ptr,
    sums_ptr,
    part_ptr,
    B: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    AHEAD_LINES: tl.constexpr,
    KEYS_FROM: tl.constexpr,
    KEYS_AHEAD: tl.constexpr,
):
    """Columns of y = old + x Wᵀ + b (B, N), and each row's sums of them and of their squares,
    (2, T, B). Grid (T, P); N is a multiple of BN.

    The last program of a tile to end adds its P parts, in part (P, B, N). Tickets (T,) count the
    programs that have ended, of all launches.

    Args:
        ahead_layer: block of the weights to request for the L2 cache.
        key_layer: block of the keys KEYS_FROM…KEYS_AHEAD − 1 to request for it.
    """
    KP: tl.constexpr = K // P
    part = tl.program_id(1)
    row_M = tl.arange(0, M)
    column_N = tl.program_id(0) * BN + tl.arange(0, BN)
    inside_M1 = (row_M < B)[:, None]
    offset_MN = row_M[:, None] * N + column_N[None, :]
    program = part * (N // BN) + tl.program_id(0)
    request(ahead_ptr + tl.full((), ahead_layer, tl.int64) * STRIDE, program, AHEAD_LINES, STRIDE)
    if KEYS_AHEAD > KEYS_FROM:
        for row in range(program, B, N // BN * P):
            position = tl.minimum(tl.load(length_ptr + row), S - 1)
            request_keys(
                k_ptr, v_ptr, key_layer, row, position, B, S, N, KEYS_FROM, KEYS_AHEAD
            )  # fmt: skip
    old_MN = tl.load(old_ptr + offset_MN, mask=inside_M1, other=0.0).to(tl.float32)
    bias_N = tl.load(bias_ptr + layer * N + column_N).to(tl.float32)
    w_ptr += tl.full((), layer, tl.int64) * N * K + column_N[:, None] * K + part * KP
    w_ptr += tl.arange(0, BK)[None, :]
    x_ptr += row_M[:, None] * K + part * KP + tl.arange(0, BK)[None, :]
    sums_ptr += tl.program_id(0) * B + row_M
    y_MN = tl.zeros((M, BN), tl.float32)
    for k in tl.range(0, KP, BK, num_stages=STAGES):
        x_MK = tl.load(x_ptr + k, mask=inside_M1, other=0.0)
        y_MN = tl.dot(x_MK, tl.trans(tl.load(w_ptr + k)), y_MN, input_precision="ieee")
    last = True
    if P > 1:
        tl.store(part_ptr + part * B * N + offset_MN, y_MN, mask=inside_M1)
        tl.debug_barrier()
        last = tl.atomic_add(ticket_ptr + tl.program_id(0), 1, sem="acq_rel") % P == P - 1
    if last:
        if P > 1:
            tl.debug_barrier()
            y_MN = tl.zeros((M, BN), tl.float32)
            for i in tl.static_range(P):
                y_MN += tl.load(
                    part_ptr + i * B * N + offset_MN,
                    mask=inside_M1,
                    other=0.0,
                    cache_modifier=".cg",
                )
        RESIDUAL: tl.constexpr = y_ptr.dtype.element_ty
        y_MN = (old_MN + y_MN.to(RESIDUAL).to(tl.float32) + bias_N[None, :]).to(RESIDUAL)
        tl.store(y_ptr + offset_MN, y_MN, mask=inside_M1)
        y_MN = y_MN.to(tl.float32)
        tl.store(sums_ptr, tl.sum(y_MN, 1), mask=row_M < B)
        tl.store(sums_ptr + N // BN * B, tl.sum(y_MN * y_MN, 1), mask=row_M < B)


@triton.jit
def decode_norm_matmul_kernel(
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
    GELU: tl.constexpr,
):
    """Columns of LayerNorm(x) Wᵀ + b (B, N), with the sums of x (2, T, B). Grid (N / BN,).

    TP ≥ T is a power of two.
    """
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
    y_MN += bias_N.to(tl.float32)[None, :]
    if GELU:
        y_MN = gelu(y_MN)
    offset_MN = row_M[:, None] * N + column_N[None, :]
    tl.store(y_ptr + offset_MN, y_MN, mask=inside_M1 & inside_N[None, :])
