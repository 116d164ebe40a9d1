"""A linear layer with its activation, and the MLP of two linear layers.

    u = x w + b
    linear_gelu:          y = gelu(u) = u/2 · (1 + tanh(√(2/π)·(u + 0.044715·u³)))
                                      = u · σ(2√(2/π)·(u + 0.044715·u³))
    linear_relu_squared:  y = relu(u)²
    mlp:                  y w₂ with y = linear_gelu(x, w, b)

    du = dy · y'(u)
    dx = du wᵀ
    dw = xᵀ du
    db = Σ_N du

Shapes: N rows (all leading axes of x), I inputs, O outputs. Sums, bias and activation are fp32, and
y is rounded once.

The forward pass saves the derivative y'(u) in x's dtype. The derivative costs a few operations more
than the activation, and as much memory as u. `triton` in fp32 saves x w instead: x w is in memory
anyway.

Back ends (xla and reference as in pallas_kernels/__init__.py):
    mosaic: bf16 or fp16, sizes that its tiles divide: on sharded arrays, rows of each device.
    triton: any size. bf16 or fp16 in one kernel; in fp32 the matmul is XLA's, and one kernel adds
        bias and activation.

Numerics (pallas_kernels/gemm/numerics.py): in FP8, y and du are stored in both layouts, and the
backward pass reads the derivative of GELU in e4m3, or of relu² the activation.

Backward pass:
    mosaic in `mlp`: one kernel computes dy w₂ᵀ, multiplies it by the derivative, and sums db, where
        its tiles divide the sizes.
    triton, and mosaic in the other cases: one kernel computes du and db. In TF32 it also stores duᵀ
        for the matmul for dw, and in `mlp` yᵀ for dw₂.
XLA computes the other matmuls.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import BackEnd
from pallas_kernels._partition import Rule, automatic
from pallas_kernels._types import Array, Float
from pallas_kernels.feed_forward.activations import ACTIVATIONS
from pallas_kernels.gemm.numerics import (
    Fp8,
    MlpFacts,
    Numerics,
    divides_shards,
    like,
    numerics_of,
)
from pallas_kernels.gemm.operands import Operand, as_row, exact, separate
from pallas_kernels.gemm.sums import sum_rows
from pallas_kernels.linear import check, checked_linear

Implementation = Literal["auto", "mosaic", "triton", "xla", "reference"]


def linear_gelu(
    x: Float[Array, "*B I"],
    w: Float[Array, "I O"],
    b: Float[Array, " O"],
    *,
    numerics: str | Numerics | None = None,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B O"]:
    """Compute gelu(x w + b), tanh form, in x's dtype.

    Args:
        x: fp32, bf16 or fp16.
        w, b: of x's dtype or fp32. A w in fp32 is rounded to x's dtype, b is not rounded. The
            gradients have the dtypes of w and b and are summed in fp32.
        numerics: "fp32", "tf32", "bf16", or None: follows the dtypes and `precision`.
        implementation: "auto", or a back end: "mosaic", "triton", "xla", "reference". Forward mode
            needs "reference"; second derivatives need "reference" or "xla".
        precision: precision of fp32 matmuls (JAX's default for fp32 on a GPU is TF32).

    Raises:
        ValueError: wrong shapes, dtypes or numerics, or the named back end cannot run this call.
    """
    numerics = numerics_of("linear_gelu", numerics, precision)
    return _checked("linear_gelu", x, w, b, None, "gelu", False, numerics, implementation)


def linear_relu_squared(
    x: Float[Array, "*B I"],
    w: Float[Array, "I O"],
    b: Float[Array, " O"] | None = None,
    *,
    numerics: str | Numerics | None = None,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B O"]:
    """Compute relu(x w + b)² in x's dtype, the activation of Primer (So et al., 2021).

    Args:
        implementation: "auto", "mosaic", "triton", "xla" or "reference".

    The other arguments and the errors are as in `linear_gelu`.
    """
    numerics, name = numerics_of("linear_relu_squared", numerics, precision), "relu_squared"
    return _checked("linear_relu_squared", x, w, b, None, name, False, numerics, implementation)


def mlp(
    x: Float[Array, "*B I"] | Operand,
    w: Float[Array, "I O"],
    b: Float[Array, " O"],
    w2: Float[Array, "O C"],
    *,
    numerics: str | Numerics | None = None,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B C"]:
    """Compute linear_gelu(x, w, b) w2, rounded once more to x's dtype.

    Args:
        x: as in `linear_gelu`, or the `Operand` of a norm with the same numerics.
        w2: of x's dtype, or fp32, which is rounded to x's dtype.
        numerics: "fp32", "tf32", "bf16", "fp8", or a `pallas_kernels.gemm.Numerics`. None: follows
            the dtypes and `precision`. "fp8": FP8 matmuls where the call is differentiated.
        implementation: "auto", "mosaic", "triton", "xla" or "reference".

    The other arguments and the errors are as in `linear_gelu`.
    """
    numerics = numerics_of("mlp", numerics, precision, Fp8())
    return _checked("mlp", x, w, b, w2, "gelu", False, numerics, implementation)


def activated_mlp(
    x: Float[Array, "*B I"] | Operand,
    w: Float[Array, "_ _"],
    b: Float[Array, " O"] | None,
    w2: Float[Array, "O C"],
    *,
    activation: str = "gelu",
    output_major: bool = False,
    numerics: str | Numerics | None = None,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B C"]:
    """Compute a(x w + b) w2 in x's dtype.

    Args:
        b: None for no bias.
        activation: "gelu" or "relu_squared".
        output_major: whether w is (O, I).

    The other arguments and the errors are as in `mlp`.
    """
    numerics = numerics_of("mlp", numerics, precision, Fp8())
    return _checked("mlp", x, w, b, w2, activation, output_major, numerics, implementation)


def _checked(operation, x, w, b, w2, activation, output_major, numerics, implementation):
    """Compute a(x w + b) w2 for the operation "mlp", else a(x w + b)."""
    given, x = x, exact(x)
    w_IO = w.T if output_major else w
    outputs = check(operation, x, w_IO, b)
    if operation == "mlp":
        expected = f"mlp: expected w2 (O, C) with O={outputs}, of x's dtype or float32, got"
        if w2 is None:
            raise ValueError(f"{expected} None")
        if w2.ndim != 2 or w2.shape[0] != outputs or w2.dtype not in (x.dtype, jnp.float32):
            raise ValueError(f"{expected} {w2.shape} in {w2.dtype}")
        outputs = w2.shape[1]
    backend = _dispatch.select(
        operation,
        implementation,
        arrays=(x, w_IO, b, w2),
        dtype=x.dtype,
        rows=math.prod(x.shape[:-1]),
        inputs=w_IO.shape[0],
        outputs=w_IO.shape[1],
        numerics=numerics,
    )
    if backend == "reference":
        y = reference(x, w_IO, b, activation=activation).astype(x.dtype)
        return y if w2 is None else checked_linear("mlp", y, w2, None, "reference", numerics)
    options = Options(activation, backend, numerics, output_major, implementation)

    def call(given, w, b, w2):
        args = *separate(given, numerics.flat(x)), w, b, w2, options
        return numerics.call(operation, _mlp, *args).reshape(*x.shape[:-1], outputs)

    return automatic(call, x, w_IO if w2 is None else w2)(given, w, b, w2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts(MlpFacts):
    """Properties of a call on which the choice of a back end depends."""

    inputs: int
    outputs: int


def _why_not_mosaic(call: Facts) -> str | None:
    if (why := _dispatch.why_not_mosaic() or call.why_not_kernels()) is not None:
        return why
    itemsize = jnp.dtype(call.numerics.hidden_format("gelu", call.dtype).dtype).itemsize
    if itemsize > 1 and (why := _dispatch.why_not_16_bit(call.dtype)) is not None:
        return why
    from pallas_kernels.gemm import mosaic

    return mosaic.why_not(call.rows, call.outputs, call.inputs, itemsize)


def _why_not_triton(call: Facts) -> str | None:
    if (why := _dispatch.why_not_triton() or call.why_not_kernels()) is not None:
        return why
    if jnp.dtype(call.dtype) == jnp.float32:
        return None
    return _dispatch.why_not_16_bit(call.dtype, "float32, ")


_ON_SHARDS = functools.partial(divides_shards, _why_not_mosaic)
_dispatch.register(
    "linear_gelu",
    "linear_relu_squared",
    "mlp",
    back_ends=[
        BackEnd("mosaic", _why_not_mosaic, custom=True, rule=_ON_SHARDS, sums=True),
        BackEnd("triton", _why_not_triton, custom=True, rule=True, sums=True),
        BackEnd("xla", Facts.why_not),
        BackEnd("reference", Facts.why_not_reference),
    ],
    facts=Facts,
)


def reference(x, w, b=None, *, activation: str = "gelu"):
    """Compute the definition in fp32 with true fp32 matmuls for every input dtype. Return fp32."""
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    u = jnp.matmul(x, w, precision=jax.lax.Precision.HIGHEST)
    if b is not None:
        u = u + b.astype(jnp.float32).reshape((1,) * (u.ndim - 1) + (-1,))
    return jax.nn.gelu(u, approximate=True) if activation == "gelu" else jnp.square(jax.nn.relu(u))


# --------------------------------------------------------------------------------------------- rule


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call."""

    activation: str
    """A name in `ACTIVATIONS`."""
    backend: str
    """Not "reference"."""
    numerics: Numerics
    output_major: bool = False
    """Whether w is (O, I)."""
    implementation: str = "auto"
    """Back end of a call that is not differentiated, if its numerics differ."""

    @property
    def name(self) -> str:
        """Name of the operation without a second matmul."""
        return f"linear_{self.activation}"

    def stored(self, dtype):
        """Return how kernels store the hidden layer."""
        return self.numerics.hidden_format(self.activation, dtype)

    def in_passes(self, dtype: jax.typing.DTypeLike) -> bool:
        """Whether XLA computes the matmul, and a Triton kernel bias and activation: the Triton
        kernel that includes the matmul stores 16 bits."""
        return self.backend == "triton" and jnp.dtype(self.stored(dtype).dtype).itemsize != 2

    def recomputes(self, dtype: jax.typing.DTypeLike) -> bool:
        """Whether y is not saved: the backward pass recomputes y."""
        return self.backend == "triton" and self.stored(dtype).transposes

    def kernels(self):
        """Return the module of the back end."""
        return importlib.import_module(f"{__name__}.{self.backend}")

    def call(self, kernel: Callable, axes: str, *args: Any, **static: Any) -> Any:
        """Call a function that launches kernels; `axes` are those of a `Rule` over n* and o."""
        launch = functools.partial(kernel, **static)
        return _calls.looped(self.name, launch, rule=Rule(axes, "n* o"))(*args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _mlp(x_NI, converted: Operand | None, w, b_O, w2_OC, options: Options):
    numerics = options.numerics
    if numerics.quantized:
        # The Mosaic kernel without FP8 does not support fp32. "auto" tries it first.
        named = "auto" if options.implementation == "mosaic" else options.implementation
        how = options.activation, options.output_major, numerics.plain, named
        return _checked("mlp", x_NI, w, b_O, w2_OC, *how)
    operands = numerics.activation(x_NI), numerics.weight(w, options.output_major)
    y, _ = hidden(options, *operands, b_O, x_NI.dtype, save=False)
    return y.rows if w2_OC is None else numerics.product(y, numerics.weight(w2_OC), x_NI.dtype)


def _mlp_forward(x_NI, converted, w, b_O, w2_OC, options):
    numerics, dtype = options.numerics, x_NI.dtype
    x = numerics.input(x_NI, converted)
    w2 = None if w2_OC is None else numerics.weight(w2_OC)
    w_operand = numerics.weight(w, options.output_major)
    name = options.name if w2 is None else "mlp"
    y, saved_NO = _calls.saved(name, hidden(options, x, w_operand, b_O, dtype))
    y_NC, second = y.rows, (None, None)
    if w2 is not None:
        numerics.count("hidden", y)
        y_NC = numerics.product(y, w2, dtype)
        second = None if options.recomputes(dtype) else y.only("k_major"), w2.only("rows")
    operands = x.only("k_major"), w_operand.only("rows"), *second
    return y_NC, (operands, saved_NO, like((w, w2_OC)), b_O)


def _mlp_backward(options, saved, dy_NC):
    (x, w, y, w2), saved_NO, (w_like, w2_like), b_O = saved
    numerics, dtype = options.numerics, dy_NC.dtype
    dy = numerics.output_gradient(dy_NC)
    if w2 is None:
        du, db_O, _ = hidden_gradient(options, dy_NC, saved_NO, b_O)
    elif options.backend == "mosaic" and _why_not_du(dy, w2) is None:
        stored = options.stored(dtype)
        w2_OC = w2.rows if stored.k_major else w2.rows.astype(dtype)
        scale = None if dy.scale is None else dy.scale.value
        factors = numerics.factors(dy, w2)
        arrays = dy.rows, w2_OC, saved_NO, factors, scale
        static = {"stored": stored, "bias": b_O is not None}
        axes = f"n* c, o c, n* o, {', ' * len(factors)} -> n* o, o n*, o"
        du_NO, du_ON, db_O = options.call(options.kernels().du, axes, *arrays, **static)
        du, y_again = Operand(du_NO, du_ON, dy.scale), None
    else:
        dh_NO = numerics.input_gradient(dy, w2, dtype)
        du, db_O, y_again = hidden_gradient(options, dh_NO, saved_NO, b_O, dy, y is None)
    numerics.count("hidden_gradient", du)
    dx_NI = numerics.input_gradient(du, w, dtype)
    dw = numerics.weight_gradient(x, du, options.output_major)
    dw2_OC = None if w2 is None else numerics.weight_gradient(y_again if y is None else y, dy)
    db_O = None if b_O is None else db_O.astype(b_O.dtype)
    gradients, weights = (dw, dw2_OC), (w_like, w2_like)
    dw, dw2_OC = jax.tree.map(lambda gradient, w: gradient.astype(w.dtype), gradients, weights)
    return dx_NI, None, dw, db_O, dw2_OC


_mlp.defvjp(_mlp_forward, _mlp_backward)


def _why_not_du(dy: Operand, w2: Operand) -> str | None:
    from pallas_kernels.gemm import mosaic

    *rows, c = dy.rows.shape
    rows = math.prod(rows) // _dispatch.devices_of(dy.rows)
    return mosaic.why_not(rows, w2.rows.shape[0], c, dy.rows.dtype.itemsize)


def hidden(options, x: Operand, w: Operand, b_O, dtype, save: bool = True):
    """Return the operand of y = a(x w + b), and the array that `hidden_gradient` reads: the
    derivative, y, or x w if `options.in_passes`; no such array without `save`."""
    numerics, stored, activation = options.numerics, options.stored(dtype), options.activation
    b_O = None if b_O is None else b_O.astype(jnp.float32)
    if options.backend == "xla" or options.in_passes(dtype):
        u_NO = numerics.product(x, w, dtype if numerics.quantized else jnp.float32)
        if options.backend == "xla":
            return _hidden_in_xla(options, u_NO.astype(jnp.float32), b_O, dtype)
        kernel = options.kernels().activated_pass
        axes, static = "n* o, o -> n* o, o n*, n* o", {"activation": activation, "stored": stored}
        y_NO, y_ON, saved_NO = options.call(kernel, axes, u_NO, b_O, **static)
    else:
        matrix = w.k_major
        if not stored.k_major:
            matrix = (w.k_major.T if w.rows is None else w.rows).astype(dtype)
        factors = numerics.factors(x, w)
        arrays = x.rows, matrix, b_O, factors
        static = {"activation": activation, "stored": stored, "save": save}
        of_matrix = "o i" if stored.k_major else "i o"
        axes = f"n* i, {of_matrix}, o{', ' * len(factors)} -> n* o, o n*, n* o"
        y_NO, y_ON, saved_NO = options.call(options.kernels().activated, axes, *arrays, **static)
    return Operand(y_NO, y_ON, factor=stored.scale), y_NO if saved_NO is None else saved_NO


def _hidden_in_xla(options, u_NO, b_O, dtype):
    stored = options.stored(dtype)
    y_NO, derivative_NO = ACTIVATIONS[options.activation](
        u_NO if b_O is None else u_NO + as_row(b_O, u_NO)
    )
    y = options.numerics.hidden(options.activation, y_NO.astype(dtype))
    if stored is None:
        return y, derivative_NO.astype(dtype)
    if stored.saved_dtype is None:
        return y, y.rows
    return y, (derivative_NO * stored.saved_scale).astype(stored.saved_dtype)


def hidden_gradient(options, dh_NO, saved_NO, b_O, dy: Operand | None = None, again=False):
    """Return du = dh · a'(u) as an operand, db in fp32 or None, and the operand of y or None.

    Args:
        saved_NO: from `hidden`.
        dy: operand of the MLP's gradient, whose scale is that of du.
        again: whether to recompute y.
    """
    numerics, dtype, stored = options.numerics, dh_NO.dtype, options.stored(dh_NO.dtype)
    # `linear_gelu` on Hopper has a matmul in Mosaic, and this pass in Triton.
    if options.backend == "triton" or (
        options.backend == "mosaic" and _dispatch.why_not_triton() is None
    ):
        from pallas_kernels.feed_forward import triton

        scale = None if dy is None else dy.scale
        b_O = None if b_O is None else b_O.astype(jnp.float32)
        arrays = dh_NO, saved_NO, b_O, None if scale is None else scale.value
        static = {"activation": options.activation, "stored": stored, "again": again}
        axes = "n* o, n* o, o, -> n* o, o n*, o, o n*"
        du_NO, du_ON, db_O, y_ON = options.call(triton.gradient, axes, *arrays, **static)
        return Operand(du_NO, du_ON, scale), db_O, Operand(None, y_ON)
    derivative_NO = saved_NO.astype(jnp.float32)
    if stored is not None:
        derivative_NO = stored.derivative(derivative_NO) / stored.derivative_scale
    exact_NO = dh_NO.astype(jnp.float32) * derivative_NO
    du_NO = exact_NO.astype(dtype)
    db_O = None if b_O is None else sum_rows(du_NO if numerics.quantized else exact_NO)
    return numerics.hidden_gradient(options.activation, du_NO, dy), db_O, None


# ----------------------------------------------------------------------------------------- examples


def _scaled(f, **options):
    """Return f of x and of weights that keep the variance of x."""
    return lambda x, w, *more, **how: f(x, w * w.shape[0] ** -0.5, *more, **options, **how)


def _shapes(rows, dtype):
    return tuple(
        jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, 768), (768, 3072), (3072,))
    )


@_dispatch.example("linear_gelu")
def _gelu_example(rows, dtype):
    """The first half of GPT-2's MLP: matmul, bias and activation in one kernel."""
    f = _scaled(linear_gelu), _scaled(reference, activation="gelu")
    return _dispatch.Example(*f, _shapes(rows, dtype))


@_dispatch.example("linear_relu_squared")
def _relu_squared_example(rows, dtype):
    """The same size with the other activation and without a bias."""
    f = _scaled(linear_relu_squared), _scaled(reference, activation="relu_squared")
    return _dispatch.Example(*f, _shapes(rows, dtype)[:2])


@_dispatch.example("mlp")
def _mlp_example(rows, dtype):
    """GPT-2's MLP, fp32 in TF32: the gradient of the second matmul is in the kernels."""

    def expected(x, w, b, w2):
        return jnp.matmul(reference(x, w, b), w2, precision=jax.lax.Precision.HIGHEST)

    def scaled(f):
        return lambda x, w, b, w2, **how: f(x, w * 768**-0.5, b, w2 * 3072**-0.5, **how)

    arrays = (*_shapes(rows, dtype), jax.ShapeDtypeStruct((3072, 768), dtype))
    call = functools.partial(mlp, precision=jax.lax.Precision.HIGH)
    return _dispatch.Example(scaled(call), scaled(expected), arrays)
