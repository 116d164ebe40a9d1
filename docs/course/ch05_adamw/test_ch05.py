"""Tests of chapter 5."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ch03_block.solution import init
from flax import nnx
from tiny import CONFIG, gptjax_model, normal, params_of, read_windows

import gptjax


def params_and_grads():
    arrays = normal(*[(3, 4), (4,)] * 4)
    params, *grads = [
        {"kernel": kernel, "bias": bias}
        for kernel, bias in zip(arrays[::2], arrays[1::2], strict=True)
    ]
    return params, grads


def same(x, y, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), x, y)


@functools.cache
def compiled_step(chapter):
    return jax.jit(chapter.train_step, static_argnums=3)


def test_global_norm_is_over_all_arrays(chapter):
    grads = {"a": jnp.array([3.0]), "b": jnp.array([[-4.0]])}
    np.testing.assert_allclose(chapter.global_norm(grads), 5)


def test_clip(chapter):
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    same(chapter.clip(grads), {"a": np.array([0.6, 0.0]), "b": np.array([[0.8]])}, rtol=1e-6)
    same(chapter.clip(grads, largest=10.0), grads, rtol=1e-6)


def test_the_first_update_has_the_length_of_the_learning_rate(chapter):
    params = {"bias": jnp.zeros(2)}
    new, state = chapter.adamw(
        {"bias": jnp.array([1e-3, -50.0])}, chapter.init_adam(params), params, lr=0.5
    )
    np.testing.assert_allclose(new["bias"], [-0.5, 0.5], rtol=1e-4)
    assert state.step == 1


def test_three_updates_are_those_of_optax_and_gptjax(chapter):
    params, grads = params_and_grads()
    clipping = optax.clip_by_global_norm(1.0)
    decay_mask = {"kernel": True, "bias": False}
    adamw = optax.adamw(0.01, b1=0.9, b2=0.95, weight_decay=0.1, mask=decay_mask)
    ours, state = params, chapter.init_adam(params)
    update = jax.jit(lambda g, state, params: chapter.adamw(chapter.clip(g), state, params, 0.01))
    for g in grads:
        ours, state = update(g, state, ours)
    for other in (optax.chain(clipping, adamw), gptjax.optim.adamw(0.01)):
        theirs, other_state = params, other.init(params)
        for g in grads:
            # optax itself mixes int32 and float32.
            with jax.numpy_dtype_promotion("standard"):
                updates, other_state = jax.jit(other.update)(g, other_state, theirs)
            theirs = optax.apply_updates(theirs, updates)
        same(ours, theirs, rtol=1e-5)


def test_the_losses_of_four_steps_are_those_of_gptjax(chapter):
    model, windows_BT1 = gptjax_model(), jnp.asarray(read_windows(8, CONFIG.block_size))
    graph, variables = nnx.split(model, nnx.Param)
    tx = gptjax.optim.adamw(3e-3)
    other = gptjax.init_state(CONFIG, tx, seed=0, params=nnx.to_pure_dict(variables))
    other_step = jax.jit(gptjax.make_train_step(graph, tx))
    params = params_of(model)
    state = chapter.init_adam(params)
    step = compiled_step(chapter)
    for _ in range(4):
        params, state, loss = step(params, state, windows_BT1, CONFIG.n_head, 3e-3)
        other, metrics = other_step(other, windows_BT1[None])
        np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-5)


def test_a_tiny_gpt_learns_a_text(chapter):
    windows_BT1 = jnp.asarray(read_windows(8, CONFIG.block_size))
    params = jax.jit(init, static_argnums=1)(jax.random.key(0), CONFIG)
    state, losses = chapter.init_adam(params), []
    step = compiled_step(chapter)
    for _ in range(100):
        params, state, loss = step(params, state, windows_BT1, CONFIG.n_head, 1e-2)
        losses.append(float(loss))
    print("losses of every tenth step:", np.round(losses[::10], 2))
    assert abs(losses[0] - np.log(CONFIG.vocab_size)) < 0.1
    assert losses[-1] < 1.0
