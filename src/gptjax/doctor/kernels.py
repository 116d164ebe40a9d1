"""Comparison of the registry's examples and their gradients with the definition in fp32."""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels  # noqa: F401  registers every operation
from gptjax.doctor.checks import Result
from gptjax.terminal import first_line
from gptjax.training.compilation import compiler_options
from pallas_kernels import extend

ROWS = 256
DTYPES = (jnp.bfloat16, jnp.float32)
# Relative error of a result or gradient in the 2-norm. Correct kernels in bf16 or TF32 are below
# 1 %; a wrong tile, mask or barrier changes a larger part.
LIMIT = 0.02
# XLA captures cuDNN's launches in a CUDA graph. A launch of another thread during the capture can
# make the capture fail.
_RUNNING = threading.Lock()


def check_all() -> Iterator[Result]:
    """Check each back end of each operation, in threads: most of the time is compilation."""
    pairs = [
        (operation, back_end.name)
        for operation, entry in extend.OPERATIONS.items()
        for back_end in entry.back_ends
        if back_end.name not in ("xla", "reference") and entry.examples
    ]
    with ThreadPoolExecutor(16) as pool:
        yield from pool.map(lambda pair: check(*pair), pairs)


def check(operation: str, back_end: str) -> Result:
    """Check one back end with all examples of an operation."""
    name, measured, refusal = f"{operation}, {back_end}", {}, "no example"
    remedy = f"call {operation} with implementation='xla', and report this output"
    for make, dtype in itertools.product(extend.OPERATIONS[operation].examples, DTYPES):
        if (example := make(ROWS, dtype)) is None:
            continue
        label = f"{extend.title(make)}, {jnp.dtype(dtype).name}"
        try:
            measured[label] = relative_error(example, back_end)
        except Exception as error:  # every error of a kernel is a result here
            text = first_line(error)
            if not isinstance(error, ValueError) or f"implementation '{back_end}'" not in text:
                return Result(name, "failed", f"{label}: {text}", remedy)
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
    arrays = [random.standard_normal(x.shape).astype(x.dtype) for x in example.shapes]
    exact = [x if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(np.float32) for x in arrays]
    options = compiler_options()  # without them, XLA times variants of every matmul
    pairs = ((back_end, arrays), (None, exact))
    compiled = [
        jax.jit(complete(example, f)).lower(*x).compile(compiler_options=options) for f, x in pairs
    ]
    with _RUNNING:
        results = jax.device_get([f(*x) for f, (_, x) in zip(compiled, pairs, strict=True)])
    errors = []
    for pair in zip(*map(jax.tree.leaves, results), strict=True):
        x, y = (np.asarray(array, np.float64) for array in pair)
        errors.append(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))
    return float(max(errors))


def complete(example: extend.Example, back_end: str | None) -> Callable:
    """Return the function that computes an example in a back end, or its definition, and the
    gradients of the inner product of the results with random directions, if there are gradients."""
    f = example.reference
    if back_end is not None:
        f = functools.partial(example.call, implementation=back_end)
    if not example.differentiable:
        return f

    def with_gradients(*arrays):
        out, pull = jax.vjp(f, *arrays)
        keys = map(jax.random.key, itertools.count())
        # bf16 numbers, so that the directions are the same in every dtype.
        directions = jax.tree.map(
            lambda x: jax.random.normal(next(keys), x.shape, jnp.bfloat16).astype(x.dtype), out
        )
        return out, pull(directions)

    return with_gradients
