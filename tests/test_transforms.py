"""ema_nesterov, tail_ema, row_floor and radial_pin against loops of modded-nanogpt's records in
float64; exact resume; several devices; other libraries' modules."""

import dataclasses
import doctest
import os
import shutil
from pathlib import Path

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from process_tools import python
from saved_run_tools import MODEL, random_params, restored, save_run
from train_tools import run, same_as

import gptjax
from gptjax.models.base import params_of
from gptjax.optim import (
    Matrices,
    NorMuonConfig,
    ema_nesterov,
    evaluation_params,
    radial_pin,
    row_floor,
    tail_ema,
    transforms,
)
from gptjax.parallel import Parallel
from gptjax.precision import Precision
from gptjax.training import init_from
from gptjax.training.step import init_state
from gptjax.weights import sources

pytestmark = pytest.mark.usefixtures("optax_promotion")
STEPS, LR = 50, 0.05
LAYOUTS = {
    "plain": ((5, 3), Matrices()),
    "packed": ((4, 9), Matrices(packed=3)),
    "heads": ((5, 2, 3), Matrices(inputs=(0,), outputs=(1, 2))),
    "merged": ((3, 2, 5), Matrices(inputs=(0, 1), outputs=(2,))),
    "equinox": ((3, 7), Matrices(inputs=(1,), outputs=(0,))),
}
PIECES = ["ema_nesterov", "tail_ema", "row_floor", "radial_damping", "radial_pin", "decay"]


def layout(path):
    return LAYOUTS[path][1]


def rows(name, x):
    """The matrices of a parameter: (outputs, inputs), as in the records."""
    shape = LAYOUTS[name][0]
    if name == "packed":
        return np.split(x.T, 3)
    flat = {"heads": (5, 6), "merged": (6, 5)}.get(name, shape)
    return [x.reshape(flat) if name == "equinox" else x.reshape(flat).T]


def parameter(name, matrices):
    x = np.concatenate(matrices)
    return (x if name == "equinox" else x.T).reshape(LAYOUTS[name][0])


def problem():
    """Random parameters, and noisy gradients that depend on them, by parameters and step."""
    rng = np.random.default_rng(0)
    draw = {name: rng.normal(size=(1 + STEPS, *shape)) for name, (shape, _) in LAYOUTS.items()}
    start = {name: x[-1] for name, x in draw.items()}
    return start, lambda p, step: {name: x[step] + 0.3 * p[name] for name, x in draw.items()}


def beta_at(on, step):
    return 0.3 * (1 - step / STEPS) if on and 8 <= step < 40 else 0.0


def recorded(pieces):
    """Parameters to evaluate after each step, by the records' loop: the weights move to the
    look-ahead point before the gradient, and do not move back."""
    on = {piece: piece in pieces for piece in PIECES}
    w, grads = problem()
    previous, e = {k: x.copy() for k, x in w.items()}, None
    ahead, result = {k: 0 * x for k, x in w.items()}, []
    for step in range(STEPS):
        w = {k: x + beta_at(on["ema_nesterov"], step) * ahead[k] for k, x in w.items()}
        g = grads(w, step)
        for name in w:
            after = []
            for p, u in zip(rows(name, w[name]), rows(name, g[name]), strict=True):
                c = (u * p).sum() / (p * p).sum()
                if on["radial_damping"] and c < 0:
                    u = u - 0.5 * c * p
                if on["row_floor"]:
                    norms = [np.linalg.norm(x, axis=1, keepdims=True) for x in (p, u)]
                    u = u * np.maximum(0.7 * norms[0] / norms[1], 1)
                radius = np.linalg.norm(p) - LR * (u * p).sum() / np.linalg.norm(p)
                mask, new = u * p > 0, p - LR * u
                if on["radial_pin"]:
                    new = new * radius / np.linalg.norm(new)
                after.append(new * (1 - (LR * 0.4 * mask if on["decay"] else 0)))
            w[name] = parameter(name, after)
        ahead = {k: 0.9 * ahead[k] + 0.1 * (w[k] - previous[k]) for k in w}
        previous = {k: x.copy() for k, x in w.items()}
        if step + 1 == 30:
            e = previous
        elif e is not None:
            e = {k: x + (w[k] - x) / 7 for k, x in e.items()}
        blend = on["tail_ema"] and e is not None
        result.append(
            {k: 0.4 * x + 0.6 * e[k] if blend and k != "heads" else x for k, x in w.items()}
        )
    return result


def optimizer(pieces):
    on = {piece: piece in pieces for piece in PIECES}
    inner = optax.scale_by_learning_rate(LR)
    if on["row_floor"]:
        inner = optax.chain(row_floor(0.7, layout=layout), inner)
    if on["radial_damping"] or on["radial_pin"] or on["decay"]:
        constants = {"damping": 0.5 * on["radial_damping"], "pin": float(on["radial_pin"])}
        decay = (lambda count: jnp.where(count >= 0, LR * 0.4, 1)) if on["decay"] else 0.0
        inner = radial_pin(inner, **constants, decay=decay, layout=layout)
    if on["tail_ema"]:
        rate = lambda n: jnp.where(n < 30, 1.0, 1 / 7)  # noqa: E731
        inner = optax.chain(inner, tail_ema(rate, select=lambda path: path != "heads"))
    if on["ema_nesterov"]:
        beta = lambda n: jnp.where((n >= 8) & (n < 40), 0.3 * (1 - n / STEPS), 0.0)  # noqa: E731
        inner = ema_nesterov(inner, beta, gamma=0.9)
    return inner


@pytest.mark.parametrize("pieces", [*([piece] for piece in PIECES), PIECES], ids=str)
def test_fifty_steps_are_those_of_the_records_loop(pieces):
    tx, (params, grads) = optimizer(pieces), problem()
    params = jax.tree.map(jnp.float32, params)
    state, update = tx.init(params), jax.jit(tx.update)
    assert {x.dtype for x in jax.tree.leaves(state)} <= {jnp.dtype("float32"), jnp.dtype("int32")}
    wanted, plain = recorded(pieces), recorded([])
    for step in range(STEPS):
        g = {k: jnp.float32(x) for k, x in grads(params, step).items()}
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        found = evaluation_params(params, state)
        for name, x in wanted[step].items():
            np.testing.assert_allclose(found[name], x, rtol=2e-5, atol=2e-5, err_msg=name)
    assert np.abs(wanted[-1]["packed"] - plain[-1]["packed"]).max() > 1e-3


def test_constants_of_zero_change_nothing():
    inner, (params, grads) = optax.adam(0.1), problem()
    params, grads = (jax.tree.map(jnp.float32, x) for x in (params, grads(params, 0)))
    rate = optax.scale_by_learning_rate(0.1)
    plain = optax.chain(inner, rate).update(grads, optax.chain(inner, rate).init(params))[0]
    for tx in (
        ema_nesterov(optax.chain(inner, rate), 0.0),
        optax.chain(inner, rate, tail_ema(0.1, 0.0)),
        optax.chain(inner, row_floor(0.0, layout=layout), rate),
        optax.chain(inner, radial_pin(rate, damping=0.0, pin=0.0, layout=layout)),
    ):
        updates, state = tx.update(grads, tx.init(params), params)
        jax.tree.map(np.testing.assert_array_equal, updates, plain)
        jax.tree.map(np.testing.assert_array_equal, evaluation_params(params, state), params)
    assert evaluation_params(params, inner.init(params)) is params


def test_zeros_are_neither_pinned_nor_scaled_up():
    params, grads = {"plain": jnp.zeros((5, 3))}, {"plain": jnp.ones((5, 3)).at[:, 1].set(0)}
    tx = radial_pin(optax.chain(row_floor(0.5), optax.scale_by_learning_rate(0.1)))
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates["plain"], -0.1 * grads["plain"])
    for tx in (row_floor(0.5), tail_ema(1.0), radial_pin(optax.identity())):
        with pytest.raises(ValueError, match="needs the parameters"):
            tx.update(params, tx.init(params))


ALL = {"ema_nesterov_beta": 0.3, "tail_ema_weight": 0.6, "tail_ema_steps": 4.0}
ALL |= {"tail_ema_start": 0.4, "schedule": "powercool", "powercool_start": 0.5}
MATRIX = {"row_floor": 0.4, "radial_damping": 0.5, "radial_pin": 1.0}


def test_a_run_resumes_exactly_and_its_averages_are_loaded(config):
    """With halves of parameters; the test below has parameters in fp32."""
    own = {"tail_ema_exclude": "wte", "ema_nesterov_stop": 1.0}
    own |= {"param_storage": "bf16_mantissa", "second_moment_dtype": "bf16"}
    optimizer = NorMuonConfig(warmup_steps=2, schedule_steps=20, **ALL, **MATRIX, **own)
    model = dataclasses.replace(config.model, precision=Precision("bf16"))
    rarely = {"checkpoint_every": 10, "val_every": 20, "sample_every": 20, "keep_last": 2}
    config = dataclasses.replace(config, model=model, optimizer=optimizer, **rarely)
    code, shown = run(config)
    assert code == 0 and "sample ⟨" in shown
    for option in ("ema_nesterov_beta 0.3", "param_storage bf16_mantissa"):
        assert option in shown

    resumed = dataclasses.replace(config, name="resumed", sample_every=0, val_every=0)
    shutil.copytree(config.run_dir, resumed.run_dir)
    shutil.rmtree(resumed.run_dir / "checkpoints" / "20")
    same_as(config, resumed, "resuming from step 10")

    tx = config.build_optimizer(gptjax.parallel.data_mesh(jax.devices()[:1]))
    like = jax.eval_shape(lambda: init_state(model, tx, 0))
    sharding = jnp.zeros(()).sharding
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like)
    state = restored(config.run_dir / "checkpoints", 20, like)
    loaded = params_of(gptjax.load(config.run_dir, tokenizer=None).model)
    wanted = state.evaluation_params()
    for x, y, p in zip(*map(jax.tree.leaves, (loaded, wanted, state.params)), strict=True):
        assert x.dtype == jnp.float32 and y.dtype == p.dtype
        np.testing.assert_array_equal(x.astype(y.dtype), y)
    kernel = [x["blocks"][0]["mlp"]["c_fc"]["kernel"] for x in (wanted, state.params)]
    assert not np.array_equal(*kernel)


def test_averages_in_the_state_of_a_chain_are_loaded(tmp_path):
    """The optimizer of a user: the average may stand anywhere in the state."""
    params = random_params()
    tx = optax.chain(optax.sgd(0.1), tail_ema(0.5, select=lambda path: path != "wpe"))
    parts = {"1": ema_nesterov(tx, 0.3)}
    tx = optax.chain(optax.partition(parts, lambda params: jax.tree.map(lambda _: "1", params)))
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(params, state, params)
    save_run(tmp_path, {1: params}, opt_state=state)
    loaded = params_of(gptjax.load(tmp_path, tokenizer=None).model)
    jax.tree.map(np.testing.assert_array_equal, loaded, evaluation_params(params, state))
    two, source = Parallel.of(jax.devices()[:2], "fsdp"), sources.find(tmp_path)
    sharded = init_from.read_params(MODEL, two, source)
    jax.tree.map(np.testing.assert_array_equal, sharded, loaded)
    assert not np.array_equal(loaded["wte"], params["wte"])


SCRIPT = """
import jax, numpy as np, optax
from test_transforms import PIECES, evaluation_params, optimizer
from gptjax import Parallel, parallel

jax.config.update("jax_numpy_dtype_promotion", "standard")
parallel.SMALLEST_SHARDED = 1
rng, shapes = np.random.default_rng(0), {"plain": (12, 8), "packed": (4, 24), "heads": (8, 2, 4)}
noise = {name: rng.standard_normal((51, *shape), np.float32) for name, shape in shapes.items()}
tx, ends = optimizer(PIECES), []
for devices in (1, 2, 4):
    p = Parallel.of(jax.devices()[:devices], "fsdp")
    sharded = lambda tree: jax.device_put(tree, p.shardings(tree))
    params = sharded({name: x[-1] for name, x in noise.items()})
    state = sharded(tx.init(params))
    update = jax.jit(tx.update, out_shardings=(p.shardings(params), p.shardings(state)))
    for step in range(50):
        grads = sharded({name: x[step] for name, x in noise.items()})
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    found = evaluation_params(params, state)
    for name, x in params.items():
        assert x.sharding.is_fully_replicated == (devices == 1)
        for y in (found[name], state.displacement[name]):
            assert y.sharding.is_equivalent_to(x.sharding, x.ndim)
    ends.append(jax.device_get((found, params)))
for end in ends[1:]:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), end, ends[0])
print("equal")
"""


def test_one_two_and_four_devices_are_equal():
    folder = str(Path(__file__).parent)
    path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    assert python("-c", SCRIPT, PYTHONPATH=path, XLA_FLAGS=flags) == "equal\n"


def test_modules_of_linen_and_equinox():
    """Equinox's weight is linen's kernel, transposed: so are the results."""
    equinox = pytest.importorskip("equinox")
    dense = flax.linen.Dense(5).init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    linear = equinox.nn.Linear(3, 5, key=jax.random.key(0))
    linear = equinox.tree_at(lambda x: x.weight, linear, dense["kernel"].T)
    linear = equinox.tree_at(lambda x: x.bias, linear, dense["bias"])
    results = []
    for params, matrices in (
        (dense, Matrices()),
        (equinox.filter(linear, equinox.is_inexact_array), LAYOUTS["equinox"][1]),
    ):
        how = {"layout": lambda path, matrices=matrices: matrices}
        rate = optax.scale_by_learning_rate(0.1)
        matrix = radial_pin(optax.chain(row_floor(2.0, **how), rate), **how)
        parts = {2: optax.chain(matrix, tail_ema(0.5)), 1: rate}
        tx = optax.partition(parts, lambda params: jax.tree.map(jnp.ndim, params))
        tx = ema_nesterov(tx, 0.3)
        state = tx.init(params)
        for _ in range(3):
            grads = jax.tree.map(lambda p: p + 0.1, params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        results.append(evaluation_params(params, state))
    dense, linear = results
    np.testing.assert_allclose(linear.weight, dense["kernel"].T, rtol=1e-5)
    np.testing.assert_array_equal(linear.bias, dense["bias"])


def test_the_examples_of_the_docstrings_run():
    names = {"optax": optax, "jnp": jnp, "schedule": gptjax.optim.schedule}
    assert doctest.testmod(transforms, extraglobs=names) == (0, 20)
