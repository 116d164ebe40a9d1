"""Memory of a compiled program, and what is said when it does not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from gptjax.config import Config, ConfigError
from gptjax.training import compilation
from gptjax.training.memory import available_bytes, needed_bytes


def compiled_for(n: int) -> jax.stages.Compiled:
    x = jax.ShapeDtypeStruct((n, 1024), jnp.float32)
    return jax.jit(lambda x: jnp.sort(x, axis=0) @ jnp.ones((1024, 8))).lower(x).compile()


def test_counts_arguments_results_and_temporaries():
    small, large = needed_bytes(compiled_for(64)), needed_bytes(compiled_for(512))
    assert small >= 64 * 1024 * 4 and 6 * small < large < 10 * small


def test_a_donated_argument_counts_once():
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    donated, kept = (needed_bytes(jax.jit(lambda x: x + 1, donate_argnums=d).lower(x).compile()) for d in ((0,), ()))
    assert kept - donated == 1024 * 1024 * 4


def test_available_is_plausible():
    assert available_bytes(jax.devices("cpu")[0]) > 2**30


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
