"""Targets without a loss: compared with PyTorch's ignore_index, over micro-batches and devices.
The factor of the losses costs no matmul."""

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

from gptjax import Batch, loss_fn, parallel
from gptjax.models.base import graph, init_params
from gptjax.models.gpt2 import GPT2Config
from gptjax.parallel import Parallel
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


def masked(*shape: int) -> Batch:
    """Return 8 sequences, of which the k-th has k targets with a loss."""
    batch = 8
    length = CONFIG.block_size
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (batch, length + 1))
    inputs, targets, _ = Batch.of(tokens.astype(np.int32))
    counts = np.arange(length)[None] >= length - np.arange(batch)[:, None]
    targets = np.where(counts, targets, np.int32(-1))
    return Batch(*(x.reshape(*(shape or (-1,)), length) for x in (inputs, targets)))


@functools.cache
def one_batch():
    """Return loss and gradients of the mean over all targets, by `loss_fn` on one big batch."""
    tokens, targets = map(jnp.asarray, masked()[:2])
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
    batch = parallel.put(parallel.over_batch(across.mesh, axis=1), masked(micro_batches, -1))
    f = jax.jit(lambda params, batch: loss_and_grads(graph(CONFIG), params, batch, across))
    found = f(params, batch)
    np.testing.assert_allclose(found[0], one_batch()[0], rtol=1e-6)
    same(found[1], one_batch()[1])


@pytest.mark.parametrize("devices", [1, 2])
def test_evaluation_is_the_mean_over_the_targets(devices):
    across = Parallel.of(jax.devices("cpu")[:devices])
    evaluate = jax.jit(make_eval_step(graph(CONFIG), across))
    batch = parallel.put(parallel.over_batch(across.mesh, axis=0), masked())
    params = jax.device_put(init_params(CONFIG, 0), across.replicated)
    np.testing.assert_allclose(evaluate(params, batch), one_batch()[0], rtol=1e-6)


def test_only_targets_with_a_loss_count():
    params = init_params(CONFIG, 0)
    f = jax.jit(lambda batch: loss_and_grads(graph(CONFIG), params, batch))
    batch, other = masked(1, 8), masked(1, 8)
    same(f(batch), one_batch())
    other.targets[0, 7, -1] = (other.targets[0, 7, -1] + 7) % CONFIG.vocab_size
    assert f(other)[0] != f(batch)[0]
    loss, grads = f(batch._replace(targets=0 * batch.targets - 1))
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


def test_the_gradient_of_the_head_is_computed_once():
    """XLA sees that all losses have one factor."""
    config = dataclasses.replace(CONFIG, loss="fused")
    f = jax.jit(lambda params, batch: loss_and_grads(graph(config), params, batch))
    compiled = f.lower(init_params(config, 0), masked(1, 8)).compile().as_text()
    assert compiled and "conditional" not in compiled
