"""Comparison of each kernel and its gradients with the definition in fp32, on this GPU.

The calls are the examples of the registry in pallas_kernels.
"""

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

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

    The examples run in threads: most of the time is compilation.
    """
    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    try:
        runs: dict[tuple[str, str], dict[str, Future]] = {}
        for operation, entry in extend.OPERATIONS.items():
            custom = [back_end.name for back_end in entry.back_ends if back_end.name not in PLAIN]
            for make, dtype in itertools.product(entry.examples, DTYPES):
                if (example := make(ROWS, dtype)) is None:
                    continue
                run = pool.submit(errors, example, custom)
                label = f"{extend.title(make)}, {jnp.dtype(dtype).name}"
                for back_end in custom:
                    runs.setdefault((operation, back_end), {})[label] = run
        for (operation, back_end), by_label in runs.items():
            found = {label: run.result()[back_end] for label, run in by_label.items()}
            yield judge(operation, back_end, found)
    finally:  # an interrupted command does not start the other examples
        pool.shutdown(cancel_futures=True)


def judge(operation: str, back_end: str, found: dict[str, float | Exception]) -> Result:
    """Return the result of one back end.

    Args:
        found: for each example in each dtype, what `errors` returns for the back end.
    """
    name, measured, refusals = f"{operation}, {back_end}", {}, []
    for label, error in found.items():
        if not isinstance(error, Exception):
            measured[label] = error
            continue
        text = (str(error).strip().splitlines() or ["no message"])[0]
        if isinstance(error, ValueError) and f"implementation '{back_end}'" in text:
            refusals.append(text.partition(f"'{back_end}' ")[2].partition(";")[0])
            continue
        what = f"{label}: {type(error).__name__}: {text}"
        return Result(name, "failed", what, _remedy(operation))
    if not measured:
        return Result(name, "ok", f"not run here: {refusals[0]}")
    worst = max(measured, key=lambda label: np.nan_to_num(measured[label], nan=np.inf))
    what = f"relative error {measured[worst]:.2%} ({worst})"
    if not measured[worst] <= LIMIT:
        return Result(name, "failed", f"{what}, expected {LIMIT:.0%} or less", _remedy(operation))
    return Result(name, "ok", what)


def errors(example: extend.Example, back_ends: Sequence[str]) -> dict[str, float | Exception]:
    """Return the largest relative error of the results and gradients of an example for each back
    end, or the exception that the back end raised."""
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.standard_normal(x.shape), x.dtype) for x in example.shapes]

    @functools.cache
    def expected():
        exact = [array.astype(jnp.float32) for array in arrays]
        return _with_gradients(example.reference, exact, example.differentiable)

    def error(back_end: str) -> float:
        call = functools.partial(example.call, implementation=back_end)
        found = _with_gradients(call, arrays, example.differentiable)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected()), strict=True)
        return max(_relative(*pair) for pair in pairs)

    found: dict[str, float | Exception] = {}
    for back_end in back_ends:
        try:
            found[back_end] = error(back_end)
        except Exception as problem:  # every error of a kernel is a result here
            found[back_end] = problem
    return found


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

    options = compiler_options()  # without them, XLA times variants of every matmul
    return jax.jit(with_gradients if differentiable else f, compiler_options=options)(*arrays)


def _relative(found, expected) -> float:
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


def _remedy(operation: str) -> str:
    return (
        f"until the kernel is repaired, call {operation} with implementation='xla' "
        "(train.py --help lists the --model options that choose back ends), and report this output"
    )
