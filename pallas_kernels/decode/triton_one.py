"""Triton kernel of `decode_step` for one sequence.

Phases of a block:

1. LayerNorm, QKV projection.
2. Attention, with a program for each head, which also stores the new k and v in the cache. The
   other programs skip this phase.
3. Output projection, residual sum.
4. LayerNorm, first matmul of the MLP, GELU.
5. Second matmul of the MLP, residual sum.

A program computes a strip of neighbouring columns in phases 1, 3, 4 and 5. Each program repeats the
norms. Afterwards: final LayerNorm and the logits.

Shapes: L blocks, C channels, H heads, D = C/H, F = 4·C, V vocabulary, S cache positions, R rows of
a tile of weights.
"""

import triton
import triton.language as tl

from pallas_kernels.decode.triton_functions import (
    ABSENT,
    MOST_PROGRAMS,
    attend,
    embedding,
    gelu,
    layer_norm,
    load_biases,
    load_tiles,
    load_vector,
    matvec,
    opaque,
    prefetch,
    prefetch_strip,
    receive,
    rounded,
    send,
)


@triton.jit
def store_likeliest(ptr, best, best_row, result_ptr, V: tl.constexpr, PROGRAMS: tl.constexpr):
    """Send this program's highest logit and the logit's row. Program 0 stores the row of the
    highest logit of all programs; of equal logits, the lowest row."""
    word = tl.arange(0, 4)
    pair = tl.where(word % 2 == 0, best, best_row.to(tl.float32))
    send(ptr + 4 * tl.program_id(0) + word, pair, word < 4)
    if tl.program_id(0) == 0:
        best_P, row_P, _, _ = receive(ptr, 4 * PROGRAMS, 4 * MOST_PROGRAMS)
        best_P = tl.where(tl.arange(0, MOST_PROGRAMS) < PROGRAMS, best_P, float("-inf"))
        row = tl.min(tl.where(best_P == tl.max(best_P, 0), row_P, V - 1), 0)
        tl.store(result_ptr, row.to(tl.int32))


@triton.jit
def norm_and_matmul(
    x_ptr, scale_ptr, bias_ptr, w_ptr, w_bias_ptr, sent_ptr, pid, layer, following, ahead,
    N: tl.constexpr, C: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr, CK: tl.constexpr,
    EPS: tl.constexpr, GELU: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Send this program's strip of W·LayerNorm(x) + b, or the strip's GELU.

    Args:
        following: whether the block `layer` has a successor, whose weights are prefetched.
        ahead: arguments of `prefetch_ahead`, or None.
    """
    STRIP: tl.constexpr = triton.cdiv(N, PROGRAMS)
    CP: tl.constexpr = triton.next_power_of_2(C // CK) * CK
    DTYPE: tl.constexpr = w_ptr.dtype.element_ty
    scale = load_vector(scale_ptr + layer * C, C, CP)
    bias = load_vector(bias_ptr + layer * C, C, CP)
    stop = tl.minimum(pid * STRIP + STRIP, N)
    for t in tl.static_range(0, (STRIP + R - 1) // R, TILES):
        first = pid * STRIP + t * R
        w = load_tiles(w_ptr + layer * N * C, first, stop, TILES, R, C, CK)
        b = load_biases(w_bias_ptr + layer * N, first, stop, TILES, R)
        if t == 0:
            if following:
                prefetch_strip(w_ptr + (layer + 1) * N * C, pid, N, C, PROGRAMS)
            if ahead is not None:
                prefetch_ahead(pid, layer, following, *ahead, C, PROGRAMS)
            x = receive(x_ptr, C, CP)
            y_T1K = rounded(layer_norm(x, scale, bias, EPS, C), CK, DTYPE)
        for i in tl.static_range(TILES):
            column_N = first + i * R + tl.arange(0, R)
            result_N = matvec(w[i], y_T1K) + b[i]
            if GELU:
                result_N = gelu(result_N)
            send(sent_ptr + column_N, result_N.to(DTYPE), column_N < stop)


@triton.jit
def prefetch_ahead(
    pid, layer, following, position, k_ptr, v_ptr, head_ptr, S: tl.constexpr, V: tl.constexpr,
    HEAD_AHEAD: tl.constexpr, C: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Prefetch this program's share of the next block's keys and values, or the first rows of the
    program's strip of the head."""
    if following:
        SHARE: tl.constexpr = triton.cdiv(S * C, PROGRAMS)
        cached = (layer + 1) * S * C
        share = tl.cdiv(position * C, PROGRAMS)
        end = tl.minimum((pid + 1) * share, position * C)
        prefetch(k_ptr + cached, pid * share, end, SHARE)
        prefetch(v_ptr + cached, pid * share, end, SHARE)
    else:
        start = pid * triton.cdiv(V, PROGRAMS) * C
        end = tl.minimum(start + HEAD_AHEAD * C, V * C)
        prefetch(head_ptr, start, end, HEAD_AHEAD * C)


@triton.jit
def matmul_and_add(
    y_ptr, w_ptr, bias_ptr, x_ptr, sum_ptr, pid, layer, following, C: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, CK: tl.constexpr, RESIDUAL: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Send this program's strip of the residual sum x + W·y + b."""
    STRIP: tl.constexpr = triton.cdiv(C, PROGRAMS)
    KP: tl.constexpr = triton.next_power_of_2(K // CK) * CK
    stop = tl.minimum(pid * STRIP + STRIP, C)
    for t in tl.static_range((STRIP + R - 1) // R):
        first = pid * STRIP + t * R
        (w,) = load_tiles(w_ptr + layer * C * K, first, stop, 1, R, K, CK)
        column_N = first + tl.arange(0, R)
        inside_N = column_N < stop
        b_N = tl.load(bias_ptr + layer * C + column_N, mask=inside_N, other=0.0)
        # This program has sent these values.
        x_N = tl.load(x_ptr + column_N, mask=inside_N, other=0, cache_modifier=".cg")
        if t == 0:
            if following:
                prefetch_strip(w_ptr + (layer + 1) * C * K, pid, C, K, PROGRAMS)
            y_T1K = rounded(receive(y_ptr, K, KP), CK, w_ptr.dtype.element_ty)
        y_N = matvec(w, y_T1K).to(RESIDUAL).to(tl.float32) + b_N.to(tl.float32)
        x_N = x_N.to(tl.float32, bitcast=True) + y_N
        send(sum_ptr + column_N, x_N.to(RESIDUAL), inside_N)


@triton.jit
def decode_one_kernel(
    token_ptr, length_ptr, weights, k_ptr, v_ptr, exchange_ptr, result_ptr, L: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, V: tl.constexpr, S: tl.constexpr, EPS: tl.constexpr,
    PROGRAMS: tl.constexpr, FP32_RESIDUAL: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr,
    R_OUT: tl.constexpr, R_HEAD: tl.constexpr, TILES: tl.constexpr, CK: tl.constexpr,
    CK_F: tl.constexpr, KEYS: tl.constexpr, LIKELIEST: tl.constexpr,
):  # fmt: skip
    # The fields of DecoderWeights.
    (
        wte_ptr, wpe_ptr, ln_1_scale_ptr, ln_1_bias_ptr, qkv_ptr, qkv_bias_ptr, proj_ptr,
        proj_bias_ptr, ln_2_scale_ptr, ln_2_bias_ptr, fc_ptr, fc_bias_ptr, out_ptr, out_bias_ptr,
        ln_f_scale_ptr, ln_f_bias_ptr, head_ptr,
    ) = weights  # fmt: skip
    F: tl.constexpr = 4 * C
    CP: tl.constexpr = triton.next_power_of_2(C // CK) * CK
    STRIP_C: tl.constexpr = triton.cdiv(C, PROGRAMS)
    STRIP_HEAD: tl.constexpr = triton.cdiv(V, PROGRAMS)
    # Distance of the L2 prefetch of the head ahead of the loads, in rows per program: 32 MB in
    # total for GPT-2 124M on 132 SMs.
    HEAD_AHEAD: tl.constexpr = min(STRIP_HEAD, 160)
    # Contents of the exchange, by block: x, qkv, attention, x after attention, hidden.
    BLOCK: tl.constexpr = 10 * C
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    RESIDUAL: tl.constexpr = tl.float32 if FP32_RESIDUAL else DTYPE
    program = tl.program_id(0)
    position = tl.minimum(tl.load(length_ptr), S - 1)
    # Number of programs of this and earlier launches that have ended.
    ended = tl.load(exchange_ptr + 2 * HALF, cache_modifier=".cg")
    half = ended // PROGRAMS % 2
    x_ptr = exchange_ptr + half * HALF
    column_N = program * STRIP_C + tl.arange(0, triton.next_power_of_2(STRIP_C))
    inside_N = column_N < tl.minimum(program * STRIP_C + STRIP_C, C)
    x_N = embedding(token_ptr, position, wte_ptr, wpe_ptr, column_N, inside_N, V, C)
    send(x_ptr + column_N, x_N.to(RESIDUAL), inside_N)
    # Weights of later blocks are prefetched one block ahead.
    prefetch_strip(proj_ptr, program, C, C, PROGRAMS)
    prefetch_strip(fc_ptr, program, F, C, PROGRAMS)
    prefetch_strip(out_ptr, program, C, F, PROGRAMS)
    # Mark all values of the other half of the exchange as absent, for the next launch.
    absent = tl.full((1024,), ABSENT, tl.int32)
    for start in range(program * 1024, HALF, PROGRAMS * 1024):
        offset = start + tl.arange(0, 1024)
        tl.store(exchange_ptr + (1 - half) * HALF + offset, absent, mask=offset < HALF)
    for layer_32 in range(L):
        layer = tl.full((), layer_32, tl.int64)
        following = layer_32 + 1 < L
        sent_qkv_ptr = x_ptr + C
        attended_ptr = sent_qkv_ptr + 3 * C
        middle_ptr = attended_ptr + C
        hidden_ptr = middle_ptr + C

        # 1. LayerNorm, QKV projection.
        norm_and_matmul(
            x_ptr, ln_1_scale_ptr, ln_1_bias_ptr, qkv_ptr, qkv_bias_ptr, sent_qkv_ptr,
            opaque(program), layer, following,
            (position, k_ptr, v_ptr, head_ptr, S, V, HEAD_AHEAD), 3 * C, C, R, TILES, CK, EPS,
            False, PROGRAMS,
        )  # fmt: skip

        # 2. Attention.
        pid = opaque(program)
        cached = layer * S * C
        if H <= PROGRAMS:
            # An `if` in place of the loop, whose body LLVM would duplicate.
            if pid < H:
                attend(
                    sent_qkv_ptr, k_ptr + cached, v_ptr + cached, attended_ptr, pid, position,
                    C, C // H, KEYS,
                )  # fmt: skip
        else:
            for head in range(pid, H, PROGRAMS):
                attend(
                    sent_qkv_ptr, k_ptr + cached, v_ptr + cached, attended_ptr, head, position,
                    C, C // H, KEYS,
                )  # fmt: skip

        # 3. Output projection, residual sum. The loads of this phase follow phase 2, in which keys
        # and values need the registers.
        matmul_and_add(
            attended_ptr, proj_ptr, proj_bias_ptr, x_ptr, middle_ptr, pid, layer, following, C, C,
            R, CK, RESIDUAL, PROGRAMS,
        )  # fmt: skip

        # 4. LayerNorm, first matmul of the MLP, GELU.
        norm_and_matmul(
            middle_ptr, ln_2_scale_ptr, ln_2_bias_ptr, fc_ptr, fc_bias_ptr, hidden_ptr,
            opaque(program), layer, following, None, F, C, R, TILES, CK, EPS, True, PROGRAMS,
        )  # fmt: skip

        # 5. Second matmul of the MLP, residual sum.
        matmul_and_add(
            hidden_ptr, out_ptr, out_bias_ptr, middle_ptr, x_ptr + BLOCK,
            opaque(program), layer, following, C, F, R_OUT, CK_F, RESIDUAL, PROGRAMS,
        )  # fmt: skip
        x_ptr += BLOCK

    # Final LayerNorm, logits.
    pid = opaque(program)
    scale, bias = load_vector(ln_f_scale_ptr, C, CP), load_vector(ln_f_bias_ptr, C, CP)
    first = pid * STRIP_HEAD
    stop = tl.minimum(first + STRIP_HEAD, V)
    # The load of the next tile precedes the matmul of a tile. Both tiles are in registers.
    (head_w,) = load_tiles(head_ptr, first, stop, 1, R_HEAD, C, CK)
    x = receive(x_ptr, C, CP)
    y_T1K = rounded(layer_norm(x, scale, bias, EPS, C), CK, DTYPE)
    best_N = tl.full((R_HEAD,), float("-inf"), tl.float32)
    best_row_N = first + tl.arange(0, R_HEAD)
    for start in range(first, stop, R_HEAD):
        (next_w,) = load_tiles(head_ptr, start + R_HEAD, stop, 1, R_HEAD, C, CK)
        ahead = tl.minimum(start + HEAD_AHEAD, stop) * C
        prefetch(head_ptr, ahead, tl.minimum(ahead + R_HEAD * C, stop * C), R_HEAD * C)
        row_N = start + tl.arange(0, R_HEAD)
        logit_N = matvec(head_w, y_T1K).to(DTYPE)
        if LIKELIEST:
            better_N = (logit_N.to(tl.float32) > best_N) & (row_N < stop)
            best_N = tl.where(better_N, logit_N.to(tl.float32), best_N)
            best_row_N = tl.where(better_N, row_N, best_row_N)
        else:
            tl.store(result_ptr + row_N, logit_N, mask=row_N < stop)
        head_w = next_w
    if LIKELIEST:
        best = tl.max(best_N, 0)
        best_row = tl.min(tl.where(best_N == best, best_row_N, V), 0)
        store_likeliest(x_ptr + C, best, best_row, result_ptr, V, PROGRAMS)
    tl.debug_barrier()
    tl.atomic_add(exchange_ptr + 2 * HALF, 1, sem="relaxed")
