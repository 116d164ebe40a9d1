"""Parts of a kernel that is outside this package: registry, transformations, launch.

A kernel is a folder with the same files as the kernel folders of this package:

- `__init__.py` has the equations in its docstring, the public function, `reference` (the definition
  in fp32), and a `jax.custom_vjp` function with the backward pass. It calls `register` once, with
  the back ends, fastest first. One of the back ends is "xla".
- The public function checks its arguments, selects a back end with `select`, and calls the
  `jax.custom_vjp` function through `differentiable`.
- `triton.py` has the Triton kernels, and functions that launch them with `triton_call`. `batched`
  or `looped` wraps such a function for `jax.vmap` and `jax.shard_map`. `triton.py` is imported
  inside the function that launches: a machine without a GPU may lack Triton.

The function `why_not` of a `BackEnd` states further limits of the back end. `TRITON.why_not(facts)`
returns the reason why the device cannot run Triton kernels, or None.

`OPERATIONS` contains every registered operation by name. `example` adds a call that
`python -m gptjax.doctor` compares with the definition. `recorded` lists the back ends that the
operations of a function select.

`examples/new_kernel` is a complete kernel; docs/extending_kernel.md describes the steps. Importing
this module imports neither Triton nor Mosaic GPU.
"""

import collections.abc
import contextlib
import unittest.mock
from typing import Any

import jax

from pallas_kernels._calls import batched, differentiable, looped
from pallas_kernels._dispatch import (
    DTYPES,
    OPERATIONS,
    REFERENCE,
    TRITON,
    XLA,
    BackEnd,
    Choice,
    Example,
    capability,
    example,
    recorded,
    register,
    select,
    title,
    why_not_16_bit,
)
from pallas_kernels._partition import Rule

__all__ = [
    "DTYPES",
    "OPERATIONS",
    "REFERENCE",
    "TRITON",
    "XLA",
    "BackEnd",
    "Choice",
    "Example",
    "Rule",
    "batched",
    "capability",
    "differentiable",
    "example",
    "looped",
    "recorded",
    "register",
    "select",
    "title",
    "tracing_for",
    "triton_call",
    "why_not_16_bit",
]


def triton_call(
    kernel: Any,
    *args: Any,
    out: list[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    in_place: tuple[int, ...] = (),
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Launch a `@triton.jit` function on arrays. A launch has no derivative and no `jax.vmap`.

    Args:
        kernel: has one parameter for each of `args`, then a pointer for each of `out`, then
            `tl.constexpr` parameters.
        args: arrays become pointers; Python numbers become scalar arguments.
        out: shapes and dtypes of the new arrays.
        grid: number of programs along each axis.
        in_place: indices of the arrays in `args` that the kernel overwrites.
        options: the `tl.constexpr` parameters, `num_warps` (4) and `num_stages` (3).

    Returns:
        The new values of the arrays in `in_place`, then the arrays in `out`.
    """
    from pallas_kernels import _triton

    return _triton.call(kernel, *args, out=out, grid=grid, in_place=in_place, **options)


@contextlib.contextmanager
def tracing_for(compute_capability: tuple[int, int]) -> collections.abc.Iterator[None]:
    """Select the back ends of an NVIDIA GPU of this compute capability, in traces without one.

    A Triton launch, and cuDNN's attention, becomes a call of its name with the same arrays: the
    functions can be traced and their memory planned, but not compiled or run. Use it with
    `jax.sharding.use_abstract_mesh` and an `AbstractDevice`, which Mosaic's kernels read.
    """
    from pallas_kernels import _dispatch, _triton

    attention = jax.nn.dot_product_attention

    def by_name(*args, implementation=None, **options):
        if implementation == "cudnn":
            return _cudnn(*args)
        return attention(*args, implementation=implementation, **options)

    changes = {"platform": lambda: "gpu", "capability": lambda: compute_capability}
    changes |= {"why_not_triton": lambda: None}
    with (
        unittest.mock.patch.multiple(_dispatch, **changes),
        unittest.mock.patch.object(_triton, "call", _named_call),
        unittest.mock.patch.object(jax.nn, "dot_product_attention", by_name),
    ):
        yield


def _named_call(kernel, *args, out, in_place=(), **_):
    """Replace `pallas_kernels._triton.call` by a call of the kernel's name."""
    arrays = [arg for arg in jax.tree.leaves(args) if hasattr(arg, "dtype")]
    shapes = [jax.ShapeDtypeStruct(args[i].shape, args[i].dtype) for i in in_place] + list(out)
    places = {id(array): j for j, array in enumerate(arrays)}
    aliases = {places[id(args[i])]: k for k, i in enumerate(in_place)}
    name = getattr(kernel, "__name__", "kernel")
    return tuple(jax.ffi.ffi_call(name, shapes, input_output_aliases=aliases)(*arrays))


@jax.custom_vjp
def _cudnn(q_BTHD, k_BSKD, v_BSKE):
    """Replace cuDNN's attention, which JAX traces only where cuDNN is installed."""
    return _cudnn_forward(q_BTHD, k_BSKD, v_BSKE)[0]


def _cudnn_forward(*qkv):
    (b, t, h, _), e = qkv[0].shape, qkv[2].shape[-1]
    out = jax.ShapeDtypeStruct((b, t, h, e), qkv[0].dtype)
    lse = jax.ShapeDtypeStruct((b, h, t), "float32")
    saved = jax.ffi.ffi_call("cudnn", (out, lse))(*qkv)
    return saved[0], (*qkv, *saved)


def _cudnn_backward(saved, dout):
    qkv = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3]]
    return tuple(jax.ffi.ffi_call("cudnn", qkv)(*saved, dout))


_cudnn.defvjp(_cudnn_forward, _cudnn_backward)
