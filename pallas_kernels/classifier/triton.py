"""Triton kernel of `fused_classifier`: one program per row.

A block is R·K columns, with K columns in one thread.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _dispatch, _triton
from pallas_kernels.gemm.triton_e5m2 import block_to_e5m2, noise_mask, to_e5m2
from pallas_kernels.row_softmax.triton import LOG2E, LOWEST, block_columns, online, together

# Two programs of 32 warps occupy an SM, and the rows stay in the L2 cache for the second read:
# 26 MB of an H200's 60 MB. Share of the copy rate at 16384×50304 bf16: 32 warps 98 %, 16 warps
# (four programs, 52 MB) 81 %, 8 warps 71 %; 32 warps without the eviction hints 83 %.
MOST_WARPS = 32
# With a soft cap, arithmetic limits the kernel, and two programs of 32 warps have too few
# registers: 16 warps 57 %, 32 warps 40 % of the copy rate.
MOST_WARPS_CAPPED = 16


def classify(
    logits_NV,
    targets,
    target_weights=None,
    *,
    vocab_size,
    softcap,
    ignore_index,
    fp8_scale: float | None = None,
):
    """Return losses_N and dlogits_NV; dlogits_NV overwrites the logits.

    Args:
        targets: (N,), or (N, M) with target_weights of shape (M,).
        fp8_scale: None, or a factor of dlogits_NV, which is then a new array in float8_e5m2.
    """
    n, v = logits_NV.shape
    targets = aligned(targets, vocab_size, ignore_index)
    k = 16 // logits_NV.dtype.itemsize  # 16 bytes, the widest load
    warps = min(
        MOST_WARPS if softcap is None else MOST_WARPS_CAPPED,
        triton.next_power_of_2(triton.cdiv(v, 32 * k)),
    )
    # tanh is a sigmoid: c·tanh(x/c) = 2c·σ(2x/c) − c. The −c does not change the softmax.
    if isinstance(softcap, float):
        cap = {"SCALE": 2 * softcap, "SHIFT": 0.0, "WIDTH": softcap / 2}
    else:
        cap = (
            {}
            if softcap is None
            else {name.upper(): float(value) for name, value in softcap._asdict().items()}
        )
    if target_weights is None:
        kernel, inputs, several = classifier_kernel, (targets,), {}
    else:
        m = targets.shape[1]
        kernel, inputs = several_targets_kernel, (targets, target_weights)
        several = {"TARGETS": m, "M": triton.next_power_of_2(m)}
    losses = jax.ShapeDtypeStruct((n,), jnp.float32)
    results = {"out": [losses], "in_place": (0,)}
    if fp8_scale is not None:
        from pallas_kernels.classifier.triton_fp8 import KERNELS

        kernel, cap["FACTOR"] = KERNELS[kernel.__name__], float(fp8_scale)
        cap["max_registers"] = _most_registers(warps, vectors=v % k == 0)
        results = {"out": [jax.ShapeDtypeStruct((n, v), jnp.float8_e5m2), losses]}
    dlogits_NV, losses_N = _triton.call(
        kernel,
        logits_NV,
        *inputs,
        **results,
        grid=(n,),
        num_warps=warps,
        V=v,
        VOCAB=vocab_size,
        IGNORE=ignore_index,
        R=32 * warps,
        K=k,
        **several,
        **cap,
    )
    return losses_N, dlogits_NV


def _most_registers(warps, vectors):
    """Return the limit of registers per thread of an FP8 kernel, or None for no limit.

    Triton 3.6 compiles the kernel without a cap to 46 registers, and an SM has registers for two
    programs of 32 warps only if a thread has at most 32. With the limit, Triton 3.6 and 3.9 do not
    spill if the row length is a multiple of the vector length. 16,384×50,304 bf16 on an H200: 0.81
    ms, and 1.09 ms without the limit. Other GPUs with FP8 have at most 48 warps per SM, so one
    program.
    """
    major, _ = _dispatch.capability() or (0, 0)
    return 32 if vectors and warps == 32 and major in (9, 10) else None


def aligned(targets, vocab_size, ignore_index):
    """Copy the targets to a new, aligned array. All invalid targets become one value.

    The targets of one sequence are `tokens[1:]`. XLA passes such a slice to a kernel as a pointer
    into `tokens`, and jax-triton refuses a pointer that is no multiple of 16 bytes.
    """
    valid = (targets >= 0) & (targets < vocab_size)
    if ignore_index is not None:
        valid |= targets == ignore_index
    return jnp.where(valid, targets, -2 if ignore_index == -1 else -1)


@triton.jit
def classifier_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    V: tl.constexpr,
    VOCAB: tl.constexpr,
    IGNORE: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr = 1.0,
    SHIFT: tl.constexpr = None,
    WIDTH: tl.constexpr = None,
):
    one_target(
        logits_ptr,
        logits_ptr,
        targets_ptr,
        losses_ptr,
        V,
        VOCAB,
        IGNORE,
        R,
        K,
        SCALE,
        SHIFT,
        WIDTH,
        None,
    )


@triton.jit
def several_targets_kernel(
    logits_ptr,
    targets_ptr,
    weights_ptr,
    losses_ptr,
    V: tl.constexpr,
    VOCAB: tl.constexpr,
    IGNORE: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    TARGETS: tl.constexpr,
    M: tl.constexpr,
    SCALE: tl.constexpr = 1.0,
    SHIFT: tl.constexpr = None,
    WIDTH: tl.constexpr = None,
):
    several_targets(
        logits_ptr,
        logits_ptr,
        targets_ptr,
        weights_ptr,
        losses_ptr,
        V,
        VOCAB,
        IGNORE,
        R,
        K,
        TARGETS,
        M,
        SCALE,
        SHIFT,
        WIDTH,
        None,
    )


@triton.jit
def one_target(
    logits_ptr,
    out_ptr,
    targets_ptr,
    losses_ptr,
    V: tl.constexpr,
    VOCAB: tl.constexpr,
    IGNORE: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Store the loss of a row, and the gradient of the row at out_ptr; FACTOR as in `gradient`."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * V
    out_ptr += row.to(tl.int64) * V
    target = tl.load(targets_ptr + row).to(tl.int32)
    column_RK = block_columns(R, K, V)

    m_R, s_R = statistics(logits_ptr, column_RK, V, VOCAB, R, K, SCALE, SHIFT, WIDTH)
    # The target is first used here, so no load of the row waits for it. `together` is a barrier:
    # no store precedes this load.
    known = (target >= 0) & (target < VOCAB)
    x_target = tl.load(logits_ptr + tl.where(known, target, 0)).to(tl.float32)
    m, s = together(m_R, s_R, SCALE * LOG2E)

    u_target = squashed_target(x_target, SHIFT, WIDTH)
    log2_s = tl.where(known, tl.log2(s), float("nan"))
    loss = log2_s / LOG2E - SCALE * (u_target - m)

    ignored = False
    if IGNORE is not None:
        ignored = target == IGNORE
    if ignored:
        tl.store(losses_ptr + row, 0.0)
        store_zeros(out_ptr, column_RK, V, R, K)
    else:
        tl.store(losses_ptr + row, loss)
        store_gradient(
            logits_ptr,
            out_ptr,
            column_RK,
            target,
            None,
            m,
            log2_s,
            V,
            VOCAB,
            R,
            K,
            SCALE,
            SHIFT,
            WIDTH,
            FACTOR,
        )


@triton.jit
def several_targets(
    logits_ptr,
    out_ptr,
    targets_ptr,
    weights_ptr,
    losses_ptr,
    V: tl.constexpr,
    VOCAB: tl.constexpr,
    IGNORE: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    TARGETS: tl.constexpr,
    M: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Store loss and gradient like `one_target`, with TARGETS targets per row.

    M is TARGETS rounded up to a power of two.
    """
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * V
    out_ptr += row.to(tl.int64) * V
    i_M = tl.arange(0, M)
    target_M = tl.load(targets_ptr + row * TARGETS + i_M, mask=i_M < TARGETS, other=0).to(tl.int32)
    weight_M = tl.load(weights_ptr + i_M, mask=i_M < TARGETS, other=0.0)
    counted_M = i_M < TARGETS
    if IGNORE is not None:
        counted_M &= target_M != IGNORE
    weight_M = tl.where(counted_M, weight_M, 0.0)
    column_RK = block_columns(R, K, V)

    m_R, s_R = statistics(logits_ptr, column_RK, V, VOCAB, R, K, SCALE, SHIFT, WIDTH)
    known_M = (target_M >= 0) & (target_M < VOCAB)
    target_M = tl.where(known_M, target_M, 0)
    x_M = tl.load(logits_ptr + target_M).to(tl.float32)
    m, s = together(m_R, s_R, SCALE * LOG2E)

    u_M = squashed_target(x_M, SHIFT, WIDTH)
    unknown = tl.max((counted_M & (known_M == 0)).to(tl.int32), 0)
    log2_s = tl.where(unknown == 0, tl.log2(s), float("nan"))
    loss_M = tl.where(counted_M, weight_M * (log2_s / LOG2E - SCALE * (u_M - m)), 0.0)
    if tl.max(counted_M.to(tl.int32), 0) == 0:
        tl.store(losses_ptr + row, 0.0)
        store_zeros(out_ptr, column_RK, V, R, K)
    else:
        tl.store(losses_ptr + row, tl.sum(loss_M, 0))
        # First store all columns as if none were a target, then overwrite the targets' columns: the
        # time does not depend on the number of targets. Pairs (i, j) with target_i = target_j
        # share a column, and all such i store the same value.
        total = tl.sum(weight_M, 0)
        same_MM = target_M[:, None] == target_M[None, :]
        d_M = tl.exp2((u_M - m) * (SCALE * LOG2E) - log2_s) * total
        d_M -= tl.sum(tl.where(same_MM, weight_M[None, :], 0.0), 1)
        if WIDTH is not None:
            d_M *= (u_M - u_M * u_M) * (SCALE / WIDTH)
        if FACTOR is not None:
            d_M *= FACTOR
        store_gradient(
            logits_ptr,
            out_ptr,
            column_RK,
            None,
            total,
            m,
            log2_s,
            V,
            VOCAB,
            R,
            K,
            SCALE,
            SHIFT,
            WIDTH,
            FACTOR,
        )
        tl.debug_barrier()
        tl.store(out_ptr + target_M, stored(d_M, out_ptr), mask=counted_M)


@triton.jit
def statistics(
    logits_ptr,
    column_RK,
    V: tl.constexpr,
    VOCAB: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the maximum of u and the sum of exp(SCALE·(u − maximum)) of each thread.

    z = SCALE·u up to a constant: u is the logit, or a sigmoid of it.
    """
    BLOCK: tl.constexpr = R * K
    FULL: tl.constexpr = VOCAB // BLOCK * BLOCK  # columns that need no mask
    m_R = tl.full((R,), LOWEST, tl.float32)
    s_R = tl.full((R,), 0.0, tl.float32)
    # The partial block is first in both passes: 98 % of the copy rate. Last in both passes: 93 %.
    if FULL < VOCAB:
        # The mask ends at the end of the array, not of the vocabulary, to keep 16-byte loads.
        x_RK = tl.load(
            logits_ptr + FULL + column_RK, mask=FULL + column_RK < V, eviction_policy="evict_last"
        ).to(tl.float32)
        # Values of the padding must not reach other columns in `reciprocal`.
        u_RK = squashed(tl.where(FULL + column_RK < VOCAB, x_RK, 0.0), SHIFT, WIDTH)
        m_R, s_R = online(
            m_R, s_R, tl.where(FULL + column_RK < VOCAB, u_RK, float("-inf")), SCALE * LOG2E
        )
    for start in range(0, FULL, BLOCK):
        x_RK = tl.load(logits_ptr + start + column_RK, eviction_policy="evict_last").to(tl.float32)
        m_R, s_R = online(m_R, s_R, squashed(x_RK, SHIFT, WIDTH), SCALE * LOG2E)
    return m_R, s_R


@triton.jit
def store_zeros(out_ptr, column_RK, V: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    """Store the gradient of a row without a target."""
    for start in range(0, V, R * K):
        zero_RK = tl.full((R, K), 0.0, tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + start + column_RK, zero_RK, mask=start + column_RK < V)


@triton.jit
def stored(d, out_ptr, mask=None):
    """Convert d to out_ptr's dtype. Round to e5m2 as `to_e5m2`; with a mask, as `block_to_e5m2`."""
    if out_ptr.dtype.element_ty != tl.float8e5:
        return d.to(out_ptr.dtype.element_ty)
    elif mask is None:
        return to_e5m2(d)
    else:
        return block_to_e5m2(d, mask)


@triton.jit
def store_gradient(
    logits_ptr,
    out_ptr,
    column_RK,
    target,
    total,
    m,
    log2_s,
    V: tl.constexpr,
    VOCAB: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Store the gradient of a row; `target`, `total` and FACTOR as in `gradient`."""
    BLOCK: tl.constexpr = R * K
    FULL: tl.constexpr = VOCAB // BLOCK * BLOCK
    # A gradient is NaN only if the row's sum or the weights are not finite. Then the row is NaN.
    mask = noise_mask(log2_s if total is None else log2_s + total)
    for start in range(FULL, V, BLOCK):
        x_RK = tl.load(logits_ptr + start + column_RK, mask=start + column_RK < V).to(tl.float32)
        x_RK = tl.where(start + column_RK < VOCAB, x_RK, 0.0)
        d_RK = gradient(
            x_RK,
            column_RK,
            start,
            target,
            total,
            m,
            log2_s,
            BLOCK,
            SCALE,
            SHIFT,
            WIDTH,
            FACTOR,
        )
        d_RK = tl.where(start + column_RK < VOCAB, d_RK, 0.0)
        tl.store(
            out_ptr + start + column_RK,
            stored(d_RK, out_ptr, mask),
            mask=start + column_RK < V,
            eviction_policy="evict_first",
        )
    for start in range(0, FULL, BLOCK):
        x_RK = tl.load(logits_ptr + start + column_RK, eviction_policy="evict_first").to(tl.float32)
        d_RK = gradient(
            x_RK,
            column_RK,
            start,
            target,
            total,
            m,
            log2_s,
            BLOCK,
            SCALE,
            SHIFT,
            WIDTH,
            FACTOR,
        )
        d_RK = stored(d_RK, out_ptr, mask)
        tl.store(out_ptr + start + column_RK, d_RK, eviction_policy="evict_first")


@triton.jit
def gradient(
    x_RK,
    column_RK,
    start,
    target,
    total,
    m,
    log2_s,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Return dx of the block of columns from `start` on, or FACTOR times dx.

    `target` is the row's target. With None, no column is a target, and `total` is the sum of the
    weights of the row's targets.
    """
    u_RK = squashed(x_RK, SHIFT, WIDTH, FACTOR is None)
    if FACTOR is not None:
        SLOPE: tl.constexpr = FACTOR if WIDTH is None else FACTOR * SCALE / WIDTH
        return scaled_gradient(
            u_RK, column_RK, start, target, total, m, log2_s, BLOCK, SCALE, WIDTH, SLOPE
        )
    d_RK = tl.exp2((u_RK - m) * (SCALE * LOG2E) - log2_s)
    if target is not None:
        target -= start
        if (target >= 0) & (target < BLOCK):  # other blocks need no comparison per element
            d_RK = tl.where(column_RK == target, d_RK - 1, d_RK)
    if WIDTH is not None:
        d_RK *= (u_RK - u_RK * u_RK) * (SCALE / WIDTH if total is None else SCALE / WIDTH * total)
    elif total is not None:
        d_RK *= total
    return d_RK


@triton.jit
def scaled_gradient(
    u_RK,
    column_RK,
    start,
    target,
    total,
    m,
    log2_s,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOPE: tl.constexpr,
):
    """Return FACTOR times dx of `gradient`. SLOPE is FACTOR, with a cap FACTOR · SCALE / WIDTH.

    The subtracted part of the exponent contains the maximum and the factor, and u is not exact with
    a cap: two to five instructions less per column than in `gradient`. Without a cap, the relative
    error is at most 2⁻²³ · max |logit|. Up to 4,000, rounding to fp16 has a larger error.
    """
    shift = m * (SCALE * LOG2E) + log2_s
    if target is not None:
        shift -= tl.log2(tl.full((), SLOPE, tl.float32))
    d_RK = tl.exp2(u_RK * (SCALE * LOG2E) - shift)
    if target is not None:
        target -= start
        if (target >= 0) & (target < BLOCK):
            d_RK = tl.where(column_RK == target, d_RK - SLOPE, d_RK)
    if WIDTH is not None:
        slope_RK = u_RK - u_RK * u_RK
        d_RK *= slope_RK if total is None else slope_RK * (SLOPE * total)
    elif total is not None:
        d_RK *= SLOPE * total
    return d_RK


@triton.jit
def squashed_target(x, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Return σ((x + SHIFT) / WIDTH), or x without a cap, of a few values."""
    if WIDTH is None:
        return x
    else:
        return 1 / (1 + tl.exp2((x + SHIFT) * (-LOG2E / WIDTH)))


@triton.jit
def squashed(x_RK, SHIFT: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr = True):
    """Return σ((x + SHIFT) / WIDTH), or x without a cap.

    A capped pass is limited by special functions, not by memory, so four sigmoids share one
    reciprocal. The exponent is at most 30, so the product of four denominators is finite; a sigmoid
    is at least 1e-9.

    Args:
        EXACT: False permits a relative error of 2⁻²¹ and saves two instructions. For c·tanh(x/c)
            with c = 30, the relative error of exp(z) is then up to 3e-5; that of fp16 is 5e-4.
    """
    if WIDTH is None:
        return x_RK
    else:
        exponent_RK = tl.minimum(
            # One instruction. (x + SHIFT) · factor is two.
            x_RK * (-LOG2E / WIDTH) + SHIFT * (-LOG2E / WIDTH),
            30.0,
            propagate_nan=tl.PropagateNan.ALL,
        )
        inverse_RK = 1 + tl.exp2(exponent_RK)
        u_RK = reciprocal(inverse_RK, 2)
        if EXACT:
            u_RK += u_RK * (1 - inverse_RK * u_RK)  # a Newton step, for the last bits
        return u_RK


@triton.jit
def reciprocal(x_RK, SHARED: tl.constexpr):
    """Return 1/x by 1/a = b/(ab) and 1/b = a/(ab), applied SHARED times."""
    if SHARED == 0:
        root_RK = tl.rsqrt(x_RK)  # a division of floats is six instructions
        return root_RK * root_RK
    else:
        pairs = tl.reshape(x_RK, (x_RK.shape[0], x_RK.shape[1] // 2, 2))
        a, b = tl.split(pairs)
        shared = reciprocal(a * b, SHARED - 1)
        return tl.reshape(tl.join(b * shared, a * shared), x_RK.shape)
