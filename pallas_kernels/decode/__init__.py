"""GPT-2's forward pass of one token per sequence, with a KV cache, in few kernel launches.

For the token of each sequence b, at position t = length_b:

    x = wte[token] + wpe[t]
    for each block:
        q, k, v = LayerNorm(x) W_qkv + b_qkv; k and v are stored at position t of the cache
        x += softmax(q·K/√D) V W_proj + b_proj     over the positions 0…t, by head
        x += gelu(LayerNorm(x) W_fc + b_fc) W_out + b_out
    logits = LayerNorm(x) W_headᵀ

A step reads each weight once: 248 MB for GPT-2 124M in bf16, 52 µs at an H200's 4.8 TB/s.

Shapes: L blocks, B sequences, S cache positions, C channels, H heads, D = C/H, F = 4·C, N = 3·C,
V vocabulary.

Library: generation (`gptjax.generate`).

Back ends:
    triton: one sequence: one launch for all blocks; several: 7 launches a block. NVIDIA GPUs from
        Ampere on, the default on Hopper; up to 128 sequences in bf16 and fp16, 16 in fp32. The
        variance in LayerNorm is E[x²] − E[x]²: see `decode_step`. On sharded arrays, each device
        decodes its own sequences with whole weights.
    xla: plain JAX, with the roundings of the model; any device.
    reference: the definition, in fp32; any device.
No back end is differentiable.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, TRITON, XLA, BackEnd
from pallas_kernels._partition import Rule
from pallas_kernels._types import Array, Float, Int, PyTree
from pallas_kernels.gemm.numerics import Plain
from pallas_kernels.sampling import NO_DERIVATIVE, Filters, sample_token

Implementation = Literal["auto", "triton", "xla", "reference"]

MOST_SEQUENCES = {4: 16, 2: 128}
"""Largest number of sequences by the item size of the dtype: tensor cores have no true fp32."""
LEAST_CHUNK = 16
"""Least power of two that divides the number of channels and of a head's channels."""
MATRICES = ("qkv_LNC", "proj_LCC", "fc_LFC", "out_LCF", "head_VC")
EMBEDDINGS = ("wte_VC", "wpe_SC")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderWeights:
    """Weights of a GPT-2, stacked over the blocks. A matrix has a row for each output.

    The embeddings and vectors are fp32, the matrices in the compute dtype.
    """

    # Not typed as arrays: JAX builds such pytrees with placeholders, too.
    wte_VC: PyTree
    """Token embedding; may have more rows than the vocabulary."""
    wpe_SC: PyTree
    """Position embedding; may have more rows than the cache has positions."""
    ln_1_scale_LC: PyTree
    ln_1_bias_LC: PyTree
    qkv_LNC: PyTree
    qkv_bias_LN: PyTree
    proj_LCC: PyTree
    proj_bias_LC: PyTree
    ln_2_scale_LC: PyTree
    ln_2_bias_LC: PyTree
    fc_LFC: PyTree
    fc_bias_LF: PyTree
    out_LCF: PyTree
    out_bias_LC: PyTree
    ln_f_scale_C: PyTree
    ln_f_bias_C: PyTree
    head_VC: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderCache:
    """Keys and values of every block, in the compute dtype.

    Attributes:
        k_LBSHD, v_LBSHD: keys and values. Entries at positions from a sequence's length on may have
            any finite value.
        exchange: int32, used for one sequence only: activations that the programs of the kernel
            exchange, then the number of programs that have ended.
    """

    k_LBSHD: PyTree
    v_LBSHD: PyTree
    exchange: PyTree

    @staticmethod
    def of(k_LBSHD: Array, v_LBSHD: Array) -> "DecoderCache":
        """Return a cache of these keys and values."""
        blocks, b, _, heads, head_dim = k_LBSHD.shape
        if b > 1:
            return DecoderCache(k_LBSHD, v_LBSHD, jnp.zeros((1,), jnp.int32))
        size = _exchange_size(blocks, heads * head_dim)
        exchange = jnp.full((size,), -1, jnp.int32).at[-1].set(0)
        return DecoderCache(k_LBSHD, v_LBSHD, exchange)


def _exchange_size(blocks: int, channels: int) -> int:
    """Return the number of elements of the exchange of one sequence."""
    # Values of each block: x (C), qkv (3·C), attention (C), x after attention (C), hidden (4·C).
    # Then the final x, and 4 words for each of at most 256 programs, in which `store_likeliest`
    # sends the highest logits.
    half = (10 * blocks + 1) * channels + 4 * 256
    return 2 * half + 1


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a call on which the choice of a back end depends."""

    dtype: jax.typing.DTypeLike
    sequences: int
    channels: int
    head_dim: int
    precision: jax.lax.PrecisionLike = None


def _why_not_triton(facts: Facts) -> str | None:
    if (why := TRITON.why_not(facts)) is not None:
        return why
    dtype = jnp.dtype(facts.dtype)
    if facts.sequences > (most := MOST_SEQUENCES[dtype.itemsize]):
        return f"supports at most {most} sequences in {dtype.name}, not {facts.sequences}"
    for name, size in (("channels", facts.channels), ("channels of a head", facts.head_dim)):
        if size % LEAST_CHUNK:
            return f"needs a multiple of {LEAST_CHUNK} {name}, not {size}"
    if facts.head_dim & (facts.head_dim - 1):
        return f"needs a power of two as the channels of a head, not {facts.head_dim}"
    if dtype == jnp.float32 and Plain(facts.precision).tf32:
        return "computes fp32 matmuls in true fp32, not in TF32"
    return None


def _order(facts: Facts, split: bool) -> tuple[str, ...]:
    # The tiles were tuned on a Hopper GPU, and triton was compared with the reference on Hopper.
    return ("triton", "xla") if _dispatch.capability() == (9, 0) else ("xla",)


_dispatch.register(
    "decode_step",
    back_ends=[BackEnd("triton", _why_not_triton, custom=True, rule=True), XLA, REFERENCE],
    facts=Facts,
    order=_order,
)


def decode_step(
    weights: DecoderWeights,
    cache: DecoderCache,
    token_B: Int[Array, " B"],
    length_B: Int[Array, " B"],
    *,
    eps: float = 1e-5,
    residual_dtype: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    likeliest: bool = False,
    implementation: Implementation | str = "auto",
) -> tuple[Float[Array, "B V"] | Int[Array, " B"], DecoderCache]:
    """Return the logits of each sequence's next token, and the cache with this token's k and v.

    The back end triton computes the variance in LayerNorm as E[x²] − E[x]² in fp32, which is
    precise if the mean of the residual stream is at most some tens of its standard deviations. For
    two blocks of random fp32 weights and logits up to 4.4, the largest error of a logit is 0.002 at
    a mean of 80 standard deviations, 0.03 at 260 and 3 at 2,600. Select xla for larger means.

    Args:
        weights: matrices in fp32, bf16 or fp16.
        cache: triton overwrites it where its buffers are donated, and copies it elsewhere.
        token_B: ids in [0, V), int32. The logits of an id out of bounds are NaN.
        length_B: number of tokens of each sequence in the cache, int32. A length of S or more is
            replaced by S − 1.
        eps: added to the variance in LayerNorm.
        residual_dtype: dtype of the residual stream. None: fp32.
        precision: precision of fp32 matmuls in the back end xla.
        likeliest: return the likeliest tokens, int32, in place of the logits. Of tokens with equal
            logits, the lowest id is returned.
        implementation: "auto", or a back end: "triton", "xla", "reference".

    Returns:
        Logits in the dtype of the matrices, and the new cache.

    Raises:
        ValueError: inconsistent shapes, wrong dtypes, or the named back end cannot run here.
    """
    _check(weights, cache, token_B, length_B)
    args = _calls.once("decode_step", (weights, cache, token_B, length_B), NO_DERIVATIVE)
    weights, cache, token_B, length_B = args
    heads, head_dim = cache.k_LBSHD.shape[3:]
    residual_dtype = jnp.dtype(jnp.float32 if residual_dtype is None else residual_dtype)
    backend = _dispatch.select(
        "decode_step",
        implementation,
        arrays=args,
        dtype=weights.head_VC.dtype,
        sequences=token_B.shape[0],
        channels=heads * head_dim,
        head_dim=head_dim,
        precision=precision,
    )
    if backend == "triton":
        from pallas_kernels.decode import triton

        how = {"eps": eps, "residual_dtype": residual_dtype}
        # The choice is not in the launch: a shard with one of several sequences has no exchange.
        if one := len(token_B) == 1:
            kernel = functools.partial(
                triton.decode_one, programs=programs(), likeliest=likeliest, **how
            )
        else:
            kernel = functools.partial(triton.decode_many, **how)
            args = (weights, dataclasses.replace(cache, exchange=None), token_B, length_B)
        rule = _rule(weights, "b" if one and likeliest else "b v")
        launch = _calls.looped("decode_step", kernel, rule=rule, overwrites=True)
        result, new = launch(*args)
        if one:
            return result, new
        if likeliest:
            result = sample_token(result, jnp.zeros(token_B.shape), Filters())
        return result, dataclasses.replace(new, exchange=cache.exchange)
    dtype = weights.head_VC.dtype
    if backend == "reference":
        weights = jax.tree.map(lambda x: x.astype(jnp.float32), weights)
        residual_dtype, precision = jnp.dtype(jnp.float32), jax.lax.Precision.HIGHEST
    how = {"eps": eps, "residual_dtype": residual_dtype, "precision": precision}
    logits_BV, new = _in_jax(weights, cache, token_B, length_B, **how)
    logits_BV = logits_BV.astype(dtype)
    return (logits_BV.argmax(-1).astype(jnp.int32) if likeliest else logits_BV), new


def _rule(weights: DecoderWeights, result: str) -> Rule:
    """Return the rule of a launch, whose first result has these axes."""
    terms = [
        " ".join(f"w{i}_{axis}" for axis in range(x.ndim))
        for i, x in enumerate(jax.tree.leaves(weights))
    ]
    cache = "l b s h d, l b s h d, e"
    return Rule(f"{', '.join(terms)}, {cache}, b, b -> {result}, {cache}", over="b")


def programs() -> int:
    """Return the number of programs of the kernel: one on each SM of the default device."""
    return _dispatch.default_device().core_count


def _in_jax(weights, cache, token_B, length_B, *, eps, residual_dtype, precision):
    """Compute the definition, in the dtype of the matrices and with the model's roundings."""
    w, dtype = weights, weights.head_VC.dtype
    heads = cache.k_LBSHD.shape[3]
    position_B = jnp.minimum(length_B, cache.k_LBSHD.shape[2] - 1)
    known_B = (token_B >= 0) & (token_B < w.head_VC.shape[0])
    x_BC = jnp.take(w.wte_VC, jnp.where(known_B, token_B, w.wte_VC.shape[0]), axis=0)
    x_BC = (x_BC + w.wpe_SC[position_B]).astype(residual_dtype)
    matmul = functools.partial(
        jnp.einsum, "bk,nk->bn", precision=precision, preferred_element_type=jnp.float32
    )

    def norm(x_BC, scale_C, bias_C):
        x_BC = x_BC.astype(jnp.float32)
        x_BC -= x_BC.mean(-1, keepdims=True)
        x_BC *= jax.lax.rsqrt(jnp.square(x_BC).mean(-1, keepdims=True) + eps)
        return (x_BC * scale_C[None] + bias_C[None]).astype(dtype)

    def add(x_BC, matmul_BC, bias_C):
        matmul_BC = matmul_BC.astype(residual_dtype).astype(jnp.float32)
        return (x_BC.astype(jnp.float32) + matmul_BC + bias_C[None]).astype(residual_dtype)

    def block(x_BC, of_block):
        w, k_BSHD, v_BSHD = of_block
        y_BC = norm(x_BC, w.ln_1_scale_LC, w.ln_1_bias_LC)
        qkv_BN = (matmul(y_BC, w.qkv_LNC) + w.qkv_bias_LN[None]).astype(dtype)
        q_BHD, k_BHD, v_BHD = jnp.unstack(qkv_BN.reshape(len(qkv_BN), 3, heads, -1), axis=1)
        row_B = jnp.arange(len(position_B), dtype=jnp.int32)
        k_BSHD = k_BSHD.at[row_B, position_B].set(k_BHD.astype(k_BSHD.dtype))
        v_BSHD = v_BSHD.at[row_B, position_B].set(v_BHD.astype(v_BSHD.dtype))
        y_BC = _attend(q_BHD, k_BSHD, v_BSHD, position_B, precision).reshape(x_BC.shape)
        x_BC = add(x_BC, matmul(y_BC.astype(dtype), w.proj_LCC), w.proj_bias_LC)
        y_BC = norm(x_BC, w.ln_2_scale_LC, w.ln_2_bias_LC)
        hidden_BF = jax.nn.gelu(matmul(y_BC, w.fc_LFC) + w.fc_bias_LF[None]).astype(dtype)
        x_BC = add(x_BC, matmul(hidden_BF, w.out_LCF), w.out_bias_LC)
        return x_BC, (k_BSHD, v_BSHD)

    shared = ("wte_VC", "wpe_SC", "ln_f_scale_C", "ln_f_bias_C", "head_VC")
    stacked = dataclasses.replace(w, **dict.fromkeys(shared))
    x_BC, (k_LBSHD, v_LBSHD) = jax.lax.scan(block, x_BC, (stacked, cache.k_LBSHD, cache.v_LBSHD))
    logits_BV = matmul(norm(x_BC, w.ln_f_scale_C, w.ln_f_bias_C), w.head_VC).astype(dtype)
    return logits_BV, DecoderCache(k_LBSHD, v_LBSHD, cache.exchange)


def _attend(q_BHD, k_BSHD, v_BSHD, position_B, precision):
    """Return the attention of each sequence's query over the positions 0…position."""
    how = {"precision": precision, "preferred_element_type": jnp.float32}
    k_BSHD, v_BSHD = k_BSHD.astype(q_BHD.dtype), v_BSHD.astype(q_BHD.dtype)
    score_BHS = jnp.einsum("bhd,bshd->bhs", q_BHD, k_BSHD, **how) * q_BHD.shape[-1] ** -0.5
    visible_BS = jnp.arange(k_BSHD.shape[1], dtype=jnp.int32)[None] <= position_B[:, None]
    weight_BHS = jax.nn.softmax(jnp.where(visible_BS[:, None], score_BHS, -jnp.inf), axis=-1)
    return jnp.einsum("bhs,bshd->bhd", weight_BHS.astype(v_BSHD.dtype), v_BSHD, **how)


def _check(weights, cache, token_B, length_B):
    cached, head_VC = cache.k_LBSHD.shape, weights.head_VC
    if len(cached) != 5:
        raise ValueError(f"decode_step: expected k_LBSHD of shape (L, B, S, H, D), got {cached}")
    blocks, b, _, heads, head_dim = cached
    c, v = heads * head_dim, head_VC.shape[0]
    floats = {"head_VC": head_VC, **vars(weights), **vars(cache)}
    integers = {"exchange": floats.pop("exchange"), "token_B": token_B, "length_B": length_B}
    if b > 1:  # the exchange is not used
        del integers["exchange"]
    # A name ends with the letters of the axes.
    sizes = dict(zip("LBSHDCNFV", (*cached, c, 3 * c, 4 * c, v), strict=True))
    for name, x in (floats | integers).items():
        shape = tuple(sizes.get(axis, 0) for axis in name.rpartition("_")[2])
        shape = (_exchange_size(blocks, c),) if name == "exchange" else shape
        found, more, dtypes = x.shape, "", _dispatch.DTYPES
        if name in EMBEDDINGS:
            found, more = (*map(min, x.shape[:1], shape), *x.shape[1:]), " or with more rows"
        if found != shape:
            raise ValueError(
                f"decode_step: expected {name} of shape {shape}{more} for a cache of shape "
                f"{cached} and {v} tokens, got {x.shape}"
            )
        if name in integers:
            dtypes = (jnp.int32,)
        elif name in MATRICES and x.dtype in dtypes:
            dtypes = (head_VC.dtype,)
        if x.dtype not in dtypes:
            expected = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
            expected += " as head_VC" if name in MATRICES else ""
            raise ValueError(f"decode_step: expected {name} in {expected}, got {x.dtype}")
