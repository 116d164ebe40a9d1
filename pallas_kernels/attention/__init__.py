"""Scaled dot-product attention of each head.

    S = cap(scale · Q Kᵀ) + bias      L_t = log Σ_s exp(S_ts)      cap(x) = c·tanh(x/c), or x
    P_ts = exp(S_ts − L_t) where query t sees key s, else 0      O = P V

and with D_t = Σ_d dO_td · O_td − dL_t:

    dV = Pᵀ dO      dS = P ∘ (dO Vᵀ − D)      dbias = dS      dS' = dS ∘ (1 − (cap/c)²)
    dQ = scale · dS' K      dK = scale · dS'ᵀ Q

The flash kernels hold one tile of S or P at a time: memory is O(T). The forward pass saves Q, K, V,
O and L. D uses the saved O, rounded to 16 bits in bf16 and fp16: for a query of few keys, this is
the largest error of dS. Dao, "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024.

Query t has a position among the keys, t + query_start. A query that sees no key has O = 0, L = −∞
and gradients of 0.

Shapes: B batch, T queries, S keys, H query heads, K key and value heads, D head dimension, E that
of the values. Arrays are B·T·H·D ("BTHD"); the packed projection is B·T·3·H·D: q, k and v, in this
order. With fewer key and value heads than query heads (grouped-query attention), query head h uses
key head h // (H/K). The log-sum-exp L uses the natural logarithm and is fp32, B·H·T.

Back ends:
    mosaic: Pallas Mosaic GPU (TMA, wgmma), for Hopper. Skips tiles outside documents and windows.
    triton: NVIDIA GPUs from Ampere on; the only back end with fp32 as TF32 and O(T) memory, and
        the only kernel with biases, E ≠ D and every mask. Skips the same tiles.
    cudnn: cuDNN's fused attention through `jax.nn.dot_product_attention`. bf16 or fp16.
    xla: plain JAX that stores S; any device. Softmax statistics are fp32 in every dtype.
    reference: the definition in fp32, which stores S; any device.
mosaic, triton and cudnn are differentiable once, in reverse mode; xla and reference also in forward
mode and to any order. mosaic and triton read q, k and v in place from the packed projection, and
store the gradient of the projection as one array.
"""

import dataclasses
import functools
import importlib
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels._partition import Rule
from pallas_kernels._types import Array, Float, Integer
from pallas_kernels.attention.arguments import check, with_hints
from pallas_kernels.attention.documents import Ranges
from pallas_kernels.attention.masks import Masks, Options, masked, without_start
from pallas_kernels.attention.xla import exact, in_cudnn, materialized
from pallas_kernels.gemm.numerics import Numerics, numerics_of

Implementation = Literal["auto", "cudnn", "mosaic", "triton", "xla", "reference"]


@with_hints
def flash_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKE: Float[Array, "B S K E"],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks_H: Float[Array, " H"] | None = None,
    bias: Float[Array, "#B #H T S"] | Float[Array, " H"] | None = None,
    segment_ids: Integer[Array, "B T"]
    | tuple[Integer[Array, "B T"], Integer[Array, "B S"]]
    | None = None,
    key_range: tuple[Integer[Array, "B T"], Integer[Array, "B T"]] | None = None,
    query_start: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    numerics: str | Numerics | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | str = "auto",
) -> Float[Array, "B T H E"] | tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """Scaled dot-product attention, causal by default.

    Args:
        q_BTHD, k_BSKD, v_BSKE: queries, keys, values of one dtype: fp32, bf16 or fp16. H is a
            multiple of K. "triton" supports D and E up to 256.
        causal: a query sees the keys up to the query's position; otherwise all.
        scale: multiplies Q·K; 1/√D when None.
        window: number of keys up to its position that a query sees; needs `causal`. Or a pair
            (left, right): the keys position − left … position + right, where None is no limit.
        softcap: c of c·tanh(scale·Q·K/c), applied before the bias.
        sinks_H: a learned logit of each head, added to the softmax's denominator. L includes it.
        bias: added to the scores, of q's dtype or fp32; axes of batch and heads may be 1. Its
            gradient is an array of B·H·T·S. A bias of −∞ masks any score, also NaN; the masked
            values must be finite. Or ALiBi's slopes, H: bias −slope · (position − s).
        segment_ids: integers of any type. A document is a run of equal ids, and a query sees only
            keys of the query's document. Two runs of the same id, separated by another id, are
            different documents. Or a pair, ids of queries and ids of keys: a query sees the keys
            with an equal id, wherever they are.
        key_range: the first and the last key that each query sees, in any order; for prefix-LM,
            for example. Combined with the other masks.
        query_start: position of query 0 among the keys; S − T when None, so that the last query
            has the position of the last key.
        return_lse: also return the log-sum-exp L.
        deterministic: use only back ends whose gradients repeat bit for bit.
        numerics: "fp32", "tf32", "bf16", or a `pallas_kernels.gemm.Plain`. None: follows the dtypes
            and `precision`. 16-bit arrays are multiplied in their dtype.
        precision: precision of fp32 matmuls, as in `jax.lax.dot`: "highest" is true fp32. None is
            that of `jax.default_matmul_precision`, by default TF32 on a GPU.
        implementation: "auto", or a back end: "mosaic", "triton", "cudnn", "xla", "reference".
            Forward mode and second derivatives need "xla" or "reference".

    Returns:
        O, B·T·H·E in the dtype of `q_BTHD`; with `return_lse` (O, L). L is B·H·T in fp32 and
        differentiable. A query that sees no key has O = 0, L = −∞ and gradients of 0.

    Raises:
        ValueError: wrong shapes, dtypes or numerics, or the named back end cannot run this call.
        TypeError: an option that is passed by position, or that another library has.

    Examples:
        >>> flash_attention(q, k, v)  # causal; as many keys as queries
        >>> flash_attention(q, k, v, causal=False)  # encoder, cross-attention
        >>> flash_attention(q, k, v, scale=1.0, softcap=50.0)  # Gemma 2
        >>> flash_attention(q, k, v, window=1024)  # Mistral: the last 1024 keys
        >>> flash_attention(q, k, v, causal=False, window=(256, 256))  # both sides
        >>> flash_attention(q, k, v, window=128, sinks_H=sinks)  # gpt-oss
        >>> flash_attention(q, k, v, bias=slopes_H)  # ALiBi
        >>> flash_attention(q, k, v, causal=False, bias=bias_1HTS)  # T5
        >>> flash_attention(q, k, v, segment_ids=document_BT)  # packed documents
        >>> flash_attention(q, k, v, causal=False, segment_ids=(ids_BT, ids_BS))  # padding
        >>> last = jnp.maximum(jnp.arange(T)[None], prefix_B[:, None] - 1)  # prefix-LM
        >>> flash_attention(q, k, v, causal=False, key_range=(jnp.zeros_like(last), last))
        >>> flash_attention(q[:, -64:], k, v)  # the last 64 queries; query_start is S − 64
        >>> flash_attention(q[:, :64], k, v, query_start=0)  # the first 64 queries
        >>> out, lse_BHT = flash_attention(q, k, v, return_lse=True)
        >>> flash_attention(q, k, v, deterministic=True)
        >>> flash_attention(q, k, v, numerics="fp32", implementation="triton")
        >>> flash_attention(q, k, v, precision="highest")  # fp32, as in jax.lax.dot
    """
    precision = _precision(numerics, precision)
    options = Options(causal, scale, window, deterministic, precision, softcap, query_start)
    masks = Masks(segment_ids, key_range)
    operands = (q_BTHD, k_BSKD, v_BSKE)
    check("flash_attention", *operands, options, masks, sinks_H, bias)
    return _attend(operands, masks, options, return_lse, implementation, sinks_H, bias)


@with_hints
def flash_attention_qkv(
    qkv_BT3HD: Float[Array, "B T 3 H D"],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks_H: Float[Array, " H"] | None = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    numerics: str | Numerics | None = None,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B T H D"] | tuple[Float[Array, "B T H D"], Float[Array, "B H T"]]:
    """Attention of the packed output of one projection, with a packed gradient.

    Args:
        qkv_BT3HD: q, k and v along the third axis.
        implementation: "auto", "mosaic", "triton", "cudnn", "xla" or "reference".

    The other arguments, the result and the errors are as in `flash_attention`.

    Examples:
        >>> flash_attention_qkv((x @ w).reshape(B, T, 3, H, D))
        >>> flash_attention_qkv(qkv, causal=False, scale=1.0)
        >>> flash_attention_qkv(qkv, window=1024, segment_ids=document_BT)
        >>> flash_attention_qkv(qkv, softcap=50.0, sinks_H=sinks)
        >>> out, lse_BHT = flash_attention_qkv(qkv, return_lse=True)
        >>> flash_attention_qkv(qkv, deterministic=True)
        >>> flash_attention_qkv(qkv, numerics="fp32", implementation="triton")
        >>> flash_attention_qkv(qkv, precision="highest")  # fp32, as in jax.lax.dot
    """
    if qkv_BT3HD.ndim != 5 or qkv_BT3HD.shape[2] != 3:
        raise ValueError(
            "flash_attention_qkv: expected (batch, time, 3, heads, head_dim), got "
            f"{qkv_BT3HD.shape}"
        )
    precision, masks = _precision(numerics, precision), Masks(segment_ids)
    options = Options(causal, scale, window, deterministic, precision, softcap)
    check("flash_attention", *_split((qkv_BT3HD,)), options, masks, sinks_H)
    return _attend((qkv_BT3HD,), masks, options, return_lse, implementation, sinks_H, None)


def reference(
    q_BTHD,
    k_BSKD,
    v_BSKE,
    *,
    causal=True,
    scale: float | None = None,
    window=None,
    softcap=None,
    sinks_H=None,
    bias=None,
    segment_ids=None,
    key_range=None,
    query_start=None,
    return_lse=False,
):
    """Compute the definition in fp32 with true fp32 matmuls for every input dtype. Return fp32."""
    scale = q_BTHD.shape[-1] ** -0.5 if scale is None else scale
    options = Options(causal, scale, window, softcap=softcap, start=query_start)
    options, bounds = masked(options, Masks(segment_ids, key_range), q_BTHD, k_BSKD)
    out_BTHE, lse_BHT = exact(options, q_BTHD, k_BSKD, v_BSKE, bounds, bias)
    if sinks_H is not None:
        out_BTHE, lse_BHT = _with_sinks(out_BTHE, lse_BHT, sinks_H)
    return (out_BTHE, lse_BHT) if return_lse else out_BTHE


def _with_sinks(out_BTHE, lse_BHT, sinks_H):
    """Add the sinks to the softmax's denominator: L' = log(exp(L) + exp(sink)), in fp32."""
    total_BHT = jnp.logaddexp(lse_BHT, sinks_H.astype(jnp.float32)[None, :, None])
    share_BTH1 = jnp.exp(lse_BHT - total_BHT).swapaxes(1, 2)[..., None]
    return (out_BTHE.astype(jnp.float32) * share_BTH1).astype(out_BTHE.dtype), total_BHT


def _precision(numerics, precision):
    """Return the precision of fp32 matmuls."""
    precision = numerics_of("flash_attention", numerics, precision).precision
    # Read here, because the backward pass may be traced where another default is set.
    return jax.config.jax_default_matmul_precision if precision is None else precision


def _attend(operands, masks, options: Options, return_lse: bool, implementation, sinks_H, bias):
    """Compute attention of operands (q, k, v) or (qkv,)."""
    q_BTHD, k_BSKD, v_BSKE = _split(operands)
    head_dim, dtype = q_BTHD.shape[-1], q_BTHD.dtype
    options, bounds = masked(options, masks, q_BTHD, k_BSKD)
    backend = _dispatch.select(
        "flash_attention",
        implementation,
        arrays=(operands, masks, sinks_H, bias),
        dtype=dtype,
        length=q_BTHD.shape[1],
        head_dim=head_dim,
        window=options.window,
        segments=masks.segment_ids is not None,
        return_lse=return_lse or sinks_H is not None,
        deterministic=options.deterministic,
        precision=options.precision,
        keys=k_BSKD.shape[1],
        value_dim=v_BSKE.shape[-1],
        softcap=options.softcap is not None,
        bias=bias is not None,
        ranges=isinstance(bounds, Ranges),
        sinks=sinks_H is not None,
    )
    scale = head_dim**-0.5 if options.scale is None else float(options.scale)
    window = options.window if bounds is None else None
    options = dataclasses.replace(options, scale=scale, window=window)
    if backend == "cudnn":
        return in_cudnn(options, q_BTHD, k_BSKD, v_BSKE)
    if backend in _MODULES:
        if backend == "triton":
            options, bounds = without_start(options, bounds, q_BTHD, k_BSKD)
        if bias is not None and bias.shape[0] == 1 < bias.ndim:
            bias = bias[0]
        out_BTHE, lse_BHT = _calls.differentiable(
            "flash_attention", _flash, backend, options, operands, bounds, bias
        )
    elif backend == "xla":
        out_BTHE, lse_BHT = materialized(options, q_BTHD, k_BSKD, v_BSKE, bounds, bias)
    else:
        out_BTHE, lse_BHT = exact(options, q_BTHD, k_BSKD, v_BSKE, bounds, bias)
        out_BTHE = out_BTHE.astype(dtype)
    if sinks_H is not None:
        out_BTHE, lse_BHT = _with_sinks(out_BTHE, lse_BHT, sinks_H)
    return (out_BTHE, lse_BHT) if return_lse else out_BTHE


def _split(operands):
    return operands if len(operands) == 3 else tuple(operands[0][:, :, i] for i in range(3))


# Imported at the first use: a CPU needs neither Triton nor Mosaic.
_MODULES = {
    "mosaic": {"forward": "mosaic_forward", "backward": "mosaic_backward"},
    "triton": {"forward": "triton", "backward": "triton"},
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(backend, options, operands, bounds, bias):
    return _run(backend, options, "forward", operands, bounds, bias)


def _flash_forward(backend, options, operands, bounds, bias):
    # The structure of the residuals says whether the bias is differentiated.
    wanted = () if bias is not None and bias.perturbed else None
    operands, bounds, bias = jax.custom_derivatives.custom_vjp_primal_tree_values(
        (operands, bounds, bias)
    )
    results = _run(backend, options, "forward", operands, bounds, bias)
    out_BTHE, lse_BHT = _calls.saved("flash_attention", results)
    return (out_BTHE, lse_BHT), (operands, bounds, bias, out_BTHE, lse_BHT, wanted)


def _flash_backward(backend, options, saved, cotangents):
    operands, bounds, bias, out_BTHE, lse_BHT, wanted = saved
    dout_BTHE, dlse_BHT = cotangents
    if isinstance(dout_BTHE, jax.custom_derivatives.SymbolicZero):
        dout_BTHE = jnp.zeros(dout_BTHE.shape, dout_BTHE.dtype)
    if isinstance(dlse_BHT, jax.custom_derivatives.SymbolicZero):
        dlse_BHT = None
    arrays = (lse_BHT, dout_BTHE, out_BTHE, dlse_BHT)
    how = {} if wanted is None else {"bias_gradient": True}
    gradients = _run(backend, options, "backward", operands, bounds, bias, *arrays, **how)
    if wanted is None:
        return gradients, None, None
    *gradients, dbias = gradients
    dbias = dbias.astype(jnp.float32)  # B·H·T·S, or B·H·T for slopes
    if bias.ndim == 1:
        dbias = dbias.sum((0, 2))
    else:
        dbias = dbias.sum(1, keepdims=True) if bias.shape[-3] == 1 else dbias
        dbias = dbias.sum(0) if bias.ndim == 3 else dbias
    return tuple(gradients), None, dbias.astype(bias.dtype)


_flash.defvjp(_flash_forward, _flash_backward, symbolic_zeros=True)


def _run(backend, options, name, operands, bounds, bias, *arrays, **how):
    """Run `forward` or `backward` of the back end."""
    module = importlib.import_module(f"{__name__}.{_MODULES[backend][name]}")
    f = functools.partial(getattr(module, name), options=options, **how)
    if len(operands) == 1:
        given, query, out = "b* t z h d", "h", "b* t h d"
    else:  # query head h uses key head h // (H / K): both are split alike
        query = "h" if operands[0].shape[2] == operands[1].shape[2] else "h.g"
        given, out = f"b* t {query} d, b* s h d, b* s h e", f"b* t {query} e"
    bounded = {0: "b* t", 2: "b* t, b* t", 4: "b* t, b* t, b* t, b* s"}[len(bounds or ())]
    rows = f"b* {query} t"
    if name == "forward":
        inputs, results = f"{given}, {bounded}", f"{out}, {rows}"
    else:
        inputs, results = f"{given}, {bounded}, {rows}, {out}, {out}, {rows}", given
    if bias is not None:
        axes = ("one" if bias.shape[-3:-2] == (1,) else query) + " t s"
        inputs += ", " + {1: query, 3: axes, 4: f"b* {axes}"}[bias.ndim]
        results += (f", {rows}" if bias.ndim == 1 else f", {rows} s") if how else ""
    rule = Rule(f"{inputs} -> {results}", over="b* h")
    launch = _calls.batched("flash_attention", f, rule=rule)
    return launch(operands, bounds, *arrays, *([] if bias is None else [bias]))


def _example(rows, dtype, heads, head_dim, **options):
    t = min(rows, 1024)
    qkv_BT3HD = jax.ShapeDtypeStruct((rows // t, t, 3, heads, head_dim), dtype)
    return _dispatch.Example(
        functools.partial(flash_attention_qkv, **options),
        lambda qkv_BT3HD: reference(*jnp.moveaxis(qkv_BT3HD, 2, 0)),
        (qkv_BT3HD,),
    )


@_dispatch.example("flash_attention")
def _head_dim_64_example(rows, dtype):
    """Heads of GPT-2, packed."""
    return _example(rows, dtype, 12, 64)


@_dispatch.example("flash_attention")
def _head_dim_128_example(rows, dtype):
    """Heads of Llama, packed: they need the most shared memory."""
    return _example(rows, dtype, 6, 128)


@_dispatch.example("flash_attention")
def _true_fp32_example(rows, dtype):
    """Heads of GPT-2 in true fp32, which has tiles of its own."""
    if dtype != jnp.float32:
        return None
    return _example(rows, dtype, 12, 64, precision=jax.lax.Precision.HIGHEST)


@_dispatch.example("flash_attention")
def _head_dim_256_example(rows, dtype):
    """Heads of Gemma, packed: only Triton's kernels support them."""
    return _example(rows, dtype, 2, 256)


def _example_of_options(rows, dtype, keys_per_query, arrays=lambda t, s: (), **options):
    """Return an example with 4 heads, 2 key heads and further arrays, named by `arrays`."""
    t = min(rows, 1024)
    s = keys_per_query * t
    extra = dict(arrays(t, s))
    sizes = ((rows // t, t, 4, 64), (rows // t, s, 2, 64), (rows // t, s, 2, 64), *extra.values())

    def call(f, q_BTHD, k_BSKD, v_BSKE, *more, **how):
        return f(q_BTHD, k_BSKD, v_BSKE, **dict(zip(extra, more, strict=True)), **options, **how)

    return _dispatch.Example(
        functools.partial(call, flash_attention),
        functools.partial(call, reference),
        tuple(jax.ShapeDtypeStruct(size, dtype) for size in sizes),
    )


@_dispatch.example("flash_attention")
def _softcap_example(rows, dtype):
    """Soft cap and a window on both sides."""
    return _example_of_options(rows, dtype, 1, softcap=2.0, window=(70, 30), causal=False)


@_dispatch.example("flash_attention")
def _chunk_example(rows, dtype):
    """Soft cap, and more keys than queries: Mosaic's kernels support both."""
    return _example_of_options(rows, dtype, 2, softcap=2.0)


@_dispatch.example("flash_attention")
def _bias_example(rows, dtype):
    """Bias, sinks, and more keys than queries."""
    return _example_of_options(rows, dtype, 2, lambda t, s: {"bias": (1, 4, t, s), "sinks_H": (4,)})
