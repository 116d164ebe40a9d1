"""gptjax.optim.partition: every parameter matches exactly one rule, and the optimizer of the rule
updates it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gptjax.models.gpt2 import GPT2Config
from gptjax.optim import Group, Matrices, adamw, normuon, normuon_and_adamw
from gptjax.optim.partition import GroupError, assign, describe
from gptjax.training.step import init_state

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
    return {
        name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()
    }


def run(tx, steps=3):
    p = params()
    state = tx.init(p)
    for k in range(steps):
        grads = jax.tree.map(lambda x, k=k: jnp.sin(x * (k + 1)), p)
        updates, state = tx.update(grads, state, p)
        p = optax.apply_updates(p, updates)
    return p


def test_each_group_has_the_optimizer_and_the_factors_of_its_rule():
    tx = normuon_and_adamw(
        GROUPS,
        matrix_learning_rate=0.02,
        learning_rate=1e-3,
        matrix_weight_decay=0.4,
        weight_decay=0.1,
        clip_norm=None,
    )
    found = run(tx)
    only = lambda name, tx: run(
        optax.partition({True: tx, False: optax.set_to_zero()}, {k: k == name for k in params()})
    )[name]
    alone = {
        "up": normuon(0.04, weight_decay=0.2),
        "down": normuon(0.02, weight_decay=0.4, layout=lambda path: Matrices(2)),
        "bias_1": adamw(3e-3, weight_decay=0.0, clip_norm=None),
        "bias_2": adamw(3e-3, weight_decay=0.0, clip_norm=None),
    }
    for name, tx in alone.items():
        np.testing.assert_allclose(found[name], only(name, tx), rtol=1e-5, atol=1e-7, err_msg=name)


def test_the_clip_is_that_of_all_gradients_together():
    tx = normuon_and_adamw(
        GROUPS,
        matrix_learning_rate=0.0,
        learning_rate=1.0,
        weight_decay=0.0,
        eps=1.0,
        clip_norm=0.5,
    )
    p = params()
    grads = jax.tree.map(lambda x: 1e3 * x, p)
    updates, _ = tx.update(grads, tx.init(p), p)
    g = np.asarray(grads["bias_1"], np.float64) * 0.5 / float(optax.tree.norm(grads))
    np.testing.assert_allclose(updates["bias_1"], -3.0 * g / (np.abs(g) + 1), rtol=1e-4)


def test_adamw_at_every_second_update_takes_the_sum_of_two_gradients():
    """And the schedule's value at that update, while NorMuon moves at each."""
    lr = lambda count: 1e-3 * (1.0 + count)
    how = {"matrix_learning_rate": 0.02, "weight_decay": 0.1, "clip_norm": None}
    tx, p = normuon_and_adamw(GROUPS, learning_rate=lr, every=2, **how), params()
    state, grads, history = (
        tx.init(p),
        [jax.tree.map(lambda x, k=k: jnp.sin(x * (k + 1)), p) for k in range(4)],
        [p],
    )
    for g in grads:
        updates, state = tx.update(g, state, history[-1])
        history.append(optax.apply_updates(history[-1], updates))
    alone = adamw(lambda count: 3 * lr(2 * count + 1), weight_decay=0.0, clip_norm=None)
    bias = {"bias_1": p["bias_1"]}
    its_state = alone.init(bias)
    for k in (0, 2):
        np.testing.assert_array_equal(history[k + 1]["bias_1"], history[k]["bias_1"])
        summed = {"bias_1": grads[k]["bias_1"] + grads[k + 1]["bias_1"]}
        updates, its_state = alone.update(summed, its_state, bias)
        bias = optax.apply_updates(bias, updates)
        np.testing.assert_allclose(history[k + 2]["bias_1"], bias["bias_1"], rtol=1e-5)
    assert all(not np.array_equal(a["up"], b["up"]) for a, b in itertools.pairwise(history))


def test_a_group_may_have_betas_of_its_own():
    groups = [*GROUPS[:2], Group("bias_1", b1=0.5, b2=0.6), Group("bias_2", b2=0.7)]
    found = run(
        normuon_and_adamw(
            groups, matrix_learning_rate=0.02, learning_rate=1e-3, b1=0.8, clip_norm=None
        )
    )
    for name, b1, b2 in (("bias_1", 0.5, 0.6), ("bias_2", 0.8, 0.7)):
        tx = optax.adamw(1e-3, b1=b1, b2=b2, weight_decay=0.1)
        wanted = run(
            optax.partition(
                {True: tx, False: optax.set_to_zero()}, {k: k == name for k in params()}
            )
        )
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-7)


def test_a_schedule_reaches_both():
    lr = lambda count: jnp.where(count == 0, 0.0, 1.0)
    tx = normuon_and_adamw(GROUPS, matrix_learning_rate=lr, learning_rate=lr)
    for old, new in zip(jax.tree.leaves(params()), jax.tree.leaves(run(tx, steps=1)), strict=True):
        np.testing.assert_array_equal(old, new)
    assert all(
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(params()), jax.tree.leaves(run(tx, 2)), strict=True)
    )


def test_parameters_without_a_rule_or_with_two_are_errors():
    with pytest.raises(
        GroupError, match="one rule, found:\n  c: no rule\n  bias_1: the rules 'bias.*' and '.*_1'"
    ):
        assign([Group("bias.*"), Group(".*_1"), Group("a")], ["a", "c", "bias_1"])
    with pytest.raises(GroupError, match="the rule 'wpe' matches nothing"):
        assign([Group(".*"), Group("wpe")], ["wte"])
    with pytest.raises(GroupError, match="up_2: no rule"):
        normuon_and_adamw(GROUPS, matrix_learning_rate=0.1, learning_rate=0.1).init(
            params() | {"up_2": jnp.zeros((2, 2))}
        )


@pytest.mark.parametrize(
    "options",
    [
        {"b1": 1.0},
        {"eps": -1.0},
        {"clip_norm": -1.0},
        {"every": 0},
        {"neuron_b2": 1.5},
        {"momentum": -0.1},
    ],
)
def test_numbers_out_of_range_are_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name.removeprefix('neuron_')} must be .*, got {value}"):
        normuon_and_adamw(GROUPS, matrix_learning_rate=0.1, learning_rate=0.1, **options)


def test_a_groups_factors_are_checked():
    with pytest.raises(
        ValueError, match=r"Group\('wte'\): learning_rate must be finite and at least 0, got -1.0"
    ):
        Group("wte", learning_rate=-1.0)
    with pytest.raises(ValueError, match=r"Group\('wte'\): b2 must be in \[0, 1\), got 1.0"):
        Group("wte", b2=1.0)
    group = Group("wte")
    object.__setattr__(group, "kind", "embeding")  # the test's type checks refuse it as an argument
    with pytest.raises(ValueError, match=r"Group\('wte'\): unknown kind 'embeding'; choose one of"):
        group.__post_init__()


def test_the_table_shows_the_matrices_of_named_axes():
    groups = [
        Group("conv", Matrices(inputs=(0, 1, 2), outputs=(3,))),
        Group("stack", Matrices(inputs=(1,), outputs=(2,))),
    ]
    shapes = {
        "conv": jax.ShapeDtypeStruct((3, 3, 2, 8), jnp.float32),
        "stack": jax.ShapeDtypeStruct((5, 4, 6), jnp.float32),
    }
    assert [row[2] for row in describe(groups, shapes, "normuon")] == [
        "normuon, 1 matrix of 18 × 8",
        "normuon, 5 matrices of 4 × 6",
    ]


def test_gpt2s_parameters():
    """The block's matrices take NorMuon, with q, k and v apart; embeddings decay, norms and biases
    do not."""
    state = jax.eval_shape(lambda: init_state(CONFIG, optax.identity(), 0))
    rows = {
        row[0]: (*row[1:3], row[3].learning_rate, row[3].weight_decay)
        for row in describe(CONFIG.parameter_groups(), state.params, "normuon")
    }
    assert rows == {
        "blocks.*.attn.c_attn.kernel (of 2)": ("16 × 48", "normuon, 3 matrices", 1.0, 1.0),
        "blocks.*.attn.c_proj.kernel (of 2)": ("16 × 16", "normuon", 1.0, 1.0),
        "blocks.*.mlp.c_fc.kernel (of 2)": ("16 × 64", "normuon", 1.0, 1.0),
        "blocks.*.mlp.c_proj.kernel (of 2)": ("64 × 16", "normuon", 1.0, 1.0),
        "wte": ("64 × 16", "adamw", 1.0, 1.0),
        "wpe": ("8 × 16", "adamw", 1.0, 1.0),
        **{
            f"blocks.*.{part}.bias (of 2)": (size, "adamw", 1.0, 0.0)
            for part, size in {
                "attn.c_attn": "48",
                "attn.c_proj": "16",
                "mlp.c_fc": "64",
                "mlp.c_proj": "16",
                "ln_1": "16",
                "ln_2": "16",
            }.items()
        },
        **{f"blocks.*.{part}.scale (of 2)": ("16", "adamw", 1.0, 0.0) for part in ("ln_1", "ln_2")},
        "ln_f.bias": ("16", "adamw", 1.0, 0.0),
        "ln_f.scale": ("16", "adamw", 1.0, 0.0),
    }
