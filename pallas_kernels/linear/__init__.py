"""Linear layer.

    y = x W + b      dx = dy Wᵀ      dW = xᵀ dy      db = Σ_n dy

Back ends (reference as in pallas_kernels/__init__.py):
    xla: XLA's matmuls, with operands by the call's numerics (pallas_kernels/gemm). Any device.

Shapes: N rows (all leading axes of x), I inputs, O outputs.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._dispatch import BackEnd
from pallas_kernels._partition import automatic
from pallas_kernels._types import Array, Float
from pallas_kernels.gemm.numerics import (
    Fp8,
    Numerics,
    NumericsFacts,
    joined,
    like,
    numerics_of,
    split_like,
)
from pallas_kernels.gemm.operands import Operand, check_dtypes, exact, separate

Implementation = Literal["auto", "xla", "reference"]


_dispatch.register(
    "linear",
    back_ends=[
        BackEnd("xla", NumericsFacts.why_not),
        BackEnd("reference", NumericsFacts.why_not_reference),
    ],
    facts=NumericsFacts,
)


def linear(
    x: Float[Array, "*B I"] | Operand,
    w: Float[Array, "I O"] | tuple[Float[Array, "I _"], ...],
    b: Float[Array, " O"] | None = None,
    precision: jax.lax.PrecisionLike = None,
    *,
    numerics: str | Numerics | None = None,
    implementation: Implementation | str = "auto",
) -> Float[Array, "*B O"]:
    """Compute x w + b in x's dtype, rounded once; x w if b is None.

    Gradients of w and b are summed in fp32.

    Args:
        x: fp32, bf16 or fp16; or the `Operand` of a norm with the same numerics.
        w, b: of x's dtype or fp32. A w in fp32 is rounded to x's dtype; b is added before the one
            rounding of the result. The gradients have the dtypes of w and b. A tuple of matrices w
            is one matmul with the matrices concatenated along the columns; the backward pass stores
            only the separate matrices.
        precision: precision of fp32 matmuls in "xla" (JAX's default for fp32 on a GPU is TF32).
        numerics: "fp32", "tf32", "bf16", "fp8", or a `pallas_kernels.gemm.Numerics`. None: follows
            the dtypes and `precision`. "fp8": FP8 matmuls where the call is differentiated.
        implementation: "auto" or "xla": differentiable in reverse mode, the gradient in both modes.
            "reference": fp32 with true fp32 matmuls, differentiable in both modes.

    Raises:
        ValueError: wrong shapes, dtypes or numerics, or the back end cannot run this call.
    """
    how = numerics_of("linear", numerics, precision, Fp8())
    return checked_linear("linear", x, w, b, implementation, how)


def checked_linear(kernel: str, x, w, b, implementation: str, numerics: Numerics):
    """Compute `linear`. `kernel` is the name of the public function in error messages."""
    given, x = x, exact(x)
    outputs = check(kernel, x, w, b)
    backend = _dispatch.select("linear", implementation, arrays=(x, w, b), numerics=numerics)
    if backend == "reference":
        y_NO = reference(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), w, b).astype(x.dtype)
        return y_NO.reshape(*x.shape[:-1], outputs)

    def call(given, w, b):
        args = *separate(given, numerics.flat(x)), w, b, numerics
        return numerics.call(kernel, _linear, *args).reshape(*x.shape[:-1], outputs)

    return automatic(call, x, w)(given, w, b)


def check(kernel: str, x, w, b) -> int:
    """Raise for wrong shapes and dtypes of a linear layer. Return the number of outputs."""
    ws = jax.tree.leaves(w)
    outputs = sum(w.shape[-1] for w in ws if w.ndim)
    if not (x.ndim >= 1 and all(w.ndim == 2 and x.shape[-1] == w.shape[0] for w in ws)) or (
        b is not None and b.shape != (outputs,)
    ):
        raise ValueError(
            f"{kernel}: expected x (..., I), w (I, O) and b (O,), got {x.shape}, "
            f"{', '.join(str(w.shape) for w in ws)}, {None if b is None else b.shape}"
        )
    check_dtypes(kernel, x, "w and b", ws, b)
    return outputs


def reference(x_NI, w, b_O=None):
    """Compute the definition of `linear` in fp32 with true fp32 matmuls. Return fp32."""
    x_NI, w_IO = x_NI.astype(jnp.float32), joined(w, jnp.float32)
    y_NO = jnp.matmul(x_NI, w_IO, precision=jax.lax.Precision.HIGHEST)
    return y_NO if b_O is None else y_NO + b_O.astype(jnp.float32)[None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _linear(x_NI, converted: Operand | None, w, b_O, numerics: Numerics):
    return forward(x_NI, None, w, b_O, numerics.plain)[0]


def forward(x_NI, converted, w, b_O, numerics: Numerics):
    """Return x w + b in x's dtype, and the operands for `Numerics.gradients`.

    Args:
        converted: the operand of x, if a norm has converted x, or None.
    """
    x, w = numerics.input(x_NI, converted), numerics.weight(w)
    y_NO = numerics.product(x, w, x_NI.dtype, b_O)
    return y_NO, (x.only("k_major"), w.only("rows"))


def _forward(x_NI, converted, w, b_O, numerics):
    y_NO, operands = forward(x_NI, converted, w, b_O, numerics)
    return y_NO, (operands, like(w), b_O)


def _backward(numerics, saved, dy_NO):
    # JAX's differentiation rule would multiply an fp32 gradient by bf16 operands at the fp32 rate,
    # and sum the gradient of the bias in bf16.
    operands, w, b_O = saved
    dx_NI, dw_IO, db_O = numerics.gradients(*operands, dy_NO, bias=b_O is not None)
    db_O = None if b_O is None else db_O.astype(b_O.dtype)
    return dx_NI, None, split_like(dw_IO, w), db_O


_linear.defvjp(_forward, _backward)
