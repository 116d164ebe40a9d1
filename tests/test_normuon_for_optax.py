"""NorMuon in other people's optax code: without kernels and configs, against the authors' algorithm
in PyTorch, under vmap and masks, and with `optax.contrib.muon`'s dimension numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from optax.contrib import MuonDimensionNumbers
from process_tools import python
from reference.normuon import torch_paper_step

from gptjax.optim import (
    Matrices,
    newton_schulz,
    normuon,
    polar_express,
    scale_by_matrix_shape,
    scale_by_normuon,
)

in_fp32 = functools.partial(polar_express, dtype=jnp.float32)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def updates_of(tx, grads, params):
    state, update, out = tx.init(params), jax.jit(tx.update), []
    for g in grads:
        updates, state = update(g, state, params)
        out.append(updates)
    return out


def assert_equal(found, wanted, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), found, wanted)


def test_the_module_imports_neither_kernels_nor_configs():
    loaded = python(
        "-c", "import sys; from gptjax.optim.normuon import normuon; print(*sys.modules)"
    ).split()
    foreign = {"flax", "pallas_kernels", "gptjax.config", "gptjax.fields", "gptjax.optim.config"}
    assert "gptjax.optim.polar_express" in loaded and not foreign & {*loaded}


def test_fifty_steps_of_the_authors_algorithm_follow_pytorch():
    """Gradients of a quadratic: they depend on what the optimizer did before."""
    shapes, lr = {"wide": (5, 9), "tall": (9, 5), "square": (7, 7)}, 0.02
    options = {"beta": 0.9, "b2": 0.8, "decay": 0.3}
    tx = optax.chain(
        scale_by_normuon(
            0.9, 0.8, method=functools.partial(newton_schulz, dtype=jnp.float32), neurons="outputs"
        ),
        scale_by_matrix_shape(),
        optax.add_decayed_weights(0.3),
        optax.scale_by_learning_rate(lr),
    )
    params = {name: normal(*shape, seed=1) for name, shape in shapes.items()}
    target = {name: normal(*shape, seed=2) for name, shape in shapes.items()}
    weights = {k: torch.tensor(np.asarray(w).T.copy()).double() for k, w in params.items()}
    states = {k: (torch.zeros_like(w), w.new_zeros(len(w), 1)) for k, w in weights.items()}
    state = tx.init(params)
    assert {k: v.shape for k, v in state[0][2].variance.items()} == {
        name: (1, 1, shape[1]) for name, shape in shapes.items()
    }

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(lambda p, t: p - t, params, target)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(50):
        params, state = step(params, state)
        for k, w in weights.items():
            g = w - torch.tensor(np.asarray(target[k]).T.copy()).double()
            torch_paper_step(w, g, *states[k], lr=lr, **options)
    for k, w in weights.items():
        np.testing.assert_allclose(params[k], w.T.numpy(), rtol=0, atol=2e-4, err_msg=k)


def test_an_ensemble_under_vmap_is_its_members():
    params = {"w": normal(3, 6, 4), "u": normal(3, 4, 4, seed=1)}
    grads = jax.tree.map(jnp.cos, params)
    tx = normuon(0.02, method=in_fp32, weight_decay=0.1)
    state = jax.vmap(tx.init)(params)
    found, _ = jax.jit(jax.vmap(tx.update))(grads, state, params)
    for k in range(3):
        member = jax.tree.map(lambda x, k=k: x[k], (grads, params))
        (wanted,) = updates_of(tx, member[:1], member[1])
        assert_equal(jax.tree.map(lambda x, k=k: x[k], found), wanted, rtol=0, atol=1e-6)


def test_masked_parameters_are_left_alone():
    params = {"w": normal(6, 4), "bias": normal(4)}
    tx = optax.masked(normuon(0.02, method=in_fp32), {"w": True, "bias": False})
    (found,) = updates_of(tx, [params], params)
    (wanted,) = updates_of(normuon(0.02, method=in_fp32), [{"w": params["w"]}], {"w": params["w"]})
    assert_equal(found, wanted | {"bias": params["bias"]}, rtol=1e-6)


PARAMS = {
    "embedding": normal(11, 6),
    "query": normal(6, 2, 3),
    "blocks": {"up": normal(4, 6, 5), "down": normal(4, 6, 5, seed=1)},
    "convolution": normal(3, 3, 2, 7),
    "bias": normal(6),
}
NUMBERS = {
    "embedding": None,
    "query": MuonDimensionNumbers(0, (1, 2)),
    "blocks": MuonDimensionNumbers(1, -1),  # a prefix of the tree; four matrices each
    "convolution": Matrices(inputs=(0, 1, 2), outputs=(3,)),
    "bias": None,
}


@pytest.mark.parametrize("form", ["tree", "function"])
def test_dimension_numbers_assign_matrices_and_the_rest(form):
    numbers = NUMBERS if form == "tree" else lambda params: NUMBERS
    grads = [jax.tree.map(jnp.sin, PARAMS), jax.tree.map(jnp.cos, PARAMS)]
    options = {"method": in_fp32, "weight_decay": 0.1}
    tx = normuon(0.02, rest=optax.sgd(0.1, 0.9), weight_dimension_numbers=numbers, **options)
    found = updates_of(tx, grads, PARAMS)
    layouts = {
        "query": Matrices(inputs=(0,), outputs=(1, 2)),
        "blocks.up": Matrices(inputs=(1,), outputs=(2,)),
        "blocks.down": Matrices(inputs=(1,), outputs=(2,)),
        "convolution": NUMBERS["convolution"],
    }
    chosen = lambda tree, keys: {key: tree[key] for key in keys}
    for keys, alone in (
        (("query", "blocks", "convolution"), normuon(0.02, layout=layouts.__getitem__, **options)),
        (("embedding", "bias"), optax.sgd(0.1, 0.9)),
    ):
        wanted = updates_of(alone, [chosen(g, keys) for g in grads], chosen(PARAMS, keys))
        assert_equal([chosen(u, keys) for u in found], wanted, rtol=1e-6, atol=1e-9)


def test_parameters_that_are_none_have_no_number():
    """Equinox has None in the place of static fields and absent biases."""
    params = {"w": normal(6, 4), "scale": normal(4), "bias": None}
    options = {"rest": optax.sgd(1.0), "method": in_fp32}
    (wanted,) = updates_of(normuon(0.02, **options), [params], params)
    for numbers in (
        {"w": MuonDimensionNumbers(0, 1), "scale": None, "bias": None},
        lambda tree: jax.tree.map(
            lambda x: MuonDimensionNumbers(0, 1) if x.ndim > 1 else None, tree
        ),
    ):
        tx = normuon(0.02, weight_dimension_numbers=numbers, **options)
        assert_equal(updates_of(tx, [params], params)[0], wanted, rtol=1e-6)


def test_without_numbers_two_axes_are_a_matrix_as_in_optax():
    params = {"w": normal(6, 4), "bias": normal(4)}
    (found,) = updates_of(normuon(0.02, rest=optax.sgd(1.0), method=in_fp32), [params], params)
    (wanted,) = updates_of(normuon(0.02, method=in_fp32), [{"w": params["w"]}], {"w": params["w"]})
    assert_equal(found, wanted | {"bias": -params["bias"]}, rtol=1e-6)
    with pytest.raises(ValueError, match="weight_dimension_numbers needs rest"):
        normuon(0.02, weight_dimension_numbers=NUMBERS)
    with pytest.raises(ValueError, match="bias of shape .* does not hold a matrix"):
        normuon(0.02).init(params)


@pytest.mark.parametrize("form", [None, "tree", "function"])
def test_an_equinox_module_with_call(form):
    """optax and `callable` regard such a tree of labels or numbers as a function."""
    equinox = pytest.importorskip("equinox")
    mlp = equinox.filter(equinox.nn.MLP(4, 3, 5, 1, key=jax.random.key(0)), equinox.is_array)
    grads = jax.tree.map(jnp.sin, mlp)
    numbers = lambda params: jax.tree.map(
        lambda x: MuonDimensionNumbers(1, 0) if x.ndim == 2 else None, params
    )
    given = {None: None, "tree": numbers(mlp), "function": numbers}[form]
    options = {"method": in_fp32, "weight_decay": 0.1}
    tx = normuon(0.02, rest=optax.sgd(0.1), weight_dimension_numbers=given, **options)
    (found,) = updates_of(tx, [grads], mlp)
    axes = Matrices() if form is None else Matrices(inputs=(1,), outputs=(0,))
    alone = normuon(0.02, layout=lambda path: axes, **options)
    weights = lambda tree: [layer.weight for layer in tree.layers]
    (wanted,) = updates_of(alone, [weights(grads)], weights(mlp))
    assert_equal(weights(found), wanted, rtol=1e-6, atol=1e-9)
    for u, g in zip(found.layers, grads.layers, strict=True):
        np.testing.assert_allclose(u.bias, -0.1 * g.bias, rtol=1e-6)


def test_a_learning_rate_in_the_state():
    params, numbers = {"w": normal(6, 4), "v": normal(6, 4)}, {"w": Matrices(), "v": None}
    options = {"rest": optax.sgd(1.0), "weight_dimension_numbers": lambda params: numbers}
    # The functions that the docstring lists; and b2, whose type jaxtyping checks under pytest.
    static = ("b2", "method", "layout", "factor", "decay_factor", "weight_dimension_numbers")
    inject = optax.inject_hyperparams(normuon, static_args=static)
    tx = inject(0.02, method=in_fp32, **options)
    (found,) = updates_of(tx, [params], params)
    (wanted,) = updates_of(normuon(0.02, method=in_fp32, **options), [params], params)
    assert_equal(found, wanted, rtol=1e-6)
    assert float(tx.init(params).hyperparams["learning_rate"]) == np.float32(0.02)
