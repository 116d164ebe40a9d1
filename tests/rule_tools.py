"""The 2× rule: a kernel's error is at most twice the error of plain JAX, both measured from the
definition."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from reference.attention import at_once
from reference.torch_gpt2 import assert_within_twice, max_abs, rms


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


def check(
    f: Callable,
    same_dtype: Callable,
    reference: Callable,
    args: tuple,
    *,
    argnums: tuple[int, ...] = (0,),
    names: tuple[str, ...] | None = None,
    seed: int = 0,
) -> None:
    """|f − reference| ≤ 2 · |same_dtype − reference| + 1e-6 for every output and every gradient, in
    RMS and at the worst place.

    The gradients are those of a fixed random direction in the outputs (as they are rounded to their
    dtype).

    Args:
        f: what is tested; it is compiled.
        same_dtype: the plain way in the inputs' dtype; it rounds where it says.
        reference: the definition; gets the floating-point arguments in fp32.
        args: arrays.
        argnums: of the arguments whose gradients are compared.
        names: of those arguments, for the error; `argument 0` and so on when None.
    """
    outputs = jax.eval_shape(f, *args)
    rng = np.random.default_rng(seed)
    directions = jax.tree.map(lambda o: jnp.asarray(rng.standard_normal(o.shape), o.dtype), outputs)

    def with_gradients(f, args):
        def of(*chosen):
            full = list(args)
            for i, value in zip(argnums, chosen, strict=True):
                full[i] = value
            return f(*full)

        out, pull = jax.vjp(of, *[args[i] for i in argnums])
        return out, pull(jax.tree.map(lambda d, o: d.astype(o.dtype), directions, out))

    fp32 = [a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in args]
    found = jax.jit(functools.partial(with_gradients, f))(list(args))
    theirs = run_reference(functools.partial(with_gradients, same_dtype), list(args))
    true = at_once(functools.partial(with_gradients, reference))(fp32)
    labels = [f"output {i}" for i in range(len(jax.tree.leaves(outputs)))]
    labels += [
        f"gradient of {names[i] if names else f'argument {argnums[i]}'}"
        for i in range(len(argnums))
    ]
    for label, ours, plain, exact in zip(
        labels, jax.tree.leaves(found), jax.tree.leaves(theirs), jax.tree.leaves(true), strict=True
    ):
        for norm in (rms, max_abs):
            assert_within_twice(ours, plain, exact, norm=norm, name=label)
