"""Measure the training step of jax-linear-attention (package jla) and gptjax's, in turns.

    pip install --no-deps --target jla jax-linear-attention==0.1.0 equinox wadler-lindig
    export XLA_PYTHON_CLIENT_PREALLOCATE=true PYTHONPATH=jla:src:.
    python benchmarks/rivals/jla_step.py --precision bf16 fp8 --out jla.json

Both train jla's preset transformer-1p3b (gptjax: benchmarks/rivals/jla_1p3b.py) on random tokens,
without recomputation, with fp32 parameters, gradients and AdamW. The MFU is of gptjax's count of
operations, which is jla's too. jla's own configs are not in its wheel: each kernel of its attention
is a row.

Not equal: jla scales FP8 by earlier steps, gptjax by the current one, and gptjax's head is FP8 in
FP8. jla's loop over micro-batches is not unrolled here: unrolled, it needs 78 to 95 GiB.
"""

import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import equinox as eqx
import jax
from jla.config import OptimConfig
from jla.models import build_model, get_preset
from jla.training.optimizers import optimizer_from_config
from jla.training.schedulers import create_schedule
from jla.training.step import LossConfig, build_train_step, lm_loss

from gptjax.bench import __main__ as bench
from gptjax.bench.configs import OWN_DEFAULT
from gptjax.bench.harness import one_device, sustained
from gptjax.bench.jax_step import JaxStep
from gptjax.bench.results import label, say
from gptjax.bench.step import Step, compiled, describe, figures
from gptjax.config import Config
from gptjax.terminal import first_line

TURNS = 2
# Fields of jla's ModelConfig, and of its AttentionConfig for Mosaic; without them it is cuDNN's.
MODEL = {
    "bf16": {"mlp_kernel": "mosaic_gpu"},
    "fp8": {"fp8": "delayed", "fp8_fused": True, "lean_vjp": True},
}
MOSAIC = {"implementation": "mosaic_gpu", "mosaic_gpu_backward": "fused"}
MOSAIC_OF = {"bf16": MOSAIC, "fp8": MOSAIC | {"fp8_grad_epilogue": True}}


class JlaStep:
    """jla's training step on random tokens, with the fields of a variant."""

    def __init__(self, config: Config, model: dict[str, Any], attention: dict[str, Any]):
        preset = get_preset("transformer-1p3b")
        attention = dataclasses.replace(preset.attention, **attention)
        how = {"remat": "none", "scan_layers": False, "attention": attention}
        self.model = dataclasses.replace(preset, **how, **model)
        self.tx = optimizer_from_config(OptimConfig(), create_schedule(3e-4, "constant"))
        loss = lm_loss(LossConfig(impl="auto", grad_in_forward=True))
        self.step = build_train_step(self.tx, loss, update_guard="select", scan_unroll=1)
        shape = config.micro_batches(1), config.micro_batch, config.sequence_length + 1
        tokens = jax.random.randint(jax.random.key(1), shape, 0, config.model.vocab_size)
        self.batch = {"input_ids": tokens[..., :-1], "labels": tokens[..., 1:]}
        self.rest()

    def rest(self) -> None:
        """Free the state."""
        self.state = None

    def run(self, steps: int) -> float:
        """Return the device's seconds for this number of consecutive steps."""
        if self.state is None:
            model = eqx.filter_jit(build_model)(self.model, key=jax.random.key(0))
            params = eqx.filter(model, eqx.is_inexact_array)
            self.state = model, jax.jit(self.tx.init)(params), jax.random.key(2)
        (model, opt_state, key), self.state = self.state, None
        jax.block_until_ready((model, opt_state))
        started = time.perf_counter()
        for _ in range(steps):
            model, opt_state, _, key = self.step(model, opt_state, self.batch, key)
        jax.block_until_ready((model, opt_state))
        taken = time.perf_counter() - started
        self.state = model, opt_state, key
        return taken


@dataclasses.dataclass(frozen=True, kw_only=True)
class BesideJla(Step):
    """Measure gptjax's step and jla's, in turns: a row of each."""

    config: Annotated[Path | None, OWN_DEFAULT] = Path(__file__).with_name("jla_1p3b.py")
    """Config file of jla's preset in gptjax."""
    micro_batches: int = 4
    attention: tuple[Literal["cudnn", "mosaic"], ...] = ("cudnn", "mosaic")
    """jla's attention: a row for each. jla compiles for minutes."""
    script: ClassVar[str] = "benchmarks/rivals/jla_step.py"

    def measure(self, config: Config, devices: int) -> list[dict]:
        ours = JaxStep(config, one_device())
        asked = describe(self.name, config, forward=False)
        rows, sides, times = [compiled(asked, ours)], [ours], [[]]
        precision = config.model.precision.name
        for name in self.attention:
            model, attention = MODEL[precision], MOSAIC_OF[precision] if name == "mosaic" else {}
            options = {"system": "jla", "asked": model | attention, "kernels": "as asked"}
            rows.append(asked | options)
            sides.append(JlaStep(config, model, attention))
            times.append([])
        for turn in range(TURNS):
            for row, side, measured in zip(rows, sides, times, strict=True):
                if "error" in row:
                    continue
                say(f"{label(row)}: turn {turn + 1} of {TURNS}")
                try:
                    measured += sustained(side.run, seconds=self.seconds)
                    say(f"{1e3 * statistics.median(measured):.2f} ms")
                except Exception as error:
                    row["error"] = first_line(error)
                side.rest()  # two states and an executable's temporaries do not fit
        for row, measured in zip(rows, times, strict=True):
            if "error" not in row:
                row |= figures(row, config, measured, None)
        best = min((row["ms"] for row in rows[1:] if "ms" in row), default=None)
        if best and "ms" in rows[0]:
            rows[0]["of_jla"] = best / rows[0]["ms"]
        return rows


if __name__ == "__main__":
    sys.exit(bench.main(commands=BesideJla, prog="python benchmarks/rivals/jla_step.py"))
