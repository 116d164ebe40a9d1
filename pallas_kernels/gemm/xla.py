"""Matmul of FP8 operands. The docstring of pallas_kernels/gemm/__init__.py has the equation."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, BackEnd
from pallas_kernels._types import Array, Float
from pallas_kernels.gemm.operands import E4M3, E5M2, NO_DERIVATIVE, why_not_fp8

Implementation = Literal["auto", "xla", "reference"]

_dispatch.register(
    "scaled_matmul",
    back_ends=[BackEnd("xla", lambda facts: why_not_fp8()), REFERENCE],
    order=lambda facts, partitioned: ("xla",),
)


def scaled_matmul(
    a: Float[Array, "M K"],
    b: Float[Array, "N K"],
    scale: Float[Array, ""] | float | int = 1.0,
    *,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    fast_accumulation: bool = True,
    implementation: Implementation | str = "auto",
) -> Float[Array, "M N"]:
    """Compute scale · a bᵀ.

    With XLA's default options on a GPU, the autotuner may select a Triton matmul instead of
    cuBLASLt in "xla". Its operands are FP8, too, and the results differ in the order of the sums
    only; its sums have about 14 bits also with fast_accumulation=False. For cuBLASLt, use
    jax.jit(f, compiler_options={"xla_gpu_enable_triton_gemm": False}), as gptjax does for training.

    Args:
        a, b: float8_e4m3fn or float8_e5m2; at most one operand is e5m2.
        scale: a power of two is exact; another number is rounded to out_dtype in "xla".
        out_dtype: bfloat16, float16 or float32.
        fast_accumulation: whether "xla" may accumulate all of K in the tensor cores, with about 14
            bits. False: partial sums are added to fp32 registers at intervals of K.
        implementation: "auto", or a back end: "xla", "reference".

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
    backend = _dispatch.select("scaled_matmul", implementation, arrays=(a, b))
    scale = jnp.asarray(scale, jnp.float32)
    a, b, scale = _calls.once("scaled_matmul", (a, b, scale), NO_DERIVATIVE)
    if backend == "reference":
        return reference(a, b, scale).astype(out_dtype)
    return _xla_matmul(a, b, scale, out_dtype, fast_accumulation)


def _xla_matmul(a, b, scale, out_dtype, fast_accumulation):
    # XLA lowers a dot of FP8 operands to cuBLASLt, and the multiplication of the dot's result by a
    # scalar to cuBLASLt's scale of a. There must be no conversion between dot and multiplication.
    # With a precision of HIGHEST, XLA disables cuBLASLt's fast accumulation.
    # Without the barrier, XLA computes one broadcast of a scale for several matmuls, and multiplies
    # each result in a pass of its own (3.3 GB for the logits of 16,384 tokens).
    a, scale = jax.lax.optimization_barrier((a, scale))
    precision = jax.lax.Precision.DEFAULT if fast_accumulation else jax.lax.Precision.HIGHEST
    axes = (((1,), (1,)), ((), ()))
    y = jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=out_dtype)
    return y * scale.astype(out_dtype)


def reference(a, b, scale=1.0):
    """Compute the definition of `scaled_matmul` with true fp32 matmuls. Return fp32."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST) * scale


# ----------------------------------------------------------------------------------------- examples


@_dispatch.example("scaled_matmul")
def _matmul_example(rows, dtype):
    """GPT-2's width. The matmul has no derivative."""

    def call(x, w, implementation):
        a, b = x.astype(E4M3), w.astype(E4M3)
        return scaled_matmul(a, b, 2.0**-5, implementation=implementation).astype(jnp.float32)

    arrays = tuple(jax.ShapeDtypeStruct((size, 768), dtype) for size in (rows, 2304))
    expected = functools.partial(call, implementation="reference")
    return _dispatch.Example(call, expected, arrays, differentiable=False)
