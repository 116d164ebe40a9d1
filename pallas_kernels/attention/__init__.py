"""Scaled dot-product attention of each head.

    S = cap(scale · Q Kᵀ) + bias      L_t = log Σ_s exp(S_ts)      cap(x) = c·tanh(x/c), or x
    P_ts = exp(S_ts − L_t) where query t sees key s, else 0      O = P V

and with D_t = Σ_d dO_td · O_td − dL_t:

    dV = Pᵀ dO      dS = P ∘ (dO Vᵀ − D)      dbias = dS      dS' = dS ∘ (1 − (cap/c)²)
    dQ = scale · dS' K      dK = scale · dS'ᵀ Q

The flash kernels hold one tile of S or P at a time: memory is O(T). The forward pass saves Q, K, V,
O and L. Dao, "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024.

Query t has a position among the keys, t + query_start. A query that sees no key has O = 0, L = −∞
and gradients of 0.

Shapes: B batch, T queries, S keys, H query heads, K key and value heads, D head dimension, E that
of the values. Arrays are B·T·H·D ("BTHD"); the packed projection is B·T·3·H·D: q, k and v, in this
order. With fewer key and value heads than query heads (grouped-query attention), query head h uses
key head h // (H/K). The log-sum-exp L uses the natural logarithm and is fp32, B·H·T.

Back ends:
    mosaic: Pallas Mosaic GPU (TMA, wgmma), for Hopper. Skips tiles outside documents and windows.
    triton: NVIDIA GPUs from Ampere on; the only back end with fp32 as TF32 and O(T) memory, and
        the only kernel with soft caps, biases, S ≠ T, E ≠ D and every mask. Skips the same tiles.
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
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import DTYPES, REFERENCE, XLA, BackEnd
from pallas_kernels._partition import Rule
from pallas_kernels.attention.documents import Ranges, document_bounds, ranges
from pallas_kernels.gemm.numerics import Numerics, numerics_of

Implementation = Literal["auto", "cudnn", "mosaic", "triton", "xla", "reference"]


_HINTS = {
    "is_causal": "the option is named causal, and is True by default",
    "mask": "an arbitrary mask is a bias of 0 and −∞; window, segment_ids and key_range skip tiles",
    "attn_mask": "an arbitrary mask is a bias of 0 and −∞; causal=False turns the causal mask off",
    "dropout_p": "there is no dropout",
    "logits_soft_cap": "the option is named softcap",
    "local_window_size": "the option is named window",
}


def _with_hints[**P, R](f: Callable[P, R]) -> Callable[P, R]:
    """Wrap f: options of other libraries, and options passed by position, raise a TypeError that
    says what to write."""
    arrays = sum(
        p.kind == p.POSITIONAL_OR_KEYWORD for p in inspect.signature(f).parameters.values()
    )

    @functools.wraps(f)
    def call(*args: P.args, **options: P.kwargs) -> R:
        for name in options.keys() & _HINTS.keys():
            raise TypeError(f"{f.__name__}: unknown option {name}: {_HINTS[name]}")
        if len(args) > arrays:
            raise TypeError(f"{f.__name__}: options are passed by name, such as causal=True")
        return f(*args, **options)

    return call


@_with_hints
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
            gradient is an array of B·H·T·S. Or ALiBi's slopes, H: bias −slope · (position − s).
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
        >>> flash_attention(q, k, v, precision="highest", implementation="triton")
    """
    options = Options(causal, scale, window, deterministic, _precision(numerics, precision))
    options = dataclasses.replace(options, softcap=softcap, start=query_start)
    masks = Masks(segment_ids, key_range)
    operands = (q_BTHD, k_BSKD, v_BSKE)
    _check(*operands, options, masks, sinks_H, bias)
    return _attend(operands, masks, options, return_lse, implementation, sinks_H, bias)


@_with_hints
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
    """
    if qkv_BT3HD.ndim != 5 or qkv_BT3HD.shape[2] != 3:
        raise ValueError(
            "flash_attention_qkv: expected (batch, time, 3, heads, head_dim), got "
            f"{qkv_BT3HD.shape}"
        )
    options = Options(causal, scale, window, deterministic, _precision(numerics, precision))
    options, masks = dataclasses.replace(options, softcap=softcap), Masks(segment_ids)
    _check(*_split((qkv_BT3HD,)), options, masks, sinks_H, None)
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
    options, bounds, _ = _masked(options, Masks(segment_ids, key_range), q_BTHD, k_BSKD)
    out_BTHE, lse_BHT = _exact(options, q_BTHD, k_BSKD, v_BSKE, bounds(), bias)
    if sinks_H is not None:
        out_BTHE, lse_BHT = _with_sinks(out_BTHE, lse_BHT, sinks_H)
    return (out_BTHE, lse_BHT) if return_lse else out_BTHE


# ---------------------------------------------------------------------------------------- back ends


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a call on which the choice of a back end depends."""

    dtype: jax.typing.DTypeLike
    length: int
    head_dim: int
    window: int | None = None
    segments: bool = False
    """Whether there are segment ids."""
    return_lse: bool = False
    deterministic: bool = False
    precision: jax.lax.PrecisionLike = None
    keys: int | None = None
    """Number of keys; None: `length`."""
    value_dim: int | None = None
    """Head dimension of the values; None: `head_dim`."""
    softcap: bool = False
    bias: bool = False
    ranges: bool = False
    """Whether the mask is more than a causal or a full mask, a window before the query, and
    documents of equally many queries and keys."""
    sinks: bool = False

    @property
    def triton_only(self) -> str | None:
        """What the other kernels would need to support the call, or None."""
        if self.keys not in (None, self.length):
            return f"as many keys as queries, not {self.keys} and {self.length}"
        if self.value_dim not in (None, self.head_dim):
            return f"values of the head dimension of the keys, not {self.value_dim}"
        if self.softcap or self.bias:
            return "scores without a soft cap and a bias"
        if self.ranges:
            return "a causal or full mask, an integer window and documents, not other masks"
        return None


def _why_not_cudnn(call: Facts) -> str | None:
    if _dispatch.capability() is None:
        return f"needs an NVIDIA GPU, and the default device is a {_dispatch.platform()}"
    if _dispatch.capability() < (8, 0):
        return f"needs compute capability 8.0 (Ampere) or later, not {_dispatch.capability()}"
    if (why := _dispatch.why_not_16_bit(call.dtype)) is not None:
        return why
    if call.triton_only:
        return f"supports {call.triton_only}"
    largest = 256 if _dispatch.capability() == (9, 0) else 128
    if call.head_dim % 8 or call.head_dim > largest:
        return (
            f"supports head dimensions of a multiple of 8 and at most {largest} here, not "
            f"{call.head_dim}"
        )
    if call.length % 2:
        return f"supports an even sequence length (needed by the backward pass), not {call.length}"
    if call.segments:
        return "does not support segment ids"
    if call.return_lse:
        return "drops the gradient of the log-sum-exp"
    if call.deterministic:
        return "sums the gradients in any order, and deterministic=True excludes that"
    return None


def _why_not_mosaic(call: Facts) -> str | None:
    if (why := _dispatch.why_not_mosaic() or _dispatch.why_not_16_bit(call.dtype)) is not None:
        return why
    if call.triton_only:
        return f"supports {call.triton_only}"
    if call.head_dim not in (64, 128):
        return f"supports a head dimension of 64 or 128, not {call.head_dim}"
    return None


def _why_not_triton(call: Facts) -> str | None:
    if (largest := max(call.head_dim, call.value_dim or 0)) > 256:
        return f"supports a head dimension of at most 256, not {largest}"
    return _dispatch.why_not_triton()


class _Fastest(NamedTuple):
    """A row of `FASTEST`: back ends for a kind of GPU and shape, fastest first.

    The first row that matches the call applies.
    """

    capability: tuple[int, int] | None
    matmul: str
    """"16" (bf16, fp16), "tf32" or "fp32"."""
    head_dim: int | None
    narrow: bool | None
    """Whether the window is at most an eighth of the sequence."""
    order: tuple[str, ...]


# Ordered by the time of forward plus backward pass in benchmarks/results/kernels/attention.json
# (H200). GPUs without a row were not measured: on these GPUs cuDNN comes first, and Triton is used
# where cuDNN cannot run.
FASTEST = (
    _Fastest((9, 0), "16", 64, True, ("triton", "mosaic", "cudnn", "xla")),
    _Fastest((9, 0), "16", 64, None, ("mosaic", "triton", "cudnn", "xla")),
    _Fastest((9, 0), "16", 128, None, ("mosaic", "cudnn", "triton", "xla")),
    _Fastest(None, "16", None, None, ("cudnn", "triton", "xla")),
    _Fastest(None, "tf32", None, None, ("triton", "xla")),
    _Fastest((9, 0), "fp32", 64, None, ("triton", "xla")),
    _Fastest(None, "fp32", None, None, ("xla",)),
)
TRUE_FP32 = (
    *(jax.lax.Precision.HIGHEST, "highest", "float32"),
    *(jax.lax.DotAlgorithmPreset.F32_F32_F32, "F32_F32_F32"),
)


def _is_true_fp32(precision: jax.lax.PrecisionLike) -> bool:
    """Return whether fp32 matmuls with this precision are true fp32, not TF32."""
    return any(
        p in TRUE_FP32 for p in (precision if isinstance(precision, tuple) else (precision,))
    )


def _order(call: Facts, partitioned: bool) -> tuple[str, ...]:
    """Return the back ends of the first row of `FASTEST` that matches the call.

    Calls that are not in `FASTEST` avoid "xla", which stores S.
    """
    if call.triton_only or call.sinks:
        return "mosaic", "triton", "xla"
    if call.head_dim > 128:  # benchmarks/results/attention_options.json (H100)
        return "cudnn", "triton", "xla"
    fp32 = "fp32" if _is_true_fp32(call.precision) else "tf32"
    matmul = "16" if jnp.dtype(call.dtype).itemsize == 2 else fp32
    narrow = call.window is not None and 8 * call.window <= call.length
    return next(
        row.order
        for row in FASTEST
        if row.capability in (None, _dispatch.capability())
        and row.matmul == matmul
        and row.head_dim in (None, call.head_dim)
        and row.narrow in (None, narrow)
    )


_dispatch.register(
    "flash_attention",
    back_ends=[
        BackEnd("cudnn", _why_not_cudnn),
        BackEnd("mosaic", _why_not_mosaic, custom=True, rule=True),
        BackEnd("triton", _why_not_triton, custom=True, rule=True),
        XLA,
        REFERENCE,
    ],
    facts=Facts,
    order=_order,
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call. The back ends receive a float as `scale`."""

    causal: bool = True
    scale: float | None = None
    window: Any = None
    """For back ends an integer or None. None, if the window covers the sequence or the bounds
    include it."""
    deterministic: bool = False
    precision: jax.lax.PrecisionLike = None
    softcap: float | None = None
    start: int | None = None
    """Position of query 0. For back ends an integer."""

    @property
    def true_fp32(self) -> bool:
        """Whether fp32 matmuls are true fp32, not TF32."""
        return _is_true_fp32(self.precision)


class Masks(NamedTuple):
    """Array arguments that mask: `segment_ids` and `key_range`."""

    segment_ids: Any
    key_range: Any = None


def _masked(options: Options, masks: Masks, q_BTHD, k_BSKD):
    """Return the options for back ends, a function that computes the bounds, and whether the bounds
    are `Ranges`.

    The bounds are `Ranges` if causal masks, windows and documents of the kernels do not express the
    call. Else the bounds are `Documents`, or None without segment ids.
    """
    (batch, length), keys = q_BTHD.shape[:2], k_BSKD.shape[1]
    start = keys - length if options.start is None else options.start
    window, ids = options.window, masks.segment_ids
    left, right = window if isinstance(window, tuple) else (window and window - 1, None)
    right = 0 if options.causal else right
    square, pair = length == keys and start == 0, isinstance(ids, tuple)
    # The window covers the keys before the queries; the queries see all keys after them.
    if left is not None and start + length - 1 <= left:
        left = None
    if right is not None and not square and start + right >= keys - 1:
        right = None
    documents = None if ids is None or pair else functools.partial(document_bounds, ids)
    options = dataclasses.replace(options, causal=False, window=None, start=start)
    if masks.key_range is None and not pair and (left is right is None or square and right == 0):
        window = None if left is None else left + 1
        options = dataclasses.replace(options, causal=right == 0, window=window)
        bounds = (lambda: None) if documents is None else lambda: documents(window=window)
        return options, bounds, False
    position_T = jnp.arange(start, start + length, dtype=jnp.int32)

    def bounds():
        return ranges(
            batch,
            keys,
            position_T,
            (left, right),
            documents=documents and documents(),
            ids=ids if pair else None,
            given=masks.key_range,
        )

    return options, bounds, True


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
    options, bounds, any_mask = _masked(options, masks, q_BTHD, k_BSKD)
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
        ranges=any_mask,
        sinks=sinks_H is not None,
    )
    bounds = bounds()
    scale = head_dim**-0.5 if options.scale is None else float(options.scale)
    options = dataclasses.replace(options, scale=scale)
    if bounds is not None:
        options = dataclasses.replace(options, window=None)
    if backend == "cudnn":
        return _in_cudnn(options, q_BTHD, k_BSKD, v_BSKE)
    if backend in _MODULES:
        if bias is not None and bias.shape[0] == 1 < bias.ndim:
            bias = bias[0]
        out_BTHE, lse_BHT = _calls.differentiable(
            "flash_attention", _flash, backend, options, operands, bounds, bias
        )
    elif backend == "xla":
        out_BTHE, lse_BHT = _materialized(options, q_BTHD, k_BSKD, v_BSKE, bounds, bias)
    else:
        out_BTHE, lse_BHT = _exact(options, q_BTHD, k_BSKD, v_BSKE, bounds, bias)
        out_BTHE = out_BTHE.astype(dtype)
    if sinks_H is not None:
        out_BTHE, lse_BHT = _with_sinks(out_BTHE, lse_BHT, sinks_H)
    return (out_BTHE, lse_BHT) if return_lse else out_BTHE


def _split(operands):
    return operands if len(operands) == 3 else tuple(operands[0][:, :, i] for i in range(3))


# -------------------------------------------------------------------------------- mosaic and triton

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


# ------------------------------------------------------------------------------------ cudnn and xla


def _in_cudnn(options, q_BTHD, k_BSKD, v_BSKE):
    return jax.nn.dot_product_attention(
        q_BTHD,
        k_BSKD,
        v_BSKE,
        scale=options.scale,
        is_causal=options.causal,
        local_window_size=None if options.window is None else (options.window - 1, 0),
        implementation="cudnn",
    )


def _materialized(options, q_BTHD, k_BSKD, v_BSKE, bounds, bias):
    b, t, h, d = q_BTHD.shape
    _, s, groups, e = v_BSKE.shape
    q_BTKGD = q_BTHD.reshape(b, t, groups, h // groups, d)
    fp32_sums = {"precision": options.precision, "preferred_element_type": jnp.float32}
    scores_BKGTS = jnp.einsum("btkgd,bskd->bkgts", q_BTKGD, k_BSKD, **fp32_sums) * options.scale
    if options.softcap is not None:
        scores_BKGTS = options.softcap * jnp.tanh(scores_BKGTS / options.softcap)
    if bias is not None:
        scores_BKGTS += _bias(options, bias, t, s, groups, h // groups)
    visible_BTS = _visible(options, t, s, bounds)
    if visible_BTS is not None:
        scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, -jnp.inf)
    if may_be_empty := isinstance(bounds, Ranges) or bias is not None:
        empty_BKGT1 = (scores_BKGTS == -jnp.inf).all(-1, keepdims=True)
        scores_BKGTS = jnp.where(empty_BKGT1, 0, scores_BKGTS)
    lse_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKE.dtype)
    if may_be_empty:
        lse_BKGT = jnp.where(empty_BKGT1[..., 0], -jnp.inf, lse_BKGT)
        weights_BKGTS = jnp.where(empty_BKGT1, 0, weights_BKGTS)
    out_BTKGE = jnp.einsum("bkgts,bskd->btkgd", weights_BKGTS, v_BSKE, precision=options.precision)
    return out_BTKGE.reshape(b, t, h, e), lse_BKGT.reshape(b, h, t)


def _exact(options, q_BTHD, k_BSKD, v_BSKE, bounds, bias):
    """Compute `_materialized` in fp32 with true fp32 matmuls. Return fp32."""
    options = dataclasses.replace(options, precision=jax.lax.Precision.HIGHEST)
    qkv = (x.astype(jnp.float32) for x in (q_BTHD, k_BSKD, v_BSKE))
    return _materialized(options, *qkv, bounds, bias)


def _bias(options, bias, queries, keys, groups, members):
    """Return the bias of the scores in fp32: B·K·G·T·S, with axes of 1 for broadcast axes."""
    bias = bias.astype(jnp.float32)
    if bias.ndim == 1:
        distance_TS = jnp.arange(keys)[None] - jnp.arange(queries)[:, None] - options.start
        return (
            bias.reshape(1, groups, members, 1, 1)
            * distance_TS.astype(jnp.float32)[None, None, None]
        )
    batch, heads = bias.shape[:2]
    grouped = (1, 1) if heads == 1 else (groups, members)
    return bias.reshape(batch, *grouped, queries, keys)


def _visible(options, queries, keys, bounds):
    """Return the mask of the keys s that each query t sees, B·T·S or 1·T·S; None for all."""
    if not options.causal and bounds is None:
        return None
    visible_BTS = jnp.ones((1, queries, keys), bool)
    if options.causal:
        t_T1, s_1S = jnp.arange(queries)[:, None], jnp.arange(keys)[None, :]
        visible_BTS &= (s_1S <= t_T1)[None]
        if options.window is not None:
            visible_BTS &= (s_1S > t_T1 - options.window)[None]
    if bounds is not None:
        s_11S = jnp.arange(keys, dtype=jnp.int32)[None, None]
        visible_BTS = visible_BTS & (bounds.first_BT[:, :, None] <= s_11S)
        visible_BTS = visible_BTS & (s_11S <= bounds.last_BT[:, :, None])
    if isinstance(bounds, Ranges) and bounds.key_ids_BS is not None:
        visible_BTS &= bounds.query_ids_BT[:, :, None] == bounds.key_ids_BS[:, None]
    return visible_BTS


def _check(q_BTHD, k_BSKD, v_BSKE, options, masks, sinks_H, bias):
    def expected(expectation, got):
        raise ValueError(f"flash_attention: expected {expectation}, got {got}")

    shapes = f"{q_BTHD.shape}, {k_BSKD.shape}, {v_BSKE.shape}"
    if not (
        q_BTHD.ndim == k_BSKD.ndim == v_BSKE.ndim == 4
        and k_BSKD.shape[:3] == v_BSKE.shape[:3]
        and (q_BTHD.shape[0], q_BTHD.shape[3]) == (k_BSKD.shape[0], k_BSKD.shape[3])
        and min(*q_BTHD.shape[2:], *k_BSKD.shape[2:], v_BSKE.shape[3]) >= 1
        and (k_BSKD.shape[1] or not q_BTHD.shape[1])
    ):
        expected(
            "q of shape (batch, time, heads, head_dim), k and v of shape (batch, keys, key heads, "
            "head_dim), with keys, heads and channels",
            shapes,
        )
    if q_BTHD.shape[2] > max(256, q_BTHD.shape[1]):
        expected(
            "(batch, time, heads, head_dim)",
            f"{shapes}: {q_BTHD.shape[2]} heads of {q_BTHD.shape[1]} tokens. Swap axes 1 and 2 of "
            "arrays of shape (batch, heads, time, head_dim): jnp.swapaxes(x, 1, 2)",
        )
    if q_BTHD.shape[2] % k_BSKD.shape[2]:
        expected("a number of heads that is a multiple of that of key heads", shapes)
    if not q_BTHD.dtype == k_BSKD.dtype == v_BSKE.dtype:
        dtypes = f"{q_BTHD.dtype}, {k_BSKD.dtype}, {v_BSKE.dtype}"
        expected("one dtype for q, k, v", dtypes)
    if q_BTHD.dtype not in DTYPES:
        expected("float32, bfloat16 or float16", q_BTHD.dtype)
    (b, t, h, _), s = q_BTHD.shape, k_BSKD.shape[1]

    def integers(name, x, shape):
        if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
            expected(f"{name} of shape {shape} in integers", f"{x.shape} in {x.dtype}")

    if isinstance(masks.segment_ids, tuple):
        for x, length, name in zip(masks.segment_ids, (t, s), ("queries", "keys"), strict=True):
            integers(f"segment_ids of {name}", x, (b, length))
    elif masks.segment_ids is not None:
        integers("segment_ids", masks.segment_ids, (b, t))
        if t != s:
            expected("a pair of segment_ids, of queries and of keys", f"{t} queries and {s} keys")
    for x in masks.key_range or ():
        integers("key_range", x, (b, t))
    window = options.window
    if isinstance(window, tuple):
        if len(window) != 2 or any(x is not None and not _is_integer(x, 0) for x in window):
            expected("a window of two integers of at least 0 or None", f"{window=}")
    elif window is not None and not (options.causal and _is_integer(window, 1)):
        raise ValueError(
            "flash_attention: a window needs causal=True and an integer size of at least 1, got "
            f"causal={options.causal} {window=}. Without causal, pass window=(left, right)"
        )
    if options.softcap is not None and not options.softcap > 0:
        expected("a positive softcap", options.softcap)
    if sinks_H is not None and sinks_H.shape != (h,):
        expected(f"sinks_H of shape {(h,)}", sinks_H.shape)
    if bias is not None:
        shape = bias.shape
        if bias.dtype not in (q_BTHD.dtype, jnp.float32):
            expected(f"a bias in {q_BTHD.dtype} or float32", bias.dtype)
        if shape != (h,) and (
            len(shape) != 4
            or shape[2:] != (t, s)
            or shape[0] not in (1, b)
            or shape[1] not in (1, h)
        ):
            expected(f"slopes of shape {(h,)} or a bias of shape {(b, h, t, s)}", shape)


def _is_integer(x, least):
    return isinstance(x, SupportsIndex) and x >= least


# ----------------------------------------------------------------------------------------- examples


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
def _bias_example(rows, dtype):
    """Bias, sinks, and more keys than queries."""
    return _example_of_options(rows, dtype, 2, lambda t, s: {"bias": (1, 4, t, s), "sinks_H": (4,)})
