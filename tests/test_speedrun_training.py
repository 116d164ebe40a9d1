"""Training of the speedrun's model: ten steps of the record's optimizer against plain PyTorch, and
weights of tokens that change within a stage."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparison_tools import assert_within_twice, rms
from reference import speedrun as reference
from reference.speedrun_optimizer import RecordOptimizer
from saved_run_tools import save_run
from test_speedrun import LAYERS, random_of
from train_tools import run

import gptjax
from gptjax import parallel
from gptjax import stages as staging
from gptjax.config import Config, Stage
from gptjax.models.base import graph
from gptjax.models.speedrun import SpeedrunConfig
from gptjax.models.speedrun import Stage as ModelStage
from gptjax.optim import NorMuonConfig, polar_express
from gptjax.timeline import Timeline
from gptjax.training import compilation
from gptjax.training.step import init_state, loss_and_grads, make_train_step

pytestmark = pytest.mark.usefixtures("optax_promotion")

# The record's factor of mlp_out's learning rate needs n_inner = 4 · n_embd.
SIZES = {"vocab_size": 29, "padded_vocab_size": 32, "block_size": 64, "bigram_rows": 7}
TINY = SpeedrunConfig(**SIZES, **LAYERS, n_head=2, n_embd=16, n_inner=64)
TIED = ModelStage(2, 5, (5,), (1.0, 0.5), tied=True, final_token_weights=(1.0, 0.0), steps=(0, 6))
UNTIED = ModelStage(4, 9, (5, 9), evaluation_window=11)
CONFIG = Config(
    model=TINY,
    optimizer=NorMuonConfig(
        learning_rate=0.008,
        matrix_learning_rate=0.023,
        weight_decay=0.005,
        matrix_weight_decay=1.2,
        decay_form="lr_squared",
        matrix_decay_form="lr_squared",
        cautious_decay=True,
        adam_every=2,
        eps=1e-10,
        clip_norm=None,
        schedule="linear",
        warmup_steps=0,
        cooldown_steps=6,
        final_steps=1,
        final_fraction=0.15,
        momentum_warmup_steps=4,
        momentum_cooldown_steps=3,
    ),
    stages=(
        Stage(until=6, model={"stage": TIED}),
        Stage(learning_rate_factor=1.5, model={"stage": UNTIED}),
    ),
    sequence_length=13,
    batch_tokens=26,
    micro_batch=2,
    max_steps=10,
    loss_reduction="sequence_sum",
)


def rate(k):
    """Constant for three steps, then falling to 0.15 at step 9, whatever the stage's factor."""
    t = min(max(k - 3, 0) / 6, 1)
    return (1 if k < 6 else 1.5) * (1 - t) + 0.15 * t


def momentum(k):
    return 0.85 + 0.1 * min(k / 4, 1, (10 - k) / 3)


def theirs(params, seen, dtype):
    """Losses of each step, and the parameters after all of them, in fp64."""
    model, losses = reference.from_params(TINY, params, dtype=dtype), []
    optimizer = RecordOptimizer(dict(model.named_parameters()))
    for k, windows in enumerate(torch.from_numpy(seen).long()):
        tied, tokens = k < 6, windows[0, :, :-1]
        model.config = dataclasses.replace(TINY, stage=TIED if tied else UNTIED)
        weights = (1.0, 0.5 * (1 - k / 6)) if tied else (1.0,)
        logits = model(tokens, torch.zeros_like(tokens))
        loss = model.losses(logits, windows[0, :, 1:], weights).sum(1).mean()
        loss.backward()
        optimizer.step(k, rate(k), momentum(k), tied)
        losses.append(loss.item() / tokens.shape[1])
    return losses, {name: p.detach().double().numpy() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def seen():
    """Windows of ten steps."""
    return np.random.default_rng(1).integers(0, 29, (10, 1, 2, 14)).astype(np.int32)


@pytest.fixture(scope="module")
def params():
    """Random parameters, tied."""
    params = random_of(dataclasses.replace(TINY, padded_vocab_size=29))
    params["embed"] = params["lm_head"].T
    pad = {
        "lm_head": ((0, 0), (0, 3)),
        "embed": ((0, 3), (0, 0)),
        "values": ((0, 0), (0, 3), (0, 0)),
    }
    return {name: np.pad(x, pad[name]) if name in pad else x for name, x in params.items()}


def test_ten_steps_in_two_stages(params, seen, monkeypatch):
    monkeypatch.setitem(
        importlib.import_module("gptjax.optim.config").METHODS,
        "polar_express",
        functools.partial(polar_express, dtype=jnp.float32),
    )
    tx = CONFIG.build_optimizer(parallel.data_mesh(jax.devices()[:1]))
    how = {"loss_reduction": CONFIG.loss_reduction}
    steps = {k: jax.jit(make_train_step(graph(stage_config(k)), tx, **how)) for k in (0, 6)}
    state, losses = init_state(TINY, tx, 0, params=jax.tree.map(jnp.asarray, params)), []
    for k, windows in enumerate(seen):
        state, metrics = steps[0 if k < 6 else 6](state, jnp.asarray(windows))
        losses.append(float(metrics["loss"]))
        assert float(metrics["lr"]) == pytest.approx(0.008 * rate(k), rel=1e-5)
    their_losses, found = theirs(params, seen, torch.float32)
    exact_losses, exact = theirs(params, seen, torch.float64)
    np.testing.assert_allclose(losses, exact_losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(their_losses, exact_losses, rtol=0, atol=1e-5)
    for name, x in exact.items():
        ours = reference.unpadded(name, np.asarray(state.params[name], np.float64), 29)
        assert_within_twice(ours, found[name], x, norm=rms, name=name)
    assert rms(exact["embed"] - exact["lm_head"].T) > 1e-3, "untied"


def test_weights_of_tokens_change_within_a_stage():
    options = [stage_config(0).loss_options(jnp.int32(k)) for k in (0, 3, 6, 9)]
    weights = [x["token_weights"].tolist() for x in options]
    assert weights == [[1, 0.5], [1, 0.25], [1, 0], [1, 0]]
    assert stage_config(6).loss_options(jnp.int32(6)) == {}


def stage_config(k):
    return Timeline(CONFIG).at(k).config.model


def test_each_device_has_the_weights_of_the_step(params, seen):
    """The loss of two devices, and that of the weights in PyTorch."""
    windows, config = seen[:1, 0], stage_config(0)
    devices = parallel.Parallel.of(jax.devices()[:2])

    @jax.jit
    def loss(params, windows, step):
        how = {"parallel": devices, "step": step}
        return loss_and_grads(graph(config), params, windows, **how)[0]

    found = loss(jax.device_put(params, devices.replicated), jnp.asarray(windows), jnp.int32(4))
    model = reference.from_params(dataclasses.replace(config, padded_vocab_size=29), params)
    tokens, targets = torch.from_numpy(windows[0]).long()[:, :-1], windows[0, :, 1:]
    logits = model(tokens, torch.zeros_like(tokens))
    expected = model.losses(logits, torch.from_numpy(targets).long(), (1.0, 0.5 / 3)).mean()
    assert float(found) == pytest.approx(expected.item(), rel=1e-5)


class EvaluationBegins(Exception):
    """Raised in place of compiling the evaluation step; has the static part of its model."""


def test_a_run_is_evaluated_as_its_model_says(config, monkeypatch):
    """config: the fixture of train_tools."""

    def make_eval_step(graphdef, parallel, **how):
        raise EvaluationBegins(graphdef)

    monkeypatch.setattr(compilation, "make_eval_step", make_eval_step)
    train_step = lambda state, x: (state, {})  # noqa: E731
    monkeypatch.setattr(compilation, "make_train_step", lambda *_, **how: train_step)
    model = dataclasses.replace(TINY, vocab_size=257, padded_vocab_size=None, stage=TIED)
    with pytest.raises(EvaluationBegins) as caught:
        run(dataclasses.replace(config, model=model))
    assert caught.value.args == (graph(model.for_evaluation()),) != (graph(model),)


def test_a_loaded_model_predicts_one_token_with_its_own_window(params, seen, tmp_path):
    stage = TIED._replace(evaluation_window=11)
    stages = staging.to_json((Stage(until=6, model={"stage": stage}), Stage()))
    saved = {6: jax.tree.map(jnp.asarray, params)}
    save_run(tmp_path, saved, model=TINY, tokenizer=None, changes={"stages": stages}, stage=1)
    model, _ = gptjax.load(tmp_path)
    one_token = {"token_weights": (1.0,), "final_token_weights": None}
    expected = dataclasses.replace(TINY, stage=stage._replace(**one_token, long_window=11))
    assert model.config == expected and isinstance(model.config.stage, ModelStage)
    tokens, targets = seen[0, 0, :, :-1], seen[0, 0, :, 1:]
    loss = jax.jit(gptjax.loss_fn)(model, jnp.asarray(tokens), jnp.asarray(targets))
    theirs = reference.from_params(expected, params)
    logits = theirs(torch.from_numpy(tokens).long(), torch.zeros(tokens.shape, dtype=torch.long))
    exact = theirs.losses(logits, torch.from_numpy(targets).long(), (1.0,)).mean()
    assert float(loss) == pytest.approx(exact.item(), rel=1e-5)
