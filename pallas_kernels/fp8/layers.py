"""Linear layer and MLP with FP8 matmuls in differentiated calls.

    linear:  y = x W + b      dx = dy Wᵀ                         dW = xᵀ dy
    mlp:     y = gelu(x W + b) W₂      du = (dy W₂ᵀ) ∘ gelu'(u)      dx = du Wᵀ      dW = xᵀ du
             dW₂ = gelu(u)ᵀ dy

Every matmul reads FP8 copies of its operands, e4m3 for activations and weights and e5m2 for
gradients, each times a scale of the whole array:

| operand | scale |
| --- | --- |
| x, gelu(u) | `ACTIVATION_SCALE`: numbers beyond 56 become 56 |
| W, W₂ | from the largest |w|, at each call |
| dy | from the largest |dy| of a sixteenth of the columns, at each call, with `GRADIENT_HEADROOM` |
| du | the scale of dy |

No scale depends on earlier steps: there is no state. A call that is not differentiated computes in
x's dtype.

The FP8 copies are stored for the backward pass, half as many bytes as x. Sums of more than `FAST`
terms use cuBLASLt's slower, more accurate accumulation.

Shapes: N rows, I inputs, O outputs of the first layer, C outputs of the MLP.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import BackEnd
from pallas_kernels.feed_forward import ACTIVATIONS
from pallas_kernels.feed_forward import mlp as plain_mlp
from pallas_kernels.fp8 import (
    E4M3,
    E5M2,
    Fp8Rows,
    Quantized,
    quantize,
    rows_of,
    scale_for,
    scaled_matmul,
    why_not_fp8,
)
from pallas_kernels.matmul import linear as plain_linear
from pallas_kernels.matmul import sum_rows

ACTIVATION_SCALE = 8.0
"""The outputs of norms, attention and GELU are near 1. With this scale, e4m3 represents 0.002 … 56
with a relative error of 1/16, and 0.0001 … 0.002 with an absolute error of 0.0001."""
GRADIENT_HEADROOM = 64.0
"""Largest supported ratio of max |dy| to the maximum of the `SAMPLED` columns, and of max |du| to
max |dy|. The range of e5m2 suffices: 2⁻²⁴ times the sampled maximum is a normal number."""
FAST = 4096
"""Number of terms up to which the error of a fast sum, 4e-4 of the result, is far below the error
of rounding the terms."""
SAMPLED, GROUP = 16, 256
"""Number of columns that are read for a scale, the first `SAMPLED` of each `GROUP`: 32 bytes, one
sector of memory."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a call on which the choice of a back end depends."""

    rows: int
    inputs: int
    outputs: int


def _why_not_mosaic(call: Facts) -> str | None:
    if (why := _dispatch.why_not_mosaic()) is not None:
        return why
    from pallas_kernels.fp8 import mosaic

    return mosaic.Tiles().why_not(call.rows, call.outputs, call.inputs)


_dispatch.register(
    "fp8_linear_gelu",
    back_ends=[
        BackEnd("mosaic", _why_not_mosaic, custom=True),
        BackEnd("xla", lambda call: why_not_fp8()),
    ],
    facts=Facts,
)


class Weights(NamedTuple):
    """A weight in e4m3: (I, O) and (O, I), and its scale."""

    io: Float[Array, "I O"]
    oi: Float[Array, "O I"]
    scale: Float[Array, ""]


def quantized_weights(w_IO: Float[Array, "I O"]) -> Weights:
    """Return both copies of a weight, with a scale from its largest number."""
    scale = scale_for(jnp.abs(w_IO).max(), E4M3)
    q = quantize(w_IO, scale, E4M3, transposed=True)
    return Weights(q.rows, q.transposed, scale)


def quantized_gradient(dy_NO: Float[Array, "N O"]) -> tuple[Quantized, Float[Array, ""]]:
    """Return both copies of a gradient in e5m2, and their scale."""
    n, o = dy_NO.shape
    # All rows, since the rows of ignored targets may be zero. Reading all columns would take a
    # third of the time of the conversion.
    sample = dy_NO.reshape(n, o // GROUP, GROUP)[:, :, :SAMPLED] if o % GROUP == 0 else dy_NO
    scale = scale_for(jnp.abs(sample).max(), E5M2, GRADIENT_HEADROOM)
    return quantize(dy_NO, scale, E5M2, transposed=True), scale


def kind_of(x: Array | Fp8Rows) -> Fp8Rows | None:
    """Return `Fp8Rows` without arrays if x is `Fp8Rows`, else None, for `cotangent`."""
    return Fp8Rows(None, None, None) if isinstance(x, Fp8Rows) else None


def cotangent(dx: Array, kind: Fp8Rows | None) -> Array | Fp8Rows:
    """Return the cotangent of x: dx, or `Fp8Rows` with dx as the cotangent of y."""
    return dx if kind is None else kind._replace(y=dx)


class Saved(NamedTuple):
    """Arrays that the forward pass saves for `linear_backward`."""

    x_IN: Float[Array, "I N"]
    w_IO: Float[Array, "I O"]
    w_scale: Float[Array, ""]


def activations(x: Array | Fp8Rows) -> Quantized | Fp8Rows:
    """Return two copies of x · `ACTIVATION_SCALE` in e4m3: the rows, and the transposed copy."""
    if isinstance(x, Fp8Rows):
        return x
    return quantize(x, ACTIVATION_SCALE, E4M3, transposed=True)


def linear_forward(x_NI, w_IO, b_O=None) -> tuple[Float[Array, "N O"], Saved]:
    """Return x w + b in x's dtype, and the `Saved` arrays for the backward pass."""
    x, dtype = activations(x_NI), rows_of(x_NI).dtype
    w = quantized_weights(w_IO)
    y_NO = _matmul(x.rows, w.oi, 1 / (ACTIVATION_SCALE * w.scale), dtype)
    if b_O is not None:  # XLA adds b in cuBLASLt's epilogue
        y_NO = y_NO + b_O.astype(y_NO.dtype)[None]
    return y_NO, Saved(x.transposed, w.io, w.scale)


def linear_backward(saved: Saved, dy_NO) -> tuple[Float[Array, "N I"], Float[Array, "I O"]]:
    """Return dx in dy's dtype, and dw in fp32."""
    dy, scale = quantized_gradient(dy_NO)
    dx_scale = 1 / (scale * saved.w_scale)
    dx_NI = _matmul(dy.rows, saved.w_IO, dx_scale, dy_NO.dtype)
    dw_scale = 1 / (ACTIVATION_SCALE * scale)
    return dx_NI, _matmul(saved.x_IN, dy.transposed, dw_scale, jnp.float32)


def _matmul(a, b, scale, dtype):
    return scaled_matmul(a, b, scale, out_dtype=dtype, fast_accumulation=a.shape[1] <= FAST)


@jax.custom_vjp
def linear(x_NI, w_IO, b_O):
    """Return x w + b in x's dtype; b may be None."""
    return plain_linear(x_NI, w_IO, b_O)


def _linear_forward(x_NI, w_IO, b_O):
    y_NO, saved = linear_forward(x_NI, w_IO, b_O)
    return y_NO, (saved, jnp.zeros((), w_IO.dtype), b_O)


def _linear_backward(residuals, dy_NO):
    saved, like, b_O = residuals
    dx_NI, dw_IO = linear_backward(saved, dy_NO)
    db_O = None if b_O is None else sum_rows(dy_NO).astype(b_O.dtype)
    return dx_NI, dw_IO.astype(like.dtype), db_O


linear.defvjp(_linear_forward, _linear_backward)


# ---------------------------------------------------------------------------------------------- MLP


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def mlp(x_NI, w_IO, b_O, w2_OC, backend: str):
    """Return gelu(x w + b) w2 in x's dtype.

    Args:
        backend: from `select`.
    """
    return plain_mlp(rows_of(x_NI), w_IO, b_O, w2_OC)


def _mlp_forward(x_NI, w_IO, b_O, w2_OC, backend):
    x, dtype = activations(x_NI), rows_of(x_NI).dtype
    w, w2 = quantized_weights(w_IO), quantized_weights(w2_OC)
    scale = 1 / (ACTIVATION_SCALE * w.scale)
    y_NO, y_ON, slope_NO = _gelu(backend, x.rows, w.oi, b_O, scale, dtype)
    y_NC = _matmul(y_NO, w2.oi, 1 / (ACTIVATION_SCALE * w2.scale), dtype)
    like = jax.tree.map(lambda a: jnp.zeros((), a.dtype), (w_IO, b_O, w2_OC))
    saved = x.transposed, w.io, w.scale, y_ON, w2.io, w2.scale, slope_NO, like
    return y_NC, (saved, kind_of(x_NI))


def _mlp_backward(backend, residuals, dy_NC):
    saved, kind = residuals
    x_IN, w_IO, w_scale, y_ON, w2_OC, w2_scale, slope_NO, like = saved
    dy, scale = quantized_gradient(dy_NC)
    du_NO, du_ON, db_O = _gelu_backward(
        backend, dy.rows, w2_OC, slope_NO, 1 / (scale * w2_scale), scale, dy_NC.dtype
    )
    dx_NI = _matmul(du_NO, w_IO, 1 / (scale * w_scale), dy_NC.dtype)
    dw_IO = _matmul(x_IN, du_ON, 1 / (ACTIVATION_SCALE * scale), jnp.float32)
    dw2_OC = _matmul(y_ON, dy.transposed, 1 / (ACTIVATION_SCALE * scale), jnp.float32)
    grads = (dw_IO, db_O, dw2_OC)
    return cotangent(dx_NI, kind), *jax.tree.map(lambda g, like: g.astype(like.dtype), grads, like)


mlp.defvjp(_mlp_forward, _mlp_backward)


def select(implementation: str, w_IO, rows: int) -> str:
    """Return the back end of GELU with its matmul, for `mlp`."""
    facts = {"rows": rows, "inputs": w_IO.shape[0], "outputs": w_IO.shape[1]}
    return _dispatch.select("fp8_linear_gelu", implementation, arrays=w_IO, **facts)


def _gelu(backend, x_NI, w_OI, b_O, scale, dtype):
    """Return gelu(u) in e4m3, rows and transposed, and gelu'(u), with u = scale · x wᵀ + b."""
    b_O = b_O.astype(jnp.float32)
    if backend == "mosaic":
        from pallas_kernels.fp8 import mosaic

        kernel = _calls.looped("fp8_linear_gelu", mosaic.linear_gelu)
        return kernel(x_NI, w_OI, b_O, scale, jnp.float32(ACTIVATION_SCALE))[:3]
    u_NO = _matmul(x_NI, w_OI, scale, dtype).astype(jnp.float32) + b_O[None]
    y_NO, slope_NO = ACTIVATIONS["gelu"](u_NO)
    y = quantize(y_NO.astype(dtype), ACTIVATION_SCALE, E4M3, transposed=True)
    return y.rows, y.transposed, slope_NO.astype(dtype)


def _gelu_backward(backend, dy_NC, w2_OC, slope_NO, scale, du_scale, dtype):
    """Return du in e5m2, rows and transposed, and db in fp32."""
    if backend == "mosaic":
        from pallas_kernels.fp8 import mosaic

        kernel = _calls.looped("fp8_linear_gelu", mosaic.gelu_backward)
        return kernel(dy_NC, w2_OC, slope_NO, scale, du_scale)[:3]
    dh_NO = _matmul(dy_NC, w2_OC, scale, dtype).astype(jnp.float32)
    du_NO = (dh_NO * slope_NO.astype(jnp.float32)).astype(dtype)
    du = quantize(du_NO, du_scale, E5M2, transposed=True)
    return du.rows, du.transposed, sum_rows(du_NO)
