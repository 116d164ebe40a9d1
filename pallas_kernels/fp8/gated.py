"""SwiGLU with FP8 matmuls in differentiated calls. pallas_kernels/gated_mlp has the equations, and
pallas_kernels/fp8/layers.py the scales.

    [g | u] = x [w_gate | w_up]      h = silu(g) · u      y = h w_down

Operands: x, h and the weights in e4m3, dy and [dg | du] in e5m2. The scale of h is `HIDDEN_SCALE`,
that of [dg | du] is the scale of dy. [w_gate | w_up] have one scale.

The forward pass saves x in FP8 and [g | u] in x's dtype. The backward pass recomputes h.

Back ends: triton and xla, as `pallas_kernels.swiglu`.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _calls, _dispatch
from pallas_kernels.fp8 import E4M3, E5M2, Fp8Rows, quantize, rows_of
from pallas_kernels.fp8.clipping import count, counted
from pallas_kernels.fp8.layers import (
    activations,
    cotangent,
    flat,
    kind_of,
    matmul,
    over,
    quantized_gradient,
    quantized_weights,
    weight_gradient,
)
from pallas_kernels.gated_mlp import activated, activated_backward
from pallas_kernels.gated_mlp import swiglu as plain_swiglu
from pallas_kernels.matmul import joined, split_like

HIDDEN_SCALE = 1.0
"""h is a product, with a wider range than x: e4m3 represents 1/64 … 448 with a relative error of
1/16."""


def swiglu(
    x: Float[Array, "*B I"] | Fp8Rows,
    w_gate: Float[Array, "I F"],
    w_up: Float[Array, "I F"],
    w_down: Float[Array, "F C"],
    *,
    implementation: str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B C"]:
    """Return (silu(x w_gate) · (x w_up)) w_down in x's dtype.

    Args:
        implementation: "auto", "triton" or "xla".
        precision: precision of fp32 matmuls in a call that is not differentiated.

    Raises:
        ValueError: the named back end cannot run here.
    """
    arrays = (rows_of(x), w_gate, w_up, w_down)
    backend = _dispatch.select("swiglu", implementation, arrays=arrays, fp8=True)
    args = flat(x), (w_gate, w_up), w_down, backend, precision
    y_NC = _calls.differentiable("swiglu", counted("swiglu", _swiglu), *args)
    return y_NC.reshape(*rows_of(x).shape[:-1], w_down.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _swiglu(x_NI, w_gate_up, w_down_FC, backend, precision):
    how = {"implementation": backend, "precision": precision}
    return plain_swiglu(rows_of(x_NI), *w_gate_up, w_down_FC, **how)


def _forward(x_NI, w_gate_up, w_down_FC, backend, precision):
    del precision
    x, dtype = activations(x_NI), rows_of(x_NI).dtype
    w8 = quantized_weights(joined(w_gate_up, jnp.result_type(*w_gate_up)))
    w_down = quantized_weights(w_down_FC)
    gu_N2F = matmul(x.rows, w8.oi, w8.scale.over_factor, dtype)
    h_NF = _hidden(gu_N2F, backend)
    count("hidden", h_NF)
    y_NC = matmul(h_NF, w_down.oi, over(w_down.scale, HIDDEN_SCALE), dtype)
    like = jax.tree.map(lambda a: jnp.zeros((0, a.shape[1]), a.dtype), (w_gate_up, w_down_FC))
    saved = x.transposed, w8.io, w8.scale, gu_N2F, w_down.io, w_down.scale, like
    return y_NC, (saved, kind_of(x_NI))


def _backward(backend, precision, residuals, dy_NC):
    del precision
    saved, kind = residuals
    x_IN, w_I2F, w_scale, gu_N2F, w_down_FC, w_down_scale, (like, like_down) = saved
    dy, dtype = quantized_gradient(dy_NC)[0], dy_NC.dtype
    dh_NF = matmul(dy.rows, w_down_FC, dy.scale.inverse * w_down_scale.inverse, dtype)
    dgu_N2F, dgu_2FN, h_FN = _hidden_backward(gu_N2F, dh_NF, dy.scale.value, backend)
    count("hidden_gradient", dgu_N2F)
    dx_NI = matmul(dgu_N2F, w_I2F, dy.scale.inverse * w_scale.inverse, dtype)
    dw_I2F = weight_gradient(x_IN, dgu_2FN, dy.scale.over_factor)
    dw_down_FC = weight_gradient(h_FN, dy.transposed, over(dy.scale, HIDDEN_SCALE))
    dw = split_like(dw_I2F, like), dw_down_FC.astype(like_down.dtype)
    return cotangent(dx_NI, kind), *dw


_swiglu.defvjp(_forward, _backward)


def _hidden(gu_N2F, backend: str):
    """Return h in e4m3."""
    if backend == "triton":
        from pallas_kernels.gated_mlp import triton_fp8

        kernel = functools.partial(triton_fp8.activated, scale=HIDDEN_SCALE)
        return _calls.looped("swiglu", kernel)(gu_N2F)
    return quantize(activated(gu_N2F, backend), HIDDEN_SCALE, E4M3).rows


def _hidden_backward(gu_N2F, dh_NF, scale, backend: str):
    """Return [dg | du] in e5m2, rows and transposed, and hᵀ in e4m3."""
    if backend == "triton":
        from pallas_kernels.gated_mlp import triton_fp8

        kernel = functools.partial(triton_fp8.activated_backward, h_scale=HIDDEN_SCALE)
        return _calls.looped("swiglu", kernel)(gu_N2F, dh_NF, scale)
    dgu_N2F, h_NF = activated_backward(gu_N2F, dh_NF, backend)
    dgu = quantize(dgu_N2F, scale, E5M2, transposed=True)
    h = quantize(h_NF, HIDDEN_SCALE, E4M3, rows=False, transposed=True)
    return dgu.rows, dgu.transposed, h.transposed
