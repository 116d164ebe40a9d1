"""Matmuls and sums by XLA, with operand layouts that are fast on a GPU.

In TF32, Hopper's tensor cores need both operands K-major (contiguous along the axis of the sum).
cuBLAS's kernels for other layouts reach half the rate (H200: xᵀ dy of 32768×768 and 32768×3072 at
193 TFLOP/s, x wᵀ at 413). With a precision of HIGH, which requests TF32, operands that are not
K-major are transposed first. A copy, or the kernel that computes the operand, stores the transpose.
bf16 matmuls support any layout.

Shapes: N rows, I inputs, O outputs.
"""

import dataclasses
import functools
import itertools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import XLA, BackEnd
from pallas_kernels.fp8.conversion import Fp8Rows, rows_of
from pallas_kernels.transpose import transpose_copy, transpose_sum_rows

FEW = 8192
"""Largest number of rows that the custom kernel of `sum_rows` supports."""
Implementation = Literal["auto", "xla", "reference"]


@dataclasses.dataclass(frozen=True)
class SumFacts:
    """Properties of a call of `sum_rows` on which the choice of a back end depends."""

    rows: int


def _why_not_triton(call: SumFacts) -> str | None:
    if call.rows > FEW:
        return f"supports at most {FEW} rows, not {call.rows}"
    return _dispatch.why_not_triton()


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a call of `linear` on which the choice of a back end depends."""

    fp8: bool = False


def why_not_fp8(call) -> str | None:
    """Return None if the call is not in FP8, else the reason why the back end cannot run."""
    return "has no FP8 matmuls" if call.fp8 else None


_dispatch.register("linear", back_ends=[XLA, BackEnd("reference", why_not_fp8)], facts=Facts)
_dispatch.register(
    "sum_rows", back_ends=[BackEnd("triton", _why_not_triton, custom=True), XLA], facts=SumFacts
)


def xla_matmul(x_NI, w_IO, *, precision: jax.lax.PrecisionLike, dtype: jax.typing.DTypeLike):
    """Return x w in `dtype`."""
    # For few rows, such as the rows of a sampled token, the copy of w costs more than it saves.
    if precision == jax.lax.Precision.HIGH and x_NI.shape[0] >= x_NI.shape[1]:
        w_OI = transpose_copy(w_IO)
        return jnp.einsum(
            "ni,oi->no", x_NI, w_OI, precision=precision, preferred_element_type=dtype
        )
    return jnp.matmul(x_NI, w_IO, precision=precision, preferred_element_type=dtype)


def weight_gradient(x_NI, dy_NO, *, precision: jax.lax.PrecisionLike):
    """Return xᵀ dy in fp32."""
    if precision == jax.lax.Precision.HIGH:
        return weight_gradient_of_transposed(transpose_copy(x_NI), transpose_copy(dy_NO))
    return jnp.matmul(x_NI.T, dy_NO, precision=precision, preferred_element_type=jnp.float32)


def weight_gradient_of_transposed(x_IN, dy_ON):
    """Return xᵀ dy in fp32 by a TF32 matmul of K-major operands."""
    tf32 = {"precision": jax.lax.Precision.HIGH, "preferred_element_type": jnp.float32}
    return jnp.einsum("in,on->io", x_IN, dy_ON, **tf32)


def weight_and_bias_gradient(x_NI, dy_NO, *, precision: jax.lax.PrecisionLike):
    """Return (xᵀ dy, Σ_n dy), both in fp32."""
    # The custom kernel computes the transpose and the sum from one read of dy.
    if (
        precision == jax.lax.Precision.HIGH
        and _dispatch.select("transpose_sum_rows", arrays=(x_NI, dy_NO)) == "triton"
    ):
        dy_ON, db_O = transpose_sum_rows(dy_NO)
        return weight_gradient_of_transposed(transpose_copy(x_NI), dy_ON), db_O
    return weight_gradient(x_NI, dy_NO, precision=precision), sum_rows(dy_NO, x_NI)


def sum_rows(x_NO, *others):
    """Return Σ_n x in fp32, the gradient of a bias.

    Args:
        others: further arrays of the call, for `select`. The types of the gradients that cuDNN's
            attention returns do not name the mesh of the gradients.
    """
    # XLA splits a sum of 65,536 rows over many thread blocks, and reaches the copy rate. XLA splits
    # 4096×2304 over only 18 thread blocks, which take 41 µs on an H200.
    backend = _dispatch.select("sum_rows", arrays=(x_NO, *others), rows=x_NO.shape[0])
    if backend == "triton":
        from pallas_kernels.matmul import triton

        return _calls.looped("linear", triton.sum_rows)(x_NO)
    return x_NO.astype(jnp.float32).sum(0)


def joined(w, dtype: jax.typing.DTypeLike):
    """Return w in `dtype`: one matrix, or several matrices concatenated along the columns."""
    parts = [part.astype(dtype) for part in jax.tree.leaves(w)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def split_like(dw_IO, w):
    """Convert the gradient of `joined(w)` to the structure and dtypes of w."""
    parts, structure = jax.tree.flatten(w)
    ends = list(itertools.accumulate(part.shape[1] for part in parts))
    pieces = jnp.split(dw_IO, ends[:-1], axis=1)
    gradients = [piece.astype(part.dtype) for piece, part in zip(pieces, parts, strict=True)]
    return jax.tree.unflatten(structure, gradients)


def linear(
    x: Float[Array, "*B I"] | Fp8Rows,
    w: Float[Array, "I O"] | tuple[Float[Array, "I _"], ...],
    b: Float[Array, " O"] | None = None,
    precision: jax.lax.PrecisionLike = None,
    *,
    fp8: bool = False,
    implementation: Implementation | str = "auto",
) -> Float[Array, "*B O"]:
    """Compute x w + b in x's dtype, rounded once; x w if b is None.

    Gradients of w and b are summed in fp32.

    Args:
        x: fp32, bf16 or fp16.
        w, b: of x's dtype or fp32. A w in fp32 is rounded to x's dtype; b is added before the one
            rounding of the result. The gradients have the dtypes of w and b. A tuple of matrices w
            is one matmul with the matrices concatenated along the columns; the backward pass stores
            only the separate matrices.
        precision: precision of fp32 matmuls in "xla" (JAX's default for fp32 on a GPU is TF32).
        fp8: whether the matmuls are in FP8 where the call is differentiated
            (pallas_kernels/fp8/layers.py), with "auto" or "xla". x may then be the `Fp8Rows` of
            a norm with fp8_scale=ACTIVATION_SCALE.
        implementation: "auto" or "xla": differentiable once, in reverse mode. "reference": fp32
            with true fp32 matmuls, its gradients by JAX: forward mode and higher derivatives work.

    Raises:
        ValueError: wrong shapes or dtypes, no such back end.
    """
    return checked_linear("linear", x, w, b, implementation, precision, fp8)


def checked_linear(
    kernel: str,
    x,
    w,
    b,
    implementation: str,
    precision: jax.lax.PrecisionLike,
    fp8: bool = False,
):
    """Compute `linear`. `kernel` is the name of the public function in error messages."""
    given, x = x, rows_of(x)
    ws = jax.tree.leaves(w)
    outputs = sum(w.shape[-1] for w in ws if w.ndim)
    if not (x.ndim >= 1 and all(w.ndim == 2 and x.shape[-1] == w.shape[0] for w in ws)) or (
        b is not None and b.shape != (outputs,)
    ):
        raise ValueError(
            f"{kernel}: expected x (..., I), w (I, O) and b (O,), got {x.shape}, "
            f"{', '.join(str(w.shape) for w in ws)}, {None if b is None else b.shape}"
        )
    if x.dtype not in _dispatch.DTYPES or any(
        a is not None and a.dtype not in (x.dtype, jnp.float32) for a in (*ws, b)
    ):
        raise ValueError(
            f"{kernel}: expected x in float32, bfloat16 or float16, w and b in x's dtype or "
            f"float32, got {x.dtype}, {', '.join(str(w.dtype) for w in ws)}, "
            f"{None if b is None else b.dtype}"
        )
    backend = _dispatch.select("linear", implementation, arrays=(x, w, b), fp8=fp8)
    x_NI = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if backend == "reference":
        y_NO = reference(x_NI, w, b).astype(x.dtype)
    elif fp8:
        from pallas_kernels.fp8 import clipping, layers

        w_IO = joined(w, jnp.result_type(*ws))
        args = layers.flat(given), w_IO, b, precision
        f = clipping.counted(kernel, layers.linear)
        y_NO = _calls.differentiable(kernel, f, *args)
    else:
        y_NO = _calls.differentiable(kernel, _linear, x_NI, w, b, precision)
    return y_NO.reshape(*x.shape[:-1], outputs)


def reference(x_NI, w, b_O=None):
    """Compute the definition of `linear` in fp32 with true fp32 matmuls. Return fp32."""
    x_NI, w_IO = x_NI.astype(jnp.float32), joined(w, jnp.float32)
    y_NO = jnp.matmul(x_NI, w_IO, precision=jax.lax.Precision.HIGHEST)
    return y_NO if b_O is None else y_NO + b_O.astype(jnp.float32)[None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linear(x_NI, w, b_O, precision: jax.lax.PrecisionLike):
    """Compute `linear` of rows, rounded once as in PyTorch and llm.c.

    A second rounding loses small biases: in bf16, 0.5 + 0.001 is 0.5. With two roundings, the
    losses of ten steps have 2.7 times PyTorch's error against fp64 (H200).
    """

    def add_in(dtype, x_NI, w_IO, b_O):
        y_NO = xla_matmul(x_NI, w_IO, precision=precision, dtype=dtype)
        if b_O is not None:
            y_NO = y_NO + b_O.astype(dtype)[None]
        return y_NO.astype(x_NI.dtype)

    # cuBLASLt adds a bf16 bias to the fp32 accumulator of a bf16 matmul. XLA fuses a bf16 matmul
    # and a bf16 addition to this epilogue, and stores no fp32 result. The same operations round
    # twice on a CPU, and on a GPU with XLA's default --xla_gpu_enable_triton_gemm. gptjax disables
    # that flag for training.
    return jax.lax.platform_dependent(
        x_NI,
        joined(w, x_NI.dtype),
        b_O,
        cuda=functools.partial(add_in, x_NI.dtype),
        default=functools.partial(add_in, jnp.float32),
    )


def _linear_forward(x_NI, w, b_O, precision):
    return _linear(x_NI, w, b_O, precision), (x_NI, w, b_O)


def _linear_backward(precision, saved, dy_NO):
    # JAX's differentiation rule would multiply an fp32 gradient by bf16 operands at the fp32 rate,
    # and sum the gradient of the bias in bf16.
    x_NI, w, b_O = saved
    dx_NI = jnp.matmul(dy_NO, joined(w, dy_NO.dtype).T, precision=precision)
    if b_O is None:
        return dx_NI, split_like(weight_gradient(x_NI, dy_NO, precision=precision), w), None
    dw_IO, db_O = weight_and_bias_gradient(x_NI, dy_NO, precision=precision)
    return dx_NI, split_like(dw_IO, w), db_O.astype(b_O.dtype)


_linear.defvjp(_linear_forward, _linear_backward)


# ----------------------------------------------------------------------------------------- examples


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
