"""Flash attention for NVIDIA GPUs from Ampere on: any length, head dimensions up to 128, segment
ids, fp32 as TF32 or as it is.

The forward pass takes a block of queries over its keys, with the softmax's maximum and sum kept up
to date on the way. Backward has two forms. "split": one kernel takes a block of keys over the
queries that see it and makes dK and dV, another a block of queries over its keys and makes dQ;
seven products, everything written once, so two runs are equal bit for bit. "fused": the first
kernel makes dQ's parts as well and adds them into an fp32 array in whatever order they come, and a
small one converts that; five products. Blocks that no query sees are not read, and only those are
masked in which some query does not see some key.

For TF32, rounded copies of q, k, v and dO are made first, "straight" (B·T·H·D) and "turned"
(B·H·D·T′): triton_tf32.py says why, and has what only TF32 needs.

fp32 with all its bits is multiplied on the plain cores ("ieee"), or, where the registers suffice,
by Triton's "tf32x3": each operand is split into TF32 numbers, a = a₁ + a₂, and a₁b₁ + a₁b₂ + a₂b₁
leaves out 2⁻²² of a product. PyTorch's fp32 attention does the same.

Shapes, beside those of the package: M queries and N keys of a block, P the head dimension padded to
16, 32, 64 or 128, R rows of either kind, T′ the length padded to whole blocks.

triton_tiles.json holds the shapes of the blocks: {compute capability: {"shared_kb": shared memory
that one program can have there, "16" (bf16, fp16) | "tf32" | "fp32": {the largest P that it is for:
{"backward": "split" | "fused", in "fp32" "products": "ieee" | "tf32x3", "forward" | "dkv" | "dq" |
"fused": {"M", "N", "rows", "num_warps", "num_stages"}}}}}. Heads of so many rows at most run side
by side, so that what they read stays in the L2 cache while their blocks, the longest first, go
through it.
"""

import functools
import importlib.resources
import json
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _dispatch, _triton
from pallas_kernels.attention.triton_passes import delta
from pallas_kernels.attention.triton_rows import (
    LOG2E,
    load_each,
    load_rows,
    offsets,
    padded,
    store_rows,
)
from pallas_kernels.attention.triton_tf32 import (
    evens_first,
    load_turned,
    operand,
    rounded,
    tf32_copies,
    tf32_copies_of_dout,
    turned,
)

# Below every fp32 and above −∞, so that −∞ − LOWEST is −∞: a row that has seen no key yet needs no
# guard against ∞ − ∞.
LOWEST = tl.constexpr(-3.4028234663852886e38)

# KB of shared memory that one block can have; 99 on every other GPU.
SHARED_KB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
PASSES = ("forward", "dkv", "dq", "fused")
TILE = ("M", "N", "rows", "num_warps", "num_stages")


def forward(operands, segments_BT, *, causal, scale, window, deterministic, true_fp32, tiles=None):
    """Output and log-sum-exp.

    Args:
        operands: (q_BTHD, k_BTKD, v_BTKD), or (qkv_BT3HD,).
        segments_BT: integers, or None.
        window: how many keys a causal query sees, or None.
        deterministic: without meaning here.
        true_fp32: multiply fp32 with all its bits, not as TF32.
        tiles: what triton_tiles.json has for a P, in place of that; a "forward" is enough.

    Returns:
        (out_BTHD in the operands' dtype, lse_BHT in fp32)
    """
    tiles = tiles or tuning(*_tuned_by(operands, true_fp32))
    shape = _shape(operands, segments_BT, causal, scale, window, true_fp32, tiles)
    tile = tiles["forward"]
    b, t, h, d = shape["BATCH"], shape["T"], shape["H"], shape["D"]
    q, k, v, segments = _inputs(operands, segments_BT)
    if shape["PRECISION"] == "tf32":
        (_, k, _), (_, _, v) = tf32_copies(q, k, v, shape, straight="k", turned={"v": tile["N"]})
        shape |= {"KV_ROW": shape["K"] * d, "K_AT": 0}
    return _triton.call(
        forward_kernel,
        *(q, k, v, segments),
        out=[
            jax.ShapeDtypeStruct((b, t, h, d), operands[0].dtype),
            jax.ShapeDtypeStruct((b, h, t), jnp.float32),
        ],
        grid=(triton.cdiv(t, tile["M"]) * b * h,),
        **shape,
        **_launched(tile, t, b * h),
    )


def backward(
    operands,
    segments_BT,
    lse_BHT,
    dout_BTHD,
    out_BTHD,
    dlse_BHT,
    *,
    causal,
    scale,
    window,
    deterministic,
    true_fp32,
    tiles=None,
):
    """Gradients of the operands, as a tuple like them.

    Args:
        operands, segments_BT, causal, scale, window, true_fp32: as of `forward`.
        out_BTHD, lse_BHT: as `forward` returns them.
        dout_BTHD: gradient of the output, in its dtype.
        dlse_BHT: gradient of the log-sum-exp, or None.
        deterministic: make the split form, whatever the tiles say.
        tiles: as of `forward`; "backward" and the kernels of that form are enough.
    """
    tiles = tiles or tuning(*_tuned_by(operands, true_fp32))
    shape = _shape(operands, segments_BT, causal, scale, window, true_fp32, tiles)
    b, t, h, key_heads, d = (shape[name] for name in ("BATCH", "T", "H", "K", "D"))
    packed, dtype, tf32 = len(operands) == 1, operands[0].dtype, shape["PRECISION"] == "tf32"
    fused = tiles["backward"] == "fused" and not deterministic
    q, k, v, segments = _inputs(operands, segments_BT)

    tile = tiles["fused" if fused else "dkv"]
    q_turned = dout_turned = k_turned = q
    if tf32:
        blocks = {"q": tile["M"]} if fused else {"q": tile["M"], "k": tiles["dq"]["N"]}
        (q, k, v), (q_turned, k_turned, _) = tf32_copies(
            q, k, v, shape, straight="qkv", turned=blocks
        )
        dout_BTHD, dout_turned, delta_BHT = tf32_copies_of_dout(
            dout_BTHD, out_BTHD, shape, turned=tile["M"]
        )
        shape |= {"Q_ROW": h * d, "KV_ROW": key_heads * d, "K_AT": 0, "V_AT": 0}
    else:
        delta_BHT, *_ = delta(out_BTHD, dout_BTHD)
    if dlse_BHT is not None:
        delta_BHT = delta_BHT - dlse_BHT
    inputs = (q, k, v, segments, dout_BTHD, lse_BHT, delta_BHT)
    if packed:
        like_dkv = [
            jax.ShapeDtypeStruct(operands[0].shape, dtype),
            jax.ShapeDtypeStruct((1,), dtype),
        ]
    else:
        like_dkv = [jax.ShapeDtypeStruct((b, t, key_heads, d), dtype)] * 2
    *sums_BHTD, dk, dv = _triton.call(
        dkv_kernel,
        *inputs,
        q_turned,
        dout_turned,
        jnp.zeros((b, h, t, d), jnp.float32) if fused else delta_BHT,
        out=like_dkv,
        in_place=(len(inputs) + 2,) if fused else (),
        grid=(triton.cdiv(t, tile["N"]) * b * key_heads,),
        FUSED=fused,
        PACKED=packed,
        **shape,
        **_launched(tile, t, b * key_heads),
    )

    kernel, inputs, constants = (
        dq_kernel,
        (*inputs, k_turned),
        shape | _launched(tiles["dq"], t, b * h),
    )
    if fused:
        kernel, inputs = convert_kernel, sums_BHTD
        constants = {name: shape[name] for name in ("T", "H", "D", "P", "SCALE")} | {"M": 64}
    constants["PACKED"] = packed
    constants["grid"] = (triton.cdiv(t, constants["M"]) * b * h,)
    if packed:
        # dk is dqkv, and dq goes where it belongs in that.
        return _triton.call(kernel, *inputs, dk, out=[], in_place=(len(inputs),), **constants)
    (dq_BTHD,) = _triton.call(
        kernel, *inputs, out=[jax.ShapeDtypeStruct((b, t, h, d), dtype)], **constants
    )
    return dq_BTHD, dk, dv


def _launched(tile: dict[str, int], t: int, heads: int) -> dict[str, int]:
    """The constants of a launch: the number of heads that run side by side in place of their rows.

    Groups are even: after 32 of 48 heads the last 16 begin with their longest blocks, and are too
    few to fill the gaps behind those. Counted for two blocks a multiprocessor of an H200, T = 1024:
    33 blocks' time in all, 28.5 as 24 + 24 or 48.
    """
    groups = triton.cdiv(heads, max(1, tile["rows"] // t))
    constants = tile | {"TOGETHER": triton.cdiv(heads, groups)}
    del constants["rows"]
    return constants


def _inputs(operands, segments_BT):
    """q, k, v and segment ids, as pointers to where they are or to anything."""
    q, k, v = operands if len(operands) == 3 else operands * 3
    return q, k, v, q if segments_BT is None else segments_BT.astype(jnp.int32)


def _shape(operands, segments_BT, causal, scale, window, true_fp32, tiles) -> dict[str, Any]:
    """Constants of every kernel. All of them are: of a number that it is only given, jax-triton
    does not say that 16 divides it."""
    if len(operands) == 1:
        batch, t, _, h, d = operands[0].shape
        k, at = h, {"Q_ROW": 3 * h * d, "KV_ROW": 3 * h * d, "K_AT": h * d, "V_AT": 2 * h * d}
    else:
        batch, t, h, d = operands[0].shape
        k = operands[1].shape[2]
        at = {"Q_ROW": h * d, "KV_ROW": k * d, "K_AT": 0, "V_AT": 0}
    return {
        "BATCH": batch,
        "T": t,
        "H": h,
        "K": k,
        "D": d,
        "P": padded(d),
        **at,
        "CAUSAL": causal,
        "WINDOW": t if window is None else min(window, t),
        "SEGMENTS": segments_BT is not None,
        "SCALE": scale,
        "PRECISION": "ieee"
        if operands[0].dtype != jnp.float32
        else tiles["products"]
        if true_fp32
        else "tf32",
    }


# -------------------------------------------------------------------------------------------- tiles


def tuning(capability: tuple[int, int], products: str, head_dim: int) -> dict[str, Any]:
    """The entry of triton_tiles.json for a GPU, a kind of products and a head dimension.

    A capability that is not listed takes, of the listed ones before it that need no more shared
    memory, the one that needs most.

    Args:
        products: "16" (bf16, fp16), "tf32" or "fp32".

    Raises:
        ValueError: there is no such entry.
    """
    listed, shared_kb = _tiles(), SHARED_KB.get(capability, 99)
    fitting = [
        n for n in listed if _version(n) <= capability and listed[n]["shared_kb"] <= shared_kb
    ]
    if not fitting:
        raise ValueError(
            f"triton_tiles.json has nothing for compute capability {capability[0]}.{capability[1]} "
            f"with {shared_kb} KB of "
            f"shared memory; it lists {list(listed)}"
        )
    name = max(fitting, key=lambda n: (listed[n]["shared_kb"], _version(n)))
    entries = listed[name].get(products, {})
    enough = [p for p in entries if int(p) >= padded(head_dim)]
    if not enough:
        raise ValueError(
            f"triton_tiles.json has nothing under {name!r}, {products!r} for a head dimension of "
            f"{head_dim}; it has {list(entries)}"
        )
    return entries[min(enough, key=int)]


@functools.cache
def _tiles() -> dict[str, Any]:
    file = importlib.resources.files("pallas_kernels.attention").joinpath("triton_tiles.json")
    return _checked(json.loads(file.read_text()))


def _checked(tiles: dict[str, Any]) -> dict[str, Any]:
    """What it is given.

    Raises:
        ValueError: something is missing there, or cannot be; the message says what and where.
    """
    for name, of_capability in tiles.items():
        if "shared_kb" not in of_capability:
            raise ValueError(f"triton_tiles.json: {name!r} needs a number of 'shared_kb'")
        for products, head_dim in (
            (k, p) for k, entries in of_capability.items() if k != "shared_kb" for p in entries
        ):
            entry = of_capability[products][head_dim]
            where = f"triton_tiles.json: {name!r}, {products!r}, {head_dim!r}"
            if entry.get("backward") not in ("split", "fused"):
                raise ValueError(
                    f"{where}: 'backward' is 'split' or 'fused', not {entry.get('backward')!r}"
                )
            if products == "fp32" and entry.get("products") not in ("ieee", "tf32x3"):
                raise ValueError(
                    f"{where}: 'products' is 'ieee' or 'tf32x3', not {entry.get('products')!r}"
                )
            for kernel in PASSES:
                tile = entry.get(kernel, {})
                if sorted(tile) != sorted(TILE) or not all(
                    isinstance(n, int) and n > 0 for n in tile.values()
                ):
                    raise ValueError(
                        f"{where}: {kernel!r} needs a positive number for each of {TILE}, and has "
                        f"{tile}"
                    )
                if any(n < 16 or n & (n - 1) for n in (tile["M"], tile["N"])):
                    raise ValueError(
                        f"{where}: M and N of {kernel!r} are powers of two from 16 on, not {tile}"
                    )
    return tiles


def _version(name: str) -> tuple[int, int]:
    major, minor = name.split(".")
    return int(major), int(minor)


def _tuned_by(operands, true_fp32) -> tuple[tuple[int, int], str, int]:
    q = operands[0]
    products = "16" if q.dtype.itemsize == 2 else "fp32" if true_fp32 else "tf32"
    # Where there is no GPU, this is a test.
    return _dispatch.capability() or (9, 0), products, q.shape[-1]


# --------------------------------------------------------------------------------- parts of kernels


@triton.jit
def block_and_head(BLOCKS: tl.constexpr, HEADS: tl.constexpr, TOGETHER: tl.constexpr):
    """This program's place in the order of blocks, and its head: block 0 of TOGETHER heads, then
    block 1 of these, …"""
    index = tl.program_id(0)
    first = index // (BLOCKS * TOGETHER) * TOGETHER
    heads = tl.minimum(HEADS - first, TOGETHER)
    within = index - first * BLOCKS
    return within // heads, first + within % heads


@triton.jit
def visible(
    t, s, t_segment, s_segment, T: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr
):  # fmt: skip
    """Whether query t sees key s; t and s are M·1 and 1·N, or 1·M and N·1."""
    # Of causal queries only those from T on, which nobody reads, see keys from T on.
    seen = s <= t if CAUSAL else (s < T) & (t < T)
    if WINDOW < T:
        seen = seen & (t - s < WINDOW)
    if SEGMENTS:
        seen = seen & (t_segment == s_segment)
    return seen


@triton.jit
def keys_of(
    t0, T: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Where the blocks of keys begin and end that queries t0 … t0 + M−1 see, and those of them that
    need no mask."""
    start, end, whole, whole_end = 0, T, 0, T // N * N
    if CAUSAL:
        end = tl.minimum(t0 + M, T)
        whole_end = (t0 + 1) // N * N
    if WINDOW < T:
        start = tl.maximum(t0 - WINDOW + 1, 0) // N * N
        whole = tl.maximum(t0 + M - WINDOW, 0)
    if SEGMENTS:
        whole_end = start
    return start, end, whole, whole_end


@triton.jit
def queries_of(
    s0, T: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Where the blocks of queries begin and end that see keys s0 … s0 + N−1, and those of them that
    need no mask.

    Queries from T on need none: they are zeros, and so is what they give.
    """
    start, end, whole, whole_end = 0, T, 0, T
    if T % N:
        # For dQ. Of keys from T on, the weights may be infinite.
        whole = tl.where(s0 + N > T, T, 0)
    if CAUSAL:
        start = s0 // M * M
        whole = s0 + N - 1
    if WINDOW < T:
        end = tl.minimum(s0 + N - 1 + WINDOW, T)
        whole_end = (s0 + WINDOW) // M * M
    if SEGMENTS:
        whole_end = start
    return start, end, whole, whole_end


# ------------------------------------------------------------------------------------------ forward


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, segments_ptr, out_ptr, lse_ptr,
    BATCH: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr,
    Q_ROW: tl.constexpr, KV_ROW: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    # Positive, so that the highest score stays the highest; a scale of 0 nearly so, because 0 · −∞
    # is not a number.
    UNIT: tl.constexpr = (SCALE if SCALE > 0 else 1e-30 - SCALE) * LOG2E
    BLOCKS: tl.constexpr = (T + M - 1) // M
    order, head = block_and_head(BLOCKS, BATCH * H, TOGETHER)
    t0 = (BLOCKS - 1 - order) * M
    b, h = (head // H).to(tl.int64), head % H
    k = h // (H // K)
    k_ptr += b * T * KV_ROW + k * D + K_AT
    v_ptr += turned(b * K + k, T, D, N) if PRECISION == "tf32" else b * T * KV_ROW + k * D + V_AT
    segments_ptr += b * T

    q_MP = rounded(
        load_rows(q_ptr + b * T * Q_ROW + h * D, t0, Q_ROW, T, D, M, P, T % M != 0), PRECISION
    )
    t_segment_M = load_each(segments_ptr, t0, T, M, T % M != 0) if SEGMENTS else tl.arange(0, M)
    out_MP = tl.full((M, P), 0.0, tl.float32)
    highest_M = tl.full((M,), LOWEST, tl.float32)
    sum_M = tl.full((M,), 0.0, tl.float32)
    start, end, whole, whole_end = keys_of(t0, T, CAUSAL, WINDOW, SEGMENTS, M, N)
    for s0 in range(start, end, N):
        k_NP = load_rows(k_ptr, s0, KV_ROW, T, D, N, P, T % N != 0)
        s_MN = tl.dot(q_MP, tl.trans(k_NP), input_precision=PRECISION)
        s_segment_N = load_each(segments_ptr, s0, T, N, T % N != 0) if SEGMENTS else tl.arange(0, N)
        if SCALE < 0:
            s_MN = -s_MN
        if (s0 < whole) | (s0 >= whole_end):
            t_M1, s_1N = t0 + tl.arange(0, M)[:, None], s0 + tl.arange(0, N)[None, :]
            seen_MN = visible(
                t_M1, s_1N, t_segment_M[:, None], s_segment_N[None, :], T, CAUSAL, WINDOW, SEGMENTS
            )
            s_MN = tl.where(seen_MN, s_MN, float("-inf"))
        higher_M = tl.maximum(highest_M, tl.max(s_MN, 1) * UNIT)
        p_MN = tl.exp2(s_MN * UNIT - higher_M[:, None])
        shrink_M = tl.exp2(highest_M - higher_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
        if PRECISION == "tf32":
            v_NP = load_turned(v_ptr, s0, T, D, N, P)
            p_MN = evens_first(operand(p_MN, v_NP.dtype, PRECISION), PRECISION, M, N)
            # Not added up by the tensor cores: beside a product that still ran, ptxas would not
            # load q, a left operand in registers, for the next, and would wait for every
            # instruction of both.
            pv_MP = tl.dot(p_MN, v_NP, input_precision=PRECISION)
            out_MP = tl.fma(out_MP, tl.broadcast_to(shrink_M[:, None], (M, P)), pv_MP)
        else:
            v_NP = load_rows(v_ptr, s0, KV_ROW, T, D, N, P, T % N != 0)
            out_MP = tl.dot(
                p_MN.to(v_NP.dtype), v_NP, out_MP * shrink_M[:, None], input_precision=PRECISION
            )
        highest_M = higher_M

    out_MP *= (1.0 / sum_M)[:, None]
    store_rows(out_ptr + b * T * H * D + h * D, out_MP, t0, H * D, T, D, M, P)
    rows_M = t0 + tl.arange(0, M)
    lse_M = (highest_M + tl.log2(sum_M)) / LOG2E
    tl.store(lse_ptr + head.to(tl.int64) * T + rows_M, lse_M, mask=rows_M < T)


# ----------------------------------------------------------------------------------------- backward


@triton.jit
def dkv_kernel(
    q_ptr, k_ptr, v_ptr, segments_ptr, dout_ptr, lse_ptr, delta_ptr, q_turned_ptr,
    dout_turned_ptr, dq_ptr, dk_ptr, dv_ptr,
    BATCH: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr,
    Q_ROW: tl.constexpr, KV_ROW: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    FUSED: tl.constexpr, PACKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys. FUSED: its part of dQ / scale is added to dq, B·H·T·D in fp32.
    PACKED: dk is all of dqkv.

    Scores lie with the keys along the rows, so that Pᵀ and dSᵀ are left operands as they come out
    of the products before.
    """
    order, head = block_and_head((T + N - 1) // N, BATCH * K, TOGETHER)
    s0 = order * N
    b, k = (head // K).to(tl.int64), head % K
    kv_at = b * T * KV_ROW + k * D
    segments_ptr += b * T

    k_NP = load_rows(k_ptr + kv_at + K_AT, s0, KV_ROW, T, D, N, P, T % N != 0)
    v_NP = load_rows(v_ptr + kv_at + V_AT, s0, KV_ROW, T, D, N, P, T % N != 0)
    s_segment_N = load_each(segments_ptr, s0, T, N, T % N != 0) if SEGMENTS else tl.arange(0, N)
    dk_NP = tl.full((N, P), 0.0, tl.float32)
    dv_NP = tl.full((N, P), 0.0, tl.float32)
    start, end, whole, whole_end = queries_of(s0, T, CAUSAL, WINDOW, SEGMENTS, M, N)
    for i in range(H // K):
        h = k * (H // K) + i
        q_head_ptr = q_ptr + b * T * Q_ROW + h * D
        dout_head_ptr = dout_ptr + b * T * H * D + h * D
        numbers = (b * H + h) * T
        for t0 in range(start, end, M):
            lse_M = load_each(lse_ptr + numbers, t0, T, M, T % M != 0) * LOG2E
            delta_M = load_each(delta_ptr + numbers, t0, T, M, T % M != 0)
            t_segment_M = (
                load_each(segments_ptr, t0, T, M, T % M != 0) if SEGMENTS else tl.arange(0, M)
            )
            q_MP = load_rows(q_head_ptr, t0, Q_ROW, T, D, M, P, T % M != 0)
            dout_MP = load_rows(dout_head_ptr, t0, H * D, T, D, M, P, T % M != 0)
            # Both products come before the exponentials of the first, which are then made while the
            # second runs.
            s_NM = tl.dot(k_NP, tl.trans(q_MP), input_precision=PRECISION)
            dp_NM = tl.dot(v_NP, tl.trans(dout_MP), input_precision=PRECISION)
            p_NM = tl.exp2(s_NM * (SCALE * LOG2E) - lse_M[None, :])
            if (t0 < whole) | (t0 >= whole_end):
                t_1M, s_N1 = t0 + tl.arange(0, M)[None, :], s0 + tl.arange(0, N)[:, None]
                seen_NM = visible(
                    t_1M,
                    s_N1,
                    t_segment_M[None, :],
                    s_segment_N[:, None],
                    T,
                    CAUSAL,
                    WINDOW,
                    SEGMENTS,
                )
                p_NM = tl.where(seen_NM, p_NM, 0.0)
            if PRECISION == "tf32":
                q_MP = load_turned(q_turned_ptr + turned(b * H + h, T, D, M), t0, T, D, M, P)
                dout_MP = load_turned(dout_turned_ptr + turned(b * H + h, T, D, M), t0, T, D, M, P)
            p_left_NM = evens_first(operand(p_NM, dout_MP.dtype, PRECISION), PRECISION, N, M)
            dv_NP = tl.dot(p_left_NM, dout_MP, dv_NP, input_precision=PRECISION)
            ds_NM = operand(p_NM * (dp_NM - delta_M[None, :]), q_MP.dtype, PRECISION)
            dk_NP = tl.dot(
                evens_first(ds_NM, PRECISION, N, M), q_MP, dk_NP, input_precision=PRECISION
            )
            if FUSED:
                dq_MP = tl.dot(tl.trans(ds_NM), k_NP, input_precision=PRECISION)
                row_M1, column_1P = t0 + tl.arange(0, M)[:, None], tl.arange(0, P)[None, :]
                at_MP = dq_ptr + (numbers + t0) * D + offsets(M, P, D)
                tl.atomic_add(at_MP, dq_MP, mask=(row_M1 < T) & (column_1P < D), sem="relaxed")
    ROW: tl.constexpr = 3 * H * D if PACKED else K * D
    out_at = b * T * ROW + k * D
    if PACKED:
        dk_ptr += H * D
        dv_ptr = dk_ptr + H * D
    store_rows(dk_ptr + out_at, dk_NP * SCALE, s0, ROW, T, D, N, P)
    store_rows(dv_ptr + out_at, dv_NP, s0, ROW, T, D, N, P)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, segments_ptr, dout_ptr, lse_ptr, delta_ptr, k_turned_ptr, dq_ptr,
    BATCH: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr,
    Q_ROW: tl.constexpr, KV_ROW: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """dQ of a block of queries. PACKED: dq is all of dqkv."""
    BLOCKS: tl.constexpr = (T + M - 1) // M
    order, head = block_and_head(BLOCKS, BATCH * H, TOGETHER)
    t0 = (BLOCKS - 1 - order) * M
    b, h = (head // H).to(tl.int64), head % H
    k = h // (H // K)
    k_ptr += b * T * KV_ROW + k * D + K_AT
    v_ptr += b * T * KV_ROW + k * D + V_AT
    segments_ptr += b * T
    numbers = head.to(tl.int64) * T

    q_MP = load_rows(q_ptr + b * T * Q_ROW + h * D, t0, Q_ROW, T, D, M, P, T % M != 0)
    dout_MP = load_rows(dout_ptr + b * T * H * D + h * D, t0, H * D, T, D, M, P, T % M != 0)
    lse_M = load_each(lse_ptr + numbers, t0, T, M, T % M != 0) * LOG2E
    delta_M = load_each(delta_ptr + numbers, t0, T, M, T % M != 0)
    t_segment_M = load_each(segments_ptr, t0, T, M, T % M != 0) if SEGMENTS else tl.arange(0, M)
    dq_MP = tl.full((M, P), 0.0, tl.float32)
    start, end, whole, whole_end = keys_of(t0, T, CAUSAL, WINDOW, SEGMENTS, M, N)
    for s0 in range(start, end, N):
        k_NP = load_rows(k_ptr, s0, KV_ROW, T, D, N, P, T % N != 0)
        v_NP = load_rows(v_ptr, s0, KV_ROW, T, D, N, P, T % N != 0)
        s_segment_N = load_each(segments_ptr, s0, T, N, T % N != 0) if SEGMENTS else tl.arange(0, N)
        s_MN = tl.dot(q_MP, tl.trans(k_NP), input_precision=PRECISION)
        dp_MN = tl.dot(dout_MP, tl.trans(v_NP), input_precision=PRECISION)
        p_MN = tl.exp2(s_MN * (SCALE * LOG2E) - lse_M[:, None])
        if (s0 < whole) | (s0 >= whole_end):
            t_M1, s_1N = t0 + tl.arange(0, M)[:, None], s0 + tl.arange(0, N)[None, :]
            seen_MN = visible(
                t_M1, s_1N, t_segment_M[:, None], s_segment_N[None, :], T, CAUSAL, WINDOW, SEGMENTS
            )
            p_MN = tl.where(seen_MN, p_MN, 0.0)
        ds_MN = operand(p_MN * (dp_MN - delta_M[:, None]), k_NP.dtype, PRECISION)
        if PRECISION == "tf32":
            k_NP = load_turned(k_turned_ptr + turned(b * K + k, T, D, N), s0, T, D, N, P)
        dq_MP = tl.dot(evens_first(ds_MN, PRECISION, M, N), k_NP, dq_MP, input_precision=PRECISION)
    ROW: tl.constexpr = (3 if PACKED else 1) * H * D
    store_rows(dq_ptr + b * T * ROW + h * D, dq_MP * SCALE, t0, ROW, T, D, M, P)


@triton.jit
def convert_kernel(
    sums_ptr, dq_ptr,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    SCALE: tl.constexpr, PACKED: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """dQ from its sums in fp32, B·H·T·D."""
    t0, head = tl.program_id(0) % ((T + M - 1) // M) * M, tl.program_id(0) // ((T + M - 1) // M)
    b, h = (head // H).to(tl.int64), head % H
    dq_MP = load_rows(sums_ptr + head.to(tl.int64) * T * D, t0, D, T, D, M, P, T % M != 0)
    ROW: tl.constexpr = (3 if PACKED else 1) * H * D
    store_rows(dq_ptr + b * T * ROW + h * D, dq_MP * SCALE, t0, ROW, T, D, M, P)
