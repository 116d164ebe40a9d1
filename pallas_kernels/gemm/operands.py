"""Operands of matmuls, and the conversion of arrays to FP8 operands. The docstring of
pallas_kernels/gemm/__init__.py contains the equations.

Back ends of `quantize` and `quantize_by_largest`:
    triton: passes over memory in tiles; compute capability 8.9 (Ada) or later.
    xla: plain JAX; any device.
    reference: as xla.
No conversion has a derivative.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, XLA, BackEnd
from pallas_kernels._partition import Rule, Shards, shards_of
from pallas_kernels._types import Array, Float

E4M3 = jnp.float8_e4m3fn
"""FP8 with 3 bits of mantissa, for activations and weights: magnitudes up to 448."""
E5M2 = jnp.float8_e5m2
"""FP8 with 2 bits of mantissa, for gradients: magnitudes up to 57,344."""
Implementation = Literal["auto", "triton", "xla", "reference"]
NO_DERIVATIVE = "has no derivative: call it in the functions of a jax.custom_vjp"
SAMPLED, GROUP = 16, 256
"""With `sampled`, number of columns that are read for the scale, the first `SAMPLED` of each
`GROUP`: 32 bytes, one sector of memory."""


class Scale(NamedTuple):
    """A scale of a whole array, and factors that undo the scale. All are powers of two if the
    factor is."""

    value: Float[Array, ""]
    inverse: Float[Array, ""]
    """1 / value."""
    over_factor: Float[Array, ""]
    """1 / (factor · value), for the factor with which the scale was computed."""

    @staticmethod
    def of(value: Float[Array, ""], factor: float) -> "Scale":
        return Scale(value, 1 / value, 1 / (factor * value))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "k_major", "scale", "exact"],
    meta_fields=["factor"],
)
@dataclasses.dataclass(frozen=True)
class Operand:
    """A matrix as matmuls read it.

    Attributes:
        rows: (R, C), contiguous along C, for sums over C; None where it is not needed.
        k_major: the transposed copy (C, R), contiguous along R, for sums over R. None: a matmul
            over R reads `rows`.
        scale: factor of the numbers that `rows` and `k_major` store, as an array.
        factor: constant factor of the stored numbers.
        exact: the matrix before rounding, (…, C), of a norm's output that is stored in FP8. A call
            that is not differentiated reads it, and its cotangent is that of the matrix.
    """

    rows: Any = None
    k_major: Any = None
    scale: Scale | None = None
    exact: Any = None
    factor: float = 1.0

    @property
    def T(self) -> "Operand":
        """The transposed matrix."""
        return dataclasses.replace(self, rows=self.k_major, k_major=self.rows)

    def only(self, name: str) -> "Operand":
        """Return the operand with one of its copies, "rows" or "k_major"; unchanged if it has no
        such copy."""
        if getattr(self, name) is None:
            return self
        return dataclasses.replace(self, exact=None, **{("rows", "k_major")[name == "rows"]: None})


def exact(x: Any) -> Any:
    """Return the matrix of an `Operand` before rounding; x itself if it is an array."""
    return x.exact if isinstance(x, Operand) else x


def separate(x: Any, flat: bool = True) -> tuple[Array, Operand | None]:
    """Return the matrix of an array or `Operand` before rounding, and the operand without it, or
    None.

    Args:
        flat: whether the matrix has one axis of rows. Merging axes that the compiler shards would
            gather them.
    """
    y = exact(x)
    operand = dataclasses.replace(x, exact=None) if isinstance(x, Operand) else None
    return y.reshape(math.prod(y.shape[:-1]), y.shape[-1]) if flat else y, operand


def as_row(b_O: Float[Array, " O"], like: Array) -> Array:
    """Return b with the number of axes of `like`."""
    return b_O.reshape((1,) * (like.ndim - 1) + b_O.shape)


def sample(x: Float[Array, "R C"]) -> Float[Array, "..."]:
    """Return the columns of a gradient from which its scale is computed.

    All rows, since the rows of ignored targets may be zero. Reading all columns would take a third
    of the time of the conversion.
    """
    (r, c) = x.shape
    return x.reshape(r, c // GROUP, GROUP)[:, :, :SAMPLED] if c % GROUP == 0 else x


def check_dtypes(operation: str, x: Array, names: str, *parameters: Any) -> None:
    """Refuse x in other dtypes than `DTYPES`, and parameters in neither x's dtype nor fp32."""
    dtypes = [parameter.dtype for parameter in jax.tree.leaves(parameters)]
    if x.dtype not in _dispatch.DTYPES or not {*dtypes} <= {x.dtype, jnp.dtype(jnp.float32)}:
        raise ValueError(
            f"{operation}: expected x in float32, bfloat16 or float16, {names} in x's dtype or "
            f"float32, got {', '.join(map(str, (x.dtype, *dtypes)))}"
        )


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
    "quantize",
    back_ends=[BackEnd("triton", _why_not_quantize, custom=True, rule=True), XLA, REFERENCE],
)


class Quantized(NamedTuple):
    """Result of `quantize`; None for a copy that was not requested."""

    rows: Float[Array, "R C"] | None
    transposed: Float[Array, "C R"] | None
    amax: Float[Array, ""]
    """max |x| before the scale, fp32."""


def quantize(
    x: Float[Array, "R C"],
    scale: Float[Array, ""] | float | int,
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
        from pallas_kernels.gemm import triton

        kernel = functools.partial(triton.quantize, dtype=dtype, rows=rows, transposed=transposed)
        if not _dispatch.partitioned(x):

            def launch(x, scale):
                *copies, largest_number = kernel(x, scale)
                return *copies, _shards().max(largest_number)

            rule = Rule("r c, -> r c, c r, ", over="r c", reduced="r c")
            return Quantized(*_calls.looped("quantize", launch, rule=rule)(x, scale))
        rule = Rule("r c, -> r c, c r", over="r c")
        copies = _calls.looped("quantize", lambda *args: kernel(*args)[:2], rule=rule)(x, scale)
        return Quantized(*copies, _largest_number(x))
    return _quantize_in_xla(x, scale, dtype, rows, transposed)


def _shards() -> Shards:
    """Return the shards of an array that `in_shardings` splits: its type names no mesh."""
    return Shards((*shards_of("r").axes, *shards_of("c").axes))


def _quantize_in_xla(x, scale, dtype, rows, transposed) -> Quantized:
    x = x.astype(jnp.float32)
    # Without clipping, the conversion of a number out of range is NaN (e4m3) or infinity (e5m2).
    q = (x * scale).clip(-largest(dtype), largest(dtype)).astype(dtype)
    return Quantized(q if rows else None, q.T if transposed else None, _largest_number(x))


def _largest_number(x) -> Float[Array, ""]:
    """Return max |x| in fp32: XLA reduces it over the shards."""
    return jnp.abs(x.astype(jnp.float32)).max(initial=0.0)


def transposed(q: Float[Array, "R C"]) -> Float[Array, "C R"]:
    """Return a transposed copy of an FP8 matrix, by the default back end. No derivative."""
    if _dispatch.select("quantize", arrays=q) != "triton":
        return q.T
    from pallas_kernels.gemm import triton

    return _calls.looped("transposed", triton.transposed, rule=Rule("r c -> c r", "r c"))(q)


def quantize_by_largest(
    x: Float[Array, "R C"],
    dtype: jax.typing.DTypeLike,
    *,
    headroom: float = 1.0,
    factor: float = 1.0,
    sampled: bool = False,
) -> Operand:
    """Convert x to FP8, both copies, with a scale from the largest |x|.

        scale = the largest power of two with scale · headroom · max |x| ≤ largest(dtype)
        q = round(x · scale), numbers beyond the largest FP8 number become the largest number

    x in fp32 is first rounded to bf16. Strategies that shard the parameters gather them in bf16:
    with this rounding, all strategies convert the same numbers.

    With triton on one device, one kernel stores maxima of parts of x, and the kernel of the
    conversion computes the scale from them, its inverse, and a factor of the inverse: with XLA,
    each of these would be a launch.

    Args:
        headroom: largest ratio of a number of x to the largest one that was read.
        factor: of `Scale.over_factor`.
        sampled: whether to read only `sample` for the scale.
    """

    def convert(x, shards):
        if x.dtype == jnp.float32:
            x = jax.lax.reduce_precision(x, 8, 7)
        read = sample(x) if sampled else x
        scale = scale_for(shards.max(jnp.abs(read).max(initial=0.0)), dtype, headroom)
        q = quantize(x, scale, dtype, transposed=True)
        return q.rows, q.transposed, *Scale.of(scale, factor)

    if not _dispatch.partitioned(x) and _dispatch.select("quantize", arrays=x) == "triton":
        from pallas_kernels.gemm import triton

        group = GROUP if sampled and x.shape[1] % GROUP == 0 else None
        how = {"dtype": jnp.dtype(dtype), "headroom": headroom, "factor": factor, "group": group}
        kernel = functools.partial(triton.quantize_by_largest, sampled=SAMPLED, **how)

        def launch(x):
            return convert(x, _shards()) if _shards().axes else kernel(x)

        rule = Rule("r c -> r c, c r, , , ", over="r c", reduced="r c")
        rows, k_major, *scale = _calls.looped("quantize", launch, rule=rule)(x)
    else:
        rows, k_major, *scale = convert(x, Shards())
    return Operand(rows, k_major, Scale(*scale))
