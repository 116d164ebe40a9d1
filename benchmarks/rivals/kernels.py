"""Measure the kernels of `python -m gptjax.bench kernels`, and PyTorch's, in the same run.

python benchmarks/rivals/kernels.py benchmarks/kernels --out benchmarks/results/kernels
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import ClassVar

import jax
import torch

from gptjax.bench import __main__ as bench
from gptjax.bench.harness import COPY, MATMUL, Case, Ceilings, ceilings, input_sets, median_seconds
from gptjax.bench.kernels import Kernels, Rivals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside(Kernels):
    """Measure kernels, compared with XLA and PyTorch; PyTorch in the cases with a target."""

    script: ClassVar[str] = "benchmarks/rivals/kernels.py"

    def ceilings(self) -> Ceilings:
        return best(ceilings())

    def rivals(self, case: Case) -> Rivals:
        makers = case.torch if case.bar else {}
        return {name: lambda make=make: seconds(make(torch), case) for name, make in makers.items()}


def best(limits: Ceilings) -> Ceilings:
    """Return the faster of JAX's and PyTorch's rates. PyTorch's copy, the driver's own, is 4 %
    faster than XLA's on an H200."""
    (source,) = _to_torch(COPY.make(jax.random.key(0)))
    target = torch.empty_like(source)
    # Not in a CUDA graph: there the driver copies with another engine, at two thirds of the rate.
    copy = COPY.bytes / median_seconds(_runs(lambda: target.copy_(source)))[0]
    del source, target
    matmul = MATMUL.flops / seconds(torch.matmul, MATMUL)
    return Ceilings(max(limits.bytes_per_s, copy), max(limits.flops_per_s, matmul))


def seconds(f: Callable, case: Case) -> float:
    """Return the device time of one call of a function in PyTorch: the sets of inputs of JAX,
    replayed as one CUDA graph."""
    sets = [_to_torch(inputs) for inputs in input_sets(next(iter(case.run.values())), case)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for inputs in sets[:2]:
            f(*inputs)  # compiles, outside the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        # Kept until the end of the capture: each result has separate memory, as in JAX.
        kept = [f(*inputs) for inputs in sets]
    found = median_seconds(_runs(graph.replay))[0] / len(sets)
    del graph, sets, kept
    torch.cuda.empty_cache()
    return found


def _runs(f: Callable) -> Callable[[int], float]:
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


def _to_torch(inputs: tuple) -> tuple:
    return tuple(torch.from_dlpack(x).clone() if isinstance(x, jax.Array) else x for x in inputs)


if __name__ == "__main__":
    sys.exit(bench.main(commands=Beside, prog="python benchmarks/rivals/kernels.py"))
