"""Calls of functions with gradient rules of their own, and of kernels, under JAX's transformations.

`jax.shard_map` with its default check_vma=True gives each array a type that says over which mesh
axes its values vary. Neither a `jax.custom_vjp` rule nor a kernel launch converts these types by
itself.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

REMEDY = (
    "this back end is differentiable once, in reverse mode (jax.grad, jax.vjp); for forward-mode "
    "differentiation (jax.jvp, "
    "jax.jacfwd, jax.linearize) or second derivatives pass implementation='reference'"
)


def differentiable(kernel: str, f: Callable, *args: Any) -> Any:
    """f(*args) of a `jax.custom_vjp` function f, whose arguments hold arrays and static options.

    All arrays are first cast to vary over the same mesh axes. JAX transposes this cast to the sum
    over devices that completes the gradient of an array that is equal on all of them.

    Raises:
        TypeError: forward-mode differentiation; the message names `kernel`.
    """
    try:
        return f(*_vary_alike(args, args))
    except TypeError as error:
        # JAX raises here where nothing is compiled, and without a name at the end of the trace
        # where something is.
        if "forward-mode" not in str(error):
            raise
        raise TypeError(f"{kernel}: {REMEDY}") from error


def launch(kernel: str, f: Callable, *, overwrites: bool = False) -> Callable:
    """f, which launches kernels, with results that vary over the mesh axes of its arguments.

    Differentiating it raises NotImplementedError; the message names `kernel`.

    Args:
        overwrites: whether a kernel overwrites one of its arguments. Calling the result inside
            jax.shard_map(check_vma=True) then raises
            ValueError: JAX replaces the reference by values whose types name no mesh axis, and
            refuses its own result.
    """

    def launched(*args):
        if overwrites and varying(args):
            raise ValueError(
                f"{kernel}: its kernel overwrites an argument, which jax.shard_map(check_vma=True) "
                "does not support. Pass check_vma=False "
                "to jax.shard_map (gradients of replicated arrays are then not summed: use "
                "jax.lax.psum), or implementation='xla'"
            )
        return _vary_alike(args, f(*once(kernel, args)))

    return launched


def once(kernel: str, arrays: Any) -> Any:
    """`arrays`; differentiating what is computed from them raises NotImplementedError that names
    `kernel`."""
    return _once(f"{kernel}: {REMEDY}", arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _once(message, arrays):
    return arrays


@_once.defjvp
def _once_jvp(message, primals, tangents):
    raise NotImplementedError(message)


def varying(tree: Any) -> frozenset[str]:
    """The mesh axes over which an array of the tree varies, by its type; none outside
    jax.shard_map(check_vma=True)."""
    return frozenset().union(*(_varying(x) for x in jax.tree.leaves(tree)))


def _vary_alike(like, tree):
    """`tree`, whose arrays are cast to vary over every mesh axis over which one of `like` does."""
    axes = varying(like)

    def cast(x):
        missing = axes - _varying(x) if _is_array(x) else ()
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def _varying(x):
    return jax.typeof(x).manual_axis_type.varying if _is_array(x) else frozenset()


def _is_array(x):
    return isinstance(x, jax.Array | np.ndarray)
