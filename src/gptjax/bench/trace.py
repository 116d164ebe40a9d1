"""The kernels of one step in a trace of `jax.profiler`, and the time of each part of the model."""

import dataclasses
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax

from gptjax.bench.errors import BenchError
from gptjax.bench.hlo import COMMUNICATION, ORDER, PASSES, Place, place_of_op_name

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch on the device."""

    name: str
    hlo_op: str
    """The HLO instruction; empty if the trace has none."""
    op_name: str
    """The trace's own op_name, without the prefix common to all; empty if the trace has none."""
    start_ns: float | int
    duration_ns: float | int

    @property
    def communicates(self) -> bool:
        """Whether it moves data between devices: a kernel of NCCL, or an HLO collective."""
        return self.name.startswith("nccl") or self.hlo_op.startswith(COLLECTIVES)


def exposed_ns(launched: Sequence[Kernel]) -> float | int:
    """Return the time in which kernels that communicate run, and no others."""
    ends = [
        (time, sign, kernel.communicates)
        for kernel in launched
        for time, sign in ((kernel.start_ns, 1), (kernel.start_ns + kernel.duration_ns, -1))
    ]
    exposed, before = 0, 0
    running = {True: 0, False: 0}  # number of kernels, by whether they communicate
    for time, sign, communication in sorted(ends):
        if running[True] and not running[False]:
            exposed += time - before
        running[communication] += sign
        before = time
    return exposed


def newest_xplane(folder: Path) -> Path:
    """Return the newest trace that `jax.profiler` wrote into a folder.

    Raises:
        BenchError: there is none.
    """
    traces = list(folder.glob("plugins/profile/*/*.xplane.pb"))
    if not traces:
        raise BenchError(f"jax.profiler wrote no trace in {folder}/plugins/profile")
    return max(traces, key=lambda path: path.stat().st_mtime)


def read_kernels(xplane: Path, module: str) -> list[Kernel]:
    """Return the `kernels` of a `.xplane.pb` file."""
    with warnings.catch_warnings():
        # About jaxlib's own types, at their first use.
        warnings.filterwarnings(
            "ignore", message="builtin type .* has no __module__", category=DeprecationWarning
        )
        return kernels(list(jax.profiler.ProfileData.from_file(str(xplane)).planes), module)


def kernels(planes: Sequence, module: str) -> list[Kernel]:
    """Return what ran on the device, in the order of the starts: on a GPU kernels and copies, on a
    CPU XLA's operations.

    Args:
        planes: those of `jax.profiler.ProfileData`.
        module: name of the executable, such as jit_train_step; launches of others are left out.

    Raises:
        BenchError: the GPU's part of the trace has another form.
    """
    of_gpu = [
        line for plane in planes if plane.name.startswith("/device:GPU:0") for line in plane.lines
    ]
    # Other lines of that plane are sums over the same kernels.
    streams = [line for line in of_gpu if line.name.startswith("Stream")]
    if of_gpu and not streams:
        names = [line.name for line in of_gpu]
        raise BenchError(f"expected lines named Stream #… of the GPU in the trace, found {names}")
    of_host = (line for plane in planes if plane.name == "/host:CPU" for line in plane.lines)
    launched = []
    for event in (event for line in streams or of_host for event in line.events):
        stats = dict(event.stats)
        # A GPU's copies may name no executable; a CPU's threads have events that are no operations.
        if stats.get("hlo_module", module if streams else None) == module:
            op = str(stats.get("hlo_op", ""))
            op_name = str(stats.get("tf_op") or stats.get("name") or "")
            launched.append(Kernel(event.name, op, op_name, event.start_ns, event.duration_ns))
    return sorted(launched, key=lambda kernel: kernel.start_ns)


def summary(launched: Sequence[Kernel], instructions: dict[str, Place]) -> dict:
    """Return the time of each part, pass and kernel of a step.

    Args:
        launched: the kernels of one step.
        instructions: from `hlo.places`.

    Returns:
        "span_ms", from the first kernel's start to the last one's end; "busy_ms", while at least
        one ran; "idle_ms", the rest; "kernel_ms", the sum over the kernels, which exceeds busy_ms
        if some ran at the same time; "exposed_ms", while only communication between devices ran;
        "parts", a dict for each part and pass; "kernels", a dict for each kernel of each of them,
        the longest first; "gaps", the ten longest idle times.

    Raises:
        BenchError: there are no kernels.
    """
    placed = [(k, instructions.get(k.hlo_op) or place_of_op_name(k.op_name)) for k in launched]
    # The event of a loop or a call covers those of its body.
    placed = [(kernel, place) for kernel, place in placed if not place.encloses]
    if not placed:
        raise BenchError(
            "the trace has no kernels of the step; the trace of a GPU needs CUPTI (pip install "
            "nvidia-cuda-cupti)"
        )
    parts: dict[tuple, dict] = {}
    by_kernel: dict[tuple, dict] = {}
    start = end = placed[0][0].start_ns
    gaps, busy, last = [], 0.0, ""
    for kernel, place in placed:
        ms = kernel.duration_ns / 1e6
        name = re.sub(r"([._]\d+)+$", "", kernel.name)  # XLA numbers its kernels
        key = {"part": COMMUNICATION if kernel.communicates else place.part, "pass": place.pass_}
        zeros = {"ms": 0.0, "matmul_ms": 0.0, "calls": 0}
        part = parts.setdefault(tuple(key.values()), key | zeros)
        part["matmul_ms"] += ms * place.matmul
        key |= {"name": name, "op": place.op, "matmul": place.matmul}
        one = by_kernel.setdefault(tuple(key.values()), key | {"ms": 0.0, "calls": 0})
        for row in (part, one):
            row["ms"] += ms
            row["calls"] += 1
        if kernel.start_ns > end:
            gaps.append({"us": (kernel.start_ns - end) / 1e3, "after": last, "before": name})
        stop = kernel.start_ns + kernel.duration_ns
        busy += max(0, stop - max(end, kernel.start_ns))
        if stop >= end:
            end, last = stop, name
    return {
        "span_ms": (end - start) / 1e6,
        "busy_ms": busy / 1e6,
        "idle_ms": (end - start - busy) / 1e6,
        "kernel_ms": sum(part["ms"] for part in parts.values()),
        "exposed_ms": exposed_ns([kernel for kernel, _ in placed]) / 1e6,
        "parts": sorted(
            parts.values(), key=lambda row: (ORDER.index(row["part"]), PASSES.index(row["pass"]))
        ),
        "kernels": sorted(by_kernel.values(), key=lambda row: -row["ms"]),
        "gaps": sorted(gaps, key=lambda gap: -gap["us"])[:10],
    }
