"""AdamW's first moment in bf16, and AdamW at every N-th step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gptjax import parallel
from gptjax.config import Config
from gptjax.models.base import graph
from gptjax.models.gpt2 import GPT2Config
from gptjax.optim import Group, OptimizerConfig, adamw
from gptjax.optim.adamw import scale_by_adam
from gptjax.optim.matrix_optimizer import matrices_and_adamw
from gptjax.training.step import init_state, make_train_step

pytestmark = pytest.mark.usefixtures("optax_promotion")
MODEL = GPT2Config(vocab_size=61, block_size=16, n_layer=1, n_head=2, n_embd=16)
EPSILON = 2.0**-8
"""Largest relative error of rounding to bf16."""


def gradients(steps, size=200):
    return np.random.default_rng(0).standard_normal((steps, size)).astype(np.float32)


def test_the_first_moment_is_rounded_once_after_its_use():
    """optax.scale_by_adam also rounds b1·m."""
    b1, b2, grads = np.float32(0.9), np.float32(0.95), gradients(30)
    tx, m, v = scale_by_adam(0.9, 0.95, 1e-8, jnp.bfloat16), 0 * grads[0], 0 * grads[0]
    state, update = tx.init({"w": jnp.zeros(200)}), jax.jit(tx.update)
    for step, grad in enumerate(grads, start=1):
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
        updates, state = update({"w": jnp.asarray(grad)}, state)
        wanted = m / (1 - b1**step) / np.sqrt(v / (1 - b2**step))
        np.testing.assert_allclose(updates["w"], wanted, rtol=1e-3, atol=1e-5)
        assert state.mu["w"].dtype == jnp.bfloat16 and state.nu["w"].dtype == jnp.float32
        # Nearly always the same neighbour: LLVM joins multiplications and additions.
        of_state = np.asarray(state.mu["w"].astype(jnp.float32))
        np.testing.assert_allclose(of_state, m.astype(jnp.bfloat16).astype(np.float32), rtol=2**-7)
        m = of_state
    assert adamw(1e-3).init(jnp.zeros(3))[1][0].mu.dtype == jnp.float32


def test_rounding_errors_of_the_first_moment_add_up_over_ten_steps_only():
    """The error of m is at most EPSILON·(1 + b1 + b1² + …) = 10·EPSILON of the largest moment."""
    transformations = [scale_by_adam(0.9, 0.95, 1e-8, dtype) for dtype in (None, jnp.bfloat16)]
    exact, rounded = (tx.init(jnp.zeros(200)) for tx in transformations)
    updates = [jax.jit(tx.update) for tx in transformations]
    for grad in gradients(300) + 0.5:
        (_, exact), (_, rounded) = updates[0](grad, exact), updates[1](grad, rounded)
    wanted, found = np.asarray(exact.mu), np.asarray(rounded.mu, np.float32)
    error = np.abs(wanted - found).max() / np.abs(wanted).max()
    assert 0 < error < 10 * EPSILON


def losses(optimizer, steps=40):
    """Losses of learning one batch by heart."""
    config = Config(model=MODEL, optimizer=optimizer, sequence_length=16, micro_batch=4)
    tx = config.build_optimizer(parallel.data_mesh(jax.devices()[:1]))
    step = jax.jit(make_train_step(graph(MODEL), tx, config.learning_rate_schedule()))
    state, found = init_state(MODEL, tx, 0), []
    windows_ABT1 = np.random.default_rng(0).integers(0, 61, (1, 4, 17)).astype(np.int32)
    for _ in range(steps):
        state, metrics = step(state, jnp.asarray(windows_ABT1))
        found.append(float(metrics["loss"]))
    return found, state.opt_state


def test_losses_with_the_first_moment_in_bf16():
    """Each update differs by less than 0.4 %; so do the losses."""
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=4)
    wanted, _ = losses(optimizer)
    found, state = losses(dataclasses.replace(optimizer, moment_dtype="bf16"))
    assert wanted[-1] < 0.7 * wanted[0] and found != wanted
    np.testing.assert_allclose(found, wanted, rtol=4e-3)
    dtypes = {str(x.dtype) for x in jax.tree.leaves(state) if x.ndim}
    assert dtypes == {"bfloat16", "float32"}


def test_every_second_adamw_has_no_conditional():
    """On a GPU the host would wait for the predicate of a conditional."""
    tx = matrices_and_adamw([Group("w")], optax.identity(), learning_rate=1e-3, every=2)
    params = {"w": jnp.zeros(8)}
    state = tx.init(params)
    compiled = jax.jit(tx.update).lower(params, state, params).compile()
    assert " conditional(" not in compiled.as_text()
