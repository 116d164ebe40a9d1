"""A linear layer and its activation in one kernel: y = gelu(x w + b), and y = relu(x w + b)².

gelu is the tanh form, u/2 · (1 + tanh(√(2/π)·(u + 0.044715·u³))), which is u·σ(2√(2/π)·(u + 0.044715·u³)).

Shapes: N rows (all leading axes of x), I inputs, O outputs. Products, bias and activation are fp32; y is rounded once.

The forward pass saves the activation's derivative at u = x w + b, in x's dtype, for the backward pass, which then is
du = dy · derivative, dx = du wᵀ, dw = xᵀ du, db = Σ_N du. It comes with the activation for a few operations more, takes the
memory that u would, and makes the backward pass a plain product.

Back ends:
    mosaic: Hopper's TMA and wgmma; bf16 or fp16, sizes that its tiles divide.
    triton: NVIDIA GPUs from Ampere on; bf16 or fp16, any size.
    xla: any device, any dtype.
    reference: the definition in fp32 with true fp32 products.
Backward, `mosaic` forms du on the way into the product for dx, and writes it for the one for dw (where its tiles divide I; else it
goes XLA's way); `triton` forms du and db in a pass of their own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _choose
from pallas_kernels.products import product, sum_rows, weight_gradient


def linear_gelu(
    x: Float[Array, "*B I"],
    w: Float[Array, "I O"],
    b: Float[Array, " O"],
    *,
    implementation: str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B O"]:
    """gelu(x w + b), tanh form, in x's dtype.

    Args:
        x: any floating dtype.
        w, b: of that dtype, or fp32, which is rounded to x's dtype (w) or not at all (b). Their gradients have their dtype and
            are summed in fp32.
        implementation: "auto", or one of the back ends above.
        precision: of the fp32 matrix products in the `xla` back end (JAX's own default for fp32 on a GPU is TF32).

    Raises:
        ValueError: inputs disagree in shape or dtype, or the named back end cannot run them.
    """
    return _linear("gelu", x, w, b, implementation, precision)


def linear_relu_squared(
    x: Float[Array, "*B I"],
    w: Float[Array, "I O"],
    b: Float[Array, " O"] | None = None,
    *,
    implementation: str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B O"]:
    """relu(x w + b)² in x's dtype, the activation of Primer (So et al., 2021); arguments and errors as of `linear_gelu`."""
    return _linear("relu_squared", x, w, b, implementation, precision)


def choose(dtype: jax.typing.DTypeLike, n: int, i: int, o: int, implementation: str = "auto") -> str:
    """The back end that `linear_gelu` and `linear_relu_squared` use for N, I, O on the default device.

    `auto` takes mosaic, triton, xla, in that order, but no kernel for arrays that the compiler may split over several devices.

    Raises:
        ValueError: the named back end does not exist or cannot run here.
    """
    dtype = jnp.dtype(dtype)
    supported = {
        "mosaic": _choose.why_not_mosaic() or _why_not_16_bit(dtype) or _why_not_tiles(n, i, o),
        "triton": _choose.why_not_triton() or _why_not_16_bit(dtype) or (None if n else "takes at least one row"),
        "xla": None,
        "reference": None,
    }
    if implementation == "auto":
        return _choose.auto(supported)
    return _choose.named("linear_gelu", implementation, supported)


def reference(x, w, b=None, *, activation: str = "gelu"):
    """The definition, in fp32 with true fp32 products, whatever the inputs are. Returns fp32."""
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    u = jnp.matmul(x, w, precision=jax.lax.Precision.HIGHEST)
    if b is not None:
        u = u + b.astype(jnp.float32).reshape((1,) * (u.ndim - 1) + (-1,))
    return jax.nn.gelu(u, approximate=True) if activation == "gelu" else jnp.square(jax.nn.relu(u))


# --------------------------------------------------------------------------------------------------------------- activations

# gelu(u) = u·σ(v) and v = GELU_1·u + GELU_3·u³.
GELU_1 = 2 * (2 / jnp.pi) ** 0.5
GELU_3 = 0.044715 * GELU_1
LOG2_E = 1.4426950408889634


def _gelu(u):
    """gelu(u) = u·σ and gelu'(u) = σ + u·σ·(1 − σ)·v' with σ = σ(v), in fp32."""
    u2 = u * u
    sigma = 0.5 * jnp.tanh(u * (u2 * (GELU_3 / 2) + GELU_1 / 2)) + 0.5
    y = u * sigma
    return y, (y - y * sigma) * (u2 * (3 * GELU_3) + GELU_1) + sigma


def _relu_squared(u):
    r = jnp.maximum(u, 0)
    return r * r, 2 * r


ACTIVATIONS = {"gelu": _gelu, "relu_squared": _relu_squared}


# ---------------------------------------------------------------------------------------------------------------------- rule


@dataclasses.dataclass(frozen=True)
class How:
    """What is static: the activation's name, a back end but `reference`, and the precision of its fp32 products."""

    activation: str
    backend: str
    precision: jax.lax.PrecisionLike


def _linear(activation, x, w, b, implementation, precision):
    _check(activation, x, w, b)
    n = x.size // x.shape[-1] if x.size else 0
    backend = choose(x.dtype, n, *w.shape, implementation)
    if backend == "reference":
        return reference(x, w, b, activation=activation).astype(x.dtype)
    y_NO = _activated(x.reshape(n, x.shape[-1]), w, b, How(activation, backend, precision))
    return y_NO.reshape(*x.shape[:-1], w.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _activated(x_NI, w_IO, b_O, how: How):
    return forward(x_NI, w_IO, b_O, how, save=False)[0]


def _activated_forward(x_NI, w_IO, b_O, how):
    y_NO, derivative_NO = forward(x_NI, w_IO, b_O, how, save=True)
    return y_NO, (x_NI, w_IO, b_O, derivative_NO)


def backward(how: How, saved: tuple, dy_NO):
    """(dx, dw, db) from the saved (x, w, b, derivative); db is None where b is."""
    x_NI, w_IO, b_O, derivative_NO = saved
    dx_NI, du_NO, db_O = _through_activation(dy_NO, derivative_NO, w_IO.astype(dy_NO.dtype), how, bias=b_O is not None)
    dw_IO = weight_gradient(x_NI, du_NO, precision=how.precision)
    return dx_NI, dw_IO.astype(w_IO.dtype), None if b_O is None else db_O.astype(b_O.dtype)


_activated.defvjp(_activated_forward, backward)


def forward(x_NI, w_IO, b_O, how: How, *, save: bool):
    """(y, derivative), or (y,)."""
    w_IO, b_O = w_IO.astype(x_NI.dtype), None if b_O is None else b_O.astype(jnp.float32)
    if how.backend == "xla":
        u_NO = product(x_NI, w_IO, precision=how.precision, dtype=jnp.float32)
        u_NO = u_NO if b_O is None else u_NO + b_O[None, :]
        return tuple(result.astype(x_NI.dtype) for result in ACTIVATIONS[how.activation](u_NO)[: 1 + save])

    @jax.custom_batching.sequential_vmap
    def kernel(x_NI, w_IO, b_O):
        if how.backend == "mosaic":
            from pallas_kernels.linear_gelu import _mosaic

            b_O = jnp.zeros(w_IO.shape[1], jnp.float32) if b_O is None else b_O
            return _mosaic.forward(x_NI, w_IO, b_O, ACTIVATIONS[how.activation], save=save)
        from pallas_kernels.linear_gelu import _triton

        return _triton.forward(x_NI, w_IO, b_O, how.activation, save=save)

    return kernel(x_NI, w_IO, b_O)


def _through_activation(dy_NO, derivative_NO, w_IO, how, *, bias):
    """(dx, du, db in fp32)."""
    if how.backend == "mosaic":
        from pallas_kernels.linear_gelu import _mosaic

        if _mosaic.backward_tiles(dy_NO.shape[0], *w_IO.shape) is not None:
            kernel = jax.custom_batching.sequential_vmap(functools.partial(_mosaic.backward, bias=bias))
            return kernel(dy_NO, derivative_NO, w_IO)
    if how.backend == "triton":
        from pallas_kernels.linear_gelu import _triton

        du_NO, db_O = jax.custom_batching.sequential_vmap(functools.partial(_triton.scaled, bias=bias))(
            dy_NO, derivative_NO
        )
    else:
        du_NO = dy_NO.astype(jnp.float32) * derivative_NO.astype(jnp.float32)
        du_NO, db_O = du_NO.astype(dy_NO.dtype), sum_rows(du_NO) if bias else None
    return jnp.matmul(du_NO, w_IO.T, precision=how.precision), du_NO, db_O


def _why_not_16_bit(dtype: jnp.dtype) -> str | None:
    return None if dtype in (jnp.bfloat16, jnp.float16) else f"takes bfloat16 or float16, not {dtype.name}"


def _why_not_tiles(n: int, i: int, o: int) -> str | None:
    from pallas_kernels.linear_gelu import _mosaic

    return _mosaic.why_not(n, i, o)


def _check(activation, x, w, b):
    name = f"linear_{activation}"
    if not (x.ndim >= 1 and w.ndim == 2 and x.shape[-1] == w.shape[0]) or (b is not None and b.shape != w.shape[1:]):
        raise ValueError(
            f"{name}: expected x (..., I), w (I, O) and b (O,), got {x.shape}, {w.shape}, {None if b is None else b.shape}"
        )
    if any(a is not None and a.dtype not in (x.dtype, jnp.float32) for a in (w, b)):
        raise ValueError(
            f"{name}: expected w and b of x's dtype or float32, "
            f"got {x.dtype}, {w.dtype}, {None if b is None else b.dtype}"
        )
