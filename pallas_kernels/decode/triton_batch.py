"""Triton kernel of `decode_step` for several sequences: matmuls on tensor cores.

Phases of a block, each of which ends with a barrier of all programs:

1. Residual sum and LayerNorm, a row on each program.
2. QKV projection: q to scratch, k and v to the cache.
3. Attention, G heads of one sequence at a time.
4. Output projection. Programs share the sum over the channels; the parts are added in phase 5.
5. Residual sum over the parts, LayerNorm, a row on each program.
6. First matmul of the MLP, GELU.
7. Second matmul of the MLP in parts, which phase 1 of the next block adds.

Afterwards: final LayerNorm and the logits.

Shapes: B sequences, M ≥ B rows of a tile, L blocks, C channels, H heads, D = C/H, F = 4·C,
V vocabulary, S cache positions.
"""

import triton
import triton.language as tl

from pallas_kernels.decode.triton_grid import (
    arrive,
    attend,
    gelu,
    load_fresh_rows,
    load_rows,
    opaque,
    prefetch,
    prefetch_strip,
    reset,
    wait,
)
from pallas_kernels.decode.triton_one import strip_of


@triton.jit
def matmul(x, w, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, CK: tl.constexpr):
    """Return x Wᵀ (M, N) in fp32, of tuples of tiles (M, CK) and (N, CK)."""
    y_MN = tl.zeros((M, N), tl.float32)
    for i in tl.static_range(K // CK):
        y_MN = tl.dot(x[i], tl.trans(w[i]), y_MN, input_precision="ieee")
    return y_MN


@triton.jit
def add_and_norm(
    x_ptr,
    part_ptr,
    part_bias_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    B: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    PARTS: tl.constexpr,
    EPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    limit,
):
    """Add the parts of a matmul and its bias to the residual stream; store its LayerNorm.

    Args:
        limit: channels to which a matmul is added: C or 0.
    """
    channel_C = tl.arange(0, CP)
    inside_C = channel_C < C
    scale_C = tl.load(scale_ptr + channel_C, mask=inside_C, other=0.0).to(tl.float32)
    bias_C = tl.load(bias_ptr + channel_C, mask=inside_C, other=0.0).to(tl.float32)
    added_C = inside_C & (channel_C < limit)
    part_bias_C = tl.load(part_bias_ptr + channel_C, mask=added_C, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), B, PROGRAMS):
        offset_C = row * C + channel_C
        x_C = tl.load(x_ptr + offset_C, mask=inside_C, other=0.0, cache_modifier=".cg")
        x_C = x_C.to(tl.float32)
        matmul_C = tl.zeros((CP,), tl.float32)
        for i in tl.static_range(PARTS):
            part_ptr_C = part_ptr + i * B * C + offset_C
            matmul_C += tl.load(part_ptr_C, mask=added_C, other=0.0, cache_modifier=".cg")
        x_C += matmul_C.to(x_ptr.dtype.element_ty).to(tl.float32) + part_bias_C
        x_C = x_C.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + offset_C, x_C, mask=inside_C)
        x_C = x_C.to(tl.float32)
        mean = tl.sum(x_C, 0) / C
        centred_C = tl.where(inside_C, x_C - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centred_C * centred_C, 0) / C + EPS)
        tl.store(y_ptr + offset_C, centred_C * rstd * scale_C + bias_C, mask=inside_C)


@triton.jit
def part_of_matmul(
    x_ptr,
    w_ptr,
    part_ptr,
    counter_ptr,
    target,
    B: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    CK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Wait for x (B, K), and store the sums over one part of K of some columns of x Wᵀ."""
    STRIPS: tl.constexpr = PROGRAMS // PARTS
    STRIP: tl.constexpr = (N + STRIPS - 1) // STRIPS
    KP: tl.constexpr = K // PARTS
    pid = opaque(tl.program_id(0), PROGRAMS)
    part = pid % PARTS
    row_M = tl.arange(0, M) + opaque(0, PROGRAMS)
    for t in tl.static_range((STRIP + BN - 1) // BN):
        column_N, inside_N = strip_of(pid // PARTS, t, N, STRIP, BN)
        w = load_rows(w_ptr + part * KP, column_N, inside_N, K, KP, CK)
        if t == 0:
            wait(counter_ptr, target, PROGRAMS)
        x = load_fresh_rows(x_ptr + part * KP, row_M, row_M < B, K, KP, CK)
        y_MN = matmul(x, w, M, BN, KP, CK)
        offset_MN = part * B * N + row_M[:, None] * N + column_N[None, :]
        tl.store(part_ptr + offset_MN, y_MN, mask=(row_M < B)[:, None] & inside_N[None, :])


@triton.jit
def prefetch_cached(
    k_ptr,
    v_ptr,
    layer,
    length_ptr,
    B: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    AHEAD: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Request a block's keys and values, of at most AHEAD positions, for the L2 cache."""
    SPAN: tl.constexpr = 16384
    if PROGRAMS > 1:
        for item in range(tl.program_id(0), 2 * B, PROGRAMS):
            row = item % B
            stop = tl.minimum(tl.load(length_ptr + row), AHEAD) * C
            ptr = (k_ptr if item < B else v_ptr) + (layer * B + row) * S * C
            for start in range(0, stop, SPAN):
                prefetch(ptr, start, stop, SPAN, PROGRAMS)


@triton.jit
def decode_batch_kernel(
    token_ptr,
    length_ptr,
    wte_ptr,
    wpe_ptr,
    ln_1_scale_ptr,
    ln_1_bias_ptr,
    qkv_ptr,
    qkv_bias_ptr,
    proj_ptr,
    proj_bias_ptr,
    ln_2_scale_ptr,
    ln_2_bias_ptr,
    fc_ptr,
    fc_bias_ptr,
    out_ptr,
    out_bias_ptr,
    ln_f_scale_ptr,
    ln_f_bias_ptr,
    head_ptr,
    k_ptr,
    v_ptr,
    counter_ptr,
    logits_ptr,
    x_ptr,
    y_ptr,
    q_ptr,
    attended_ptr,
    proj_part_ptr,
    hidden_ptr,
    out_part_ptr,
    L: tl.constexpr,
    B: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    EPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    G: tl.constexpr,
    PROJ_PARTS: tl.constexpr,
    OUT_PARTS: tl.constexpr,
    BN_QKV: tl.constexpr,
    BN_PROJ: tl.constexpr,
    BN_FC: tl.constexpr,
    BN_OUT: tl.constexpr,
    BN_HEAD: tl.constexpr,
    CK: tl.constexpr,
    CK_PROJ: tl.constexpr,
    CK_OUT: tl.constexpr,
    CK_HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    # Over 120 lines, a third of them parameters: each phase needs most of the pointers.
    D: tl.constexpr = C // H
    F: tl.constexpr = 4 * C
    STRIP_QKV: tl.constexpr = (3 * C + PROGRAMS - 1) // PROGRAMS
    STRIP_FC: tl.constexpr = (F + PROGRAMS - 1) // PROGRAMS
    STRIP_HEAD: tl.constexpr = (V + PROGRAMS - 1) // PROGRAMS
    STRIP_C: tl.constexpr = (C + PROGRAMS - 1) // PROGRAMS
    HEAD_AHEAD: tl.constexpr = min(STRIP_HEAD, 128)
    program = tl.program_id(0)
    row_M = tl.arange(0, M)
    inside_M = row_M < B
    length_M = tl.load(length_ptr + row_M, mask=inside_M, other=0)
    position_M = tl.minimum(length_M, S - 1).to(tl.int64)
    channel_C = tl.arange(0, CP)
    inside_C = channel_C < C
    for row in range(program, B, PROGRAMS):
        token = tl.load(token_ptr + row).to(tl.int64)
        position = tl.minimum(tl.load(length_ptr + row), S - 1)
        token_C = token + tl.zeros((CP,), tl.int64)
        known_C = inside_C & (token_C >= 0) & (token_C < V)
        x_C = tl.load(wte_ptr + token * C + channel_C, mask=known_C, other=float("nan"))
        x_C += tl.load(wpe_ptr + position * C + channel_C, mask=inside_C, other=0.0)
        tl.store(x_ptr + row * C + channel_C, x_C, mask=inside_C)
    target = 0
    for layer_32 in range(L):
        layer = tl.full((), layer_32, tl.int64)

        # ----------------------------------------------------------------- 1. residual sum, norm
        arrive(counter_ptr, PROGRAMS)
        target += PROGRAMS
        prefetch_cached(k_ptr, v_ptr, layer, length_ptr, B, C, S, AHEAD, PROGRAMS)
        wait(counter_ptr, target, PROGRAMS)
        add_and_norm(
            x_ptr, out_part_ptr, out_bias_ptr + (layer - 1) * C, ln_1_scale_ptr + layer * C,
            ln_1_bias_ptr + layer * C, y_ptr, B, C, CP, OUT_PARTS, EPS, PROGRAMS,
            tl.minimum(layer, 1) * C,
        )  # fmt: skip

        # --------------------------------------------------------------------- 2. QKV projection
        arrive(counter_ptr, PROGRAMS)
        target += PROGRAMS
        pid = opaque(program, PROGRAMS)
        for t in tl.static_range((STRIP_QKV + BN_QKV - 1) // BN_QKV):
            column_N, inside_N = strip_of(pid, t, 3 * C, STRIP_QKV, BN_QKV)
            w = load_rows(qkv_ptr + layer * 3 * C * C, column_N, inside_N, C, C, CK)
            bias_N = tl.load(qkv_bias_ptr + layer * 3 * C + column_N, mask=inside_N, other=0.0)
            if t == 0:
                prefetch_strip(fc_ptr + layer * F * C, pid, F, C, STRIP_FC, PROGRAMS)
                wait(counter_ptr, target, PROGRAMS)
            x = load_fresh_rows(y_ptr, row_M + opaque(0, PROGRAMS), inside_M, C, C, CK)
            qkv_MN = matmul(x, w, M, BN_QKV, C, CK) + bias_N.to(tl.float32)[None, :]
            mask_MN = inside_M[:, None] & inside_N[None, :]
            is_q_1N, is_v_1N = (column_N < C)[None, :], (column_N >= 2 * C)[None, :]
            row_M1 = (((layer * B + row_M) * S + position_M) * C)[:, None]
            tl.store(q_ptr + row_M[:, None] * C + column_N[None, :], qkv_MN, mask=mask_MN & is_q_1N)
            tl.store(
                k_ptr + row_M1 + column_N[None, :] - C,
                qkv_MN,
                mask=mask_MN & (is_q_1N == 0) & (is_v_1N == 0),
            )
            tl.store(v_ptr + row_M1 + column_N[None, :] - 2 * C, qkv_MN, mask=mask_MN & is_v_1N)

        # -------------------------------------------------------------------------- 3. attention
        arrive(counter_ptr, PROGRAMS)
        target += PROGRAMS
        prefetch_strip(proj_ptr + layer * C * C, program, C, C, STRIP_C, PROGRAMS)
        prefetch_strip(out_ptr + layer * C * F, program, C, F, STRIP_C, PROGRAMS)
        wait(counter_ptr, target, PROGRAMS)
        zero = opaque(0, PROGRAMS)
        for item in range(program, B * (H // G), PROGRAMS):
            row, head = item // (H // G), item % (H // G) * G
            length = tl.minimum(tl.load(length_ptr + row) + 1, S)
            rows = (layer * B + row) * S * C + head * D
            y_GD = attend(
                q_ptr + row * C + head * D, k_ptr + rows, v_ptr + rows, length, C, G, D, KEYS, zero
            )
            channel_GD = tl.arange(0, G)[:, None] * D + tl.arange(0, D)[None, :]
            tl.store(attended_ptr + row * C + head * D + channel_GD, y_GD)

        # ------------------------------------------------------------------ 4. output projection
        arrive(counter_ptr, PROGRAMS)
        target += PROGRAMS
        part_of_matmul(
            attended_ptr, proj_ptr + layer * C * C, proj_part_ptr, counter_ptr, target,
            B, M, C, C, BN_PROJ, PROJ_PARTS, CK_PROJ, PROGRAMS,
        )  # fmt: skip

        # ----------------------------------------------------------------- 5. residual sum, norm
        arrive(counter_ptr, PROGRAMS)
        target += PROGRAMS
        wait(counter_ptr, target, PROGRAMS)
        add_and_norm(
            x_ptr, proj_part_ptr, proj_bias_ptr + layer * C, ln_2_scale_ptr + layer * C,
            ln_2_bias_ptr + layer * C, y_ptr, B, C, CP, PROJ_PARTS, EPS, PROGRAMS, C,
        )  # fmt: skip

        # ----------------------------------------------------------------- 6. first matmul, GELU
        arrive(counter_ptr, PROGRAMS)
        target += PROGRAMS
        pid = opaque(program, PROGRAMS)
        for t in tl.static_range((STRIP_FC + BN_FC - 1) // BN_FC):
            column_N, inside_N = strip_of(pid, t, F, STRIP_FC, BN_FC)
            w = load_rows(fc_ptr + layer * F * C, column_N, inside_N, C, C, CK)
            bias_N = tl.load(fc_bias_ptr + layer * F + column_N, mask=inside_N, other=0.0)
            if t == 0:
                if layer_32 + 1 < L:
                    prefetch_strip(
                        qkv_ptr + (layer + 1) * 3 * C * C, pid, 3 * C, C, STRIP_QKV, PROGRAMS
                    )
                else:
                    start = pid * STRIP_HEAD * C
                    stop = tl.minimum(start + HEAD_AHEAD * C, V * C)
                    prefetch(head_ptr, start, stop, HEAD_AHEAD * C, PROGRAMS)
                wait(counter_ptr, target, PROGRAMS)
            x = load_fresh_rows(y_ptr, row_M + opaque(0, PROGRAMS), inside_M, C, C, CK)
            hidden_MN = gelu(matmul(x, w, M, BN_FC, C, CK) + bias_N.to(tl.float32)[None, :])
            offset_MN = row_M[:, None] * F + column_N[None, :]
            tl.store(hidden_ptr + offset_MN, hidden_MN, mask=inside_M[:, None] & inside_N[None, :])

        # ---------------------------------------------------------------------- 7. second matmul
        arrive(counter_ptr, PROGRAMS)
        target += PROGRAMS
        part_of_matmul(
            hidden_ptr, out_ptr + layer * C * F, out_part_ptr, counter_ptr, target,
            B, M, C, F, BN_OUT, OUT_PARTS, CK_OUT, PROGRAMS,
        )  # fmt: skip

    # ------------------------------------------------------------------------ final norm, logits
    arrive(counter_ptr, PROGRAMS)
    target += PROGRAMS
    wait(counter_ptr, target, PROGRAMS)
    add_and_norm(
        x_ptr, out_part_ptr, out_bias_ptr + (L - 1) * C, ln_f_scale_ptr, ln_f_bias_ptr,
        y_ptr, B, C, CP, OUT_PARTS, EPS, PROGRAMS, C,
    )  # fmt: skip
    arrive(counter_ptr, PROGRAMS)
    target += PROGRAMS
    wait(counter_ptr, target, PROGRAMS)
    row_M += opaque(0, PROGRAMS)
    for start in range(0, STRIP_HEAD, BN_HEAD):
        column_N = program * STRIP_HEAD + start + tl.arange(0, BN_HEAD)
        inside_N = column_N < tl.minimum(program * STRIP_HEAD + STRIP_HEAD, V)
        logits_MN = tl.zeros((M, BN_HEAD), tl.float32)
        for k in tl.range(0, C, CK_HEAD, num_stages=HEAD_STAGES):
            channel_K = k + tl.arange(0, CK_HEAD)
            y_MK = tl.load(
                y_ptr + row_M[:, None] * C + channel_K[None, :],
                mask=inside_M[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            w_NK = tl.load(
                head_ptr + column_N[:, None] * C + channel_K[None, :],
                mask=inside_N[:, None],
                other=0.0,
            )
            logits_MN = tl.dot(y_MK, tl.trans(w_NK), logits_MN, input_precision="ieee")
        offset_MN = row_M[:, None] * V + column_N[None, :]
        tl.store(logits_ptr + offset_MN, logits_MN, mask=inside_M[:, None] & inside_N[None, :])
    reset(counter_ptr, PROGRAMS)
