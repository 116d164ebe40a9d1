"""gptjax.optim.normuon: the matrices of a parameter, by its layout, and their orthogonalization in
groups of one shape, on one device and on two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from normuon_tools import FP32, as_jax, in_fp32, normal, run
from reference.normuon import polar_express as exact_polar_express

from gptjax.optim import (
    Matrices,
    distributed,
    normuon,
    orthogonalize,
    polar_express,
    scale_by_neuron_norm,
)


@pytest.mark.parametrize("outputs_first", [False, True])
def test_packed_matrices_are_matrices_of_their_own(outputs_first):
    q, k, v = (normal(6, 8, seed=i) for i in range(3))
    join = (
        (lambda *x: np.concatenate([y.T for y in x]))
        if outputs_first
        else (lambda *x: np.concatenate(x, axis=1))
    )
    layout = lambda path: Matrices(packed=3, outputs_first=outputs_first)
    tx = optax.chain(orthogonalize(in_fp32, layout=layout), scale_by_neuron_norm(layout=layout))
    (found,) = run(tx, [{"qkv": join(q, k, v)}])
    plain = optax.chain(orthogonalize(in_fp32), scale_by_neuron_norm())
    alone = [run(plain, [{"w": x}])[0]["w"] for x in (q, k, v)]
    np.testing.assert_allclose(found["qkv"], join(*map(np.asarray, alone)), atol=FP32)


def test_layout_and_its_inverse():
    for matrices, shape in [
        (Matrices(), (6, 9)),
        (Matrices(3), (6, 9)),
        (Matrices(3, outputs_first=True), (6, 9)),
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


@pytest.mark.parametrize("shape", [(64, 4, 16), (3, 3, 2, 8)])
def test_more_than_two_axes_without_a_layout_are_refused(shape):
    with pytest.raises(
        ValueError,
        match=r"attn.query.kernel of shape .* ambiguous.*Matrices\(inputs=\(0,\), outputs=",
    ):
        normuon(0.1).init({"attn": {"query": {"kernel": jnp.zeros(shape)}}})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"inputs": (0,)}, r"got inputs=\(0,\), outputs=\(\)"),
        ({"inputs": (0,), "outputs": (0, 1)}, "different axes"),
        ({"inputs": (0,), "outputs": (1,), "outputs_first": True}, "outputs_first"),
        ({"packed": 0}, "packed must be at least 1, got 0"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Matrices(**options)


@pytest.mark.parametrize("inputs, outputs", [((0,), (3,)), ((0,), (-3,)), ((-4,), (1,))])
def test_axes_that_a_parameter_lacks_are_refused(inputs, outputs):
    with pytest.raises(
        ValueError, match=r"w of shape \(2, 3, 4\): inputs=.* do not name different axes"
    ):
        Matrices(inputs=inputs, outputs=outputs).unpacked(jnp.zeros((2, 3, 4)), "w")


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


def test_what_holds_no_matrix_is_named():
    tx = normuon(0.1)
    with pytest.raises(
        ValueError,
        match=r"block.bias of shape \(3,\) does not hold a matrix; assign the parameter to another",
    ):
        tx.init({"block": {"bias": jnp.zeros(3)}})
    with pytest.raises(
        ValueError, match=r"w of shape \(4, 8\) does not hold 3 matrices side by side"
    ):
        normuon(0.1, layout=lambda path: Matrices(packed=3)).init({"w": jnp.zeros((4, 8))})


def test_the_work_is_shared_by_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shares = []

    def method(x_NIO):
        shares.append(x_NIO.shape)
        return in_fp32(x_NIO)

    grads = as_jax({"a": normal(3, 6, 8), "b": normal(2, 6, 8, seed=5)})
    tx = orthogonalize(
        distributed(method, mesh, dtype=jnp.float32),
        layout=lambda path: Matrices(inputs=(1,), outputs=(2,)),
    )
    update = jax.jit(lambda g: tx.update(g, tx.init(g))[0], out_shardings=replicated)
    found = update(jax.device_put(grads, replicated))
    assert set(shares) == {(3, 6, 8)}  # of five matrices, one more to make them even
    for name, g in grads.items():
        assert found[name].sharding.is_fully_replicated
        np.testing.assert_allclose(found[name], exact_polar_express(g), atol=FP32)


def test_a_mesh_without_the_axis_is_refused():
    mesh = jax.make_mesh((1,), ("model",))
    with pytest.raises(ValueError, match=r"with the axis 'data', got the axes \('model',\)"):
        distributed(in_fp32, mesh)


def test_axes_may_be_lists():
    layout = Matrices(inputs=(0,), outputs=(1, 2))
    object.__setattr__(layout, "outputs", [1, 2])  # the test's type checks refuse it as an argument
    layout.__post_init__()
    assert layout == Matrices(inputs=(0,), outputs=(1, 2)) and isinstance(hash(layout), int)


def test_gathering_in_bf16_loses_nothing():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x_NIO = jnp.asarray(normal(4, 16, 24), jnp.float32)
    method = functools.partial(polar_express, implementation="xla")
    found = jax.jit(distributed(method, mesh))(x_NIO)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, jax.jit(method)(x_NIO))
