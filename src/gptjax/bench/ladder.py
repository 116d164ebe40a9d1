"""`python -m gptjax.bench ladder`: what each rung of the acceleration ladder brings on this GPU, in
JAX and in PyTorch.

Each rung keeps the ones below it: fp32 without jit → jit → TF32 → bf16 → flash attention → padded
vocabulary → fused classifier → fused norms and MLP → the rest. Every rung is a full training step
(forward, backward, clip, AdamW) on the same number of random tokens, measured as `bench step` does,
for about a second.
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

from gptjax.bench import step as steps
from gptjax.bench.kernels import BenchError
from gptjax.bench.picture import draw_ladder
from gptjax.bench.step import OWN_DEFAULT, OurStep, Preset
from gptjax.bench.table import Row, print_table
from gptjax.config import Config
from gptjax.models.gpt2 import GPT2Config
from gptjax.precision import Precision
from gptjax.training.memory import GIB, needed_bytes

SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
    """The acceleration ladder on this device, one rung a line, each with those before it; beside it
    PyTorch's, where PyTorch with CUDA is installed."""

    config: Annotated[Path | None, OWN_DEFAULT] = None
    """An experiment card, whose model is taken in place of a preset's."""
    preset: Annotated[Preset | None, OWN_DEFAULT] = None
    """The model's shape (default: gpt2)."""
    batch: int = 16
    """Sequences a step. In fp32, with all scores of attention made, 16 of 1024 need about 37
    GiB."""
    sequence_length: Annotated[int | None, OWN_DEFAULT] = None
    """Tokens a sequence (default: the card's, or 1024)."""
    torch: bool = True
    """Measure PyTorch's ladder too, where there is PyTorch with CUDA; it compiles for minutes."""
    out: Annotated[Path | None, OWN_DEFAULT] = None
    """JSON file for the results."""
    picture: Annotated[Path | None, OWN_DEFAULT] = None
    """Picture of the results; its ending names the format (png, pdf, svg)."""
    draw: Annotated[Path | None, OWN_DEFAULT] = None
    """Draw the picture of this earlier result, and measure nothing."""

    def run(self) -> None:
        if self.draw:
            if not self.picture:
                raise BenchError("--draw RESULT.json needs --picture FILE to draw into")
            fields = ("system", "rung", "model", "batch", "sequence_length")
            draw_ladder(steps.read(self.draw, *fields), self.picture)
            print(f"wrote {self.picture}")
            return
        if self.config and self.preset:
            raise BenchError("--config and --preset both name a model: give one of them")
        # The rung without jit compiles each operation by itself, with XLA's own options: it would
        # write every product in Triton, too, and time the variants, for minutes. The other rungs
        # leave that out as a training run does. JAX reads it at its first use.
        flag = "--xla_gpu_enable_triton_gemm=false"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        device = steps.one_device()
        torch = self.torch and device.platform == "gpu" and steps.has_torch(device)
        if self.torch and not torch:
            steps.say("PyTorch with CUDA is not here: its ladder is left out")
        base = steps.base_config(self.config, self.preset)
        base = steps.one_micro_batch(base, self.batch, self.sequence_length or base.sequence_length)
        name = self.config.stem if self.config else self.preset or "gpt2"
        for rows in climb(name, base, device, torch=torch):
            result = steps.result(steps.command_line("ladder", self), rows, device, torch=torch)
            if self.out:  # who ends it before the top keeps the rungs so far
                steps.write(self.out, result)
        show(rows, device)
        if self.out:
            print(f"wrote {self.out}")
        if self.picture:
            draw_ladder(result, self.picture)
            print(f"wrote {self.picture}")
        steps.raise_failures(rows)


def rungs(model: GPT2Config) -> Iterator[tuple[str, GPT2Config, bool]]:
    """Name, model and whether it is compiled, of each rung in JAX. The last is the model as it is,
    in bf16; left out if it is the one before."""
    plain = {
        "attention": "xla",
        "loss": "xla",
        "norm": "xla",
        "mlp": "xla",
        "padded_vocab_size": model.vocab_size,
    }
    last = dataclasses.replace(
        model, **plain, loss_chunk=None, recompute="none", precision=Precision("fp32")
    )
    yield "fp32, no jit", last, False
    for name, changes in (
        ("jit", {}),
        ("TF32", {"precision": Precision("tf32")}),
        ("bf16", {"precision": Precision("bf16")}),
        ("flash attention", {"attention": "auto"}),
        ("padded vocabulary", {"padded_vocab_size": model.padded_vocab_size}),
        ("fused classifier", {"loss": "auto"}),
        ("fused norms and MLP", {"norm": "auto", "mlp": "auto"}),
    ):
        last = dataclasses.replace(last, **changes)
        yield name, last, True
    whole = dataclasses.replace(model, precision=Precision("bf16"))
    if whole != last:
        yield "the rest", whole, True


def torch_rungs(*, compiled: bool):
    """Name and `How` of each rung in PyTorch.

    Args:
        compiled: False leaves out torch.compile, all the way up.
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
    ):
        if name != "compile" or compiled:
            last = dataclasses.replace(last, **changes)
            yield name, last


def climb(name: str, base: Config, device: jax.Device, *, torch: bool) -> Iterator[list[dict]]:
    """After each rung a row for every one so far, ours first; one that fails is a row with its
    error.

    Args:
        name: of the model, for the rows.
        base: its config, one micro-batch a step.
        torch: climb PyTorch's ladder too, on the same kind of device.
    """
    ours = []
    for rung, model, jit in rungs(base.model):
        config = dataclasses.replace(base, model=model)
        row = steps.describe(name, config, forward=False) | {"rung": rung}
        ours.append((row, OurStep(config, device, jit=jit)))
    # PyTorch goes first: it hands its memory back, and JAX does not.
    theirs = _climb_torch(name, base, device, [step for _, step in ours]) if torch else ()
    found: dict[str, list[dict]] = {"gptjax": [], "torch": []}
    for row in itertools.chain(theirs, (_measure_ours(row, step) for row, step in ours)):
        steps.say(_line(row))
        rows = found[row["system"]]
        rows.append(row)
        _compare(rows)
        yield found["gptjax"] + found["torch"]


def _measure_ours(row: dict, step: OurStep) -> dict:
    steps.say(f"{steps.label(row)}: compiling")
    try:
        row = row | {"kernels": step.config.kernels()}
        if step.jit:
            step.compile()
            step.check_memory()
        row = steps.complete(row, step.config, step, steps.sustained(step.run, seconds=SECONDS))
        # What a compiled step needs is known; of the other, that it is the first to run on the
        # device.
        row["gib"] = needed_bytes(step.compiled) / GIB if step.jit else row["peak_gib"]
        return row
    except Exception as error:  # one rung that fails must not cost the others their figures
        return row | {"error": steps.first_line(error)}
    finally:
        step.free()
        gc.collect()


def _climb_torch(
    name: str, base: Config, device: jax.Device, ours: list[OurStep]
) -> Iterator[dict]:
    """PyTorch's rows. While PyTorch compiles, in Python, a thread has XLA compile our steps;
    nothing compiles while one is measured."""
    waiting = [step for step in ours if step.jit]
    found = list(torch_rungs(compiled=device.platform == "gpu"))
    models = [_same_model(how) for _, how in found]
    compiles = len({model for model in models if model.compiled})
    share = math.ceil(len(waiting) / compiles) if compiles else 0
    side = None
    with futures.ThreadPoolExecutor(1) as pool:
        for i, (rung, how) in enumerate(found):
            row = {
                "system": "torch",
                "rung": rung,
                "model": name,
                "precision": how.precision,
                "pass": "train",
            }
            row |= {
                "batch": base.micro_batch,
                "sequence_length": base.sequence_length,
                "kernels": str(how),
            }
            steps.say(f"{steps.label(row)}: compiling")
            new = i == 0 or models[i] != models[i - 1]
            jobs = []
            if new and how.compiled:
                jobs, waiting = (
                    [pool.submit(_compile, step) for step in waiting[:share]],
                    waiting[share:],
                )
            try:
                if new:
                    side = None  # its memory, before the next one's
                side = steps.torch_step(base, how, device, like=side)
                side.run(1)
                futures.wait(jobs)
                seconds = steps.sustained(side.run, seconds=SECONDS)
                side.rest()
                row = steps.complete(row, base, side, seconds)
                row["gib"] = row["peak_gib"]
            except Exception as error:
                row["error"], side = steps.first_line(error), None
            futures.wait(jobs)
            yield row


def _same_model(how):
    """Rungs for which this is equal share a model: precision and optimizer do not belong to it."""
    return dataclasses.replace(how, precision="", fused=False)


def _compile(step: OurStep) -> None:
    with jax.default_device(step.device):
        step.compile()  # what it raises, it raises again when the rung is measured


def _compare(rows: list[dict]) -> None:
    """Adds what each rung brought: `factor` over the one before, `since_start` over the first."""
    measured = [row for row in rows if "ms" in row]
    for before, row in zip([None, *measured], measured, strict=False):
        row["factor"] = before["ms"] / row["ms"] if before else 1.0
        row["since_start"] = measured[0]["ms"] / row["ms"]


def _line(row: dict) -> str:
    found = (
        row["error"] if "error" in row else f"{row['ms']:.2f} ms, {row['tokens/s']:,.0f} tokens/s"
    )
    return f"{steps.label(row)}: {found}"


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
            steps.number(row["mfu"], ".1%"),
            steps.number(row["gib"], ".1f"),
            f"{row['factor']:.2f} ×",
            f"{row['since_start']:.2f} ×",
        )
        table.append(Row(name, figures, steps.kernel_names(row)))
    columns = ("ms", "tokens/s", "MFU", "GiB", "rung", "since start")
    print_table(f"{device.device_kind}: {first['model']}, {size}", columns, table)
