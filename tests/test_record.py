"""Recorded activations and metrics: the manual's ten lines, under jit and grad, and elsewhere."""

import dataclasses
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gptjax import GPT2, GPT2Config, generate, loss_fn
from gptjax.models.base import graph, params_of
from gptjax.models.layers import rotary_angles
from gptjax.models.llama3 import Llama3Config, frequencies
from gptjax.models.record import Metric, record, with_metrics

PAGE = Path(__file__).parents[1] / "docs" / "extending_change.md"
SHAPE = dict(vocab_size=61, block_size=16, n_layer=1, n_head=4, n_embd=32)
CONFIGS = {"gpt2": GPT2Config(**SHAPE), "llama3": Llama3Config(**SHAPE, n_kv_head=2)}


@pytest.fixture(params=CONFIGS)
def model(request):
    model = CONFIGS[request.param].build(nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda p: 6 * p if p.ndim == 2 else p, nnx.state(model)))
    return model


def test_the_ten_lines_of_the_manual():
    """The lens of the last block is the model; the patterns are causal distributions."""
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)[1]
    exec(compile(code, PAGE.name, "exec"), found := {})
    np.testing.assert_allclose(found["lens_BTV"], found["logits_BTV"], rtol=0, atol=1e-5)
    pattern = np.asarray(found["pattern_BHTT"])
    assert pattern.shape == (1, 2, 3, 3) and (np.triu(pattern, 1) == 0).all()
    np.testing.assert_allclose(pattern.sum(-1), 1, rtol=1e-5)
    assert len(code.splitlines()) <= 12


@pytest.mark.parametrize("recompute", ["none", "sublayer"])
def test_recording_changes_nothing(model, recompute):
    """Recorded streams, with any recomputation, under jit, and with a gradient."""
    config = dataclasses.replace(model.config, recompute=recompute)
    params, structure = params_of(model), graph(config)
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 61)

    def loss(params):
        seen_loss = nnx.capture(lambda model: loss_fn(model, tokens, tokens), nnx.Intermediate)
        return seen_loss(nnx.merge(structure, params))

    (value, seen), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    plain = jax.jit(jax.value_and_grad(lambda p: loss_fn(nnx.merge(structure, p), tokens, tokens)))
    for a, b in zip(jax.tree.leaves((value, grads)), jax.tree.leaves(plain(params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    for i, block in enumerate(model.blocks):
        assert seen["blocks"][i]["residual"].get_value()[0].shape == (2, 9, 32)
        assert seen["blocks"][i]["attn"]["pattern"].get_value()[0].shape == (2, 4, 9, 9)
        assert not hasattr(block, "residual")


def test_the_pattern_weighs_the_values(model):
    """The output of the first attention is that of the recorded pattern."""
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 61)
    _, seen = jax.jit(lambda m: nnx.capture(m, nnx.Intermediate)(tokens))(model)
    pattern_BHTS, x_BTC = seen["blocks"][0]["attn"]["pattern"].get_value()[0], model.embed(tokens)
    block, attn = model.blocks[0], model.blocks[0].attn
    if isinstance(model, GPT2):
        y_BTC, args = block.ln_1(x_BTC), ()
        v_BTC, out = attn.c_attn(y_BTC)[..., 64:], attn.c_proj
    else:
        angles = rotary_angles(frequencies(model.config), jnp.arange(9)[None])
        y_BTC, args = block.norm_1(x_BTC), (None, None, angles)
        v_BTC, out = attn.v(y_BTC), attn.o
    v_BTHD = v_BTC.reshape(2, 9, -1, 8).repeat(4 // (v_BTC.shape[-1] // 8), axis=2)
    expected = out(jnp.einsum("bhts,bshd->bthd", pattern_BHTS, v_BTHD).reshape(2, 9, 32))
    found = attn(y_BTC, *args).added_to(jnp.zeros_like(x_BTC))
    assert float(found.std()) > 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_outside_of_capture_nothing_is_stored(model):
    tokens = jnp.arange(6).reshape(2, 3)
    with warnings.catch_warnings(action="error"):
        generate(model, tokens, max_new_tokens=2, key=jax.random.key(0))
        jax.jit(type(model).__call__)(model, tokens)
    nnx.split(model, nnx.Param)  # raises if there are other variables


def test_metrics_are_named_and_averaged():
    class Part(nnx.Module):
        def __call__(self, x):
            record(self, "mean", x.mean(), Metric)
            record(self, "activation", x)
            return 2 * x

    class Whole(nnx.Module):
        def __init__(self):
            self.parts = nnx.List([Part(), Part()])

        def __call__(self, x):
            for part in self.parts:
                x = nnx.remat(Part.__call__)(part, x)
            record(self, "twice", jnp.array([1, 2]), Metric)
            record(self, "twice", jnp.array([3, 4]), Metric)
            return x.sum()

    loss = lambda x: with_metrics(Whole.__call__)(Whole(), x)
    (out, metrics), grad = jax.value_and_grad(loss, has_aux=True)(jnp.array([1.0, 2.0]))
    assert out == 12 and grad.tolist() == [4, 4]
    assert {name: x.tolist() for name, x in metrics.items()} == {
        "parts.0.mean": 1.5,
        "parts.1.mean": 3.0,
        "twice": [2, 3],
    }
