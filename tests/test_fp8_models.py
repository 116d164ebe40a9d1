"""Precision("fp8_head"): what is in FP8 in a training step, and what is not."""

import dataclasses

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


@pytest.mark.parametrize("model", CONFIGS)
def test_only_the_step_is_in_fp8(model):
    """The head's three matmuls in the step, none in evaluation; the gradients are near bf16's."""
    fp8, plain = (graph(with_precision(model, name)) for name in ("fp8_head", "bf16"))
    params, windows = init_params(with_precision(model, "bf16"), 0), tokens()
    step = lambda g: lambda p: loss_and_grads(g, p, windows)
    assert fp8_matmuls(step(fp8), params) == 3 and fp8_matmuls(step(plain), params) == 0
    evaluate = make_eval_step(fp8)
    assert fp8_matmuls(evaluate, params, windows[0]) == 0
    loss, grads = jax.jit(step(fp8))(params)
    expected, expected_grads = jax.jit(step(plain))(params)
    assert 0 < abs(loss - expected) < 0.02
    leaves, expected = (jax.tree.leaves(g) for g in (grads, expected_grads))
    norm = lambda xs: float(sum((x.astype(jnp.float32) ** 2).sum() for x in xs)) ** 0.5
    difference = norm([a - b for a, b in zip(leaves, expected, strict=True)])
    assert 0 < difference < 0.1 * norm(expected)


@pytest.mark.parametrize("strategy", ["data", "zero1", "fsdp"])
def test_strategies(strategy):
    """The same loss and gradients on two devices."""
    g, params = graph(with_precision("gpt2", "fp8_head")), init_params(CONFIGS["gpt2"], 0)
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
