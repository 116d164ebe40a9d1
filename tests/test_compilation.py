"""What is said when a step does not fit into memory."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from gptjax.config import Config, ConfigError
from gptjax.training import compilation
from gptjax.training.memory import needed_bytes


def compiled_for(n: int) -> jax.stages.Compiled:
    """A program whose memory grows with n."""
    return jax.jit(lambda x: jnp.sort(x, axis=0)).lower(jax.ShapeDtypeStruct((n, 1024), jnp.float32)).compile()


def config(micro_batch):
    return dataclasses.replace(Config(), sequence_length=1, batch_tokens=micro_batch, micro_batch=micro_batch)


def test_a_step_that_does_not_fit_names_the_largest_micro_batch_that_does(monkeypatch):
    monkeypatch.setattr(compilation, "available_bytes", lambda device: needed_bytes(compiled_for(25)))
    with pytest.raises(ConfigError, match=r"--micro-batch 96 needs .*nothing was allocated.*--micro-batch 24 fits"):
        compilation.compile_to_fit(compiled_for, config(96), jax.devices("cpu")[0])


def test_nothing_fits(monkeypatch):
    monkeypatch.setattr(compilation, "available_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match="No micro-batch of this model.*recompute"):
        compilation.compile_to_fit(compiled_for, config(8), jax.devices("cpu")[0])


def test_what_fits_is_compiled_once(monkeypatch):
    asked = []
    compilation.compile_to_fit(lambda n: asked.append(n) or compiled_for(n), config(8), jax.devices("cpu")[0])
    assert asked == [8]
