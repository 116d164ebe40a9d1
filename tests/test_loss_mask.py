"""Targets without a loss: compared with PyTorch's ignore_index, over micro-batches and devices.
Without a mask, the step is unchanged."""

import dataclasses
import functools

import gpt2_tools
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gpt2_tools import SHAPES, assert_parity, build, config_of, random_of
from reference.torch_gpt2 import TorchGPT2, max_abs

from gptjax import loss_fn, parallel
from gptjax.models.base import graph, init_params
from gptjax.models.gpt2 import GPT2Config
from gptjax.parallel import Parallel
from gptjax.training import step
from gptjax.training.step import loss_and_grads, make_eval_step

CONFIG = GPT2Config(
    vocab_size=61, padded_vocab_size=64, block_size=8, n_layer=1, n_head=2, n_embd=16
)


@pytest.mark.parametrize(
    "how",
    [
        {"loss": "reference"},
        {"loss": "xla"},
        {"loss": "fused", "loss_chunk": 7},
    ],
    ids=str,
)
def test_ignored_targets_are_pytorchs(monkeypatch, how):
    plain = gpt2_tools.batch_of

    def batch_of(*args):
        tokens, targets = plain(*args)
        return tokens, np.where(np.random.default_rng(1).random(targets.shape) < 0.4, -1, targets)

    def loss(self, tokens, targets):
        logits = self(tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-1)

    monkeypatch.setattr(gpt2_tools, "batch_of", batch_of)
    monkeypatch.setattr(TorchGPT2, "loss", loss)
    config = config_of(SHAPES["odd"], n_layer=1, **how)
    ours, _, exact = assert_parity(config, 2, norm=max_abs)
    np.testing.assert_allclose(ours[1], exact[1], rtol=0, atol=2e-6)


def windows(batch: int = 8) -> np.ndarray:
    """Return sequences with a mask: the k-th has k tokens with a loss."""
    shape = (batch, CONFIG.block_size + 1)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, shape).astype(np.int32)
    return np.where(
        np.arange(shape[1])[None] > CONFIG.block_size - np.arange(batch)[:, None], tokens, ~tokens
    )


@functools.cache
def one_batch():
    """Return loss and gradients of the mean over all targets, by `loss_fn` on one big batch."""
    tokens = jnp.asarray(np.maximum(windows(), ~windows())[:, :-1])
    targets = jnp.asarray(np.maximum(windows(), -1)[:, 1:])
    f = jax.value_and_grad(lambda params: loss_fn(build(CONFIG, params), tokens, targets))
    return jax.jit(f)(init_params(CONFIG, 0))


def same(found, expected):
    for (path, a), b in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True
    ):
        # fp32: sums of the same numbers in another order.
        atol = 1e-6 * float(jnp.abs(a).max())
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=atol, err_msg=str(path))


@pytest.mark.parametrize(
    "micro_batches, devices, strategy",
    [(4, 1, "data"), (2, 2, "data"), (4, 2, "fsdp")],
)
def test_any_split_of_an_uneven_mask_is_one_batch(monkeypatch, micro_batches, devices, strategy):
    """Micro-batches and devices have between 0 and 13 targets."""
    monkeypatch.setattr(parallel, "SMALLEST_SHARDED", 32)
    across = Parallel.of(jax.devices("cpu")[:devices], strategy)
    params = init_params(CONFIG, 0)
    params = jax.device_put(params, across.shardings(params))
    batch = parallel.put(
        parallel.over_batch(across.mesh, axis=1), windows().reshape(micro_batches, -1, 9)
    )
    f = jax.jit(lambda params, batch: loss_and_grads(graph(CONFIG), params, batch, across, True))
    found = f(params, batch)
    np.testing.assert_allclose(found[0], one_batch()[0], rtol=1e-6)
    same(found[1], one_batch()[1])


@pytest.mark.parametrize("devices", [1, 2])
def test_evaluation_is_the_mean_over_the_targets(devices):
    across = Parallel.of(jax.devices("cpu")[:devices])
    evaluate = jax.jit(make_eval_step(graph(CONFIG), across, masked=True))
    batch = parallel.put(parallel.over_batch(across.mesh, axis=0), windows())
    params = jax.device_put(init_params(CONFIG, 0), across.replicated)
    np.testing.assert_allclose(evaluate(params, batch), one_batch()[0], rtol=1e-6)


def test_masked_targets_change_nothing():
    """The last token of a window is a target only."""
    params = init_params(CONFIG, 0)
    f = jax.jit(lambda batch: loss_and_grads(graph(CONFIG), params, batch, None, True))
    batch, other = windows(), windows()
    other[0, -1] = ~((~other[0, -1] + 7) % CONFIG.vocab_size)  # the first has no target
    for a, b in zip(jax.tree.leaves(f(batch[None])), jax.tree.leaves(f(other[None])), strict=True):
        np.testing.assert_array_equal(a, b)
    same(f(batch[None]), one_batch())
    other[7, -1] = (other[7, -1] + 7) % CONFIG.vocab_size
    assert f(other[None])[0] != f(batch[None])[0]
    loss, grads = f(np.minimum(batch, ~batch)[None])
    assert loss == 0 and not any(np.asarray(g).any() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("loss", ["reference", "xla", "fused"])
def test_only_minus_one_is_ignored(loss):
    config = dataclasses.replace(CONFIG, loss=loss)
    model, tokens = build(config, random_of(config)), jnp.zeros((1, 4), jnp.int32)
    value = jax.jit(loss_fn, static_argnums=3)
    assert np.isfinite(value(model, tokens, tokens.at[0, 1].set(-1), -1))
    assert np.isnan(value(model, tokens, tokens.at[0, 1].set(-2), -1))
    assert np.isnan(value(model, tokens, tokens.at[0, 1].set(-1), None))
    assert value(model, tokens, jnp.full_like(tokens, -1), -1) == 0


def test_a_step_without_a_mask_does_not_look_for_ignored_targets(monkeypatch):
    """The lowered computation is that of the plain mean; with a mask, dW is computed once."""
    config, batch = dataclasses.replace(CONFIG, loss="fused"), windows()[None]
    f = lambda masked: jax.jit(
        lambda params, batch: loss_and_grads(graph(config), params, batch, None, masked)
    ).lower(init_params(config, 0), batch)
    found = f(False).as_text()
    monkeypatch.setattr(
        step, "_mean", lambda model, x, *_: model.losses(x[:, :-1], x[:, 1:]).mean()
    )
    assert found == f(False).as_text() != f(True).as_text()
    compiled = f(True).compile().as_text()
    assert compiled and "conditional" not in compiled
