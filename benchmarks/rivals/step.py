"""Measure gptjax's training step and PyTorch's, or llm.c's, in turns.

    python benchmarks/rivals/step.py --batch 64 --out step.json
    python benchmarks/rivals/step.py --batch 64 --llmc PATH

The options are those of `python -m gptjax.bench step`. PyTorch's step is torch.compile (not on a
CPU), scaled_dot_product_attention, fused AdamW, padded vocabulary, and torch._scaled_mm for FP8. On
several devices, DDP is measured for the strategy data, and FSDP2 for zero1 and fsdp.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar

from llmc_side import LlmcStep, find_program, why_no_llmc
from torch_side import how_of, require_torch, torch_several, torch_step, why_no_step
from turns import take_turns

from gptjax.bench import BenchError
from gptjax.bench import __main__ as bench
from gptjax.bench.configs import OWN_DEFAULT
from gptjax.bench.harness import first_devices, one_device
from gptjax.bench.jax_step import JaxStep
from gptjax.bench.results import label, say
from gptjax.bench.step import Step, compiled, describe, figures
from gptjax.config import Config
from gptjax.terminal import first_line

SAME = ("model", "precision", "batch", "sequence_length", "pass")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside(Step):
    """Measure gptjax's step and PyTorch's, or llm.c's, in turns: a row of each for each
    combination of options."""

    llmc: Annotated[Path | None, OWN_DEFAULT] = None
    """Path of llm.c's train_gpt2cu, or its folder: measure llm.c in place of PyTorch. Needs
    one GPU, GPT-2, AdamW and the precision of llm.c's build."""
    script: ClassVar[str] = "benchmarks/rivals/step.py"

    def configs(self) -> list[tuple[Config, int]]:
        """Return each config, and its number of devices.

        Raises:
            BenchError: the other program cannot run here, or has no such step.
        """
        found = super().configs()
        if self.micro_batches > 1:
            raise BenchError("PyTorch and llm.c measure one micro-batch: leave out --micro-batches")
        if self.llmc:
            if self.forward or max(self.devices) > 1:
                raise BenchError("llm.c measures whole training steps on one device")
            find_program(self.llmc)
        else:
            require_torch(one_device())
        for config, _ in found:
            if why := (why_no_llmc if self.llmc else why_no_step)(config):
                raise BenchError(why)
        return found

    def measure(self, config: Config, devices: int) -> list[dict]:
        row = describe(self.name, config, forward=self.forward, devices=devices)
        parallel = config.parallel_on(first_devices(devices))
        ours = JaxStep(config, one_device(), parallel=parallel, forward=self.forward)
        row = compiled(row, ours)
        rival, theirs = self._start_rival(row, config, devices)
        # The other side first: it frees the memory that it does not use, and JAX does not.
        sides: dict[str, Any] = {rival["system"]: theirs, "gptjax": ours}
        rows = {each["system"]: each for each in (row, rival)}
        sides = {name: side for name, side in sides.items() if "error" not in rows[name]}
        for name, seconds in take_turns(sides, seconds=self.seconds).items():
            if isinstance(seconds, Exception):
                rows[name]["error"] = first_line(seconds)
            else:
                rows[name] |= figures(rows[name], config, seconds, sides[name].peak)
        if all("ms" in each for each in rows.values()):
            row["of_llmc" if self.llmc else "of_torch"] = rival["ms"] / row["ms"]
        return list(rows.values())

    def _start_rival(self, asked: dict, config: Config, devices: int) -> tuple[dict, Any]:
        """Return the other program's row, and its step after the first run, or None and the row's
        error."""
        row = {"system": "llm.c" if self.llmc else "torch", "devices": devices}
        row |= {key: asked[key] for key in SAME}
        say(f"{label(row)}: compiling")
        step, how = None, {"forward": self.forward}
        try:
            if self.llmc:
                step = LlmcStep(find_program(self.llmc), config, one_device())
                row["kernels"] = " ".join([step.program.name, *step.options])
                step.start()
                return row, step
            options = how_of(config, one_device())
            row["kernels"] = str(options)
            if devices > 1:
                step = torch_several(config, options, one_device(), devices, **how)
                row |= step.spec.fields()
            else:
                step = torch_step(config, options, one_device(), **how)
            return row | {"compile_s": step.run(1)}, step
        except Exception as error:
            row["error"] = first_line(error)
        if not self.llmc:
            from torch_gpt2 import free_torch

            del step  # JAX needs the memory that it holds
            free_torch()
        return row, None


if __name__ == "__main__":
    sys.exit(bench.main(commands=Beside, prog="python benchmarks/rivals/step.py"))
