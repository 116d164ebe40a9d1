"""gptjax.optim.normuon: each part against its equation in float64, twenty steps against PyTorch,
and the matrices of a parameter, by its layout, on one device and on two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from reference.normuon import neuron_norm, torch_step
from reference.normuon import polar_express as exact_polar_express

from gptjax.models.gpt2 import GPT2, GPT2Config
from gptjax.optim import (
    Matrices,
    add_cautious_decay,
    distributed,
    momentum_schedule,
    normuon,
    normuon_and_adamw,
    orthogonalize,
    polar_express,
    scale_by_neuron_norm,
)

in_fp32 = functools.partial(polar_express, dtype=jnp.float32)
# Polar Express in fp32 is known to a few parts in 10⁵ (test_polar_express.py); the rest of the
# chain adds nothing to that.
FP32 = 1e-4


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def as_jax(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def run(tx, grads, params=None):
    """The updates for each of the gradients, with the parameters as they are."""
    params = as_jax(grads[0]) if params is None else as_jax(params)
    state, found = tx.init(params), []
    update = jax.jit(tx.update)
    for g in grads:
        updates, state = update(as_jax(g), state, params)
        found.append(updates)
    return found


# -------------------------------------------------------------------------------------------- parts


def test_momentum_rises_and_falls_back():
    momentum = momentum_schedule(1000)
    steps = (0, 150, 300, 500, 950, 975, 1000, 1200)
    expected = [0.85, 0.9, 0.95, 0.95, 0.95, 0.9, 0.85, 0.85]
    assert [round(float(momentum(step)), 6) for step in steps] == expected
    risen = momentum_schedule(100, warmup_steps=0)
    assert [round(float(risen(step)), 6) for step in (0, 50, 100)] == [0.95, 0.95, 0.85]
    constant = momentum_schedule(100, warmup_steps=0, cooldown_steps=0)
    assert [round(float(constant(step)), 6) for step in (0, 99, 100, 200)] == [0.95] * 4


def test_the_cautious_mask():
    params = {"w": np.array([1.0, -1.0, 2.0, -2.0, 0.0, 3.0])}
    updates = {"w": np.array([0.5, 0.5, -0.5, -0.5, 0.5, 0.0])}
    (found,) = run(add_cautious_decay(0.1), [updates], params)
    # Same sign, other sign, other sign, same sign, zero parameter, zero update: that one decays.
    np.testing.assert_allclose(found["w"], [0.6, 0.5, -0.5, -0.7, 0.5, 0.3], rtol=1e-6)
    with pytest.raises(ValueError, match="add_cautious_decay needs the parameters"):
        add_cautious_decay(0.1).update(updates, None)


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

    @jax.jit
    def step(p, state):
        loss, grads = jax.value_and_grad(loss_fn)(p, as_jax(x), as_jax(y))
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state, loss

    for _ in range(20):
        p, state, loss = step(p, state)
        losses.append(float(loss))

    up, down = (torch.tensor(w.T.copy(), dtype=torch.float32) for w in weights.values())
    states = [
        (torch.zeros_like(w), torch.zeros(axis)) for w, axis in ((up, (20, 1)), (down, (1, 20)))
    ]
    tx32, ty32 = (torch.tensor(a, dtype=torch.float32) for a in (x, y))
    wanted = []
    for k in range(20):
        loss = (torch.tanh(tx32 @ up.requires_grad_().T) @ down.requires_grad_().T - ty32).square()
        loss.mean().backward()
        wanted.append(loss.mean().item())
        how = {"beta": 0.85 + 0.1 * k / 300, "lr": float(lr(k)), "decay": 1.2 * float(lr(k))}
        for w, state in zip((up, down), states, strict=True):
            torch_step(w, w.grad, *state, **how)
            w.grad = None
    assert wanted[-1] < 0.7 * wanted[0]
    np.testing.assert_allclose(losses, wanted, rtol=2e-4)


def test_under_nnx_optimizer_gpt2s_groups_apply():
    """`nnx.Optimizer` gives `init` Flax's variables and `update` their arrays: two updates equal
    those of the plain arrays."""
    config = GPT2Config(
        vocab_size=61, padded_vocab_size=64, block_size=8, n_layer=1, n_head=2, n_embd=16
    )
    model = GPT2(config, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    tx = normuon_and_adamw(
        config.parameter_groups(),
        matrix_learning_rate=0.02,
        learning_rate=1e-3,
        matrix_weight_decay=0.1,
        method=jnp.sin,
    )
    optimizer, state = nnx.Optimizer(model, tx, wrt=nnx.Param), tx.init(params)
    for k in range(2):
        grads = jax.tree.map(lambda p, k=k: jnp.cos(p * (k + 1)), nnx.state(model, nnx.Param))
        nnx.jit(lambda optimizer, model, grads: optimizer.update(model, grads))(
            optimizer, model, grads
        )
        updates, state = jax.jit(tx.update)(nnx.to_pure_dict(nnx.as_pure(grads)), state, params)
        params = optax.apply_updates(params, updates)
    found = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, found, params)


# ----------------------------------------------------------------------------------------- matrices


@pytest.mark.parametrize("axes", [{}, {"inputs": (1,), "outputs": (0,)}])
def test_packed_matrices_are_matrices_of_their_own(axes):
    q, k, v = (normal(6, 8, seed=i) for i in range(3))
    turned = (lambda x: x.T) if axes else (lambda x: x)
    join = lambda *x: turned(np.concatenate(x, axis=1))
    layout = lambda path: Matrices(packed=3, **axes)
    tx = optax.chain(orthogonalize(in_fp32, layout=layout), scale_by_neuron_norm(layout=layout))
    (found,) = run(tx, [{"qkv": join(q, k, v)}])
    plain = optax.chain(orthogonalize(in_fp32), scale_by_neuron_norm())
    alone = [run(plain, [{"w": x}])[0]["w"] for x in (q, k, v)]
    np.testing.assert_allclose(found["qkv"], join(*map(np.asarray, alone)), atol=FP32)


def test_layout_and_its_inverse():
    for matrices, shape in [
        (Matrices(), (6, 9)),
        (Matrices(3), (6, 9)),
        (Matrices(3, inputs=(1,), outputs=(0,)), (6, 9)),
        (Matrices(inputs=(-2,), outputs=(-1,)), (2, 6, 9)),
        (Matrices(2, inputs=(3, 1), outputs=(0, 4)), (2, 3, 4, 5, 6)),
    ]:
        x = jnp.asarray(normal(*shape))
        np.testing.assert_array_equal(matrices.together(matrices.unpacked(x), shape), x)


@pytest.mark.parametrize(
    "shape, matrices, as_matrices",
    [
        # Flax's attention: query kernel (C, H, D), then out kernel (H, D, C).
        ((12, 3, 2), Matrices(inputs=(0,), outputs=(1, 2)), lambda x: x.reshape(12, 6)),
        ((3, 2, 12), Matrices(inputs=(0, 1), outputs=(2,)), lambda x: x.reshape(6, 12)),
        # A convolution (kh, kw, in, out).
        ((3, 3, 2, 8), Matrices(inputs=(0, 1, 2), outputs=(3,)), lambda x: x.reshape(18, 8)),
    ],
)
def test_several_axes_are_one_matrix_where_the_layout_names_them(shape, matrices, as_matrices):
    """The update is that of the same matrix stored with two axes."""
    g, p = normal(*shape), normal(*shape, seed=1)
    how = {"weight_decay": 0.1, "method": in_fp32}
    (found,) = run(normuon(0.1, layout=lambda path: matrices, **how), [{"w": g}], {"w": p})
    (wanted,) = run(normuon(0.1, **how), [{"w": as_matrices(g)}], {"w": as_matrices(p)})
    np.testing.assert_allclose(
        as_matrices(np.asarray(found["w"])), wanted["w"], rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize(
    "shape, layout, message",
    [
        ((3,), {}, r"b.w of shape \(3,\) does not hold a matrix; assign the parameter to"),
        ((4, 8), {"packed": 3}, r"b.w of shape \(4, 8\) does not hold 3 matrices side by side"),
        ((64, 4, 16), {}, r"b.w of shape .* ambiguous.*Matrices\(inputs=\(0,\), outputs="),
        ((2, 3, 4), {"inputs": (0,), "outputs": (3,)}, "b.w .* do not name different axes of it"),
        ((2, 3, 4), {"inputs": (-4,), "outputs": (1,)}, "b.w .* do not name different axes of it"),
        ((), {"inputs": (0,)}, r"got inputs=\(0,\), outputs=\(\)"),
        ((), {"inputs": (0,), "outputs": (0, 1)}, "different axes"),
        ((), {"packed": 0}, "packed must be at least 1, got 0"),
    ],
)
def test_a_layout_that_contradicts_itself_or_does_not_fit_is_refused(shape, layout, message):
    with pytest.raises(ValueError, match=message):
        matrices = Matrices(**layout)
        normuon(0.1, layout=lambda path: matrices).init({"b": {"w": jnp.zeros(shape)}})


@pytest.mark.parametrize("shape", [(2, 0), (0, 2), (0, 0)])
def test_an_empty_parameter_stays_empty_and_others_beside_it_do_not_care(shape):
    gradients = {"w": normal(4, 6), "empty": np.zeros(shape, np.float32)}
    (found,) = run(normuon(0.1), [gradients])
    (alone,) = run(normuon(0.1), [{"w": gradients["w"]}])
    assert found["empty"].shape == shape
    np.testing.assert_array_equal(found["w"], alone["w"])


def test_matrices_of_one_shape_go_through_one_call():
    calls = []

    def method(x_NIO):
        calls.append(x_NIO.shape)
        return in_fp32(x_NIO)

    grads = [
        {
            "a": normal(6, 8, seed=1),
            "b": {"c": normal(3, 6, 8, seed=2), "d": normal(8, 6, seed=3)},
            "e": normal(6, 16),
        }
    ]
    stacked = Matrices(inputs=(1,), outputs=(2,))
    layout = lambda path: stacked if path == "b.c" else Matrices(packed=2 if path == "e" else 1)
    (found,) = run(orthogonalize(method, layout=layout), grads)
    assert sorted(calls) == [(1, 8, 6), (6, 6, 8)]
    for ours, g in zip(jax.tree.leaves(found)[:3], jax.tree.leaves(grads[0])[:3], strict=True):
        np.testing.assert_allclose(ours, exact_polar_express(g), atol=FP32)
    np.testing.assert_allclose(
        found["e"][:, 8:], exact_polar_express(grads[0]["e"][:, 8:]), atol=FP32
    )


def test_the_work_is_shared_by_devices_and_gathering_in_bf16_loses_nothing():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shares = []

    def method(x_NIO):
        shares.append(x_NIO.shape)
        return polar_express(x_NIO, implementation="xla")

    grads = as_jax({"a": normal(3, 6, 8), "b": normal(2, 6, 8, seed=5)})
    layout = lambda path: Matrices(inputs=(1,), outputs=(2,))

    def updates(method, **shardings):
        tx = orthogonalize(method, layout=layout)
        return jax.jit(lambda g: tx.update(g, tx.init(g))[0], **shardings)

    found = updates(distributed(method, mesh), out_shardings=replicated)
    found = found(jax.device_put(grads, replicated))
    assert set(shares) == {(3, 6, 8)}  # of five matrices, one more to make them even
    for name, wanted in updates(method)(grads).items():
        assert found[name].sharding.is_fully_replicated and found[name].dtype == jnp.float32
        np.testing.assert_array_equal(found[name], wanted)
    with pytest.raises(ValueError, match=r"with the axis 'x', got the axes \('data',\)"):
        distributed(method, mesh, axis="x")
