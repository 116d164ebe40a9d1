"""gptjax.training.tying: gradients and copies; test_speedrun_training.py has steps of a model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gptjax.optim import Group, Matrices, normuon_and_adamw, view, whole, with_mantissa
from gptjax.training.tying import tie, tie_gradients

PAIRS = (("lm_head", "embed"),)


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_the_source_gets_both_gradients():
    grads = {"embed": random(5, 3), "lm_head": random(3, 5, seed=1), "other": random(2)}
    found = tie_gradients(grads, PAIRS)
    np.testing.assert_array_equal(found["lm_head"], grads["lm_head"] + grads["embed"].T)
    assert not found["embed"].any() and found["other"] is grads["other"]
    assert tie_gradients(grads, ()) == grads


def test_moments_are_copied_at_any_depth():
    """If one optimizer has both parameters."""
    params = {"embed": random(5, 3), "lm_head": random(3, 5, seed=1), "other": random(2)}
    labels = {"embed": "adam", "lm_head": "adam", "other": "sgd"}
    of = lambda labels: optax.partition({"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)}, labels)
    with jax.numpy_dtype_promotion("standard"):
        _, state = of(labels).update(params, of(labels).init(params))
    found = tie(state, PAIRS)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    adam = found.inner_states["adam"].inner_state[0]
    for moments in (adam.mu, adam.nu):
        assert moments["lm_head"].any()
        np.testing.assert_array_equal(moments["embed"], moments["lm_head"].T)
    message = r"one optimizer .* lm_head and embed: there is .*mu.embed"
    with pytest.raises(ValueError, match=message):
        tie(of(labels | {"lm_head": "sgd"}).init(params), PAIRS)


def test_the_mantissa_of_a_bf16_copy(optax_promotion):
    """The copy's fp32 value is that of its source, and a later untied step begins from it."""
    groups, rate = (Group("other", Matrices()), Group("embed|lm_head")), lambda _: 0.01
    how = {"matrix_learning_rate": rate, "learning_rate": rate, "cautious_decay": True, "every": 2}
    tx = with_mantissa(normuon_and_adamw(groups, **how))
    params = {"embed": random(32, 16), "lm_head": random(32, 16).T, "other": random(8, 8)}
    opt_state, params = tx.init(params), view(params)

    @functools.partial(jax.jit, static_argnums=2)
    def step(params, opt_state, pairs, seed):
        keys = jax.random.split(jax.random.key(seed), len(params))
        draw = lambda p, key: jax.random.normal(key, p.shape, p.dtype)
        grads = dict(zip(params, map(draw, params.values(), keys), strict=True))
        updates, opt_state = tx.update(tie_gradients(grads, pairs), opt_state, params)
        return tie(optax.apply_updates(params, updates), pairs), tie(opt_state, pairs)

    for seed in range(4):
        params, opt_state = step(params, opt_state, PAIRS, seed)
        fp32 = whole(params, opt_state)
        np.testing.assert_array_equal(fp32["embed"], fp32["lm_head"].T)
    assert (opt_state.low["embed"] != 0).mean() > 0.9
    before = fp32["embed"]
    for seed in range(2):
        params, opt_state = step(params, opt_state, (), seed)
    moved = whole(params, opt_state)["embed"] - before
    assert 0 < np.abs(moved).max() < 0.05 and (params["embed"] != params["lm_head"].T).any()
