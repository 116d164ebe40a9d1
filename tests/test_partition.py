"""gptjax.optim.partition: every parameter matches exactly one rule, and the optimizer of the rule
updates it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gptjax.models.base import abstract_params
from gptjax.models.gpt2 import GPT2Config
from gptjax.optim import Group, Matrices, adamw, normuon, normuon_and_adamw
from gptjax.optim.partition import GroupError, assign, flatten

pytestmark = pytest.mark.usefixtures("optax_promotion")

CONFIG = GPT2Config(
    vocab_size=61, padded_vocab_size=64, block_size=8, n_layer=2, n_head=2, n_embd=16
)
GROUPS = [
    Group("up", Matrices(), learning_rate=2.0, weight_decay=0.5),
    Group("down", Matrices(2)),
    Group("bias.*", None, 3.0, 0.0),
]


def params():
    rng = np.random.default_rng(0)
    shapes = {"up": (4, 6), "down": (6, 8), "bias_1": (6,), "bias_2": (8,)}
    return {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in shapes.items()}


def run(tx, steps=3):
    p = params()
    state, update = tx.init(p), jax.jit(tx.update)
    for k in range(steps):
        grads = jax.tree.map(lambda x, k=k: jnp.sin(x * (k + 1)), p)
        updates, state = update(grads, state, p)
        p = optax.apply_updates(p, updates)
    return p


def only(name, tx):
    """The parameter `name` after three updates of `tx`."""
    label = {k: k == name for k in params()}
    return run(optax.partition({True: tx, False: optax.set_to_zero()}, label))[name]


def test_each_group_has_the_optimizer_and_the_options_of_its_rule():
    tx = normuon_and_adamw(
        [*GROUPS[:2], Group("bias_1", None, 3.0, 0.0), Group("bias_2", b1=0.5, b2=0.6)],
        matrix_learning_rate=0.02,
        learning_rate=1e-3,
        matrix_weight_decay=0.4,
        b1=0.8,
        clip_norm=None,
    )
    found = run(tx)
    alone = {
        "up": normuon(0.04, weight_decay=0.2),
        "down": normuon(0.02, weight_decay=0.4, layout=lambda path: Matrices(2)),
        "bias_1": adamw(3e-3, b1=0.8, weight_decay=0.0, clip_norm=None),
        "bias_2": optax.adamw(1e-3, b1=0.5, b2=0.6, weight_decay=0.1),
    }
    for name, tx in alone.items():
        np.testing.assert_allclose(found[name], only(name, tx), rtol=1e-5, atol=1e-7, err_msg=name)


def test_the_clip_is_that_of_all_gradients_together():
    how = {"matrix_learning_rate": 0.0, "learning_rate": 1.0, "weight_decay": 0.0}
    tx, p = normuon_and_adamw(GROUPS, eps=1.0, clip_norm=0.5, **how), params()
    grads = jax.tree.map(lambda x: 1e3 * x, p)
    updates, _ = jax.jit(tx.update)(grads, tx.init(p), p)
    g = np.asarray(grads["bias_1"], np.float64) * 0.5 / float(optax.tree.norm(grads))
    np.testing.assert_allclose(updates["bias_1"], -3.0 * g / (np.abs(g) + 1), rtol=1e-4)


def test_adamw_at_every_second_update_takes_the_sum_of_two_gradients():
    """And the schedule's value at that update, while NorMuon moves at each."""
    lr = lambda count: 1e-3 * (1.0 + count)
    how = {"matrix_learning_rate": 0.02, "weight_decay": 0.1, "clip_norm": None}
    tx, p = normuon_and_adamw(GROUPS, learning_rate=lr, every=2, **how), params()
    grads = [jax.tree.map(lambda x, k=k: jnp.sin(x * (k + 1)), p) for k in range(4)]
    state, update, history = tx.init(p), jax.jit(tx.update), [p]
    for g in grads:
        updates, state = update(g, state, history[-1])
        history.append(optax.apply_updates(history[-1], updates))
    alone = adamw(lambda count: 3 * lr(2 * count + 1), weight_decay=0.0, clip_norm=None)
    bias = p["bias_1"]
    its_state = alone.init(bias)
    for k in (0, 2):
        np.testing.assert_array_equal(history[k + 1]["bias_1"], history[k]["bias_1"])
        summed = grads[k]["bias_1"] + grads[k + 1]["bias_1"]
        updates, its_state = alone.update(summed, its_state, bias)
        bias = optax.apply_updates(bias, updates)
        np.testing.assert_allclose(history[k + 2]["bias_1"], bias, rtol=1e-5)
    assert all(not np.array_equal(a["up"], b["up"]) for a, b in itertools.pairwise(history))


def test_a_schedule_reaches_both():
    lr = lambda count: jnp.where(count == 0, 0.0, 1.0)
    tx, first = normuon_and_adamw(GROUPS, matrix_learning_rate=lr, learning_rate=lr), params()
    jax.tree.map(np.testing.assert_array_equal, run(tx, steps=1), first)
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, run(tx, steps=2), first)))


def test_parameters_without_a_rule_or_with_two_are_errors():
    message = "one rule, found:\n  c: no rule\n  bias_1: the rules 'bias.*' and '.*_1'"
    with pytest.raises(GroupError, match=message):
        assign([Group("bias.*"), Group(".*_1"), Group("a")], ["a", "c", "bias_1"])
    with pytest.raises(GroupError, match="the rule 'wpe' matches nothing"):
        assign([Group(".*"), Group("wpe")], ["wte"])
    tx = normuon_and_adamw(GROUPS, matrix_learning_rate=0.1, learning_rate=0.1)
    with pytest.raises(GroupError, match="up_2: no rule"):
        tx.init(params() | {"up_2": jnp.zeros((2, 2))})


def test_gpt2s_parameters():
    """The block's matrices take NorMuon, with q, k and v apart; embeddings decay, norms and biases
    do not."""
    found = {}
    shapes = dict(zip(*flatten(abstract_params(CONFIG))[:2], strict=True))
    for path, group in assign(CONFIG.parameter_groups(), list(shapes)).items():
        matrices = group.matrices and group.matrices.shape(shapes[path].shape)
        found[path] = matrices, group.weight_decay
        assert (group.learning_rate, group.b1, group.b2) == (1.0, None, None)
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    matrices = dict(zip(names, [(3, 16, 16), (1, 16, 16), (1, 16, 64), (1, 64, 16)], strict=True))
    vectors = ["ln_f.bias", "ln_f.scale"]
    for i in range(2):
        vectors += [f"blocks.{i}.{part}.bias" for part in (*names, "ln_1", "ln_2")]
        vectors += [f"blocks.{i}.{part}.scale" for part in ("ln_1", "ln_2")]
    assert found == {
        **{f"blocks.{i}.{k}.kernel": (x, 1.0) for i in range(2) for k, x in matrices.items()},
        **dict.fromkeys(("wte", "wpe"), (None, 1.0)),
        **dict.fromkeys(vectors, (None, 0.0)),
    }
