"""examples/new_model/: every command of a run, with a model in one file."""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from train_tools import losses, rows, run

from gptjax import GPT2Config, cli, devices, generate, loss_fn, parallel
from gptjax.config import ConfigError
from gptjax.models.base import graph, params_of
from gptjax.optim import switch_algorithm

FOLDER = Path(__file__).parents[1] / "examples" / "new_model"
pytest_plugins = ["train_tools"]


@pytest.fixture
def example(config, monkeypatch):
    """The example's config, with a small model and the small run of the tests."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    theirs = cli.load(FOLDER / "config.py")
    sizes = {"vocab_size": 257, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}
    model = dataclasses.replace(theirs.model, **sizes, padded_vocab_size=None)
    steps = {"max_steps": 6, "val_every": 3, "sample_every": 3, "checkpoint_every": 3}
    return dataclasses.replace(
        config, model=model, optimizer=theirs.optimizer, batch_tokens=256, **steps
    )


@pytest.mark.parametrize("optimizer", ["adamw", "normuon"])
def test_the_model_trains_checkpoints_resumes_and_samples(example, optimizer, monkeypatch):
    """With AdamW, also on two devices with fsdp."""
    assert len((FOLDER / "model.py").read_text().splitlines()) <= 150
    assert {path.name for path in FOLDER.glob("*.py")} == {"model.py", "config.py"}
    optimizer = switch_algorithm(example.optimizer, optimizer)
    config = dataclasses.replace(example, optimizer=optimizer)
    code, shown = run(config)
    assert code == 0 and "RotaryLM" not in shown and "Rotary, " in shown
    whole = losses(config)
    assert whole.keys() == {*range(1, 7)} and whole[6][0] < whole[1][0]
    assert rows(config, "sample").keys() == {3, 6}

    if optimizer.name == "normuon":
        return
    optimizer = dataclasses.replace(optimizer, schedule_steps=6)
    half = dataclasses.replace(config, name="half", max_steps=3, optimizer=optimizer)
    assert run(half)[0] == 0
    sizes = ("vocab_size", "padded_vocab_size", "block_size", "n_layer", "n_head", "n_embd")
    other = GPT2Config(**{name: getattr(config.model, name) for name in sizes})
    with pytest.raises(ConfigError, match="--model: the checkpoint has RotaryConfig, now GPT"):
        run(dataclasses.replace(half, model=other))
    assert run(dataclasses.replace(half, max_steps=6))[0] == 0
    assert losses(half) == whole, "the resumed run differs from the one left alone"

    monkeypatch.setattr(parallel, "SMALLEST_SHARDED", 1024)
    monkeypatch.setattr(devices, "select", lambda kind: (jax.devices("cpu")[:2], None))
    wrapped, checkpoint = [], jax.checkpoint
    monkeypatch.setattr(
        jax, "checkpoint", lambda f, **how: wrapped.append(how) or checkpoint(f, **how)
    )
    several = dataclasses.replace(config, name="fsdp", parallel="fsdp", sample_every=0)
    run(several)
    assert len(wrapped) == config.model.n_layer, "each block gathers its parameters"
    for step, (loss, *_) in whole.items():
        assert losses(several)[step][0] == pytest.approx(loss, rel=1e-5)


def test_cached_and_recomputed_forward_passes_equal_the_plain_one(example):
    """And greedy tokens are those of the whole sequence."""
    model = example.model.build(nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda p: 6 * p if p.ndim == 2 else p, nnx.state(model)))
    tokens_BT = jax.random.randint(jax.random.key(0), (2, 13), 0, 257)

    @jax.jit
    def in_parts(model):
        cache, logits = model.init_cache(2, 13), []
        for start, end in ((0, 5), (5, 6), (6, 13)):
            logits.append(model.logits(model.hidden(tokens_BT[:, start:end], cache)))
        return jnp.concatenate(logits, axis=1)

    forward = jax.jit(lambda model, tokens_BT: model(tokens_BT))
    full = forward(model, tokens_BT)
    assert full.std() > 0.5
    np.testing.assert_allclose(in_parts(model), full, rtol=0, atol=3e-5)
    how = {"max_new_tokens": 5, "temperature": 0.0, "key": jax.random.key(0)}
    tokens = generate(model, tokens_BT[:, :8], **how)
    np.testing.assert_array_equal(tokens[:, 8:], forward(model, tokens)[:, 7:-1].argmax(-1))

    def gradient(config):
        loss = lambda params: loss_fn(nnx.merge(graph(config), params), tokens_BT, tokens_BT)
        return jax.tree.leaves(jax.jit(jax.grad(loss))(params_of(model)))

    remat = dataclasses.replace(example.model, recompute="block")
    for value, expected in zip(gradient(remat), gradient(example.model), strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5)
