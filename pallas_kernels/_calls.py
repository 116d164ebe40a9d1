"""Kernel launches and `jax.custom_vjp` functions under JAX's transformations.

- Differentiation: `differentiable` calls a `jax.custom_vjp` function; a launch has no derivative.
- `jax.vmap`: `looped` launches once for each element, `batched` once in all.
- `jax.shard_map` with the default check_vma=True: the type of each array names the mesh axes over
  which the values vary. `jax.custom_vjp` rules and launches do not convert these types: the
  functions of this module convert the types.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels._partition import Rule, sharded

REMEDY = (
    "kernels are differentiable once, in reverse mode (jax.grad, jax.vjp); forward-mode "
    "differentiation (jax.jvp, jax.jacfwd, jax.linearize) needs implementation='reference'; second "
    "derivatives (jax.jvp or jax.grad of jax.grad) need 'xla' or 'reference'"
)


def differentiable(operation: str, f: Callable, *args: Any) -> Any:
    """Call a `jax.custom_vjp` function f with arrays and static options.

    All arrays are first cast to vary over the same mesh axes. JAX transposes this cast to the sum
    over devices that completes the gradient of a replicated array.

    Args:
        operation: name of the public function, for errors.

    Raises:
        TypeError: forward-mode differentiation; the message names `operation`.
    """
    try:
        return f(*vary_alike(args, args))
    except TypeError as error:
        # Outside jit, JAX raises here. Under jit, JAX raises at the end of the trace, without the
        # name of the operation.
        if "forward-mode" not in str(error):
            raise
        raise TypeError(f"{operation}: {REMEDY}") from error


def saved(operation: str, arrays: Any) -> Any:
    """Name results of a forward pass that its backward pass or the next operation reads.

    `jax.checkpoint_policies.save_only_these_names(operation)` saves the results, and the backward
    pass of `jax.checkpoint` does not compute them again.
    """
    return jax.tree.map(lambda x: checkpoint_name(x, operation), arrays)


def looped(
    operation: str, f: Callable, *, rule: Rule | None = None, overwrites: bool = False
) -> Callable:
    """Wrap f, which launches kernels. `jax.vmap` launches the kernels once for each element.

    Differentiating the result raises NotImplementedError.

    Args:
        operation: name of the public function, for errors.
        rule: axes of the arrays, for arrays that the compiler may shard. An axis of `jax.vmap` may
            be sharded, too.
        overwrites: whether a kernel overwrites one of its arguments. Calling the result inside
            jax.shard_map(check_vma=True) then raises ValueError: JAX discharges the Ref to values
            whose types name no mesh axis, and refuses these types.
    """
    return _launch(operation, _each(f, rule), overwrites)


def _each(f: Callable, rule: Rule | None, depth: int = 0) -> Callable:
    """Wrap f: `jax.vmap` calls f once for each element, on the device that has the element."""

    # A new object at each call: JAX caches the trace of f, and f depends on the default device.
    @jax.custom_batching.custom_vmap
    def launch(*args):
        return sharded(f, rule)(*args)

    @launch.def_vmap
    def _loop(size, is_batched, *args):
        flags = jax.tree.leaves(is_batched)

        def f_mapped(*args):
            arrays, structure = jax.tree.flatten(args)

            def one(mapped):
                rest = iter(mapped)
                chosen = [next(rest) if flag else x for x, flag in zip(arrays, flags, strict=True)]
                return f(*jax.tree.unflatten(structure, chosen))

            return jax.lax.map(one, [x for x, flag in zip(arrays, flags, strict=True) if flag])

        longer = None if rule is None else rule.mapped(f"v{depth}", _flags(args, flags))
        out = _each(f_mapped, longer, depth + 1)(*args)
        return out, jax.tree.map(lambda _: True, out)

    return launch


def _flags(args: Any, flags: list[bool]) -> list[bool]:
    """Return a flag for each argument: False for one that is None."""
    rest = iter(flags)
    leaves = jax.tree.leaves(args, is_leaf=lambda x: x is None)
    return [x is not None and next(rest) for x in leaves]


def batched(operation: str, f: Callable, *, rule: Rule, overwrites: bool = False) -> Callable:
    """Wrap f, which launches kernels. `jax.vmap` launches the kernels once for all elements: it
    adds an axis to the axes of the name with a star.

    If `jax.vmap` maps an argument without this name, the kernels are launched in a loop.

    Args:
        operation, rule, overwrites: as in `looped`. The name with a star is the first axis of
            arguments and results.
    """

    @jax.custom_batching.custom_vmap
    def launch(*args):
        return sharded(f, rule)(*args)

    @launch.def_vmap
    def _longer_batch(size, is_batched, *args):
        arrays, structure = jax.tree.flatten(args, is_leaf=lambda x: x is None)
        flags = _flags(args, jax.tree.leaves(is_batched))
        starred = ["*" in "".join(names) for names in rule.sides[0]]
        if any(flag and not star for flag, star in zip(flags, starred, strict=True)):
            axes = jax.tree.map(lambda flag: 0 if flag else None, tuple(is_batched))
            out = jax.vmap(_each(f, rule), axes)(*args)
        else:
            for i, x in enumerate(arrays):
                if starred[i] and not flags[i] and x is not None:
                    arrays[i] = jnp.broadcast_to(x[None], (size, *x.shape))
            out = launch(*jax.tree.unflatten(structure, arrays))
        return out, jax.tree.map(lambda _: True, out)

    return _launch(operation, launch, overwrites)


def _launch(operation, f, overwrites):
    """Wrap f: the results vary over the mesh axes over which the arguments vary."""

    def launched(*args):
        if overwrites and varying(args):
            raise ValueError(
                f"{operation}: its kernel overwrites an argument, which "
                "jax.shard_map(check_vma=True) does not support. Pass check_vma=False to "
                "jax.shard_map (gradients of replicated arrays are then not summed: use "
                "jax.lax.psum), or implementation='xla'"
            )
        return vary_alike(args, f(*once(operation, args)))

    return launched


def once(operation: str, arrays: Any, remedy: str = REMEDY) -> Any:
    """Return `arrays`. Differentiation through the result raises NotImplementedError, and the
    message names `operation` and `remedy`."""
    return _once(f"{operation}: {remedy}", arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _once(message, arrays):
    return arrays


@_once.defjvp
def _once_jvp(message, primals, tangents):
    raise NotImplementedError(message)


def varying(tree: Any) -> frozenset[str]:
    """Return the mesh axes over which an array of the tree varies, by the arrays' types. The result
    is empty outside jax.shard_map(check_vma=True)."""
    return frozenset().union(*(_varying(x) for x in jax.tree.leaves(tree)))


def vary_alike(like, tree):
    """Cast the arrays of `tree` to vary over all mesh axes over which the arrays of `like` vary."""
    axes = varying(like)

    def cast(x):
        missing = axes - _varying(x) if _is_array(x) else ()
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def _varying(x):
    return jax.typeof(x).manual_axis_type.varying if _is_array(x) else frozenset()


def _is_array(x):
    return isinstance(x, jax.Array | np.ndarray)
