"""Transposed copies of matrices.

    transpose_copy(src) = srcᵀ
    transpose_add(dst, src) = dst + srcᵀ
    transpose_sum_rows(src) = srcᵀ, Σ_r src      (from one read of src)

The backward pass of a linear layer needs both results of `transpose_sum_rows` of the output's
gradient.

Shapes: src (…, R, C), dst and results (…, C, R); B is all leading axes together. Sums are fp32,
rounded once to dst's dtype. The kernel of transpose_sum_rows has no gradient.

A bf16 matmul reads operands in either order and needs no transposed copy. These functions are for
TF32 matmuls, and for arrays with different orders of axes. For example, the gradient of an LM head
(C, V) is added to the gradient of an embedding (V, C).

Back ends (triton as in pallas_kernels/__init__.py):
    triton: one pass over memory in tiles.
    xla: plain JAX, also in forward mode and to any order. The compiler may fuse the transpose into
        the next operation.
    reference: as xla.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, TRITON, XLA
from pallas_kernels._partition import Rule
from pallas_kernels._types import Array, Float

Implementation = Literal["auto", "triton", "xla", "reference"]

_dispatch.register(
    "transpose_copy",
    "transpose_add",
    "transpose_sum_rows",
    back_ends=[dataclasses.replace(TRITON, rule=True, sums=True), XLA, REFERENCE],
)


def transpose_copy(
    src: Float[Array, "*B R C"], *, implementation: Implementation | str = "auto"
) -> Float[Array, "*B C R"]:
    """Store srcᵀ of the last two axes.

    Args:
        src: matrices in fp32, bf16 or fp16.
        implementation: "auto", or a back end: "triton", "xla", "reference".

    Raises:
        ValueError: wrong dtype, fewer than two axes, or the named back end cannot run here.
    """
    _check("transpose_copy", src)
    if _dispatch.select("transpose_copy", implementation, arrays=src) != "triton":
        return jnp.swapaxes(src, -1, -2)
    return _calls.differentiable("transpose_copy", _copy, src)


def transpose_add(
    dst: Float[Array, "*B C R"],
    src: Float[Array, "*B R C"],
    *,
    in_place: bool = True,
    implementation: Implementation | str = "auto",
) -> Float[Array, "*B C R"]:
    """Compute dst + srcᵀ in dst's dtype.

    Args:
        dst, src: fp32, bf16 or fp16; the two dtypes may differ.
        in_place: overwrite dst. XLA first copies dst if dst is used later, or if dst is an argument
            of the compiled function that was not donated. False: store the result in a new array.
        implementation: "auto", or a back end: "triton", "xla", "reference".

    Raises:
        ValueError: wrong dtype, shapes that are not each other's transpose, or the named back end
            cannot run here.
    """
    _check("transpose_add", src, dst)
    if _dispatch.select("transpose_add", implementation, arrays=(src, dst)) != "triton":
        return reference(src, dst).astype(dst.dtype)
    return _calls.differentiable("transpose_add", _add, in_place, src.dtype, dst, src)


def transpose_sum_rows(
    src: Float[Array, "*B R C"], *, implementation: Implementation | str = "auto"
) -> tuple[Float[Array, "*B C R"], Float[Array, "*B C"]]:
    """Store srcᵀ of the last two axes, and the sum of src's rows in fp32.

    Args:
        implementation: "auto", "triton", "xla" or "reference".

    The other arguments and the errors are as in `transpose_copy`.
    """
    _check("transpose_sum_rows", src)
    if _dispatch.select("transpose_sum_rows", implementation, arrays=src) != "triton":
        return jnp.swapaxes(src, -1, -2), src.astype(jnp.float32).sum(-2)
    from pallas_kernels.transpose import triton

    rule = Rule("b* r c -> b* c r, b* c", over="b* r c")
    launch = _calls.looped("transpose_sum_rows", triton.transpose_sum_rows, rule=rule)
    return launch(src)


def reference(src, dst=None):
    """Compute srcᵀ, or dst + srcᵀ, in fp32 for every input dtype."""
    transposed = jnp.swapaxes(src, -1, -2).astype(jnp.float32)
    return transposed if dst is None else dst.astype(jnp.float32) + transposed


def _launch_copy(dtype, src):
    from pallas_kernels.transpose import triton

    copy = functools.partial(triton.transpose_copy, dtype=dtype)
    rule = Rule("b* r c -> b* c r", over="b* r c")
    return _calls.looped("transpose_copy", copy, rule=rule)(src)


@jax.custom_vjp
def _copy(src):
    return _launch_copy(src.dtype, src)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _add(in_place, src_dtype, dst, src):
    from pallas_kernels.transpose import triton

    add = functools.partial(triton.transpose_add, in_place=in_place)
    rule = Rule("b* c r, b* r c -> b* c r", over="b* r c")
    launch = _calls.looped("transpose_add", add, rule=rule, overwrites=in_place)
    return launch(dst, src)


_copy.defvjp(lambda src: (_copy(src), None), lambda _, d_dst: (_copy(d_dst),))
_add.defvjp(
    lambda *args: (_add(*args), None),
    lambda in_place, src_dtype, _, d_dst: (d_dst, _launch_copy(src_dtype, d_dst)),
)


def _transposed(shape):
    return (*shape[:-2], shape[-1], shape[-2])


def _check(operation, *arrays):
    for x in arrays:
        if x.ndim < 2 or x.dtype not in _dispatch.DTYPES:
            raise ValueError(
                f"{operation}: expected matrices (…, rows, columns) in float32, bfloat16 or "
                f"float16, got {x.shape} in {x.dtype}"
            )
    src, *dst = [x.shape for x in arrays]
    if dst not in ([], [_transposed(src)]):
        raise ValueError(
            f"{operation}: expected dst (…, C, R) and src (…, R, C), got {dst[0]} and {src}"
        )


# ----------------------------------------------------------------------------------------- examples


@_dispatch.example("transpose_copy")
def _copy_example(rows, dtype):
    """A matrix of GPT-2's width."""
    arrays = (jax.ShapeDtypeStruct((rows, 768), dtype),)
    return _dispatch.Example(transpose_copy, reference, arrays)


@_dispatch.example("transpose_add")
def _add_example(rows, dtype):
    """The kernel that stores into a new array, and the one that overwrites dst."""
    arrays = (jax.ShapeDtypeStruct((rows, 768), dtype), jax.ShapeDtypeStruct((768, rows), dtype))

    def call(src, dst, **how):
        return transpose_add(transpose_add(dst, src, in_place=False, **how), src, **how)

    return _dispatch.Example(call, lambda src, dst: reference(src, dst) + reference(src), arrays)


@_dispatch.example("transpose_sum_rows")
def _sum_rows_example(rows, dtype):
    """A gradient of GPT-2's width. The kernel has no derivative."""

    def expected(src):
        return reference(src), src.astype(jnp.float32).sum(0)

    arrays = (jax.ShapeDtypeStruct((rows, 768), dtype),)
    return _dispatch.Example(transpose_sum_rows, expected, arrays, differentiable=False)
