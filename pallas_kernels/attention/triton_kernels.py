"""Triton kernels of flash attention: forward, dK and dV, dQ.

triton.py launches the kernels; its docstring defines the names of the axes.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from pallas_kernels.attention.triton_rows import load_each, load_rows, store_rows
from pallas_kernels.attention.triton_tf32 import (
    evens_first,
    load_transposed,
    operand,
    rounded,
    transposed_offset,
)
from pallas_kernels.row_softmax.triton import LOG2E, LOWEST

# Rounded to TF32, finite fp32 numbers from this one on are ∞.
TOO_LARGE = tl.constexpr(2.0**127 * (2 - 2.0**-11))


class Mask(NamedTuple):
    """Static description of the keys that queries see.

    Attributes:
        T, S: number of queries and keys.
        CAUSAL: query t sees keys 0…t. WINDOW: number of keys that a causal query sees at most.
        BOUNDS: contents of `first` and `last`: "documents", the bounds of `Documents`; "ranges",
            the first and the last key of each query (`Ranges`), without CAUSAL and WINDOW; or None.
        EMPTY: all scores of a query may be −∞. The query's output is 0, and L is −∞.
    """

    T: int
    S: int
    CAUSAL: bool
    WINDOW: int
    BOUNDS: str | None
    EMPTY: bool


class Score(NamedTuple):
    """Static description of scores with a soft cap or a bias.

    Attributes:
        SOFTCAP: the c of c·tanh(scale·QKᵀ/c), or None.
        BIAS: "scores": a bias of each score; "slopes": ALiBi's slope of each head; or None.
        BIAS_B, BIAS_H: offsets between the biases of two batch elements and of two heads.
        START: position of query 0.
    """

    SOFTCAP: float | None
    BIAS: str | None
    BIAS_B: int
    BIAS_H: int
    START: int


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
def visible(t, s, other, first, last, MASK: tl.constexpr):
    """Return whether query t sees key s; t and s are M·1 and 1·N, or 1·M and N·1.

    other is the index that the bounds first and last limit.
    """
    # Only causal queries from T on see keys from T on, and the results of these queries are unused.
    seen = s <= t if MASK.CAUSAL else (s < MASK.S) & (t < MASK.T)
    if MASK.WINDOW < MASK.T:
        seen = seen & (t - s < MASK.WINDOW)
    if MASK.BOUNDS is not None:
        seen = seen & (first <= other) & (other <= last)
    return seen


@triton.jit
def load_bounds(first_ptr, last_ptr, start, R: tl.constexpr, LENGTH: tl.constexpr,
                MASK: tl.constexpr):  # fmt: skip
    """Load the bounds of R rows. Ranges of rows from LENGTH on are those of the last row."""
    if MASK.BOUNDS == "ranges":
        rows_R = tl.minimum(start + tl.arange(0, R), LENGTH - 1)
        return tl.load(first_ptr + rows_R), tl.load(last_ptr + rows_R)
    elif MASK.BOUNDS is not None:
        return (
            load_each(first_ptr, start, LENGTH, R, LENGTH % R != 0),
            load_each(last_ptr, start, LENGTH, R, LENGTH % R != 0),
        )
    else:
        return tl.arange(0, R), tl.arange(0, R)


@triton.jit
def keys_of(
    t0, first_ptr, last_ptr, first_M, last_M, MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    """Return the bounds of the blocks of keys that queries t0 … t0 + M−1 see, and the bounds of the
    blocks that need no mask.
    """
    T: tl.constexpr = MASK.T
    start, end, full_start, full_end = 0, MASK.S, 0, MASK.S // N * N
    if MASK.BOUNDS == "ranges":
        start = tl.min(first_M, 0) // N * N
        end = tl.max(last_M, 0) + 1
        full_start = tl.max(first_M, 0)
        full_end = (tl.min(last_M, 0) + 1) // N * N
    if MASK.BOUNDS == "documents":
        start = tl.load(first_ptr + t0) // N * N
        full_start = tl.load(first_ptr + tl.minimum(t0 + M, T) - 1)
    if MASK.BOUNDS == "documents" and not MASK.CAUSAL:
        end = tl.load(last_ptr + tl.minimum(t0 + M, T) - 1) + 1
        full_end = (tl.load(last_ptr + t0) + 1) // N * N
    if MASK.CAUSAL:
        end = tl.minimum(t0 + M, T)
        full_end = (t0 + 1) // N * N
    if MASK.WINDOW < T:
        start = tl.maximum(t0 - MASK.WINDOW + 1, 0) // N * N
        full_start = tl.maximum(t0 + M - MASK.WINDOW, 0)
    return start, end, full_start, full_end


@triton.jit
def queries_of(s0, first_ptr, last_ptr, MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return the bounds of the blocks of queries that see keys s0 … s0 + N−1, and the bounds of the
    blocks that need no mask.

    Queries from T on need no mask: these queries are zeros and contribute zeros. Nor do keys from S
    on: their gradients are not stored.
    """
    T: tl.constexpr = MASK.T
    start, end, full_start, full_end = 0, T, 0, T
    if MASK.BOUNDS == "documents":
        end = tl.load(last_ptr + tl.minimum(s0 + N, T) - 1) + 1
        full_end = (tl.load(last_ptr + s0) + 1) // M * M
    if MASK.BOUNDS == "documents" and not MASK.CAUSAL:
        start = tl.load(first_ptr + s0) // M * M
        full_start = tl.load(first_ptr + tl.minimum(s0 + N, T) - 1)
    if MASK.CAUSAL:
        start = s0 // M * M
        full_start = s0 + N - 1
    if MASK.WINDOW < T:
        end = tl.minimum(s0 + N - 1 + MASK.WINDOW, T)
        full_end = (s0 + MASK.WINDOW) // M * M
    return start, end, full_start, full_end


@triton.jit
def tanh(x):
    """Compute tanh with a small relative error also near 0, where the exponential would cancel."""
    square = x * x
    near_0 = (0.0157394409 * square - 0.0523039624) * square + 0.133152977
    near_0 = (near_0 * square - 0.333327681) * square * x + x
    return tl.where(tl.abs(x) < 0.55, near_0, 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E))))


@triton.jit
def capped(s, SCALE: tl.constexpr, SCORE: tl.constexpr):
    """Return the scores without the bias."""
    if SCORE.SOFTCAP is not None:
        return tanh(s * (SCALE / SCORE.SOFTCAP)) * SCORE.SOFTCAP
    else:
        return s * SCALE


@triton.jit
def biased(s_, t, s, t0, bias_ptr, MASK: tl.constexpr, SCORE: tl.constexpr):
    """Add the bias to the scores of queries t and keys s. bias_ptr is the bias of the head.

    A bias of −∞ masks any score, also NaN.
    """
    if SCORE.BIAS == "scores":
        at = bias_ptr + tl.cast(t0, tl.int64) * MASK.S + ((t - t0) * MASK.S + s)
        bias = tl.load(at, mask=(t < MASK.T) & (s < MASK.S), other=0.0).to(tl.float32)
        return tl.where(bias == float("-inf"), bias, s_ + bias)
    else:
        return s_ + (s - t - SCORE.START) * tl.load(bias_ptr).to(tl.float32)


@triton.jit
def of_uncapped(ds, capped, SCORE: tl.constexpr):
    """Return the gradient of the scores before the soft cap."""
    if SCORE is None:
        return ds
    elif SCORE.SOFTCAP is None:
        return ds
    else:
        ratio = capped * (1 / SCORE.SOFTCAP)
        return ds * (1 - ratio * ratio)


# ------------------------------------------------------------------------------------------ forward


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, last_ptr, query_ids_ptr, key_ids_ptr, bias_ptr,
    out_ptr, lse_ptr,
    BATCH: tl.constexpr, T: tl.constexpr, S: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, P: tl.constexpr, PE: tl.constexpr,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    MASK: tl.constexpr, SCALE: tl.constexpr, SCORE: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    # Positive, so that the order of the scores is unchanged. A scale of 0 is replaced by a tiny
    # number: 0 · −∞ is NaN.
    UNIT: tl.constexpr = ((SCALE if SCALE > 0 else 1e-30 - SCALE) if SCORE is None else 1.0) * LOG2E
    BLOCKS: tl.constexpr = (T + M - 1) // M
    order, head = block_and_head(BLOCKS, BATCH * H, TOGETHER)
    t0 = (BLOCKS - 1 - order) * M
    b, h = (head // H).to(tl.int64), head % H
    k = h // (H // K)
    k_ptr += b * S * K_ROW + k * D + K_AT
    v_ptr += (
        transposed_offset(b * K + k, S, E, N)
        if PRECISION == "tf32"
        else b * S * V_ROW + k * E + V_AT
    )
    first_ptr += b * T
    last_ptr += b * T
    if bias_ptr is not None:
        bias_ptr += b * SCORE.BIAS_B + h.to(tl.int64) * SCORE.BIAS_H

    q_MP = rounded(
        load_rows(q_ptr + b * T * Q_ROW + h * D, t0, Q_ROW, T, D, M, P, T % M != 0), PRECISION
    )
    first_M, last_M = load_bounds(first_ptr, last_ptr, t0, M, T, MASK)
    out_MP = tl.full((M, PE), 0.0, tl.float32)
    highest_M = tl.full((M,), LOWEST, tl.float32)
    sum_M = tl.full((M,), 0.0, tl.float32)
    start, end, full_start, full_end = keys_of(t0, first_ptr, last_ptr, first_M, last_M, MASK, M, N)
    if query_ids_ptr is not None:
        ids_M = load_each(query_ids_ptr + b * T, t0, T, M, T % M != 0)
        full_start = S
    for s0 in range(start, end, N):
        k_NP = load_rows(k_ptr, s0, K_ROW, S, D, N, P, S % N != 0)
        s_MN = tl.dot(q_MP, tl.trans(k_NP), input_precision=PRECISION)
        if SCORE is not None:
            t_M1, s_1N = t0 + tl.arange(0, M)[:, None], s0 + tl.arange(0, N)[None, :]
            s_MN = capped(s_MN, SCALE, SCORE)
            if bias_ptr is not None:
                s_MN = biased(s_MN, t_M1, s_1N, t0, bias_ptr, MASK, SCORE)
        elif SCALE < 0:
            s_MN = -s_MN
        if (s0 < full_start) | (s0 >= full_end):
            t_M1, s_1N = t0 + tl.arange(0, M)[:, None], s0 + tl.arange(0, N)[None, :]
            seen_MN = visible(t_M1, s_1N, s_1N, first_M[:, None], last_M[:, None], MASK)
            if query_ids_ptr is not None:
                ids_N = load_each(key_ids_ptr + b * S, s0, S, N, S % N != 0)
                seen_MN = seen_MN & (ids_M[:, None] == ids_N[None, :])
            s_MN = tl.where(seen_MN, s_MN, float("-inf"))
        higher_M = tl.maximum(highest_M, tl.max(s_MN, 1) * UNIT)
        p_MN = tl.exp2(s_MN * UNIT - higher_M[:, None])
        shrink_M = tl.exp2(highest_M - higher_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
        if PRECISION == "tf32":
            v_NP = load_transposed(v_ptr, s0, S, E, N, PE)
            p_MN = evens_first(operand(p_MN, v_NP.dtype, PRECISION), PRECISION, M, N)
            # O is added outside the matmul PV. With O as the accumulator of PV, ptxas does not load
            # q, the left operand of the next matmul, into registers while PV runs. ptxas then waits
            # after every instruction of both matmuls.
            pv_MP = tl.dot(p_MN, v_NP, input_precision=PRECISION)
            out_MP = tl.fma(out_MP, tl.broadcast_to(shrink_M[:, None], (M, PE)), pv_MP)
        else:
            v_NP = load_rows(v_ptr, s0, V_ROW, S, E, N, PE, S % N != 0)
            if PRECISION == "tf32x3" and MASK.EMPTY:
                # A masked value stays finite: 0 · ∞ is NaN.
                v_NP = tl.where(tl.abs(v_NP) < TOO_LARGE, v_NP, v_NP * (1 - 2.0**-11))
            out_MP = tl.dot(
                p_MN.to(v_NP.dtype), v_NP, out_MP * shrink_M[:, None], input_precision=PRECISION
            )
        highest_M = higher_M

    inverse_M = 1.0 / sum_M
    if MASK.EMPTY:
        inverse_M = tl.where(sum_M == 0, 0.0, inverse_M)
    out_MP *= inverse_M[:, None]
    store_rows(out_ptr + b * T * H * E + h * E, out_MP, t0, H * E, T, E, M, PE)
    rows_M = t0 + tl.arange(0, M)
    lse_M = (highest_M + tl.log2(sum_M)) / LOG2E
    tl.store(lse_ptr + head.to(tl.int64) * T + rows_M, lse_M, mask=rows_M < T)


# ----------------------------------------------------------------------------------------- backward


@triton.jit
def dkv_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, last_ptr, query_ids_ptr, key_ids_ptr, bias_ptr, dout_ptr,
    lse_ptr, delta_ptr, q_transposed_ptr, dout_transposed_ptr, blocks_ptr, dk_ptr, dv_ptr,
    BATCH: tl.constexpr, T: tl.constexpr, S: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, P: tl.constexpr, PE: tl.constexpr,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    MASK: tl.constexpr, SCALE: tl.constexpr, SCORE: tl.constexpr, PRECISION: tl.constexpr,
    PACKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of a block of keys. PACKED: dk is all of dqkv.

    blocks_ptr: with ranges, the bounds of `queries_of` for each block of keys (`query_blocks`).
    The rows of the scores are keys, so Pᵀ and dSᵀ are left operands without a layout conversion.
    """
    BLOCKS: tl.constexpr = (S + N - 1) // N
    order, head = block_and_head(BLOCKS, BATCH * K, TOGETHER)
    s0 = order * N
    b, k = (head // K).to(tl.int64), head % K
    k_at = b * S * K_ROW + k * D
    v_at = b * S * V_ROW + k * E
    first_ptr += b * T
    last_ptr += b * T

    k_NP = load_rows(k_ptr + k_at + K_AT, s0, K_ROW, S, D, N, P, S % N != 0)
    v_NP = load_rows(v_ptr + v_at + V_AT, s0, V_ROW, S, E, N, PE, S % N != 0)
    if MASK.BOUNDS != "ranges":
        first_N, last_N = load_bounds(first_ptr, last_ptr, s0, N, S, MASK)
    dk_NP = tl.full((N, P), 0.0, tl.float32)
    dv_NP = tl.full((N, PE), 0.0, tl.float32)
    if MASK.BOUNDS == "ranges":
        block_ptr = blocks_ptr + (b * BLOCKS + order) * 4
        start, end = tl.load(block_ptr), tl.load(block_ptr + 1)
        full_start, full_end = tl.load(block_ptr + 2), tl.load(block_ptr + 3)
    else:
        start, end, full_start, full_end = queries_of(s0, first_ptr, last_ptr, MASK, M, N)
    if query_ids_ptr is not None:
        ids_N = load_each(key_ids_ptr + b * S, s0, S, N, S % N != 0)
        full_start = T
    for i in range(H // K):
        h = k * (H // K) + i
        q_head_ptr = q_ptr + b * T * Q_ROW + h * D
        dout_head_ptr = dout_ptr + b * T * H * E + h * E
        numbers = (b * H + h) * T
        for t0 in range(start, end, M):
            lse_M = load_each(lse_ptr + numbers, t0, T, M, T % M != 0) * LOG2E
            if MASK.EMPTY:
                lse_M = tl.where(lse_M == float("-inf"), 0.0, lse_M)
            delta_M = load_each(delta_ptr + numbers, t0, T, M, T % M != 0)
            q_MP = load_rows(q_head_ptr, t0, Q_ROW, T, D, M, P, T % M != 0)
            dout_MP = load_rows(dout_head_ptr, t0, H * E, T, E, M, PE, T % M != 0)
            # Both matmuls are issued before the exponentials of the first: the exponentials are
            # computed while the second matmul runs.
            s_NM = tl.dot(k_NP, tl.trans(q_MP), input_precision=PRECISION)
            dp_NM = tl.dot(v_NP, tl.trans(dout_MP), input_precision=PRECISION)
            if SCORE is None:
                p_NM = tl.exp2(s_NM * (SCALE * LOG2E) - lse_M[None, :])
            else:
                t_1M, s_N1 = t0 + tl.arange(0, M)[None, :], s0 + tl.arange(0, N)[:, None]
                s_NM = capped(s_NM, SCALE, SCORE)
                p_NM = s_NM
                if bias_ptr is not None:
                    head_bias_ptr = bias_ptr + (b * SCORE.BIAS_B + h.to(tl.int64) * SCORE.BIAS_H)
                    p_NM = biased(s_NM, t_1M, s_N1, t0, head_bias_ptr, MASK, SCORE)
                p_NM = tl.exp2(p_NM * LOG2E - lse_M[None, :])
            if (t0 < full_start) | (t0 >= full_end):
                t_1M, s_N1 = t0 + tl.arange(0, M)[None, :], s0 + tl.arange(0, N)[:, None]
                if MASK.BOUNDS == "ranges":
                    first_M, last_M = load_bounds(first_ptr, last_ptr, t0, M, T, MASK)
                    seen_NM = visible(t_1M, s_N1, s_N1, first_M[None, :], last_M[None, :], MASK)
                else:
                    seen_NM = visible(t_1M, s_N1, t_1M, first_N[:, None], last_N[:, None], MASK)
                if query_ids_ptr is not None:
                    ids_M = load_each(query_ids_ptr + b * T, t0, T, M, T % M != 0)
                    seen_NM = seen_NM & (ids_M[None, :] == ids_N[:, None])
                p_NM = tl.where(seen_NM, p_NM, 0.0)
            if PRECISION == "tf32":
                q_MP = load_transposed(
                    q_transposed_ptr + transposed_offset(b * H + h, T, D, M), t0, T, D, M, P
                )
                dout_MP = load_transposed(
                    dout_transposed_ptr + transposed_offset(b * H + h, T, E, M), t0, T, E, M, PE
                )
            p_left_NM = evens_first(operand(p_NM, dout_MP.dtype, PRECISION), PRECISION, N, M)
            dv_NP = tl.dot(p_left_NM, dout_MP, dv_NP, input_precision=PRECISION)
            ds_NM = of_uncapped(p_NM * (dp_NM - delta_M[None, :]), s_NM, SCORE)
            ds_NM = operand(ds_NM, q_MP.dtype, PRECISION)
            dk_NP = tl.dot(
                evens_first(ds_NM, PRECISION, N, M), q_MP, dk_NP, input_precision=PRECISION
            )
    DK_ROW: tl.constexpr = 3 * H * D if PACKED else K * D
    DV_ROW: tl.constexpr = 3 * H * D if PACKED else K * E
    if PACKED:
        dk_ptr += H * D
        dv_ptr = dk_ptr + H * D
    store_rows(dk_ptr + (b * S * DK_ROW + k * D), dk_NP * SCALE, s0, DK_ROW, S, D, N, P)
    store_rows(dv_ptr + (b * S * DV_ROW + k * E), dv_NP, s0, DV_ROW, S, E, N, PE)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, last_ptr, query_ids_ptr, key_ids_ptr, bias_ptr, dout_ptr,
    lse_ptr, delta_ptr, k_transposed_ptr, dbias_ptr, dq_ptr,
    BATCH: tl.constexpr, T: tl.constexpr, S: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, P: tl.constexpr, PE: tl.constexpr,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    MASK: tl.constexpr, SCALE: tl.constexpr, SCORE: tl.constexpr, PRECISION: tl.constexpr,
    PACKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Compute dQ of a block of queries. PACKED: dq is all of dqkv.

    Also compute the gradient of the bias, if dbias_ptr is not None: of each score in zeroed memory,
    or the gradient of the slope from each query.
    """
    BLOCKS: tl.constexpr = (T + M - 1) // M
    order, head = block_and_head(BLOCKS, BATCH * H, TOGETHER)
    t0 = (BLOCKS - 1 - order) * M
    b, h = (head // H).to(tl.int64), head % H
    k = h // (H // K)
    k_ptr += b * S * K_ROW + k * D + K_AT
    v_ptr += b * S * V_ROW + k * E + V_AT
    first_ptr += b * T
    last_ptr += b * T
    if bias_ptr is not None:
        bias_ptr += b * SCORE.BIAS_B + h.to(tl.int64) * SCORE.BIAS_H
    numbers = head.to(tl.int64) * T

    q_MP = load_rows(q_ptr + b * T * Q_ROW + h * D, t0, Q_ROW, T, D, M, P, T % M != 0)
    dout_MP = load_rows(dout_ptr + b * T * H * E + h * E, t0, H * E, T, E, M, PE, T % M != 0)
    lse_M = load_each(lse_ptr + numbers, t0, T, M, T % M != 0) * LOG2E
    if MASK.EMPTY:
        lse_M = tl.where(lse_M == float("-inf"), 0.0, lse_M)
    delta_M = load_each(delta_ptr + numbers, t0, T, M, T % M != 0)
    first_M, last_M = load_bounds(first_ptr, last_ptr, t0, M, T, MASK)
    dq_MP = tl.full((M, P), 0.0, tl.float32)
    dslope_M = tl.full((M,), 0.0, tl.float32)
    start, end, full_start, full_end = keys_of(t0, first_ptr, last_ptr, first_M, last_M, MASK, M, N)
    if query_ids_ptr is not None:
        ids_M = load_each(query_ids_ptr + b * T, t0, T, M, T % M != 0)
        full_start = S
    for s0 in range(start, end, N):
        k_NP = load_rows(k_ptr, s0, K_ROW, S, D, N, P, S % N != 0)
        v_NP = load_rows(v_ptr, s0, V_ROW, S, E, N, PE, S % N != 0)
        s_MN = tl.dot(q_MP, tl.trans(k_NP), input_precision=PRECISION)
        dp_MN = tl.dot(dout_MP, tl.trans(v_NP), input_precision=PRECISION)
        if SCORE is None:
            p_MN = tl.exp2(s_MN * (SCALE * LOG2E) - lse_M[:, None])
        else:
            t_M1, s_1N = t0 + tl.arange(0, M)[:, None], s0 + tl.arange(0, N)[None, :]
            s_MN = capped(s_MN, SCALE, SCORE)
            p_MN = s_MN
            if bias_ptr is not None:
                p_MN = biased(s_MN, t_M1, s_1N, t0, bias_ptr, MASK, SCORE)
            p_MN = tl.exp2(p_MN * LOG2E - lse_M[:, None])
        if (s0 < full_start) | (s0 >= full_end):
            t_M1, s_1N = t0 + tl.arange(0, M)[:, None], s0 + tl.arange(0, N)[None, :]
            seen_MN = visible(t_M1, s_1N, s_1N, first_M[:, None], last_M[:, None], MASK)
            if query_ids_ptr is not None:
                ids_N = load_each(key_ids_ptr + b * S, s0, S, N, S % N != 0)
                seen_MN = seen_MN & (ids_M[:, None] == ids_N[None, :])
            p_MN = tl.where(seen_MN, p_MN, 0.0)
        ds_MN = p_MN * (dp_MN - delta_M[:, None])
        if dbias_ptr is not None:
            if SCORE.BIAS == "scores":
                tl.store(
                    dbias_ptr + (numbers + t0) * S + ((t_M1 - t0) * S + s_1N),
                    ds_MN.to(dbias_ptr.dtype.element_ty),
                    mask=(t_M1 < T) & (s_1N < S),
                )
            else:
                dslope_M += tl.sum(ds_MN * (s_1N - t_M1 - SCORE.START), 1)
        ds_MN = operand(of_uncapped(ds_MN, s_MN, SCORE), k_NP.dtype, PRECISION)
        if PRECISION == "tf32":
            k_NP = load_transposed(
                k_transposed_ptr + transposed_offset(b * K + k, S, D, N), s0, S, D, N, P
            )
        dq_MP = tl.dot(evens_first(ds_MN, PRECISION, M, N), k_NP, dq_MP, input_precision=PRECISION)
    if dbias_ptr is not None:
        if SCORE.BIAS == "slopes":
            rows_M = t0 + tl.arange(0, M)
            tl.store(dbias_ptr + numbers + rows_M, dslope_M, mask=rows_M < T)
    ROW: tl.constexpr = (3 if PACKED else 1) * H * D
    store_rows(dq_ptr + b * T * ROW + h * D, dq_MP * SCALE, t0, ROW, T, D, M, P)
