"""Sums over the rows of a matrix: the gradient of a bias."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import XLA, BackEnd
from pallas_kernels._partition import Rule

FEW = 8192
"""Largest number of rows that the custom kernel of `sum_rows` supports."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a call of `sum_rows` on which the choice of a back end depends."""

    rows: int


def _why_not_triton(call: Facts) -> str | None:
    if call.rows > FEW:
        return f"supports at most {FEW} rows, not {call.rows}"
    return _dispatch.why_not_triton()


_dispatch.register(
    "sum_rows",
    back_ends=[BackEnd("triton", _why_not_triton, custom=True, rule=True, sums=True), XLA],
    facts=Facts,
)


def sum_rows(x_NO, *others):
    """Return Σ_n x over all axes but the last in fp32, the gradient of a bias.

    Args:
        others: further arrays of the call, for `select`.
    """
    # XLA splits a sum of 65,536 rows over many thread blocks, and reaches the copy rate. XLA splits
    # 4096×2304 over only 18 thread blocks, which take 41 µs on an H200.
    backend = _dispatch.select("sum_rows", arrays=(x_NO, *others), rows=math.prod(x_NO.shape[:-1]))
    if backend == "triton":
        from pallas_kernels.gemm import triton

        rule = Rule("n* o -> o", over="n* o")
        return _calls.looped("linear", triton.sum_rows, rule=rule)(x_NO)
    return x_NO.astype(jnp.float32).sum(range(x_NO.ndim - 1))


@_dispatch.example("sum_rows")
def _sum_rows_example(rows, dtype):
    """The gradient of the bias of GPT-2's attention projection. The kernel has no derivative."""
    rows = min(rows, FEW)

    def call(x_NO, implementation):
        _dispatch.select("sum_rows", implementation, arrays=x_NO, rows=rows)
        return sum_rows(x_NO)

    arrays = (jax.ShapeDtypeStruct((rows, 2304), dtype),)
    expected = functools.partial(jnp.sum, axis=0)
    return _dispatch.Example(call, expected, arrays, differentiable=False)
