"""Precision("fp8_head") and ("fp8"): what is in FP8 in a training step, and what is not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gptjax import GPT2Config, Llama3Config, Precision, SpeedrunConfig, loss_fn
from gptjax.models.base import graph, init_params
from gptjax.models.speedrun import Stage
from gptjax.parallel import Parallel
from gptjax.training.step import loss_and_grads, make_eval_step

SIZES = {"vocab_size": 61, "padded_vocab_size": 64, "block_size": 16, "n_embd": 32}
STAGE = Stage(short_window=4, long_window=8, rotary_windows=(8,))
CONFIGS = {
    "gpt2": GPT2Config(**SIZES, n_layer=2, n_head=2),
    "llama3": Llama3Config(**SIZES, n_layer=1, n_head=2),
    "speedrun": SpeedrunConfig(
        **SIZES,
        n_layer=4,
        n_head=2,
        n_inner=32,
        bigram_rows=50,
        paired_layers=(0,),
        long_layers=(0,),
        value_layers=(0,),
        skip=(0, 1),
        lanes_from=2,
        stage=STAGE,
    ),
}


def with_precision(model, name):
    return dataclasses.replace(CONFIGS[model], precision=Precision(name))


def tokens(batch=2):
    return jnp.asarray(np.random.default_rng(0).integers(0, 61, (1, batch, 17)), jnp.int32)


def fp8_matmuls(f, *args):
    """The FP8 matmuls in the program."""
    text = jax.jit(f).lower(*args).as_text()
    return sum("dot_general" in line and "f8E" in line for line in text.splitlines())


# Of each block: three of the projection to q, k and v, six of the MLP.
MATMULS = [("gpt2", "fp8", 3 + 2 * 9), *((model, "fp8_head", 3) for model in CONFIGS)]


@pytest.mark.parametrize("model, name, number", MATMULS)
def test_only_the_step_is_in_fp8(model, name, number):
    """So many matmuls in the step, and none in evaluation."""
    g = graph(with_precision(model, name))
    params = jax.eval_shape(lambda: init_params(CONFIGS[model], 0))
    windows = tokens()
    assert fp8_matmuls(lambda p: loss_and_grads(g, p, windows), params) == number
    evaluation = jax.jit(make_eval_step(g)).lower(params, windows[0])
    # The norms' FP8 copies are unused in evaluation.
    assert "f8e" not in (evaluation.compile() if name == "fp8" else evaluation).as_text().lower()


@pytest.mark.parametrize("name, bound", [("fp8_head", 0.06), ("fp8", 0.1)])
def test_gradients_are_near_those_of_bf16(name, bound):
    """The relative error of a sum of independently rounded terms is below that of a term: 1/8 for
    e5m2, 1/16 for e4m3."""
    params, windows = init_params(CONFIGS["gpt2"], 0), tokens()

    def step(name):
        g = graph(with_precision("gpt2", name))
        return jax.jit(lambda p: loss_and_grads(g, p, windows))(params)

    (loss, grads), (expected, expected_grads) = step(name), step("bf16")
    assert 0 < abs(loss - expected) < 0.02
    norm = lambda tree: float(sum((x**2).sum() for x in jax.tree.leaves(tree))) ** 0.5
    difference = norm(jax.tree.map(jnp.subtract, grads, expected_grads))
    assert 0 < difference < bound * norm(expected_grads)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert norm(a - b) < 0.25 * norm(b)


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_strategies(strategy):
    """The same loss and gradients on two devices."""
    config = dataclasses.replace(with_precision("gpt2", "fp8"), n_layer=1)
    g, params = graph(config), init_params(config, 0)
    parallel, windows = Parallel.of(jax.devices("cpu")[:2], strategy), tokens()
    one = jax.jit(lambda p: loss_and_grads(g, p, windows))(params)
    placed = jax.device_put(params, parallel.shardings(params))
    two = jax.jit(lambda p: loss_and_grads(g, p, windows, parallel))(placed)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        scale = float(jnp.abs(a).max()) + 1e-6
        np.testing.assert_allclose(a, b, atol=0.05 * scale)


def test_kernels_and_errors():
    config = with_precision("gpt2", "fp8_head")
    assert config.kernels(16)["loss"] == "fused"
    wrong = dataclasses.replace(config, loss="xla")
    with pytest.raises(ValueError, match="'xla' has no FP8 matmuls"):
        wrong.kernels(16)
    model = wrong.build(nnx.Rngs(0))
    with pytest.raises(ValueError, match="'xla' has no FP8 matmuls"):
        loss_fn(model, tokens()[0, :, :-1], tokens()[0, :, 1:])


@pytest.mark.parametrize("model", ["llama3", "speedrun"])
def test_a_model_without_fp8_blocks_refuses(model):
    with pytest.raises(
        ValueError, match="Config: expected another precision than fp8: .* fp8_head"
    ):
        with_precision(model, "fp8")


def test_back_ends_without_fp8_refuse():
    config, params = with_precision("gpt2", "fp8"), init_params(CONFIGS["gpt2"], 0)
    assert config.kernels(16)["mlp"] == "xla"
    for change, message in [
        ({"mlp": "reference"}, "unknown implementation 'reference'"),
        ({"attention": "reference"}, "'reference' has no FP8 matmuls"),
    ]:
        g = graph(dataclasses.replace(config, **change))
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(functools.partial(loss_and_grads, g), params, tokens())
