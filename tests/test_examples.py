"""examples/: a model in one file through every command of a run, and a mixture of experts."""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from generation_tools import check_cache, forward, greedy
from kernel_tools import h200
from train_tools import losses, rows, run

import gptjax
from gptjax import GPT2Config, Precision, cli, devices, loss_fn, parallel, precision
from gptjax.config import ConfigError
from gptjax.models.base import graph, init_params, params_of
from gptjax.optim import Metrics, OptimizerConfig, switch_algorithm
from gptjax.plot import plot_runs
from gptjax.training.step import loss_and_grads
from pallas_kernels import rms_norm

EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDER, MIXTURE = EXAMPLES / "new_model", EXAMPLES / "mixture_of_experts.py"


@pytest.fixture
def load(config, monkeypatch):
    """A function that returns the config of a file, with a small model and the small run of the
    tests."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def load(file, sizes, **changes):
        theirs = cli.load(file)
        model = dataclasses.replace(theirs.model, block_size=32, n_layer=2, n_head=2, **sizes)
        optimizer = dataclasses.replace(theirs.optimizer, warmup_steps=5)
        return dataclasses.replace(config, model=model, optimizer=optimizer, **changes)

    return load


@pytest.fixture
def rotary(load):
    sizes = {"vocab_size": 257, "padded_vocab_size": None, "n_embd": 32}
    steps = {"max_steps": 6, "val_every": 3, "sample_every": 3, "checkpoint_every": 3}
    return load(FOLDER / "config.py", sizes, batch_tokens=256, **steps)


@pytest.fixture
def mixture(load):
    steps = {"max_steps": 8, "val_every": 4, "sample_every": 8, "checkpoint_every": 4}
    return load(MIXTURE, {"n_embd": 16, "window": 5}, name="moe", **steps)


def test_a_precision_is_one_class(load, monkeypatch):
    """Every matmul of the blocks and the head has FP8 operands in the step; the loss is near that
    of bf16, and falls."""
    monkeypatch.setattr(precision, "PRECISIONS", dict(precision.PRECISIONS))
    file = EXAMPLES / "new_precision.py"
    assert len(file.read_text().splitlines()) <= 80
    sizes = {"vocab_size": 257, "padded_vocab_size": None, "n_embd": 32}
    config = load(file, sizes, max_steps=8, sample_every=0, checkpoint_every=0)
    step = functools.partial(loss_and_grads, graph(config.model))
    params = jax.eval_shape(lambda: init_params(config.model, 0))
    text = jax.jit(step).lower(params, jnp.zeros((1, 2, 33), jnp.int32)).as_text()
    matmuls = [line for line in text.splitlines() if "dot_general" in line and "f8E" in line]
    assert len(matmuls) == 2 * (3 + 6) + 3
    assert run(config)[0] == 0
    model = dataclasses.replace(config.model, precision=precision.Precision("bf16"))
    assert run(plain := dataclasses.replace(config, name="plain", model=model))[0] == 0
    found, expected = losses(config), losses(plain)
    assert found[8][0] < found[1][0] and found != expected
    assert abs(found[8][0] - expected[8][0]) < 0.02 * expected[8][0]


@pytest.mark.parametrize("optimizer", ["adamw", "normuon"])
def test_the_model_trains_checkpoints_resumes_and_samples(rotary, optimizer, monkeypatch, capsys):
    """With AdamW, also on two devices with fsdp."""
    assert len((FOLDER / "model.py").read_text().splitlines()) <= 150
    assert {path.name for path in FOLDER.glob("*.py")} == {"model.py", "config.py"}
    optimizer = switch_algorithm(rotary.optimizer, optimizer)
    config = dataclasses.replace(rotary, optimizer=optimizer)
    code, shown = run(config)
    assert code == 0 and "RotaryLM" not in shown and "Rotary, " in shown
    assert f"next: gptjax sample {config.run_dir} --config FILE\n" in capsys.readouterr().out
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


def test_cached_and_recomputed_forward_passes_equal_the_plain_one(rotary):
    """And greedy tokens are those of the whole sequence."""
    model = rotary.model.build(nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda p: 6 * p if p.ndim == 2 else p, nnx.state(model)))
    tokens_BT = jax.random.randint(jax.random.key(0), (2, 13), 0, 257)

    check_cache(model, tokens_BT, (5, 1, 7))
    greedy(model, tokens_BT[:, :8], 5)

    def gradient(config):
        loss = lambda params: loss_fn(nnx.merge(graph(config), params), tokens_BT, tokens_BT)
        return jax.tree.leaves(jax.jit(jax.grad(loss))(params_of(model)))

    remat = dataclasses.replace(rotary.model, recompute="block")
    for value, expected in zip(gradient(remat), gradient(rotary.model), strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5)


def loads(config) -> np.ndarray:
    """Return the loads of each step, block and expert in the log."""
    names = [[f"blocks.{i}.load.{e}" for e in range(4)] for i in range(2)]
    return np.array([[[x[n] for n in of] for of in names] for x in rows(config, "train").values()])


@pytest.mark.parametrize("optimizer", ["adamw", "normuon"])
def test_the_mixture_of_experts(mixture, optimizer, monkeypatch, tmp_path):
    """It trains with AdamW and NorMuon, resumes, samples with its KV cache, logs its router's load
    and exports its activations."""
    assert len(MIXTURE.read_text().splitlines()) <= 150
    config = dataclasses.replace(mixture, optimizer=switch_algorithm(mixture.optimizer, optimizer))
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
    tokens = greedy(model, prompt, 20)
    model.blocks[0].sinks.set_value(jnp.array([3.0, -3.0]))
    greedy(model, prompt, 20)

    # The activations.
    sys.modules[type(model).__module__].export_activations(model, tokens, tmp_path / "seen.npz")
    seen = np.load(tmp_path / "seen.npz")
    assert {name.split(".")[-1] for name in seen} == {"pattern", "gate", "residual"}
    mass = seen["blocks.0.pattern"].sum(-1)
    assert mass.shape == (2, 2, 23) and (mass[:, 0] < 0.9).all() and (mass[:, 1] > 0.5).all()
    assert (seen["blocks.1.pattern"][0, 0, 20] > 0).nonzero()[0].tolist() == [16, 17, 18, 19, 20]
    logits = model.logits(rms_norm(jnp.asarray(seen["blocks.1.residual"])))
    np.testing.assert_allclose(logits, forward(model, tokens), rtol=0, atol=1e-5)


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


def test_an_optimizer_adds_metrics_and_the_plot_shows_them(mixture, tmp_path):
    options = dataclasses.asdict(mixture.optimizer)
    run(config := dataclasses.replace(mixture, optimizer=Measured(**options)))
    norms = [row["update_norm"] for row in rows(config, "train").values()]
    assert len(norms) == 8 and all(norm > 0 for norm in norms) and len(set(norms)) == 8
    for metric in ("update_norm", "blocks.1.load.3"):
        assert plot_runs([config.run_dir], tmp_path / "a.png", metric=metric).exists()
    with pytest.raises(ValueError, match="no training noise in it"):
        plot_runs([config.run_dir], tmp_path / "a.png", metric="noise")


def test_the_mixture_has_a_kernel_for_each_part_on_an_h200(mixture):
    """Attention with windows and sinks, and norms; matmuls and the experts are XLA's."""
    model = dataclasses.replace(
        mixture.model, precision=Precision("bf16"), n_embd=128, block_size=128
    )
    with h200():
        kernels = model.kernels(128, 4)
    assert {name for name, how in kernels.items() if how == "xla"} <= {"linear"}, kernels
    assert kernels["flash_attention"] == "mosaic" and kernels["rms_norm"] == "triton"
