"""Comparison of each kernel and its gradients with the definition in fp32, on this GPU.

The calls are the examples of the registry in pallas_kernels.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels  # noqa: F401  registers every operation
from gptjax.doctor.checks import Result
from gptjax.training.compilation import compiler_options
from pallas_kernels import extend

ROWS = 256
DTYPES = (jnp.bfloat16, jnp.float32)
# Relative error of a result or gradient in the 2-norm. Correct kernels in bf16 or TF32 are below
# 1 %; a wrong tile, mask or barrier changes a larger part.
LIMIT = 0.02
# Most examples that compile at the same time. Each needs memory on the host and on the GPU.
THREADS = 16
# Back ends without custom kernels.
PLAIN = ("xla", "reference")


def check_all() -> Iterator[Result]:
    """Check each back end of each operation.

    The checks run in threads: most of the time is compilation.
    """
    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    try:
        runs = [
            pool.submit(check, operation, back_end.name, entry.examples)
            for operation, entry in extend.OPERATIONS.items()
            for back_end in entry.back_ends
            if back_end.name not in PLAIN and entry.examples
        ]
        for run in runs:
            yield run.result()
    finally:  # an interrupted command does not start the other examples
        pool.shutdown(cancel_futures=True)


def check(operation: str, back_end: str, examples: Sequence[Callable]) -> Result:
    """Check one back end with all examples of an operation."""
    name, measured, refusal = f"{operation}, {back_end}", {}, "no example"
    remedy = (
        f"until the kernel is repaired, call {operation} with implementation='xla' "
        "(train.py --help lists the --model options that choose back ends), and report this output"
    )
    for make, dtype in itertools.product(examples, DTYPES):
        if (example := make(ROWS, dtype)) is None:
            continue
        label = f"{extend.title(make)}, {jnp.dtype(dtype).name}"
        try:
            measured[label] = relative_error(example, back_end)
        except Exception as error:  # every error of a kernel is a result here
            text = (str(error).strip().splitlines() or ["no message"])[0]
            if not isinstance(error, ValueError) or f"implementation '{back_end}'" not in text:
                what = f"{label}: {type(error).__name__}: {text}"
                return Result(name, "failed", what, remedy)
            refusal = text.partition(f"'{back_end}' ")[2].partition(";")[0]
    if not measured:
        return Result(name, "ok", f"not run here: {refusal}")
    worst = max(measured, key=lambda label: np.nan_to_num(measured[label], nan=np.inf))
    what = f"relative error {measured[worst]:.2%} ({worst})"
    if not measured[worst] <= LIMIT:
        return Result(name, "failed", f"{what}, expected {LIMIT:.0%} or less", remedy)
    return Result(name, "ok", what)


def relative_error(example: extend.Example, back_end: str) -> float:
    """Return the largest relative error of the results and gradients of an example."""
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.standard_normal(x.shape), x.dtype) for x in example.shapes]
    exact = [array.astype(jnp.float32) for array in arrays]
    call = functools.partial(example.call, implementation=back_end)
    found = _with_gradients(call, arrays, example.differentiable)
    expected = _with_gradients(example.reference, exact, example.differentiable)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(_relative(*pair) for pair in pairs)


def _with_gradients(f, arrays, differentiable: bool):
    """Return the results, and the gradients of their inner product with random directions."""

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

    options = compiler_options()  # without them, XLA times variants of every matmul
    return jax.jit(with_gradients if differentiable else f, compiler_options=options)(*arrays)


def _relative(found, expected) -> float:
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))
