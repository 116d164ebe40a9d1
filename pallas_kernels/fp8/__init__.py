"""Matmuls of FP8 operands, and the conversion to FP8.

    quantize:       q = round(clip(x · scale, ±largest)), to the nearest FP8 number, ties to even
                    amax = max |x|
    scaled_matmul:  y = scale · a bᵀ, summed in fp32

e4m3 (float8_e4m3fn) has 4 bits of exponent and 3 of mantissa: 2⁻⁹ … 448. e5m2 (float8_e5m2) has 5
and 2: 2⁻¹⁶ … 57,344. At most one operand of a matmul is e5m2.

Scales are powers of two (`scale_for`): a product with one is exact in every dtype, so the result of
`scaled_matmul` is rounded once. FP8 numbers have an exponent: a scale moves the range, and does not
change the relative error of numbers inside it.

Hopper's tensor cores read FP8 operands K-major only (contiguous along the axis of the sum).
A linear layer sums along three different axes in y, dx and dw, so each of its arrays is needed row
by row and transposed. One pass of `quantize` stores both.

Shapes: a (M, K), b (N, K), y (M, N); x (R, C).

Back ends of quantize:
    triton: one pass over memory in tiles; compute capability 8.9 (Ada) or later.
    xla: plain JAX; any device.
    reference: as xla.
Back ends of scaled_matmul:
    mosaic: Hopper (TMA and wgmma), sizes that its tiles divide.
    xla: cuBLASLt's FP8 matmul on a GPU; any device.
    reference: the definition in fp32.
Neither function has a derivative.
"""

import dataclasses
import functools
import importlib.util
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, XLA, BackEnd

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
Scale = Float[Array, ""] | float | int
QuantizeImplementation = Literal["auto", "triton", "xla", "reference"]
MatmulImplementation = Literal["auto", "mosaic", "xla", "reference"]
_NO_DERIVATIVE = "has no derivative: call it in the functions of a jax.custom_vjp"


def largest(dtype: jax.typing.DTypeLike) -> float:
    """Return the largest finite number of an FP8 format: 448 or 57,344."""
    return float(jnp.finfo(dtype).max)


def scale_for(
    amax: Float[Array, ""], dtype: jax.typing.DTypeLike, headroom: float = 1.0
) -> Float[Array, ""]:
    """Return the largest power of two with scale · headroom · amax ≤ largest(dtype), fp32.

    The scale is 1 if amax is 0 or not finite, and between 2⁻⁶⁰ and 2⁶⁰.
    """
    # frexp is exact; log2 of a power of two need not be.
    exponent = jnp.frexp(largest(dtype) / (amax.astype(jnp.float32) * headroom))[1] - 1
    valid = (amax > 0) & jnp.isfinite(amax)
    return jnp.ldexp(jnp.ones((), jnp.float32), jnp.where(valid, exponent.clip(-60, 60), 0))


# ----------------------------------------------------------------------------------------- quantize


def _why_not_quantize(facts: _dispatch.NoFacts) -> str | None:
    if (why := _dispatch.why_not_triton()) is not None:
        return why
    capability = _dispatch.capability()
    if capability is not None and capability < (8, 9):
        return f"needs compute capability 8.9 (Ada) or later, not {capability}"
    return None


_dispatch.register(
    "quantize", back_ends=[BackEnd("triton", _why_not_quantize, custom=True), XLA, REFERENCE]
)


class Quantized(NamedTuple):
    """Result of `quantize`; None for a copy that was not requested."""

    rows: Float[Array, "R C"] | None
    transposed: Float[Array, "C R"] | None
    amax: Float[Array, ""]
    """max |x| before the scale, fp32."""


def quantize(
    x: Float[Array, "R C"],
    scale: Scale,
    dtype: jax.typing.DTypeLike = E4M3,
    *,
    rows: bool = True,
    transposed: bool = False,
    implementation: QuantizeImplementation | str = "auto",
) -> Quantized:
    """Convert x · scale to FP8. Numbers beyond the largest one become the largest.

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
    x, scale = _calls.once("quantize", (x, jnp.asarray(scale, jnp.float32)), _NO_DERIVATIVE)
    if _dispatch.select("quantize", implementation, arrays=x) == "triton":
        from pallas_kernels.fp8 import triton

        kernel = functools.partial(triton.quantize, dtype=dtype, rows=rows, transposed=transposed)
        return Quantized(*_calls.looped("quantize", kernel)(x, scale))
    return _quantize_in_xla(x, scale, dtype, rows, transposed)


def _quantize_in_xla(x, scale, dtype, rows, transposed) -> Quantized:
    x = x.astype(jnp.float32)
    # A conversion alone would turn what is out of range into NaN (e4m3) or infinity (e5m2).
    q = (x * scale).clip(-largest(dtype), largest(dtype)).astype(dtype)
    return Quantized(q if rows else None, q.T if transposed else None, jnp.abs(x).max())


def transposed(q: Float[Array, "R C"]) -> Float[Array, "C R"]:
    """Return a transposed copy of an FP8 matrix, by the fastest back end. It has no derivative."""
    if _dispatch.select("quantize", arrays=q) != "triton":
        return q.T
    from pallas_kernels.fp8 import triton

    return _calls.looped("transposed", triton.transposed)(q)


# ------------------------------------------------------------------------------------------- matmul


@dataclasses.dataclass(frozen=True)
class MatmulFacts:
    """Properties of a call of `scaled_matmul` on which the choice of a back end depends."""

    rows: int
    columns: int
    inner: int


def _why_not_mosaic(call: MatmulFacts) -> str | None:
    if (why := _dispatch.why_not_mosaic()) is not None:
        return why
    if importlib.util.find_spec("pallas_kernels.fp8.mosaic") is None:
        return "is not part of this installation"
    from pallas_kernels.fp8 import mosaic

    return mosaic.why_not(call.rows, call.columns, call.inner)


# XLA first: the default until a measurement says otherwise.
_dispatch.register(
    "scaled_matmul",
    back_ends=[XLA, BackEnd("mosaic", _why_not_mosaic, custom=True), REFERENCE],
    facts=MatmulFacts,
)


def scaled_matmul(
    a: Float[Array, "M K"],
    b: Float[Array, "N K"],
    scale: Scale = 1.0,
    *,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    fast_accumulation: bool = True,
    implementation: MatmulImplementation | str = "auto",
) -> Float[Array, "M N"]:
    """Compute scale · a bᵀ.

    Args:
        a, b: float8_e4m3fn or float8_e5m2, at most one of them e5m2.
        scale: a power of two is exact; another number is rounded to out_dtype in "xla".
        out_dtype: bfloat16, float16 or float32.
        fast_accumulation: whether "xla" may keep the sum in the tensor cores, where it has about 14
            bits, for all of K. False: the sum is added to fp32 registers at intervals.
        implementation: "auto", or a back end: "mosaic", "xla", "reference".

    Raises:
        ValueError: wrong shapes or dtypes, or the named back end cannot run this call.
    """
    formats, out_dtype = [jnp.dtype(x.dtype) for x in (a, b)], jnp.dtype(out_dtype)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"scaled_matmul: expected a (M, K) and b (N, K), got {a.shape}, {b.shape}")
    if not {*formats} <= {jnp.dtype(E4M3), jnp.dtype(E5M2)} or formats == [E5M2, E5M2]:
        raise ValueError(
            "scaled_matmul: expected a and b in float8_e4m3fn, or one of them in float8_e5m2, got "
            f"{a.dtype} and {b.dtype}"
        )
    if out_dtype not in _dispatch.DTYPES:
        raise ValueError(
            f"scaled_matmul: expected out_dtype float32, bfloat16 or float16, got {out_dtype}"
        )
    (m, k), n = a.shape, b.shape[0]
    backend = _dispatch.select(
        "scaled_matmul", implementation, arrays=(a, b), rows=m, columns=n, inner=k
    )
    scale = jnp.asarray(scale, jnp.float32)
    a, b, scale = _calls.once("scaled_matmul", (a, b, scale), _NO_DERIVATIVE)
    if backend == "reference":
        return reference(a, b, scale).astype(out_dtype)
    if backend == "mosaic":
        from pallas_kernels.fp8 import mosaic

        kernel = functools.partial(mosaic.matmul, out_dtype=out_dtype)
        return _calls.looped("scaled_matmul", kernel)(a, b, scale)
    return _xla_matmul(a, b, scale, out_dtype, fast_accumulation)


def _xla_matmul(a, b, scale, out_dtype, fast_accumulation):
    # XLA passes a direct dot of FP8 operands to cuBLASLt, and a product of its result with a scalar
    # as cuBLASLt's scale of a. There must be no conversion between the two. With a precision of
    # HIGHEST, XLA turns cuBLASLt's fast accumulation off.
    precision = jax.lax.Precision.DEFAULT if fast_accumulation else jax.lax.Precision.HIGHEST
    axes = (((1,), (1,)), ((), ()))
    y = jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=out_dtype)
    return y * scale.astype(out_dtype)


def reference(a, b, scale=1.0):
    """Compute the definition of `scaled_matmul` with true fp32 matmuls. Return fp32."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST) * scale


# ----------------------------------------------------------------------------------------- examples


@_dispatch.example("quantize")
def _quantize_example(rows, dtype):
    """Both copies of an activation of GPT-2's width. The kernel has no derivative."""

    def call(x, implementation):
        out = quantize(x, 4.0, transposed=True, implementation=implementation)
        return out.rows.astype(jnp.float32), out.transposed.astype(jnp.float32), out.amax

    arrays = (jax.ShapeDtypeStruct((rows, 768), dtype),)
    expected = functools.partial(call, implementation="reference")
    return _dispatch.Example(call, expected, arrays, differentiable=False)


@_dispatch.example("scaled_matmul")
def _matmul_example(rows, dtype):
    """GPT-2's width. The matmul has no derivative."""

    def call(x, w, implementation):
        a, b = x.astype(E4M3), w.astype(E4M3)
        return scaled_matmul(a, b, 2.0**-5, implementation=implementation).astype(jnp.float32)

    arrays = tuple(jax.ShapeDtypeStruct((size, 768), dtype) for size in (rows, 2304))
    expected = functools.partial(call, implementation="reference")
    return _dispatch.Example(call, expected, arrays, differentiable=False)
