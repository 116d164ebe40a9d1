"""Triton kernel of `sample_token`: one program per row, no sort.

The row is loaded in a few wide tiles. A lane's maximum is the maximum over all tiles. For top-k, a
bound that at least k lane maxima reach is a lower bound of the k-th logit. The logits of at least
this bound, usually few more than k, are candidates. Up to 128 candidates are compared pairwise. The
ids of more candidates are stored in ascending order, in global memory, to search the thresholds.

Thresholds are bisected over integer keys that order the floats of the dtype: at most 16 steps for
16 bits. A step reads the candidates' logits, or without top-k the whole row, from the L1 cache.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _triton
from pallas_kernels.row_softmax.triton import LOG2E, add_pairs

BLOCK = 8192
"""Largest number of logits of a tile of the first pass."""
KEPT_BLOCK = 1024
"""Largest number of logits of a tile of later passes with top-k."""
ROW_BLOCK = 4096
"""Largest number of logits of a tile of later passes without top-k."""
FEW = 128
"""Largest number of candidates of top-k that are compared pairwise."""
ELEMENTS = 16
"""Logits per thread in a tile of the first pass."""


def sample_token(logits_BV, uniform_B, temperature, top_k, top_p):
    """Return the tokens (B,) int32. The last three arguments are scalars or None."""
    b, v = logits_BV.shape

    def scalar(value, dtype):
        return None if value is None else jnp.asarray(value, dtype).reshape(1)

    block, kept = min(BLOCK, triton.next_power_of_2(v)), 1 if top_k is None else max(v, 2 * FEW)
    token_B, _ = _triton.call(
        sample_kernel,
        logits_BV,
        uniform_B.astype(jnp.float32),
        scalar(temperature, jnp.float32),
        scalar(top_k, jnp.int32),
        scalar(top_p, jnp.float32),
        out=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((b,), (b, kept))],
        grid=(b,),
        num_warps=max(1, block // (32 * ELEMENTS)),
        V=v,
        B=b,
        BLOCK=block,
        KEPT_BLOCK=min(ROW_BLOCK if top_k is None else KEPT_BLOCK, block),
        KEPT=kept,
        FEW=FEW,
        # A row starts up to 7 elements before its tiles.
        TILES=triton.next_power_of_2(triton.cdiv(v + 7, block)),
    )
    return token_B


@triton.jit
def key_of(x):
    """Return the integer key of a float: a ≤ b if and only if key(a) ≤ key(b)."""
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    bits = x.to(tl.int16 if BITS == 16 else tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits + (1 << (BITS - 1)), -1 - bits)


@triton.jit
def float_of(key, DTYPE: tl.constexpr):
    """Return the float of a key, in fp32."""
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    bits = tl.where(key >= (1 << (BITS - 1)), key - (1 << (BITS - 1)), -1 - key)
    bits = bits.to(tl.int16 if BITS == 16 else tl.int32)
    return bits.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def weight_of(x, keep, highest, scale):
    """Return the probabilities of kept logits, up to a factor, and 0 for others and for −∞."""
    # With an infinite temperature `scale` is 0, and an infinite difference would become NaN.
    weight = tl.exp2(tl.maximum(x - highest, -3.4e38) * scale)
    return tl.where(keep & (x > float("-inf")), weight, 0.0)


# -------------------------------------------------------------------------------------- first pass


@triton.jit
def load_tile(aligned_ptr, shift, start, FULL: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Load a tile of the row. The row starts `shift` elements after an aligned address.

    With FULL, all of the tile is in the array, and loads are 16 bytes wide.

    Returns:
        Logits (BLOCK,) in fp32, −∞ out of the row, their ids, and whether they are in the row.
    """
    id_V = start - shift + tl.arange(0, BLOCK)
    inside_V = (id_V >= 0) & (id_V < V)
    tile_ptr = aligned_ptr + start + tl.arange(0, BLOCK)
    if FULL:
        x_V = tl.load(tile_ptr)
    else:
        x_V = tl.load(tile_ptr, mask=inside_V, other=float("-inf"))
    return tl.where(inside_V, x_V.to(tl.float32), float("-inf")), id_V, inside_V


@triton.jit
def lower_bound(highest_V, highest_key, k, few, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Return a lower bound of the k-th logit, and the number of lane maxima that reach the bound.

    At least k lane maxima reach the bound. The bisection ends when at most `few` do, or when the
    bound is the k-th largest lane maximum.
    """
    bound = tl.full((), float("-inf"), tl.float32)
    lanes = tl.full((), BLOCK, tl.int32)
    if k <= BLOCK:
        low, high = key_of(tl.min(highest_V, 0).to(DTYPE)), highest_key + 1
        while (high - low > 1) & (lanes > few):
            # Test thirds of the keys, and fractions of the values: fewer steps for usual logits.
            third = tl.maximum((high - low) // 3, 1)
            low_x, high_x = float_of(low, DTYPE), float_of(high - 1, DTYPE)
            c = key_of((0.5 * low_x + 0.5 * high_x).to(DTYPE))
            d = key_of((0.25 * low_x + 0.75 * high_x).to(DTYPE))
            c = tl.minimum(tl.maximum(c, low + 1), high - 1)
            d = tl.minimum(tl.maximum(d, low + 1), high - 1)
            middles, over = (low + third, high - third, c, d), ()
            for i in tl.static_range(4):
                over = over + ((highest_V >= float_of(middles[i], DTYPE)).to(tl.int32),)
            # Each sum packs two counts of 16 bits.
            counts = tl.reduce(
                (over[0] + (over[1] << 16), over[2] + (over[3] << 16)), 0, add_pairs
            )  # fmt: skip
            for i in tl.static_range(4):
                count = counts[i // 2] & 65535 if i % 2 == 0 else counts[i // 2] >> 16
                enough = count >= k
                lanes = tl.where(enough & (middles[i] > low), count, lanes)
                low = tl.where(enough, tl.maximum(low, middles[i]), low)
                high = tl.where(enough, high, tl.minimum(high, middles[i]))
        bound = float_of(low, DTYPE)
    return bound, lanes


@triton.jit
def append(list_ptr, id_N, keep_N, MOST: tl.constexpr):
    """Append the kept ids to a list, at most MOST unless None. Return the number of kept ids."""
    rank_N = tl.cumsum(keep_N.to(tl.int32), 0)
    inside_N = keep_N if MOST is None else keep_N & (rank_N <= MOST)
    tl.store(list_ptr + rank_N - 1, id_N, mask=inside_N)
    return tl.max(rank_N, 0)


@triton.jit
def list_candidates(
    row_ptr, list_ptr, highest_V, bound, shift, LANES: tl.constexpr, TILES: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the ids of logits of at least `bound`, in any order; return their number.

    At most LANES lanes have a maximum of at least `bound`: only these lanes are read again. The
    list is truncated after LANES logits.
    """
    lanes = append(list_ptr, tl.arange(0, BLOCK), highest_V >= bound, LANES)
    tl.debug_barrier()
    index = tl.arange(0, LANES * TILES)
    inside = index // TILES < lanes
    lane = tl.load(list_ptr + index // TILES, mask=inside, other=0)
    id_N = index % TILES * BLOCK + lane - shift
    inside = inside & (id_N >= 0) & (id_N < V)
    x_N = tl.load(row_ptr + id_N, mask=inside, other=float("-inf")).to(tl.float32)
    n = append(list_ptr + LANES, id_N, inside & (x_N >= bound), LANES)
    tl.debug_barrier()
    return n


@triton.jit
def draw_from_list(
    row_ptr, list_ptr, n, k, top_p_ptr, uniform, highest, scale, V: tl.constexpr, FEW: tl.constexpr
):
    """Return the token drawn from n ≤ FEW candidates, which include the k likeliest tokens. The
    candidates are compared pairwise."""
    slot_F = tl.arange(0, FEW)
    id_F = tl.load(list_ptr + slot_F, mask=slot_F < n, other=V)
    x_F = tl.load(row_ptr + id_F, mask=slot_F < n, other=float("-inf")).to(tl.float32)
    x_F1, x_1F, id_F1, id_1F = x_F[:, None], x_F[None, :], id_F[:, None], id_F[None, :]
    likelier_FF = (x_1F > x_F1) | ((x_1F == x_F1) & (id_1F < id_F1))
    rank_F = tl.sum(likelier_FF.to(tl.int32), 1)
    keep_F = (slot_F < n) & (rank_F < k)
    weight_F = weight_of(x_F, keep_F, highest, scale)
    if top_p_ptr is not None:
        likelier_F = tl.sum(tl.where(likelier_FF, weight_F[None, :], 0.0), 1)
        goal = tl.load(top_p_ptr) * tl.sum(weight_F, 0)
        weight_F = tl.where((likelier_F < goal) | (rank_F == 0), weight_F, 0.0)
    sum_F = tl.sum(tl.where(id_1F <= id_F1, weight_F[None, :], 0.0), 1)
    crossed_F = (weight_F > 0) & (sum_F > uniform * tl.sum(weight_F, 0))
    first = tl.min(tl.where(crossed_F, id_F, V), 0)
    return tl.where(first < V, first, tl.max(tl.where(weight_F > 0, id_F, 0), 0))


@triton.jit
def keep_from(
    aligned_ptr, shift, kept_ptr, bound, V: tl.constexpr, BLOCK: tl.constexpr, STOP: tl.constexpr
):
    """Store the ids of logits of at least `bound` in ascending order; return their number."""
    FULL: tl.constexpr = V // BLOCK * BLOCK
    kept = 0
    # Not unrolled: an unrolled loop keeps the row in registers from the first pass on, and spills.
    for start in range(0, FULL, BLOCK):
        x_V, id_V, inside_V = load_tile(aligned_ptr, shift, start, True, V, BLOCK)
        kept += append(kept_ptr + kept, id_V, inside_V & (x_V >= bound), None)
    # Two tiles where the row starts late in the first one.
    for start in tl.static_range(FULL, STOP, BLOCK):
        x_V, id_V, inside_V = load_tile(aligned_ptr, shift, start, False, V, BLOCK)
        kept += append(kept_ptr + kept, id_V, inside_V & (x_V >= bound), None)
    tl.debug_barrier()
    return kept


# ------------------------------------------------------------------------------------ later passes


@triton.jit
def load_weights(row, start, low, high, keep, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return weights (BLOCK,) of logits in [low, high], 0 for other logits, and ids, V out of
    bounds.

    Args:
        row: the row, the list of candidates' ids or None, and the number of candidates.
        keep: None: weights are 1. Or (threshold, last, highest, scale): weights are probabilities,
            up to a factor, of logits above the threshold, or equal with an id of at most `last`.
    """
    row_ptr, kept_ptr, kept = row
    id_V = start + tl.arange(0, BLOCK)
    inside_V = id_V < kept
    if kept_ptr is not None:
        id_V = tl.load(kept_ptr + id_V, mask=inside_V, other=V)
    x_V = tl.load(row_ptr + id_V, mask=inside_V, other=float("-inf")).to(tl.float32)
    inside_V = inside_V & (x_V >= low) & (x_V <= high)
    if keep is None:
        return inside_V.to(tl.float32), id_V
    else:
        threshold, last, highest, scale = keep
        inside_V = inside_V & ((x_V > threshold) | ((x_V == threshold) & (id_V <= last)))
        return weight_of(x_V, inside_V, highest, scale), id_V


@triton.jit
def weight_from(row, low, keep, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of the weights of logits of at least `low`."""
    total_V = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, row[2], BLOCK):
        weight_V, _ = load_weights(row, start, low, float("inf"), keep, V, BLOCK)
        total_V += weight_V
    return tl.sum(total_V, 0)


@triton.jit
def bisect(row, low, high, goal, keep, DTYPE: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return the highest logit from which on the weights sum to at least `goal`, and the sum above
    that logit. Search the keys low…high − 1."""
    above = 0.0
    while high - low > 1:
        middle = (low + high) // 2
        weight = weight_from(row, float_of(middle, DTYPE), keep, V, BLOCK)
        enough = weight >= goal
        above = tl.where(enough, above, weight)
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return float_of(low, DTYPE), above


@triton.jit
def locate(row, target, low, high, keep, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return the least id up to which the weights of logits in [low, high] sum to more than
    `target`. If rounding leaves no such id, return the last id with a weight."""
    total, before, found = 0.0, 0.0, 0
    if row[2] > BLOCK:
        for start in range(0, row[2], BLOCK):
            weight_V, _ = load_weights(row, start, low, high, keep, V, BLOCK)
            weight = tl.sum(weight_V, 0)
            if (weight > 0) & (total <= target):
                found, before = start, total
            total += weight
    weight_V, id_V = load_weights(row, found, low, high, keep, V, BLOCK)
    crossed_V = (weight_V > 0) & (before + tl.cumsum(weight_V, 0) > target)
    first = tl.min(tl.where(crossed_V, id_V, V), 0)
    return tl.where(first < V, first, tl.max(tl.where(weight_V > 0, id_V, 0), 0))


@triton.jit
def draw_by_bisection(
    row_ptr, aligned_ptr, shift, kept_ptr, bound, k, top_k_ptr, top_p_ptr, uniform, highest, scale,
    V: tl.constexpr, STOP: tl.constexpr, BLOCK: tl.constexpr, KEPT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the token drawn from any number of candidates, with bisected thresholds.

    Args:
        bound: lower bound of the k-th logit.
    """
    DTYPE: tl.constexpr = row_ptr.dtype.element_ty
    stop = key_of(highest.to(DTYPE)) + 1
    lowest, last, row = highest * 0 + float("-inf"), V, (row_ptr, None, V)
    threshold = lowest
    if top_k_ptr is not None:
        row = (
            row_ptr, kept_ptr, keep_from(aligned_ptr, shift, kept_ptr, bound, V, BLOCK, STOP)
        )  # fmt: skip
        start = key_of(bound.to(DTYPE))
        threshold, above = bisect(row, start, stop, k, None, DTYPE, V, KEPT_BLOCK)
        last = locate(row, k - above - 1, threshold, threshold, None, V, KEPT_BLOCK)
    if top_p_ptr is not None:
        floor, floor_last, keep = threshold, last, (threshold, last, highest, scale)
        goal = tl.load(top_p_ptr) * weight_from(row, threshold, keep, V, KEPT_BLOCK)
        start = key_of(threshold.to(DTYPE))
        threshold, above = bisect(row, start, stop, goal, keep, DTYPE, V, KEPT_BLOCK)
        each = tl.exp2((threshold - highest) * scale)
        ties = tl.maximum(tl.ceil((goal - above) / each), 1.0)
        last = locate(row, ties - 1, threshold, threshold, None, V, KEPT_BLOCK)
        # If top-k has set this threshold, top-k has also restricted the equal logits.
        last = tl.where(threshold == floor, tl.minimum(last, floor_last), last)
    keep = threshold, last, highest, scale
    target = uniform * weight_from(row, lowest, keep, V, KEPT_BLOCK)
    return locate(row, target, lowest, float("inf"), keep, V, KEPT_BLOCK)


@triton.jit
def sample_kernel(
    logits_ptr, uniform_ptr, temperature_ptr, top_k_ptr, top_p_ptr, token_ptr, kept_ptr,
    V: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, KEPT_BLOCK: tl.constexpr,
    KEPT: tl.constexpr, FEW: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    # Number of logits in 16 bytes. A row starts at any offset, except the only row of an array.
    CHUNK: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    STOP: tl.constexpr = V if V % CHUNK == 0 or B == 1 else V + CHUNK - 1
    row = tl.program_id(0)
    if B == 1:
        row_ptr, aligned_ptr, shift = logits_ptr, logits_ptr, 0
    else:
        first = row.to(tl.int64) * V
        row_ptr, aligned_ptr = logits_ptr + first, logits_ptr + first // CHUNK * CHUNK
        shift = (first % CHUNK).to(tl.int32)
    highest_V = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_V = tl.arange(0, BLOCK)
    for start in tl.static_range(0, STOP, BLOCK):
        x_V, id_V, _ = load_tile(aligned_ptr, shift, start, start + BLOCK <= V, V, BLOCK)
        best_V = tl.where(x_V > highest_V, id_V, best_V)
        highest_V = tl.maximum(highest_V, x_V)
    highest = tl.max(highest_V, 0)
    if temperature_ptr is not None:
        highest_key = key_of(highest.to(DTYPE))
        scale = LOG2E / tl.load(temperature_ptr)
        uniform = tl.load(uniform_ptr + row)
        kept_ptr += row.to(tl.int64) * KEPT
        k, bound, n = V, highest * 0 + float("-inf"), 0
        if top_k_ptr is not None:
            k = tl.minimum(tl.load(top_k_ptr), V)
            bound, lanes = lower_bound(highest_V, highest_key, k, FEW // 8 * 7, DTYPE, BLOCK)
            if lanes <= FEW:
                n = list_candidates(
                    row_ptr, kept_ptr, highest_V, bound, shift, FEW, TILES, V, BLOCK
                )
        if (n > 0) & (n <= FEW):
            token = draw_from_list(
                row_ptr, kept_ptr + FEW, n, k, top_p_ptr, uniform, highest, scale, V, FEW
            )
        else:
            token = draw_by_bisection(
                row_ptr, aligned_ptr, shift, kept_ptr, bound, k, top_k_ptr, top_p_ptr, uniform,
                highest, scale, V, STOP, BLOCK, KEPT_BLOCK,
            )  # fmt: skip
    else:
        token = tl.min(tl.where(highest_V == highest, best_V, V), 0)
    tl.store(token_ptr + row, tl.minimum(token, V - 1))
