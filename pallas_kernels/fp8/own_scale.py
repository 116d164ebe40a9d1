"""Conversion of a matrix to FP8 with a scale from its own largest number.

    scale = the largest power of two with scale · headroom · max |x| ≤ largest(dtype)
    q = round(x · scale)

x in fp32 is first rounded to bf16. Strategies that shard the parameters gather them in bf16: with
this rounding, all strategies convert the same numbers.

Back ends: those of `quantize`. With triton, one kernel stores maxima of parts of x, and the kernel
of the conversion computes the scale from them, its inverse, and a factor of the inverse: with XLA,
each of these would be a launch.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _calls, _dispatch
from pallas_kernels.fp8.conversion import quantize, scale_for

SAMPLED, GROUP = 16, 256
"""With `sampled`, number of columns that are read for the scale, the first `SAMPLED` of each
`GROUP`: 32 bytes, one sector of memory."""
IN_KERNELS = True
"""Whether the Triton kernels compute the scale; else XLA."""


class Scale(NamedTuple):
    """A scale, and factors that undo it. All are powers of two if the factor is."""

    value: Float[Array, ""]
    inverse: Float[Array, ""]
    """1 / value."""
    over_factor: Float[Array, ""]
    """1 / (factor · value)."""

    @staticmethod
    def of(value: Float[Array, ""], factor: float) -> "Scale":
        return Scale(value, 1 / value, 1 / (factor * value))


class Scaled(NamedTuple):
    """A matrix in FP8, and its scale."""

    rows: Float[Array, "R C"]
    transposed: Float[Array, "C R"]
    scale: Scale


def quantize_by_largest(
    x: Float[Array, "R C"],
    dtype: jax.typing.DTypeLike,
    *,
    headroom: float = 1.0,
    factor: float = 1.0,
    sampled: bool = False,
) -> Scaled:
    """Convert x to FP8, rows and transposed, with a scale from the largest |x|.

    Numbers beyond the largest FP8 number become the largest number.

    Args:
        headroom: largest ratio of a number of x to the largest one that was read.
        factor: of `Scale.over_factor`.
        sampled: whether to read a sample of the columns for the scale, if C is a multiple of
            `GROUP`.
    """
    group = GROUP if sampled and x.shape[1] % GROUP == 0 else None
    if IN_KERNELS and _dispatch.select("quantize", arrays=x) == "triton":
        from pallas_kernels.fp8 import triton_own_scale

        how = {"dtype": jnp.dtype(dtype), "headroom": headroom, "factor": factor, "group": group}
        kernel = functools.partial(triton_own_scale.quantize_by_largest, sampled=SAMPLED, **how)
        rows, transposed, *scale = _calls.looped("quantize", kernel)(x)
        return Scaled(rows, transposed, Scale(*scale))
    if x.dtype == jnp.float32:
        x = jax.lax.reduce_precision(x, 8, 7)
    sample = (
        x if group is None else x.reshape(x.shape[0], x.shape[1] // group, group)[:, :, :SAMPLED]
    )
    scale = scale_for(jnp.abs(sample).max(initial=0.0), dtype, headroom)
    q = quantize(x, scale, dtype, transposed=True)
    return Scaled(q.rows, q.transposed, Scale.of(scale, factor))
