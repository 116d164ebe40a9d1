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
once. In FP8 (pallas_kernels/gemm/numerics.py), x, h and [dg | du] are stored in FP8 for the
matmuls; [w_gate | w_up] have one scale.

Back ends (xla and reference as in pallas_kernels/__init__.py). XLA computes the matmuls that no
back end names:
    mosaic: the matmul for g and u computes h, and the matmul for dh computes dg, du and h. 16-bit
        and FP8 matmuls, for sizes that its tiles divide: on sharded arrays, rows of each device.
    triton: one kernel for h, and one for dg, du and h.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import BackEnd
from pallas_kernels._partition import Rule, automatic
from pallas_kernels._types import Array, Float
from pallas_kernels.gemm.numerics import (
    Fp8,
    Interleaved,
    MlpFacts,
    Numerics,
    divides_shards,
    joined,
    like,
    numerics_of,
    split_like,
)
from pallas_kernels.gemm.operands import Operand, check_dtypes, exact, separate

Implementation = Literal["auto", "mosaic", "triton", "xla", "reference"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts(MlpFacts):
    """Properties of a call on which the choice of a back end depends."""

    inputs: int
    hidden: int
    outputs: int


def _why_not_mosaic(call: Facts) -> str | None:
    if (why := _dispatch.why_not_mosaic() or call.why_not_kernels()) is not None:
        return why
    if (why := _dispatch.why_not_16_bit(call.dtype)) is not None:
        return why
    from pallas_kernels.gated_mlp import mosaic

    itemsize = jnp.dtype(call.numerics.hidden_format("silu", call.dtype).dtype).itemsize
    return mosaic.why_not(call.rows, call.inputs, call.hidden, call.outputs, itemsize)


def _why_not_triton(call: Facts) -> str | None:
    return _dispatch.why_not_triton() or call.why_not_kernels()


_ON_SHARDS = functools.partial(divides_shards, _why_not_mosaic)
_dispatch.register(
    "swiglu",
    back_ends=[
        BackEnd("mosaic", _why_not_mosaic, custom=True, rule=_ON_SHARDS),
        BackEnd("triton", _why_not_triton, custom=True, rule=True),
        BackEnd("xla", Facts.why_not),
        BackEnd("reference", Facts.why_not_reference),
    ],
    facts=Facts,
)


def swiglu(
    x: Float[Array, "*B I"] | Operand,
    w_gate: Float[Array, "I F"],
    w_up: Float[Array, "I F"],
    w_down: Float[Array, "F C"],
    *,
    numerics: str | Numerics | None = None,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B C"]:
    """Compute (silu(x w_gate) · (x w_up)) w_down in x's dtype.

    Args:
        x: fp32, bf16 or fp16; or the `Operand` of a norm with the same numerics.
        w_gate, w_up, w_down: of x's dtype, or fp32, which is rounded to x's dtype. The gradients
            have the dtypes of the weights and are summed in fp32.
        numerics: "fp32", "tf32", "bf16", "fp8", or a `pallas_kernels.gemm.Numerics`. None: follows
            the dtypes and `precision`. "fp8": FP8 matmuls where the call is differentiated.
        implementation: "auto", or a back end: "mosaic", "triton", "xla", "reference". Forward
            mode needs "reference"; second derivatives need "reference" or "xla".
        precision: precision of fp32 matmuls (JAX's default for fp32 on a GPU is TF32).

    Raises:
        ValueError: wrong shapes, dtypes or numerics, or the named back end cannot run here.
    """
    given, x = x, exact(x)
    _check(x, w_gate, w_up, w_down)
    how = numerics_of("swiglu", numerics, precision, Fp8())
    arrays = (x, w_gate, w_up, w_down)
    backend = _dispatch.select(
        "swiglu",
        implementation,
        arrays=arrays,
        dtype=x.dtype,
        rows=math.prod(x.shape[:-1]),
        inputs=x.shape[-1],
        hidden=w_down.shape[0],
        outputs=w_down.shape[1],
        numerics=how,
    )
    if backend == "reference":
        return reference(x, w_gate, w_up, w_down).astype(x.dtype)

    def call(given, w_gate_up, w_down):
        args = *separate(given, how.flat(x)), w_gate_up, w_down, backend, how
        return how.call("swiglu", _swiglu, *args).reshape(*x.shape[:-1], w_down.shape[1])

    pair = Interleaved if backend == "mosaic" else lambda *w: w
    return automatic(call, x, w_down)(given, pair(w_gate, w_up), w_down)


def reference(x, w_gate, w_up, w_down):
    """Compute the definition in fp32 with true fp32 matmuls for every input dtype. Return fp32."""
    x, w_gate, w_up, w_down = (a.astype(jnp.float32) for a in (x, w_gate, w_up, w_down))
    matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    return matmul(jax.nn.silu(matmul(x, w_gate)) * matmul(x, w_up), w_down)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _swiglu(x_NI, converted: Operand | None, w_gate_up, w_down_FC, backend, numerics):
    how = backend, numerics.plain
    return _forward(x_NI, None, w_gate_up, w_down_FC, *how, save=False)[0]


def _forward(x_NI, converted, w_gate_up, w_down_FC, backend, numerics, save=True):
    dtype = x_NI.dtype
    x, w = numerics.input(x_NI, converted), numerics.weight(w_gate_up)
    w_down = numerics.weight(w_down_FC)
    if backend == "mosaic":
        h, gu_N2F = _calls.saved("swiglu", _gated(x, w, dtype, numerics, save))
    else:
        gu_N2F = _calls.saved("swiglu", numerics.product(x, w, dtype))
        h = hidden(gu_N2F, backend, numerics)
    y_NC = numerics.product(numerics.count("hidden", h), w_down, dtype)
    operands = x.only("k_major"), w.only("rows"), w_down.only("rows")
    return y_NC, (operands, gu_N2F, like((w_gate_up, w_down_FC)))


def _backward(backend, numerics, saved, dy_NC):
    (x, w, w_down), gu_N2F, (w_like, w_down_like) = saved
    dy = numerics.output_gradient(dy_NC)
    if backend == "mosaic":
        dgu, h = _gated_gradient(dy, w_down, gu_N2F, numerics)
    else:
        dh_NF = numerics.input_gradient(dy, w_down, dy_NC.dtype)
        dgu, h = hidden_gradient(gu_N2F, dh_NF, dy, backend, numerics)
    numerics.count("hidden_gradient", dgu)
    dx_NI = numerics.input_gradient(dgu, w, dy_NC.dtype)
    dw = split_like(numerics.weight_gradient(x, dgu), w_like)
    dw_down_FC = numerics.weight_gradient(h, dy).astype(w_down_like.dtype)
    return dx_NI, None, dw, dw_down_FC


_swiglu.defvjp(_forward, _backward)


def _gated(x: Operand, w: Operand, dtype, numerics: Numerics, save: bool):
    """Return the operand of h, and [g | u] or None, from the operands of x and [w_gate | w_up]."""
    from pallas_kernels.gated_mlp import mosaic

    stored = numerics.hidden_format("silu", dtype)
    kernel = functools.partial(mosaic.gated, dtype=dtype, stored=stored, save=save)
    w_2F = w.k_major if stored.k_major else joined(w.rows, dtype)
    factors, w_axes = numerics.factors(x, w), "f2 i" if stored.k_major else "i f2"
    rule = Rule(f"n* i, {w_axes}{', ' * len(factors)} -> n* f, n* f2", over="n*")
    h_NF, gu_N2F = _calls.looped("swiglu", kernel, rule=rule)(x.rows, w_2F, factors)
    return Operand(h_NF, factor=stored.scale), gu_N2F


def _gated_gradient(dy: Operand, w_down: Operand, gu_N2F, numerics: Numerics):
    """Return the operands of [dg | du] and h, as `hidden_gradient`, from the operand of dy."""
    from pallas_kernels.gated_mlp import mosaic

    stored = numerics.hidden_format("silu", gu_N2F.dtype)
    kernel = functools.partial(mosaic.gated_gradient, stored=stored)
    w_FC = w_down.rows if stored.k_major else w_down.rows.astype(dy.rows.dtype)
    scale = None if dy.scale is None else dy.scale.value
    factors = numerics.factors(dy, w_down)
    axes = f"n* c, f c, n* f2, {', ' * len(factors)} -> n* f2, f2 n*, n* f, f n*"
    launch = _calls.looped("swiglu", kernel, rule=Rule(axes, over="n*"))
    *dgu, h_NF, h_FN = launch(dy.rows, w_FC, gu_N2F, factors, scale)
    return Operand(*dgu, dy.scale), Operand(h_NF, h_FN, factor=stored.scale)


def hidden(gu_N2F, backend: str, numerics: Numerics) -> Operand:
    """Return the operand of h = silu(g) · u, without a K-major copy."""
    if backend == "triton":
        from pallas_kernels.gated_mlp import triton

        stored = numerics.hidden_format("silu", gu_N2F.dtype)
        kernel = functools.partial(triton.activated, stored=stored)
        launch = _calls.looped("swiglu", kernel, rule=Rule("n* f2 -> n* f", over="n*"))
        return Operand(launch(gu_N2F), factor=stored.scale)
    g, u = jnp.split(gu_N2F.astype(jnp.float32), 2, axis=-1)
    return numerics.hidden("silu", (jax.nn.silu(g) * u).astype(gu_N2F.dtype), k_major=False)


def hidden_gradient(gu_N2F, dh_NF, dy: Operand, backend: str, numerics: Numerics):
    """Return the operands of [dg | du] and of h, which is recomputed.

    Args:
        dy: operand of the gradient of y, whose scale is that of [dg | du].
    """
    if backend == "triton":
        from pallas_kernels.gated_mlp import triton

        stored = numerics.hidden_format("silu", gu_N2F.dtype)
        kernel = functools.partial(triton.activated_backward, stored=stored)
        scale = None if dy.scale is None else dy.scale.value
        rule = Rule("n* f2, n* f, -> n* f2, f2 n*, n* f, f n*", over="n*")
        *dgu, h_NF, h_FN = _calls.looped("swiglu", kernel, rule=rule)(gu_N2F, dh_NF, scale)
        return Operand(*dgu, dy.scale), Operand(h_NF, h_FN, factor=stored.scale)
    g, u = jnp.split(gu_N2F.astype(jnp.float32), 2, axis=-1)
    dh, sigma = dh_NF.astype(jnp.float32), jax.nn.sigmoid(g)
    silu = g * sigma
    dgu_N2F = jnp.concatenate([dh * u * (sigma + silu * (1 - sigma)), dh * silu], axis=-1)
    dgu_N2F, h_NF = dgu_N2F.astype(gu_N2F.dtype), (silu * u).astype(gu_N2F.dtype)
    dgu = numerics.hidden_gradient("silu", dgu_N2F, dy)
    return dgu, numerics.hidden("silu", h_NF, rows=False)


def _check(x, w_gate, w_up, w_down):
    if not (
        x.ndim >= 1
        and w_gate.ndim == w_down.ndim == 2
        and w_gate.shape == w_up.shape == (x.shape[-1], w_down.shape[0])
    ):
        raise ValueError(
            "swiglu: expected x (..., I), w_gate (I, F), w_up (I, F) and w_down (F, C), got "
            f"{', '.join(str(a.shape) for a in (x, w_gate, w_up, w_down))}"
        )
    check_dtypes("swiglu", x, "w_gate, w_up and w_down", w_gate, w_up, w_down)


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
