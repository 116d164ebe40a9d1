"""The examples: every command of a run, with a model in one file."""

import dataclasses
import importlib.util
import io
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from gptjax import cli, devices, generate, loss_fn, parallel
from gptjax.models import base
from gptjax.optim import switch_algorithm
from gptjax.training import step

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "new_model"

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.fixture(scope="module")
def train():
    """The function `train` of train.py."""
    spec = importlib.util.spec_from_file_location("train_example", ROOT / "train.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_example"] = module
    spec.loader.exec_module(module)
    return module.train


@pytest.fixture
def config(tmp_path, corpus, monkeypatch):
    """The example's config, with a small model and a small run."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(devices, "select", lambda kind: (jax.devices("cpu")[:1], None))
    config = cli.load(FOLDER / "config.py")
    sizes = {"vocab_size": 257, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}
    return dataclasses.replace(
        config,
        runs_dir=tmp_path / "runs",
        device="cpu",
        model=dataclasses.replace(config.model, **sizes, padded_vocab_size=None),
        dataset=str(corpus),
        sequence_length=32,
        batch_tokens=256,
        micro_batch=4,
        max_steps=6,
        val_every=3,
        val_tokens=256,
        sample_every=3,
        checkpoint_every=3,
    )


@pytest.fixture
def corpus(tmp_path):
    """A dataset of bytes."""
    from gptjax.data import write_shard

    folder = tmp_path / "bytes"
    folder.mkdir()
    tokens = np.random.default_rng(0).zipf(1.5, 8000).clip(max=200).astype(np.uint16)
    shards = {"b_train_000000.bin": tokens[:6000], "b_val_000000.bin": tokens[6000:]}
    manifest = {"format": 1, "tokenizer": "byte", "vocab_size": 257, "eot": 256, "source": "test"}
    manifest["shards"] = {}
    for name, part in shards.items():
        write_shard(folder / name, part)
        manifest["shards"][name] = {"tokens": len(part), "max_token": int(part.max())}
    (folder / "dataset.json").write_text(json.dumps(manifest))
    return folder


def log_of(config) -> list[dict]:
    return [json.loads(line) for line in (config.run_dir / "log.jsonl").read_text().splitlines()]


def losses_of(config) -> list[float]:
    return [row["loss"] for row in log_of(config) if row["kind"] == "train"]


def test_the_model_is_one_short_file():
    assert len((FOLDER / "model.py").read_text().splitlines()) <= 150
    assert {path.name for path in FOLDER.glob("*.py")} == {"model.py", "config.py"}


@pytest.mark.parametrize("optimizer", ["adamw", "normuon"])
def test_the_model_trains_checkpoints_resumes_and_samples(train, config, optimizer):
    config = dataclasses.replace(config, optimizer=switch_algorithm(config.optimizer, optimizer))
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    assert train(config, console) == 0
    whole = losses_of(config)
    assert len(whole) == 6 and whole[-1] < whole[0]
    assert "RotaryLM" not in shown.getvalue() and "Rotary, " in shown.getvalue()
    assert [row["step"] for row in log_of(config) if row["kind"] == "sample"] == [3, 6]

    half = dataclasses.replace(
        config,
        name="half",
        max_steps=3,
        optimizer=dataclasses.replace(config.optimizer, schedule_steps=6),
    )
    assert train(half, console) == 0
    assert train(dataclasses.replace(half, max_steps=6), console) == 0
    assert losses_of(half) == whole, "the resumed run differs from the one left alone"


def test_fsdp_on_two_devices_learns_what_one_device_does(train, config, monkeypatch):
    config = dataclasses.replace(config, sample_every=0, checkpoint_every=0)
    console = Console(file=io.StringIO())
    train(config, console)
    monkeypatch.setattr(parallel, "SMALLEST_SHARDED", 1024)
    monkeypatch.setattr(devices, "select", lambda kind: (jax.devices("cpu")[:2], None))
    wrapped, checkpoint = [], jax.checkpoint
    monkeypatch.setattr(
        jax, "checkpoint", lambda f, **how: wrapped.append(how) or checkpoint(f, **how)
    )
    several = dataclasses.replace(config, name="fsdp", parallel="fsdp")
    train(several, console)
    assert len(wrapped) == config.model.n_layer, "each block gathers its parameters"
    assert losses_of(several) == pytest.approx(losses_of(config), rel=1e-5)


def test_another_architecture_does_not_resume_the_run(train, config):
    from gptjax import GPT2Config
    from gptjax.config import ConfigError

    console = Console(file=io.StringIO())
    train(dataclasses.replace(config, max_steps=3), console)
    sizes = ("vocab_size", "padded_vocab_size", "block_size", "n_layer", "n_head", "n_embd")
    other = GPT2Config(**{name: getattr(config.model, name) for name in sizes})
    with pytest.raises(ConfigError, match="--model: the checkpoint has RotaryConfig, now GPT2Conf"):
        train(dataclasses.replace(config, model=other), console)


def test_cached_and_recomputed_forward_passes_equal_the_plain_one(config):
    model = config.model.build(nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda p: 6 * p if p.ndim == 2 else p, nnx.state(model)))
    tokens_BT = jax.random.randint(jax.random.key(0), (2, 13), 0, 257)
    full = np.asarray(model(tokens_BT))
    assert full.std() > 0.5
    cache, logits = model.init_cache(2, 13), []
    for start, end in ((0, 5), (5, 6), (6, 13)):
        logits.append(model.logits(model.hidden(tokens_BT[:, start:end], cache)))
    np.testing.assert_allclose(np.concatenate(logits, axis=1), full, rtol=0, atol=3e-5)

    remat = dataclasses.replace(config.model, recompute="block")
    again = nnx.merge(base.graph(remat), base.params_of(model))
    for value, expected in zip(
        jax.tree.leaves(nnx.grad(loss_fn)(again, tokens_BT, tokens_BT)),
        jax.tree.leaves(nnx.grad(loss_fn)(model, tokens_BT, tokens_BT)),
        strict=True,
    ):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5)


def test_the_model_generates_and_sees_no_later_token(config):
    model = config.model.build(nnx.Rngs(0))
    prompt = jnp.arange(6).reshape(2, 3)
    how = {"max_new_tokens": 5, "temperature": 0.0, "key": jax.random.key(0)}
    tokens = generate(model, prompt, **how)
    expected = model(tokens[:, :-1])[:, 2:].argmax(-1)
    np.testing.assert_array_equal(tokens[:, 3:], expected)


def test_parameters_are_counted_from_the_module(config):
    c, v, layers = 32, 257, 2
    expected = 2 * v * c + layers * (12 * c * c + 2 * c) + c
    assert config.model.num_params == expected
    assert config.model.num_allocated_params == expected + 2 * (384 - 257) * c
    params = step.init_params(config.model, 0)
    assert sum(x.size for x in jax.tree.leaves(params)) == config.model.num_allocated_params
    # wte is only looked up.
    assert config.model.flops_per_token(32) == 6 * (expected - v * c) + 6 * layers * c * 32


def test_the_model_is_profiled(config, tmp_path, capsys):
    from gptjax.bench.__main__ import main

    card = tmp_path / "card.py"
    card.write_text((FOLDER / "config.py").read_text())
    (tmp_path / "model.py").write_text((FOLDER / "model.py").read_text())
    arguments = ["profile", "--config", str(card), "--batch", "2", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    parts = json.loads((tmp_path / "out" / "profile.json").read_text())["rows"][0]["parts"]
    assert {"attention", "MLP"} <= {row["part"] for row in parts}
