"""gptjax.optim.config: each config builds its optimizer and describes it; switching between
them keeps the options that both have."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gptjax import optim, parallel
from gptjax.cli import from_command_line
from gptjax.config import Config, ConfigError
from gptjax.models.base import abstract_params, graph
from gptjax.models.gpt2 import GPT2Config
from gptjax.optim import (
    ALGORITHMS,
    MuonConfig,
    NorMuonConfig,
    OptimizerConfig,
    switch_algorithm,
)
from gptjax.training.step import init_state, make_train_step

pytestmark = pytest.mark.usefixtures("optax_promotion")

MODEL = GPT2Config(
    vocab_size=61, padded_vocab_size=64, block_size=16, n_layer=1, n_head=2, n_embd=16
)
CONFIG = Config(model=MODEL, sequence_length=16, max_steps=30)

GROUP = [optim.Group("w")]


def config_of(algorithm="adamw", **options):
    optimizer = ALGORITHMS[algorithm](warmup_steps=2, schedule="constant", **options)
    return dataclasses.replace(CONFIG, optimizer=optimizer)


def mesh():
    return parallel.data_mesh(jax.devices()[:1])


def test_muon_learns_a_batch():
    tx = config_of("muon", learning_rate=1e-2).build_optimizer(mesh())
    step, state, found = jax.jit(make_train_step(graph(MODEL), tx)), init_state(MODEL, tx, 0), []
    windows = jnp.asarray(np.random.default_rng(0).integers(0, 61, (1, 4, 17)), jnp.int32)
    for _ in range(30):
        state, metrics = step(state, windows)
        found.append(float(metrics["loss"]))
    assert found[-1] < 0.5 * found[0]


def test_with_muon_the_rest_takes_adamw_as_the_header_says():
    """Decay for embeddings, none for norms and biases, and no Nesterov momentum."""
    params = init_state(MODEL, optax.identity(), 0).params
    config = config_of(algorithm="muon", weight_decay=0.5, eps=1e-3)
    theirs = optim.adamw(config.build_optimizer(mesh()).learning_rate, weight_decay=0.5, eps=1e-3)
    grads = jax.tree.map(lambda p: jnp.cos(100 * p), params)
    found = []
    for tx in (config.build_optimizer(mesh()), theirs):
        state, update = tx.init(params), jax.jit(tx.update)
        for _ in range(2):
            updates, state = update(grads, state, params)
        found.append(updates)
    ours, wanted = found
    for part in ("wte", "wpe", "ln_f"):
        jax.tree.map(np.testing.assert_array_equal, ours[part], wanted[part])
    kernel = ours["blocks"][0]["attn"]["c_proj"]["kernel"]
    assert not np.allclose(kernel, wanted["blocks"][0]["attn"]["c_proj"]["kernel"])


def test_muon_refuses_layouts_that_it_would_ignore():
    command = ["--config", "configs/speedrun_docs.py", "--optimizer", "muon"]
    message = (
        "--optimizer muon cannot train SpeedrunConfig: the group .* choose --optimizer normuon"
    )
    with pytest.raises(ConfigError, match=message):
        from_command_line(command)


def test_normuon_is_what_the_config_says(monkeypatch):
    adam = {"eps": 1e-6, "clip_norm": 0.7, "weight_decay": 0.2, "neuron_b2": 0.8, "b1": 0.8}
    config = NorMuonConfig(
        schedule="constant",
        warmup_steps=2,
        learning_rate=3e-3,
        matrix_learning_rate=0.01,
        matrix_weight_decay=0.3,
        momentum=0.9,
        momentum_low=0.5,
        momentum_warmup_steps=2,
        momentum_cooldown_steps=4,
        orthogonalization="newton_schulz",
        adam_every=2,
        **adam,
    )
    seen = {}
    module = importlib.import_module("gptjax.optim.config")
    build = lambda groups, **how: seen.update(how, groups=groups) or optax.identity()
    monkeypatch.setattr(module, "normuon_and_adamw", build)
    schedules = {
        "learning_rate": [1.5e-3, 3e-3, 3e-3, 3e-3],
        "matrix_learning_rate": [0.005, 0.01, 0.01, 0.01],
        "momentum": [0.5, 0.7, 0.9, 0.7],
    }
    for form, decay in {"lr": [0.3] * 4, "lr_squared": [0.0015, 0.003, 0.003, 0.003]}.items():
        own = dataclasses.replace(config, matrix_decay_form=form)
        own.build(total_steps=30, groups=GROUP, mesh=mesh())
        assert {name: seen[name] for name in adam} == adam
        assert seen["groups"] is GROUP and seen["every"] == 2 and seen["b2"] == 0.95
        for name, wanted in (schedules | {"matrix_weight_decay": decay}).items():
            assert [round(float(seen[name](n)), 6) for n in (0, 1, 20, 28)] == wanted
    x = jnp.ones((1, 2, 3))
    np.testing.assert_array_equal(seen["method"](x), optim.newton_schulz(x))


def test_the_header_names_the_options():
    options = {"matrix_decay_form": "lr_squared", "adam_every": 2, "cautious_decay": True}
    params, groups = abstract_params(MODEL), MODEL.parameter_groups()
    (first,) = NorMuonConfig(**options).describe(params, groups)
    assert first.startswith("normuon: lr ")
    assert all(f"{name} {value}" in first for name, value in options.items())
    assert OptimizerConfig(learning_rate=1e-3).describe(params, groups) == [
        "adamw: lr 0.001, decay 0.1"
    ]


def test_another_algorithm_keeps_the_options_that_both_have():
    assert [(name, kind.name) for name, kind in ALGORITHMS.items()] == [
        (name, name) for name in ("adamw", "normuon", "muon")
    ]
    adamw = OptimizerConfig(learning_rate=1e-3, warmup_steps=5, clip_norm=None)
    normuon = switch_algorithm(adamw, "normuon")
    assert normuon == NorMuonConfig(learning_rate=1e-3, warmup_steps=5, clip_norm=None)
    normuon = dataclasses.replace(normuon, momentum=0.5, neuron_b2=0.1)
    muon = switch_algorithm(normuon, "muon")
    wanted = {"learning_rate": 1e-3, "warmup_steps": 5, "clip_norm": None}
    assert muon == MuonConfig(**wanted, momentum=0.5)
    assert switch_algorithm(muon, "adamw") == adamw and switch_algorithm(muon, "muon") is muon
    with pytest.raises(ValueError, match=r"unknown optimizer 'sgd'.*adamw.*normuon.*muon"):
        switch_algorithm(muon, "sgd")
