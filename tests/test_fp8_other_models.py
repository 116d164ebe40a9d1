"""Precision("fp8") of the Llama and of the speedrun's model: what is in FP8, gradients,
evaluation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_fp8_models import CONFIGS, fp8_matmuls, tokens, with_precision

from gptjax.models.base import graph, init_params
from gptjax.training.step import loss_and_grads, make_eval_step

# Of each block with attention: three matmuls of q, k and v, six of the MLP; three of the head.
MATMULS = {"llama3": 9 + 3, "speedrun": 3 * 9 + 6 + 3}


def parameters(model):
    """Initial parameters. Those that begin at zero, such as the speedrun's gates, are random."""
    params, rng = init_params(CONFIGS[model], 0), np.random.default_rng(1)
    noise = lambda x: x + 0.05 * jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    return jax.tree.map(noise, params)


def step(model, name, params, batch=2):
    g = graph(with_precision(model, name))
    return jax.jit(lambda p: loss_and_grads(g, p, tokens(batch)))(params)


def norm(tree) -> float:
    return float(sum((x**2).sum() for x in jax.tree.leaves(tree))) ** 0.5


def groups(grads, expected):
    """Each parameter by itself, and the speedrun's λ together: the gradient of a λ is a sum of
    products of both signs, with an error relative to the products."""
    pairs = zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected), strict=True)
    named = [(jax.tree_util.keystr(path), a, b) for (path, a), b in pairs]
    lambdas = [pair for name, *pair in named if "lambda" in name]
    if lambdas:
        yield "lambdas", *zip(*lambdas, strict=True)
    yield from (entry for entry in named if "lambda" not in entry[0])


@pytest.mark.parametrize("model", MATMULS)
def test_matmuls(model):
    g, params = graph(with_precision(model, "fp8")), jax.eval_shape(lambda: parameters(model))
    assert fp8_matmuls(lambda p: loss_and_grads(g, p, tokens()), params) == MATMULS[model]


@pytest.mark.parametrize("model", MATMULS)
def test_gradients_are_near_those_of_bf16(model):
    """The relative error of a sum of independently rounded terms is below that of a term: 1/8 for
    e5m2, 1/16 for e4m3. A gradient passes through several such sums. Many tokens, since the errors
    of the gradient of the logits, which is rounded stochastically, average out over tokens."""
    params = parameters(model)
    (loss, grads), (expected, expected_grads) = (
        step(model, name, params, batch=128) for name in ("fp8", "bf16")
    )
    assert 0 < abs(loss - expected) < 0.02 * expected
    assert 0 < norm(jax.tree.map(jnp.subtract, grads, expected_grads)) < 0.1 * norm(expected_grads)
    for name, a, b in groups(grads, expected_grads):
        assert norm(jax.tree.map(jnp.subtract, a, b)) < 0.25 * norm(b), name


@pytest.mark.parametrize("model", MATMULS)
def test_evaluation_is_that_of_bf16(model):
    params, losses = parameters(model), []
    for name in ("fp8", "bf16"):
        evaluate = jax.jit(make_eval_step(graph(with_precision(model, name))))
        assert (
            name == "bf16" or "f8e" not in evaluate.lower(params, tokens()[0]).compile().as_text()
        )
        losses.append(evaluate(params, tokens()[0]))
    for a, b in zip(*map(jax.tree.leaves, losses), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("model", MATMULS)
def test_kernels(model):
    config = with_precision(model, "fp8")
    assert config.kernels(16) == with_precision(model, "bf16").kernels(16) | {"loss": "fused"}
    with pytest.raises(ValueError, match="'reference'"):
        dataclasses.replace(config, mlp="reference").kernels(16)
