"""Computation that does not depend on the micro-batch runs once a step."""

import functools

import jax
import jax.numpy as jnp
import pytest

from gptjax.models.base import graph, init_params
from gptjax.models.llama3 import Llama3Config
from gptjax.precision import Precision
from gptjax.training import step
from gptjax.training.hoist import hoisted


def primitives(jaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def test_casts_leave_the_loop_once_and_transposes_stay():
    def f(w, x):
        narrow = w["a"].astype(jnp.bfloat16)
        again = jnp.sin(w["a"].T @ x["y"].astype(jnp.float32)).sum()
        return x["y"] @ narrow, w["a"].astype(jnp.bfloat16) @ x["y"], again, jnp.ones(3)

    w, x = {"a": jnp.eye(4) / 3, "b": jnp.zeros(2)}, {"y": jnp.ones((4, 4), jnp.bfloat16)}

    def loop(w, x):
        call = hoisted(f, w, x)
        return jax.lax.scan(lambda _, x: (0, call(x)), 0, jax.tree.map(lambda y: y[None], x))[1]

    jaxpr = jax.make_jaxpr(loop)(w, x)
    before = primitives(jaxpr)
    (scan,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    inside = primitives(scan.params["jaxpr"])
    assert before.count("convert_element_type") == 1 and "transpose" not in before
    assert inside.count("convert_element_type") == 1 and "transpose" in inside  # x; w.T
    for got, expected in zip(jax.tree.leaves(loop(w, x)), f(w, x), strict=True):
        assert (got[0] == expected).all()


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_gradients_are_equal(name, monkeypatch):
    sizes = {"vocab_size": 64, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}
    config = Llama3Config(**sizes, n_inner=64, precision=Precision(name))
    params = init_params(config, 0)
    tokens = jax.random.randint(jax.random.key(0), (3, 2, 17), 0, 64)

    def traced():
        f = functools.partial(step.loss_and_grads, graph(config))
        return len(jax.make_jaxpr(f)(params, tokens).eqns), jax.jit(f)(params, tokens)

    outside, once = traced()
    monkeypatch.setattr(step, "hoisted", lambda f, params, x: functools.partial(f, params))
    fewer, repeated = traced()
    assert outside > fewer + config.n_layer
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), once, repeated))
