"""The mixture of experts trains with AdamW and NorMuon, resumes, samples with its KV cache, logs
its router's load and the optimizer's metrics, and exports its activations."""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train_tools import rows, run

import gptjax
from gptjax import cli, devices, generate, parallel
from gptjax.optim import Metrics, OptimizerConfig, switch_algorithm
from gptjax.plot import plot_runs
from pallas_kernels import rms_norm

FILE = Path(__file__).parents[1] / "examples" / "mixture_of_experts.py"
pytest_plugins = ["train_tools"]


@pytest.fixture
def example(config, monkeypatch):
    """The example's config, with a small model and the small run of the tests."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    theirs = cli.load(FILE)
    sizes = {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 16, "window": 5}
    model = dataclasses.replace(theirs.model, **sizes)
    optimizer = dataclasses.replace(theirs.optimizer, warmup_steps=5)
    steps = {"max_steps": 8, "val_every": 4, "sample_every": 8, "checkpoint_every": 4}
    return dataclasses.replace(config, name="moe", model=model, optimizer=optimizer, **steps)


def loads(config) -> np.ndarray:
    """Return the loads of each step, block and expert in the log."""
    names = [[f"blocks.{i}.load.{e}" for e in range(4)] for i in range(2)]
    return np.array([[[x[n] for n in of] for of in names] for x in rows(config, "train").values()])


@pytest.mark.parametrize("optimizer", ["adamw", "normuon"])
def test_the_example(example, optimizer, monkeypatch, tmp_path):
    assert len(FILE.read_text().splitlines()) <= 150
    config = dataclasses.replace(example, optimizer=switch_algorithm(example.optimizer, optimizer))
    code, shown = run(config)
    assert code == 0 and "Mixture, " in shown
    assert rows(config, "val")[8]["loss"] < rows(config, "val")[0]["loss"] - 0.2
    assert rows(config, "sample").keys() == {8}

    # Each token has two of four experts.
    assert loads(config).shape == (8, 2, 4)
    np.testing.assert_allclose(loads(config).sum(-1), 2, rtol=1e-6)
    assert loads(config).std() > 0.01

    if optimizer == "normuon":
        return
    # Resumed in the middle, the log has the same lines.
    half = dataclasses.replace(
        config,
        name="half",
        max_steps=4,
        optimizer=dataclasses.replace(config.optimizer, schedule_steps=8),
    )
    run(half)
    run(dataclasses.replace(half, max_steps=8))
    np.testing.assert_array_equal(loads(half), loads(config))

    # One micro-batch in place of four, and the mean over them.
    assert config.batch_tokens // config.sequence_length == 4 * config.micro_batch
    run(whole := dataclasses.replace(config, name="whole", micro_batch=16, max_steps=2))
    np.testing.assert_allclose(loads(whole)[0], loads(config)[0], rtol=1e-6)

    # Two devices, one block gathered at a time: the mean over the devices.
    monkeypatch.setattr(parallel, "SMALLEST_SHARDED", 256)
    monkeypatch.setattr(devices, "select", lambda kind: (jax.devices("cpu")[:2], None))
    several = dataclasses.replace(config, name="fsdp", parallel="fsdp", sample_every=0)
    run(several)
    np.testing.assert_allclose(loads(several)[0], loads(config)[0], rtol=1e-6)
    # A rounding error moves a token between experts whose logits are nearly equal.
    assert np.abs(loads(several) - loads(config)).mean() < 1e-2

    # Sampling with the KV cache, which is longer than the window, selects the model's own tokens.
    model, _ = gptjax.load(config.run_dir)
    assert type(model).__name__ == "Mixture"
    prompt = jnp.arange(6).reshape(2, 3)
    tokens = generate(model, prompt, max_new_tokens=20, temperature=0.0, key=jax.random.key(0))
    np.testing.assert_array_equal(tokens[:, 3:], model(tokens[:, :-1])[:, 2:].argmax(-1))
    model.blocks[0].sinks.set_value(jnp.array([3.0, -3.0]))
    other = generate(model, prompt, max_new_tokens=20, temperature=0.0, key=jax.random.key(0))
    np.testing.assert_array_equal(other[:, 3:], model(other[:, :-1])[:, 2:].argmax(-1))

    # The activations.
    sys.modules[type(model).__module__].export_activations(model, tokens, tmp_path / "seen.npz")
    seen = np.load(tmp_path / "seen.npz")
    assert {name.split(".")[-1] for name in seen} == {"pattern", "gate", "residual"}
    mass = seen["blocks.0.pattern"].sum(-1)
    assert mass.shape == (2, 2, 23) and (mass[:, 0] < 0.9).all() and (mass[:, 1] > 0.5).all()
    assert (seen["blocks.1.pattern"][0, 0, 20] > 0).nonzero()[0].tolist() == [16, 17, 18, 19, 20]
    logits = model.logits(rms_norm(jnp.asarray(seen["blocks.1.residual"])))
    np.testing.assert_allclose(logits, model(tokens), rtol=0, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Measured(OptimizerConfig):
    """AdamW that adds the norm of its updates to the step's metrics."""

    def build(self, **how):
        def update(updates, state, params=None):
            return updates, Metrics({"update_norm": optax.tree.norm(updates)})

        norm = optax.GradientTransformation(
            lambda _: Metrics({"update_norm": jnp.zeros(())}), update
        )
        return optax.chain(super().build(**how), norm)


def test_an_optimizer_adds_metrics_and_the_plot_shows_them(example, tmp_path):
    options = dataclasses.asdict(example.optimizer)
    run(config := dataclasses.replace(example, optimizer=Measured(**options)))
    norms = [row["update_norm"] for row in rows(config, "train").values()]
    assert len(norms) == 8 and all(norm > 0 for norm in norms) and len(set(norms)) == 8
    for metric in ("update_norm", "blocks.1.load.3"):
        assert plot_runs([config.run_dir], tmp_path / "a.png", metric=metric).exists()
    with pytest.raises(ValueError, match="no training noise in it"):
        plot_runs([config.run_dir], tmp_path / "a.png", metric="noise")
