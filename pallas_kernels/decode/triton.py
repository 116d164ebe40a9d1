"""Launches of the decoding kernels, with their tiles.

One launch computes all blocks of one token per sequence. Its grid is one program on each SM: all
are resident at once, as the grid barrier needs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton

from pallas_kernels import _triton
from pallas_kernels.decode.triton_batch import decode_batch_kernel
from pallas_kernels.decode.triton_one import decode_one_kernel


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes and warps of a launch. The BN_ are columns of a tile of weights."""

    warps: int = 8
    BN_QKV: int = 32
    BN_PROJ: int = 128
    BN_FC: int = 32
    BN_OUT: int = 8
    BN_HEAD: int = 32
    KEYS: int = 128
    """Keys of a tile of attention."""
    HEAD_STAGES: int = 3
    """Tiles of the head in flight; 0: two tiles in registers, one sequence only."""
    CHUNK: int = 256
    """Channels of a tile of weights, at most."""
    CHUNK_F: int = 1024
    """Channels of a tile of the second matmul of the MLP, at most."""
    CHUNK_HEAD: int = 64
    """Channels of a tile of the head, at most; several sequences only."""
    G: int = 2
    """Heads of one attention item; several sequences only."""
    PROJ_PARTS: int = 2
    """Parts of the sum of the output projection; several sequences only."""
    OUT_PARTS: int = 4
    """Parts of the sum of the second matmul of the MLP; several sequences only."""
    AHEAD_BYTES: int = 0
    """Keys and values of a block to prefetch, at most; several sequences only."""


ONE = Tiles(KEYS=32, HEAD_STAGES=0)
BATCH = Tiles(BN_PROJ=16, BN_OUT=32, BN_HEAD=128, HEAD_STAGES=4, KEYS=64, CHUNK=128)
FP32 = dataclasses.replace(BATCH, BN_HEAD=32, HEAD_STAGES=2, CHUNK=64)


def decode_step(weights, cache, token_B, length_B, *, heads, eps, out_dtype, programs, tiles=None):
    """Return (logits (B, V), k, v, counter) after one token of each sequence.

    Args:
        out_dtype: dtype of the residual stream.
        programs: SMs of the device; 1 in Triton's interpreter, which runs programs in turn.
    """
    b = token_B.shape[0]
    tiles = tiles or (ONE if b == 1 else FP32 if weights.head_VC.dtype == jnp.float32 else BATCH)
    launch = _one if b == 1 else _batch
    return launch(weights, cache, token_B, length_B, heads, eps, out_dtype, programs, tiles)


def _arrays(weights, cache, token_B, length_B):
    w = weights
    arrays = [token_B, length_B, w.wte_VC, w.wpe_SC, w.ln_1_scale_LC, w.ln_1_bias_LC]
    arrays += [w.qkv_LNC, w.qkv_bias_LN, w.proj_LCC, w.proj_bias_LC, w.ln_2_scale_LC]
    arrays += [w.ln_2_bias_LC, w.fc_LFC, w.fc_bias_LF, w.out_LCF, w.out_bias_LC]
    arrays += [w.ln_f_scale_C, w.ln_f_bias_C, w.head_VC]
    first = len(arrays)
    arrays += [cache.k_LBSHD, cache.v_LBSHD, cache.counter_2]
    return arrays, tuple(range(first, first + 3))


def _one(weights, cache, token_B, length_B, heads, eps, residual, programs, tiles):
    blocks, _, length, _, d = cache.k_LBSHD.shape
    vocab_size, c = weights.head_VC.shape
    dtype = weights.head_VC.dtype
    parts = max(1, programs // heads)
    arrays, in_place = _arrays(weights, cache, token_B, length_B)
    *cached, logits_BV, _, _, _, _, _ = _triton.call(
        decode_one_kernel,
        *arrays,
        out=[
            jax.ShapeDtypeStruct((1, vocab_size), dtype),
            jax.ShapeDtypeStruct((c,), residual),
            jax.ShapeDtypeStruct((c,), residual),
            jax.ShapeDtypeStruct((c,), dtype),
            jax.ShapeDtypeStruct((heads, c), jnp.float32),
            jax.ShapeDtypeStruct((4 * c,), dtype),
        ],
        grid=(programs,),
        in_place=in_place,
        num_warps=tiles.warps,
        L=blocks,
        C=c,
        H=heads,
        HP=triton.next_power_of_2(heads),
        V=vocab_size,
        S=length,
        EPS=eps,
        PROGRAMS=programs,
        PARTS=parts,
        BN_QKV=tiles.BN_QKV,
        # One tile: the attention of a head is computed once.
        BN_PROJ=triton.next_power_of_2(triton.cdiv(c, parts)),
        BN_FC=tiles.BN_FC,
        BN_OUT=tiles.BN_OUT,
        BN_HEAD=tiles.BN_HEAD,
        CK=_chunk(c, tiles.CHUNK),
        CK_F=_chunk(4 * c, tiles.CHUNK_F),
        KEYS=tiles.KEYS,
        HEAD_STAGES=tiles.HEAD_STAGES,
    )
    return logits_BV, *cached


def _batch(weights, cache, token_B, length_B, heads, eps, residual, programs, tiles):
    blocks, b, length, _, d = cache.k_LBSHD.shape
    vocab_size, c = weights.head_VC.shape
    dtype = weights.head_VC.dtype
    proj_parts, out_parts = min(tiles.PROJ_PARTS, programs), min(tiles.OUT_PARTS, programs)
    arrays, in_place = _arrays(weights, cache, token_B, length_B)
    *cached, logits_BV, _, _, _, _, _, _, _ = _triton.call(
        decode_batch_kernel,
        *arrays,
        out=[
            jax.ShapeDtypeStruct((b, vocab_size), dtype),
            jax.ShapeDtypeStruct((b, c), residual),
            jax.ShapeDtypeStruct((b, c), dtype),
            jax.ShapeDtypeStruct((b, c), dtype),
            jax.ShapeDtypeStruct((b, c), dtype),
            jax.ShapeDtypeStruct((proj_parts, b, c), jnp.float32),
            jax.ShapeDtypeStruct((b, 4 * c), dtype),
            jax.ShapeDtypeStruct((out_parts, b, c), jnp.float32),
        ],
        grid=(programs,),
        in_place=in_place,
        num_warps=tiles.warps,
        L=blocks,
        B=b,
        M=max(16, triton.next_power_of_2(b)),
        C=c,
        CP=triton.next_power_of_2(c),
        H=heads,
        V=vocab_size,
        S=length,
        EPS=eps,
        PROGRAMS=programs,
        G=tiles.G if heads % tiles.G == 0 else 1,
        PROJ_PARTS=proj_parts,
        OUT_PARTS=out_parts,
        BN_QKV=tiles.BN_QKV,
        BN_PROJ=tiles.BN_PROJ,
        BN_FC=tiles.BN_FC,
        BN_OUT=tiles.BN_OUT,
        BN_HEAD=tiles.BN_HEAD,
        CK=_chunk(c, tiles.CHUNK),
        CK_PROJ=_chunk(c // proj_parts, tiles.CHUNK),
        CK_OUT=_chunk(4 * c // out_parts, tiles.CHUNK),
        CK_HEAD=_chunk(c, tiles.CHUNK_HEAD),
        KEYS=tiles.KEYS,
        HEAD_STAGES=tiles.HEAD_STAGES,
        AHEAD=min(length, tiles.AHEAD_BYTES // (2 * b * c * dtype.itemsize)),
    )
    return logits_BV, *cached


def _chunk(k: int, most: int) -> int:
    """Return the largest power of two that divides k, at most `most`."""
    return min(k & -k, most)
