"""`python -m gptjax.bench step`: the training step, or forward pass, of one or several configs.
`harness` describes the method; benchmarks/rivals/step.py compares with PyTorch and llm.c."""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from gptjax.bench import results
from gptjax.bench.configs import OWN_DEFAULT, StepOptions
from gptjax.bench.harness import first_devices, one_device, sustained, timed_result
from gptjax.bench.jax_step import JaxStep
from gptjax.bench.results import Row, label, print_table, raise_failures, say
from gptjax.config import Config
from gptjax.terminal import first_line
from gptjax.training.flops import mfu
from gptjax.training.memory import GIB, needed_bytes

# Fields of a row: title of the column, and format.
COLUMNS = {
    "ms": ("ms", ".2f"),
    "tokens/s": ("tokens/s", ",.0f"),
    "mfu": ("MFU", ".1%"),
    "needed_gib": ("needs GiB", ".2f"),
    "peak_gib": ("peak GiB", ".2f"),
    "compile_s": ("compile s", ".1f"),
    "of_torch": ("of torch", ".3f"),
    "of_llmc": ("of llm.c", ".3f"),
    "of_jla": ("of jla", ".3f"),
    "factor": ("rung", ".2f"),
    "since_start": ("since start", ".2f"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(StepOptions):
    """Measure time, memory and MFU of one config's training step. Print a row for each combination
    of --batch, --precision, --recompute, --devices, --parallel and --reduce-dtype."""

    seconds: float = 3.0
    """Seconds of each measurement."""
    out: Annotated[Path | None, OWN_DEFAULT] = None
    """JSON file for the results."""
    script: ClassVar[str] = "-m gptjax.bench"

    def run(self) -> None:
        results.check_file(self.out)
        rows = [row for config, devices in self.configs() for row in self.measure(config, devices)]
        results.report(timed_result(self.script, rows), self.out, show)
        raise_failures(rows)

    def measure(self, config: Config, devices: int) -> list[dict]:
        """Return the rows of a config. A failure is a row with its error."""
        row = describe(self.name, config, forward=self.forward, devices=devices)
        parallel = config.parallel_on(first_devices(devices))
        step = JaxStep(config, one_device(), parallel=parallel, forward=self.forward)
        return [timed(compiled(row, step), step, self.seconds)]


def describe(name: str, config: Config, *, forward: bool, devices: int = 1) -> dict:
    """Return the fields of a row that describe the measurement.

    Args:
        name: of the model.
        devices: number of devices that share the step.
    """
    model, optimizer = config.model, config.optimizer
    # A field whose default is "auto" chooses a back end.
    asked = {
        field.name: value
        for field in dataclasses.fields(model)
        if field.default == "auto" and (value := getattr(model, field.name)) != "auto"
    }
    if model.loss_chunk:
        asked["loss_chunk"] = model.loss_chunk
    row = {
        "system": "gptjax",
        "devices": devices,
        "model": name,
        "precision": model.precision.name,
        "batch": config.micro_batch,
        "sequence_length": config.sequence_length,
        "pass": "forward" if forward else "train",
    }
    if not forward:
        row |= {"algorithm": optimizer.name, "recompute": model.recompute}
        moments = optimizer.first_moment_dtype, optimizer.second_moment_dtype
        row |= {} if moments == ("fp32", "fp32") else {"moments": ", ".join(moments)}
        row |= {"micro_batches": n} if (n := config.micro_batches(1)) > 1 else {}
    if devices > 1:
        row |= {"parallel": config.parallel, "reduce_dtype": config.reduce_dtype}
    return row | {"asked": asked}


def compiled(row: dict, step: JaxStep) -> dict:
    """Compile a step; return the row with the executable's figures, or its error."""
    say(f"{label(row)}: compiling")
    try:
        row = row | {"kernels": step.config.kernels()}
        if step.jit:
            step.compile()
            row |= {"compile_s": step.compile_s, "needed_gib": needed_bytes(step.compiled) / GIB}
            step.check_memory()
        return row
    except Exception as error:  # a failure must not lose the other rows
        return row | {"error": first_line(error)}


def timed(row: dict, step: JaxStep, seconds: float) -> dict:
    """Measure a compiled step; return the row with its figures, or its error."""
    if "error" in row:
        return row
    try:
        say(f"{label(row)}: measuring")
        return row | figures(row, step.config, sustained(step.run, seconds=seconds), step.peak)
    except Exception as error:
        return row | {"error": first_line(error)}


def figures(row: dict, config: Config, seconds: Sequence[float], peak: int | None) -> dict:
    """Return the figures of a row.

    Args:
        seconds: of a step, in each round.
        peak: bytes of memory, if known.
    """
    median, devices = statistics.median(seconds), row.get("devices", 1)
    tokens = devices * row.get("micro_batches", 1) * config.micro_batch
    tokens *= config.sequence_length / median
    passes = 1 / 3 if row["pass"] == "forward" else 1
    flops = config.model.flops_per_token(config.sequence_length) * passes
    return {
        "ms": 1e3 * median,
        "ms_lowest": 1e3 * min(seconds),
        "ms_highest": 1e3 * max(seconds),
        "tokens/s": tokens,
        "mfu": mfu(tokens, flops, one_device().device_kind, row["precision"], devices),
        "peak_gib": peak / GIB if peak else None,
    }


def show(result: dict) -> None:
    """Print a row for each measurement, with the columns that a row has."""
    rows = result["rows"]
    used = {key: how for key, how in COLUMNS.items() if any(row.get(key) for row in rows)}
    table = []
    for row in rows:
        if "error" in row:
            table.append(Row(label(row), note=row["error"]))
            continue
        cells = [format(row[key], form) if row.get(key) else "" for key, (_, form) in used.items()]
        table.append(Row(label(row), cells, kernel_names(row["kernels"])))
    print_table(result["device"], [title for title, _ in used.values()], table)


def kernel_names(kernels: dict | str) -> str:
    """Return the kernels of a row in words."""
    if isinstance(kernels, str):
        return kernels
    return ", ".join(f"{part}: {name}" for part, name in kernels.items())
