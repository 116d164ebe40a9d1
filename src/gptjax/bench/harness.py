"""Times of steps that run without a pause, and of kernels that rest in between.

An H200 that runs matmuls without a pause reaches its 700 W and slows from 1980 to 1470 MHz: an
8192³ bf16 matmul then has 690 TFLOP/s, not 800. A training step runs without a pause: `sustained`
warms up for `WARM_UP_SECONDS`, then measures consecutive rounds.

A kernel is measured at its full clock, compared with the GPU's own ceilings. One executable calls
an implementation on several sets of inputs, one call after the other, with separate memory for
each result: neither the host nor the L2 cache is measured. The executable is long enough that its
launch does not count: if one call on each set is too short, a loop repeats the calls. It runs for
about `SECONDS`, rests, and runs again, `ROUNDS` times. The result is the time of the median round
divided by the number of calls.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from gptjax.bench import BenchError, results

WARM_UP_SECONDS = 1.0
SUSTAINED_ROUNDS = 5
ROUNDS = 7
SECONDS = 0.02
REST_SECONDS = 0.05
# The number of sets of inputs: with their outputs they hold many times the 60 MB L2 of an H200, and
# a call on each takes about this long at the rates of an H200, within the limits below.
ROTATED_BYTES = 2e9
PROGRAM_SECONDS = 3e-3
MOST_SETS = 40
MOST_BYTES = 24e9
MOST_REPEATS = 50


def one_device() -> jax.Device:
    """Return JAX's first device, which all measurements of one device use."""
    return jax.config.jax_default_device or jax.devices()[0]


def first_devices(count: int) -> list[jax.Device]:
    """Return the first `count` devices; one device is `one_device`.

    Raises:
        BenchError: there are fewer.
    """
    available = len(jax.devices())
    if not 1 <= count <= available:
        raise BenchError(f"--devices {count}: expected 1 to {available}")
    return jax.devices()[:count] if count > 1 else [one_device()]


def timed_result(script: str, rows: list[dict], **fields: Any) -> dict:
    """Return the result of a script that measures times; `script` is that of `results.command`."""
    how = {"device": one_device().device_kind, "packages": ("jax-triton", "triton", "torch")}
    return results.new(results.command(script), rows, **how, **fields)


def sustained(run: Callable[[int], float], *, seconds: float) -> list[float]:
    """Return the seconds of a step in each of several consecutive rounds, after a warm-up.

    Args:
        run: number of steps → their seconds.
        seconds: of all rounds together.
    """
    run(1)  # the first step may compile or allocate
    once = run(1)
    warm_up = max(1, round(WARM_UP_SECONDS / once))
    once = run(warm_up) / warm_up
    rounds = max(1, min(SUSTAINED_ROUNDS, round(seconds / once)))
    steps = max(1, round(seconds / once / rounds))
    return [run(steps) / steps for _ in range(rounds)]


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
    tensors; benchmarks/rivals/kernels.py measures it."""
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


def normal(
    key: jax.Array, *shapes: tuple[int, ...], dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> tuple[jax.Array, ...]:
    """Return normal arrays of these shapes, for `Case.make`."""
    keys = jax.random.split(key, len(shapes))
    return tuple(jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))


def passes(f: Callable, both: bool = True) -> Callable:
    """Return a function of the gradient of f's output and the inputs of f: the output and, with
    `both`, the gradients of the inputs."""

    def run(dy, *inputs):
        if not both:
            return f(*inputs)
        y, pull = jax.vjp(f, *inputs)
        return y, *pull(dy)

    return run


def passes_in_torch(torch: Any, f: Callable) -> Callable:
    """Return `passes` of a function of PyTorch's tensors."""

    def run(dy, *inputs):
        inputs = [x.requires_grad_(True) for x in inputs]
        y = f(*inputs)
        return y.detach(), *torch.autograd.grad(y, inputs, dy)

    return run


def eager_and_compiled(make: Callable[[Any], Callable]) -> dict[str, Callable]:
    """Return `Case.torch` of a function, as it is and compiled."""
    return {"torch": make, "torch.compile": lambda torch: torch.compile(make(torch))}


COPY = Case(
    kernel="ceiling",
    name="copy of 4 GiB",
    make=lambda key: (jax.random.normal(key, (2**31,), jnp.bfloat16),),
    run={"xla": jnp.copy},
    bytes=2**33,
)
MATMUL = Case(
    kernel="ceiling",
    name="8192³ bf16",
    make=lambda key: tuple(jax.random.normal(key, (2, 8192, 8192), jnp.bfloat16)),
    run={"xla": jnp.matmul},
    flops=2 * 8192**3,
    bound="bf16",
)


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The rates of this GPU: of a device copy (bytes read and written), and of a bf16 matmul."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, case: Case) -> float:
        """Return the minimum time of a case."""
        if case.bound == "memory":
            return case.bytes / self.bytes_per_s
        return case.flops / self.flops_per_s


def ceilings() -> Ceilings:
    """Measure the ceilings of this GPU."""
    copy, matmul = (seconds(case, ["xla"])["xla"] for case in (COPY, MATMUL))
    return Ceilings(bytes_per_s=COPY.bytes / copy, flops_per_s=MATMUL.flops / matmul)


def seconds(case: Case, names: Iterable[str]) -> dict[str, float]:
    """Return the device time of one call of each named implementation in JAX; their rounds
    alternate."""
    made = [_jax_runs(case.run[name], case, case.prepare.get(name)) for name in names]
    medians = median_seconds(*(run for run, _ in made))
    return {
        name: median / calls for name, median, (_, calls) in zip(names, medians, made, strict=True)
    }


def _jax_runs(
    f: Callable, case: Case, prepare: Callable | None
) -> tuple[Callable[[int], float], int]:
    """Return a function: number of executions of a program → their seconds, and the program's
    number of calls of `f`."""
    sets = input_sets(f, case, prepare)
    firsts, *rests = zip(*sets, strict=True)
    # The host starts a program with this many arrays slower than a GPU runs a few short calls.
    repeats = 1 if case.in_place else math.ceil(PROGRAM_SECONDS / _floor_seconds(case) / len(sets))
    repeats = max(1, min(MOST_REPEATS, repeats))
    call = jax.jit(f)  # lowered once, for all calls

    def once(firsts, rests, last):
        # All outputs are returned: the compiler removes a result that is not used.
        outputs = []
        for inputs in zip(firsts, *rests, strict=True):
            # Each call waits for the one before: no calls in parallel, no fusion between calls.
            inputs, last = jax.lax.optimization_barrier((inputs, last))
            outputs.append(call(*inputs))
            last = jax.tree.leaves(outputs[-1])[0]
        return outputs

    def program(firsts, rests, old_outputs):
        if repeats == 1:
            return once(firsts, rests, jnp.zeros(()))

        def again(_, outputs):
            return once(firsts, rests, jax.tree.leaves(outputs[-1])[0])

        return jax.lax.fori_loop(0, repeats, again, old_outputs)

    # The outputs reuse the memory of the last ones: the host runs many executions ahead, and each
    # would allocate its own.
    program = jax.jit(program, donate_argnums=(0, 2) if case.in_place else 2, keep_unused=True)
    outputs = None
    if not case.in_place:
        inputs = [x[0] for x in (firsts, *rests)]
        one = jax.eval_shape(call, *inputs)
        if len(jax.tree.leaves(inputs)[0].sharding.device_set) > 1:
            # Outputs without their sharding would make the second execution compile again.
            one = call(*inputs)
        outputs = [jax.tree.map(jnp.zeros_like, one) for _ in sets]

    def run(times: int) -> float:
        nonlocal firsts, outputs
        started = time.perf_counter()
        for _ in range(times):
            made = program(firsts, rests, outputs)
            if case.in_place:
                firsts = tuple(jax.tree.leaves(output)[0] for output in made)
            else:
                outputs = made
        jax.block_until_ready(made)
        return time.perf_counter() - started

    return run, repeats * len(sets)


def input_sets(f: Callable, case: Case, prepare: Callable | None = None) -> list[tuple]:
    """Return enough sets of inputs for one execution of the program."""
    prepare = jax.jit(prepare) if prepare else lambda *inputs: inputs
    first = prepare(*case.make(jax.random.key(0)))
    size = _nbytes(first) + _nbytes(jax.eval_shape(f, *first))
    wanted = max(ROTATED_BYTES / size, PROGRAM_SECONDS / _floor_seconds(case))
    count = max(1, min(math.ceil(wanted), MOST_SETS, int(MOST_BYTES / size)))
    return [first] + [prepare(*case.make(jax.random.key(i))) for i in range(1, count)]


def _floor_seconds(case: Case) -> float:
    """Return the time of a call at the rates of an H200."""
    return max(case.bytes / 4.2e12, case.flops / 8e14)


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def median_seconds(*runs: Callable[[int], float]) -> list[float]:
    """Return the seconds of one execution of each program in its median round."""
    for run in runs:
        run(2)  # compiles, a second time where the outputs are sharded
    time.sleep(REST_SECONDS)
    times = [max(1, min(400, round(SECONDS / (run(2) / 2)))) for run in runs]
    rounds = []
    for _ in range(ROUNDS):
        rounds.append([])
        for run, count in zip(runs, times, strict=True):
            time.sleep(REST_SECONDS)
            rounds[-1].append(run(count) / count)
    return [statistics.median(of_run) for of_run in zip(*rounds, strict=True)]
