"""Triton kernels of `decode_step` for several sequences, with matmuls on tensor cores.

Launches of a block:

1. Residual sum over the parts of the last matmul, LayerNorm (first block: embedding, LayerNorm).
2. QKV projection.
3. Attention of one head of one sequence; stores k and v in the cache.
4. Output projection, in parts of the sum over the channels.
5. As 1.
6. First matmul of the MLP, GELU.
7. Second matmul of the MLP, in parts.

Afterwards: final LayerNorm and the logits.

Shapes: B sequences, M ≥ B rows of a tile, L blocks, C channels, CP ≥ C a power of two, H heads,
D = C/H, N columns and K rows of a matmul, P parts of its sum, V vocabulary, S cache positions.
"""

import triton
import triton.language as tl

from pallas_kernels.decode.triton_functions import (
    address,
    embedding,
    gelu,
    load_keys,
    mean_and_rstd,
    online_softmax,
    prefetch,
)
from pallas_kernels.row_softmax.triton import LOG2E, LOWEST


@triton.jit
def request_keys(
    k_ptr, v_ptr, layer, position, B: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Prefetch the first KEYS keys and values of this program's sequence to the L2 cache.

    Each of Hopper's bulk prefetches covers a key of all heads. The program does not wait.
    """
    if KEYS > 0:
        BYTES: tl.constexpr = C * k_ptr.dtype.element_ty.primitive_bitwidth // 8
        key_S = tl.arange(0, triton.next_power_of_2(KEYS))
        offset_S = ((tl.full((), layer, tl.int64) * B + tl.program_id(0)) * S + key_S) * C
        wanted_S = key_S < tl.minimum(position, KEYS)
        for ptr in tl.static_range(2):
            tl.inline_asm_elementwise(
                """{
                .reg .pred %active;
                setp.ne.u64 %active, $1, 0;
                @%active cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.u32 $0, 0;
                }""",
                "=&r,l,r",
                [address((k_ptr if ptr == 0 else v_ptr) + offset_S, wanted_S), BYTES],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def norm_row(
    x_C, scale_C, bias_C, x_ptr, y_ptr, C: tl.constexpr, CP: tl.constexpr, EPS: tl.constexpr
):
    """Store a row of the residual stream and its LayerNorm."""
    channel_C = tl.arange(0, CP)
    inside_C = channel_C < C
    offset_C = tl.program_id(0) * C + channel_C
    x_C = x_C.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + offset_C, x_C, mask=inside_C)
    x_C = x_C.to(tl.float32)
    inside_x_C = tl.where(inside_C, x_C, 0.0)
    mean, rstd = mean_and_rstd(inside_x_C, inside_x_C * inside_x_C, EPS, C)
    tl.store(
        y_ptr + offset_C,
        (x_C - mean) * rstd * scale_C.to(tl.float32) + bias_C.to(tl.float32),
        mask=inside_C,
    )


@triton.jit
def decode_embed_kernel(
    token_ptr, length_ptr, wte_ptr, wpe_ptr, scale_ptr, bias_ptr, k_ptr, v_ptr, x_ptr, y_ptr,
    V: tl.constexpr, B: tl.constexpr, S: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    EPS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Embedding of a row's token, and LayerNorm. Grid (B,)."""
    channel_C = tl.arange(0, CP)
    position = tl.minimum(tl.load(length_ptr + tl.program_id(0)), S - 1)
    inside_C = channel_C < C
    x_C = embedding(
        token_ptr + tl.program_id(0), position, wte_ptr, wpe_ptr, channel_C, inside_C, V, C
    )  # fmt: skip
    scale_C = tl.load(scale_ptr + channel_C, mask=inside_C, other=0.0)
    bias_C = tl.load(bias_ptr + channel_C, mask=inside_C, other=0.0)
    request_keys(k_ptr, v_ptr, 0, position, B, S, C, KEYS)
    norm_row(x_C, scale_C, bias_C, x_ptr, y_ptr, C, CP, EPS)


@triton.jit
def decode_norm_kernel(
    old_x_ptr, part_ptr, part_bias_ptr, scale_ptr, bias_ptr, next_ptr, length_ptr, k_ptr, v_ptr,
    layer, norm_layer, x_ptr, y_ptr, B: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    CP: tl.constexpr, P: tl.constexpr, EPS: tl.constexpr, STRIDE: tl.constexpr, AHEAD: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Residual sum with the parts (P, B, C) of a matmul, and LayerNorm. Grid (B,).

    Prefetch the first KEYS keys of the next block, and, by each program, AHEAD elements of the next
    matmul's weights.

    Args:
        layer: index of the block of the matmul and of the matmul's bias.
        norm_layer: index of the block of LayerNorm's parameters, and of the next matmul's weights,
            of STRIDE elements.
    """
    channel_C = tl.arange(0, CP)
    inside_C = channel_C < C
    offset_C = tl.program_id(0) * C + channel_C
    x_C = tl.load(old_x_ptr + offset_C, mask=inside_C, other=0.0)
    parts = ()
    for i in tl.static_range(P):
        parts = parts + (tl.load(part_ptr + i * B * C + offset_C, mask=inside_C, other=0.0),)
    part_bias_C = tl.load(part_bias_ptr + layer * C + channel_C, mask=inside_C, other=0.0)
    scale_C = tl.load(scale_ptr + norm_layer * C + channel_C, mask=inside_C, other=0.0)
    bias_C = tl.load(bias_ptr + norm_layer * C + channel_C, mask=inside_C, other=0.0)
    position = tl.minimum(tl.load(length_ptr + tl.program_id(0)), S - 1)
    # Prefetch after the loads: loads issued later would wait for the prefetches.
    next_ptr += tl.full((), norm_layer, tl.int64) * STRIDE
    prefetch(next_ptr, tl.program_id(0) * AHEAD, STRIDE, AHEAD)
    request_keys(k_ptr, v_ptr, layer + 1, position, B, S, C, KEYS)
    matmul_C = parts[0]
    for i in tl.static_range(1, P):
        matmul_C += parts[i]
    matmul_C = matmul_C.to(x_ptr.dtype.element_ty).to(tl.float32)
    x_C = x_C.to(tl.float32) + matmul_C + part_bias_C.to(tl.float32)
    norm_row(x_C, scale_C, bias_C, x_ptr, y_ptr, C, CP, EPS)


@triton.jit
def decode_matmul_kernel(
    x_ptr, w_ptr, bias_ptr, layer, y_ptr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    GELU: tl.constexpr,
):  # fmt: skip
    """Compute columns of x Wᵀ + b over one part of K. Grid (N / BN, P); y is (P, B, N)."""
    KP: tl.constexpr = K // P
    part = tl.program_id(1)
    row_M = tl.arange(0, M)
    column_N = tl.program_id(0) * BN + tl.arange(0, BN)
    inside_M1, inside_N = (row_M < B)[:, None], column_N < N
    first = tl.full((), layer, tl.int64) * N * K + part * KP
    w_ptr += first + column_N[:, None] * K + tl.arange(0, BK)[None, :]
    x_ptr += part * KP + row_M[:, None] * K + tl.arange(0, BK)[None, :]
    y_MN = tl.zeros((M, BN), tl.float32)
    for k in tl.range(0, KP, BK, num_stages=STAGES):
        x_MK = tl.load(x_ptr + k, mask=inside_M1, other=0.0)
        if N % BN == 0:
            w_NK = tl.load(w_ptr + k)
        else:
            w_NK = tl.load(w_ptr + k, mask=inside_N[:, None], other=0.0)
        y_MN = tl.dot(x_MK, tl.trans(w_NK), y_MN, input_precision="ieee")
    if bias_ptr is not None:
        bias_N = tl.load(bias_ptr + layer * N + column_N, mask=inside_N, other=0.0)
        y_MN += bias_N.to(tl.float32)[None, :]
    if GELU:
        y_MN = gelu(y_MN)
    offset_MN = part * B * N + row_M[:, None] * N + column_N[None, :]
    tl.store(y_ptr + offset_MN, y_MN, mask=inside_M1 & inside_N[None, :])


@triton.jit
def decode_attention_kernel(
    qkv_ptr, length_ptr, k_ptr, v_ptr, layer, y_ptr, B: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute attention of one head of one sequence, and store the new k and v in the cache.

    Grid (H, B).
    """
    C: tl.constexpr = H * D
    head, row = tl.program_id(0), tl.program_id(1)
    channel_D = tl.arange(0, D)
    position = tl.minimum(tl.load(length_ptr + row), S - 1)
    rows = (tl.full((), layer, tl.int64) * B + row) * S * C + head * D
    k_ptr += rows
    v_ptr += rows
    qkv_ptr += row * 3 * C + head * D
    key_S = tl.arange(0, KEYS)
    # q in the layout of a tile of keys: a layout conversion would delay the first copies.
    q_1D = tl.load(qkv_ptr + channel_D[None, :]).to(tl.float32) * (LOG2E / D**0.5)
    new_k_D = tl.load(qkv_ptr + C + channel_D)
    new_v_D = tl.load(qkv_ptr + 2 * C + channel_D)
    max_S = tl.full((KEYS,), LOWEST, tl.float32)
    sum_S = tl.zeros((KEYS,), tl.float32)
    y_SD = tl.zeros((KEYS, D), tl.float32)
    # Triton's pipeline copies tiles to shared memory, 3 tiles ahead.
    for start in tl.range(0, position, KEYS, num_stages=4):
        k_SD = load_keys(k_ptr, start + key_S, position, C, D)
        v_SD = load_keys(v_ptr, start + key_S, position, C, D)
        score_S = tl.sum(k_SD.to(tl.float32) * q_1D, 1)
        score_S = tl.where(start + key_S < position, score_S, float("-inf"))
        max_S, sum_S, y_SD = online_softmax(score_S, v_SD, max_S, sum_S, y_SD)
    tl.store(k_ptr + position * C + channel_D, new_k_D)
    tl.store(v_ptr + position * C + channel_D, new_v_D)
    q_D = tl.reshape(q_1D, (D,))
    new_score = tl.sum(q_D * new_k_D.to(tl.float32), 0)
    highest = tl.maximum(tl.max(max_S, 0), new_score)
    weight_S, new_weight = tl.exp2(max_S - highest), tl.exp2(new_score - highest)
    y_D = tl.sum(y_SD * weight_S[:, None], 0) + new_weight * new_v_D.to(tl.float32)
    y_D /= tl.sum(sum_S * weight_S, 0) + new_weight
    tl.store(y_ptr + row * C + head * D + channel_D, y_D)
