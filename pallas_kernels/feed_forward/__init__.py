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

Back ends:
    mosaic: Hopper (TMA and wgmma); bf16 or fp16, sizes that its tiles divide.
    triton: NVIDIA GPUs from Ampere on, any size. bf16 or fp16 in one kernel; in fp32 the matmul is
        XLA's, and one kernel adds bias and activation.
    xla: plain JAX; any device.
    reference: the definition in fp32 with true fp32 matmuls, its gradients by JAX: forward mode and
        higher derivatives work. Any device.
mosaic, triton and xla are differentiable once, in reverse mode.

Backward pass:
    mosaic in `mlp`: one kernel computes dy w₂ᵀ, multiplies it by the derivative, and sums db. The
        matmuls for dx and dw are XLA's.
    mosaic in `linear_gelu`: the kernel of the matmul for dx computes du as the left operand, and
        stores du for the matmul for dw. If the kernel's tiles do not divide I, xla computes both.
    triton: one kernel computes du and db. With a precision of HIGH, which asks for TF32, it also
        stores duᵀ for the matmul for dw (pallas_kernels.matmul), and in `mlp` yᵀ for dw₂.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, XLA, BackEnd
from pallas_kernels.fp8.conversion import Fp8Rows, rows_of
from pallas_kernels.matmul import (
    checked_linear,
    sum_rows,
    weight_gradient,
    weight_gradient_of_transposed,
    xla_matmul,
)
from pallas_kernels.transpose import transpose_copy

Implementation = Literal["auto", "mosaic", "triton", "xla", "reference"]


def linear_gelu(
    x: Float[Array, "*B I"],
    w: Float[Array, "I O"],
    b: Float[Array, " O"],
    *,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B O"]:
    """Compute gelu(x w + b), tanh form, in x's dtype.

    Args:
        x: fp32, bf16 or fp16.
        w, b: of x's dtype or fp32. A w in fp32 is rounded to x's dtype, b is not rounded. The
            gradients have the dtypes of w and b and are summed in fp32.
        implementation: "auto", or a back end: "mosaic", "triton", "xla", "reference". Forward mode
            and second derivatives need "reference".
        precision: precision of fp32 matmuls (JAX's default for fp32 on a GPU is TF32).

    Raises:
        ValueError: wrong shapes or dtypes, or the named back end cannot run this call.
    """
    return _linear("linear_gelu", "gelu", x, w, b, implementation, precision)


def linear_relu_squared(
    x: Float[Array, "*B I"],
    w: Float[Array, "I O"],
    b: Float[Array, " O"] | None = None,
    *,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B O"]:
    """Compute relu(x w + b)² in x's dtype, the activation of Primer (So et al., 2021).

    Args:
        implementation: "auto", "mosaic", "triton", "xla" or "reference".

    The other arguments and the errors are as in `linear_gelu`.
    """
    return _linear("linear_relu_squared", "relu_squared", x, w, b, implementation, precision)


def mlp(
    x: Float[Array, "*B I"] | Fp8Rows,
    w: Float[Array, "I O"],
    b: Float[Array, " O"],
    w2: Float[Array, "O C"],
    *,
    fp8: bool = False,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B C"]:
    """Compute linear_gelu(x, w, b) w2, rounded once more to x's dtype.

    XLA computes the second matmul. With "mosaic" and C a multiple of 64, one kernel computes
    dy w₂ᵀ and the gradient of the activation. With "triton" in fp32 and a precision of HIGH, the
    kernel for du also recomputes the hidden layer, transposed for dw₂, so only x w is saved.

    Args:
        w2: of x's dtype, or fp32, which is rounded to x's dtype.
        fp8: whether the matmuls are in FP8 where the call is differentiated
            (pallas_kernels/fp8/layers.py), with "auto", "mosaic" or "xla". x may then be the
            `Fp8Rows` of `layer_norm(fp8_scale=ACTIVATION_SCALE)`.
        implementation: "auto", "mosaic", "triton", "xla" or "reference".

    The other arguments and the errors are as in `linear_gelu`.
    """
    given, x = x, rows_of(x)
    _check("mlp", x, w, b)
    if w2.ndim != 2 or w2.shape[0] != w.shape[1] or w2.dtype not in (x.dtype, jnp.float32):
        raise ValueError(
            f"mlp: expected w2 (O, C) with O={w.shape[1]}, of x's dtype or float32, got {w2.shape} "
            f"in {w2.dtype}"
        )
    if fp8:
        from pallas_kernels.fp8 import layers

        how = {"implementation": implementation, "precision": precision}
        return layers.activated_mlp(given, w, b, w2, **how)
    n = math.prod(x.shape[:-1])
    x_NI = x.reshape(n, x.shape[-1])
    backend = _select("mlp", implementation, (x, w, b, w2))
    options = Options("gelu", backend, precision)
    one_kernel = options.backend == "mosaic" and _why_not_tiles(n, w2.shape[1], w2.shape[0]) is None
    if one_kernel or (options.in_passes(x.dtype) and precision == jax.lax.Precision.HIGH):
        y_NC = _calls.differentiable("mlp", _mlp, x_NI, w, b, w2, options)
    else:
        y_NO = _linear("mlp", "gelu", x_NI, w, b, options.backend, precision)
        second = "reference" if options.backend == "reference" else "xla"
        y_NC = checked_linear("mlp", y_NO, w2, None, second, precision)
    return y_NC.reshape(*x.shape[:-1], w2.shape[1])


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a call on which the choice of a back end depends."""

    dtype: jax.typing.DTypeLike
    rows: int
    inputs: int
    outputs: int


def _why_not_mosaic(call: Facts) -> str | None:
    return (
        _dispatch.why_not_mosaic()
        or _dispatch.why_not_16_bit(call.dtype)
        or _why_not_tiles(call.rows, call.inputs, call.outputs)
    )


def _why_not_triton(call: Facts) -> str | None:
    if (why := _dispatch.why_not_triton()) is not None:
        return why
    if jnp.dtype(call.dtype) == jnp.float32:
        return None
    return _dispatch.why_not_16_bit(call.dtype, "float32, ")


def _why_not_tiles(n: int, i: int, o: int) -> str | None:
    from pallas_kernels.feed_forward import mosaic

    return mosaic.why_not(n, i, o)


_dispatch.register(
    "linear_gelu",
    "linear_relu_squared",
    "mlp",
    back_ends=[
        BackEnd("mosaic", _why_not_mosaic, custom=True),
        BackEnd("triton", _why_not_triton, custom=True),
        XLA,
        REFERENCE,
    ],
    facts=Facts,
)


def _select(operation, implementation, arrays):
    x, w, *_ = arrays
    return _dispatch.select(
        operation,
        implementation,
        arrays=arrays,
        dtype=x.dtype,
        rows=math.prod(x.shape[:-1]),
        inputs=w.shape[0],
        outputs=w.shape[1],
    )


def reference(x, w, b=None, *, activation: str = "gelu"):
    """Compute the definition in fp32 with true fp32 matmuls for every input dtype. Return fp32."""
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    u = jnp.matmul(x, w, precision=jax.lax.Precision.HIGHEST)
    if b is not None:
        u = u + b.astype(jnp.float32).reshape((1,) * (u.ndim - 1) + (-1,))
    return jax.nn.gelu(u, approximate=True) if activation == "gelu" else jnp.square(jax.nn.relu(u))


# -------------------------------------------------------------------------------------- activations

# gelu(u) = u·σ(v) and v = GELU_1·u + GELU_3·u³.
GELU_1 = 2 * (2 / jnp.pi) ** 0.5
GELU_3 = 0.044715 * GELU_1
LOG2_E = 1.4426950408889634


def _gelu(u):
    """Return gelu(u) = u·σ and gelu'(u) = σ + u·σ·(1 − σ)·v' with σ = σ(v), in fp32."""
    u2 = u * u
    sigma = 0.5 * jnp.tanh(u * (u2 * (GELU_3 / 2) + GELU_1 / 2)) + 0.5
    y = u * sigma
    return y, (y - y * sigma) * (u2 * (3 * GELU_3) + GELU_1) + sigma


def _relu_squared(u):
    r = jnp.maximum(u, 0)
    return r * r, 2 * r


ACTIVATIONS = {"gelu": _gelu, "relu_squared": _relu_squared}


# --------------------------------------------------------------------------------------------- rule


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call."""

    activation: str
    """A name in `ACTIVATIONS`."""
    backend: str
    """Not "reference"."""
    precision: jax.lax.PrecisionLike
    """Precision of fp32 matmuls."""

    @property
    def operation(self) -> str:
        """Name of the public function, for errors."""
        return f"linear_{self.activation}"

    def in_passes(self, dtype: jax.typing.DTypeLike) -> bool:
        """Whether XLA computes the matmul and Triton kernels compute bias and activation: in fp32.

        In other dtypes the Triton kernel includes the matmul.
        """
        return self.backend == "triton" and dtype == jnp.float32


def _linear(kernel, activation, x, w, b, implementation, precision):
    _check(kernel, x, w, b)
    n = math.prod(x.shape[:-1])
    backend = _select(kernel, implementation, (x, w, b))
    if backend == "reference":
        return reference(x, w, b, activation=activation).astype(x.dtype)
    options = Options(activation, backend, precision)
    y_NO = _calls.differentiable(kernel, _activated, x.reshape(n, x.shape[-1]), w, b, options)
    return y_NO.reshape(*x.shape[:-1], w.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _activated(x_NI, w_IO, b_O, options: Options):
    return forward(x_NI, w_IO, b_O, options, save=False)[0]


def _activated_forward(x_NI, w_IO, b_O, options):
    y_NO, saved_NO = forward(x_NI, w_IO, b_O, options, save=True)
    return y_NO, (x_NI, w_IO, b_O, saved_NO)


def backward(options: Options, saved: tuple, dy_NO):
    """Return (dx, dw, db) from (x, w, b) and the array that `forward` saved.

    db is None without b.
    """
    x_NI, w_IO, b_O, saved_NO = saved
    if options.in_passes(dy_NO.dtype):
        return _backward_passes(options, x_NI, w_IO, b_O, saved_NO, dy_NO)[:3]
    dx_NI, du_NO, db_O = _activation_backward(
        dy_NO, saved_NO, w_IO.astype(dy_NO.dtype), options, bias=b_O is not None
    )
    dw_IO = weight_gradient(x_NI, du_NO, precision=options.precision)
    return dx_NI, dw_IO.astype(w_IO.dtype), None if b_O is None else db_O.astype(b_O.dtype)


_activated.defvjp(_activated_forward, backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _mlp(x_NI, w_IO, b_O, w2_OC, options: Options):
    (y_NO,) = forward(x_NI, w_IO, b_O, options, save=False)
    return xla_matmul(y_NO, w2_OC.astype(y_NO.dtype), precision=options.precision, dtype=y_NO.dtype)


def _mlp_forward(x_NI, w_IO, b_O, w2_OC, options):
    y_NO, saved_NO = forward(x_NI, w_IO, b_O, options, save=True)
    y_NC = xla_matmul(y_NO, w2_OC.astype(y_NO.dtype), precision=options.precision, dtype=y_NO.dtype)
    # y is not saved if the backward pass recomputes it.
    return y_NC, (x_NI, w_IO, b_O, w2_OC, saved_NO, y_NO if options.backend == "mosaic" else None)


def _mlp_backward(options, saved, dy_NC):
    x_NI, w_IO, b_O, w2_OC, saved_NO, y_NO = saved
    if options.backend == "mosaic":
        du_NO, db_O = _mlp_du(dy_NC, w2_OC.astype(dy_NC.dtype), saved_NO)
        dx_NI = jnp.matmul(du_NO, w_IO.astype(dy_NC.dtype).T, precision=options.precision)
        dw_IO, dw2_OC = (
            weight_gradient(*pair, precision=options.precision)
            for pair in ((x_NI, du_NO), (y_NO, dy_NC))
        )
        return dx_NI, dw_IO.astype(w_IO.dtype), db_O.astype(b_O.dtype), dw2_OC.astype(w2_OC.dtype)
    dy_NO = jnp.matmul(dy_NC, w2_OC.T, precision=options.precision)
    dx_NI, dw_IO, db_O, y_ON = _backward_passes(
        options, x_NI, w_IO, b_O, saved_NO, dy_NO, y_transposed=True
    )
    return dx_NI, dw_IO, db_O, weight_gradient_of_transposed(y_ON, transpose_copy(dy_NC))


def _mlp_du(dy_NC, w2_OC, derivative_NO):
    """Return (du, db)."""
    from pallas_kernels.feed_forward import mosaic

    return _calls.looped("mlp", mosaic.mlp_du)(dy_NC, w2_OC, derivative_NO)


_mlp.defvjp(_mlp_forward, _mlp_backward)


def _backward_passes(options, x_NI, w_IO, b_O, xw_NO, dy_NO, *, y_transposed=False):
    """Return (dx, dw, db, yᵀ) if `options.in_passes`; yᵀ is None without `y_transposed`."""
    from pallas_kernels.feed_forward import triton

    tf32 = options.precision == jax.lax.Precision.HIGH
    kernel = functools.partial(
        triton.activation_backward,
        activation=options.activation,
        du_transposed=tf32,
        y_transposed=y_transposed,
    )
    du_NO, du_ON, y_ON, db_O = _calls.looped(options.operation, kernel)(dy_NO, xw_NO, b_O)
    dx_NI = jnp.matmul(du_NO, w_IO.T, precision=options.precision)
    if tf32:
        return dx_NI, weight_gradient_of_transposed(transpose_copy(x_NI), du_ON), db_O, y_ON
    return dx_NI, weight_gradient(x_NI, du_NO, precision=options.precision), db_O, y_ON


def forward(x_NI, w_IO, b_O, options: Options, *, save: bool):
    """Return (y, the array that `backward` needs), or (y,) without `save`.

    The array is the derivative of the activation, or x w if `options.in_passes`.
    """
    w_IO, b_O = w_IO.astype(x_NI.dtype), None if b_O is None else b_O.astype(jnp.float32)
    if options.in_passes(x_NI.dtype):
        from pallas_kernels.feed_forward import triton

        xw_NO = xla_matmul(x_NI, w_IO, precision=options.precision, dtype=jnp.float32)
        kernel = functools.partial(triton.activated, activation=options.activation)
        y_NO = _calls.looped(options.operation, kernel)(xw_NO, b_O)
        return (y_NO, xw_NO) if save else (y_NO,)
    if options.backend == "xla":
        u_NO = xla_matmul(x_NI, w_IO, precision=options.precision, dtype=jnp.float32)
        u_NO = u_NO if b_O is None else u_NO + b_O[None, :]
        return tuple(
            result.astype(x_NI.dtype)
            for result in ACTIVATIONS[options.activation](u_NO)[: 1 + save]
        )

    def kernel(x_NI, w_IO, b_O):
        if options.backend == "mosaic":
            from pallas_kernels.feed_forward import mosaic

            b_O = jnp.zeros(w_IO.shape[1], jnp.float32) if b_O is None else b_O
            return mosaic.forward(x_NI, w_IO, b_O, ACTIVATIONS[options.activation], save=save)
        from pallas_kernels.feed_forward import triton

        return triton.forward(x_NI, w_IO, b_O, options.activation, save=save)

    return _calls.looped(options.operation, kernel)(x_NI, w_IO, b_O)


def _activation_backward(dy_NO, derivative_NO, w_IO, options, *, bias):
    """Return (dx, du, db in fp32)."""
    if options.backend == "mosaic":
        from pallas_kernels.feed_forward import mosaic_backward

        if mosaic_backward.backward_tiles(dy_NO.shape[0], *w_IO.shape) is not None:
            kernel = _calls.looped(
                options.operation, functools.partial(mosaic_backward.backward, bias=bias)
            )
            return kernel(dy_NO, derivative_NO, w_IO)
    if options.backend == "triton":
        from pallas_kernels.feed_forward import triton

        du_NO, db_O = _calls.looped(options.operation, functools.partial(triton.scaled, bias=bias))(
            dy_NO, derivative_NO
        )
    else:
        du_NO = dy_NO.astype(jnp.float32) * derivative_NO.astype(jnp.float32)
        du_NO, db_O = du_NO.astype(dy_NO.dtype), sum_rows(du_NO) if bias else None
    return jnp.matmul(du_NO, w_IO.T, precision=options.precision), du_NO, db_O


def _check(name, x, w, b):
    if not (x.ndim >= 1 and w.ndim == 2 and x.shape[-1] == w.shape[0]) or (
        b is not None and b.shape != w.shape[1:]
    ):
        raise ValueError(
            f"{name}: expected x (..., I), w (I, O) and b (O,), got {x.shape}, {w.shape}, "
            f"{None if b is None else b.shape}"
        )
    if x.dtype not in _dispatch.DTYPES or any(
        a is not None and a.dtype not in (x.dtype, jnp.float32) for a in (w, b)
    ):
        raise ValueError(
            f"{name}: expected x in float32, bfloat16 or float16, w and b in x's dtype or float32, "
            f"got {x.dtype}, {w.dtype}, {None if b is None else b.dtype}"
        )


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
