"""Triton kernel of `decode_step` for one sequence: matrix-vector, bound by loads of the weights.

Phases of a block, each of which ends with a barrier of all programs:

1. LayerNorm, QKV projection: q to scratch, k and v to the cache.
2. Attention of one head, and that head's part of the output projection. Programs of one head share
   its columns; each repeats the head's attention. This saves the barrier between the two.
3. Residual sum over the heads' parts, LayerNorm, first matmul of the MLP, GELU.
4. Second matmul of the MLP, residual sum.

Each program repeats the norm of phases 1 and 3. Afterwards: final LayerNorm and the logits.

Shapes: L blocks, C channels, H heads, D = C/H, F = 4·C, V vocabulary, S cache positions.
"""

import triton
import triton.language as tl

from pallas_kernels.decode.triton_grid import (
    arrive,
    attend,
    gelu,
    layer_norm,
    load_fresh_vector,
    load_rows,
    load_vector,
    opaque,
    prefetch,
    prefetch_strip,
    reset,
    store_vector,
    wait,
)


@triton.jit
def strip_of(index, tile: tl.constexpr, N: tl.constexpr, STRIP: tl.constexpr, BN: tl.constexpr):
    """Return the columns of a tile of a program's strip, and which are inside the strip."""
    column_N = index * STRIP + tile * BN + tl.arange(0, BN)
    return column_N, column_N < tl.minimum(index * STRIP + STRIP, N)


@triton.jit
def matvec(w, y, BN: tl.constexpr, K: tl.constexpr, CK: tl.constexpr):
    """Return W y (BN,) in fp32, of tuples of tiles (BN, CK) and (CK,)."""
    product_NK = tl.zeros((BN, CK), tl.float32)
    for i in tl.static_range(K // CK):
        product_NK += w[i].to(tl.float32) * y[i][None, :]
    return tl.sum(product_NK, 1)


@triton.jit
def decode_one_kernel(
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
    middle_ptr,
    q_ptr,
    part_ptr,
    hidden_ptr,
    L: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    HP: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    EPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    BN_QKV: tl.constexpr,
    BN_PROJ: tl.constexpr,
    BN_FC: tl.constexpr,
    BN_OUT: tl.constexpr,
    BN_HEAD: tl.constexpr,
    CK: tl.constexpr,
    CK_F: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_STAGES: tl.constexpr,
):
    # Over 120 lines, a third of them parameters: each phase needs most of the pointers.
    D: tl.constexpr = C // H
    F: tl.constexpr = 4 * C
    STRIP_QKV: tl.constexpr = (3 * C + PROGRAMS - 1) // PROGRAMS
    STRIP_PROJ: tl.constexpr = (C + PARTS - 1) // PARTS
    STRIP_FC: tl.constexpr = (F + PROGRAMS - 1) // PROGRAMS
    STRIP_OUT: tl.constexpr = (C + PROGRAMS - 1) // PROGRAMS
    STRIP_HEAD: tl.constexpr = (V + PROGRAMS - 1) // PROGRAMS
    SHARE: tl.constexpr = (S * C + PROGRAMS - 1) // PROGRAMS
    # Rows of the head that are prefetched, a program: 26 MB in all for GPT-2 124M on 132 SMs.
    HEAD_AHEAD: tl.constexpr = min(STRIP_HEAD, 128)
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    RESIDUAL: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    position = tl.minimum(tl.load(length_ptr), S - 1)
    if program == 0:
        token = tl.load(token_ptr).to(tl.int64)
        for i in tl.static_range(C // CK):
            channel_K = i * CK + tl.arange(0, CK)
            token_K = token + tl.zeros((CK,), tl.int64)
            known_K = (token_K >= 0) & (token_K < V)
            x_K = tl.load(wte_ptr + token * C + channel_K, mask=known_K, other=float("nan"))
            tl.store(x_ptr + channel_K, x_K + tl.load(wpe_ptr + position * C + channel_K))
    target = 0
    for layer_32 in range(L):
        layer = tl.full((), layer_32, tl.int64)

        # -------------------------------------------------------------- 1. norm, QKV projection
        arrive(counter_ptr, PROGRAMS)
        pid = opaque(program, PROGRAMS)
        scale = load_vector(ln_1_scale_ptr + layer * C, C, CK)
        bias = load_vector(ln_1_bias_ptr + layer * C, C, CK)
        for t in tl.static_range((STRIP_QKV + BN_QKV - 1) // BN_QKV):
            column_N, inside_N = strip_of(pid, t, 3 * C, STRIP_QKV, BN_QKV)
            w = load_rows(qkv_ptr + layer * 3 * C * C, column_N, inside_N, C, C, CK)
            bias_N = tl.load(qkv_bias_ptr + layer * 3 * C + column_N, mask=inside_N, other=0.0)
            if t == 0:
                if layer_32 + 1 < L:
                    prefetch_strip(
                        qkv_ptr + (layer + 1) * 3 * C * C, pid, 3 * C, C, STRIP_QKV, PROGRAMS
                    )
                    cached = (layer + 1) * S * C
                    share = tl.cdiv(position * C, PROGRAMS)
                    stop = tl.minimum((pid + 1) * share, position * C)
                    prefetch(k_ptr + cached, pid * share, stop, SHARE, PROGRAMS)
                    prefetch(v_ptr + cached, pid * share, stop, SHARE, PROGRAMS)
                target += PROGRAMS
                wait(counter_ptr, target, PROGRAMS)
                y = layer_norm(load_fresh_vector(x_ptr, C, CK), scale, bias, EPS, C, CK, DTYPE)
            qkv_N = matvec(w, y, BN_QKV, C, CK) + bias_N.to(tl.float32)
            row = (layer * S + position) * C
            tl.store(q_ptr + column_N, qkv_N, mask=inside_N & (column_N < C))
            is_k_N = (column_N >= C) & (column_N < 2 * C)
            tl.store(k_ptr + row + column_N - C, qkv_N, mask=inside_N & is_k_N)
            tl.store(v_ptr + row + column_N - 2 * C, qkv_N, mask=inside_N & (column_N >= 2 * C))

        # --------------------------------------------------- 2. attention, part of its projection
        arrive(counter_ptr, PROGRAMS)
        pid = opaque(program, PROGRAMS)
        for i in tl.static_range((H * PARTS + PROGRAMS - 1) // PROGRAMS):
            head = (pid + i * PROGRAMS) % H
            column_N, inside_N = strip_of((pid + i * PROGRAMS) // H, 0, C, STRIP_PROJ, BN_PROJ)
            (w_ND,) = load_rows(proj_ptr + layer * C * C + head * D, column_N, inside_N, C, D, D)
            if i == 0:
                if layer_32 + 1 < L:
                    prefetch_strip(proj_ptr + (layer + 1) * C * C, pid, C, C, STRIP_OUT, PROGRAMS)
                target += PROGRAMS
                wait(counter_ptr, target, PROGRAMS)
            rows = layer * S * C + head * D
            zero = opaque(0, PROGRAMS)
            y_1D = attend(
                q_ptr + head * D, k_ptr + rows, v_ptr + rows, position + 1, C, 1, D, KEYS, zero
            )
            y_1D = y_1D.to(DTYPE).to(tl.float32)
            part_N = tl.sum(w_ND.to(tl.float32) * tl.reshape(y_1D, (D,))[None, :], 1)
            tl.store(part_ptr + head * C + column_N, part_N, mask=inside_N)

        # -------------------------------------------- 3. residual sum, norm, first matmul, GELU
        arrive(counter_ptr, PROGRAMS)
        pid = opaque(program, PROGRAMS)
        scale = load_vector(ln_2_scale_ptr + layer * C, C, CK)
        bias = load_vector(ln_2_bias_ptr + layer * C, C, CK)
        proj_bias = load_vector(proj_bias_ptr + layer * C, C, CK)
        for t in tl.static_range((STRIP_FC + BN_FC - 1) // BN_FC):
            column_N, inside_N = strip_of(pid, t, F, STRIP_FC, BN_FC)
            w = load_rows(fc_ptr + layer * F * C, column_N, inside_N, C, C, CK)
            bias_N = tl.load(fc_bias_ptr + layer * F + column_N, mask=inside_N, other=0.0)
            if t == 0:
                if layer_32 + 1 < L:
                    prefetch_strip(fc_ptr + (layer + 1) * F * C, pid, F, C, STRIP_FC, PROGRAMS)
                target += PROGRAMS
                wait(counter_ptr, target, PROGRAMS)
                x = ()
                for i in tl.static_range(C // CK):
                    channel_K = i * CK + tl.arange(0, CK)
                    head_H1 = tl.arange(0, HP)[:, None]
                    part_HK = tl.load(
                        part_ptr + head_H1 * C + channel_K[None, :],
                        mask=head_H1 < H,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    x_K = tl.load(x_ptr + channel_K, cache_modifier=".cg").to(tl.float32)
                    x_K += tl.sum(part_HK, 0).to(RESIDUAL).to(tl.float32) + proj_bias[i]
                    x = x + (x_K.to(RESIDUAL).to(tl.float32),)
                if pid == 0:
                    store_vector(middle_ptr, x, C, CK)
                y = layer_norm(x, scale, bias, EPS, C, CK, DTYPE)
            hidden_N = gelu(matvec(w, y, BN_FC, C, CK) + bias_N.to(tl.float32))
            tl.store(hidden_ptr + column_N, hidden_N, mask=inside_N)

        # --------------------------------------------------------- 4. second matmul, residual sum
        arrive(counter_ptr, PROGRAMS)
        pid = opaque(program, PROGRAMS)
        for t in tl.static_range((STRIP_OUT + BN_OUT - 1) // BN_OUT):
            column_N, inside_N = strip_of(pid, t, C, STRIP_OUT, BN_OUT)
            w = load_rows(out_ptr + layer * C * F, column_N, inside_N, F, F, CK_F)
            bias_N = tl.load(out_bias_ptr + layer * C + column_N, mask=inside_N, other=0.0)
            if t == 0:
                if layer_32 + 1 < L:
                    prefetch_strip(out_ptr + (layer + 1) * C * F, pid, C, F, STRIP_OUT, PROGRAMS)
                else:
                    start = pid * STRIP_HEAD * C
                    stop = tl.minimum(start + HEAD_AHEAD * C, V * C)
                    prefetch(head_ptr, start, stop, HEAD_AHEAD * C, PROGRAMS)
                target += PROGRAMS
                wait(counter_ptr, target, PROGRAMS)
                y = load_fresh_vector(hidden_ptr, F, CK_F)
            x_N = tl.load(middle_ptr + column_N, mask=inside_N, other=0.0, cache_modifier=".cg")
            out_N = matvec(w, y, BN_OUT, F, CK_F).to(RESIDUAL).to(tl.float32)
            x_N = x_N.to(tl.float32) + out_N + bias_N.to(tl.float32)
            tl.store(x_ptr + column_N, x_N, mask=inside_N)

    # ------------------------------------------------------------------------ final norm, logits
    arrive(counter_ptr, PROGRAMS)
    pid = opaque(program, PROGRAMS)
    scale, bias = load_vector(ln_f_scale_ptr, C, CK), load_vector(ln_f_bias_ptr, C, CK)
    target += PROGRAMS
    wait(counter_ptr, target, PROGRAMS)
    y = layer_norm(load_fresh_vector(x_ptr, C, CK), scale, bias, EPS, C, CK, DTYPE)
    first = pid * STRIP_HEAD
    stop = tl.minimum(first + STRIP_HEAD, V)
    if HEAD_STAGES == 0:
        # One tile is loaded while another one is multiplied, both in registers.
        column_N = first + tl.arange(0, BN_HEAD)
        w = load_rows(head_ptr, column_N, column_N < stop, C, C, CK)
        for start in range(0, STRIP_HEAD, BN_HEAD):
            column_N = first + start + tl.arange(0, BN_HEAD)
            next_N = column_N + BN_HEAD
            next_w = load_rows(head_ptr, next_N, next_N < stop, C, C, CK)
            tl.store(logits_ptr + column_N, matvec(w, y, BN_HEAD, C, CK), mask=column_N < stop)
            w = next_w
    else:
        for start in tl.range(0, STRIP_HEAD, BN_HEAD, num_stages=HEAD_STAGES):
            column_N = first + start + tl.arange(0, BN_HEAD)
            w = load_rows(head_ptr, column_N, column_N < stop, C, C, CK)
            tl.store(logits_ptr + column_N, matvec(w, y, BN_HEAD, C, CK), mask=column_N < stop)
    reset(counter_ptr, PROGRAMS)
