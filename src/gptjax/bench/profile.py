"""`python -m gptjax.bench profile`: the time of each part of one training step, kernel by kernel,
and the trace itself. `hlo` finds the parts."""

import dataclasses
import re
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax

from gptjax.bench import BenchError, results
from gptjax.bench.configs import StepOptions
from gptjax.bench.harness import first_devices, one_device
from gptjax.bench.hlo import COMMUNICATION, ORDER, PASSES, Place, places, source
from gptjax.bench.jax_step import JaxStep
from gptjax.bench.results import Row, label, print_table
from gptjax.bench.step import describe, timed_result

# Steps before the trace, and those timed without it.
WARM_UP, TIMED = 3, 10
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile(StepOptions):
    """Trace one training step on the first device and print the time of each part of the model;
    write the trace and JSON."""

    out: Path
    """Folder for all files: profile.json, and the trace in plugins/profile/."""
    top: int = 4
    """Number of kernels printed for each part, the longest ones; profile.json has all."""

    def run(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        if len(configs := self.configs()) != 1:
            raise BenchError("profile traces one step: give one value of each option")
        ((config, devices),) = configs
        # By default the compilation cache's key leaves out op_names: a cached executable may have
        # those of older sources.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
        row = describe(self.name, config, forward=self.forward, devices=devices)
        row |= {"device": one_device().device_kind, "back_ends": config.kernels()}
        parallel = config.parallel_on(first_devices(devices))
        step = JaxStep(config, one_device(), parallel=parallel, forward=self.forward)
        row |= trace(step, self.out)
        result = timed_result("-m gptjax.bench", [row])
        results.report(result, self.out / "profile.json", lambda result: show(result, self.top))
        print(f"wrote {row['trace']}, for https://ui.perfetto.dev")


def trace(step: JaxStep, folder: Path) -> dict:
    """Compile a step, warm up, and trace one step.

    Returns:
        The step's `summary`, with "untraced_ms" and "trace", the file for Perfetto.

    Raises:
        BenchError: the step needs more memory than the device has, or the trace has no such step.
    """
    # In a CUDA graph all kernels have one name, that of the graph.
    on_gpu = jax.default_backend() == "gpu"
    step.compile(**({"xla_gpu_enable_command_buffer": ""} if on_gpu else {}))
    step.check_memory()
    text = step.compiled.as_text()
    step.run(WARM_UP)
    untraced_ms = 1e3 * step.run(TIMED) / TIMED
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls would slow the host and fill the trace
    # The first trace contains the tracer's own start: it is discarded.
    with tempfile.TemporaryDirectory() as discarded:
        for path in (discarded, folder):
            with jax.profiler.trace(path, profiler_options=options):
                step.run(1)
    xplane = max(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda p: p.stat().st_mtime)
    module = re.match(r"HloModule ([\w.\-]+)", text)[1]
    with warnings.catch_warnings():
        # About jaxlib's own types, at their first use.
        warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
        planes = list(jax.profiler.ProfileData.from_file(str(xplane)).planes)
        launched = kernels(planes, module)
    return summary(launched, places(text)) | {
        "untraced_ms": untraced_ms,
        "trace": str(xplane.with_name(xplane.name.replace("xplane.pb", "trace.json.gz"))),
    }


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
    def end_ns(self) -> float | int:
        return self.start_ns + self.duration_ns

    @property
    def communicates(self) -> bool:
        """Whether it moves data between devices: a kernel of NCCL, or an HLO collective."""
        return self.name.startswith("nccl") or self.hlo_op.startswith(COLLECTIVES)


def kernels(planes: Sequence, module: str) -> list[Kernel]:
    """Return what ran on the device, in the order of the starts: on a GPU kernels and copies, on a
    CPU XLA's operations.

    Args:
        planes: those of `jax.profiler.ProfileData`.
        module: name of the executable, such as jit_train_step; launches of others are left out.
    """
    # Other lines of a GPU's plane are sums over the same kernels.
    streams = [
        line
        for plane in planes
        if plane.name.startswith("/device:GPU:0")
        for line in plane.lines
        if line.name.startswith("Stream")
    ]
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
        "span_ms", from the first kernel's start to the last one's end; "idle_ms", while no kernel
        ran; "kernel_ms", the sum over the kernels, some of which may run at the same time;
        "exposed_ms", while only communication between devices ran; "parts", a dict for each part
        and pass; "kernels", a dict for each kernel of each of them, the longest first.

    Raises:
        BenchError: there are no kernels.
    """
    placed = [(k, instructions.get(k.hlo_op) or source(k.op_name)) for k in launched]
    # The event of a loop or a call covers those of its body.
    placed = [(kernel, place) for kernel, place in placed if not place.encloses]
    if not placed:
        raise BenchError(
            "the trace has no kernels of the step; the trace of a GPU needs CUPTI (pip install "
            "nvidia-cuda-cupti)"
        )
    parts: dict[tuple, dict] = {}
    by_kernel: dict[tuple, dict] = {}
    for kernel, place in placed:
        key = {"part": COMMUNICATION if kernel.communicates else place.part, "pass": place.pass_}
        # XLA numbers its kernels.
        named = key | {"name": re.sub(r"([._]\d+)+$", "", kernel.name), "op": place.op}
        for rows, fields in ((parts, key), (by_kernel, named)):
            row = rows.setdefault(tuple(fields.values()), fields | {"ms": 0.0, "calls": 0})
            row["ms"] += kernel.duration_ns / 1e6
            row["calls"] += 1
    kept = [kernel for kernel, _ in placed]
    span = max(kernel.end_ns for kernel in kept) - kept[0].start_ns
    waits = [kernel for kernel in kept if not kernel.communicates]
    return {
        "span_ms": span / 1e6,
        "idle_ms": (span - busy_ns(kept)) / 1e6,
        "kernel_ms": sum(part["ms"] for part in parts.values()),
        "exposed_ms": (busy_ns(kept) - busy_ns(waits)) / 1e6,
        "parts": sorted(
            parts.values(), key=lambda row: (ORDER.index(row["part"]), PASSES.index(row["pass"]))
        ),
        "kernels": sorted(by_kernel.values(), key=lambda row: -row["ms"]),
    }


def busy_ns(launched: Sequence[Kernel]) -> float | int:
    """Return the time in which at least one of the kernels, in the order of their starts, runs."""
    busy, end = 0, 0
    for kernel in launched:
        busy += max(0, kernel.end_ns - max(end, kernel.start_ns))
        end = max(end, kernel.end_ns)
    return busy


def show(result: dict, top: int) -> None:
    """Print a row for each part with its passes, and a row for each of its longest kernels."""
    (row,) = result["rows"]
    span, parts, table = row["span_ms"], row["parts"], []

    def add(name: str, ms: float, of_part: Sequence[dict] = ()) -> None:
        passes = [sum(each["ms"] for each in of_part if each["pass"] == pass_) for pass_ in PASSES]
        cells = [f"{each:.3f}" if each else "" for each in passes]
        calls = str(sum(each["calls"] for each in of_part) or "")
        table.append(Row(name, [*cells, f"{ms:.3f}", f"{ms / span:.1%}", calls]))

    for part in ORDER:
        if of_part := [each for each in parts if each["part"] == part]:
            add(part, sum(each["ms"] for each in of_part), of_part)
        for kernel in [each for each in row["kernels"] if each["part"] == part][:top]:
            cells = [f"{kernel['ms']:.3f}" if kernel["pass"] == p else "" for p in PASSES]
            name = f"  {kernel['name'][:44]} · {kernel['op'][:24]}"
            table.append(Row(name, [*cells, "", "", str(kernel["calls"])]))
    table.append(Row())
    add("all kernels", row["kernel_ms"], parts)
    for name in ("exposed communication", "idle"):
        add(name, row.get(f"{name.split()[0]}_ms", 0.0))
    add("first kernel to last", span)
    title = f"{row['device']}, {label(row).removeprefix('gptjax · ')}: "
    title += f"{row['untraced_ms']:.2f} ms a step untraced, {span:.2f} ms in the trace"
    print_table(title, (*PASSES, "ms", "share", "calls"), table)
