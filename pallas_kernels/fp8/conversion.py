"""Conversion to FP8: `quantize`, and the functions that compute scales. The docstring of
pallas_kernels/fp8/__init__.py contains the equations.

Back ends:
    triton: one pass over memory in tiles; compute capability 8.9 (Ada) or later.
    xla: plain JAX; any device.
    reference: as xla.
`quantize` has no derivative.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, XLA, BackEnd

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
Scale = Float[Array, ""] | float | int
Implementation = Literal["auto", "triton", "xla", "reference"]
NO_DERIVATIVE = "has no derivative: call it in the functions of a jax.custom_vjp"


def largest(dtype: jax.typing.DTypeLike) -> float:
    """Return the largest finite number of an FP8 format: 448 or 57,344."""
    return float(jnp.finfo(dtype).max)


def scale_for(
    amax: Float[Array, ""], dtype: jax.typing.DTypeLike, headroom: float = 1.0
) -> Float[Array, ""]:
    """Return the largest power of two with scale · headroom · amax ≤ largest(dtype), fp32.

    The scale is 1 if amax is 0 or not finite, and between 2⁻⁶⁰ and 2⁶⁰.
    """
    # The quotient may be infinite or 0. frexp is exact; log2 of a power of two may be inexact.
    ratio = (largest(dtype) / (amax.astype(jnp.float32) * headroom)).clip(2.0**-60, 2.0**60)
    exponent = jnp.frexp(ratio)[1] - 1
    valid = (amax > 0) & jnp.isfinite(amax)
    return jnp.ldexp(jnp.ones((), jnp.float32), jnp.where(valid, exponent, 0))


def stochastic_e5m2(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Round numbers of magnitude at most 57,344 to e5m2, stochastically: the mean error is zero.

    Stochastic rounding (Gupta et al. 2015, https://arxiv.org/abs/1502.02551): a number between the
    e5m2 magnitudes a < b is rounded to b with probability (|x| − a) / (b − a), else to a. A hash of
    the bits of x replaces a random number, so equal numbers are rounded equally. The errors of
    different numbers between a and b average out; the errors of rounding to the nearest number do
    not. NaN remains NaN.
    """
    x = x.astype(jnp.float32)
    noise = (jax.lax.bitcast_convert_type(x, jnp.uint32) * jnp.uint32(0x9E3779B1)) >> 24
    # e5m2 is the first byte of fp16. A carry out of the second byte rounds up.
    half = jax.lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16)
    half += jnp.where(jnp.isnan(x), 0, noise).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type((half >> 8).astype(jnp.uint8), E5M2)


def why_not_fp8() -> str | None:
    """Return None unless the default device is an NVIDIA GPU without FP8 tensor cores.

    On such a GPU, XLA would compute the matmul of FP8 operands in fp16. A CPU is for tests.
    """
    capability = _dispatch.capability()
    if capability is not None and capability < (8, 9):
        return f"needs compute capability 8.9 (Ada) or later for FP8, not {capability}"
    return None


def _why_not_quantize(facts: _dispatch.NoFacts) -> str | None:
    return _dispatch.why_not_triton() or why_not_fp8()


_dispatch.register(
    "quantize", back_ends=[BackEnd("triton", _why_not_quantize, custom=True), XLA, REFERENCE]
)


class Quantized(NamedTuple):
    """Result of `quantize`; None for a copy that was not requested."""

    rows: Float[Array, "R C"] | None
    transposed: Float[Array, "C R"] | None
    amax: Float[Array, ""]
    """max |x| before the scale, fp32."""


class Fp8Rows(NamedTuple):
    """Output rows of a norm, stored in e4m3 for the next layer.

    In a call that is not differentiated, y is not rounded to e4m3, and the layer reads y. XLA
    removes unused arrays.
    """

    y: Any
    """Output of the norm in 16 bits, (…, C). The cotangent of y is the cotangent of the rows."""
    rows: Any
    """Output of the norm times the scale in e4m3, (R, C)."""
    transposed: Any


def rows_of(x: Any) -> Any:
    """Return y if x is `Fp8Rows`, else x."""
    return x.y if isinstance(x, Fp8Rows) else x


def quantize(
    x: Float[Array, "R C"],
    scale: Scale,
    dtype: jax.typing.DTypeLike = E4M3,
    *,
    rows: bool = True,
    transposed: bool = False,
    implementation: Implementation | str = "auto",
) -> Quantized:
    """Convert x · scale to FP8. Numbers beyond the largest FP8 number become the largest number.

    Args:
        x: fp32, bf16 or fp16.
        scale: multiplies x; see `scale_for`.
        dtype: float8_e4m3fn or float8_e5m2.
        rows, transposed: the copies to store.
        implementation: "auto", or a back end: "triton", "xla", "reference".

    Raises:
        ValueError: wrong dtypes, neither copy requested, or the named back end cannot run here.
    """
    dtype = jnp.dtype(dtype)
    if x.ndim != 2 or x.dtype not in _dispatch.DTYPES or dtype not in (E4M3, E5M2):
        raise ValueError(
            "quantize: expected x (R, C) in float32, bfloat16 or float16, and float8_e4m3fn or "
            f"float8_e5m2 as dtype, got {x.shape} in {x.dtype} and {dtype}"
        )
    if not (rows or transposed):
        raise ValueError("quantize: expected rows=True or transposed=True, got neither")
    x, scale = _calls.once("quantize", (x, jnp.asarray(scale, jnp.float32)), NO_DERIVATIVE)
    if _dispatch.select("quantize", implementation, arrays=x) == "triton":
        from pallas_kernels.fp8 import triton

        kernel = functools.partial(triton.quantize, dtype=dtype, rows=rows, transposed=transposed)
        return Quantized(*_calls.looped("quantize", kernel)(x, scale))
    return _quantize_in_xla(x, scale, dtype, rows, transposed)


def _quantize_in_xla(x, scale, dtype, rows, transposed) -> Quantized:
    x = x.astype(jnp.float32)
    # Without clipping, the conversion of a number out of range is NaN (e4m3) or infinity (e5m2).
    q = (x * scale).clip(-largest(dtype), largest(dtype)).astype(dtype)
    amax = jnp.abs(x).max(initial=0.0)
    return Quantized(q if rows else None, q.T if transposed else None, amax)


def transposed(q: Float[Array, "R C"]) -> Float[Array, "C R"]:
    """Return a transposed copy of an FP8 matrix, by the default back end. No derivative."""
    if _dispatch.select("quantize", arrays=q) != "triton":
        return q.T
    from pallas_kernels.fp8 import triton

    return _calls.looped("transposed", triton.transposed)(q)
