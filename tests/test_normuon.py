"""gptjax.optim.normuon: each part against its equation in float64, and twenty steps against
PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from normuon_tools import FP32, as_jax, in_fp32, normal, run
from reference.normuon import TorchNorMuon, neuron_norm
from reference.normuon import polar_express as exact_polar_express

from gptjax.models.gpt2 import GPT2, GPT2Config
from gptjax.optim import (
    Matrices,
    add_cautious_decay,
    momentum_schedule,
    newton_schulz,
    normuon,
    normuon_and_adamw,
    orthogonalize,
    polar_express,
    scale_by_matrix_shape,
    scale_by_nesterov,
    scale_by_neuron_norm,
    scale_by_normuon,
)

# -------------------------------------------------------------------------------------------- parts


def test_momentum_rises_and_falls_back():
    momentum = momentum_schedule(1000)
    steps = (0, 150, 300, 500, 950, 975, 1000, 1200)
    expected = [0.85, 0.9, 0.95, 0.95, 0.95, 0.9, 0.85, 0.85]
    assert [round(float(momentum(step)), 6) for step in steps] == expected


def test_momentum_without_warm_up_or_cooldown():
    risen = momentum_schedule(100, warmup_steps=0)
    assert [round(float(risen(step)), 6) for step in (0, 50, 100)] == [0.95, 0.95, 0.85]
    constant = momentum_schedule(100, warmup_steps=0, cooldown_steps=0)
    assert [round(float(constant(step)), 6) for step in (0, 99, 100, 200)] == [0.95] * 4


@pytest.mark.parametrize("momentum", [0.9, lambda count: 0.5 + 0.1 * jnp.float32(count)])
def test_nesterov(momentum):
    grads = [{"a": normal(3, 4, seed=i), "b": normal(2, seed=9 + i)} for i in range(4)]
    found = run(scale_by_nesterov(momentum), grads)
    for name in ("a", "b"):
        m = 0
        for i, g in enumerate(grads):
            beta = momentum(i) if callable(momentum) else momentum
            m = beta * m + (1 - beta) * g[name]
            np.testing.assert_allclose(
                found[i][name], (1 - beta) * g[name] + beta * m, rtol=1e-5, atol=1e-6
            )


@settings(max_examples=10, deadline=None)
@given(
    i=st.integers(1, 12),
    o=st.integers(1, 12),
    seed=st.integers(0, 99),
    b2=st.sampled_from([0.0, 0.5, 0.95]),
)
def test_neuron_norm_keeps_the_norm_of_each_matrix(i, o, seed, b2):
    grads = [{"w": normal(i, o, seed=seed + k)} for k in range(3)]
    variance = 0
    for g, found in zip(grads, run(scale_by_neuron_norm(b2), grads), strict=True):
        wanted, variance = neuron_norm(g["w"], variance, b2)
        np.testing.assert_allclose(found["w"], wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(found["w"]), np.linalg.norm(g["w"]), rtol=1e-5)


def test_neuron_norm_of_a_matrix_and_of_its_transpose_as_pytorch_has_it():
    grads = [{"w": normal(6, 10, seed=k)} for k in range(3)]
    turned = [{"w": g["w"].T} for g in grads]
    outputs_first = scale_by_neuron_norm(layout=lambda path: Matrices(outputs_first=True))
    for ours, theirs in zip(
        run(scale_by_neuron_norm(), grads), run(outputs_first, turned), strict=True
    ):
        np.testing.assert_allclose(ours["w"], theirs["w"].T, rtol=1e-6)


def test_the_cautious_mask():
    params = {"w": np.array([1.0, -1.0, 2.0, -2.0, 0.0, 3.0])}
    updates = {"w": np.array([0.5, 0.5, -0.5, -0.5, 0.5, 0.0])}
    (found,) = run(add_cautious_decay(0.1), [updates], params)
    # Same sign, other sign, other sign, same sign, zero parameter, zero update: that one decays.
    np.testing.assert_allclose(found["w"], [0.6, 0.5, -0.5, -0.7, 0.5, 0.3], rtol=1e-6)


def test_the_cautious_decay_as_the_square_of_the_learning_rate():
    lr = lambda count: 0.1 * jnp.float32(count + 1)
    tx = optax.chain(
        add_cautious_decay(lambda count: 2.0 * lr(count)), optax.scale_by_learning_rate(lr)
    )
    found = run(tx, [{"w": np.ones(1)}] * 3, {"w": np.full(1, 5.0)})
    for k, update in enumerate(found):
        np.testing.assert_allclose(update["w"], -lr(k) * (1 + 2.0 * lr(k) * 5.0), rtol=1e-6)


def test_the_learning_rate_follows_the_shape():
    grads = [{"wide": np.ones((4, 16)), "tall": np.ones((16, 4)), "twice": np.ones((4, 4))}]
    (found,) = run(
        scale_by_matrix_shape(factor=lambda path: 2.0 if path == "twice" else 1.0), grads
    )
    assert {name: float(x[0, 0]) for name, x in found.items()} == {
        "wide": 2.0,
        "tall": 1.0,
        "twice": 2.0,
    }


def test_cautious_decay_needs_the_parameters():
    tx, grads = add_cautious_decay(0.1), {"w": jnp.zeros(3)}
    with pytest.raises(ValueError, match="add_cautious_decay needs the parameters"):
        tx.update(grads, tx.init(grads))


# ---------------------------------------------------------------------------------------- the whole


@pytest.mark.parametrize("decay_form", ["lr", "lr²"])
def test_follows_the_equations(decay_form):
    rng = np.random.default_rng(0)
    shapes = {"wide": (5, 9), "tall": (9, 5), "square": (6, 6)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    grads = [{name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(10)]
    lr, beta = (lambda k: 0.02 * jnp.float32(k + 1)), (lambda k: 0.8 + 0.01 * jnp.float32(k))
    wd, b2 = 0.3, 0.9

    tx = normuon(
        lr,
        momentum=beta,
        b2=b2,
        weight_decay=wd if decay_form == "lr" else lambda k: wd * lr(k),
        method=in_fp32,
        factor=lambda path: 1.5 if path == "tall" else 1.0,
    )
    p = as_jax(params)
    state = tx.init(p)
    for g in grads:
        updates, state = jax.jit(tx.update)(as_jax(g), state, p)
        p = optax.apply_updates(p, updates)

    for name, (i, o) in shapes.items():
        w, m, variance = params[name], 0, 0
        for k, g in enumerate(grads):
            b = float(beta(k))
            m = b * m + (1 - b) * g[name]
            u = (1 - b) * g[name] + b * m
            v, variance = neuron_norm(exact_polar_express(u), variance, b2)
            rate = float(lr(k)) * np.sqrt(max(1, o / i)) * (1.5 if name == "tall" else 1.0)
            decay = wd * (float(lr(k)) if decay_form == "lr²" else 1.0)
            w = w - w * (v * w >= 0) * decay * rate - v * rate
        np.testing.assert_allclose(p[name], w, rtol=0, atol=FP32 * 10 * float(lr(9)), err_msg=name)


def test_twenty_steps_of_training_follow_pytorch():
    """A small network, whose gradients depend on what the optimizer did before."""
    x, y = normal(64, 12, seed=1), normal(64, 5, seed=2)
    weights = {"up": normal(12, 20, seed=3) * 0.3, "down": normal(20, 5, seed=4) * 0.2}
    lr = lambda k: 0.05 * (1 - jnp.float32(k) / 40)

    def loss_fn(p, x, y):
        return jnp.square(jnp.tanh(x @ p["up"]) @ p["down"] - y).mean()

    tx = normuon(
        lr, momentum=momentum_schedule(10**6), weight_decay=lambda k: 1.2 * lr(k), method=in_fp32
    )
    p = as_jax(weights)
    state, losses = tx.init(p), []
    for _ in range(20):
        loss, grads = jax.value_and_grad(loss_fn)(p, as_jax(x), as_jax(y))
        updates, state = tx.update(grads, state, p)
        p = optax.apply_updates(p, updates)
        losses.append(float(loss))

    theirs = {name: torch.tensor(w.T.copy(), dtype=torch.float32) for name, w in weights.items()}
    optimizers = {name: TorchNorMuon(w, lr, 0.95, 1.2) for name, w in theirs.items()}
    tx32, ty32 = (torch.tensor(a, dtype=torch.float32) for a in (x, y))
    wanted = []
    for k in range(20):
        leaves = {name: w.clone().requires_grad_(True) for name, w in theirs.items()}
        loss = (torch.tanh(tx32 @ leaves["up"].T) @ leaves["down"].T - ty32).square().mean()
        loss.backward()
        wanted.append(loss.item())
        for name, optimizer in optimizers.items():
            optimizer.step(k, leaves[name].grad)
    assert wanted[-1] < 0.7 * wanted[0]
    np.testing.assert_allclose(losses, wanted, rtol=2e-4)


def test_on_a_foreign_model_and_on_nnx_state():
    """A flax MLP with biases, and GPT-2's state, each partitioned by the user: no type of gptjax's
    is needed."""

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)])

        def __call__(self, x):
            return self.layers[1](jnp.tanh(self.layers[0](x)))

    model = MLP(nnx.Rngs(0))
    label = lambda params: jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "rest", params)
    tx = optax.partition({"matrix": normuon(0.05), "rest": optax.sgd(0.05)}, label)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = as_jax(normal(32, 8))
    loss_fn = lambda model: jnp.square(model(x)[:, 0] - jnp.sin(x.sum(1))).mean()

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]

    config = GPT2Config(
        vocab_size=61, padded_vocab_size=64, block_size=8, n_layer=2, n_head=2, n_embd=16
    )
    params = nnx.split(GPT2(config, rngs=nnx.Rngs(0)), nnx.Param)[1]
    state = tx.init(params)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_state_has_the_shapes_of_its_parameters_and_comes_back_from_a_checkpoint(tmp_path):
    from gptjax.training.checkpoint import Checkpoints

    tx = scale_by_normuon(layout=lambda path: Matrices(packed=3 if path == "qkv" else 1))
    params = as_jax({"qkv": normal(6, 18), "tall": normal(8, 4)})
    state = tx.init(params)
    assert jax.tree.map(jnp.shape, state[0].momentum) == {"qkv": (6, 18), "tall": (8, 4)}
    assert jax.tree.map(jnp.shape, state[2].variance) == {"qkv": (3, 1, 6), "tall": (1, 8, 1)}
    _, state = tx.update(params, state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(1, like), state)
    checkpoints.close()


def test_sharded_parameters_keep_their_sharding_and_so_does_the_state():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, copied = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        for spec in (["data"], [])
    )
    params = as_jax({"qkv": normal(6, 18), "tall": normal(8, 4)})
    tx = normuon(
        0.1,
        weight_decay=0.2,
        method=in_fp32,
        layout=lambda path: Matrices(packed=3 if path == "qkv" else 1),
    )

    def steps(params, state):
        for _ in range(3):
            updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    wanted, _ = steps(params, tx.init(params))
    state = tx.init(params)
    like = jax.tree.map(lambda x: rows if x.shape in ((6, 18), (8, 4)) else copied, (params, state))
    made, state = jax.jit(steps, out_shardings=like)(*jax.device_put((params, state), like))
    momentum = optax.tree.get(state, "momentum")
    for name in params:
        assert made[name].sharding == momentum[name].sharding == rows
        np.testing.assert_allclose(made[name], wanted[name], rtol=1e-4, atol=1e-5)


def test_under_nnx_optimizer_gpt2s_groups_apply():
    """`nnx.Optimizer` gives `init` Flax's variables and `update` their arrays: two updates equal
    those of the plain arrays."""
    config = GPT2Config(
        vocab_size=61, padded_vocab_size=64, block_size=8, n_layer=2, n_head=2, n_embd=16
    )
    model = GPT2(config, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    tx = normuon_and_adamw(
        config.parameter_groups(),
        matrix_learning_rate=0.02,
        learning_rate=1e-3,
        matrix_weight_decay=0.1,
        method=in_fp32,
    )
    optimizer, state = nnx.Optimizer(model, tx, wrt=nnx.Param), tx.init(params)
    for k in range(2):
        grads = jax.tree.map(lambda p, k=k: jnp.cos(p * (k + 1)), nnx.state(model, nnx.Param))
        optimizer.update(model, grads)
        updates, state = tx.update(nnx.to_pure_dict(nnx.as_pure(grads)), state, params)
        params = optax.apply_updates(params, updates)
    found = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, found, params)


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": -0.1},
        {"learning_rate": float("nan")},
        {"momentum": 1.0},
        {"b2": 1.5},
        {"weight_decay": -1.0},
    ],
)
def test_numbers_out_of_range_are_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"normuon: {name} must be .*, got {value}"):
        normuon(**{"learning_rate": 0.1} | options)


def test_momentum_schedule_refuses_a_momentum_of_one_or_more():
    with pytest.raises(ValueError, match=r"momentum_schedule: high must be in \[0, 1\), got 1.5"):
        momentum_schedule(100, high=1.5)


def test_newton_schulz_in_its_place():
    grads = [{"w": normal(6, 10)}]
    (ours,), (other,) = (run(orthogonalize(f), grads) for f in (newton_schulz, polar_express))
    np.testing.assert_array_equal(ours["w"], newton_schulz(as_jax(grads[0]["w"])[None])[0])
    assert not np.allclose(ours["w"], other["w"], atol=0.01)
