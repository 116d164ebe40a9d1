"""Tests of chapter 11."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ch04_loss.solution import loss_fn
from tiny import CONFIG, gptjax_model, normal, params_of, read_windows

import gptjax

MATRIX_LR = 0.02
fp32_polar_express = functools.partial(gptjax.optim.polar_express, dtype=jnp.float32)


def test_unpack_and_pack(chapter):
    kernel_IF = jnp.arange(12.0).reshape(2, 6)
    matrices_PIO = chapter.unpack(kernel_IF, packed=3)
    np.testing.assert_array_equal(matrices_PIO[1], [[2, 3], [8, 9]])
    np.testing.assert_array_equal(chapter.pack(matrices_PIO), kernel_IF)


def test_orthogonalize_is_gptjaxs_polar_express(chapter):
    for shape in ((2, 4, 8), (1, 8, 4)):
        (x_PIO,) = normal(shape)
        y_PIO = jax.jit(chapter.orthogonalize)(x_PIO)
        np.testing.assert_allclose(y_PIO, jax.jit(fp32_polar_express)(x_PIO), atol=2e-4)


def test_singular_values_become_about_one(chapter):
    (x_PIO,) = normal((1, 8, 16))
    y_PIO = jax.jit(chapter.orthogonalize)(x_PIO)
    singular_values = np.linalg.svd(y_PIO, compute_uv=False)
    assert ((0.8 < singular_values) & (singular_values < 1.2)).all()


def test_neurons_get_the_same_length(chapter):
    x_PIO = normal((1, 4, 6))[0] * jnp.array([1.0, 5, 1, 1, 0.1, 1])[None, None]
    y_PIO, variance = chapter.normalize_neurons(x_PIO, jnp.zeros((1, 1, 6)))
    assert variance.shape == (1, 1, 6)
    lengths = np.linalg.norm(y_PIO, axis=1)[0]
    np.testing.assert_allclose(lengths, np.full(6, lengths[0]), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(y_PIO), np.linalg.norm(x_PIO), rtol=1e-5)


def test_three_updates_of_one_matrix_are_those_of_gptjax(chapter):
    for shape in ((4, 6), (6, 4)):
        kernel, *grads = normal(*[shape] * 4)
        tx = gptjax.optim.normuon(0.1, weight_decay=0.5, method=fp32_polar_express)
        theirs, other, other_update = kernel, tx.init({"w": kernel}), jax.jit(tx.update)
        update = jax.jit(functools.partial(chapter.normuon, packed=1, lr=0.1, weight_decay=0.5))
        momentum = jnp.zeros(shape)
        variance = jnp.zeros((1, 1, 6) if shape == (4, 6) else (1, 6, 1))
        for grad in grads:
            kernel, momentum, variance = update(grad, momentum, variance, kernel)
            updates, other = other_update({"w": grad}, other, {"w": theirs})
            theirs = theirs + updates["w"]
        np.testing.assert_allclose(kernel, theirs, atol=2e-4)


def test_two_updates_of_the_model_are_those_of_gptjax(chapter):
    params = params_of(gptjax_model())
    # Any numbers. The norm of the first gradient is above 1, so it is clipped. The second is not.
    first = jax.tree.map(lambda p: jnp.flip(p) + 0.01, params)
    both = (first, jax.tree.map(lambda g: 0.02 * jnp.roll(g, 1), first))
    tx = gptjax.optim.normuon_and_adamw(
        CONFIG.parameter_groups(),
        matrix_learning_rate=MATRIX_LR,
        matrix_weight_decay=0.5,
        learning_rate=3e-3,
        method=fp32_polar_express,
    )

    @jax.jit
    def theirs(both, params):
        state = tx.init(params)
        for grads in both:
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    @jax.jit
    def ours(both, params):
        state = chapter.init_state(params)
        for grads in both:
            params, state = chapter.normuon_and_adamw(
                grads, state, params, lr=3e-3, matrix_lr=MATRIX_LR, matrix_weight_decay=0.5
            )
        return params

    with jax.numpy_dtype_promotion("standard"):
        expected = theirs(both, params)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), ours(both, params), expected
    )


def test_normuon_needs_fewer_steps_than_adamw(chapter):
    """The loss after 40 steps, with the learning rate of chapter 5 for all other parameters."""
    windows_BT1 = jnp.asarray(read_windows(8, CONFIG.block_size))
    params = params_of(gptjax_model())

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params, windows_BT1, CONFIG.n_head)
        return *chapter.normuon_and_adamw(grads, state, params, 1e-2, MATRIX_LR), loss

    state = jax.jit(chapter.init_state)(params)
    for _ in range(40):
        params, state, loss = step(params, state)
    print("loss after 40 steps:", round(float(loss), 3))
    assert loss < 0.3
