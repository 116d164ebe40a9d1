"""Launches of the decoding kernels, with their tiles.

One sequence: one launch computes all blocks of a token. The grid has one program on each SM, so
that all programs are resident at once, as the exchange between programs requires. Several
sequences: 7 launches per block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton

from pallas_kernels import _dispatch, _triton
from pallas_kernels.decode import triton_many
from pallas_kernels.decode.triton_functions import WARPS
from pallas_kernels.decode.triton_one import decode_one_kernel

# One sequence: rows of a tile of weights, one row per warp; keys of a tile of attention; largest
# number of 16-bit weights that a thread loads at once.
R, R_HEAD, KEYS, ELEMENTS = 8, 32, 256, 128


class Tile(NamedTuple):
    """Columns, depth and pipeline stages of a matmul of several sequences."""

    BN: int = 32
    BK: int = 128
    STAGES: int = 4


# Tiles of the blocks' matmuls and of the head's, by the item size. Three programs of the 16-bit
# head fit on an SM: all 393 programs of GPT-2 are resident on 132 SMs.
TILES = {2: (Tile(), Tile(BN=128, BK=64, STAGES=3)), 4: (Tile(BK=32, STAGES=2),) * 2}
# Largest number of cache lines of the next matmul's weights that each program of a LayerNorm
# prefetches to the L2 cache, and bytes of a line.
AHEAD_LINES, LINE_BYTES = 1024, 128
# Largest number of keys per sequence that are prefetched to the L2 cache, before the MLP of the
# previous block: 38 MB for 128 sequences of GPT-2 124M.
AHEAD_KEYS = 96


def decode_one(weights, cache, token_B, length_B, *, eps, residual_dtype, programs, likeliest):
    """Return (logits (1, V), cache) after one token of one sequence.

    Args:
        programs: number of SMs of the device.
        likeliest: return the likeliest token, (1,) int32, in place of the logits.
    """
    blocks, _, length, heads, _ = cache.k_LBSHD.shape
    (vocab_size, c), dtype = weights.head_VC.shape, weights.head_VC.dtype
    chunk, chunk_f = _chunk(c, 256), _chunk(4 * c, 256)

    def rows(most, k, chunk):
        """Return the number of rows of k columns, at most `most`, that the warps load at once."""
        elements = triton.next_power_of_2(k // chunk) * chunk * dtype.itemsize // 64
        return max(1, min(most, WARPS * ELEMENTS // elements))

    logits = jax.ShapeDtypeStruct((1, vocab_size), dtype)
    *cached, result = _triton.call(
        decode_one_kernel,
        token_B,
        length_B,
        tuple(jax.tree.leaves(weights)),
        cache.k_LBSHD,
        cache.v_LBSHD,
        cache.exchange,
        out=[jax.ShapeDtypeStruct((1,), jnp.int32) if likeliest else logits],
        grid=(programs,),
        in_place=(3, 4, 5),
        num_warps=WARPS,
        L=blocks,
        C=c,
        H=heads,
        V=vocab_size,
        S=length,
        EPS=eps,
        PROGRAMS=programs,
        FP32_RESIDUAL=residual_dtype == jnp.float32,
        HALF=cache.exchange.shape[0] // 2,
        R=R,
        R_OUT=_power_of_two_below(rows(R, 4 * c, chunk_f)),
        R_HEAD=_power_of_two_below(rows(R_HEAD, c, chunk)),
        TILES=max(1, rows(3 * R, c, chunk) // R),
        CK=chunk,
        CK_F=chunk_f,
        KEYS=min(KEYS, triton.next_power_of_2(length)),
        LIKELIEST=likeliest,
    )
    return result, type(cache)(*cached)


def decode_many(weights, cache, token_B, length_B, *, eps, residual_dtype):
    """Return (logits (B, V), cache) after one token of each sequence, without the exchange."""
    w, dtype, k_LBSHD, v_LBSHD = weights, weights.head_VC.dtype, cache.k_LBSHD, cache.v_LBSHD
    blocks, b, length, heads, d = k_LBSHD.shape
    vocab_size, c = w.head_VC.shape
    row = {"B": b, "S": length, "C": c, "CP": triton.next_power_of_2(c), "EPS": eps}
    bulk_requests = (_dispatch.capability() or (0, 0)) >= (9, 0)
    keys_ahead = min(AHEAD_KEYS, length) if bulk_requests else 0
    stream = [jax.ShapeDtypeStruct((b, c), residual_dtype), jax.ShapeDtypeStruct((b, c), dtype)]
    tile, head_tile = TILES[dtype.itemsize]

    def matmul(x_BK, w_LNK, layer, bias_LN=None, *, parts=None, tile=tile, gelu=False):
        """Multiply; return the fp32 `parts` of the sum over K (split K) if given."""
        n, k = w_LNK.shape[-2:]
        split = parts if parts and k // parts % 16 == 0 else 1
        rows = max(16, triton.next_power_of_2(b))
        shape, out_dtype = ((split, b, n), jnp.float32) if parts else ((b, n), dtype)
        (y,) = _triton.call(
            triton_many.decode_matmul_kernel,
            x_BK,
            w_LNK,
            bias_LN,
            layer,
            out=[jax.ShapeDtypeStruct(shape, out_dtype)],
            grid=(triton.cdiv(n, tile.BN), split),
            # At most 64 fp32 sums per thread: more sums spill registers.
            num_warps=max(4, rows * tile.BN // (64 * 32)),
            B=b,
            M=rows,
            N=n,
            K=k,
            P=split,
            GELU=gelu,
            **tile._replace(BK=_chunk(k // split, tile.BK))._asdict(),
        )
        return y

    def add_and_norm(x_BC, parts_PBC, part_bias_LC, layer, scale, bias, norm_layer, next_LNK, keys):
        size = next_LNK.shape[-1] * next_LNK.shape[-2]
        lines = triton.next_power_of_2(triton.cdiv(size * dtype.itemsize, LINE_BYTES * b))
        return _triton.call(
            triton_many.decode_norm_kernel,
            *(x_BC, parts_PBC, part_bias_LC, scale, bias, next_LNK, length_B, k_LBSHD, v_LBSHD),
            layer,
            norm_layer,
            out=stream,
            grid=(b,),
            P=parts_PBC.shape[0],
            STRIDE=size,
            AHEAD=min(lines, AHEAD_LINES) * LINE_BYTES // dtype.itemsize,
            KEYS=keys,
            **row,
        )

    ln_1, ln_2 = (w.ln_1_scale_LC, w.ln_1_bias_LC), (w.ln_2_scale_LC, w.ln_2_bias_LC)
    x_BC, y_BC = _triton.call(
        triton_many.decode_embed_kernel,
        *(token_B, length_B, w.wte_VC, w.wpe_SC, *ln_1, k_LBSHD, v_LBSHD),
        out=stream,
        grid=(b,),
        V=vocab_size,
        KEYS=keys_ahead,
        **row,
    )
    for layer in range(blocks):
        qkv_BN = matmul(y_BC, w.qkv_LNC, layer, w.qkv_bias_LN)
        k_LBSHD, v_LBSHD, attended_BC = _triton.call(
            triton_many.decode_attention_kernel,
            *(qkv_BN, length_B, k_LBSHD, v_LBSHD),
            layer,
            out=[stream[1]],
            grid=(heads, b),
            in_place=(2, 3),
            B=b,
            H=heads,
            D=d,
            S=length,
            KEYS=min(32, triton.next_power_of_2(length)),
        )
        following = layer + 1 < blocks
        proj_PBC = matmul(attended_BC, w.proj_LCC, layer, parts=2)
        norm = (*ln_2, layer, w.fc_LFC, keys_ahead if following else 0)
        x_BC, y_BC = add_and_norm(x_BC, proj_PBC, w.proj_bias_LC, layer, *norm)
        hidden_BF = matmul(y_BC, w.fc_LFC, layer, w.fc_bias_LF, gelu=True)
        out_PBC = matmul(hidden_BF, w.out_LCF, layer, parts=4)
        if following:
            norm = (*ln_1, layer + 1, w.qkv_LNC, 0)
        else:
            norm = (w.ln_f_scale_C, w.ln_f_bias_C, 0, w.head_VC, 0)
        x_BC, y_BC = add_and_norm(x_BC, out_PBC, w.out_bias_LC, layer, *norm)
    return matmul(y_BC, w.head_VC, 0, tile=head_tile), type(cache)(k_LBSHD, v_LBSHD, None)


def _chunk(k: int, most: int) -> int:
    """Return the largest power of two that divides k, at most `most`."""
    return min(k & -k, most)


def _power_of_two_below(n: int) -> int:
    """Return the largest power of two that is at most n, but at least 1."""
    return 1 << max(n, 1).bit_length() - 1
