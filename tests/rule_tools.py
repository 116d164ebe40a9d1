"""The 2× rule: a kernel's error is at most twice the error of plain JAX, both measured from the
definition in fp64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison_tools import assert_within_twice, max_abs, rms
from kernel_tools import unchecked
from reference.attention import at_once


def run_reference(f: Callable, *args: Any) -> Any:
    """Return `f(*args)`, with every result rounded to its dtype.

    `f` is one executable on a CPU, unless an argument is fp16: LLVM leaves out roundings to fp16
    within a fusion. On a GPU, XLA adds a bias to a matmul before the matmul is rounded. There and
    in fp16, `f` runs operation by operation.
    """
    leaves = jax.tree.leaves(args)
    on_cpu = all(device.platform == "cpu" for leaf in leaves for device in leaf.devices())
    if on_cpu and all(leaf.dtype != jnp.float16 for leaf in leaves):
        return at_once(f)(*args)
    return f(*args)


def in_fp64(f: Callable, *args: Any) -> Any:
    """Return `f(*args)` in fp64, as NumPy arrays: while f is traced, `jnp.float32`, to which
    definitions cast, is `jnp.float64`."""
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
    ):
        patch.setattr(jnp, "float32", jnp.float64)
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64) if is_float(x) else x, args)
        return jax.device_get(at_once(f)(*wide))


def is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def with_gradients(f: Callable, argnums: tuple[int, ...] | None = None) -> Callable:
    """Return a function of arrays and directions: results, and gradients of their product.

    Args:
        argnums: the arrays whose gradients are returned; those of floating-point numbers if None.
    """

    def run(args, directions):
        chosen = [i for i, x in enumerate(args) if is_float(x)] if argnums is None else argnums

        def of(*values):
            full = list(args)
            for i, value in zip(chosen, values, strict=True):
                full[i] = value
            return f(*full)

        out, pull = jax.vjp(of, *[args[i] for i in chosen])
        return out, pull(jax.tree.map(lambda d, o: d.astype(o.dtype), directions, out))

    return run


def check(
    f: Callable,
    same_dtype: Callable,
    reference: Callable,
    args: tuple,
    *,
    argnums: tuple[int, ...] | None = None,
    directions: Any = None,
    norms: tuple[Callable, ...] = (rms, max_abs),
    seed: int = 0,
    eager: bool = False,
) -> Any:
    """|f − reference| ≤ 2 · |same_dtype − reference| + 1e-6 for every output and every gradient, in
    RMS and at the worst place. Return the results and gradients of `f`.

    The gradients are those of a direction in the outputs (as they are rounded to their dtype).

    Args:
        f: what is tested; it is compiled.
        same_dtype: the plain way in the inputs' dtype; it rounds where it says.
        reference: the definition; it casts to `jnp.float32`, and is evaluated in fp64.
        args: arrays.
        argnums: of the arguments whose gradients are compared; those of floating-point numbers if
            None.
        directions: as the outputs; random ones if None.
        eager: whether `same_dtype` runs operation by operation: XLA does not round a bf16 matmul
            that is converted to fp32.
    """
    if directions is None:
        rng = np.random.default_rng(seed)
        draw = lambda o: jnp.asarray(rng.standard_normal(o.shape), o.dtype)
        directions = jax.tree.map(draw, jax.eval_shape(f, *args))
    found = jax.jit(with_gradients(f, argnums))(args, directions)
    plain = with_gradients(same_dtype, argnums)
    theirs = plain(args, directions) if eager else run_reference(plain, args, directions)
    true = in_fp64(with_gradients(unchecked(reference), argnums), args, directions)
    labels = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(found)]
    leaves = (jax.tree.leaves(tree) for tree in (found, theirs, true))
    for label, ours, other, exact in zip(labels, *leaves, strict=True):
        assert ours.dtype == other.dtype, f"{label}: {ours.dtype}, expected {other.dtype}"
        for norm in norms:
            assert_within_twice(ours, other, exact, norm=norm, name=label)
    return found


def refused(f: Callable, *args: Any, match: str, **how: Any) -> None:
    """Fail unless `f` raises ValueError with a message that matches.

    Under pytest, jaxtyping refuses some calls first.
    """
    with pytest.raises((ValueError, TypeError)):
        f(*args, **how)
    with pytest.raises(ValueError, match=match):
        unchecked(f)(*args, **how)


def runs_are_equal(f: Callable, *args: Any, times: int = 5) -> Any:
    """Fail unless compiled calls have equal bits. Return the result.

    Before each call, the memory that the allocator gives again to the results is full of NaN.
    """
    compiled = jax.jit(f).lower(*args).compile()
    floats = [o for o in jax.tree.leaves(compiled.out_info) if is_float(o)]
    results = []
    for _ in range(times):
        jax.block_until_ready([jnp.full(o.shape, jnp.nan, o.dtype) for o in floats * 3])
        results.append(jax.device_get(compiled(*args)))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)
    return results[0]
