"""Linear layer and MLP with FP8 matmuls in differentiated calls.

    linear:  y = x W + b      dx = dy Wᵀ                         dW = xᵀ dy
    mlp:     y = a(x W + b) W₂      du = (dy W₂ᵀ) ∘ a'(u)      dx = du Wᵀ      dW = xᵀ du
             dW₂ = a(u)ᵀ dy

a is GELU or ReLU² (pallas_kernels/fp8/activations.py). pallas_kernels/fp8/gated.py has the MLP with
a gated activation.

Every matmul reads FP8 copies of its operands, e4m3 for activations and weights and e5m2 for
gradients, each times a scale of the whole array:

| operand | scale |
| --- | --- |
| x, gelu(u) | `ACTIVATION_SCALE`: numbers beyond 56 become 56 |
| relu(u)² | 1: numbers beyond 448 become 448 |
| gelu'(u) | 256, not an operand |
| W, W₂ | from the largest |w|, at each call |
| dy | from the largest |dy| of a sixteenth of the columns, at each call, with `GRADIENT_HEADROOM` |
| du | the scale of dy |

No scale depends on earlier steps: there is no state. A call that is not differentiated computes in
x's dtype.

The FP8 copies are stored for the backward pass, half as many bytes as x. The backward pass also
reads the derivative of GELU, in e4m3. Sums of more than `FAST` terms use cuBLASLt's slower, more
accurate accumulation.

Back ends of the activation with its FP8 results, and of du:
    mosaic: in the kernel of the matmul; Hopper, sizes that its tiles divide.
    triton: in a kernel after the matmul; compute capability 8.9 (Ada) or later.
    xla: plain JAX; any device.
XLA (cuBLASLt) computes the other matmuls.

Shapes: N rows, I inputs, O outputs of the first layer, C outputs of the MLP. A weight W is (I, O),
or (O, I) with the option `output_major`; its gradient has the same shape.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import BackEnd
from pallas_kernels.feed_forward import linear_relu_squared
from pallas_kernels.feed_forward import mlp as plain_mlp
from pallas_kernels.fp8 import (
    E4M3,
    E5M2,
    Fp8Rows,
    Quantized,
    quantize,
    rows_of,
    scaled_matmul,
    why_not_fp8,
)
from pallas_kernels.fp8.activations import GELU, RELU_SQUARED
from pallas_kernels.fp8.clipping import count, counted
from pallas_kernels.fp8.own_scale import Scale, Scaled, quantize_by_largest
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
WEIGHT_SCALE: float | None = None
"""Scale of all weights; None: from the largest number of each."""
BIAS_IN_KERNEL = False
"""Whether the Mosaic kernel computes a linear layer with a bias, where its tiles divide the sizes.
Else XLA, which adds the bias in cuBLASLt's epilogue."""
LONG_SUMS_IN_KERNEL = False
"""Whether the Mosaic kernel computes matmuls of more than `FAST` terms, where its tiles divide the
sizes. Else cuBLASLt."""
ACTIVATIONS = {activation.name: activation for activation in (GELU, RELU_SQUARED)}


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

    return mosaic.why_not(call.rows, call.outputs, call.inputs)


_dispatch.register(
    *(f"fp8_linear_{name}" for name in ACTIVATIONS),
    back_ends=[
        BackEnd("mosaic", _why_not_mosaic, custom=True),
        BackEnd("triton", lambda call: _dispatch.why_not_triton() or why_not_fp8(), custom=True),
        BackEnd("xla", lambda call: why_not_fp8()),
    ],
    facts=Facts,
)


class Weights(NamedTuple):
    """A weight in e4m3: (I, O) and (O, I), and its scale."""

    io: Float[Array, "I O"]
    oi: Float[Array, "O I"]
    scale: Scale


def quantized_weights(w, output_major: bool = False) -> Weights:
    """Return both copies of a weight, with a scale from its largest number. The factor of its
    `Scale.over_factor` is `ACTIVATION_SCALE`."""
    if WEIGHT_SCALE is None:
        q = quantize_by_largest(w, E4M3, factor=ACTIVATION_SCALE)
    else:
        scale = Scale.of(jnp.float32(WEIGHT_SCALE), ACTIVATION_SCALE)
        q = Scaled(*quantize(w, WEIGHT_SCALE, E4M3, transposed=True)[:2], scale)
    io, oi = (q.transposed, q.rows) if output_major else (q.rows, q.transposed)
    return Weights(io, oi, q.scale)


def quantized_gradient(dy_NO: Float[Array, "N O"]) -> tuple[Scaled, Float[Array, ""]]:
    """Return both copies of a gradient in e5m2, and their scale."""
    # All rows, since the rows of ignored targets may be zero. Reading all columns would take a
    # third of the time of the conversion.
    how = {"headroom": GRADIENT_HEADROOM, "factor": ACTIVATION_SCALE, "sampled": True}
    dy = quantize_by_largest(dy_NO, E5M2, **how)
    count("output_gradient", dy.rows)
    return dy, dy.scale.value


def kind_of(x: Array | Fp8Rows) -> Fp8Rows | None:
    """Return `Fp8Rows` without arrays if x is `Fp8Rows`, else None, for `cotangent`."""
    return Fp8Rows(None, None, None) if isinstance(x, Fp8Rows) else None


def cotangent(dx: Array, kind: Fp8Rows | None) -> Array | Fp8Rows:
    """Return the cotangent of x: dx, or `Fp8Rows` with dx as the cotangent of y."""
    return dx if kind is None else kind._replace(y=dx)


def flat(x: Array | Fp8Rows) -> Array | Fp8Rows:
    """Return x with one axis of rows."""
    y = rows_of(x)
    y_NI = y.reshape(math.prod(y.shape[:-1]), y.shape[-1])
    return x._replace(y=y_NI) if isinstance(x, Fp8Rows) else y_NI


class Saved(NamedTuple):
    """Arrays that the forward pass saves for `linear_backward`."""

    x_IN: Float[Array, "I N"]
    w_IO: Float[Array, "I O"]
    w_scale: Scale


def activations(x: Array | Fp8Rows) -> Quantized | Fp8Rows:
    """Return two copies of x · `ACTIVATION_SCALE` in e4m3: the rows, and the transposed copy."""
    q = x if isinstance(x, Fp8Rows) else quantize(x, ACTIVATION_SCALE, E4M3, transposed=True)
    count("input", q.rows)
    return q


def linear_forward(x_NI, w_IO, b_O=None) -> tuple[Float[Array, "N O"], Saved]:
    """Return x w + b in x's dtype, and the `Saved` arrays for the backward pass."""
    x, dtype = activations(x_NI), rows_of(x_NI).dtype
    w8 = quantized_weights(w_IO)
    saved = Saved(x.transposed, w8.io, w8.scale)
    if BIAS_IN_KERNEL and b_O is not None and _kernel_runs(x.rows, w8.oi):
        from pallas_kernels.fp8 import mosaic

        def kernel(x_NI, w_OI, scale, b_O):
            return mosaic.matmul(x_NI, w_OI, scale, dtype, b_O)

        return _calls.looped("linear", kernel)(x.rows, w8.oi, w8.scale.over_factor, b_O), saved
    y_NO = matmul(x.rows, w8.oi, w8.scale.over_factor, dtype)
    if b_O is not None:  # XLA adds b in cuBLASLt's epilogue
        y_NO = y_NO + b_O.astype(y_NO.dtype)[None]
    return y_NO, saved


def _kernel_runs(a_MK, b_NK) -> bool:
    """Return whether the Mosaic kernel can compute a bᵀ."""
    (m, k), n = a_MK.shape, b_NK.shape[0]
    return not _dispatch.partitioned(a_MK, b_NK) and _why_not_mosaic(Facts(m, k, n)) is None


def linear_backward(saved: Saved, dy_NO) -> tuple[Float[Array, "N I"], Float[Array, "I O"]]:
    """Return dx in dy's dtype, and dw in fp32."""
    dy, _ = quantized_gradient(dy_NO)
    return linear_gradients(saved, dy, dy_NO.dtype)


def linear_gradients(saved: Saved, dy: Scaled, dtype):
    """Return dx in `dtype`, and dw in fp32.

    Args:
        dy: both copies of the gradient in e5m2; the factor of its `Scale` is `ACTIVATION_SCALE`.
    """
    dx_NI = matmul(dy.rows, saved.w_IO, dy.scale.inverse * saved.w_scale.inverse, dtype)
    return dx_NI, weight_gradient(saved.x_IN, dy.transposed, dy.scale.over_factor)


def weight_gradient(x_IN, dy_ON, scale, output_major: bool = False):
    """Return scale · x dyᵀ in fp32, or its transpose."""
    pair = (dy_ON, x_IN) if output_major else (x_IN, dy_ON)
    return matmul(*pair, scale, jnp.float32)


def over(scale: Scale, factor: float):
    """Return 1 / (factor · scale), without a launch for the factors in use."""
    if factor == ACTIVATION_SCALE:
        return scale.over_factor
    return scale.inverse if factor == 1.0 else scale.inverse / factor


def matmul(a, b, scale, dtype):
    fast = a.shape[1] <= FAST
    in_kernel = LONG_SUMS_IN_KERNEL and not fast and _kernel_runs(a, b)
    how = {"fast_accumulation": fast, "implementation": "mosaic" if in_kernel else "xla"}
    return scaled_matmul(a, b, scale, out_dtype=dtype, **how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def linear(x_NI, w_IO, b_O, precision: jax.lax.PrecisionLike):
    """Return x w + b in x's dtype; b may be None. `precision` is that of fp32 matmuls in a call
    that is not differentiated."""
    return plain_linear(rows_of(x_NI), w_IO, b_O, precision=precision)


def _linear_forward(x_NI, w_IO, b_O, precision):
    del precision
    y_NO, saved = linear_forward(x_NI, w_IO, b_O)
    return y_NO, (saved, jnp.zeros((), w_IO.dtype), b_O, kind_of(x_NI))


def _linear_backward(precision, residuals, dy_NO):
    del precision
    saved, like, b_O, kind = residuals
    dx_NI, dw_IO = linear_backward(saved, dy_NO)
    db_O = None if b_O is None else sum_rows(dy_NO).astype(b_O.dtype)
    return cotangent(dx_NI, kind), dw_IO.astype(like.dtype), db_O


linear.defvjp(_linear_forward, _linear_backward)


# ---------------------------------------------------------------------------------------------- MLP


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call of `mlp`."""

    activation: str
    """A name in `ACTIVATIONS`."""
    backend: str
    output_major: bool
    implementation: str = "auto"
    """Of a call that is not differentiated, as `precision`."""
    precision: jax.lax.PrecisionLike = None


def activated_mlp(
    x: Float[Array, "*B I"] | Fp8Rows,
    w: Float[Array, "_ _"],
    b: Float[Array, " O"] | None,
    w2: Float[Array, "O C"],
    *,
    activation: str = "gelu",
    output_major: bool = False,
    implementation: str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B C"]:
    """Return a(x w + b) w2 in x's dtype.

    Args:
        b: None only with relu_squared.
        activation: "gelu" or "relu_squared".
        output_major: whether w is (O, I). w2 is (O, C).
        implementation: "auto", or a back end: "mosaic", "triton", "xla".
        precision: precision of fp32 matmuls in a call that is not differentiated.

    Raises:
        ValueError: the named back end cannot run this call.
    """
    x_NI = flat(x)
    rows, (outputs, inputs) = rows_of(x_NI).shape[0], w.shape if output_major else w.shape[::-1]
    facts = {"rows": rows, "inputs": inputs, "outputs": outputs}
    arrays = (rows_of(x), w, b, w2)
    backend = _dispatch.select(f"fp8_linear_{activation}", implementation, arrays=arrays, **facts)
    # The Mosaic kernel of a call without FP8 does not support fp32. "auto" tries it first.
    plain = "auto" if implementation == "mosaic" else implementation
    options = Options(activation, backend, output_major, plain, precision)
    y_NC = _calls.differentiable("mlp", counted("mlp", mlp), x_NI, w, b, w2, options)
    return y_NC.reshape(*rows_of(x).shape[:-1], w2.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def mlp(x_NI, w, b_O, w2_OC, options: Options):
    """Return a(x w + b) w2 in x's dtype."""
    x_NI, w_IO = rows_of(x_NI), w.T if options.output_major else w
    precision = {"precision": options.precision}
    how = {"implementation": options.implementation} | precision
    if options.activation == "gelu":
        return plain_mlp(x_NI, w_IO, b_O, w2_OC, **how)
    return plain_linear(linear_relu_squared(x_NI, w_IO, b_O, **how), w2_OC, **precision)


def _mlp_forward(x_NI, w, b_O, w2_OC, options):
    x, dtype = activations(x_NI), rows_of(x_NI).dtype
    w8, w2 = quantized_weights(w, options.output_major), quantized_weights(w2_OC)
    y, y_ON, saved_NO = _activated(options, x.rows, w8.oi, b_O, w8.scale.over_factor, dtype)
    count("hidden", y)
    y_NC = matmul(y, w2.oi, over(w2.scale, ACTIVATIONS[options.activation].scale), dtype)
    like = jax.tree.map(lambda a: jnp.zeros((), a.dtype), (w, b_O, w2_OC))
    saved = x.transposed, w8.io, w8.scale, y_ON, w2.io, w2.scale, saved_NO, like
    return y_NC, (saved, kind_of(x_NI))


def _mlp_backward(options, residuals, dy_NC):
    saved, kind = residuals
    x_IN, w_IO, w_scale, y_ON, w2_OC, w2_scale, saved_NO, like = saved
    dy, _ = quantized_gradient(dy_NC)
    factors, has_bias = (dy.scale.inverse, w2_scale.inverse), like[1] is not None
    du_NO, du_ON, db_O = _activated_backward(
        options, dy.rows, w2_OC, saved_NO, factors, dy.scale.value, dy_NC.dtype, has_bias
    )
    count("hidden_gradient", du_NO)
    dx_NI = matmul(du_NO, w_IO, dy.scale.inverse * w_scale.inverse, dy_NC.dtype)
    dw = weight_gradient(x_IN, du_ON, dy.scale.over_factor, options.output_major)
    y_scale = ACTIVATIONS[options.activation].scale
    dw2_OC = weight_gradient(y_ON, dy.transposed, over(dy.scale, y_scale))
    grads = (dw, db_O, dw2_OC)
    return cotangent(dx_NI, kind), *jax.tree.map(lambda g, like: g.astype(like.dtype), grads, like)


mlp.defvjp(_mlp_forward, _mlp_backward)


def _activated(options, x_NI, w_OI, b_O, scale, dtype):
    """Return y = a(u) in e4m3, rows and transposed, and the array for `_activated_backward`, with
    u = scale · x wᵀ + b."""
    activation = ACTIVATIONS[options.activation]
    if options.backend == "mosaic":
        from pallas_kernels.fp8 import mosaic

        kernel = functools.partial(mosaic.linear_activated, activation=activation)
        kernel = _calls.looped(f"fp8_linear_{activation.name}", kernel)
        y_NO, y_ON, derivative_NO = kernel(x_NI, w_OI, b_O, scale)
        return y_NO, y_ON, y_NO if derivative_NO is None else derivative_NO
    u_NO, b_O = matmul(x_NI, w_OI, scale, dtype), None if b_O is None else b_O.astype(jnp.float32)
    if options.backend == "triton":
        from pallas_kernels.fp8 import triton_activation

        kernel = functools.partial(triton_activation.activated, activation=activation)
        y_NO, y_ON, derivative_NO = _calls.looped("mlp", kernel)(u_NO, b_O)
        return y_NO, y_ON, y_NO if derivative_NO is None else derivative_NO
    u_NO = u_NO.astype(jnp.float32)
    y_NO, derivative_NO = activation(u_NO if b_O is None else u_NO + b_O[None])
    y = quantize(y_NO.astype(dtype), activation.scale, E4M3, transposed=True)
    if activation.derivative_dtype is None:
        return y.rows, y.transposed, y.rows
    stored_NO = (derivative_NO * activation.stored_scale).astype(activation.derivative_dtype)
    return y.rows, y.transposed, stored_NO


def _activated_backward(options, dy_NC, w2_OC, saved_NO, factors, du_scale, dtype, has_bias):
    """Return du in e5m2, rows and transposed, and db in fp32 or None.

    Args:
        factors: the product is the scale of the matmul.
    """
    activation = ACTIVATIONS[options.activation]
    if options.backend == "mosaic":
        from pallas_kernels.fp8 import mosaic

        kernel = functools.partial(mosaic.activated_backward, activation=activation, bias=has_bias)
        kernel = _calls.looped(f"fp8_linear_{activation.name}", kernel)
        return kernel(dy_NC, w2_OC, saved_NO, factors, du_scale)
    dh_NO = matmul(dy_NC, w2_OC, math.prod(factors), dtype)
    if options.backend == "triton":
        from pallas_kernels.fp8 import triton_activation

        kernel = triton_activation.activated_backward
        kernel = functools.partial(kernel, activation=activation, bias=has_bias)
        return _calls.looped("mlp", kernel)(dh_NO, saved_NO, du_scale)
    derivative_NO = activation.derivative(saved_NO.astype(jnp.float32))
    derivative_NO = derivative_NO / activation.derivative_scale
    du_NO = (dh_NO.astype(jnp.float32) * derivative_NO).astype(dtype)
    du = quantize(du_NO, du_scale, E5M2, transposed=True)
    return du.rows, du.transposed, sum_rows(du_NO) if has_bias else None
