"""Measure tokens/s of `gptjax.generate`, and of transformers in the same run.

    python benchmarks/rivals/generate.py --batch 1 64 --out generate.json
    python benchmarks/rivals/generate.py --no-torch

Calls follow each other, and each call is awaited, as by a user who needs the text. A step's time is
(call − first token) / (new − 1). The time to the first token is measured with the stream,
`token_chunks`, and in transformers with a call for one token. Compile seconds are the time of the
first call minus the time of a later call: a row that uses an executable of an earlier row has
fewer.

The limit of a step is its memory traffic: every weight that enters a matmul, and every key and
value of the sequences so far, read once in the compute dtype at the GPU's peak bandwidth.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
from flax import nnx
from torch_side import require_torch, torch_generation, why_no_rival

from gptjax.bench import BenchError, results
from gptjax.bench import __main__ as bench
from gptjax.bench.configs import OWN_DEFAULT, ModelOptions, PrecisionName
from gptjax.bench.harness import one_device, sustained
from gptjax.bench.results import Row, label, print_table, raise_failures, say
from gptjax.generation import generate
from gptjax.generation.stream import token_chunks
from gptjax.models.base import Model
from gptjax.precision import Precision
from gptjax.terminal import first_line

FIRST_TOKENS = 5
"""Measurements of the first token; the median counts."""

# Peak memory bandwidth, from the datasheets of H100 and H200.
BYTES_PER_S = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(ModelOptions):
    """Measure tokens/s, the time to the first token and the time of a decoding step, with random
    weights and prompts; print a row for each --batch, --temperature and --implementation."""

    precision: Annotated[PrecisionName | None, OWN_DEFAULT] = None
    """Default: the config's, or bf16."""
    batch: tuple[int, ...] = (1,)
    """Sequences that are generated at a time."""
    prompt: int = 32
    """Tokens of each prompt."""
    new: int = 256
    """New tokens of each sequence."""
    temperature: tuple[float, ...] = (0.0, 1.0)
    """0 selects the likeliest token."""
    top_k: int | None = 50
    """Draw from this number of likeliest tokens; not with temperature 0."""
    implementation: tuple[Literal["auto", "triton", "xla"], ...] = ("auto",)
    """Back ends of the decoding step."""
    torch: bool = True
    """Also measure transformers: a static cache, and a compiled step (not on a CPU)."""
    seconds: float = 1.0
    """Duration of each measurement."""
    out: Annotated[Path | None, OWN_DEFAULT] = None
    """JSON file for the results, written after each row."""

    def run(self) -> None:
        results.check_file(self.out)
        device, config = one_device(), self.checked_config()
        if self.torch:
            require_torch(device)
        rows: list[dict] = []
        model = config.build(nnx.Rngs(0))
        for batch in self.batch:
            for row in self._of_batch(model, batch, device):
                rows.append(row)
                compare_with_torch(rows)
                say(f"{label(row)}: {row.get('error') or progress(row)}")
                self._write(rows, device)
        show(rows, device)
        if self.out:
            print(f"wrote {self.out}")
        raise_failures(rows)

    def checked_config(self):
        """Return the model's config.

        Raises:
            BenchError: an option out of range.
            ConfigError: no such config file.
        """
        base = self.base()
        if self.torch and (why := why_no_rival(base)):
            raise BenchError(why)
        if self.new < 2:
            raise BenchError(f"--new must be at least 2, to measure a step, got {self.new}")
        total, most = self.prompt + self.new, base.model.block_size
        if total > most:
            raise BenchError(
                f"--prompt {self.prompt} and --new {self.new} are {total} tokens, and the model "
                f"has {most} positions: give at most {most}"
            )
        precision = Precision(self.precision) if self.precision else base.model.precision
        return dataclasses.replace(base.model, precision=precision)

    def _of_batch(self, model: Model, batch: int, device: jax.Device):
        """Yield gptjax's rows, then transformers' rows. A failure is a row with its error."""
        prompt_BT = np.random.default_rng(0).integers(
            0, model.config.vocab_size, (batch, self.prompt), np.int32
        )
        bandwidth = BYTES_PER_S.get(device.device_kind)
        limit = step_bytes(model, batch, self.prompt, self.new) / bandwidth if bandwidth else None
        for implementation in self.implementation:
            ours = JaxGeneration(model, prompt_BT, self.new, implementation)
            for row in self._rows("gptjax", model, batch):
                row["asked"] = {"implementation": implementation}
                yield self._measured(row, ours, limit)
        if not self.torch:
            return
        theirs = None
        for row in self._rows("transformers", model, batch):
            if theirs is None:
                sizes = {"batch": batch, "prompt": self.prompt, "new": self.new}
                try:
                    theirs = torch_generation(model.config, device, **sizes)
                except Exception as error:
                    yield row | {"error": first_line(error)}
                    continue
            yield self._measured(row, theirs, limit)
        if theirs:
            theirs.free()

    def _rows(self, system: str, model: Model, batch: int) -> list[dict]:
        """Return the fields that describe each row, a dict for each temperature."""
        return [
            {
                "system": system,
                "model": self.name,
                "precision": model.config.precision.name,
                "batch": batch,
                "case": f"{self.prompt} + {self.new} tokens, {how_drawn(temperature, self.top_k)}",
                "temperature": temperature,
                "top_k": self.top_k if temperature else None,
            }
            for temperature in self.temperature
        ]

    def _measured(self, row: dict, side, limit: float | None) -> dict:
        how = {"temperature": row["temperature"], "top_k": row["top_k"]}
        try:
            row["kernels"] = side.kernel()
            say(f"{label(row)}: compiling")
            return row | measure(
                lambda: side.all_tokens(**how),
                lambda: side.first_token(**how),
                batch=row["batch"],
                new=self.new,
                seconds=self.seconds,
                limit=limit,
            )
        except Exception as error:  # a failure must not lose the other rows
            return row | {"error": first_line(error)}

    def _write(self, rows: list[dict], device: jax.Device) -> None:
        if not self.out:
            return
        command = results.command("benchmarks/rivals/generate.py")
        packages = ("jax-triton", "triton", "torch", "transformers")
        bandwidth = BYTES_PER_S.get(device.device_kind)
        result = results.new(
            command, rows, device=device.device_kind, packages=packages, bytes_per_s=bandwidth
        )
        results.write(self.out, result)


class JaxGeneration:
    """Continuations of prompts by `gptjax.generate`."""

    def __init__(self, model: Model, prompt_BT: np.ndarray, new: int, implementation: str):
        self.model, self.prompt_BT, self.implementation = model, prompt_BT, implementation
        self.options = {
            "max_new_tokens": new,
            "implementation": implementation,
            "key": jax.random.key(0),
        }

    def kernel(self) -> str:
        """Return the back end of the decoding step.

        Raises:
            ValueError: the named back end cannot run here.
        """
        return self.model.decode_kernel(len(self.prompt_BT), self.implementation)

    def all_tokens(self, **how: Any) -> float:
        """Return the seconds of one call of `generate`."""
        started = time.perf_counter()
        jax.block_until_ready(generate(self.model, self.prompt_BT, **self.options, **how))
        return time.perf_counter() - started

    def first_token(self, **how: Any) -> float:
        """Return the seconds to the first token of the stream."""
        started = time.perf_counter()
        chunks = token_chunks(self.model, self.prompt_BT, **self.options, **how)
        next(chunks)
        taken = time.perf_counter() - started
        for _ in chunks:  # the next measurement must not wait for the rest
            pass
        return taken


def measure(
    all_tokens: Callable[[], float],
    first_token: Callable[[], float],
    *,
    batch: int,
    new: int,
    seconds: float,
    limit: float | None,
) -> dict[str, Any]:
    """Return the figures of a row.

    Args:
        all_tokens, first_token: return the seconds of a call.
        batch, new: sequences, and new tokens of each.
        seconds: duration of the measurement.
        limit: seconds of a step that its memory traffic needs.
    """
    first_call = all_tokens()
    calls = sustained(lambda n: sum(all_tokens() for _ in range(n)), seconds=seconds)
    whole = statistics.median(calls)
    first_token()
    first = statistics.median(first_token() for _ in range(FIRST_TOKENS))
    step = (whole - first) / (new - 1)
    return {
        "ms": 1e3 * whole,
        "ms_lowest": 1e3 * min(calls),
        "ms_highest": 1e3 * max(calls),
        "tokens/s": batch * new / whole,
        "first_token_ms": 1e3 * first,
        "step_us": 1e6 * step,
        "limit_us": 1e6 * limit if limit else None,
        "of_limit": limit / step if limit else None,
        "compile_s": max(0.0, first_call - whole),
    }


def step_bytes(model: Model, batch: int, prompt: int, new: int) -> float:
    """Return the bytes that the mean decoding step reads: weights, keys and values.

    Args:
        prompt, new: tokens of each of `batch` sequences.
    """
    c = model.config
    weights = c.precision.compute_dtype.itemsize * (c.num_params - c.lookup_params())

    def cache_bytes(length: int) -> int:
        cache = jax.eval_shape(lambda: model.init_cache(batch, length))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))

    # Step n of new − 1 reads prompt + n positions.
    return weights + (cache_bytes(2) - cache_bytes(1)) * (prompt + new / 2)


def compare_with_torch(rows: list[dict]) -> None:
    """Add `of_torch`, the ratio of the tokens/s, to gptjax's rows that have a row of PyTorch."""
    same = ("model", "precision", "batch", "case")
    rivals = {
        tuple(row[key] for key in same): row["tokens/s"]
        for row in rows
        if row["system"] != "gptjax" and "tokens/s" in row
    }
    for row in rows:
        rival = rivals.get(tuple(row[key] for key in same))
        if row["system"] == "gptjax" and "tokens/s" in row and rival:
            row["of_torch"] = row["tokens/s"] / rival


def how_drawn(temperature: float, top_k: int | None) -> str:
    """Return the choice of a token in words."""
    if not temperature:
        return "greedy"
    filtered = f"top-k {top_k}" if top_k else "all tokens"
    return filtered if temperature == 1 else f"{filtered}, temperature {temperature:g}"


def progress(row: dict) -> str:
    """Return the figures of a row for a line of progress."""
    return (
        f"{row['tokens/s']:,.0f} tokens/s, step {row['step_us']:.1f} µs, first token "
        f"{row['first_token_ms']:.2f} ms, compile {row['compile_s']:.1f} s"
    )


def show(rows: list[dict], device: jax.Device) -> None:
    """Print a row for each measurement."""
    table = []
    for row in rows:
        if "error" in row:
            table.append(Row(label(row), note=row["error"]))
            continue
        texts = (
            f"{row['tokens/s']:,.0f}",
            f"{row['step_us']:,.1f}",
            f"{row['of_limit']:.1%}" if row["of_limit"] else "-",
            f"{row['first_token_ms']:.2f}",
            f"{row['compile_s']:.1f}",
            f"{row['of_torch']:.2f} ×" if "of_torch" in row else "",
        )
        table.append(Row(label(row), texts, row["kernels"]))
    bandwidth = BYTES_PER_S.get(device.device_kind)
    about = f"{bandwidth / 1e12:.2f} TB/s" if bandwidth else "unknown memory bandwidth"
    columns = ("tokens/s", "step µs", "of limit", "first token ms", "compile s", "of torch")
    print_table(f"{device.device_kind}, {about}", columns, table)


if __name__ == "__main__":
    sys.exit(bench.main(commands=Generate, prog="python benchmarks/rivals/generate.py"))
