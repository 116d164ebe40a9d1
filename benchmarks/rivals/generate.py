"""Measure tokens/s of `gptjax.generate`, and of transformers in the same run.

    python benchmarks/rivals/generate.py --batch 1 64 --out generate.json
    python benchmarks/rivals/generate.py --no-torch

Calls follow each other, and each call is awaited, as by a user who needs the text. A step's time is
(call − first token) / (new − 1). The time to the first token is measured with the stream,
`token_chunks`, and in transformers with a call for one token. Compile seconds are the time of the
first call minus the time of a later call: a row that uses an executable of an earlier row has
fewer.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
from flax import nnx
from torch_side import kind, require_torch, why_no_rival

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
PACKAGES = ("jax-triton", "triton", "torch", "transformers")


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
    """JSON file for the results."""

    def run(self) -> None:
        results.check_file(self.out)
        base, rows = self.base(), []
        if self.torch:
            require_torch(one_device())
            if why := why_no_rival(base):
                raise BenchError(why)
        precision = Precision(self.precision) if self.precision else base.model.precision
        model = dataclasses.replace(base.model, precision=precision).build(nnx.Rngs(0))
        for batch in self.batch:
            for row in self._of_batch(model, batch):
                rows.append(row)
                say(f"{label(row)}: {row.get('error') or progress(row)}")
        compare_with_torch(rows)
        command, packages = results.command("benchmarks/rivals/generate.py"), PACKAGES
        result = results.new(command, rows, device=one_device().device_kind, packages=packages)
        results.report(result, self.out, show)
        raise_failures(rows)

    def _sides(self, model: Model, batch: int) -> Iterator[tuple[dict, Any]]:
        """Yield each program that generates, with the first fields of its rows."""
        rng, vocab_size = np.random.default_rng(0), model.config.vocab_size
        prompt_BT = rng.integers(0, vocab_size, (batch, self.prompt), np.int32)
        for name in self.implementation:
            row = {"system": "gptjax", "asked": {"implementation": name}}
            yield row, JaxGeneration(model, prompt_BT, self.new, name)
        if self.torch:
            from torch_generate import TorchGeneration

            sizes = {"batch": batch, "prompt": self.prompt, "new": self.new}
            theirs = TorchGeneration(model.config, device=kind(one_device()), **sizes)
            yield {"system": "transformers"}, theirs
            theirs.free()

    def _of_batch(self, model: Model, batch: int) -> Iterator[dict]:
        """Yield gptjax's rows, then transformers' rows. A failure is a row with its error."""
        for first, side in self._sides(model, batch):
            for temperature in self.temperature:
                how = {"temperature": temperature, "top_k": self.top_k if temperature else None}
                case = f"{self.prompt} + {self.new} tokens, {how_drawn(**how)}"
                row = first | {"model": self.name, "precision": model.config.precision.name}
                row |= {"batch": batch, "case": case} | how
                say(f"{label(row)}: compiling")
                try:
                    row["kernels"] = side.kernel()
                    row |= measure(side, how, batch=batch, new=self.new, seconds=self.seconds)
                except Exception as error:  # a failure must not lose the other rows
                    row["error"] = first_line(error)
                yield row


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
    side: Any, how: dict[str, Any], *, batch: int, new: int, seconds: float
) -> dict[str, float]:
    """Return the figures of a row.

    Args:
        side: a `JaxGeneration` or `TorchGeneration`.
        how: temperature and top_k.
        batch, new: sequences, and new tokens of each.
        seconds: duration of the measurement.
    """
    first_call = side.all_tokens(**how)
    calls = sustained(lambda n: sum(side.all_tokens(**how) for _ in range(n)), seconds=seconds)
    whole = statistics.median(calls)
    side.first_token(**how)
    first = statistics.median(side.first_token(**how) for _ in range(FIRST_TOKENS))
    return {
        "ms": 1e3 * whole,
        "ms_lowest": 1e3 * min(calls),
        "ms_highest": 1e3 * max(calls),
        "tokens/s": batch * new / whole,
        "first_token_ms": 1e3 * first,
        "step_us": 1e6 * (whole - first) / (new - 1),
        "compile_s": max(0.0, first_call - whole),
    }


def compare_with_torch(rows: list[dict]) -> None:
    """Add `of_torch`, the ratio of the tokens/s, to gptjax's rows that have a row of PyTorch."""
    rivals = {
        (row["batch"], row["case"]): row.get("tokens/s")
        for row in rows
        if row["system"] == "transformers"
    }
    for row in rows:
        rival = rivals.get((row["batch"], row["case"]))
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


def show(result: dict) -> None:
    """Print a row for each measurement."""
    table = []
    for row in result["rows"]:
        if "error" in row:
            table.append(Row(label(row), note=row["error"]))
            continue
        texts = (
            f"{row['tokens/s']:,.0f}",
            f"{row['step_us']:,.1f}",
            f"{row['first_token_ms']:.2f}",
            f"{row['compile_s']:.1f}",
            f"{row['of_torch']:.2f} ×" if "of_torch" in row else "",
        )
        table.append(Row(label(row), texts, row["kernels"]))
    columns = ("tokens/s", "step µs", "first token ms", "compile s", "of torch")
    print_table(result["device"], columns, table)


if __name__ == "__main__":
    sys.exit(bench.main(commands=Generate, prog="python benchmarks/rivals/generate.py"))
