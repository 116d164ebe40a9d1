"""`python -m gptjax.bench ladder`: the speedup of each rung of the acceleration ladder on this GPU.

Each rung includes the rungs before it: fp32 without jit → jit → TF32 → bf16 → flash attention →
padded vocabulary → fused classifier → fused norms and MLP → the rest → FP8. Every rung is a full
training step (forward, backward, clip, AdamW) on the same number of random tokens, measured as by
`bench step`, for about a second. benchmarks/rivals/ladder.py adds PyTorch's ladder.
"""

import dataclasses
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from gptjax.bench import results
from gptjax.bench.configs import OWN_DEFAULT, ModelOptions, one_micro_batch
from gptjax.bench.harness import one_device, timed_result
from gptjax.bench.jax_step import JaxStep
from gptjax.bench.results import raise_failures
from gptjax.bench.step import compiled, describe, show, timed
from gptjax.models.base import ModelConfig
from gptjax.precision import Precision
from pallas_kernels.gemm import why_not_fp8

SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder(ModelOptions):
    """Measure the acceleration ladder on this device: a row for each rung, which includes the rungs
    before it."""

    batch: int = 16
    """Sequences per step. Without jit, in fp32 and with all scores of attention in memory, 16
    sequences of 1024 tokens need about 60 GiB."""
    sequence_length: Annotated[int | None, OWN_DEFAULT] = None
    """Tokens of a sequence (default: the config's, or 1024)."""
    out: Annotated[Path | None, OWN_DEFAULT] = None
    """JSON file for the results; `draw` draws it."""

    def run(self) -> None:
        results.check_file(self.out)
        base = one_micro_batch(self.base(), self.batch, self.sequence_length)
        # Without jit each operation is compiled by itself, with XLA's own options: XLA would write
        # every matmul in Triton too and time the variants, for minutes. The other rungs leave that
        # out as a training run does. JAX reads the flag at its first use.
        flag = "--xla_gpu_enable_triton_gemm=false"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        rows = []
        for rung, model, jit in rungs(base.model):
            config = dataclasses.replace(base, model=model)
            row = describe(self.name, config, forward=False) | {"rung": rung}
            step = JaxStep(config, one_device(), jit=jit)
            rows.append(row := timed(compiled(row, step), step, SECONDS))
            # The memory of a compiled step is known. Without jit it is the peak so far: that rung
            # is the first to run on the device.
            row["gib"] = row.get("needed_gib") or row.get("peak_gib")
            del step
            gc.collect()
        compare(rows)
        results.report(timed_result("-m gptjax.bench", rows), self.out, show)
        raise_failures(rows)


def rungs(model: ModelConfig) -> Iterator[tuple[str, ModelConfig, bool]]:
    """Yield name, model and whether it is compiled, of each rung. The last are the model of the
    config in bf16 and, if `has_fp8`, in FP8. A rung that changes nothing in this model is left
    out."""
    own = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    plain: dict[str, Any] = dict.fromkeys(("attention", "loss", "norm", "mlp"), "xla")
    plain |= {"padded_vocab_size": model.vocab_size, "loss_chunk": None, "recompute": "none"}
    fp32, tf32, bf16, fp8 = map(Precision, ("fp32", "tf32", "bf16", "fp8"))
    steps: list[tuple[str, dict[str, Any]]] = [
        ("fp32, no jit", plain | {"precision": fp32}),
        ("jit", {}),
        ("TF32", {"precision": tf32}),
        ("bf16", {"precision": bf16}),
        ("flash attention", {"attention": "auto"}),
        ("padded vocabulary", {"padded_vocab_size": model.padded_vocab_size}),
        ("fused classifier", {"loss": "auto"}),
        ("fused norms and MLP", {"norm": "auto", "mlp": "auto"}),
        ("the rest", own | {"precision": bf16}),
        ("FP8", {"precision": fp8} if has_fp8(model) else {}),
    ]
    last = model
    for name, changes in steps:
        changes = {field: value for field, value in changes.items() if field in own}
        rung = dataclasses.replace(last, **changes)
        if name == "jit" or rung != last:
            yield name, rung, name != "fp32, no jit"
        last = rung


def has_fp8(model: ModelConfig) -> bool:
    """Return whether the model has FP8 matmuls and the device can compute them."""
    return model.supports_fp8 and why_not_fp8() is None


def compare(rows: list[dict]) -> None:
    """Add to each row its speedup: `factor` over the rung before, `since_start` over the first."""
    measured = [row for row in rows if "ms" in row]
    for before, row in zip([None, *measured], measured, strict=False):
        row["factor"] = before["ms"] / row["ms"] if before else 1.0
        row["since_start"] = measured[0]["ms"] / row["ms"]
