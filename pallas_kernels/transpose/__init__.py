"""Transposition of matrices that are written out: transpose_copy = srcᵀ, transpose_add = dst + srcᵀ.

`transpose_sum_rows` gives srcᵀ and Σ_r src from one read; a backward pass wants both of the gradient of a linear layer's output.

Shapes: src (…, R, C), dst and results (…, C, R); B is all leading axes together. The sum is fp32, rounded once to dst's dtype.
Gradients: a transpose, and for dst the cotangent itself; transpose_sum_rows has none.

A transpose next to a matrix product needs neither: the product reads its operand in either order. These are for arrays that
are kept in the other order, such as an LM head whose gradient is added to an embedding's.

Back ends:
    triton: one pass over memory in tiles. NVIDIA GPUs from Ampere on.
    xla: plain JAX; any device. The compiler may leave the transpose to whoever reads the result.
    reference: plain JAX with the sum in fp32; the result is fp32.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _choose


def transpose_copy(src: Float[Array, "*B R C"], *, implementation: str = "auto") -> Float[Array, "*B C R"]:
    """srcᵀ of the last two axes, written out.

    Args:
        src: matrices in a floating-point type of 2 or 4 bytes.
        implementation: "auto", or one of the back ends above.

    Raises:
        ValueError: another dtype, fewer than two axes, or the named back end cannot run here.
    """
    _check("transpose_copy", src)
    backend = _chosen("transpose_copy", implementation, src)
    src_BRC = _flat(src)
    return _copy(backend, src.dtype, src_BRC).reshape(*src.shape[:-2], src.shape[-1], src.shape[-2])


def transpose_add(
    dst: Float[Array, "*B C R"],
    src: Float[Array, "*B R C"],
    *,
    in_place: bool = True,
    implementation: str = "auto",
) -> Float[Array, "*B C R"]:
    """dst + srcᵀ in dst's dtype.

    Args:
        dst, src: floating-point types of 2 or 4 bytes, not necessarily the same.
        in_place: the sum is written over dst, which costs a copy of dst where it is still needed (or is an argument of the
            compiled function that was not donated). False: into a new array.
        implementation: "auto", or one of the back ends above.

    Raises:
        ValueError: another dtype, shapes that are not each other's transpose, or the named back end cannot run here.
    """
    _check("transpose_add", dst, src)
    backend = _chosen("transpose_add", implementation, src)
    return _add(backend, in_place, src.dtype, _flat(dst), _flat(src)).reshape(dst.shape)


def transpose_sum_rows(
    src: Float[Array, "*B R C"], *, implementation: str = "auto"
) -> tuple[Float[Array, "*B C R"], Float[Array, "*B C"]]:
    """srcᵀ of the last two axes, written out, and the sum of src's rows in fp32. Arguments and errors as of `transpose_copy`."""
    _check("transpose_sum_rows", src)
    backend = _chosen("transpose_sum_rows", implementation, src)
    src_BRC = _flat(src)
    if backend == "triton":
        from pallas_kernels.transpose import _triton

        out_BCR, sums_BC = _vmappable(lambda src_BRC: _triton.transpose_sum_rows(src_BRC))(src_BRC)
    else:
        out_BCR, sums_BC = _copy(backend, src.dtype, src_BRC), src_BRC.astype(jnp.float32).sum(1)
    lead, (r, c) = src.shape[:-2], src.shape[-2:]
    return out_BCR.reshape(*lead, c, r), sums_BC.reshape(*lead, c)


def choose(implementation: str = "auto", *, kernel: str = "transpose_copy") -> str:
    """The back end that the functions of this module use on the default device.

    `auto` takes triton wherever it runs, but not for arrays that the compiler may split over several devices.

    Raises:
        ValueError: the named back end does not exist or cannot run here.
    """
    supported = {"triton": _choose.why_not_triton(), "xla": None, "reference": None}
    if implementation == "auto":
        return _choose.auto(supported)
    return _choose.named(kernel, implementation, supported)


def reference(src, dst=None):
    """srcᵀ, or dst + srcᵀ, in fp32 whatever the inputs are."""
    transposed = jnp.swapaxes(src, -1, -2).astype(jnp.float32)
    return transposed if dst is None else dst.astype(jnp.float32) + transposed


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _copy(backend, dtype, src_BRC):
    """srcᵀ in `dtype`."""
    if backend == "triton":
        from pallas_kernels.transpose import _triton

        return _vmappable(functools.partial(_triton.transpose_copy, dtype=dtype))(src_BRC)
    return jnp.swapaxes(src_BRC, -1, -2).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _add(backend, in_place, src_dtype, dst_BCR, src_BRC):
    if backend == "triton":
        from pallas_kernels.transpose import _triton

        return _vmappable(functools.partial(_triton.transpose_add, in_place=in_place))(dst_BCR, src_BRC)
    return reference(src_BRC, dst_BCR).astype(dst_BCR.dtype)


_copy.defvjp(
    lambda backend, dtype, src_BRC: (_copy(backend, dtype, src_BRC), jnp.zeros((), src_BRC.dtype)),
    lambda backend, dtype, like, d_BCR: (_copy(backend, like.dtype, d_BCR),),
)
_add.defvjp(
    lambda backend, in_place, src_dtype, dst_BCR, src_BRC: (_add(backend, in_place, src_dtype, dst_BCR, src_BRC), None),
    lambda backend, in_place, src_dtype, _, d_BCR: (d_BCR, _copy(backend, src_dtype, d_BCR)),
)


# A kernel launch has no rule for vmap; a loop over it does.
_vmappable = jax.custom_batching.sequential_vmap


def _chosen(kernel, implementation, src):
    backend = choose(implementation, kernel=kernel)
    return backend if src.size else "xla"  # nothing to launch


def _flat(x):
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _check(kernel, *arrays):
    for x in arrays:
        if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize not in (2, 4):
            raise ValueError(
                f"{kernel}: expected matrices (…, rows, columns) of a floating-point type of 2 or 4 bytes, "
                f"got {x.shape} in {x.dtype}"
            )
    if len({arrays[0].shape, *((*x.shape[:-2], x.shape[-1], x.shape[-2]) for x in arrays[1:])}) > 1:
        raise ValueError(
            f"{kernel}: expected dst (…, C, R) and src (…, R, C), got {arrays[0].shape} and {arrays[1].shape}"
        )
