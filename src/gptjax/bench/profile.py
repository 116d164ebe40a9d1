"""`python -m gptjax.bench profile`: where one training step spends its time, kernel by kernel, and
the trace itself. `hlo` and `trace` describe the method."""

import dataclasses
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from gptjax.bench import results
from gptjax.bench.configs import StepOptions
from gptjax.bench.errors import BenchError
from gptjax.bench.hlo import ORDER, PASSES, places
from gptjax.bench.jax_step import JaxStep
from gptjax.bench.measuring import first_devices, one_device
from gptjax.bench.picture import draw_profile
from gptjax.bench.rows import describe, label
from gptjax.bench.step import timed_result
from gptjax.bench.table import Row, print_table
from gptjax.bench.trace import newest_xplane, read_kernels, summary

# Steps before the trace, and those timed without it.
WARM_UP, TIMED = 3, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile(StepOptions):
    """Trace one training step on the first device and print the time of each part of the model;
    write the trace, JSON and a picture."""

    out: Path
    """Folder for all files: profile.json, profile.png, and the trace in plugins/profile/."""
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
        row |= trace(
            JaxStep(config, one_device(), parallel=parallel, forward=self.forward), self.out
        )
        result = timed_result(results.bench_command("profile", self), [row])
        draw_profile(result, self.out / "profile.png")
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
    step.compile(
        **({"xla_gpu_enable_command_buffer": ""} if jax.default_backend() == "gpu" else {})
    )
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
    xplane = newest_xplane(folder)
    module = re.match(r"HloModule ([\w.\-]+)", text)[1]
    return summary(read_kernels(xplane, module), places(text)) | {
        "untraced_ms": untraced_ms,
        "trace": str(xplane.with_name(xplane.name.replace("xplane.pb", "trace.json.gz"))),
    }


def show(result: dict, top: int) -> None:
    """Print a row for each part with its passes, and a row for each of its longest kernels."""
    (row,) = result["rows"]
    span, parts, table = row["span_ms"], row["parts"], []
    for part in ORDER:
        of_part = [each for each in parts if each["part"] == part]
        if of_part:
            table.append(_part(part, sum(each["ms"] for each in of_part), span, of_part))
        for kernel in [each for each in row["kernels"] if each["part"] == part][:top]:
            name = f"  {kernel['name'][:44]} · {kernel['op'][:24]}"
            cells = [f"{kernel['ms']:.3f}" if kernel["pass"] == p else "" for p in PASSES]
            table.append(Row(name, [*cells, "", "", "", str(kernel["calls"])]))
    table += [Row(), _part("all kernels", row["kernel_ms"], span, parts)]
    if row.get("exposed_ms"):
        table.append(_part("exposed communication", row["exposed_ms"], span))
    table.append(_part("idle", row["idle_ms"], span))
    table.append(_part("first kernel to last", span, span))
    columns = (*PASSES, "ms", "share", "matmuls", "calls")
    print_table(title(row), columns, table)


def _part(name: str, ms: float, span: float, rows: Sequence[dict] = ()) -> Row:
    """Return the row of a part: ms of each pass, their sum, share of the span, ms of matmuls,
    calls."""
    by_pass = [sum(row["ms"] for row in rows if row["pass"] == pass_) for pass_ in PASSES]
    matmuls, calls = (sum(row[column] for row in rows) for column in ("matmul_ms", "calls"))
    *passes, matmul = [f"{value:.3f}" if value else "" for value in (*by_pass, matmuls)]
    return Row(name, [*passes, f"{ms:.3f}", f"{ms / span:.1%}", matmul, str(calls or "")])


def title(row: dict) -> str:
    """Return the step and its times in words."""
    times = f"{row['untraced_ms']:.2f} ms a step untraced, {row['span_ms']:.2f} ms in the trace"
    return f"{row['device']}, {label(row).removeprefix('gptjax · ')}: {times}"
