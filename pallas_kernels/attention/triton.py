"""Flash attention in Triton, for NVIDIA GPUs from Ampere on.

Supports any lengths, head dimensions up to 256, every option, and fp32 as TF32 or true fp32.

Forward: a program processes a block of queries, loops over blocks of keys, and updates the maximum
and the sum of the softmax for each block of keys. Blocks of keys that no query sees are skipped. A
tile is masked only if one of the queries does not see one of the keys.

Backward: one kernel loops over the queries that see a block of keys and computes dK and dV. Another
loops over the keys of a block of queries and computes dQ. Every output is written once, so two runs
are equal bit for bit.

In TF32 rounded copies of q, k, v and dO are computed first: "straight" (B·T·H·D) and "transposed"
(B·H·D·T′). See triton_tf32.py. The kernels are in triton_kernels.py.

True fp32 runs on the CUDA cores ("ieee"). If the registers suffice, Triton's "tf32x3" is used
instead: each operand is split into TF32 numbers, a = a₁ + a₂. The sum a₁b₁ + a₁b₂ + a₂b₁ omits
2⁻²² of a term. PyTorch's fp32 attention uses the same split.

Shapes, in addition to the shapes of the package: M queries and N keys of a block; P the head
dimension padded to a power of two from 16 to 256, PE that of v; R rows of a block of queries or
keys; T′ the length padded to a multiple of the block.

triton_tiles.json contains the tiles:

    {compute capability: {
        "shared_kb": shared memory that a program can have on this GPU,
        "16" (bf16, fp16) | "tf32" | "fp32": {largest P of the entry: {
            "precision": "ieee" | "tf32x3" (in "fp32" only; `input_precision` of tl.dot),
            "forward" | "dkv" | "dq": {"M", "N", "num_warps", "num_stages"},
            option, from `tuned_option`: {the kernels that have other tiles with the option}}}}}
"""

import functools
import importlib.resources
import json
from typing import Any

import jax
import jax.numpy as jnp
import triton

from pallas_kernels import _dispatch, _triton
from pallas_kernels.attention.documents import Ranges, query_blocks
from pallas_kernels.attention.triton_kernels import (
    Mask,
    Score,
    dkv_kernel,
    dq_kernel,
    forward_kernel,
)
from pallas_kernels.attention.triton_passes import delta
from pallas_kernels.attention.triton_rows import padded
from pallas_kernels.attention.triton_tf32 import tf32_copies, tf32_copies_of_dout

# KB of shared memory per thread block (CTA); 99 on every other GPU.
SHARED_KB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
ROWS_TOGETHER = 32768
"""Heads with at most as many rows in total run concurrently, so that the inputs of these heads stay
in the L2 cache. The longest blocks of these heads start first."""


def forward(operands, bounds, bias=None, *, options, tiles=None):
    """Compute the output and the log-sum-exp.

    Args:
        operands: (q_BTHD, k_BSKD, v_BSKE), or (qkv_BT3HD,).
        bounds: `Documents`, `Ranges`, or None.
        bias: of the scores, B·(H or 1)·T·S or (H or 1)·T·S; or ALiBi's slopes, H; or None.
        options: the call's `Options`. Both passes are always deterministic.
        tiles: replaces the entry of triton_tiles.json; only "forward" is needed.

    Returns:
        (out_BTHE in the operands' dtype, lse_BHT in fp32)
    """
    tiles = tiles or _tuned(operands, options, bias)
    shape = _shape(operands, bounds, options, tiles, bias)
    tile = tiles["forward"]
    b, t, h = shape["BATCH"], shape["T"], shape["H"]
    q, k, v, ends = _inputs(operands, bounds)
    if shape["PRECISION"] == "tf32":
        (_, k, _), (_, _, v) = tf32_copies(
            q, k, v, shape, straight="k", transposed={"v": tile["N"]}
        )
        shape |= {"K_ROW": shape["K"] * shape["D"], "K_AT": 0}
    return _triton.call(
        forward_kernel,
        *(q, k, v, *ends, bias),
        out=[
            jax.ShapeDtypeStruct((b, t, h, shape["E"]), operands[0].dtype),
            jax.ShapeDtypeStruct((b, h, t), jnp.float32),
        ],
        grid=(triton.cdiv(t, tile["M"]) * b * h,),
        **shape,
        **_launched(tile, t, b * h),
    )


def backward(
    operands,
    bounds,
    lse_BHT,
    dout_BTHD,
    out_BTHD,
    dlse_BHT,
    bias=None,
    *,
    options,
    tiles=None,
    bias_gradient=False,
):
    """Compute the gradients of the operands, as a tuple of the same structure.

    Args:
        operands, bounds, bias, options: as in `forward`.
        out_BTHD, lse_BHT: the results of `forward`.
        dout_BTHD: gradient of the output, in its dtype.
        dlse_BHT: gradient of the log-sum-exp, or None.
        tiles: as in `forward`; only "dkv" and "dq" are needed.
        bias_gradient: also return dS, B·H·T·S, or the gradient of the slopes from each query,
            B·H·T.
    """
    tiles = tiles or _tuned(operands, options, bias)
    shape = _shape(operands, bounds, options, tiles, bias)
    b, t, s, h, key_heads, d, e = (shape[name] for name in ("BATCH", "T", "S", "H", "K", "D", "E"))
    packed, dtype, tf32 = len(operands) == 1, operands[0].dtype, shape["PRECISION"] == "tf32"
    tile = tiles["dkv"]
    q, k, v, ends = _inputs(operands, bounds)
    q_transposed = dout_transposed = k_transposed = q
    if tf32:
        blocks = {"q": tile["M"], "k": tiles["dq"]["N"]}
        (q, k, v), (q_transposed, k_transposed, _) = tf32_copies(
            q, k, v, shape, straight="qkv", transposed=blocks
        )
        dout_BTHD, dout_transposed, delta_BHT = tf32_copies_of_dout(
            dout_BTHD, out_BTHD, shape, transposed=tile["M"]
        )
        shape |= {"Q_ROW": h * d, "K_ROW": key_heads * d, "V_ROW": key_heads * e}
        shape |= {"K_AT": 0, "V_AT": 0}
    else:
        delta_BHT, *_ = delta(out_BTHD, dout_BTHD)
    if dlse_BHT is not None:
        delta_BHT = delta_BHT - dlse_BHT
    blocks = query_blocks(bounds, s, tile["M"], tile["N"]) if isinstance(bounds, Ranges) else None
    inputs = (q, k, v, *ends, bias, dout_BTHD, lse_BHT, delta_BHT)
    like_dkv = [jax.ShapeDtypeStruct((b, s, key_heads, x), dtype) for x in (d, e)]
    if packed:
        # dk is all of dqkv; dq is stored in the first part of dqkv.
        like_dkv = [jax.ShapeDtypeStruct(x, dtype) for x in (operands[0].shape, (1,))]
    dk, dv = _triton.call(
        dkv_kernel,
        *(*inputs, q_transposed, dout_transposed, blocks),
        out=like_dkv,
        grid=(triton.cdiv(s, tile["N"]) * b * key_heads,),
        PACKED=packed,
        **shape,
        **_launched(tile, t, b * key_heads),
    )
    dbias = None
    if bias_gradient and bias.ndim == 1:
        dbias = jnp.zeros((b, h, t), jnp.float32)
    elif bias_gradient:
        dbias = jnp.zeros((b, h, t, s), bias.dtype)
    inputs = (*inputs, k_transposed, dbias, *([dk] if packed else []))
    last = len(inputs) - 1  # of dqkv, or of the gradient of the bias
    *dbias, dq = _triton.call(
        dq_kernel,
        *inputs,
        out=[] if packed else [jax.ShapeDtypeStruct((b, t, h, d), dtype)],
        in_place=(last,) if packed or bias_gradient else (),
        grid=(triton.cdiv(t, tiles["dq"]["M"]) * b * h,),
        PACKED=packed,
        **shape,
        **_launched(tiles["dq"], t, b * h),
    )
    return (dq,) if packed else (dq, dk, dv, *dbias)


def _launched(tile: dict[str, int], t: int, heads: int) -> dict[str, int]:
    """Return the constants of a launch.

    All groups of concurrent heads have equal size. Of 48 heads in groups of 32 and 16, the 16 heads
    have too few blocks to occupy all SMs until the longest blocks end. By calculation for an
    H200 with two programs per SM, T = 1024: 33 block times for 32 + 16, 28.5 for 24 + 24 or 48.
    """
    groups = triton.cdiv(heads, max(1, ROWS_TOGETHER // t))
    return tile | {"TOGETHER": triton.cdiv(heads, groups)}


def _inputs(operands, bounds):
    """Return pointers to q, k, v and to the bounds and ids of `Ranges`. Without bounds, pass q."""
    q, k, v = operands if len(operands) == 3 else operands * 3
    return q, k, v, (*((q, q) if bounds is None else bounds), None, None)[:4]


def _shape(operands, bounds, options, tiles, bias=None) -> dict[str, Any]:
    """Return the constants of every kernel.

    Sizes are compile-time constants: jax-triton does not tell the compiler that a run-time size is
    a multiple of 16.
    """
    if len(operands) == 1:
        batch, t, _, h, d = operands[0].shape
        s, k, e = t, h, d
        rows, at = (3 * h * d,) * 3, (h * d, 2 * h * d)
    else:
        batch, t, h, d = operands[0].shape
        _, s, k, e = operands[2].shape
        rows, at = (h * d, k * d, k * e), (0, 0)
    ranges = isinstance(bounds, Ranges)
    window = t if options.window is None else options.window
    kind = "ranges" if ranges else None if bounds is None else "documents"
    empty = ranges or (bias is not None and bias.ndim > 1)
    return {
        "BATCH": batch,
        "T": t,
        "S": s,
        "H": h,
        "K": k,
        "D": d,
        "E": e,
        "P": padded(d),
        "PE": padded(e),
        **dict(zip(("Q_ROW", "K_ROW", "V_ROW"), rows, strict=True)),
        **dict(zip(("K_AT", "V_AT"), at, strict=True)),
        "MASK": Mask(t, s, options.causal and not ranges, t if ranges else window, kind, empty),
        "SCALE": options.scale,
        "SCORE": _score(options, bias),
        "PRECISION": "ieee"
        if operands[0].dtype != jnp.float32
        else tiles["precision"]
        if options.true_fp32
        else "tf32",
    }


def _score(options, bias) -> Score | None:
    if options.softcap is None and bias is None:
        return None
    if bias is None or bias.ndim == 1:
        kind, stride_b, stride_h = None if bias is None else "slopes", 0, 1
    else:
        *batch, heads, t, s = bias.shape
        kind, stride_b, stride_h = "scores", len(batch) * heads * t * s, (heads > 1) * t * s
    return Score(options.softcap, kind, stride_b, stride_h, options.start)


# -------------------------------------------------------------------------------------------- tiles


def tuning(
    capability: tuple[int, int], matmul: str, head_dim: int, option: str | None = None
) -> dict[str, Any]:
    """Return the entry of triton_tiles.json for a GPU, a matmul precision and a head dimension.

    A GPU whose capability is not listed with this precision has the entry of an earlier capability
    with at most the GPU's shared memory; of several, of the one with the most.

    Args:
        matmul: "16" (bf16, fp16), "tf32" or "fp32".
        option: the tiles of this option replace those of the entry.
    """
    listed, shared_kb = _tiles(), SHARED_KB.get(capability, 99)
    name = max(
        (
            n
            for n, matmuls in listed.items()
            if matmul in matmuls and matmuls["shared_kb"] <= shared_kb and _version(n) <= capability
        ),
        key=lambda n: (listed[n]["shared_kb"], _version(n)),
    )
    entries = listed[name][matmul]
    entry = entries[min((p for p in entries if int(p) >= padded(head_dim)), key=int)]
    if option is None:
        return entry
    tiles = {kernel: entry[kernel] for kernel in ("forward", "dkv", "dq")}
    if option in ("bias", "slopes"):
        # A tile of the bias needs registers: fewer queries, or dK and dV spill.
        tiles["dkv"] = tiles["dkv"] | {"M": max(16, tiles["dkv"]["M"] // 2)}
    return entry | tiles | entry.get(option, {})


def tuned_option(bias, head_dim: int, value_dim: int) -> str | None:
    """Return the option of a call that has tiles of its own, or None."""
    if bias is not None:
        return "slopes" if bias.ndim == 1 else "bias"
    return "value_dim" if padded(value_dim) != padded(head_dim) else None


@functools.cache
def _tiles() -> dict[str, Any]:
    file = importlib.resources.files("pallas_kernels.attention").joinpath("triton_tiles.json")
    return json.loads(file.read_text())


def _version(name: str) -> tuple[int, int]:
    major, minor = name.split(".")
    return int(major), int(minor)


def _tuned(operands, options, bias) -> dict[str, Any]:
    """Return the tiles of a call."""
    q = operands[0]
    matmul = "16" if q.dtype.itemsize == 2 else "fp32" if options.true_fp32 else "tf32"
    sizes = q.shape[-1], operands[-1].shape[-1]
    # Without a GPU, the caller is a test.
    capability = _dispatch.capability() or (9, 0)
    return tuning(capability, matmul, max(sizes), tuned_option(bias, *sizes))
