"""Device time of one operation in several implementations, held against the machine's own ceilings.

How a time comes about: an implementation is called on several different sets of inputs in one
compiled program (one CUDA graph in PyTorch), one call after the other, results in memory of their
own, so that neither the host nor the L2 cache is measured. The program is long enough that its
start, 35 µs, does not show. It runs for about `SECONDS`, rests, and runs again, `ROUNDS` times; the
median round counts, divided by the number of calls. It rests because an H200 that multiplies
matrices without a pause reaches its 700 W and slows from 1980 to 1470 MHz: an 8192³ bf16 product
then has 690 TFLOP/s, not 800.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ROUNDS = 7
SECONDS = 0.02
REST_SECONDS = 0.05
# So many sets of inputs are made that they hold many times the 60 MB L2 of an H200 together with
# their outputs, and that a call on each takes about this long at the rates of an H200; fewer where
# the memory below or the number of calls is at its end.
ROTATED_BYTES = 2e9
PROGRAM_SECONDS = 3e-3
MOST_SETS = 40
MOST_BYTES = 24e9


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation at one shape: its implementations, and the bytes and operations that it cannot
    do without."""

    kernel: str
    name: str
    make: Callable[[jax.Array], tuple]
    """A random key → one set of inputs."""
    run: dict[str, Callable]
    """Name → a jittable function of the inputs, for each implementation in JAX."""
    prepare: dict[str, Callable] = dataclasses.field(default_factory=dict)
    """Name → a jittable function of the inputs to those that this implementation gets in their
    place; it is not timed."""
    torch: dict[str, Callable] = dataclasses.field(default_factory=dict)
    """Name → a function that is given the module torch and returns a function of the same inputs as
    CUDA tensors."""
    bytes: float | int = 0
    """Each input read once and each output written once."""
    flops: float | int = 0
    bound: str = "memory"
    """The ceiling that it is held against: "memory", a device copy, or "bf16", a matrix product."""
    in_place: bool = False
    """The first output replaces the first input."""
    bar: str = ""
    """What it should take, in words."""


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What this GPU does, measured in the same run."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, case: Case) -> float:
        """The time under which the case cannot go."""
        return (
            case.bytes / self.bytes_per_s
            if case.bound == "memory"
            else case.flops / self.flops_per_s
        )


def ceilings(*, torch: bool) -> Ceilings:
    """The rate of a device copy of 4 GiB (bytes read and written), and of an 8192³ bf16 product.

    Args:
        torch: take PyTorch's copy and product too, and the faster: its copy, the driver's own, is 4
            % faster than XLA's on an H200.
    """
    copy = Case(
        kernel="ceiling", name="copy", make=lambda key: (_normal(key, 2**31),), run={}, bytes=2**33
    )
    product = Case(
        kernel="ceiling",
        name="product",
        make=lambda key: tuple(_normal(k, 8192, 8192) for k in jax.random.split(key)),
        run={"xla": jnp.matmul},
        flops=2 * 8192**3,
        bound="bf16",
    )
    copies, products = [seconds(jnp.copy, copy)], [seconds(jnp.matmul, product)]
    if torch:
        copies.append(_torch_copy_seconds(copy))
        products.append(torch_seconds(lambda torch: torch.matmul, product))
    return Ceilings(bytes_per_s=copy.bytes / min(copies), flops_per_s=product.flops / min(products))


def _normal(key, *shape):
    return jax.random.normal(key, shape, jnp.bfloat16)


def _torch_copy_seconds(case: Case) -> float:
    import torch

    (source,) = _to_torch(torch, case.make(jax.random.key(0)))
    target = torch.empty_like(source)
    # Not in a graph: there the driver copies with another engine, at two thirds of the rate.
    return _median_seconds(_torch_runs(torch, lambda: target.copy_(source)))


def seconds(f: Callable, case: Case, prepare: Callable | None = None) -> float:
    """Device time of one call of a JAX implementation.

    Args:
        prepare: one of `case.prepare`.
    """
    sets = _input_sets(f, case, prepare)
    firsts, rests = [s[0] for s in sets], [s[1:] for s in sets]
    del sets
    call = jax.jit(f)  # lowered once, however often the program calls it

    def program(firsts, rests, old_outputs):
        # All outputs are returned: what nobody reads, the compiler leaves out.
        outputs, last = [], jnp.zeros(())
        for first, rest in zip(firsts, rests, strict=True):
            # Each call waits for the one before: calls in parallel, or fused, would be another
            # thing.
            (first, *rest), last = jax.lax.optimization_barrier(((first, *rest), last))
            outputs.append(call(first, *rest))
            last = jax.tree.leaves(outputs[-1])[0]
        return outputs

    # The outputs go where the last ones lay: the host is ahead by many programs, and each would
    # have memory of its own.
    program = jax.jit(program, donate_argnums=(0, 2) if case.in_place else 2, keep_unused=True)
    outputs = (
        None
        if case.in_place
        else jax.tree.map(jnp.zeros_like, jax.eval_shape(program, firsts, rests, None))
    )

    def step():
        nonlocal firsts, outputs
        made = program(firsts, rests, outputs)
        if case.in_place:
            firsts = [jax.tree.leaves(output)[0] for output in made]
        else:
            outputs = made
        return made

    return _seconds_of_program(step, calls=len(rests))


def _input_sets(f: Callable, case: Case, prepare: Callable | None = None) -> list[tuple]:
    prepare = jax.jit(prepare) if prepare else lambda *inputs: inputs
    first = prepare(*case.make(jax.random.key(0)))
    size = _nbytes(first) + _nbytes(jax.eval_shape(f, *first))
    once = max(case.bytes / 4.2e12, case.flops / 8e14)
    wanted = max(ROTATED_BYTES / size, PROGRAM_SECONDS / once)
    count = max(1, min(math.ceil(wanted), MOST_SETS, int(MOST_BYTES / size)))
    return [first] + [prepare(*case.make(jax.random.key(i))) for i in range(1, count)]


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _seconds_of_program(program: Callable, calls: int) -> float:
    def run(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            out = program()
        jax.block_until_ready(out)
        return time.perf_counter() - started

    return _median_seconds(run) / calls


def _median_seconds(run: Callable[[int], float]) -> float:
    run(1)  # compiles
    time.sleep(REST_SECONDS)
    times = max(1, min(400, round(SECONDS / (run(2) / 2))))
    rounds = []
    for _ in range(ROUNDS):
        time.sleep(REST_SECONDS)
        rounds.append(run(times) / times)
    return statistics.median(rounds)


def torch_seconds(make_f: Callable, case: Case) -> float:
    """Device time of one call of a PyTorch implementation: the same sets of inputs, replayed as one
    CUDA graph."""
    import torch

    f = make_f(torch)
    sets = [_to_torch(torch, inputs) for inputs in _input_sets(next(iter(case.run.values())), case)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for inputs in sets[:2]:
            f(*inputs)  # compiles, outside the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        # Kept while the others are made: each result has memory of its own, as in JAX.
        kept = [f(*inputs) for inputs in sets]
    found = _median_seconds(_torch_runs(torch, graph.replay)) / len(sets)
    del graph, sets, kept
    torch.cuda.empty_cache()
    return found


def _torch_runs(torch, f: Callable) -> Callable[[int], float]:
    """How long so many calls take on the device."""

    def run(times: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            f()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    return run


def _to_torch(torch, inputs: tuple) -> tuple:
    return tuple(torch.from_dlpack(x).clone() if isinstance(x, jax.Array) else x for x in inputs)
