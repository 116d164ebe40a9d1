"""`python -m gptjax.bench ladder`: the speedup of each rung of the acceleration ladder on this GPU,
in JAX and in PyTorch.

Each rung includes the rungs before it: fp32 without jit → jit → TF32 → bf16 → flash attention →
padded vocabulary → fused classifier → fused norms and MLP → the rest → FP8. Every rung is a full
training step (forward, backward, clip, AdamW) on the same number of random tokens, measured as by
`bench step`, for about a second.
"""

import dataclasses
import gc
import itertools
import math
import os
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Annotated

import jax

from gptjax.bench import results
from gptjax.bench.configs import (
    OWN_DEFAULT,
    BaseOptions,
    at_least_one,
    has_field,
    one_micro_batch,
)
from gptjax.bench.errors import BenchError
from gptjax.bench.jax_step import JaxStep
from gptjax.bench.measuring import one_device, sustained
from gptjax.bench.picture import draw_ladder
from gptjax.bench.rows import (
    complete,
    describe,
    first_line,
    kernel_names,
    label,
    number,
    raise_failures,
    say,
)
from gptjax.bench.step import timed_result
from gptjax.bench.style import check_picture
from gptjax.bench.table import Row, print_table
from gptjax.bench.torch_side import has_torch, torch_step, why_no_step
from gptjax.config import Config
from gptjax.models.base import ModelConfig
from gptjax.precision import Precision
from gptjax.training.memory import GIB, needed_bytes
from pallas_kernels.fp8 import why_not_fp8

SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder(BaseOptions):
    """Measure the acceleration ladder on this device: a row for each rung, which includes the rungs
    before it. Also measure PyTorch's ladder, if PyTorch with CUDA is installed and has the
    model."""

    batch: int = 16
    """Sequences per step. Without jit, in fp32 and with all scores of attention in memory, 16
    sequences of 1024 tokens need about 60 GiB."""
    torch: bool = True
    """Also measure PyTorch's ladder, if PyTorch can run; compilation takes minutes."""
    out: Annotated[Path | None, OWN_DEFAULT] = None
    """JSON file for the results."""
    picture: Annotated[Path | None, OWN_DEFAULT] = None
    """Picture of the results; the suffix selects the format (png, pdf, svg)."""
    draw: Annotated[Path | None, OWN_DEFAULT] = None
    """Draw the picture of this earlier result, and measure nothing."""

    def run(self) -> None:
        if self.picture:
            check_picture(self.picture)
        if self.draw:
            self._draw_again(self.draw)
            return
        for file in (self.out, self.picture):
            if file:
                results.check_file(file)
        base = self.base()
        base = one_micro_batch(
            base,
            at_least_one("--batch", self.batch, base.micro_batch),
            at_least_one("--sequence-length", self.sequence_length, base.sequence_length),
        )
        # Without jit each operation is compiled by itself, with XLA's own options: XLA would write
        # every matmul in Triton too and time the variants, for minutes. The other rungs leave that
        # out as a training run does. JAX reads the flag at its first use.
        flag = "--xla_gpu_enable_triton_gemm=false"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        device = one_device()
        rows, torch = [], self._with_torch(base, device)
        for rows in climb(self.name, base, device, torch=torch):
            command = results.bench_command("ladder", self)
            result = timed_result(command, rows, device, torch=torch)
            if self.out:  # after each rung: an interrupted run keeps the rungs so far
                results.write(self.out, result)
        show(rows, device)
        if self.out:
            print(f"wrote {self.out}")
        if self.picture:
            draw_ladder(result, self.picture)
            print(f"wrote {self.picture}")
        raise_failures(rows)

    def _draw_again(self, file: Path) -> None:
        if not self.picture:
            raise BenchError("--draw RESULT.json needs --picture FILE to draw into")
        fields = ("system", "rung", "model", "batch", "sequence_length")
        draw_ladder(results.read_times(file, *fields), self.picture)
        print(f"wrote {self.picture}")

    def _with_torch(self, base: Config, device: jax.Device) -> bool:
        """Return whether PyTorch's ladder is measured. If PyTorch cannot run, print why."""
        if not self.torch:
            return False
        if why := why_no_step(base):
            say(f"PyTorch's ladder is left out: {why}")
            return False
        if device.platform == "gpu" and has_torch(device):
            return True
        say("PyTorch with CUDA is not here: its ladder is left out")
        return False


def rungs(model: ModelConfig) -> Iterator[tuple[str, ModelConfig, bool]]:
    """Yield name, model and whether it is compiled, of each rung in JAX. The last are the model of
    the config in bf16 and, if `has_fp8`, in FP8. A rung that changes nothing in this model is left
    out."""

    def changed(model: ModelConfig, **changes) -> ModelConfig:
        own = {name: value for name, value in changes.items() if has_field(model, name)}
        return dataclasses.replace(model, **own)

    last = changed(
        model,
        **dict.fromkeys(("attention", "loss", "norm", "mlp"), "xla"),
        padded_vocab_size=model.vocab_size,
        loss_chunk=None,
        recompute="none",
        precision=Precision("fp32"),
    )
    yield "fp32, no jit", last, False
    yield "jit", last, True
    for name, changes in (
        ("TF32", {"precision": Precision("tf32")}),
        ("bf16", {"precision": Precision("bf16")}),
        ("flash attention", {"attention": "auto"}),
        ("padded vocabulary", {"padded_vocab_size": model.padded_vocab_size}),
        ("fused classifier", {"loss": "auto"}),
        ("fused norms and MLP", {"norm": "auto", "mlp": "auto"}),
    ):
        rung = changed(last, **changes)
        if rung != last:
            yield name, rung, True
        last = rung
    whole = dataclasses.replace(model, precision=Precision("bf16"))
    if whole != last:
        yield "the rest", whole, True
    if has_fp8(model):
        yield "FP8", dataclasses.replace(whole, precision=Precision("fp8")), True


def has_fp8(model: ModelConfig) -> bool:
    """Return whether the model has FP8 matmuls and the device can compute them."""
    return model.supports_fp8 and why_not_fp8() is None


def torch_rungs(*, compiled: bool, fp8: bool):
    """Yield name and `How` of each rung in PyTorch.

    Args:
        compiled: False leaves out torch.compile in every rung.
        fp8: False leaves out the rung of FP8 matmuls.
    """
    from gptjax.bench.torch_gpt2 import How

    last = How(precision="fp32", compiled=False, flash=False, padded=False, fused=False)
    yield "fp32", last
    for name, changes in (
        ("TF32", {"precision": "tf32"}),
        ("bf16 autocast", {"precision": "bf16"}),
        ("compile", {"compiled": True}),
        ("flash attention", {"flash": True}),
        ("padded vocabulary", {"padded": True}),
        ("fused AdamW", {"fused": True}),
        ("FP8", {"precision": "fp8"}),
    ):
        if {"compile": compiled, "FP8": fp8}.get(name, True):
            last = dataclasses.replace(last, **changes)
            yield name, last


def climb(name: str, base: Config, device: jax.Device, *, torch: bool) -> Iterator[list[dict]]:
    """Measure the rungs; yield after each one the rows so far, gptjax's first. A failure is a row
    with its error.

    Args:
        name: of the model, for the rows.
        base: the model's config, with one micro-batch per step.
        torch: measure PyTorch's ladder too, on the same kind of device.
    """
    ours = []
    for rung, model, jit in rungs(base.model):
        config = dataclasses.replace(base, model=model)
        row = describe(name, config, forward=False) | {"rung": rung}
        ours.append((row, JaxStep(config, device, jit=jit)))
    # PyTorch first: it frees its memory, and JAX does not.
    theirs = _climb_torch(name, base, device, [step for _, step in ours]) if torch else ()
    measured: dict[str, list[dict]] = {"gptjax": [], "torch": []}
    for row in itertools.chain(theirs, (_measure_ours(row, step) for row, step in ours)):
        say(_line(row))
        rows = measured[row["system"]]
        rows.append(row)
        _compare(rows)
        yield measured["gptjax"] + measured["torch"]


def _measure_ours(row: dict, step: JaxStep) -> dict:
    say(f"{label(row)}: compiling")
    try:
        row = row | {"kernels": step.config.kernels()}
        if step.jit:
            step.compile()
            step.check_memory()
        row = complete(row, step.config, step, sustained(step.run, seconds=SECONDS))
        # The memory of a compiled step is known. Without jit it is the peak so far: that rung is
        # the first to run on the device.
        row["gib"] = needed_bytes(step.compiled) / GIB if step.jit else row["peak_gib"]
        return row
    except Exception as error:  # a failure must not lose the other rungs
        return row | {"error": first_line(error)}
    finally:
        step.free()
        gc.collect()


def _climb_torch(
    name: str, base: Config, device: jax.Device, ours: list[JaxStep]
) -> Iterator[dict]:
    """Yield PyTorch's rows. While PyTorch compiles, in Python, a thread has XLA compile gptjax's
    steps; nothing compiles during a measurement."""
    waiting = [step for step in ours if step.jit]
    hows = list(torch_rungs(compiled=device.platform == "gpu", fp8=has_fp8(base.model)))
    models = [_same_model(how) for _, how in hows]
    compiles = len({model for model in models if model.compiled})
    share = math.ceil(len(waiting) / compiles) if compiles else 0
    side = None
    with futures.ThreadPoolExecutor(1) as pool:
        for i, (rung, how) in enumerate(hows):
            row = {
                "system": "torch",
                "rung": rung,
                "model": name,
                "precision": how.precision,
                "pass": "train",
                "batch": base.micro_batch,
                "sequence_length": base.sequence_length,
                "kernels": str(how),
            }
            say(f"{label(row)}: compiling")
            new = i == 0 or models[i] != models[i - 1]
            jobs = []
            if new and how.compiled:
                jobs = [pool.submit(_compile, step) for step in waiting[:share]]
                waiting = waiting[share:]
            try:
                if new:
                    side = None  # free its memory before the next one is built
                side = torch_step(base, how, device, like=side)
                side.run(1)
                futures.wait(jobs)
                seconds = sustained(side.run, seconds=SECONDS)
                side.rest()
                row = complete(row, base, side, seconds)
                row["gib"] = row["peak_gib"]
            except Exception as error:
                row["error"], side = first_line(error), None
            futures.wait(jobs)
            yield row


def _same_model(how):
    """Return the part of a rung that its model depends on: not the optimizer, and of the
    precisions FP8 only."""
    fp8 = how.precision if how.fp8_head else ""
    return dataclasses.replace(how, precision=fp8, fused=False)


def _compile(step: JaxStep) -> None:
    with jax.default_device(step.device):
        step.compile()  # an error occurs again when the rung is measured


def _compare(rows: list[dict]) -> None:
    """Add to each row its speedup: `factor` over the rung before, `since_start` over the first."""
    measured = [row for row in rows if "ms" in row]
    for before, row in zip([None, *measured], measured, strict=False):
        row["factor"] = before["ms"] / row["ms"] if before else 1.0
        row["since_start"] = measured[0]["ms"] / row["ms"]


def _line(row: dict) -> str:
    outcome = (
        row["error"] if "error" in row else f"{row['ms']:.2f} ms, {row['tokens/s']:,.0f} tokens/s"
    )
    return f"{label(row)}: {outcome}"


def show(rows: list[dict], device: jax.Device) -> None:
    """Print a heading for each system, and under it a row for each rung."""
    first = rows[0]
    size = f"{first['batch']} × {first['sequence_length']} tokens a step"
    table, last = [], None
    for row in rows:
        if row["system"] != last:
            table.append(Row(row["system"]))
        last, name = row["system"], f"  {row['rung']}"
        if "error" in row:
            table.append(Row(name, note=row["error"]))
            continue
        figures = (
            f"{row['ms']:.2f}",
            f"{row['tokens/s']:,.0f}",
            number(row["mfu"], ".1%"),
            number(row["gib"], ".1f"),
            f"{row['factor']:.2f} ×",
            f"{row['since_start']:.2f} ×",
        )
        table.append(Row(name, figures, kernel_names(row)))
    columns = ("ms", "tokens/s", "MFU", "GiB", "rung", "since start")
    print_table(f"{device.device_kind}: {first['model']}, {size}", columns, table)
