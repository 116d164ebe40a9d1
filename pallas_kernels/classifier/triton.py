"""Triton kernel of `fused_classifier`: one program per row."""

from typing import NamedTuple

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


class Row(NamedTuple):
    """Static description of a row, its loss and its gradient.

    z = SCALE·u up to a constant, where u is the logit or, with a cap, σ((x + SHIFT) / WIDTH).

    Attributes:
        V, VOCAB: columns with and without the padding.
        IGNORE: target that does not contribute, or None.
        R, K: a block is R·K columns, with K columns in one thread.
        M: number of targets of a row with weights, or None.
        SCALE, SHIFT, WIDTH: the cap; a WIDTH of None: no cap.
        FACTOR: factor of the stored gradient, or None.
        SMOOTHING, Z_LOSS: options of the loss. If one is not 0, the row has weights.
        LSE: whether the log-sum-exp of each row is stored behind the losses.
        OFFSET: SCALE·u − z.
    """

    V: int
    VOCAB: int
    IGNORE: int | None
    R: int
    K: int
    M: int | None
    SCALE: float
    SHIFT: float | None
    WIDTH: float | None
    FACTOR: float | None
    SMOOTHING: float
    Z_LOSS: float
    LSE: bool
    OFFSET: float


def classify(
    logits_NV, targets, weights_N, target_weights, *, vocab_size, softcap, ignore_index,
    label_smoothing, z_loss, return_lse, scale=None,
):  # fmt: skip
    """Return losses_N, dlogits_NV and lse_N or None; dlogits_NV overwrites the logits.

    Args:
        targets: (N,), or (N, M) with target_weights of shape (M,).
        weights_N: a weight of each row, or None.
        scale: None, or a factor of dlogits_NV, which is then a new array in float8_e5m2.
    """
    n, v = logits_NV.shape
    k = 16 // logits_NV.dtype.itemsize  # 16 bytes, the widest load
    warps = min(
        MOST_WARPS if softcap is None else MOST_WARPS_CAPPED,
        triton.next_power_of_2(triton.cdiv(v, 32 * k)),
    )
    offset = 0.0
    match softcap:
        case None:
            cap = 1.0, None, None
        case float(c):
            # tanh is a sigmoid: c·tanh(x/c) = 2c·σ(2x/c) − c. The −c does not change the softmax.
            cap, offset = (2 * c, 0.0, c / 2), c
        case _:
            cap = map(float, softcap)
    plain = weights_N is None and label_smoothing == z_loss == 0
    if not plain and target_weights is None:
        targets, target_weights = targets[:, None], jnp.ones(1, jnp.float32)
    losses = jax.ShapeDtypeStruct((2, n) if return_lse else (n,), jnp.float32)
    if scale is None:
        new, results = (None,), {"out": [losses], "in_place": (0,)}
    else:
        dlogits = jax.ShapeDtypeStruct((n, v), jnp.float8_e5m2)
        new, results = (), {"out": [dlogits, losses]}
    if not plain or scale is not None:
        results["max_registers"] = _most_registers(warps, v % k)
    m = None if target_weights is None else targets.shape[1]
    dlogits_NV, losses_N = _triton.call(
        classifier_kernel,
        logits_NV,
        aligned(targets, vocab_size, ignore_index),
        target_weights,
        weights_N,
        *new,
        **results,
        grid=(n,),
        num_warps=warps,
        ROW=Row(
            *(v, vocab_size, ignore_index, 32 * warps, k, m, *cap, scale),
            *(label_smoothing, z_loss, return_lse, offset),
        ),
    )
    losses_N, lse_N = losses_N if return_lse else (losses_N, None)
    return losses_N, dlogits_NV, lse_N


def _most_registers(warps, rest):
    """Return the limit of registers per thread of a kernel that stores FP8 or has options of the
    loss, or None for no limit.

    Triton 3.6 compiles such kernels without a cap to up to 46 registers, and an SM has registers
    for two programs of 32 warps only if a thread has at most 32. With the limit, FP8 kernels of
    Triton 3.6 and 3.9 do not spill if the row length is a multiple of the vector length, and those
    with options spill up to 32 bytes. 16,384×50,304 bf16 in FP8 on an H200: 0.81 ms, and 1.09 ms
    without the limit. Other GPUs with FP8 have at most 48 warps per SM, so one program.
    """
    major, _ = _dispatch.capability() or (0, 0)
    return 32 if rest == 0 and warps == 32 and major in (9, 10) else None


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
    logits_ptr, targets_ptr, weights_ptr, row_weights_ptr, out_ptr, losses_ptr, ROW: tl.constexpr
):
    """Store the loss of a row, and its gradient at out_ptr, or over the logits without out_ptr.

    Without weights_ptr, a row has one target of weight 1.
    """
    SCALE: tl.constexpr = ROW.SCALE
    row = tl.program_id(0)
    if out_ptr is None:
        out_ptr = logits_ptr
    logits_ptr += row.to(tl.int64) * ROW.V
    out_ptr += row.to(tl.int64) * ROW.V
    if weights_ptr is None:
        target = tl.load(targets_ptr + row)
    else:
        i_M = tl.arange(0, triton.next_power_of_2(ROW.M))
        inside_M = i_M < ROW.M
        target = tl.load(targets_ptr + row * ROW.M + i_M, mask=inside_M, other=0)
        weight_M = tl.load(weights_ptr + i_M, mask=inside_M, other=0.0)
        counted_M = inside_M if ROW.IGNORE is None else inside_M & (target != ROW.IGNORE)
        weight_M = tl.where(counted_M, weight_M, 0.0)
        if row_weights_ptr is not None:
            weight_M *= tl.load(row_weights_ptr + row)
    column_RK = block_columns(ROW.R, ROW.K, ROW.V)

    m_R, s_R, total_R = statistics(logits_ptr, column_RK, ROW)
    # The target is first used here, so no load of the row waits for it. `together` is a barrier:
    # no store precedes this load.
    known = (target >= 0) & (target < ROW.VOCAB)
    column = tl.where(known, target, 0)
    x_target = tl.load(logits_ptr + column).to(tl.float32)
    m, s = together(m_R, s_R, SCALE * LOG2E)
    lse = SCALE * m - ROW.OFFSET + tl.log2(s) / LOG2E
    if ROW.LSE:
        tl.store(losses_ptr + tl.num_programs(0) + row, lse)

    u_target = squashed_target(x_target, ROW)
    if weights_ptr is None:
        log2_s = tl.where(known, tl.log2(s), float("nan"))
        loss = log2_s / LOG2E - SCALE * (u_target - m)
        ignored = False if ROW.IGNORE is None else target == ROW.IGNORE
    else:
        unknown = tl.max((counted_M & (known == 0)).to(tl.int32), 0)
        log2_s = tl.where(unknown == 0, tl.log2(s), float("nan"))
        u_M = u_target
        if ROW.SMOOTHING != 0:
            mean = tl.sum(total_R, 0) / ROW.VOCAB
            u_M = (1 - ROW.SMOOTHING) * u_target + ROW.SMOOTHING * mean
        loss_M = log2_s / LOG2E - SCALE * (u_M - m)
        if ROW.Z_LOSS != 0:
            loss_M += ROW.Z_LOSS * lse * lse
        loss_M = tl.where(counted_M, weight_M * loss_M, 0.0)
        ignored = tl.max(counted_M.to(tl.int32), 0) == 0
    if ignored:
        tl.store(losses_ptr + row, 0.0)
        store_zeros(out_ptr, column_RK, ROW)
    elif weights_ptr is None:
        tl.store(losses_ptr + row, loss)
        store_gradient(logits_ptr, out_ptr, column_RK, target, None, None, m, log2_s, ROW)
    else:
        tl.store(losses_ptr + row, tl.sum(loss_M, 0))
        # First store all columns as if none were a target, then overwrite the targets' columns: the
        # time does not depend on the number of targets. Pairs (i, j) with target_i = target_j
        # share a column, and all such i store the same value.
        total = tl.sum(weight_M, 0)
        smooth = None if ROW.SMOOTHING == 0 else total * (ROW.SMOOTHING / ROW.VOCAB)
        if ROW.Z_LOSS != 0:
            total *= 1 + 2 * ROW.Z_LOSS * lse
        same_MM = column[:, None] == column[None, :]
        d_M = tl.exp2((u_target - m) * (SCALE * LOG2E) - log2_s) * total
        hit_M = tl.sum(tl.where(same_MM, weight_M[None, :], 0.0), 1)
        if ROW.SMOOTHING != 0:
            hit_M = hit_M * (1 - ROW.SMOOTHING) + smooth
        d_M -= hit_M
        if ROW.WIDTH is not None:
            d_M *= (u_target - u_target * u_target) * (SCALE / ROW.WIDTH)
        if ROW.FACTOR is not None:
            d_M *= ROW.FACTOR
        store_gradient(logits_ptr, out_ptr, column_RK, None, total, smooth, m, log2_s, ROW)
        tl.debug_barrier()
        tl.store(out_ptr + column, stored(d_M, out_ptr), mask=counted_M)


@triton.jit
def statistics(logits_ptr, column_RK, ROW: tl.constexpr):
    """Return the maximum of u, the sum of exp(SCALE·(u − maximum)), and with smoothing the sum of
    u, of each thread."""
    BLOCK: tl.constexpr = ROW.R * ROW.K
    FULL: tl.constexpr = ROW.VOCAB // BLOCK * BLOCK  # columns that need no mask
    RATE: tl.constexpr = ROW.SCALE * LOG2E
    m_R = tl.full((ROW.R,), LOWEST, tl.float32)
    s_R = tl.full((ROW.R,), 0.0, tl.float32)
    total_R = tl.full((ROW.R,), 0.0, tl.float32)
    # The partial block is first in both passes: 98 % of the copy rate. Last in both passes: 93 %.
    if FULL < ROW.VOCAB:
        # The mask ends at the end of the array, not of the vocabulary, to keep 16-byte loads.
        inside_RK = FULL + column_RK < ROW.V
        at_RK = logits_ptr + FULL + column_RK
        x_RK = tl.load(at_RK, mask=inside_RK, eviction_policy="evict_last").to(tl.float32)
        # Values of the padding must not reach other columns in `reciprocal`.
        real_RK = FULL + column_RK < ROW.VOCAB
        u_RK = squashed(tl.where(real_RK, x_RK, 0.0), ROW)
        m_R, s_R = online(m_R, s_R, tl.where(real_RK, u_RK, float("-inf")), RATE)
        if ROW.SMOOTHING != 0:
            total_R += tl.sum(tl.where(real_RK, u_RK, 0.0), 1)
    for start in range(0, FULL, BLOCK):
        x_RK = tl.load(logits_ptr + start + column_RK, eviction_policy="evict_last").to(tl.float32)
        u_RK = squashed(x_RK, ROW)
        m_R, s_R = online(m_R, s_R, u_RK, RATE)
        if ROW.SMOOTHING != 0:
            total_R += tl.sum(u_RK, 1)
    return m_R, s_R, total_R


@triton.jit
def store_zeros(out_ptr, column_RK, ROW: tl.constexpr):
    """Store the gradient of a row without a target."""
    for start in range(0, ROW.V, ROW.R * ROW.K):
        zero_RK = tl.full((ROW.R, ROW.K), 0.0, tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + start + column_RK, zero_RK, mask=start + column_RK < ROW.V)


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
    logits_ptr, out_ptr, column_RK, target, total, smooth, m, log2_s, ROW: tl.constexpr
):
    """Store the gradient of a row; `target`, `total` and `smooth` as in `gradient`."""
    BLOCK: tl.constexpr = ROW.R * ROW.K
    FULL: tl.constexpr = ROW.VOCAB // BLOCK * BLOCK
    # A gradient is NaN only if the row's sum or the weights are not finite. Then the row is NaN.
    mask = noise_mask(log2_s if total is None else log2_s + total)
    for start in range(FULL, ROW.V, BLOCK):
        inside_RK, real_RK = start + column_RK < ROW.V, start + column_RK < ROW.VOCAB
        x_RK = tl.load(logits_ptr + start + column_RK, mask=inside_RK).to(tl.float32)
        x_RK = tl.where(real_RK, x_RK, 0.0)
        d_RK = gradient(x_RK, column_RK, start, target, total, smooth, m, log2_s, ROW)
        d_RK = tl.where(real_RK, d_RK, 0.0)
        tl.store(
            out_ptr + start + column_RK,
            stored(d_RK, out_ptr, mask),
            mask=inside_RK,
            eviction_policy="evict_first",
        )
    for start in range(0, FULL, BLOCK):
        x_RK = tl.load(logits_ptr + start + column_RK, eviction_policy="evict_first").to(tl.float32)
        d_RK = gradient(x_RK, column_RK, start, target, total, smooth, m, log2_s, ROW)
        d_RK = stored(d_RK, out_ptr, mask)
        tl.store(out_ptr + start + column_RK, d_RK, eviction_policy="evict_first")


@triton.jit
def gradient(x_RK, column_RK, start, target, total, smooth, m, log2_s, ROW: tl.constexpr):
    """Return dx of the block of columns from `start` on, times FACTOR.

    `target` is the row's target. With None, no column is a target, and `total` is the factor of the
    softmax: the sum of the weights of the row's targets, with z-loss times 1 + 2·Z_LOSS·lse.
    `smooth` is the part of label smoothing that each column subtracts, or None.

    With FACTOR, the subtracted part of the exponent contains the maximum and, with a target, the
    slope, and u is not exact with a cap: two to five instructions less per column. Without a cap,
    the relative error is at most 2⁻²³ · max |logit|. Up to 4,000, rounding to fp16 has a larger
    error.
    """
    EXACT: tl.constexpr = ROW.FACTOR is None
    FACTOR: tl.constexpr = 1.0 if EXACT else ROW.FACTOR
    SLOPE: tl.constexpr = FACTOR if ROW.WIDTH is None else FACTOR * ROW.SCALE / ROW.WIDTH
    RATE: tl.constexpr = ROW.SCALE * LOG2E
    HIT: tl.constexpr = 1.0 if EXACT else SLOPE
    u_RK = squashed(x_RK, ROW, EXACT)
    if EXACT:
        d_RK = tl.exp2((u_RK - m) * RATE - log2_s)
    else:
        shift = m * RATE + log2_s
        if target is not None:
            shift -= tl.log2(tl.full((), SLOPE, tl.float32))
        d_RK = tl.exp2(u_RK * RATE - shift)
    if target is not None:
        target -= start
        if (target >= 0) & (target < ROW.R * ROW.K):  # other blocks need no comparison per element
            d_RK = tl.where(column_RK == target, d_RK - HIT, d_RK)
    if smooth is not None:
        d_RK = d_RK * total - smooth
        total = 1.0
    if ROW.WIDTH is not None:
        slope_RK = u_RK - u_RK * u_RK
        if total is not None:
            slope_RK *= SLOPE * total
        elif EXACT:
            slope_RK *= SLOPE
        d_RK *= slope_RK
    elif total is not None:
        d_RK *= SLOPE * total
    return d_RK


@triton.jit
def squashed_target(x, ROW: tl.constexpr):
    """Return σ((x + SHIFT) / WIDTH), or x without a cap, of a few values."""
    if ROW.WIDTH is None:
        return x
    else:
        return 1 / (1 + tl.exp2((x + ROW.SHIFT) * (-LOG2E / ROW.WIDTH)))


@triton.jit
def squashed(x_RK, ROW: tl.constexpr, EXACT: tl.constexpr = True):
    """Return σ((x + SHIFT) / WIDTH), or x without a cap.

    A capped pass is limited by special functions, not by memory, so four sigmoids share one
    reciprocal. The exponent is at most 30, so the product of four denominators is finite; a sigmoid
    is at least 1e-9.

    Args:
        EXACT: False permits a relative error of 2⁻²¹ and saves two instructions. For c·tanh(x/c)
            with c = 30, the relative error of exp(z) is then up to 3e-5; that of fp16 is 5e-4.
    """
    if ROW.WIDTH is None:
        return x_RK
    else:
        exponent_RK = tl.minimum(
            # One instruction. (x + SHIFT) · factor is two.
            x_RK * (-LOG2E / ROW.WIDTH) + ROW.SHIFT * (-LOG2E / ROW.WIDTH),
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
