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

Back ends (reference as in pallas_kernels/__init__.py):
    triton: one pass over memory forward and one backward, plus a sum of C-vectors.
    xla: plain JAX that saves the same arrays.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _arguments, _calls, _dispatch
from pallas_kernels._dispatch import DTYPES, XLA, BackEnd
from pallas_kernels._partition import Rule
from pallas_kernels._types import Array, Float
from pallas_kernels.gemm.numerics import (
    Fp8,
    Numerics,
    NumericsFacts,
    Plain,
    numerics_of,
)
from pallas_kernels.gemm.operands import Operand, exact, largest, transposed

AXES = {
    "forward": "n* c, n* c, c, c, c -> n* c, n* c, s n*",
    "backward": "n* c, n* c, n* c, s n*, c -> n* c, c, c, c",
}
"""Axes of the arrays of `run`, for a `Rule`."""
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
        BackEnd("triton", _why_not_triton, custom=True, rule=True, sums=True),
        XLA,
        BackEnd("reference", NumericsFacts.why_not_reference),
    ],
    facts=Facts,
)


_with_hints = _arguments.with_hints(
    {
        "weight": "the weight is named scale",
        "epsilon": "the option is named eps",
        "residual_bias": "only layer_norm has it",
        "bias": "only layer_norm has a bias",
    }
)


@_with_hints
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
        implementation: "auto", or a back end: "triton", "xla", "reference". Forward mode needs
            "reference"; second derivatives need "reference" or "xla".

    Returns:
        y; with `residual` (y, total), where total = x + residual + residual_bias in x's dtype.

    Raises:
        ValueError: wrong shapes or dtypes, or the named back end cannot run this call.
    """
    if residual_bias is not None and residual is None:
        raise ValueError(
            "layer_norm: residual_bias is added together with a residual, and there is none; "
            "pass both or neither"
        )
    parameters = {"scale": scale, "bias": bias}
    if residual_bias is not None:
        parameters["residual_bias"] = residual_bias
    return _apply("layer_norm", x, residual, parameters, eps, out_dtype, numerics, implementation)


@_with_hints
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
    parameters = {} if scale is None else {"scale": scale}
    return _apply("rms_norm", x, residual, parameters, eps, out_dtype, numerics, implementation)


def reference(x, scale, bias, *, residual=None, residual_bias=None, eps=1e-5):
    """Compute the definition of layer_norm in fp32 for every input dtype. Return fp32 arrays."""
    y, total = _reference(x, residual, scale, bias, residual_bias, eps, centred=True)
    return y if residual is None else (y, total)


def rms_reference(x, scale=None, *, residual=None, eps=1e-6):
    """Compute the definition of rms_norm in fp32 for every input dtype. Return fp32 arrays."""
    y, total = _reference(x, residual, scale, None, None, eps, centred=False)
    return y if residual is None else (y, total)


def _reference(x, residual, scale, bias, residual_bias, eps, *, centred):
    wide = functools.partial(_wide, shape=x.shape)
    total = wide(x) if residual is None else wide(x) + wide(residual)
    total = total if residual_bias is None else total + wide(residual_bias)
    y = total - total.mean(-1, keepdims=True) if centred else total
    y = y / jnp.sqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    y = y if scale is None else y * wide(scale)
    y = y if bias is None else y + wide(bias)
    return y, total


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call."""

    eps: float
    centred: bool
    """Whether this is layer_norm, not rms_norm."""
    out_dtype: jnp.dtype
    backend: str
    numerics: Numerics = Plain()
    residual_bias: bool = False

    @property
    def stored(self) -> tuple[jax.typing.DTypeLike, float | None]:
        """Dtype and factor of the rows that the kernel stores; None: they are not scaled."""
        return self.numerics.stored_activation or (self.out_dtype, None)

    @property
    def operation(self) -> str:
        """Name of the public function, for errors."""
        return "layer_norm" if self.centred else "rms_norm"


def _apply(operation, x, residual, parameters, eps, out_dtype, numerics, implementation):
    out_dtype = _check(operation, x, residual, parameters, out_dtype)
    how = numerics_of(operation, numerics, None, Fp8())
    facts = {"channels": x.shape[-1], "numerics": how}
    arrays = (x, residual, *map(parameters.get, ("scale", "bias", "residual_bias")))
    backend = _dispatch.select(operation, implementation, arrays=arrays, **facts)
    has_bias = "residual_bias" in parameters
    options = Options(eps, operation == "layer_norm", out_dtype, backend, how, has_bias)
    if backend == "reference":
        y, total = _reference(*arrays, eps, centred=options.centred)
        y, total = y.astype(out_dtype), total.astype(x.dtype)
    else:
        y, total = _calls.differentiable(operation, _norm, options, *arrays)
    return y if residual is None else (y, total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(options, *arrays):
    y, total, _ = run("forward", dataclasses.replace(options, numerics=Plain()), *arrays)
    return _operand(options, y) if options.numerics.quantized else y, total


def _rows(y):
    return y.reshape(-1, y.shape[-1])


def _operand(options, y) -> Operand:
    return dataclasses.replace(options.numerics.activation(_rows(y)), exact=y)


def _norm_forward(options, *primals):
    arrays = jax.custom_derivatives.custom_vjp_primal_tree_values(primals)
    y, total, stats = _calls.saved(options.operation, run("forward", options, *arrays))
    factor = options.stored[1]
    if factor is not None:
        y_16, rows = (y.astype(jnp.float32) / factor).astype(options.out_dtype), _rows(y)
        y = Operand(rows, transposed(rows), exact=y_16, factor=factor)
    elif options.numerics.quantized:
        y = _operand(options, y)
    x, _, scale_C, *_ = arrays
    return (y, total), (x if total is None else total, stats, scale_C)


def _norm_backward(options, saved, cotangents):
    dy, dtotal = exact(cotangents[0]), cotangents[1]
    has_residual = dtotal is not None
    # The last norm of a network does not use total: pass no zeros as the gradient of total.
    if isinstance(dtotal, jax.custom_derivatives.SymbolicZero):
        dtotal = None
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        dy = jnp.zeros(dy.shape, dy.dtype)
    dx, *dparameters_C = run("backward", options, dy, dtotal, *saved)
    return dx, dx if has_residual else None, *dparameters_C


_norm.defvjp(_norm_forward, _norm_backward, symbolic_zeros=True)


def run(direction: Literal["forward", "backward"], options: Options, *arrays):
    """Run a pass of the back end.

    forward (x, residual, scale, bias, residual_bias): return (y, total, statistics). total is None
        without a residual. The statistics, mean and rstd or rstd alone, are (S, ...).
    backward (dy, dtotal, total, statistics, scale): return (dx, dscale, dbias, dresidual_bias),
        None for absent arguments. dx is the gradient of both x and the residual; dtotal is None if
        total is not used.
    """
    if options.backend == "xla":
        return {"forward": _xla_forward, "backward": _xla_backward}[direction](options, *arrays)
    from pallas_kernels.norm import triton

    rule = Rule(AXES[direction], over="n*")
    kernel = functools.partial(getattr(triton, direction), options)
    return _calls.looped(options.operation, kernel, rule=rule)(*arrays)


def _xla_forward(options, x, residual, scale_C, bias_C, residual_bias_C):
    # No reshape: GSPMD may have sharded the axes.
    wide = functools.partial(_wide, shape=x.shape)
    total = wide(x)
    if residual is not None:
        total = total + wide(residual)
        total = total if residual_bias_C is None else total + wide(residual_bias_C)
        total = total.astype(x.dtype)
    y = total.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    y = y - mean if options.centred else y
    rstd = jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + options.eps)
    y = y * rstd
    y = y if scale_C is None else y * wide(scale_C)
    y = y if bias_C is None else y + wide(bias_C)
    stats = jnp.stack([mean[..., 0], rstd[..., 0]] if options.centred else [rstd[..., 0]])
    dtype, factor = options.stored
    if factor is not None:
        y = (y * factor).clip(-largest(dtype), largest(dtype))
    return y.astype(dtype), None if residual is None else total, stats


def _xla_backward(options, dy, dtotal, total, stats, scale_C):
    wide = functools.partial(_wide, shape=dy.shape)
    dy, xhat = wide(dy), wide(total)
    if options.centred:
        xhat = xhat - stats[0][..., None]
    xhat = xhat * stats[-1][..., None]
    g = dy if scale_C is None else dy * wide(scale_C)
    dx = g - xhat * (g * xhat).mean(-1, keepdims=True)
    if options.centred:
        dx = dx - g.mean(-1, keepdims=True)
    dx = dx * stats[-1][..., None]
    if dtotal is not None:
        dx = dx + dtotal.astype(jnp.float32)
    dx = dx.astype(total.dtype)

    def summed(x):
        return x.astype(jnp.float32).sum(tuple(range(x.ndim - 1))).astype(scale_C.dtype)

    dscale_C = None if scale_C is None else summed(dy * xhat)
    dbias_C = summed(dy) if options.centred else None
    # Sum the rounded dx: XLA can load the stored dx instead of recomputing dx.
    return dx, dscale_C, dbias_C, summed(dx) if options.residual_bias else None


def _wide(x, shape):
    """Return x in fp32, broadcast explicitly: strict rank promotion raises at implicit ones."""
    return jnp.broadcast_to(x.astype(jnp.float32), shape)


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
            f"in {residual.dtype}; for a residual in another dtype, cast x and pass out_dtype"
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

    def call(f):
        return lambda x_NC, residual, scale_C, bias_C, residual_bias, **how: f(
            x_NC, scale_C, bias_C, residual=residual, residual_bias=residual_bias, **how
        )

    return _dispatch.Example(call(layer_norm), call(reference), (x_NC, x_NC, p_C, p_C, p_C))


@_dispatch.example("rms_norm")
def _rms_norm_example(rows, dtype):
    """A row without a residual: the kernels without mean and bias."""
    x_NC = jax.ShapeDtypeStruct((rows, 1024), dtype)
    scale_C = jax.ShapeDtypeStruct((1024,), jnp.float32)
    return _dispatch.Example(rms_norm, rms_reference, (x_NC, scale_C))
