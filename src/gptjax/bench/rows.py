"""Rows of results: the description of a measured step, its figures or error, and their text."""

import dataclasses
import statistics
import sys
from collections.abc import Sequence

from gptjax.bench.errors import BenchError
from gptjax.bench.measuring import one_device
from gptjax.config import Config
from gptjax.training.flops import mfu
from gptjax.training.memory import GIB

# Rows with equal values in these fields are the same measurement. A missing field counts as empty.
KEYS = (
    *("kernel", "case", "implementation", "system", "rung", "model", "precision", "batch"),
    *("sequence_length", "pass", "algorithm", "recompute", "devices", "parallel", "reduce_dtype"),
    *("overlap_reduce", "reshard_after_forward", "moments", "asked"),
)


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
    if devices > 1:
        row |= {"parallel": config.parallel, "reduce_dtype": config.reduce_dtype}
    return row | {"asked": asked}


def figures(row: dict, config: Config, seconds: Sequence[float], peak: int | None) -> dict:
    """Return the figures of a row.

    Args:
        seconds: of a step, in each round.
        peak: bytes of memory, if known.
    """
    median, devices = statistics.median(seconds), row.get("devices", 1)
    tokens = devices * config.micro_batch * config.sequence_length / median
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


def label(row: dict) -> str:
    """Return the description of a row's measurement in words; defaults are left out."""
    row = identity(row)
    asked = [f"{part}={value}" for part, value in row.pop("asked", {}).items()]
    forms = {
        "batch": f"batch {row.get('batch')}",
        "devices": f"{row.get('devices')} devices",
        "moments": f"moments {row.get('moments')}",
        "reshard_after_forward": "gathered once",
        "overlap_reduce": "no overlap",
    }
    if "sequence_length" in row:
        forms["batch"] = f"{row['batch']} × {row.pop('sequence_length')}"
    defaults = {"pass": "train", "algorithm": "adamw", "recompute": "none", "reduce_dtype": "fp32"}
    defaults |= {"reshard_after_forward": True, "overlap_reduce": True}
    given = {field: value for field, value in row.items() if value != defaults.get(field, "")}
    words = [forms.get(field, str(value)) for field, value in given.items()]
    return " · ".join(words + asked)


def identity(row: dict) -> dict:
    """Return the fields of a row that identify the measurement: without the options of a rung,
    which the rung's name implies, and without the number of devices if the number is 1, as in
    results without that field."""
    left_out = {"asked"} if "rung" in row else set()
    if row.get("devices") == 1:
        left_out.add("devices")
    return {field: row[field] for field in KEYS if field in row and field not in left_out}


def kernel_names(row: dict) -> str:
    """Return the kernels of a row in words."""
    kernels = row["kernels"]
    if isinstance(kernels, str):
        return kernels
    return ", ".join(f"{part}: {name}" for part, name in kernels.items())


def first_line(error: BaseException) -> str:
    """Return the type of an error and its first line, at most 300 characters."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def say(line: str) -> None:
    """Print progress to standard error: standard output has the results."""
    print(line, file=sys.stderr, flush=True)


def raise_failures(rows: Sequence[dict]) -> None:
    """Raise BenchError with the rows that have an error, if there are any."""
    if failed := [f"{label(row)}: {row['error']}" for row in rows if "error" in row]:
        raise BenchError("\n".join(["did not run:", *failed]))
