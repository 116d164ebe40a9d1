"""Tests of chapter 12, on four CPU devices that XLA simulates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from ch04_loss.solution import loss_fn
from ch11_normuon.solution import init_state, normuon_and_adamw
from tiny import CONFIG, gptjax_model, params_of, read_windows

LR, MATRIX_LR = 1e-2, 0.02


def copy_of_params():
    """A copy: the step overwrites its arguments."""
    return jax.tree.map(np.asarray, params_of(gptjax_model()))


@functools.cache
def losses_on_one_device():
    """Losses of the step of chapter 11, without a mesh."""
    params = copy_of_params()
    state, losses = init_state(params), []

    @jax.jit
    def step(params, state, windows_BT1):
        loss, grads = jax.value_and_grad(loss_fn)(params, windows_BT1, CONFIG.n_head)
        return *normuon_and_adamw(grads, state, params, LR, MATRIX_LR), loss

    for _ in range(20):
        params, state, loss = step(params, state, read_windows(8, CONFIG.block_size))
        losses.append(float(loss))
    return losses


def test_the_mesh_has_one_axis(chapter):
    mesh = chapter.make_mesh(jax.devices("cpu"))
    assert dict(mesh.shape) == {"data": len(jax.devices("cpu"))} and mesh.size == 4


def test_each_device_has_all_parameters_and_its_rows(chapter):
    mesh = chapter.make_mesh(jax.devices("cpu"))
    params = chapter.replicate({"w": jnp.ones((3, 5))}, mesh)
    windows_BT1 = chapter.shard(read_windows(8, 16), mesh)
    assert [x.data.shape for x in params["w"].addressable_shards] == [(3, 5)] * 4
    assert [x.data.shape for x in windows_BT1.addressable_shards] == [(2, 17)] * 4


def test_loss_and_gradient_are_those_of_one_device(chapter):
    mesh = chapter.make_mesh(jax.devices("cpu"))
    params, windows_BT1 = copy_of_params(), jnp.asarray(read_windows(8, 16))
    run = jax.jit(lambda p, w: chapter.loss_and_gradient(p, w, CONFIG.n_head, mesh))
    ours = run(chapter.replicate(params, mesh), chapter.shard(windows_BT1, mesh))
    expected = jax.jit(jax.value_and_grad(loss_fn), static_argnums=2)(
        params, windows_BT1, CONFIG.n_head
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), ours, expected)


def test_twenty_steps_on_four_devices_have_the_losses_of_one(chapter):
    mesh = chapter.make_mesh(jax.devices("cpu"))
    params = chapter.replicate(copy_of_params(), mesh)
    state = chapter.replicate(init_state(params), mesh)
    step = chapter.make_step(mesh, CONFIG.n_head, LR, MATRIX_LR)
    windows_BT1 = chapter.shard(read_windows(8, CONFIG.block_size), mesh)
    donated, losses = (params, state), []
    for _ in range(20):
        params, state, loss = step(params, state, windows_BT1)
        losses.append(float(loss))
    print("losses of every fifth step, four devices:", np.round(losses[::5], 3))
    print("losses of every fifth step, one device:  ", np.round(losses_on_one_device()[::5], 3))
    np.testing.assert_allclose(losses, losses_on_one_device(), rtol=2e-3)
    assert losses[-1] < 2.0
    for name, tree in zip(("parameters", "state"), donated, strict=True):
        deleted = all(x.is_deleted() for x in jax.tree.leaves(tree))
        assert deleted, f"the step does not donate the {name}"
