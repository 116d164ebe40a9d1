"""Comparison of each kernel and its gradients with the definition in fp32, on this GPU.

The calls are the examples of the registry in pallas_kernels.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels  # noqa: F401  registers every operation
from gptjax.doctor.checks import Result
from pallas_kernels import extend

ROWS = 256
DTYPES = (jnp.bfloat16, jnp.float32)
# Relative error of a result or gradient in the 2-norm. Correct kernels in bf16 or TF32 are below
# 1 %; a wrong tile, mask or barrier changes a larger part.
LIMIT = 0.02
# Back ends without custom kernels.
PLAIN = ("xla", "reference")


def check_all() -> Iterator[Result]:
    """Check each back end of each operation, in threads: most of the time is compilation."""
    pairs = [
        (operation, back_end.name)
        for operation, entry in extend.OPERATIONS.items()
        for back_end in entry.back_ends
        if entry.examples and back_end.name not in PLAIN
    ]
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield from pool.map(lambda pair: check(*pair), pairs)
    finally:  # an interrupted command does not wait for the other kernels
        pool.shutdown(cancel_futures=True)


def check(operation: str, back_end: str) -> Result:
    """Compare one back end of an operation with the definition, on all examples in all dtypes."""
    name, errors, refusals = f"{operation}, {back_end}", {}, []
    for make in extend.OPERATIONS[operation].examples:
        for dtype in DTYPES:
            example = make(ROWS, dtype)
            if example is None:
                continue
            label = f"{extend.title(make)}, {jnp.dtype(dtype).name}"
            try:
                errors[label] = error(example, back_end)
            except Exception as problem:  # every error of a kernel is a result here
                text = str(problem).strip().splitlines() or ["no message"]
                if isinstance(problem, ValueError) and f"implementation '{back_end}'" in text[0]:
                    refusals.append(text[0].partition(f"'{back_end}' ")[2].partition(";")[0])
                    continue
                what = f"{label}: {type(problem).__name__}: {text[0]}"
                return Result(name, "failed", what, _remedy(operation))
    if not errors:
        return Result(name, "ok", f"not run here: {refusals[0]}")
    worst = max(errors, key=lambda label: np.nan_to_num(errors[label], nan=np.inf))
    found = f"relative error {errors[worst]:.2%} ({worst})"
    if not errors[worst] <= LIMIT:
        return Result(name, "failed", f"{found}, expected {LIMIT:.0%} or less", _remedy(operation))
    return Result(name, "ok", found)


def error(example: extend.Example, back_end: str) -> float:
    """Return the largest relative error of the results and gradients of an example.

    Raises:
        ValueError: the back end does not support the example.
    """
    keys = jax.random.split(jax.random.key(0), len(example.shapes))
    shapes = zip(keys, example.shapes, strict=True)
    arrays = [jax.random.normal(key, shape.shape, shape.dtype) for key, shape in shapes]
    call = lambda *arrays: example.call(*arrays, implementation=back_end)  # noqa: E731
    found = _with_gradients(call, arrays, example.differentiable)
    exact = [array.astype(jnp.float32) for array in arrays]
    expected = _with_gradients(example.reference, exact, example.differentiable)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(_relative(*pair) for pair in pairs)


def _with_gradients(f, arrays, differentiable: bool):
    """Return the results, and the gradients of the inner product of results and random
    directions."""

    def directions(out):
        leaves, structure = jax.tree.flatten(out)
        # bf16 numbers, so that the directions are the same in every dtype.
        made = [
            jax.random.normal(jax.random.key(i), leaf.shape, jnp.bfloat16).astype(leaf.dtype)
            for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, made)

    def with_gradients(*arrays):
        out, pull = jax.vjp(f, *arrays)
        return out, pull(directions(out))

    return jax.jit(with_gradients if differentiable else f)(*arrays)


def _relative(found, expected) -> float:
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


def _remedy(operation: str) -> str:
    return (
        f"until the kernel is repaired, call {operation} with implementation='xla' "
        "(train.py --help lists the --model options that choose back ends), and report this output"
    )
