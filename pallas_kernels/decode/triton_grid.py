"""Device functions that the decoding kernels share: grid barrier, weight tiles, norm, attention.

A kernel has one program on each SM. The phases of a token are separated by a barrier of all
programs. Activations go from one phase to the next through global memory: they are loaded with
cache modifier ".cg", because the L1 caches of the SMs are not coherent.

A program loads its weights between `arrive` and `wait`: they depend on no activation, so their
latency overlaps with that of the barrier.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Below every score and above −∞: −∞ − LOWEST is −∞, and no lane computes ∞ − ∞.
LOWEST = tl.constexpr(-3.4028234663852886e38)


# ----------------------------------------------------------------------------------------- barrier


@triton.jit
def arrive(counter_ptr, PROGRAMS: tl.constexpr):
    """Publish what this program has stored. With one program, synchronise its threads only."""
    tl.debug_barrier()
    if PROGRAMS > 1:
        tl.inline_asm_elementwise(
            """{
            .reg .pred %first;
            .reg .u32 %thread;
            mov.u32 %thread, %tid.x;
            setp.eq.u32 %first, %thread, 0;
            @%first red.release.gpu.global.add.u32 [$1], 1;
            mov.u32 $0, 0;
            }""",
            "=r,l",
            [counter_ptr],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def wait(counter_ptr, target, PROGRAMS: tl.constexpr):
    """Wait until the programs have arrived `target` times in all. One thread polls."""
    if PROGRAMS > 1:
        tl.inline_asm_elementwise(
            """{
            .reg .pred %again;
            .reg .u32 %value;
            mov.u32 $0, 0;
            mov.u32 %value, %tid.x;
            setp.ne.u32 %again, %value, 0;
            @%again bra DONE;
            SPIN: ld.acquire.gpu.global.u32 %value, [$1];
            setp.lt.u32 %again, %value, $2;
            @%again bra SPIN;
            DONE:
            }""",
            "=r,l,r",
            [counter_ptr, target],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit
def reset(counter_ptr, PROGRAMS: tl.constexpr):
    """Zero both counters for the next launch. The last program does: no other one waits then."""
    if PROGRAMS > 1:
        tl.debug_barrier()
        before = tl.atomic_add(counter_ptr + 1, 1, sem="acq_rel", scope="gpu")
        if before == PROGRAMS - 1:
            tl.store(counter_ptr, 0)
            tl.store(counter_ptr + 1, 0)


# ------------------------------------------------------------------------------------------- tiles


@triton.jit
def opaque(index, PROGRAMS: tl.constexpr):
    """Return `index`, so that the compiler does not see the value.

    It would otherwise compute the addresses of all phases once, before the loop over the blocks,
    and keep more of them than there are registers.
    """
    if PROGRAMS > 1:
        index = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [index], dtype=tl.int32, is_pure=False, pack=1
        )
    return index


@triton.jit
def prefetch(ptr, start, stop, MOST: tl.constexpr, PROGRAMS: tl.constexpr):
    """Request elements start…stop − 1, at most MOST, for the L2 cache. Nothing waits for them."""
    if PROGRAMS > 1:
        LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(MOST, LINE))
        # Excess lanes request the last line again.
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
def prefetch_strip(
    ptr, index, N: tl.constexpr, K: tl.constexpr, STRIP: tl.constexpr, PROGRAMS: tl.constexpr
):
    """`prefetch` of a strip of rows of weights (N, K)."""
    start = index * STRIP * K
    prefetch(ptr, start, tl.minimum(start + STRIP * K, N * K), STRIP * K, PROGRAMS)


@triton.jit
def load_rows(ptr, row_N, inside_N, STRIDE: tl.constexpr, K: tl.constexpr, CK: tl.constexpr):
    """Return K columns of rows of weights as a tuple of tiles (N, CK); zeros where not inside."""
    tiles = ()
    for i in tl.static_range(K // CK):
        offset_NK = row_N[:, None] * STRIDE + (i * CK + tl.arange(0, CK))[None, :]
        tiles = tiles + (tl.load(ptr + offset_NK, mask=inside_N[:, None], other=0.0),)
    return tiles


@triton.jit
def load_fresh_rows(ptr, row_N, inside_N, STRIDE: tl.constexpr, K: tl.constexpr, CK: tl.constexpr):
    """`load_rows` of activations."""
    tiles = ()
    for i in tl.static_range(K // CK):
        offset_NK = row_N[:, None] * STRIDE + (i * CK + tl.arange(0, CK))[None, :]
        mask_N1 = inside_N[:, None]
        tile_NK = tl.load(ptr + offset_NK, mask=mask_N1, other=0.0, cache_modifier=".cg")
        tiles = tiles + (tile_NK,)
    return tiles


@triton.jit
def load_vector(ptr, K: tl.constexpr, CK: tl.constexpr):
    """Return K parameters as a tuple of tiles (CK,) in fp32."""
    tiles = ()
    for i in tl.static_range(K // CK):
        tiles = tiles + (tl.load(ptr + i * CK + tl.arange(0, CK)).to(tl.float32),)
    return tiles


@triton.jit
def load_fresh_vector(ptr, K: tl.constexpr, CK: tl.constexpr):
    """`load_vector` of activations."""
    tiles = ()
    for i in tl.static_range(K // CK):
        tile_K = tl.load(ptr + i * CK + tl.arange(0, CK), cache_modifier=".cg")
        tiles = tiles + (tile_K.to(tl.float32),)
    return tiles


@triton.jit
def store_vector(ptr, tiles, K: tl.constexpr, CK: tl.constexpr):
    for i in tl.static_range(K // CK):
        tl.store(ptr + i * CK + tl.arange(0, CK), tiles[i])


@triton.jit
def layer_norm(x, scale, bias, EPS: tl.constexpr, K: tl.constexpr, CK: tl.constexpr, DTYPE):
    """Return LayerNorm of a row, a tuple of tiles (CK,), rounded to DTYPE and held in fp32."""
    total_K = tl.zeros((CK,), tl.float32)
    for i in tl.static_range(K // CK):
        total_K += x[i]
    mean = tl.sum(total_K, 0) / K
    total_K = tl.zeros((CK,), tl.float32)
    for i in tl.static_range(K // CK):
        total_K += (x[i] - mean) * (x[i] - mean)
    rstd = tl.rsqrt(tl.sum(total_K, 0) / K + EPS)
    y = ()
    for i in tl.static_range(K // CK):
        y = y + (((x[i] - mean) * rstd * scale[i] + bias[i]).to(DTYPE).to(tl.float32),)
    return y


@triton.jit
def gelu(x):
    """GELU in its tanh form: (1 + tanh(u)) / 2 is the logistic function of 2·u."""
    # 2·√(2/π)·log2(e)
    return x / (1 + tl.exp2(-2.302208198 * (x + 0.044715 * x * x * x)))


# --------------------------------------------------------------------------------------- attention


@triton.jit
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    length,
    STRIDE: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    zero,
):
    """Return the attention (G, D) of one query over `length` keys, for G neighbouring heads.

    Each of the S keys of a tile has its own running maximum and sums, which are combined once at
    the end: an iteration needs no communication between warps.

    Args:
        zero: 0, of which the compiler sees no value.
    """
    channel_GD = tl.arange(0, G)[:, None] * D + tl.arange(0, D)[None, :]
    q_GD = tl.load(q_ptr + channel_GD, cache_modifier=".cg").to(tl.float32)
    q_GD *= LOG2E / D**0.5
    max_SG = tl.full((S, G), LOWEST, tl.float32)
    sum_SG = tl.zeros((S, G), tl.float32)
    y_SGD = tl.zeros((S, G, D), tl.float32)
    for start in range(zero, length, S):
        key_S = start + tl.arange(0, S)
        offset_SGD = key_S[:, None, None] * STRIDE + channel_GD[None, :, :]
        inside_S11 = (key_S < length)[:, None, None]
        k_SGD = tl.load(k_ptr + offset_SGD, mask=inside_S11, other=0.0, cache_modifier=".cg")
        v_SGD = tl.load(v_ptr + offset_SGD, mask=inside_S11, other=0.0, cache_modifier=".cg")
        score_SG = tl.sum(k_SGD.to(tl.float32) * q_GD[None, :, :], 2)
        score_SG = tl.where((key_S < length)[:, None], score_SG, float("-inf"))
        new_SG = tl.maximum(max_SG, score_SG)
        old_weight_SG, weight_SG = tl.exp2(max_SG - new_SG), tl.exp2(score_SG - new_SG)
        sum_SG = sum_SG * old_weight_SG + weight_SG
        y_SGD = y_SGD * old_weight_SG[:, :, None] + weight_SG[:, :, None] * v_SGD.to(tl.float32)
        max_SG = new_SG
    weight_SG = tl.exp2(max_SG - tl.max(max_SG, 0)[None, :])
    sum_G = tl.sum(sum_SG * weight_SG, 0)
    return tl.sum(y_SGD * weight_SG[:, :, None], 0) / sum_G[:, None]
