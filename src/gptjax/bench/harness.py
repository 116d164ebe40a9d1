"""Device time of one operation in several implementations, compared with the GPU's own ceilings.

One executable (one CUDA graph in PyTorch) calls an implementation on several sets of inputs, one
call after the other, with separate memory for each result: neither the host nor the L2 cache is
measured. The executable is long enough that its launch, 35 µs, does not count. It runs for about
`SECONDS`, rests, and runs again, `ROUNDS` times. The result is the time of the median round divided
by the number of calls. With `Case.alternate` the rounds of the implementations alternate. Without
the rests an H200 that runs matmuls reaches its 700 W and slows from 1980 to 1470 MHz: an 8192³ bf16
matmul then has 690 TFLOP/s, not 800.
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
# The number of sets of inputs: with their outputs they hold many times the 60 MB L2 of an H200, and
# a call on each takes about this long at the rates of an H200, within the limits below.
ROTATED_BYTES = 2e9
PROGRAM_SECONDS = 3e-3
MOST_SETS = 40
MOST_BYTES = 24e9


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation at one shape: its implementations, and the bytes and FLOPs that it needs at
    least."""

    kernel: str
    name: str
    make: Callable[[jax.Array], tuple]
    """A random key → one set of inputs."""
    run: dict[str, Callable]
    """Name → a jittable function of the inputs, for each implementation in JAX."""
    prepare: dict[str, Callable] = dataclasses.field(default_factory=dict)
    """Name → a jittable function from the inputs to this implementation's inputs; not timed."""
    torch: dict[str, Callable] = dataclasses.field(default_factory=dict)
    """Name → a function of the module torch that returns a function of the same inputs as CUDA
    tensors."""
    bytes: float | int = 0
    """Each input read once and each output written once."""
    flops: float | int = 0
    bound: str = "memory"
    """The ceiling: "memory", a device copy, or "bf16", a matmul."""
    in_place: bool = False
    """The first output replaces the first input."""
    alternate: bool = False
    """All implementations in JAX are in memory together, and their rounds alternate."""
    bar: str = ""
    """The target, in words."""


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The rates of this GPU, measured in the same run."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, case: Case) -> float:
        """Return the minimum time of a case."""
        return (
            case.bytes / self.bytes_per_s
            if case.bound == "memory"
            else case.flops / self.flops_per_s
        )


def ceilings(*, torch: bool) -> Ceilings:
    """Measure the rate of a device copy of 4 GiB (bytes read and written), and of an 8192³ bf16
    matmul.

    Args:
        torch: also measure PyTorch's copy and matmul, and return the faster. PyTorch's copy, the
            driver's own, is 4 % faster than XLA's on an H200.
    """
    copy = Case(
        kernel="ceiling", name="copy", make=lambda key: (_normal(key, 2**31),), run={}, bytes=2**33
    )
    matmul = Case(
        kernel="ceiling",
        name="matmul",
        make=lambda key: tuple(_normal(k, 8192, 8192) for k in jax.random.split(key)),
        run={"xla": jnp.matmul},
        flops=2 * 8192**3,
        bound="bf16",
    )
    copies, matmuls = [seconds(jnp.copy, copy)], [seconds(jnp.matmul, matmul)]
    if torch:
        copies.append(_torch_copy_seconds(copy))
        matmuls.append(torch_seconds(lambda torch: torch.matmul, matmul))
    return Ceilings(bytes_per_s=copy.bytes / min(copies), flops_per_s=matmul.flops / min(matmuls))


def _normal(key, *shape):
    return jax.random.normal(key, shape, jnp.bfloat16)


def _torch_copy_seconds(case: Case) -> float:
    import torch

    (source,) = _to_torch(torch, case.make(jax.random.key(0)))
    target = torch.empty_like(source)
    # Not in a CUDA graph: there the driver copies with another engine, at two thirds of the rate.
    return _median_seconds(_torch_runs(torch, lambda: target.copy_(source)))[0]


def seconds(f: Callable, case: Case, prepare: Callable | None = None) -> float:
    """Return the device time of one call of a JAX implementation.

    Args:
        prepare: one of `case.prepare`.
    """
    run, calls = _jax_runs(f, case, prepare)
    return _median_seconds(run)[0] / calls


def alternating_seconds(case: Case) -> dict[str, float]:
    """Return the device time of one call of each JAX implementation; their rounds alternate."""
    made = [_jax_runs(f, case, case.prepare.get(name)) for name, f in case.run.items()]
    medians = _median_seconds(*(run for run, _ in made))
    return {
        name: median / calls
        for name, median, (_, calls) in zip(case.run, medians, made, strict=True)
    }


def _jax_runs(
    f: Callable, case: Case, prepare: Callable | None
) -> tuple[Callable[[int], float], int]:
    """Return a function: number of executions of a program → their seconds, and the program's
    number of calls of `f`."""
    sets = _input_sets(f, case, prepare)
    firsts, rests = [s[0] for s in sets], [s[1:] for s in sets]
    del sets
    call = jax.jit(f)  # lowered once, for all calls

    def program(firsts, rests, old_outputs):
        # All outputs are returned: the compiler removes a result that is not used.
        outputs, last = [], jnp.zeros(())
        for first, rest in zip(firsts, rests, strict=True):
            # Each call waits for the one before: no calls in parallel, no fusion between calls.
            (first, *rest), last = jax.lax.optimization_barrier(((first, *rest), last))
            outputs.append(call(first, *rest))
            last = jax.tree.leaves(outputs[-1])[0]
        return outputs

    # The outputs reuse the memory of the last ones: the host runs many executions ahead, and each
    # would allocate its own.
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

    def run(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            out = step()
        jax.block_until_ready(out)
        return time.perf_counter() - started

    return run, len(rests)


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


def _median_seconds(*runs: Callable[[int], float]) -> list[float]:
    """Return the seconds of one execution of each program in its median round."""
    for run in runs:
        run(1)  # compiles
    time.sleep(REST_SECONDS)
    times = [max(1, min(400, round(SECONDS / (run(2) / 2)))) for run in runs]
    rounds = []
    for _ in range(ROUNDS):
        rounds.append([])
        for run, count in zip(runs, times, strict=True):
            time.sleep(REST_SECONDS)
            rounds[-1].append(run(count) / count)
    return [statistics.median(of_run) for of_run in zip(*rounds, strict=True)]


def torch_seconds(make_f: Callable, case: Case) -> float:
    """Return the device time of one call of a PyTorch implementation: the same sets of inputs,
    replayed as one CUDA graph."""
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
        # Kept until the end of the capture: each result has separate memory, as in JAX.
        kept = [f(*inputs) for inputs in sets]
    found = _median_seconds(_torch_runs(torch, graph.replay))[0] / len(sets)
    del graph, sets, kept
    torch.cuda.empty_cache()
    return found


def _torch_runs(torch, f: Callable) -> Callable[[int], float]:
    """Return a function: number of calls → their seconds on the device."""

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
