"""Softmax of short and very long rows: y = softmax(scale · x) over the last axis.

    m = max_s x_s
    y_s = exp(scale·(x_s − m)) / Σ_s' exp(scale·(x_s' − m))
    dx = scale · y · (dy − Σ_s dy_s·y_s)

Shapes: x is (..., S). With `causal` x is (..., T, T), the sums of row t run over the columns 0…t,
and the other columns of y and dx are exactly 0. Statistics are fp32 in every dtype. The forward
pass saves y. The result of a row of only −∞ is NaN, as in `jax.nn.softmax`.

Library: the shipped models compute their softmax in attention and in the loss.

Back ends (xla and reference as in pallas_kernels/__init__.py):
    triton: a short row stays in registers between its load and its store; a long row is read again
        from the cache.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, TRITON, XLA
from pallas_kernels._partition import Rule
from pallas_kernels._types import Array, Float

Number = float | int
Implementation = Literal["auto", "triton", "xla", "reference"]

_dispatch.register("softmax", back_ends=[dataclasses.replace(TRITON, rule=True), XLA, REFERENCE])


def softmax(
    x: Float[Array, "*B S"],
    *,
    scale: Number = 1.0,
    causal: bool = False,
    implementation: Implementation | str = "auto",
) -> Float[Array, "*B S"]:
    """Compute softmax(scale · x) over the last axis, in the dtype of x.

    Args:
        x: fp32, bf16 or fp16.
        scale: a Python number.
        causal: row t covers the columns 0…t; the last two axes are equal.
        implementation: "auto", or a back end: "triton", "xla", "reference". Forward mode needs
            "reference"; second derivatives need "reference" or "xla".

    Raises:
        ValueError: wrong shape, dtype or scale, or the named back end cannot run here.
    """
    _check(x, scale, causal)
    backend = _dispatch.select("softmax", implementation, arrays=x)
    if backend == "reference":
        return reference(x, scale=scale, causal=causal).astype(x.dtype)
    if scale <= 0:  # the kernels compute the maximum before scaling
        x, scale = (-x, -scale) if scale < 0 else (x * 0, 1)
    return _calls.differentiable("softmax", _softmax, Options(backend, float(scale), causal), x)


def reference(x, *, scale: Number = 1.0, causal: bool = False):
    """Compute the definition in fp32 for every dtype of x."""
    x = scale * x.astype(jnp.float32)
    if causal:
        x = jnp.where(_visible(x), x, -jnp.inf)
    return jax.nn.softmax(x, axis=-1)


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call."""

    backend: str
    scale: float
    causal: bool


def _forward(options, x):
    if options.backend == "triton":
        return _in_triton("forward", options, x)
    return reference(x, scale=options.scale, causal=options.causal).astype(x.dtype)


def backward(options: Options, y, dy):
    """Backward pass of `softmax`: (dx,) from the output y and its cotangent dy."""
    if options.backend == "triton":
        return (_in_triton("backward", options, y, dy),)
    y32, dy32 = y.astype(jnp.float32), dy.astype(jnp.float32)
    if options.causal:
        dy32 = jnp.where(_visible(dy), dy32, 0.0)
    return ((options.scale * y32 * (dy32 - (dy32 * y32).sum(-1, keepdims=True))).astype(y.dtype),)


_softmax = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_softmax.defvjp(lambda options, x: 2 * (_calls.saved("softmax", _forward(options, x)),), backward)


def _in_triton(name, options, *arrays):
    """Run `forward` or `backward` on a matrix of rows; with `causal`, on a batch of squares."""
    from pallas_kernels.row_softmax import triton

    kernel = functools.partial(getattr(triton, name), scale=options.scale, causal=options.causal)
    term = "n* t s" if options.causal else "n* s"
    rule = Rule(f"{', '.join([term] * len(arrays))} -> {term}", over="n*")
    return _calls.batched("softmax", kernel, rule=rule)(*arrays)


def _visible(x):
    """Return the mask of a causal softmax, of x's shape."""
    return jnp.broadcast_to(jnp.tri(x.shape[-1], dtype=bool), x.shape)


def _check(x, scale, causal):
    if x.dtype not in _dispatch.DTYPES:
        raise ValueError(f"softmax: expected float32, bfloat16 or float16, got {x.dtype}")
    if x.ndim == 0 or (causal and (x.ndim < 2 or x.shape[-2] != x.shape[-1])):
        expected = "(..., T, T) for a causal softmax" if causal else "(..., S)"
        raise ValueError(f"softmax: expected x of shape {expected}, got {x.shape}")
    if not math.isfinite(scale):
        raise ValueError(f"softmax: expected a finite scale, got {scale}")


# ----------------------------------------------------------------------------------------- examples


@_dispatch.example("softmax")
def _short_example(rows, dtype):
    """Rows of 1,024 columns: the kernels that hold a row in registers."""
    return _dispatch.Example(softmax, reference, (jax.ShapeDtypeStruct((rows, 1024), dtype),))


@_dispatch.example("softmax")
def _long_example(rows, dtype):
    """Rows of GPT-2's vocabulary: the kernels that read a row twice."""
    return _dispatch.Example(softmax, reference, (jax.ShapeDtypeStruct((rows, 50257), dtype),))
