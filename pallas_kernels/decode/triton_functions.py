"""Device functions of the decoding kernels: exchange, weight tiles, norm, attention.

With one sequence the kernel has one program on each SM. A program stores its part of an activation
in the exchange, an int32 array in global memory. Every program that needs the activation polls all
values of the activation until no value is `ABSENT`. Each value is also the flag of its arrival: no
fence, counter or grid-wide barrier is needed.

The exchange contains fp32 bit patterns. The exchange has two halves: a launch uses one half and
clears the other half for the next launch. Each slot is written once in a launch. `ABSENT` is a NaN
that no arithmetic instruction of NVIDIA GPUs produces: these instructions produce 0x7fffffff.

The assembly that polls is in a `while` loop of one iteration. Outside a loop, Triton moves the
assembly to the threads that use the results, and all warps poll all values.

A program loads the weights of a phase before polling. The weights depend on no activation, so the
latency of the loads overlaps with the latency of the exchange.
"""

import triton
import triton.language as tl

from pallas_kernels.row_softmax.triton import LOG2E, add_pairs

ABSENT = tl.constexpr(-1)
# Row numbers up to 2²⁴ are exact in fp32.
MOST_PROGRAMS = tl.constexpr(256)
WARPS = 8
THREADS = tl.constexpr(32 * WARPS)
# Triton's interpreter runs no assembly, and one program: the values of the exchange are present.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def opaque(index):
    """Return `index` through inline assembly, which hides the value from the compiler.

    Otherwise, the compiler hoists the addresses of all phases out of the loop over the blocks, and
    spills registers.
    """
    if not INTERPRETED:
        index = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [index], dtype=tl.int32, is_pure=False, pack=1
        )
    return index


# ---------------------------------------------------------------------------------------- exchange


def _polling(pointers: int) -> str:
    """Return PTX that loads 16 bytes from each pointer except 0, until all values are present.

    Operands: word 0 of each pointer, word 1 of each pointer, …, the pointers.
    """
    words = [[f"${word * pointers + i}" for word in range(4)] for i in range(pointers)]
    lines = ["{", f".reg .pred %again, %active<{pointers}>;"]
    for i in range(pointers):
        lines += [f"mov.b32 {word}, 0;" for word in words[i]]
        lines += [f"setp.ne.u64 %active{i}, ${4 * pointers + i}, 0;"]
    lines += ["SPIN:"]
    for i in range(pointers):
        target = f"{{{', '.join(words[i])}}}"
        lines += [f"@%active{i} ld.relaxed.gpu.global.v4.b32 {target}, [${4 * pointers + i}];"]
    first, *others = [word for row in words for word in row]
    lines += [f"setp.eq.s32 %again, {first}, -1;"]
    lines += [f"setp.eq.or.s32 %again, {word}, -1, %again;" for word in others]
    return "\n".join([*lines, "@%again bra SPIN;", "}"])


# PTX, operands and results by the number of pointers, less 1.
POLL = tl.constexpr(tuple(_polling(pointers + 1) for pointers in range(4)))
OPERANDS = tl.constexpr(tuple(",".join(["=&r"] * 4 * n + ["l"] * n) for n in range(1, 5)))
RESULTS = tl.constexpr(tuple((tl.int32,) * 4 * n for n in range(1, 5)))


@triton.jit
def send(ptr, value, mask):
    """Store fp32 values in the exchange.

    In assembly, since `tl.store` would first move the values to other threads. All threads that
    hold a copy of a value store that value.
    """
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    if INTERPRETED:
        tl.store(ptr, bits, mask=mask)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred %active;
            setp.ne.u64 %active, $1, 0;
            @%active st.relaxed.gpu.global.b32 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=&r,l,r",
            [address(ptr, mask), bits],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def address(ptr, mask):
    """Return pointers as integers, with 0 where the mask is false."""
    return tl.where(mask, ptr.to(tl.int64), 0)


# Functions of this module represent a long vector as words: the tensors of values 0, 1, 2 and 3 of
# each chunk of 4 values.


@triton.jit
def load_vector(ptr, K: tl.constexpr, KP: tl.constexpr):
    """Return K parameters as fp32 words (KP / 4,), with zeros out of bounds."""
    chunk = tl.arange(0, KP // 4)
    words = ()
    for word in tl.static_range(4):
        x = tl.load(ptr + 4 * chunk + word, mask=chunk < K // 4, other=0)
        words = words + (x.to(tl.float32),)
    return words


@triton.jit
def cast(words, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """Convert words to another dtype; bitcast if BITS."""
    new = ()
    for word in tl.static_range(len(words)):
        new = new + (words[word].to(DTYPE, bitcast=BITS),)
    return new


@triton.jit
def join(words):
    """Return words (N,) as one vector (4·N,): words[0][0], words[1][0], words[2][0], …"""
    even, odd = tl.join(words[0], words[2]), tl.join(words[1], words[3])
    return tl.reshape(tl.join(even, odd), (4 * words[0].shape[0],))


@triton.jit
def poll(ptrs, inside, PACK: tl.constexpr):
    """Wait for the 4 values from each element of the pointers, a tuple of tensors. Return value 0
    of each pointer, value 1 of each pointer, …, in fp32. A thread polls PACK elements at once."""
    P: tl.constexpr = len(ptrs)
    words = ()
    if INTERPRETED:
        for i in tl.static_range(4 * P):
            words = words + (tl.load(ptrs[i % P] + i // P, mask=inside, other=0),)
    else:
        addresses = ()
        for i in tl.static_range(P):
            addresses = addresses + (address(ptrs[i], inside),)
        words = (tl.zeros(inside.shape, tl.int32),) * (4 * P)
        again = opaque(1)
        while again > 0:
            words = tl.inline_asm_elementwise(
                POLL[P * PACK - 1],
                OPERANDS[P * PACK - 1],
                addresses,
                dtype=RESULTS[P - 1],
                is_pure=False,
                pack=PACK,
            )
            again -= 1
    return cast(words, tl.float32, True)


@triton.jit
def receive(ptr, K: tl.constexpr, KP: tl.constexpr):
    """Wait for K values. Return the values as words (KP / 4,), with zeros out of bounds."""
    chunk = tl.arange(0, KP // 4)
    PACK: tl.constexpr = min(4, max(1, KP // 4 // THREADS))
    return poll((ptr + 4 * chunk,), chunk < K // 4, PACK)


@triton.jit
def embedding(
    token_ptr, position, wte_ptr, wpe_ptr, channel_C, inside_C, V: tl.constexpr, C: tl.constexpr
):
    """Return channels of a token's embedding, in fp32. An id out of bounds results in NaN."""
    token = tl.load(token_ptr).to(tl.int64)
    # A tensor: the interpreter has no conjunction of a tensor and a scalar.
    token_C = token + 0 * channel_C
    known_C = inside_C & (token_C >= 0) & (token_C < V)
    x_C = tl.load(wte_ptr + token * C + channel_C, mask=known_C, other=float("nan")).to(tl.float32)
    x_C += tl.load(wpe_ptr + position * C + channel_C, mask=inside_C, other=0.0).to(tl.float32)
    return x_C


# ------------------------------------------------------------------------------------------- tiles


@triton.jit
def prefetch(ptr, start, stop, MOST: tl.constexpr):
    """Prefetch elements start…stop − 1, at most MOST, to the L2 cache. Do not wait."""
    if not INTERPRETED:
        LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(MOST, LINE))
        # Excess lanes prefetch the last line again.
        line = tl.minimum(start + tl.arange(0, LINES) * LINE, stop - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [ptr + tl.maximum(line, 0)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch_strip(ptr, index, N: tl.constexpr, K: tl.constexpr, PROGRAMS: tl.constexpr):
    """`prefetch` of a program's strip of rows of weights (N, K)."""
    STRIP: tl.constexpr = triton.cdiv(N, PROGRAMS)
    start = index * STRIP * K
    prefetch(ptr, start, tl.minimum(start + STRIP * K, N * K), STRIP * K)


@triton.jit
def load_tiles(
    ptr, first, stop, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr, CK: tl.constexpr
):
    """Return rows first…stop − 1 of weights (N, K) as tiles (T, R, CK) of T·CK ≥ K columns.

    Elements out of bounds are zeros. If CK is 32 lanes' 16-byte loads, each warp has different
    rows, and a row's sum is within a warp. The tiles are loaded as matrices, since the compiler
    might distribute the axis T of a three-dimensional tensor over warps.
    """
    T: tl.constexpr = triton.next_power_of_2(K // CK)
    index_N = tl.arange(0, T * R)
    tile_N, row_N = index_N // R, first + index_N % R
    tiles = ()
    for i in tl.static_range(TILES):
        mask_N = row_N + i * R < stop
        if T > K // CK:
            mask_N = mask_N & (tile_N < K // CK)
        start_N = (row_N + i * R) * K + tile_N * CK
        w_NK = tl.load(
            ptr + start_N[:, None] + tl.arange(0, CK)[None, :], mask=mask_N[:, None], other=0.0
        )
        tiles = tiles + (tl.reshape(w_NK, (T, R, CK)),)
    return tiles


@triton.jit
def load_biases(ptr, first, stop, TILES: tl.constexpr, R: tl.constexpr):
    """Return elements first…stop − 1 of a bias in fp32 as tiles (R,)."""
    tiles = ()
    for i in tl.static_range(TILES):
        row_R = first + i * R + tl.arange(0, R)
        tiles = tiles + (tl.load(ptr + row_R, mask=row_R < stop, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def mean_and_rstd(sum_N, square_N, EPS: tl.constexpr, K: tl.constexpr):
    """Return the mean and 1 / √(variance + EPS) of K values, from partial sums of values and of
    squares. Both sums use one reduction over threads.

    The variance is E[x²] − E[x]². fp32 is precise enough if |mean| is at most some tens of standard
    deviations. The docstring of `decode_step` has measured errors.
    """
    total, squares = tl.reduce((sum_N, square_N), 0, add_pairs)
    mean = total / K
    return mean, tl.rsqrt(tl.maximum(squares / K - mean * mean, 0.0) + EPS)


@triton.jit
def layer_norm(x, scale, bias, EPS: tl.constexpr, K: tl.constexpr):
    """Return LayerNorm of K values as words. x, scale, bias and result are zeros out of bounds."""
    inside = tl.arange(0, x[0].shape[0]) < K // 4
    squares = x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]
    mean, rstd = mean_and_rstd(x[0] + x[1] + x[2] + x[3], squares, EPS, K)
    y = ()
    for i in tl.static_range(4):
        y = y + (tl.where(inside, x[i] - mean, 0.0) * rstd * scale[i] + bias[i],)
    return y


@triton.jit
def rounded(words, CK: tl.constexpr, DTYPE: tl.constexpr):
    """Convert words to a tensor (T, 1, CK) in DTYPE, which broadcasts over tiles of weights."""
    return tl.reshape(join(cast(words, DTYPE, False)), (4 * words[0].shape[0] // CK, 1, CK))


@triton.jit
def matvec(w_TRK, y_T1K):
    """Return W y (R,) in fp32."""
    # Sum over T first: this sum is within a thread.
    return tl.sum(tl.sum(w_TRK.to(tl.float32) * y_T1K.to(tl.float32), 0), 1)


@triton.jit
def gelu(x):
    """GELU in its tanh form: (1 + tanh(u)) / 2 is the logistic function of 2·u."""
    # 2·√(2/π)·log2(e)
    return x / (1 + tl.exp2(-2.302208198 * (x + 0.044715 * x * x * x)))


# --------------------------------------------------------------------------------------- attention


@triton.jit
def load_keys(ptr, key_S, position, C: tl.constexpr, D: tl.constexpr):
    """Load rows (S, D) of the cache of a head, with zeros from `position` on."""
    offset_SD = key_S[:, None] * C + tl.arange(0, D)[None, :]
    return tl.load(ptr + offset_SD, mask=(key_S < position)[:, None], other=0.0)


@triton.jit
def online_softmax(score_S, v_SD, max_S, sum_S, y_SD):
    """Add a tile of S keys to the attention. Each of the S rows of the tile has a separate maximum
    and separate sums, so a tile needs no communication between warps. The caller combines the S
    maxima and sums once, after the last tile."""
    new_S = tl.maximum(max_S, score_S)
    old_weight_S, weight_S = tl.exp2(max_S - new_S), tl.exp2(score_S - new_S)
    sum_S = sum_S * old_weight_S + weight_S
    y_SD = y_SD * old_weight_S[:, None] + weight_S[:, None] * v_SD.to(tl.float32)
    return new_S, sum_S, y_SD


@triton.jit
def add_keys(k_SD, v_SD, inside_S, q_D, highest, total, y_D):
    """Add the keys with `inside_S` to a softmax: highest score, sum of weights, weighted sum of
    values (D,). Return the three updated.

    q has the factor log2(e)/√D, so the weight of a key is exp2(score − highest).
    """
    score_S = tl.sum(k_SD.to(tl.float32) * q_D[None, :], 1)
    score_S = tl.where(inside_S, score_S, float("-inf"))
    next_highest = tl.maximum(tl.max(score_S, 0), highest)
    weight_S, scale = tl.exp2(score_S - next_highest), tl.exp2(highest - next_highest)
    total = total * scale + tl.sum(weight_S, 0)
    y_D = y_D * scale + tl.sum(weight_S[:, None] * v_SD.to(tl.float32), 0)
    return next_highest, total, y_D


@triton.jit
def attend(
    qkv_ptr, k_ptr, v_ptr, sent_ptr, head, position, C: tl.constexpr, D: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Compute a head's attention (D,) over the cached keys and the new key, and send the result.

    Receive q and the new k and v from the exchange, and store the new k and v in the cache. A tile
    has S keys.
    """
    k_ptr += head * D
    v_ptr += head * D
    key_S, channel_D = tl.arange(0, S), tl.arange(0, D)
    # The first tile is loaded before q arrives: earlier launches stored the keys before `position`.
    k_SD, v_SD = load_keys(k_ptr, key_S, position, C, D), load_keys(v_ptr, key_S, position, C, D)
    q_ptr = qkv_ptr + head * D + 4 * tl.arange(0, D // 4)
    inside = tl.arange(0, D // 4) < D
    words = poll((q_ptr, q_ptr + C, q_ptr + 2 * C), inside, 1)
    q_D, new_k_D, new_v_D = join(words[0::3]), join(words[1::3]), join(words[2::3])
    q_D *= LOG2E / D**0.5
    # A softmax over the new key alone: its score is the highest, and its weight is 1.
    softmax = tl.sum(q_D * new_k_D, 0), tl.full((), 1.0, tl.float32), new_v_D
    highest, total, y_D = add_keys(k_SD, v_SD, key_S < position, q_D, *softmax)
    for start in range(S, position, S):
        key_S = opaque(start) + tl.arange(0, S)
        k_SD = load_keys(k_ptr, key_S, position, C, D)
        v_SD = load_keys(v_ptr, key_S, position, C, D)
        highest, total, y_D = add_keys(k_SD, v_SD, key_S < position, q_D, highest, total, y_D)
    send(sent_ptr + head * D + channel_D, y_D / total, channel_D < D)
    tl.store(k_ptr + position * C + channel_D, new_k_D)
    tl.store(v_ptr + position * C + channel_D, new_v_D)
