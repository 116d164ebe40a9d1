"""LayerNorm and RMSNorm over the last axis, fused with the addition of a residual.

    total = x + residual + residual_bias      (added in fp32, rounded once to x's dtype)

    layer_norm:  y = (total − mean) · rstd · scale + bias
                 mean = Σ total / C
                 rstd = 1/√(Σ (total − mean)² / C + eps)

    rms_norm:    y = total · rstd · scale
                 rstd = 1/√(Σ total² / C + eps)

and with x̂ = y before scale and bias, g = dy · scale:

    dx = dresidual = rstd · (g − Σ g / C − x̂ · Σ (g·x̂) / C) + dtotal      (no Σ g / C in rms_norm)
    dscale = Σ_n dy · x̂
    dbias = Σ_n dy
    dresidual_bias = Σ_n dx

residual_bias is the bias of the linear layer whose matmul result is `residual`. rms_norm has no
residual_bias.

Ba et al., "Layer Normalization", 2016; Zhang and Sennrich, "Root Mean Square Layer Normalization",
2019.

Shapes: N rows (all leading axes), C channels, S statistics (mean and rstd, or rstd alone).
Statistics, sums and the arithmetic are fp32 in every dtype. The forward pass saves total and the
statistics.

Back ends:
    triton: one pass over memory forward and one backward, plus a sum of C-vectors. NVIDIA GPUs from
        Ampere on.
    xla: plain JAX that saves the same arrays; any device.
    reference: the definition, in fp32, its gradients by JAX: forward mode and higher derivatives
        work. Any device.
triton and xla are differentiable once, in reverse mode.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import DTYPES, XLA, BackEnd
from pallas_kernels.gemm.numerics import Fp8, Numerics, NumericsFacts, Plain, numerics_of
from pallas_kernels.gemm.operands import E4M3, Operand, exact, transposed

MAX_CHANNELS = 8192
"""Limit of the Triton kernels: a longer row does not fit into the registers of a program."""
Implementation = Literal["auto", "triton", "xla", "reference"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts(NumericsFacts):
    """Properties of a call on which the choice of a back end depends."""

    channels: int


def _why_not_triton(call: Facts) -> str | None:
    if call.channels > MAX_CHANNELS:
        return f"supports at most {MAX_CHANNELS} channels, not {call.channels}"
    return call.numerics.why_not() or _dispatch.why_not_triton()


_dispatch.register(
    "layer_norm",
    "rms_norm",
    back_ends=[
        BackEnd("triton", _why_not_triton, custom=True),
        XLA,
        BackEnd("reference", NumericsFacts.why_not_reference),
    ],
    facts=Facts,
)


def layer_norm(
    x: Float[Array, "*N C"],
    scale: Float[Array, " C"],
    bias: Float[Array, " C"],
    *,
    residual: Float[Array, "*N C"] | None = None,
    residual_bias: Float[Array, " C"] | None = None,
    eps: float = 1e-5,
    out_dtype: jax.typing.DTypeLike | None = None,
    numerics: str | Numerics | None = None,
    implementation: Implementation | str = "auto",
) -> Float[Array, "*N C"] | Operand | tuple[Float[Array, "*N C"] | Operand, Float[Array, "*N C"]]:
    """Normalize each row to mean 0 and variance 1, then scale and shift the row.

    Args:
        x: rows of fp32, bf16 or fp16.
        scale, bias: both fp32, both bf16 or both fp16. The gradients have the same dtype.
        residual: added to x first; of x's shape and dtype.
        residual_bias: added to every row, together with a residual; of scale's dtype.
        eps: added to the biased variance.
        out_dtype: dtype of y; x's when None.
        numerics: "fp8", or a `pallas_kernels.gemm.Numerics`: y is then an `Operand` for a layer
            with the same numerics, not with "reference". None and other names: y is an array.
        implementation: "auto", or a back end: "triton", "xla", "reference". Forward mode and second
            derivatives need "reference".

    Returns:
        y; with `residual` (y, total), where total = x + residual + residual_bias in x's dtype.

    Raises:
        ValueError: wrong shapes or dtypes, or the named back end cannot run this call.
    """
    parameters = {"scale": scale, "bias": bias}
    if residual_bias is not None:
        if residual is None:
            raise ValueError(
                "layer_norm: residual_bias is added together with a residual, and there is none; "
                "pass both or neither"
            )
        parameters["residual_bias"] = residual_bias
    out_dtype = _check("layer_norm", x, residual, parameters, out_dtype)
    arrays = (x, residual, scale, bias, residual_bias)
    how = numerics_of("layer_norm", numerics, None, Fp8())
    facts = {"channels": x.shape[-1], "numerics": how}
    backend = _dispatch.select("layer_norm", implementation, arrays=arrays, **facts)
    options = Options(eps, True, out_dtype, backend, how)
    return _apply(options, x, residual, scale, bias, residual_bias)


def rms_norm(
    x: Float[Array, "*N C"],
    scale: Float[Array, " C"] | None = None,
    *,
    residual: Float[Array, "*N C"] | None = None,
    eps: float = 1e-6,
    out_dtype: jax.typing.DTypeLike | None = None,
    numerics: str | Numerics | None = None,
    implementation: Implementation | str = "auto",
) -> Float[Array, "*N C"] | Operand | tuple[Float[Array, "*N C"] | Operand, Float[Array, "*N C"]]:
    """Divide each row by the root mean square of the row, then multiply by `scale` if given.

    Args:
        eps: added to the mean square.
        implementation: "auto", "triton", "xla" or "reference".

    The other arguments, the result and the errors are as in `layer_norm`.
    """
    out_dtype = _check(
        "rms_norm", x, residual, {} if scale is None else {"scale": scale}, out_dtype
    )
    how = numerics_of("rms_norm", numerics, None, Fp8())
    facts = {"channels": x.shape[-1], "numerics": how}
    backend = _dispatch.select("rms_norm", implementation, arrays=(x, residual, scale), **facts)
    return _apply(Options(eps, False, out_dtype, backend, how), x, residual, scale, None, None)


def reference(x, scale, bias, *, residual=None, residual_bias=None, eps=1e-5):
    """Compute the definition of layer_norm in fp32 for every input dtype. Return fp32 arrays."""
    return _reference(x, residual, scale, bias, residual_bias, eps, centred=True)


def rms_reference(x, scale=None, *, residual=None, eps=1e-6):
    """Compute the definition of rms_norm in fp32 for every input dtype. Return fp32 arrays."""
    return _reference(x, residual, scale, None, None, eps, centred=False)


def _reference(x, residual, scale, bias, residual_bias, eps, *, centred):
    x, residual, scale, bias, residual_bias = (
        None if a is None else a.astype(jnp.float32)
        for a in (x, residual, scale, bias, residual_bias)
    )
    total = x if residual is None else x + residual
    # Explicit broadcasts: strict rank promotion raises at implicit ones.
    total = total if residual_bias is None else total + jnp.broadcast_to(residual_bias, total.shape)
    y = total - total.mean(-1, keepdims=True) if centred else total
    y = y / jnp.sqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    y = y if scale is None else y * jnp.broadcast_to(scale, y.shape)
    y = y if bias is None else y + jnp.broadcast_to(bias, y.shape)
    return y if residual is None else (y, total)


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call."""

    eps: float
    centred: bool
    """Whether this is layer_norm, not rms_norm."""
    out_dtype: jnp.dtype
    backend: str
    numerics: Numerics = Plain()

    @property
    def fp8_scale(self) -> float | None:
        """Factor of the rows that the kernel stores in FP8, or None."""
        return self.numerics.activation_scale if isinstance(self.numerics, Fp8) else None

    @property
    def operation(self) -> str:
        """Name of the public function, for errors."""
        return "layer_norm" if self.centred else "rms_norm"


def _apply(options, x, residual, scale, bias, residual_bias):
    if options.backend == "reference":
        out = _reference(
            x, residual, scale, bias, residual_bias, options.eps, centred=options.centred
        )
        if residual is None:
            return out.astype(options.out_dtype)
        return out[0].astype(options.out_dtype), out[1].astype(x.dtype)
    y, total = _calls.differentiable(
        options.operation, _norm, options, x, residual, scale, bias, residual_bias
    )
    return y if residual is None else (y, total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(options, x, residual, scale_C, bias_C, residual_bias_C):
    plain = dataclasses.replace(options, numerics=Plain())
    y, total, _ = _forward(plain, x, residual, scale_C, bias_C, residual_bias_C)
    return _operand(options, y) if options.numerics.quantized else y, total


def _operand(options, y) -> Operand:
    return dataclasses.replace(options.numerics.activation(_rows(y)), exact=y)


def _norm_forward(options, *primals):
    x, residual, scale_C, bias_C, residual_bias_C = (
        jax.custom_derivatives.custom_vjp_primal_tree_values(primals)
    )
    y, total, stats = _forward(options, x, residual, scale_C, bias_C, residual_bias_C)
    if options.fp8_scale is not None:
        y_16 = (y.astype(jnp.float32) / options.fp8_scale).astype(options.out_dtype)
        y = Operand(_rows(y), transposed(_rows(y)), exact=y_16, factor=options.fp8_scale)
    elif options.numerics.quantized:
        y = _operand(options, y)
    return (y, total), (x if residual is None else total, stats, scale_C, residual_bias_C)


def _norm_backward(options, saved, cotangents):
    total, stats, scale_C, residual_bias_C = saved
    dy, dtotal = exact(cotangents[0]), cotangents[1]
    has_residual = dtotal is not None
    # The last norm of a network does not use total: pass no zeros as the gradient of total.
    if isinstance(dtotal, jax.custom_derivatives.SymbolicZero):
        dtotal = None
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        dy = jnp.zeros(dy.shape, dy.dtype)
    has_bias = residual_bias_C is not None
    dx, *dparameters_C = _backward(
        options, dy, dtotal, total, stats, scale_C, residual_bias=has_bias
    )
    return dx, dx if has_residual else None, *dparameters_C


_norm.defvjp(_norm_forward, _norm_backward, symbolic_zeros=True)


def _forward(options, x, residual, scale_C, bias_C, residual_bias_C=None):
    """Return (y, total or None, statistics).

    The statistics of x (..., C) are (S, ...) or (S, N).
    """
    static = {"eps": options.eps, "centred": options.centred, "out_dtype": options.out_dtype}
    static["fp8_scale"] = options.fp8_scale
    if options.backend == "xla":
        return _xla_forward(x, residual, scale_C, bias_C, residual_bias_C, **static)
    from pallas_kernels.norm import triton

    kernel = _calls.looped(options.operation, functools.partial(triton.forward, **static))
    y_NC, total_NC, stats_SN = kernel(_rows(x), _rows(residual), scale_C, bias_C, residual_bias_C)
    return y_NC.reshape(x.shape), None if residual is None else total_NC.reshape(x.shape), stats_SN


def _backward(options, dy, dtotal, total, stats, scale_C, *, residual_bias=False):
    """Return (dx, dscale, dbias, dresidual_bias).

    Args:
        residual_bias: whether there is a residual_bias.
    """
    static = {"centred": options.centred, "residual_bias": residual_bias}
    if options.backend == "xla":
        return _xla_backward(dy, dtotal, total, stats, scale_C, **static)
    from pallas_kernels.norm import triton

    kernel = _calls.looped(options.operation, functools.partial(triton.backward, **static))
    dx_NC, *dparameters_C = kernel(_rows(dy), _rows(dtotal), _rows(total), stats, scale_C)
    return dx_NC.reshape(total.shape), *dparameters_C


def _rows(x):
    return None if x is None else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _xla_forward(
    x, residual, scale_C, bias_C, residual_bias_C, *, eps, centred, out_dtype, fp8_scale
):
    # No reshape: GSPMD may have sharded the axes.
    total = x.astype(jnp.float32)
    if residual is not None:
        total = total + residual.astype(jnp.float32)
        if residual_bias_C is not None:
            total = total + jnp.broadcast_to(residual_bias_C.astype(jnp.float32), total.shape)
        total = total.astype(x.dtype)
    y = total.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    if centred:
        y = y - mean
    rstd = jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    y = y * rstd
    if scale_C is not None:
        y = y * jnp.broadcast_to(scale_C.astype(jnp.float32), y.shape)
    if bias_C is not None:
        y = y + jnp.broadcast_to(bias_C.astype(jnp.float32), y.shape)
    stats = jnp.stack([mean[..., 0], rstd[..., 0]] if centred else [rstd[..., 0]])
    if fp8_scale is not None:
        y, out_dtype = (y * fp8_scale).clip(-448.0, 448.0), E4M3
    return y.astype(out_dtype), None if residual is None else total, stats


def _xla_backward(dy, dtotal, total, stats, scale_C, *, centred, residual_bias):
    dy, xhat = dy.astype(jnp.float32), total.astype(jnp.float32)
    if centred:
        xhat = xhat - stats[0][..., None]
    xhat = xhat * stats[-1][..., None]
    g = dy if scale_C is None else dy * jnp.broadcast_to(scale_C.astype(jnp.float32), dy.shape)
    dx = g - xhat * (g * xhat).mean(-1, keepdims=True)
    if centred:
        dx = dx - g.mean(-1, keepdims=True)
    dx = dx * stats[-1][..., None]
    if dtotal is not None:
        dx = dx + dtotal.astype(jnp.float32)
    rows = tuple(range(dy.ndim - 1))
    dscale_C = None if scale_C is None else (dy * xhat).sum(rows).astype(scale_C.dtype)
    dbias_C = dy.sum(rows).astype(scale_C.dtype) if centred else None
    dx = dx.astype(total.dtype)
    # Sum the rounded dx: XLA can load the stored dx instead of recomputing dx.
    dresidual_bias_C = (
        dx.astype(jnp.float32).sum(rows).astype(scale_C.dtype) if residual_bias else None
    )
    return dx, dscale_C, dbias_C, dresidual_bias_C


def _check(kernel, x, residual, parameters, out_dtype) -> jnp.dtype:
    """Check the arguments, and return the dtype of y."""
    if x.ndim < 1 or x.dtype not in DTYPES:
        raise ValueError(
            f"{kernel}: expected x of shape (..., C) in float32, bfloat16 or float16, got "
            f"{x.shape} in {x.dtype}"
        )
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"{kernel}: expected a residual like x, {x.shape} in {x.dtype}, got {residual.shape} "
            f"in {residual.dtype}"
        )
    for name, parameter in parameters.items():
        shape = None if parameter is None else parameter.shape
        if shape != x.shape[-1:]:
            raise ValueError(f"{kernel}: expected {name} of shape {x.shape[-1:]}, got {shape}")
    dtypes = {parameter.dtype for parameter in parameters.values()}
    if len(dtypes) > 1 or not all(dtype in DTYPES for dtype in dtypes):
        raise ValueError(
            f"{kernel}: expected {' and '.join(parameters)} in one dtype, float32, bfloat16 or "
            f"float16, got {', '.join(str(parameter.dtype) for parameter in parameters.values())}"
        )
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if out_dtype not in DTYPES:
        raise ValueError(
            f"{kernel}: expected out_dtype float32, bfloat16 or float16, got {out_dtype}"
        )
    return out_dtype


# ----------------------------------------------------------------------------------------- examples


@_dispatch.example("layer_norm")
def _layer_norm_example(rows, dtype):
    """GPT-2's residual stream: every option, so every sum of the backward pass."""
    x_NC, p_C = jax.ShapeDtypeStruct((rows, 768), dtype), jax.ShapeDtypeStruct((768,), jnp.float32)

    def with_residual(f):
        def call(x_NC, r_NC, scale_C, bias_C, rb_C, **how):
            return f(x_NC, scale_C, bias_C, residual=r_NC, residual_bias=rb_C, **how)

        return call

    arrays = (x_NC, x_NC, p_C, p_C, p_C)
    return _dispatch.Example(with_residual(layer_norm), with_residual(reference), arrays)


@_dispatch.example("rms_norm")
def _rms_norm_example(rows, dtype):
    """A row without a residual: the kernels without mean and bias."""
    arrays = (
        jax.ShapeDtypeStruct((rows, 1024), dtype),
        jax.ShapeDtypeStruct((1024,), jnp.float32),
    )
    return _dispatch.Example(rms_norm, rms_reference, arrays)
