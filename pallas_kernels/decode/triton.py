"""Launches of the decoding kernels, with their tiles.

One sequence: one launch computes all blocks of a token. The grid has one program on each SM, so
that all programs are resident at once, as the exchange between programs requires. Several
sequences: 7 launches per block.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton

from pallas_kernels import _dispatch, _triton
from pallas_kernels.decode import triton_many
from pallas_kernels.decode.triton_functions import WARPS
from pallas_kernels.decode.triton_one import decode_one_kernel


@dataclasses.dataclass(frozen=True)
class One:
    """Tile sizes for one sequence."""

    R: int = 8
    """Rows of a tile of weights: one row per warp."""
    R_HEAD: int = 32
    KEYS: int = 256
    """Keys of a tile of attention."""
    ELEMENTS: int = 128
    """Largest number of 16-bit weights that a thread loads at once."""


@dataclasses.dataclass(frozen=True)
class Matmul:
    """Tile sizes and warps of a matmul of several sequences."""

    BN: int = 32
    BK: int = 128
    parts: int = 1
    """Number of parts of the sum over K (split K)."""
    stages: int = 4
    warps: int = 4


@dataclasses.dataclass(frozen=True)
class Many:
    """Tile sizes for several sequences."""

    qkv: Matmul = Matmul()
    proj: Matmul = Matmul(parts=2)
    fc: Matmul = Matmul()
    out: Matmul = Matmul(parts=4)
    # Three programs fit on an SM: all 393 programs of GPT-2 are resident on 132 SMs.
    head: Matmul = Matmul(BN=128, BK=64, stages=3)
    KEYS: int = 32
    """Keys of a tile of attention."""
    attention_warps: int = 4
    attention_stages: int = 4
    norm_warps: int = 4
    ahead_lines: int = 1024
    """Largest number of cache lines of the next matmul's weights that each program of a LayerNorm
    prefetches to the L2 cache; 0 or a power of two."""
    ahead_keys: int = 96
    """Largest number of keys per sequence that are prefetched to the L2 cache before the attention
    that reads the keys: 38 MB for 128 sequences of GPT-2 124M."""
    early_keys: int = 96
    """Number of these keys that are prefetched before the MLP of the previous block. The other keys
    are prefetched before the QKV projection."""


LINE_BYTES = 128
SMALL = Matmul(BK=32, stages=2)
FP32 = Many(
    SMALL, dataclasses.replace(SMALL, parts=2), SMALL, dataclasses.replace(SMALL, parts=4), SMALL
)


def decode_step(
    weights,
    cache,
    token_B,
    length_B,
    *,
    heads,
    eps,
    out_dtype,
    programs,
    likeliest=False,
    tiles=None,
):
    """Return (logits (B, V), k, v, exchange) after one token of each sequence.

    Args:
        likeliest: for one sequence only: return the likeliest token, (1,) int32, in place of the
            logits.
        out_dtype: dtype of the residual stream.
        programs: number of SMs of the device; 1 in Triton's interpreter, which runs programs one
            after the other.
        tiles: One or Many. None: the tiles for the number of sequences and the dtype.
    """
    args = (weights, cache, token_B, length_B, heads, eps, out_dtype, programs, tiles)
    return _one(*args, likeliest) if token_B.shape[0] == 1 else _many(*args)


def _one(weights, cache, token_B, length_B, heads, eps, residual, programs, tiles, likeliest):
    w, tiles = weights, tiles or One()
    blocks, _, length, _, _ = cache.k_LBSHD.shape
    vocab_size, c = w.head_VC.shape
    dtype = w.head_VC.dtype
    chunk, chunk_f = _chunk(c, 256), _chunk(4 * c, 256)

    def elements(k, chunk):
        """Return the number of 16-bit units of weights per thread, for one row of k columns per
        warp."""
        return triton.next_power_of_2(k // chunk) * chunk * dtype.itemsize // 64

    arrays = [token_B, length_B, w.wte_VC, w.wpe_SC, w.ln_1_scale_LC, w.ln_1_bias_LC]
    arrays += [w.qkv_LNC, w.qkv_bias_LN, w.proj_LCC, w.proj_bias_LC, w.ln_2_scale_LC]
    arrays += [w.ln_2_bias_LC, w.fc_LFC, w.fc_bias_LF, w.out_LCF, w.out_bias_LC]
    arrays += [w.ln_f_scale_C, w.ln_f_bias_C, w.head_VC]
    first = len(arrays)
    logits = jax.ShapeDtypeStruct((1, vocab_size), dtype)
    *cached, result = _triton.call(
        decode_one_kernel,
        *arrays,
        cache.k_LBSHD,
        cache.v_LBSHD,
        cache.exchange,
        out=[jax.ShapeDtypeStruct((1,), jnp.int32) if likeliest else logits],
        grid=(programs,),
        in_place=tuple(range(first, first + 3)),
        num_warps=WARPS,
        L=blocks,
        C=c,
        H=heads,
        V=vocab_size,
        S=length,
        EPS=eps,
        PROGRAMS=programs,
        FP32_RESIDUAL=residual == jnp.float32,
        HALF=cache.exchange.shape[0] // 2,
        R=tiles.R,
        R_OUT=min(tiles.R, _power_of_two_below(WARPS * tiles.ELEMENTS // elements(4 * c, chunk_f))),
        R_HEAD=min(tiles.R_HEAD, _power_of_two_below(WARPS * tiles.ELEMENTS // elements(c, chunk))),
        TILES=max(1, min(3, tiles.ELEMENTS * WARPS // (elements(c, chunk) * tiles.R))),
        CK=chunk,
        CK_F=chunk_f,
        KEYS=min(tiles.KEYS, triton.next_power_of_2(length)),
        LIKELIEST=likeliest,
    )
    return result, *cached


def _many(weights, cache, token_B, length_B, heads, eps, residual, programs, tiles):
    w = weights
    dtype = w.head_VC.dtype
    tiles = tiles or (FP32 if dtype == jnp.float32 else Many())
    blocks, b, length, _, d = cache.k_LBSHD.shape
    vocab_size, c = w.head_VC.shape
    row = {"B": b, "S": length, "C": c, "CP": triton.next_power_of_2(c), "EPS": eps}
    bulk_requests = programs > 1 and (_dispatch.capability() or (0, 0)) >= (9, 0)
    keys_ahead = min(tiles.ahead_keys, length) if bulk_requests else 0
    early_keys = min(tiles.early_keys, keys_ahead)
    stream = [jax.ShapeDtypeStruct((b, c), residual), jax.ShapeDtypeStruct((b, c), dtype)]

    def matmul(x_BK, w_LNK, layer, tile, bias_LN=None, gelu=False):
        n, k = w_LNK.shape[-2:]
        parts = tile.parts if (k // tile.parts) % 16 == 0 else 1
        split = parts > 1 or (bias_LN is None and n == c)
        rows = max(16, triton.next_power_of_2(b))
        shape, out_dtype = ((parts, b, n), jnp.float32) if split else ((b, n), dtype)
        (y,) = _triton.call(
            triton_many.decode_matmul_kernel,
            x_BK,
            w_LNK,
            w_LNK if bias_LN is None else bias_LN,
            layer,
            out=[jax.ShapeDtypeStruct(shape, out_dtype)],
            grid=(triton.cdiv(n, tile.BN), parts),
            # At most 64 fp32 sums per thread: more sums spill registers.
            num_warps=max(tile.warps, rows * tile.BN // (64 * 32)),
            B=b,
            M=rows,
            N=n,
            K=k,
            P=parts,
            BN=tile.BN,
            BK=_chunk(k // parts, tile.BK),
            STAGES=tile.stages,
            HAS_BIAS=bias_LN is not None,
            GELU=gelu,
        )
        return y

    def add_and_norm(
        x_BC, parts_PBC, part_bias_LC, layer, scale, bias, norm_layer, next_LNK, keys=(0, 0, 0)
    ):
        key_layer, keys_from, keys_to = keys
        size = next_LNK.shape[-1] * next_LNK.shape[-2]
        lines = triton.next_power_of_2(triton.cdiv(size * dtype.itemsize, LINE_BYTES * b))
        return _triton.call(
            triton_many.decode_norm_kernel,
            x_BC,
            parts_PBC,
            part_bias_LC,
            scale,
            bias,
            next_LNK,
            length_B,
            k_LBSHD,
            v_LBSHD,
            layer,
            norm_layer,
            key_layer,
            out=stream,
            grid=(b,),
            num_warps=tiles.norm_warps,
            P=parts_PBC.shape[0],
            STRIDE=size,
            AHEAD_LINES=min(lines, tiles.ahead_lines) if programs > 1 else 0,
            KEYS_FROM=keys_from,
            KEYS_AHEAD=keys_to,
            **row,
        )

    k_LBSHD, v_LBSHD = cache.k_LBSHD, cache.v_LBSHD
    x_BC, y_BC = _triton.call(
        triton_many.decode_embed_kernel,
        token_B,
        length_B,
        w.wte_VC,
        w.wpe_SC,
        w.ln_1_scale_LC,
        w.ln_1_bias_LC,
        k_LBSHD,
        v_LBSHD,
        out=stream,
        grid=(b,),
        num_warps=tiles.norm_warps,
        V=vocab_size,
        KEYS_AHEAD=keys_ahead,
        **row,
    )
    for layer in range(blocks):
        qkv_BN = matmul(y_BC, w.qkv_LNC, layer, tiles.qkv, w.qkv_bias_LN)
        k_LBSHD, v_LBSHD, attended_BC = _triton.call(
            triton_many.decode_attention_kernel,
            qkv_BN,
            length_B,
            k_LBSHD,
            v_LBSHD,
            layer,
            out=[stream[1]],
            grid=(heads, b),
            in_place=(2, 3),
            num_warps=tiles.attention_warps,
            B=b,
            H=heads,
            D=d,
            S=length,
            KEYS=min(tiles.KEYS, triton.next_power_of_2(length)),
            STAGES=tiles.attention_stages,
        )
        proj_PBC = matmul(attended_BC, w.proj_LCC, layer, tiles.proj)
        following = layer + 1 < blocks
        norm = (w.ln_2_scale_LC, w.ln_2_bias_LC, layer, w.fc_LFC)
        early = (layer + 1, 0, early_keys) if following else (0, 0, 0)
        x_BC, y_BC = add_and_norm(x_BC, proj_PBC, w.proj_bias_LC, layer, *norm, early)
        hidden_BF = matmul(y_BC, w.fc_LFC, layer, tiles.fc, w.fc_bias_LF, gelu=True)
        out_PBC = matmul(hidden_BF, w.out_LCF, layer, tiles.out)
        if following:
            late = (layer + 1, early_keys, keys_ahead)
            norm = (w.ln_1_scale_LC, w.ln_1_bias_LC, layer + 1, w.qkv_LNC, late)
        else:
            norm = (w.ln_f_scale_C, w.ln_f_bias_C, 0, w.head_VC)
        x_BC, y_BC = add_and_norm(x_BC, out_PBC, w.out_bias_LC, layer, *norm)
    logits_BV = matmul(y_BC, w.head_VC, 0, tiles.head)
    return logits_BV, k_LBSHD, v_LBSHD, cache.exchange


def _chunk(k: int, most: int) -> int:
    """Return the largest power of two that divides k, at most `most`."""
    return min(k & -k, most)


def _power_of_two_below(n: int) -> int:
    """Return the largest power of two that is at most n, but at least 1."""
    return 1 << max(n, 1).bit_length() - 1
