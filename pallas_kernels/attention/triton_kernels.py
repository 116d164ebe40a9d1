"""Triton kernels of flash attention: forward, dK and dV, dQ.

triton.py launches the kernels; its docstring defines the names of the axes.
"""

import triton
import triton.language as tl

from pallas_kernels.attention.triton_rows import LOG2E, load_each, load_rows, store_rows
from pallas_kernels.attention.triton_tf32 import (
    evens_first,
    load_transposed,
    operand,
    rounded,
    transposed_offset,
)

# Below every finite score and above −∞, so −∞ − LOWEST is −∞. A row that has not seen a key yet
# needs no guard against ∞ − ∞.
LOWEST = tl.constexpr(-3.4028234663852886e38)


# --------------------------------------------------------------------------------- parts of kernels


@triton.jit
def block_and_head(BLOCKS: tl.constexpr, HEADS: tl.constexpr, TOGETHER: tl.constexpr):
    """Return this program's block and head.

    The order is block 0 of TOGETHER heads, then block 1 of these heads, and so on.
    """
    index = tl.program_id(0)
    first = index // (BLOCKS * TOGETHER) * TOGETHER
    heads = tl.minimum(HEADS - first, TOGETHER)
    within = index - first * BLOCKS
    return within // heads, first + within % heads


@triton.jit
def visible(
    t, s, other, first, last, T: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr
):  # fmt: skip
    """Return whether query t sees key s; t and s are M·1 and 1·N, or 1·M and N·1.

    first and last are the document bounds of the rows, and other is the index of the columns.
    """
    # Only causal queries from T on see keys from T on, and the results of these queries are unused.
    seen = s <= t if CAUSAL else (s < T) & (t < T)
    if WINDOW < T:
        seen = seen & (t - s < WINDOW)
    if SEGMENTS:
        seen = seen & (first <= other) & (other <= last)
    return seen


@triton.jit
def keys_of(
    t0, first_ptr, last_ptr, T: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the bounds of the blocks of keys that queries t0 … t0 + M−1 see, and the bounds of the
    blocks that need no mask.
    """
    start, end, full_start, full_end = 0, T, 0, T // N * N
    if SEGMENTS:
        start = tl.load(first_ptr + t0) // N * N
        full_start = tl.load(first_ptr + tl.minimum(t0 + M, T) - 1)
    if SEGMENTS and not CAUSAL:
        end = tl.load(last_ptr + tl.minimum(t0 + M, T) - 1) + 1
        full_end = (tl.load(last_ptr + t0) + 1) // N * N
    if CAUSAL:
        end = tl.minimum(t0 + M, T)
        full_end = (t0 + 1) // N * N
    if WINDOW < T:
        start = tl.maximum(t0 - WINDOW + 1, 0) // N * N
        full_start = tl.maximum(t0 + M - WINDOW, 0)
    return start, end, full_start, full_end


@triton.jit
def queries_of(
    s0, first_ptr, last_ptr, T: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the bounds of the blocks of queries that see keys s0 … s0 + N−1, and the bounds of the
    blocks that need no mask.

    Queries from T on need no mask: these queries are zeros and contribute zeros. Nor do keys from T
    on: their gradients are not stored.
    """
    start, end, full_start, full_end = 0, T, 0, T
    if SEGMENTS:
        end = tl.load(last_ptr + tl.minimum(s0 + N, T) - 1) + 1
        full_end = (tl.load(last_ptr + s0) + 1) // M * M
    if SEGMENTS and not CAUSAL:
        start = tl.load(first_ptr + s0) // M * M
        full_start = tl.load(first_ptr + tl.minimum(s0 + N, T) - 1)
    if CAUSAL:
        start = s0 // M * M
        full_start = s0 + N - 1
    if WINDOW < T:
        end = tl.minimum(s0 + N - 1 + WINDOW, T)
        full_end = (s0 + WINDOW) // M * M
    return start, end, full_start, full_end


# ------------------------------------------------------------------------------------------ forward


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, last_ptr, out_ptr, lse_ptr,
    BATCH: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr,
    Q_ROW: tl.constexpr, KV_ROW: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    # Positive, so that the order of the scores is unchanged. A scale of 0 is replaced by a tiny
    # number: 0 · −∞ is NaN.
    UNIT: tl.constexpr = (SCALE if SCALE > 0 else 1e-30 - SCALE) * LOG2E
    BLOCKS: tl.constexpr = (T + M - 1) // M
    order, head = block_and_head(BLOCKS, BATCH * H, TOGETHER)
    t0 = (BLOCKS - 1 - order) * M
    b, h = (head // H).to(tl.int64), head % H
    k = h // (H // K)
    k_ptr += b * T * KV_ROW + k * D + K_AT
    v_ptr += (
        transposed_offset(b * K + k, T, D, N)
        if PRECISION == "tf32"
        else b * T * KV_ROW + k * D + V_AT
    )
    first_ptr += b * T
    last_ptr += b * T

    q_MP = rounded(
        load_rows(q_ptr + b * T * Q_ROW + h * D, t0, Q_ROW, T, D, M, P, T % M != 0), PRECISION
    )
    first_M = load_each(first_ptr, t0, T, M, T % M != 0) if SEGMENTS else tl.arange(0, M)
    last_M = load_each(last_ptr, t0, T, M, T % M != 0) if SEGMENTS else tl.arange(0, M)
    out_MP = tl.full((M, P), 0.0, tl.float32)
    highest_M = tl.full((M,), LOWEST, tl.float32)
    sum_M = tl.full((M,), 0.0, tl.float32)
    start, end, full_start, full_end = keys_of(
        t0, first_ptr, last_ptr, T, CAUSAL, WINDOW, SEGMENTS, M, N
    )
    for s0 in range(start, end, N):
        k_NP = load_rows(k_ptr, s0, KV_ROW, T, D, N, P, T % N != 0)
        s_MN = tl.dot(q_MP, tl.trans(k_NP), input_precision=PRECISION)
        if SCALE < 0:
            s_MN = -s_MN
        if (s0 < full_start) | (s0 >= full_end):
            t_M1, s_1N = t0 + tl.arange(0, M)[:, None], s0 + tl.arange(0, N)[None, :]
            seen_MN = visible(
                t_M1, s_1N, s_1N, first_M[:, None], last_M[:, None], T, CAUSAL, WINDOW, SEGMENTS
            )
            s_MN = tl.where(seen_MN, s_MN, float("-inf"))
        higher_M = tl.maximum(highest_M, tl.max(s_MN, 1) * UNIT)
        p_MN = tl.exp2(s_MN * UNIT - higher_M[:, None])
        shrink_M = tl.exp2(highest_M - higher_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
        if PRECISION == "tf32":
            v_NP = load_transposed(v_ptr, s0, T, D, N, P)
            p_MN = evens_first(operand(p_MN, v_NP.dtype, PRECISION), PRECISION, M, N)
            # O is added outside the matmul PV. With O as the accumulator of PV, ptxas does not load
            # q, the left operand of the next matmul, into registers while PV runs. ptxas then waits
            # after every instruction of both matmuls.
            pv_MP = tl.dot(p_MN, v_NP, input_precision=PRECISION)
            out_MP = tl.fma(out_MP, tl.broadcast_to(shrink_M[:, None], (M, P)), pv_MP)
        else:
            v_NP = load_rows(v_ptr, s0, KV_ROW, T, D, N, P, T % N != 0)
            out_MP = tl.dot(
                p_MN.to(v_NP.dtype), v_NP, out_MP * shrink_M[:, None], input_precision=PRECISION
            )
        highest_M = higher_M

    out_MP *= (1.0 / sum_M)[:, None]
    store_rows(out_ptr + b * T * H * D + h * D, out_MP, t0, H * D, T, D, M, P)
    rows_M = t0 + tl.arange(0, M)
    lse_M = (highest_M + tl.log2(sum_M)) / LOG2E
    tl.store(lse_ptr + head.to(tl.int64) * T + rows_M, lse_M, mask=rows_M < T)


# ----------------------------------------------------------------------------------------- backward


@triton.jit
def dkv_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, last_ptr, dout_ptr, lse_ptr, delta_ptr, q_transposed_ptr,
    dout_transposed_ptr, dk_ptr, dv_ptr,
    BATCH: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr,
    Q_ROW: tl.constexpr, KV_ROW: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of a block of keys. PACKED: dk is all of dqkv.

    The rows of the scores are keys, so Pᵀ and dSᵀ are left operands without a layout conversion.
    """
    order, head = block_and_head((T + N - 1) // N, BATCH * K, TOGETHER)
    s0 = order * N
    b, k = (head // K).to(tl.int64), head % K
    kv_at = b * T * KV_ROW + k * D
    first_ptr += b * T
    last_ptr += b * T

    k_NP = load_rows(k_ptr + kv_at + K_AT, s0, KV_ROW, T, D, N, P, T % N != 0)
    v_NP = load_rows(v_ptr + kv_at + V_AT, s0, KV_ROW, T, D, N, P, T % N != 0)
    first_N = load_each(first_ptr, s0, T, N, T % N != 0) if SEGMENTS else tl.arange(0, N)
    last_N = load_each(last_ptr, s0, T, N, T % N != 0) if SEGMENTS else tl.arange(0, N)
    dk_NP = tl.full((N, P), 0.0, tl.float32)
    dv_NP = tl.full((N, P), 0.0, tl.float32)
    start, end, full_start, full_end = queries_of(
        s0, first_ptr, last_ptr, T, CAUSAL, WINDOW, SEGMENTS, M, N
    )
    for i in range(H // K):
        h = k * (H // K) + i
        q_head_ptr = q_ptr + b * T * Q_ROW + h * D
        dout_head_ptr = dout_ptr + b * T * H * D + h * D
        numbers = (b * H + h) * T
        for t0 in range(start, end, M):
            lse_M = load_each(lse_ptr + numbers, t0, T, M, T % M != 0) * LOG2E
            delta_M = load_each(delta_ptr + numbers, t0, T, M, T % M != 0)
            q_MP = load_rows(q_head_ptr, t0, Q_ROW, T, D, M, P, T % M != 0)
            dout_MP = load_rows(dout_head_ptr, t0, H * D, T, D, M, P, T % M != 0)
            # Both matmuls are issued before the exponentials of the first: the exponentials are
            # computed while the second matmul runs.
            s_NM = tl.dot(k_NP, tl.trans(q_MP), input_precision=PRECISION)
            dp_NM = tl.dot(v_NP, tl.trans(dout_MP), input_precision=PRECISION)
            p_NM = tl.exp2(s_NM * (SCALE * LOG2E) - lse_M[None, :])
            if (t0 < full_start) | (t0 >= full_end):
                t_1M, s_N1 = t0 + tl.arange(0, M)[None, :], s0 + tl.arange(0, N)[:, None]
                seen_NM = visible(
                    t_1M,
                    s_N1,
                    t_1M,
                    first_N[:, None],
                    last_N[:, None],
                    T,
                    CAUSAL,
                    WINDOW,
                    SEGMENTS,
                )
                p_NM = tl.where(seen_NM, p_NM, 0.0)
            if PRECISION == "tf32":
                q_MP = load_transposed(
                    q_transposed_ptr + transposed_offset(b * H + h, T, D, M), t0, T, D, M, P
                )
                dout_MP = load_transposed(
                    dout_transposed_ptr + transposed_offset(b * H + h, T, D, M), t0, T, D, M, P
                )
            p_left_NM = evens_first(operand(p_NM, dout_MP.dtype, PRECISION), PRECISION, N, M)
            dv_NP = tl.dot(p_left_NM, dout_MP, dv_NP, input_precision=PRECISION)
            ds_NM = operand(p_NM * (dp_NM - delta_M[None, :]), q_MP.dtype, PRECISION)
            dk_NP = tl.dot(
                evens_first(ds_NM, PRECISION, N, M), q_MP, dk_NP, input_precision=PRECISION
            )
    ROW: tl.constexpr = 3 * H * D if PACKED else K * D
    out_at = b * T * ROW + k * D
    if PACKED:
        dk_ptr += H * D
        dv_ptr = dk_ptr + H * D
    store_rows(dk_ptr + out_at, dk_NP * SCALE, s0, ROW, T, D, N, P)
    store_rows(dv_ptr + out_at, dv_NP, s0, ROW, T, D, N, P)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, last_ptr, dout_ptr, lse_ptr, delta_ptr, k_transposed_ptr,
    dq_ptr,
    BATCH: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr,
    Q_ROW: tl.constexpr, KV_ROW: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Compute dQ of a block of queries. PACKED: dq is all of dqkv."""
    BLOCKS: tl.constexpr = (T + M - 1) // M
    order, head = block_and_head(BLOCKS, BATCH * H, TOGETHER)
    t0 = (BLOCKS - 1 - order) * M
    b, h = (head // H).to(tl.int64), head % H
    k = h // (H // K)
    k_ptr += b * T * KV_ROW + k * D + K_AT
    v_ptr += b * T * KV_ROW + k * D + V_AT
    first_ptr += b * T
    last_ptr += b * T
    numbers = head.to(tl.int64) * T

    q_MP = load_rows(q_ptr + b * T * Q_ROW + h * D, t0, Q_ROW, T, D, M, P, T % M != 0)
    dout_MP = load_rows(dout_ptr + b * T * H * D + h * D, t0, H * D, T, D, M, P, T % M != 0)
    lse_M = load_each(lse_ptr + numbers, t0, T, M, T % M != 0) * LOG2E
    delta_M = load_each(delta_ptr + numbers, t0, T, M, T % M != 0)
    first_M = load_each(first_ptr, t0, T, M, T % M != 0) if SEGMENTS else tl.arange(0, M)
    last_M = load_each(last_ptr, t0, T, M, T % M != 0) if SEGMENTS else tl.arange(0, M)
    dq_MP = tl.full((M, P), 0.0, tl.float32)
    start, end, full_start, full_end = keys_of(
        t0, first_ptr, last_ptr, T, CAUSAL, WINDOW, SEGMENTS, M, N
    )
    for s0 in range(start, end, N):
        k_NP = load_rows(k_ptr, s0, KV_ROW, T, D, N, P, T % N != 0)
        v_NP = load_rows(v_ptr, s0, KV_ROW, T, D, N, P, T % N != 0)
        s_MN = tl.dot(q_MP, tl.trans(k_NP), input_precision=PRECISION)
        dp_MN = tl.dot(dout_MP, tl.trans(v_NP), input_precision=PRECISION)
        p_MN = tl.exp2(s_MN * (SCALE * LOG2E) - lse_M[:, None])
        if (s0 < full_start) | (s0 >= full_end):
            t_M1, s_1N = t0 + tl.arange(0, M)[:, None], s0 + tl.arange(0, N)[None, :]
            seen_MN = visible(
                t_M1, s_1N, s_1N, first_M[:, None], last_M[:, None], T, CAUSAL, WINDOW, SEGMENTS
            )
            p_MN = tl.where(seen_MN, p_MN, 0.0)
        ds_MN = operand(p_MN * (dp_MN - delta_M[:, None]), k_NP.dtype, PRECISION)
        if PRECISION == "tf32":
            k_NP = load_transposed(
                k_transposed_ptr + transposed_offset(b * K + k, T, D, N), s0, T, D, N, P
            )
        dq_MP = tl.dot(evens_first(ds_MN, PRECISION, M, N), k_NP, dq_MP, input_precision=PRECISION)
    ROW: tl.constexpr = (3 if PACKED else 1) * H * D
    store_rows(dq_ptr + b * T * ROW + h * D, dq_MP * SCALE, t0, ROW, T, D, M, P)
