"""Measure PyTorch's ladder of accelerations, and append its rows to gptjax's.

    python -m gptjax.bench ladder --out ladder.json
    python benchmarks/rivals/ladder.py ladder.json --out both.json

Each rung includes the rungs before it: fp32 → TF32 → bf16 by autocast → torch.compile → SDPA →
padded vocabulary → fused AdamW → FP8.
"""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro
from torch_gpt2 import How
from torch_side import require_torch, torch_step, why_no_step

from gptjax.bench import BenchError, results
from gptjax.bench import __main__ as bench
from gptjax.bench.configs import OWN_DEFAULT, ModelOptions, one_micro_batch
from gptjax.bench.harness import one_device, sustained, timed_result
from gptjax.bench.ladder import SECONDS, compare, has_fp8
from gptjax.bench.results import label, raise_failures, say
from gptjax.bench.step import figures, show
from gptjax.config import Config
from gptjax.terminal import first_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside(ModelOptions):
    """Measure PyTorch's ladder with the batch and sequence length of gptjax's."""

    ladder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="LADDER.json")]]
    """gptjax's result, of `bench ladder --out`, with the same model."""
    out: Annotated[Path | None, OWN_DEFAULT] = None
    """JSON file for the rows of both."""

    def run(self) -> None:
        results.check_file(self.out)
        ours = results.read(self.ladder)["rows"]
        base = one_micro_batch(self.base(), ours[0]["batch"], ours[0]["sequence_length"])
        require_torch(one_device())
        if why := why_no_step(base):
            raise BenchError(why)
        rows = list(climb(self.name, base))
        compare(rows)
        result = timed_result("benchmarks/rivals/ladder.py", ours + rows)
        results.report(result, self.out, show)
        raise_failures(rows)


def rungs(*, compiled: bool, fp8: bool) -> Iterator[tuple[str, How]]:
    """Yield name and `How` of each rung.

    Args:
        compiled: False leaves out torch.compile in every rung.
        fp8: False leaves out the rung of FP8 matmuls.
    """
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


def climb(name: str, base: Config) -> Iterator[dict]:
    """Yield a row for each rung. A failure is a row with its error."""
    device, side, last = one_device(), None, None
    for rung, how in rungs(compiled=device.platform == "gpu", fp8=has_fp8(base.model)):
        row = {"system": "torch", "rung": rung, "model": name, "precision": how.precision}
        row |= {"pass": "train", "batch": base.micro_batch, "kernels": str(how)}
        row |= {"sequence_length": base.sequence_length}
        say(f"{label(row)}: compiling")
        try:
            if same_model(how) != last:
                side = None  # free its memory before the next one is built
            last = same_model(how)
            side = torch_step(base, how, device, like=side)
            side.run(1)
            seconds = sustained(side.run, seconds=SECONDS)
            side.rest()
            row |= figures(row, base, seconds, side.peak)
            row["gib"] = row["peak_gib"]
        except Exception as error:
            row["error"], side = first_line(error), None
        yield row


def same_model(how: How) -> How:
    """Return the part of a rung that its model depends on: not the optimizer, and of the
    precisions FP8 only."""
    return dataclasses.replace(how, precision=how.precision if how.fp8_head else "", fused=False)


if __name__ == "__main__":
    sys.exit(bench.main(commands=Beside, prog="python benchmarks/rivals/ladder.py"))
