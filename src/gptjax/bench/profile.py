"""`python -m gptjax.bench profile`: where one training step spends its time, kernel by kernel, and
the trace itself. `hlo` and `trace` describe the method."""

import dataclasses
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax

from gptjax.bench import results
from gptjax.bench.configs import OWN_DEFAULT, ModelOptions, PrecisionName, with_moments
from gptjax.bench.hlo import ORDER, PASSES, places
from gptjax.bench.jax_step import JaxStep
from gptjax.bench.measuring import first_devices, one_device
from gptjax.bench.picture import draw_profile
from gptjax.bench.rows import describe, label
from gptjax.bench.step import timed_result
from gptjax.bench.table import Row, print_table
from gptjax.bench.trace import newest_xplane, read_kernels, summary
from gptjax.parallel import Strategy

# Steps before the trace, and those timed without it.
WARM_UP, TIMED = 3, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile(ModelOptions):
    """Trace one training step and print the time of each part of the model; write the trace, JSON
    and a picture."""

    out: Path
    """Folder for all files: profile.json, profile.png, and the trace in plugins/profile/."""
    batch: Annotated[int | None, OWN_DEFAULT] = None
    """Sequences per step, in one micro-batch (default: the config's micro-batch, or 64)."""
    precision: Annotated[PrecisionName | None, OWN_DEFAULT] = None
    """Default: the config's, or bf16."""
    recompute: Annotated[Literal["none", "block", "sublayer"] | None, OWN_DEFAULT] = None
    """Activations recomputed in the backward pass, as --model.recompute (default: the config's, or
    none)."""
    moment_dtype: Annotated[Literal["fp32", "bf16"] | None, OWN_DEFAULT] = None
    """Dtype of both of AdamW's moments, as --optimizer.first-moment-dtype and
    --optimizer.second-moment-dtype of train.py (default: the config's)."""
    devices: int = 1
    """Number of devices that share the step; the first one is traced. --batch counts the sequences
    of each device."""
    parallel: Annotated[Strategy | None, OWN_DEFAULT] = None
    """Strategy for several devices, as --parallel of train.py (default: the config's, or data)."""
    reduce_dtype: Annotated[Literal["fp32", "bf16"] | None, OWN_DEFAULT] = None
    """Dtype in which gradients are summed over the devices (default: the config's, or fp32)."""
    overlap_reduce: Annotated[bool | None, OWN_DEFAULT] = None
    """Whether gradients are summed during the backward pass, as --overlap-reduce of train.py
    (default: the config's)."""
    top: int = 4
    """Number of kernels printed for each part, the longest ones; profile.json has all."""

    def run(self) -> None:
        results.check_folder(self.out)
        config = self.with_options(
            self.base(), batch=self.batch, precision=self.precision, recompute=self.recompute
        )
        config = with_moments(config, self.moment_dtype)
        config = dataclasses.replace(
            config,
            parallel=self.parallel or config.parallel,
            reduce_dtype=self.reduce_dtype or config.reduce_dtype,
            overlap_reduce=(
                config.overlap_reduce if self.overlap_reduce is None else self.overlap_reduce
            ),
        )
        device, devices = one_device(), first_devices(self.devices)
        parallel = config.parallel_on(devices)
        # By default the compilation cache's key leaves out op_names: a cached executable may have
        # those of older sources.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
        row = describe(self.name, config, forward=self.forward, devices=self.devices)
        row |= {"device": device.device_kind, "back_ends": config.kernels()}
        step = JaxStep(config, device, parallel=parallel, forward=self.forward)
        row |= trace(step, self.out)
        command = results.bench_command("profile", self)
        results.write(self.out / "profile.json", timed_result(command, [row], device, torch=False))
        draw_profile(row, f"{title(row)}\n{headline(row)}", self.out / "profile.png")
        show(row, self.top)
        print(
            f"wrote {self.out / 'profile.png'}\nwrote {row['trace']}, for https://ui.perfetto.dev"
        )


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


def show(row: dict, top: int) -> None:
    """Print a row for each part with its passes, and a row for each of its longest kernels."""
    span, kernel_ms, parts = row["span_ms"], row["kernel_ms"], row["parts"]
    table = []
    for part in ORDER:
        of_part = [each for each in parts if each["part"] == part]
        if not of_part:
            continue
        table.append(_part(part, sum(each["ms"] for each in of_part), span, of_part))
        for kernel in [each for each in row["kernels"] if each["part"] == part][:top]:
            name = f"  {kernel['name'][:44]} · {kernel['op'][:24]}"
            figures = [f"{kernel['ms']:.3f}" if kernel["pass"] == p else "" for p in PASSES]
            table.append(Row(name, [*figures, "", "", "", str(kernel["calls"])]))
    table += [Row(), _part("all kernels", kernel_ms, span, parts)]
    if row.get("exposed_ms"):
        table.append(_part("exposed communication", row["exposed_ms"], span))
    table.append(_part("idle", row["idle_ms"], span))
    table.append(_part("first kernel to last", span, span))
    columns = (*PASSES, "ms", "share", "matmuls", "calls")
    print_table(f"{title(row)}: {headline(row)}", columns, table)


def _part(name: str, ms: float, span: float, rows: Sequence[dict] = ()) -> Row:
    """Return the row of a part: ms of each pass, their sum, share of the span, ms of matmuls,
    calls."""
    by_pass = [sum(row["ms"] for row in rows if row["pass"] == pass_) for pass_ in PASSES]
    matmuls, calls = (sum(row[column] for row in rows) for column in ("matmul_ms", "calls"))
    *passes, matmul = [f"{value:.3f}" if value else "" for value in (*by_pass, matmuls)]
    return Row(name, [*passes, f"{ms:.3f}", f"{ms / span:.1%}", matmul, str(calls or "")])


def title(row: dict) -> str:
    return f"{row['device']}, {label(row).removeprefix('gptjax · ')}"


def headline(row: dict) -> str:
    return f"{row['untraced_ms']:.2f} ms a step untraced, {row['span_ms']:.2f} ms in the trace"
