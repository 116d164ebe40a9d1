"""SwiGLU, the MLP with a gated activation (Shazeer, "GLU Variants Improve Transformer", 2020).

    g = x w_gate      u = x w_up      σ = 1 / (1 + exp(−g))
    h = silu(g) · u = g · σ · u
    y = h w_down

    dh = dy w_downᵀ
    dg = dh · u · σ · (1 + g · (1 − σ))
    du = dh · g · σ
    dx = [dg | du] [w_gate | w_up]ᵀ
    dw_gate, dw_up = xᵀ [dg | du]
    dw_down = hᵀ dy

Shapes: N rows (all leading axes of x), I inputs, F hidden channels, C outputs. [a | b] is one array
of 2·F columns: the two projections are one matmul, in both passes.

The forward pass saves x and [g | u] in x's dtype. The backward pass recomputes h in the pass that
reads g and u. Arithmetic between matmuls is fp32 in every dtype; g, u, h, dg, du and y are rounded
once.

Back ends, which differ in the operations between the matmuls. XLA computes the matmuls:
    triton: one kernel for h, and one for dg, du and h. NVIDIA GPUs from Ampere on.
    xla: plain JAX; any device.
    reference: the definition in fp32 with true fp32 matmuls, its gradients by JAX: forward mode and
        higher derivatives work. Any device.
triton and xla are differentiable once, in reverse mode.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import TRITON, XLA, BackEnd
from pallas_kernels.fp8.conversion import Fp8Rows, rows_of
from pallas_kernels.matmul import (
    Facts,
    joined,
    split_like,
    weight_gradient,
    why_not_fp8,
    xla_matmul,
)

Implementation = Literal["auto", "triton", "xla", "reference"]

_dispatch.register(
    "swiglu", back_ends=[TRITON, XLA, BackEnd("reference", why_not_fp8)], facts=Facts
)


def swiglu(
    x: Float[Array, "*B I"] | Fp8Rows,
    w_gate: Float[Array, "I F"],
    w_up: Float[Array, "I F"],
    w_down: Float[Array, "F C"],
    *,
    fp8: bool = False,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B C"]:
    """Compute (silu(x w_gate) · (x w_up)) w_down in x's dtype.

    Args:
        x: fp32, bf16 or fp16.
        w_gate, w_up, w_down: of x's dtype, or fp32, which is rounded to x's dtype. The gradients
            have the dtypes of the weights and are summed in fp32.
        fp8: whether the matmuls are in FP8 where the call is differentiated
            (pallas_kernels/fp8/gated.py); not with "reference". x may then be the `Fp8Rows` of
            `rms_norm(fp8_scale=ACTIVATION_SCALE)`.
        implementation: "auto", or a back end: "triton", "xla", "reference". Forward mode and second
            derivatives need "reference".
        precision: precision of fp32 matmuls (JAX's default for fp32 on a GPU is TF32).

    Raises:
        ValueError: wrong shapes or dtypes, or the named back end cannot run here.
    """
    given, x = x, rows_of(x)
    _check(x, w_gate, w_up, w_down)
    if fp8:
        from pallas_kernels.fp8 import gated

        how = {"implementation": implementation, "precision": precision}
        return gated.swiglu(given, w_gate, w_up, w_down, **how)
    backend = _dispatch.select("swiglu", implementation, arrays=(x, w_gate, w_up, w_down))
    x_NI = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if backend == "reference":
        y_NC = reference(x_NI, w_gate, w_up, w_down).astype(x.dtype)
    else:
        y_NC = _calls.differentiable(
            "swiglu", _swiglu, x_NI, (w_gate, w_up), w_down, backend, precision
        )
    return y_NC.reshape(*x.shape[:-1], w_down.shape[1])


def reference(x, w_gate, w_up, w_down):
    """Compute the definition in fp32 with true fp32 matmuls for every input dtype. Return fp32."""
    x, w_gate, w_up, w_down = (a.astype(jnp.float32) for a in (x, w_gate, w_up, w_down))
    matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    return matmul(jax.nn.silu(matmul(x, w_gate)) * matmul(x, w_up), w_down)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _swiglu(x_NI, w_gate_up, w_down_FC, backend, precision):
    return _forward(x_NI, w_gate_up, w_down_FC, backend, precision)[0]


def _forward(x_NI, w_gate_up, w_down_FC, backend, precision):
    how = {"precision": precision, "dtype": x_NI.dtype}
    gu_N2F = xla_matmul(x_NI, joined(w_gate_up, x_NI.dtype), **how)
    y_NC = xla_matmul(activated(gu_N2F, backend), w_down_FC.astype(x_NI.dtype), **how)
    return y_NC, (x_NI, w_gate_up, w_down_FC, gu_N2F)


def _backward(backend, precision, saved, dy_NC):
    x_NI, w_gate_up, w_down_FC, gu_N2F = saved
    matmul = functools.partial(jnp.matmul, precision=precision)
    dh_NF = matmul(dy_NC, w_down_FC.astype(dy_NC.dtype).T)
    dgu_N2F, h_NF = activated_backward(gu_N2F, dh_NF, backend)
    dx_NI = matmul(dgu_N2F, joined(w_gate_up, dy_NC.dtype).T)
    dw_I2F, dw_down_FC = (
        weight_gradient(*pair, precision=precision) for pair in ((x_NI, dgu_N2F), (h_NF, dy_NC))
    )
    return dx_NI, split_like(dw_I2F, w_gate_up), dw_down_FC.astype(w_down_FC.dtype)


_swiglu.defvjp(_forward, _backward)


def activated(gu_N2F, backend: str):
    """Return h = silu(g) · u in the dtype of [g | u]."""
    if backend == "triton":
        from pallas_kernels.gated_mlp import triton

        return _calls.looped("swiglu", triton.activated)(gu_N2F)
    g, u = jnp.split(gu_N2F.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(g) * u).astype(gu_N2F.dtype)


def activated_backward(gu_N2F, dh_NF, backend: str):
    """Return ([dg | du], h)."""
    if backend == "triton":
        from pallas_kernels.gated_mlp import triton

        return _calls.looped("swiglu", triton.activated_backward)(gu_N2F, dh_NF)
    g, u = jnp.split(gu_N2F.astype(jnp.float32), 2, axis=-1)
    dh, sigma = dh_NF.astype(jnp.float32), jax.nn.sigmoid(g)
    silu = g * sigma
    dgu_N2F = jnp.concatenate([dh * u * (sigma + silu * (1 - sigma)), dh * silu], axis=-1)
    return dgu_N2F.astype(gu_N2F.dtype), (silu * u).astype(gu_N2F.dtype)


def _check(x, w_gate, w_up, w_down):
    arrays = (x, w_gate, w_up, w_down)
    shapes = ", ".join(str(a.shape) for a in arrays)
    if not (
        x.ndim >= 1
        and w_gate.ndim == w_down.ndim == 2
        and w_gate.shape == w_up.shape == (x.shape[-1], w_down.shape[0])
    ):
        raise ValueError(
            "swiglu: expected x (..., I), w_gate (I, F), w_up (I, F) and w_down (F, C), got "
            f"{shapes}"
        )
    if x.dtype not in _dispatch.DTYPES or any(
        a.dtype not in (x.dtype, jnp.float32) for a in arrays
    ):
        raise ValueError(
            "swiglu: expected x in float32, bfloat16 or float16, w_gate, w_up and w_down in x's "
            f"dtype or float32, got {', '.join(str(a.dtype) for a in arrays)}"
        )


# ----------------------------------------------------------------------------------------- examples


@_dispatch.example("swiglu")
def _example(rows, dtype):
    """The MLP of a Llama of GPT-2's width."""
    sizes = ((rows, 768), (768, 2048), (768, 2048), (2048, 768))

    def scaled(f):
        return lambda x, w_gate, w_up, w_down, **how: f(
            x, w_gate * 768**-0.5, w_up * 768**-0.5, w_down * 2048**-0.5, **how
        )

    arrays = tuple(jax.ShapeDtypeStruct(size, dtype) for size in sizes)
    return _dispatch.Example(scaled(swiglu), scaled(reference), arrays)
