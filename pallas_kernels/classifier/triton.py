"""Triton kernel of `fused_classifier`: one program per row.

A block is R·K columns, K of them in one thread.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _triton
from pallas_kernels.row_softmax.triton import LOG2E, LOWEST, block_columns, online, together

# Two programs of 32 warps fill an SM, and the rows stay in the L2 cache for the second read: 26 MB
# of an H200's 60. 16384×50304 bf16: 32 warps 98 % of the copy rate, 16 warps (four programs, 52 MB)
# 81 %, 8 warps 71 %; 32 warps without the eviction hints 83 %.
MOST_WARPS = 32
# A cap is limited by arithmetic and needs more registers than two programs of 32 warps have: 16
# warps 57 %, 32 warps 40 %.
MOST_WARPS_CAPPED = 16


def classify(logits_NV, targets_N, vocab_size, softcap, ignore_index):
    """Return losses_N and dlogits_NV; dlogits_NV overwrites the logits."""
    n, v = logits_NV.shape
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
    dlogits_NV, losses_N = _triton.call(
        classifier_kernel,
        logits_NV,
        targets_N,
        out=[jax.ShapeDtypeStruct((n,), jnp.float32)],
        grid=(n,),
        num_warps=warps,
        in_place=(0,),
        V=v,
        VOCAB=vocab_size,
        IGNORE=ignore_index,
        R=32 * warps,
        K=k,
        **cap,
    )
    return losses_N, dlogits_NV


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
    BLOCK: tl.constexpr = R * K
    FULL: tl.constexpr = VOCAB // BLOCK * BLOCK  # columns that need no mask
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * V
    target = tl.load(targets_ptr + row).to(tl.int32)
    column_RK = block_columns(R, K, V)

    # z = SCALE·u up to a constant: u is the logit, or a sigmoid of it.
    m_R = tl.full((R,), LOWEST, tl.float32)
    s_R = tl.full((R,), 0.0, tl.float32)
    # The partial block comes first in both passes: 98 % of the copy rate; last in both, 93 %.
    if FULL < VOCAB:
        # The mask is the end of the array, not of the vocabulary, to keep 16-byte loads.
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
    # The target is first used here, so no load of the row waits for it. `together` is a barrier:
    # no store precedes this load.
    known = (target >= 0) & (target < VOCAB)
    x_target = tl.load(logits_ptr + tl.where(known, target, 0)).to(tl.float32)
    m, s = together(m_R, s_R, SCALE * LOG2E)

    if WIDTH is None:
        u_target = x_target
    else:
        u_target = 1 / (1 + tl.exp2((x_target + SHIFT) * (-LOG2E / WIDTH)))
    log2_s = tl.where(known, tl.log2(s), float("nan"))
    loss = log2_s / LOG2E - SCALE * (u_target - m)

    ignored = False
    if IGNORE is not None:
        ignored = target == IGNORE
    if ignored:
        tl.store(losses_ptr + row, 0.0)
        for start in range(0, V, BLOCK):
            zero_RK = tl.full((R, K), 0.0, logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + start + column_RK, zero_RK, mask=start + column_RK < V)
    else:
        tl.store(losses_ptr + row, loss)
        for start in range(FULL, V, BLOCK):
            x_RK = tl.load(logits_ptr + start + column_RK, mask=start + column_RK < V).to(
                tl.float32
            )
            x_RK = tl.where(start + column_RK < VOCAB, x_RK, 0.0)
            d_RK = gradient(x_RK, column_RK, target - start, m, log2_s, BLOCK, SCALE, SHIFT, WIDTH)
            d_RK = tl.where(start + column_RK < VOCAB, d_RK, 0.0)
            tl.store(
                logits_ptr + start + column_RK,
                d_RK,
                mask=start + column_RK < V,
                eviction_policy="evict_first",
            )
        for start in range(0, FULL, BLOCK):
            x_RK = tl.load(logits_ptr + start + column_RK, eviction_policy="evict_first").to(
                tl.float32
            )
            d_RK = gradient(x_RK, column_RK, target - start, m, log2_s, BLOCK, SCALE, SHIFT, WIDTH)
            tl.store(logits_ptr + start + column_RK, d_RK, eviction_policy="evict_first")


@triton.jit
def gradient(
    x_RK,
    column_RK,
    target,
    m,
    log2_s,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return dx of a block; `column_RK` and `target` are relative to its start."""
    u_RK = squashed(x_RK, SHIFT, WIDTH)
    d_RK = tl.exp2((u_RK - m) * (SCALE * LOG2E) - log2_s)
    if (target >= 0) & (target < BLOCK):  # otherwise no comparison per element
        d_RK = tl.where(column_RK == target, d_RK - 1, d_RK)
    if WIDTH is not None:
        d_RK *= (u_RK - u_RK * u_RK) * (SCALE / WIDTH)
    return d_RK


@triton.jit
def squashed(x_RK, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Return σ((x + SHIFT) / WIDTH), or x without a cap.

    A capped pass is limited by special functions, not by memory, so four sigmoids share one
    reciprocal. The exponent is at most 30, so the product of four denominators is finite; a sigmoid
    is at least 1e-9.
    """
    if WIDTH is None:
        return x_RK
    else:
        exponent_RK = tl.minimum(
            (x_RK + SHIFT) * (-LOG2E / WIDTH), 30.0, propagate_nan=tl.PropagateNan.ALL
        )
        inverse_RK = 1 + tl.exp2(exponent_RK)
        u_RK = reciprocal(inverse_RK, 2)
        return u_RK + u_RK * (1 - inverse_RK * u_RK)  # a Newton step, for the last bits


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
