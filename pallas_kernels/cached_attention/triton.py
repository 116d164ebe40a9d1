"""Flash decoding in Triton (Dao et al., "Flash-Decoding for long-context inference", 2023).

The queries and heads that share a key head are the rows of a tile, so each key is loaded once for
all of them. `PROGRAMS` programs share the keys: R parts of equal length cover the visible keys of
the longest sequence, and a shorter sequence has fewer parts. Each part stores its normalized output
and the log-sum-exp, in fp32. `sum_kernel` weights the parts by exp(log-sum-exp). A single part is
the result.

Shapes, in addition to those of the package: M rows and N keys of a tile, P the head dimension
padded to a power of two, R parts, A the batch padded to a power of two.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _triton
from pallas_kernels.row_softmax.triton import LOG2E, LOWEST

PROGRAMS = 528
"""Programs that fill the GPU: 4 on each of the 132 SMs of an H100."""
TILE_BYTES = 16384
"""Bytes of a tile of queries, keys or values."""
MOST_KEYS = 64
"""Keys of a tile: with 64 channels, 64 keys are 3 % faster than 128."""
SUM_CHANNELS = 64
"""Channels of a program of `sum_kernel`."""


def cached_attention(q_BTKGD, k_BSKD, v_BSKD, lengths_B, sinks_KG, *, scale, window, softcap):
    """Return O, shaped like q.

    Args:
        scale, window, softcap: numbers; softcap may be None.
    """
    (b, t, k, g, d), s = q_BTKGD.shape, k_BSKD.shape[1]
    p = max(16, triton.next_power_of_2(d))
    most = max(16, TILE_BYTES // (p * k_BSKD.dtype.itemsize))
    m, n = min(most, max(16, triton.next_power_of_2(t * g))), min(most, MOST_KEYS)
    tiles, most_keys = triton.cdiv(t * g, m), min(s, window + t - 1)
    r = max(1, min(PROGRAMS // (b * k * tiles), triton.cdiv(most_keys, n)))
    out_RBTKGD, lse_RBTKG = _triton.call(
        cached_attention_kernel,
        *(q_BTKGD, k_BSKD, v_BSKD, lengths_B, sinks_KG if r == 1 else None),
        out=[
            jax.ShapeDtypeStruct((r, *q_BTKGD.shape), q_BTKGD.dtype if r == 1 else jnp.float32),
            jax.ShapeDtypeStruct((r, *q_BTKGD.shape[:-1]), jnp.float32),
        ],
        grid=(b * k, r, tiles),
        **{"B": b, "T": t, "S": s, "K": k, "G": g, "D": d, "P": p, "M": m, "N": n, "R": r},
        **{"WINDOW": window, "A": triton.next_power_of_2(b), "SCALE": scale, "SOFTCAP": softcap},
        num_stages=2,
        # 10 % faster than with 8 warps, or with three stages. In fp32, four warps spill.
        num_warps=4 if k_BSKD.dtype.itemsize == 2 else 8,
    )
    if r == 1:
        return out_RBTKGD[0]
    rows, columns = b * t * k * g, min(p, SUM_CHANNELS)
    return _triton.call(
        sum_kernel,
        *(out_RBTKGD, lse_RBTKG, sinks_KG),
        out=[jax.ShapeDtypeStruct(q_BTKGD.shape, q_BTKGD.dtype)],
        grid=(rows, triton.cdiv(d, columns)),
        **{"ROWS": rows, "H": k * g, "D": d, "R": r, "A": triton.next_power_of_2(r), "C": columns},
        num_warps=4,
    )[0]


@triton.jit
def cached_attention_kernel(
    q_ptr, k_ptr, v_ptr, length_ptr, sinks_ptr, out_ptr, lse_ptr,
    B: tl.constexpr, T: tl.constexpr, S: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    A: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Store the output and the log₂-sum-exp of a part of the keys. Grid (B·K, R, ⌈T·G / M⌉).

    Without a key, the output is 0 and the log₂-sum-exp is LOWEST.
    """
    b, head = tl.program_id(0) // K, tl.program_id(0) % K
    sequence_A = tl.arange(0, A)
    length_A = tl.load(length_ptr + sequence_A, mask=sequence_A < B, other=0)
    length = tl.sum(tl.where(sequence_A == b, length_A, 0), 0)
    row_M = tl.program_id(2) * M + tl.arange(0, M)
    query_M, channel_P = row_M // G, tl.arange(0, P)
    index_M = ((tl.cast(b, tl.int64) * T + query_M) * K + head) * G + row_M % G
    inside_M, inside_P = row_M < T * G, channel_P < D
    inside_MP = inside_M[:, None] & inside_P[None, :]
    offset_MP = index_M[:, None] * D + channel_P[None, :]
    q_MP = tl.load(q_ptr + offset_MP, mask=inside_MP, other=0.0)

    first = tl.maximum(length - T - WINDOW + 1, 0)
    last = tl.minimum(length, S)
    most = tl.max(tl.minimum(length_A, S) - tl.maximum(length_A - T - WINDOW + 1, 0), 0)
    keys = tl.cdiv(tl.cdiv(most, R), N) * N
    start = first + tl.program_id(1) * keys
    stop = tl.minimum(start + keys, last)
    position_M = length - T + query_M
    k_ptr += (tl.cast(b, tl.int64) * S * K + head) * D
    v_ptr += (tl.cast(b, tl.int64) * S * K + head) * D
    highest_M = tl.full((M,), LOWEST, tl.float32)
    sum_M = tl.full((M,), 0.0, tl.float32)
    out_MP = tl.full((M, P), 0.0, tl.float32)
    for n0 in range(start, stop, N):
        key_N = n0 + tl.arange(0, N)
        offset_NP = tl.cast(key_N, tl.int64)[:, None] * (K * D) + channel_P[None, :]
        inside_NP = (key_N < stop)[:, None] & inside_P[None, :]
        k_NP = tl.load(k_ptr + offset_NP, mask=inside_NP, other=0.0)
        v_NP = tl.load(v_ptr + offset_NP, mask=inside_NP, other=0.0)
        score_MN = tl.dot(q_MP, tl.trans(k_NP), input_precision="tf32x3")
        if SOFTCAP is None:
            score_MN *= SCALE * LOG2E
        else:  # c·tanh(x/c) = c − 2c·σ(−2x/c)
            score_MN = 1 + tl.exp2(score_MN * (2 * SCALE / SOFTCAP * LOG2E))
            score_MN = SOFTCAP * LOG2E - (2 * SOFTCAP * LOG2E) / score_MN
        seen_MN = (key_N[None, :] <= position_M[:, None]) & (key_N < stop)[None, :]
        seen_MN = seen_MN & (key_N[None, :] > position_M[:, None] - WINDOW)
        score_MN = tl.where(seen_MN, score_MN, float("-inf"))
        next_M = tl.maximum(highest_M, tl.max(score_MN, 1))
        weight_MN = tl.exp2(score_MN - next_M[:, None])
        old_M = tl.exp2(highest_M - next_M)
        sum_M = sum_M * old_M + tl.sum(weight_MN, 1)
        out_MP = out_MP * old_M[:, None]
        out_MP = tl.dot(weight_MN.to(v_NP.dtype), v_NP, out_MP, input_precision="tf32x3")
        highest_M = next_M
    # The sum is at least 1 where a key was seen, and else 0.
    sum_M = tl.maximum(sum_M, 1.0)
    if sinks_ptr is not None:
        sink_M = tl.load(sinks_ptr + head * G + row_M % G).to(tl.float32)
        sum_M += tl.exp2(sink_M * LOG2E - highest_M)
    index_M += tl.cast(tl.program_id(1), tl.int64) * (B * T * K * G)
    tl.store(lse_ptr + index_M, highest_M + tl.log2(sum_M), mask=inside_M)
    offset_MP = index_M[:, None] * D + channel_P[None, :]
    out_MP = (out_MP / sum_M[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset_MP, out_MP, mask=inside_MP)


@triton.jit
def sum_kernel(
    part_ptr, lse_ptr, sinks_ptr, out_ptr,
    ROWS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, A: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Store the weighted sum of the R ≤ A parts of C channels of a row. Grid (ROWS, ⌈D / C⌉)."""
    STEP: tl.constexpr = 16
    row = tl.program_id(0)
    part_A = tl.arange(0, A)
    lse_A = tl.load(lse_ptr + part_A * ROWS + row, mask=part_A < R, other=float("-inf"))
    highest = tl.max(lse_A, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row % H).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    total = tl.sum(tl.exp2(lse_A - highest), 0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - highest)
    channel_C = tl.program_id(1) * C + tl.arange(0, C)
    out_SC = tl.full((STEP, C), 0.0, tl.float32)
    for first in range(0, R, STEP):
        part_S = first + tl.arange(0, STEP)
        lse_S = tl.load(lse_ptr + part_S * ROWS + row, mask=part_S < R, other=float("-inf"))
        offset_SC = (tl.cast(part_S, tl.int64) * ROWS + row)[:, None] * D + channel_C[None, :]
        inside_SC = (part_S < R)[:, None] & (channel_C < D)[None, :]
        part_SC = tl.load(part_ptr + offset_SC, mask=inside_SC, other=0.0)
        out_SC += tl.exp2(lse_S - highest)[:, None] * part_SC
    out_C = (tl.sum(out_SC, 0) / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.cast(row, tl.int64) * D + channel_C, out_C, mask=channel_C < D)
