"""Rows of results: the description of the measurement, its figures or error, and their text."""

import dataclasses
import statistics
import sys

from gptjax.bench.errors import BenchError
from gptjax.bench.measuring import one_device
from gptjax.config import Config
from gptjax.training.flops import mfu
from gptjax.training.memory import GIB


def describe(name: str, config: Config, *, forward: bool, devices: int = 1) -> dict:
    """Return the fields of a row that describe the measurement.

    Args:
        name: of the model.
        devices: number of devices that share the step.
    """
    model = config.model
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
        optimizer = config.optimizer
        row |= {"algorithm": optimizer.name, "recompute": model.recompute}
        moments = optimizer.first_moment_dtype, optimizer.second_moment_dtype
        row |= {} if moments == ("fp32", "fp32") else {"moments": ", ".join(moments)}
    if devices > 1:
        row |= {"parallel": config.parallel, "reduce_dtype": config.reduce_dtype}
        row |= {} if config.overlap_reduce else {"overlap_reduce": False}
    return row | {"asked": asked}


def complete(row: dict, config: Config, side, seconds: list[float] | Exception | None) -> dict:
    """Return the row with its figures or its error.

    Args:
        side: the step that was measured.
        seconds: of a step, in each round; None if nothing was measured.
    """
    if isinstance(seconds, Exception):
        return row | {"error": first_line(seconds)}
    if not seconds:
        return row
    median = statistics.median(seconds)
    devices = row.get("devices", 1)
    tokens = devices * config.micro_batch * config.sequence_length / median
    passes = 1 / 3 if row["pass"] == "forward" else 1
    flops = config.model.flops_per_token(config.sequence_length) * passes
    return row | {
        "ms": 1e3 * median,
        "ms_lowest": 1e3 * min(seconds),
        "ms_highest": 1e3 * max(seconds),
        "tokens/s": tokens,
        "mfu": mfu(
            tokens, flops, one_device().device_kind, row["precision"], row.get("devices", 1)
        ),
        "peak_gib": side.peak / GIB if side.peak else None,
    }


def label(row: dict) -> str:
    """Return the description of a row's measurement; defaults are left out."""
    parts = [
        row["system"],
        row.get("rung", ""),
        row["model"],
        row["precision"],
        f"{row['batch']} × {row['sequence_length']}",
        f"{row['devices']} devices" if row.get("devices", 1) > 1 else "",
        row.get("parallel", ""),
        "" if row.get("reshard_after_forward", True) else "gathered once",
        row["reduce_dtype"] if row.get("reduce_dtype", "fp32") != "fp32" else "",
        "" if row.get("overlap_reduce", True) else "no overlap",
        row["pass"] if row["pass"] == "forward" else "",
        row.get("algorithm", ""),
        row.get("recompute", ""),
        f"moments {row['moments']}" if "moments" in row else "",
    ]
    return " · ".join(part for part in parts if part and part not in ("adamw", "none"))


def kernel_names(row: dict) -> str:
    """Return the kernels of a row in words."""
    kernels = row["kernels"]
    if isinstance(kernels, str):
        return kernels
    return ", ".join(f"{part}: {name}" for part, name in kernels.items())


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def first_line(error: BaseException) -> str:
    """Return the type of an error and its first line, at most 300 characters."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def say(line: str) -> None:
    """Print progress to standard error: standard output has the results."""
    print(line, file=sys.stderr, flush=True)


def raise_failures(rows: list[dict]) -> None:
    """Raise BenchError with the rows that have an error, if there are any."""
    if failed := [f"{label(row)}: {row['error']}" for row in rows if "error" in row]:
        raise BenchError("\n".join(["did not run:", *failed]))
