"""Config of configs/gpt2_124m_docs.py with one training step whose gradient is multiplied by 100,
and without clipping: the optimizer receives the spike.

    python train.py --config benchmarks/experiments/gradient_spike.py --model.precision fp8

The learning rates are those of the first 250 of 1,000 steps. fp8_losses.py compares this run in
several precisions.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import gptjax

sys.path.insert(0, str(Path(__file__).parents[2] / "configs"))
from gpt2_124m_docs import config as gpt2_124m_docs


@dataclasses.dataclass(frozen=True)
class SpikeConfig(gptjax.GPT2Config):
    """GPT-2's config, and the step with the spike."""

    spike_step: int = 150
    """Index of the step, from 0."""
    spike_factor: float = 100.0
    """Factor of the gradient in this step."""

    def build(self, rngs):
        return SpikeGPT2(self, rngs=rngs)

    def loss_options(self, step):
        return {"factor": jnp.where(step == self.spike_step, jnp.float32(self.spike_factor), 1.0)}


class SpikeGPT2(gptjax.GPT2):
    """GPT-2 whose gradient in a training step is multiplied by a factor: the whole backward pass
    computes with the larger numbers."""

    Config = SpikeConfig

    def losses(self, *args, factor=None, **options):
        losses_N = super().losses(*args, **options)
        if factor is None:
            return losses_N
        return factor * losses_N - (factor - 1) * jax.lax.stop_gradient(losses_N)


config = dataclasses.replace(
    gpt2_124m_docs,
    name="gradient_spike",
    model=SpikeConfig(precision=gpt2_124m_docs.model.precision),
    optimizer=dataclasses.replace(
        gpt2_124m_docs.optimizer, warmup_steps=100, clip_norm=None, schedule_steps=1_000
    ),
    max_steps=250,
    val_every=50,
)
