"""silu_mul, the activation of SwiGLU: y = silu(gate) · up (Shazeer, 2020), elementwise.

    s = 1 / (1 + exp(−gate))
    y = gate · s · up
    dgate = dy · up · s · (1 + gate · (1 − s))
    dup = dy · gate · s

Shapes: gate, up and y have the same shape, of any rank. Arithmetic is fp32 in every dtype. The
forward pass saves gate and up; the backward pass computes s again.

Back ends:
    triton: one kernel for each pass, which loads each input and stores each output once. NVIDIA
        GPUs from Ampere on.
    xla: plain JAX; any device.
    reference: the definition, in fp32, its gradients by JAX: forward mode and higher derivatives
        work. Any device.
triton is differentiable once, in reverse mode. The gradient of xla is differentiable in both
modes.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.extend import (
    DTYPES,
    REFERENCE,
    TRITON,
    XLA,
    Rule,
    batched,
    differentiable,
    register,
    select,
)

Implementation = Literal["auto", "triton", "xla", "reference"]

TRITON_SHARDED = dataclasses.replace(TRITON, rule=True)
register("silu_mul", back_ends=[TRITON_SHARDED, XLA, REFERENCE])


def silu_mul(
    gate: Float[Array, "*S"],
    up: Float[Array, "*S"],
    *,
    implementation: Implementation | str = "auto",
) -> Float[Array, "*S"]:
    """Return silu(gate) · up, in the dtype of gate and up.

    Args:
        gate, up: of the same shape and dtype: fp32, bf16 or fp16.
        implementation: "auto", or a back end: "triton", "xla", "reference". Forward mode needs
            "reference"; second derivatives need "reference" or "xla".

    Raises:
        ValueError: wrong shapes or dtypes, or the named back end cannot run here.
    """
    if gate.dtype not in DTYPES:
        raise ValueError(f"silu_mul: expected float32, bfloat16 or float16, got {gate.dtype}")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"silu_mul: expected gate and up of the same shape and dtype, got {gate.shape} "
            f"{gate.dtype} and {up.shape} {up.dtype}"
        )
    backend = select("silu_mul", implementation, arrays=(gate, up))
    if backend == "reference":
        return reference(gate, up).astype(gate.dtype)
    return differentiable("silu_mul", _silu_mul, backend, gate, up)


def reference(gate, up):
    """The definition, in fp32 for every dtype of gate and up."""
    return jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)


def _run(backend, gate, up):
    if backend == "triton":
        return _in_triton("forward", gate, up)[0]
    return reference(gate, up).astype(gate.dtype)


_silu_mul = jax.custom_vjp(_run, nondiff_argnums=(0,))


def _forward(backend, gate, up):
    return _run(backend, gate, up), (gate, up)


def _backward(backend, saved, dy):
    if backend == "triton":
        return _in_triton("backward", *saved, dy)
    gate, up, dy32 = (x.astype(jnp.float32) for x in (*saved, dy))
    s = jax.nn.sigmoid(gate)
    dgate, dup = dy32 * up * s * (1 + gate * (1 - s)), dy32 * gate * s
    return dgate.astype(dy.dtype), dup.astype(dy.dtype)


_silu_mul.defvjp(_forward, _backward)


def _in_triton(name, *arrays):
    """Run `forward` or `backward` of triton.py on flat arrays. Each device runs its shard."""
    from . import triton  # needs Triton, which a machine without a GPU may lack

    axes = {"forward": "n*, n* -> n*", "backward": "n*, n*, n* -> n*, n*"}
    launch = batched("silu_mul", getattr(triton, name), rule=Rule(axes[name], over="n*"))
    return launch(*arrays)
