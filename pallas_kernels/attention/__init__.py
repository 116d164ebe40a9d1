"""Scaled dot-product attention of each head.

    S = scale · Q Kᵀ      L_t = log Σ_s exp(S_ts)
    P_ts = exp(S_ts − L_t) where query t sees key s, else 0      O = P V

and with D_t = Σ_d dO_td · O_td − dL_t:

    dV = Pᵀ dO      dS = P ∘ (dO Vᵀ − D)      dQ = scale · dS K      dK = scale · dSᵀ Q

The flash kernels hold one tile of S or P at a time: memory is O(T). The forward pass saves Q, K, V,
O and L. Dao, "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024.

Shapes: B batch, T time (as many keys as queries), H query heads, K key and value heads, D head
dimension. Arrays are B·T·H·D ("BTHD"); the packed projection is B·T·3·H·D: q, k and v, in this
order. With fewer key and value heads than query heads (grouped-query attention), query head h uses
key head h // (H/K). The log-sum-exp L uses the natural logarithm and is fp32, B·H·T.

Back ends:
    mosaic: Pallas Mosaic GPU (TMA, wgmma), for Hopper. Skips tiles outside documents and windows.
    triton: NVIDIA GPUs from Ampere on; the only back end with fp32 as TF32 and O(T) memory. Skips
        the same tiles.
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
from typing import Literal, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import DTYPES, REFERENCE, XLA, BackEnd
from pallas_kernels._partition import Rule
from pallas_kernels.attention.documents import document_bounds
from pallas_kernels.gemm.numerics import Numerics, numerics_of

Implementation = Literal["auto", "cudnn", "mosaic", "triton", "xla", "reference"]


def flash_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BTKD: Float[Array, "B T K D"],
    v_BTKD: Float[Array, "B T K D"],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    numerics: str | Numerics | None = None,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B T H D"] | tuple[Float[Array, "B T H D"], Float[Array, "B H T"]]:
    """Scaled dot-product attention, causal by default.

    Args:
        q_BTHD, k_BTKD, v_BTKD: queries, keys, values of one dtype: fp32, bf16 or fp16. H is a
            multiple of K.
        causal: query t sees keys 0…t; otherwise all.
        scale: multiplies Q·K; 1/√D when None.
        window: query t sees only its last `window` keys, t−window+1…t. Needs `causal`.
        segment_ids: integers of any type. A document is a run of equal ids, and a query sees only
            keys of the query's document. Two runs of the same id, separated by another id, are
            different documents.
        return_lse: also return the log-sum-exp L.
        deterministic: use only back ends whose gradients repeat bit for bit.
        numerics: "fp32", "tf32", "bf16", or a `pallas_kernels.gemm.Plain`. None: follows the dtypes
            and `precision`. 16-bit arrays are multiplied in their dtype.
        implementation: "auto", or a back end: "mosaic", "triton", "cudnn", "xla", "reference".
            Forward mode and second derivatives need "xla" or "reference".
        precision: precision of fp32 matmuls, as in `jax.lax.dot`: "highest" is true fp32. None is
            that of `jax.default_matmul_precision`, by default TF32 on a GPU.

    Returns:
        O, with the shape and dtype of `q_BTHD`; with `return_lse` (O, L). L is B·H·T in fp32 and
        differentiable.

    Raises:
        ValueError: wrong shapes, dtypes or numerics, or the named back end cannot run this call.
    """
    _check(q_BTHD, k_BTKD, v_BTKD, segment_ids, causal=causal, window=window)
    options = Options(causal, scale, window, deterministic, _precision(numerics, precision))
    operands = (q_BTHD, k_BTKD, v_BTKD)
    return _attend(operands, segment_ids, options, return_lse, implementation)


def flash_attention_qkv(
    qkv_BT3HD: Float[Array, "B T 3 H D"],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
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
    _check(*_split((qkv_BT3HD,)), segment_ids, causal=causal, window=window)
    options = Options(causal, scale, window, deterministic, _precision(numerics, precision))
    return _attend((qkv_BT3HD,), segment_ids, options, return_lse, implementation)


def reference(
    q_BTHD,
    k_BTKD,
    v_BTKD,
    *,
    causal=True,
    scale: float | None = None,
    window=None,
    segment_ids=None,
    return_lse=False,
):
    """Compute the definition in fp32 with true fp32 matmuls for every input dtype. Return fp32."""
    scale = q_BTHD.shape[-1] ** -0.5 if scale is None else scale
    bounds = None if segment_ids is None else document_bounds(segment_ids)
    options = Options(causal, scale, window)
    out_BTHD, lse_BHT = _exact(options, q_BTHD, k_BTKD, v_BTKD, bounds)
    return (out_BTHD, lse_BHT) if return_lse else out_BTHD


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


def _why_not_cudnn(call: Facts) -> str | None:
    if _dispatch.capability() is None:
        return f"needs an NVIDIA GPU, and the default device is a {_dispatch.platform()}"
    if _dispatch.capability() < (8, 0):
        return f"needs compute capability 8.0 (Ampere) or later, not {_dispatch.capability()}"
    if (why := _dispatch.why_not_16_bit(call.dtype)) is not None:
        return why
    if call.head_dim % 8 or call.head_dim > 128:
        return f"supports head dimensions of a multiple of 8 and at most 128, not {call.head_dim}"
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
    if call.head_dim not in (64, 128):
        return f"supports a head dimension of 64 or 128, not {call.head_dim}"
    return None


def _why_not_triton(call: Facts) -> str | None:
    if call.head_dim > 128:
        return f"supports a head dimension of at most 128, not {call.head_dim}"
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
    """Return the back ends of the first row of `FASTEST` that matches the call."""
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
    window: int | None = None
    """For back ends None, if the window covers the sequence or the documents' bounds include it."""
    deterministic: bool = False
    precision: jax.lax.PrecisionLike = None

    @property
    def true_fp32(self) -> bool:
        """Whether fp32 matmuls are true fp32, not TF32."""
        return _is_true_fp32(self.precision)


def _precision(numerics, precision):
    """Return the precision of fp32 matmuls."""
    precision = numerics_of("flash_attention", numerics, precision).precision
    # Read here, because the backward pass may be traced where another default is set.
    return jax.config.jax_default_matmul_precision if precision is None else precision


def _attend(operands, segments_BT, options: Options, return_lse: bool, implementation: str):
    """Compute attention of operands (q, k, v) or (qkv,)."""
    length, head_dim, dtype = operands[0].shape[1], operands[0].shape[-1], operands[0].dtype
    backend = _dispatch.select(
        "flash_attention",
        implementation,
        arrays=(operands, segments_BT),
        dtype=dtype,
        length=length,
        head_dim=head_dim,
        window=options.window,
        segments=segments_BT is not None,
        return_lse=return_lse,
        deterministic=options.deterministic,
        precision=options.precision,
    )
    scale = head_dim**-0.5 if options.scale is None else float(options.scale)
    window = None if options.window is None or options.window >= length else options.window
    bounds = None
    if segments_BT is not None:
        bounds, window = document_bounds(segments_BT, window=window), None
    options = dataclasses.replace(options, scale=scale, window=window)
    if backend == "cudnn":
        return _in_cudnn(options, *_split(operands))
    if backend in _MODULES:
        out_BTHD, lse_BHT = _calls.differentiable(
            "flash_attention", _flash, backend, options, operands, bounds
        )
    elif backend == "xla":
        out_BTHD, lse_BHT = _materialized(options, *_split(operands), bounds)
    else:
        out_BTHD, lse_BHT = _exact(options, *_split(operands), bounds)
        out_BTHD = out_BTHD.astype(dtype)
    return (out_BTHD, lse_BHT) if return_lse else out_BTHD


def _split(operands):
    return operands if len(operands) == 3 else tuple(operands[0][:, :, i] for i in range(3))


# -------------------------------------------------------------------------------- mosaic and triton

# Imported at the first use: a CPU needs neither Triton nor Mosaic.
_MODULES = {
    "mosaic": {"forward": "mosaic_forward", "backward": "mosaic_backward"},
    "triton": {"forward": "triton", "backward": "triton"},
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(backend, options, operands, bounds):
    return _run(backend, options, "forward", operands, bounds)


def _flash_forward(backend, options, operands, bounds):
    operands, bounds = jax.custom_derivatives.custom_vjp_primal_tree_values((operands, bounds))
    results = _run(backend, options, "forward", operands, bounds)
    out_BTHD, lse_BHT = _calls.saved("flash_attention", results)
    return (out_BTHD, lse_BHT), (operands, bounds, out_BTHD, lse_BHT)


def _flash_backward(backend, options, saved, cotangents):
    operands, bounds, out_BTHD, lse_BHT = saved
    dout_BTHD, dlse_BHT = cotangents
    if isinstance(dout_BTHD, jax.custom_derivatives.SymbolicZero):
        dout_BTHD = jnp.zeros(dout_BTHD.shape, dout_BTHD.dtype)
    if isinstance(dlse_BHT, jax.custom_derivatives.SymbolicZero):
        dlse_BHT = None
    args = (operands, bounds, lse_BHT, dout_BTHD, out_BTHD, dlse_BHT)
    return _run(backend, options, "backward", *args), None


_flash.defvjp(_flash_forward, _flash_backward, symbolic_zeros=True)


def _run(backend, options, name, operands, bounds, *arrays):
    """Run `forward` or `backward` of the back end."""
    module = importlib.import_module(f"{__name__}.{_MODULES[backend][name]}")
    f = functools.partial(getattr(module, name), options=options)
    if len(operands) == 1:
        given, query = "b* t z h d", "h"
    else:  # query head h uses key head h // (H / K): both are split alike
        query = "h" if operands[0].shape[2] == operands[1].shape[2] else "h.g"
        given = f"b* t {query} d, b* s h d, b* s h d"
    bounded = "b* t" if bounds is None else "b* t, b* t"
    if name == "forward":
        rule = f"{given}, {bounded} -> b* t {query} d, b* {query} t"
    else:
        out, rows = f"b* t {query} d", f"b* {query} t"
        rule = f"{given}, {bounded}, {rows}, {out}, {out}, {rows} -> {given}"
    rule = Rule(rule, over="b* h")
    launch = _calls.batched("flash_attention", f, rule=rule)
    return launch(operands, bounds, *arrays)


# ------------------------------------------------------------------------------------ cudnn and xla


def _in_cudnn(options, q_BTHD, k_BTKD, v_BTKD):
    return jax.nn.dot_product_attention(
        q_BTHD,
        k_BTKD,
        v_BTKD,
        scale=options.scale,
        is_causal=options.causal,
        local_window_size=None if options.window is None else (options.window - 1, 0),
        implementation="cudnn",
    )


def _materialized(options, q_BTHD, k_BTKD, v_BTKD, bounds):
    b, t, h, d = q_BTHD.shape
    groups = k_BTKD.shape[2]
    q_BTKGD = q_BTHD.reshape(b, t, groups, h // groups, d)
    fp32_sums = {"precision": options.precision, "preferred_element_type": jnp.float32}
    scores_BKGTS = jnp.einsum("btkgd,bskd->bkgts", q_BTKGD, k_BTKD, **fp32_sums) * options.scale
    visible_BTS = _visible(options, t, bounds)
    if visible_BTS is not None:
        scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, -jnp.inf)
    lse_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BTKD.dtype)
    out_BTKGD = jnp.einsum("bkgts,bskd->btkgd", weights_BKGTS, v_BTKD, precision=options.precision)
    return out_BTKGD.reshape(b, t, h, d), lse_BKGT.reshape(b, h, t)


def _exact(options, q_BTHD, k_BTKD, v_BTKD, bounds):
    """Compute `_materialized` in fp32 with true fp32 matmuls. Return fp32."""
    options = dataclasses.replace(options, precision=jax.lax.Precision.HIGHEST)
    qkv = (x.astype(jnp.float32) for x in (q_BTHD, k_BTKD, v_BTKD))
    return _materialized(options, *qkv, bounds)


def _visible(options, length, bounds):
    """Return the mask of the keys s that each query t sees, B·T·S or 1·T·S; None for all."""
    if not options.causal and bounds is None:
        return None
    visible_BTS = jnp.ones((1, length, length), bool)
    if options.causal:
        t_T1, s_1S = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
        visible_BTS &= (s_1S <= t_T1)[None]
        if options.window is not None:
            visible_BTS &= (s_1S > t_T1 - options.window)[None]
    if bounds is not None:
        s_11S = jnp.arange(length, dtype=jnp.int32)[None, None]
        visible_BTS = visible_BTS & (bounds.first_BT[:, :, None] <= s_11S)
        visible_BTS = visible_BTS & (s_11S <= bounds.last_BT[:, :, None])
    return visible_BTS


def _check(q_BTHD, k_BTKD, v_BTKD, segments_BT, *, causal, window):
    shapes = f"{q_BTHD.shape}, {k_BTKD.shape}, {v_BTKD.shape}"
    if not (
        q_BTHD.ndim == k_BTKD.ndim == 4
        and k_BTKD.shape == v_BTKD.shape
        and (*q_BTHD.shape[:2], q_BTHD.shape[3]) == (*k_BTKD.shape[:2], k_BTKD.shape[3])
        and min(*q_BTHD.shape[2:], *k_BTKD.shape[2:]) >= 1
    ):
        raise ValueError(
            "flash_attention: expected q of shape (batch, time, heads, head_dim), k and v of shape "
            f"(batch, time, key heads, head_dim), with heads and channels, got {shapes}"
        )
    if q_BTHD.shape[2] % k_BTKD.shape[2]:
        raise ValueError(
            "flash_attention: expected a number of heads that is a multiple of that of key heads, "
            f"got {shapes}"
        )
    if not q_BTHD.dtype == k_BTKD.dtype == v_BTKD.dtype:
        raise ValueError(
            f"flash_attention: expected one dtype for q, k, v, got {q_BTHD.dtype}, {k_BTKD.dtype}, "
            f"{v_BTKD.dtype}"
        )
    if q_BTHD.dtype not in DTYPES:
        raise ValueError(
            f"flash_attention: expected float32, bfloat16 or float16, got {q_BTHD.dtype}"
        )
    if segments_BT is not None and (
        segments_BT.shape != q_BTHD.shape[:2] or not jnp.issubdtype(segments_BT.dtype, jnp.integer)
    ):
        raise ValueError(
            f"flash_attention: expected segment_ids of shape {q_BTHD.shape[:2]} in integers, "
            f"got {segments_BT.shape} in {segments_BT.dtype}"
        )
    if window is not None and not (causal and isinstance(window, SupportsIndex) and window >= 1):
        raise ValueError(
            "flash_attention: a window needs causal=True and an integer size of at least 1, got "
            f"{causal=} {window=}"
        )


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
