"""Triton kernel of `sample_token`: one program a row, no sort.

The row is read once for each step of a bisection, from the L1 cache after the first time.
Thresholds are bisected over integer keys that order the floats of the dtype: 16 steps for 16 bits.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _dispatch, _triton

BLOCK = 2048
"""Logits of a tile, at most. Larger tiles spill registers on Hopper, and this one in bf16 on
sm_120, which has half of it."""
WARPS = 16
LOG2E = tl.constexpr(1.4426950408889634)


def sample_token(logits_BV, uniform_B, filters):
    """Return the tokens (B,) int32."""
    b, v = logits_BV.shape

    def scalar(value, default, dtype):
        return jnp.asarray(default if value is None else value, dtype).reshape(1)

    most = BLOCK // 2 if (_dispatch.capability() or (0, 0)) >= (12, 0) else BLOCK
    block = min(most, triton.next_power_of_2(v))
    (token_B,) = _triton.call(
        sample_kernel,
        logits_BV,
        uniform_B.astype(jnp.float32),
        scalar(filters.temperature, 1, jnp.float32),
        scalar(filters.top_k, v, jnp.int32),
        scalar(filters.top_p, 1, jnp.float32),
        out=[jax.ShapeDtypeStruct((b,), jnp.int32)],
        grid=(b,),
        num_warps=min(WARPS, max(1, block // 64)),
        V=v,
        B=b,
        BLOCK=block,
        BITS=8 * logits_BV.dtype.itemsize,
        DRAW=filters.temperature is not None,
        TOP_K=filters.top_k is not None,
        TOP_P=filters.top_p is not None,
    )
    return token_B


@triton.jit
def key_of(x, BITS: tl.constexpr):
    """Return the integer key of a float: a ≤ b where key(a) ≤ key(b)."""
    if BITS == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int64)
    else:
        bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits + (1 << (BITS - 1)), -1 - bits)


@triton.jit
def float_of(key, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """Return the float of a key, in fp32."""
    bits = tl.where(key >= (1 << (BITS - 1)), key - (1 << (BITS - 1)), -1 - key)
    if BITS == 16:
        return bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    else:
        return bits.to(tl.int32).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def load_block(row_ptr, start, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return logits (BLOCK,) in fp32, −∞ out of bounds, and their ids."""
    id_V = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + id_V, mask=id_V < V, other=float("-inf")).to(tl.float32), id_V


@triton.jit
def weigh(x_V, id_V, threshold, last, highest, scale, V: tl.constexpr):
    """Return the kept tokens' probabilities, up to a factor: above the threshold, or equal to it
    with an id of at most `last`."""
    keep_V = (id_V < V) & ((x_V > threshold) | ((x_V == threshold) & (id_V <= last)))
    return tl.where(keep_V, tl.exp2((x_V - highest) * scale), 0.0)


@triton.jit
def count_or_mass(
    row_ptr, low, threshold, last, highest, scale, MASS: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return how many logits are at least `low`, or the probability of those that are kept."""
    total_V = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x_V, id_V = load_block(row_ptr, start, V, BLOCK)
        if MASS:
            weight_V = weigh(x_V, id_V, threshold, last, highest, scale, V)
            total_V += tl.where(x_V >= low, weight_V, 0.0)
        else:
            total_V += ((x_V >= low) & (id_V < V)).to(tl.float32)
    return tl.sum(total_V, 0)


@triton.jit
def locate(
    row_ptr, target, threshold, last, highest, scale, TIES: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the least id up to which the weights sum to more than `target`.

    Weights are 1 for each logit equal to the threshold with TIES, else the kept probabilities. If
    rounding leaves no such id: the last one with a weight.
    """
    total, before, found = 0.0, 0.0, 0
    for start in range(0, V, BLOCK):
        x_V, id_V = load_block(row_ptr, start, V, BLOCK)
        if TIES:
            weight_V = ((x_V == threshold) & (id_V < V)).to(tl.float32)
        else:
            weight_V = weigh(x_V, id_V, threshold, last, highest, scale, V)
        weight = tl.sum(weight_V, 0)
        if (weight > 0) & (total <= target):
            found, before = start, total
        total += weight
    x_V, id_V = load_block(row_ptr, found, V, BLOCK)
    if TIES:
        weight_V = ((x_V == threshold) & (id_V < V)).to(tl.float32)
    else:
        weight_V = weigh(x_V, id_V, threshold, last, highest, scale, V)
    crossed_V = (weight_V > 0) & (before + tl.cumsum(weight_V, 0) > target)
    first = tl.min(tl.where(crossed_V, id_V, V), 0)
    return tl.where(first < V, first, tl.max(tl.where(weight_V > 0, id_V, 0), 0))


@triton.jit
def sample_kernel(
    logits_ptr,
    uniform_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    token_ptr,
    V: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    DRAW: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
):
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    row = tl.program_id(0)
    # With one row, or rows of a multiple of 16, loads are 16 bytes wide.
    row_ptr = logits_ptr
    if B > 1:
        row_ptr += row.to(tl.int64) * V
    highest_V = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_V = tl.arange(0, BLOCK)
    for start in range(0, V, BLOCK):
        x_V, id_V = load_block(row_ptr, start, V, BLOCK)
        best_V = tl.where(x_V > highest_V, id_V, best_V)
        highest_V = tl.maximum(highest_V, x_V)
    highest = tl.max(highest_V, 0)
    if DRAW:
        lowest_key = key_of(tl.full((), float("-inf"), DTYPE), BITS)
        highest_key = key_of(highest.to(DTYPE), BITS)
        scale = LOG2E / tl.load(temperature_ptr)
        threshold, last = highest * 0 + float("-inf"), V
        if TOP_K:
            k = tl.minimum(tl.load(top_k_ptr), V).to(tl.float32)
            # The k-th of the lanes' maxima is a lower bound of the k-th logit.
            low, high = lowest_key, highest_key + 1
            if k <= tl.minimum(BLOCK, V):
                while high - low > 1:
                    middle = (low + high) // 2
                    enough = (
                        tl.sum((highest_V >= float_of(middle, DTYPE, BITS)).to(tl.int32), 0) >= k
                    )
                    low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
            high = highest_key + 1
            while high - low > 1:
                middle = (low + high) // 2
                count = count_or_mass(
                    row_ptr, float_of(middle, DTYPE, BITS), 0.0, 0, highest, scale, False, V, BLOCK
                )
                low, high = tl.where(count >= k, middle, low), tl.where(count >= k, high, middle)
            threshold = float_of(low, DTYPE, BITS)
            above = count_or_mass(
                row_ptr, float_of(low + 1, DTYPE, BITS), 0.0, 0, highest, scale, False, V, BLOCK
            )
            above = tl.where(low == highest_key, 0.0, above)
            last = locate(row_ptr, k - above - 1, threshold, V, highest, scale, True, V, BLOCK)
        if TOP_P:
            floor, floor_last = threshold, last
            all_mass = count_or_mass(
                row_ptr, threshold, floor, floor_last, highest, scale, True, V, BLOCK
            )
            goal = tl.load(top_p_ptr) * all_mass
            low, high = key_of(threshold.to(DTYPE), BITS), highest_key + 1
            while high - low > 1:
                middle = (low + high) // 2
                mass = count_or_mass(
                    row_ptr, float_of(middle, DTYPE, BITS), floor, floor_last, highest, scale,
                    True, V, BLOCK,
                )  # fmt: skip
                low, high = (
                    tl.where(mass >= goal, middle, low),
                    tl.where(mass >= goal, high, middle),
                )
            threshold = float_of(low, DTYPE, BITS)
            above = count_or_mass(
                row_ptr, float_of(low + 1, DTYPE, BITS), floor, floor_last, highest, scale, True,
                V, BLOCK,
            )  # fmt: skip
            above = tl.where(low == highest_key, 0.0, above)
            each = tl.exp2((threshold - highest) * scale)
            ties = tl.maximum(tl.ceil((goal - above) / each), 1.0)
            last = locate(row_ptr, ties - 1, threshold, V, highest, scale, True, V, BLOCK)
            # Of a threshold that top-k has set, top-k has cut the ties, too.
            last = tl.where(threshold == floor, tl.minimum(last, floor_last), last)
        total = count_or_mass(
            row_ptr, float("-inf"), threshold, last, highest, scale, True, V, BLOCK
        )
        target = tl.load(uniform_ptr + row) * total
        token = locate(row_ptr, target, threshold, last, highest, scale, False, V, BLOCK)
    else:
        token = tl.min(tl.where(highest_V == highest, best_V, V), 0)
    tl.store(token_ptr + row, tl.minimum(token, V - 1))
