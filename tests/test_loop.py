"""The loop over micro-batches: what leaves it, and that the sums stay the same."""

import functools

import jax
import jax.numpy as jnp
import pytest

from gptjax.models.base import graph, init_params
from gptjax.models.llama3 import Llama3Config
from gptjax.precision import Precision
from gptjax.training import step
from gptjax.training.loop import sum_over


def plain(f, params, xs):
    """The loop without code motion."""

    def add(total, x):
        results, rest = f(params, x)
        return jax.tree.map(jnp.add, total, results), rest

    zero = jax.eval_shape(f, params, jax.tree.map(lambda x: x[0], xs))[0]
    return jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zero), xs)


def equal(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), a, b))


def test_casts_and_splits_leave_the_loop():
    def f(w, x):
        narrow, again = w["a"].astype(jnp.bfloat16), w["a"].astype(jnp.bfloat16)
        product = jnp.sin(w["a"].T @ x["y"].astype(jnp.float32))
        left, right = jnp.split(product @ w["a"], 2)
        return (left, right.T, product.sum()), (x["y"] @ narrow, again @ x["y"])

    w, xs = {"a": jnp.eye(4) / 3, "b": jnp.zeros(2)}, {"y": jnp.ones((3, 4, 4), jnp.bfloat16)}
    jaxpr = jax.make_jaxpr(functools.partial(sum_over, f))(w, xs)
    (at,) = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "scan"]
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    inside = [eqn.primitive.name for eqn in jaxpr.eqns[at].params["jaxpr"].eqns]
    assert names[:at].count("convert_element_type") == 1 and "transpose" not in names[:at]
    assert inside.count("convert_element_type") == 1 and "transpose" in inside  # x; w.T
    assert names[at + 1 :] == ["split", "transpose"] and "split" not in inside
    assert equal(sum_over(f, w, xs), plain(f, w, xs))


def test_constants_and_literals():
    """Functions that differ in a constant are not equal. A literal of the jaxpr, such as the
    gradient of an unused scalar, is summed too."""

    def f(w, x):
        narrow = [jax.jit(lambda w, c=c: (w * c).astype(x.dtype))(w) for c in constants]
        return (narrow[0] @ x - narrow[1] @ x, jax.lax.full((), 3.0)), ()

    constants, w = (jnp.eye(2), jnp.ones((2, 2))), jnp.ones((2, 2))
    (difference, constant), () = sum_over(f, w, jnp.ones((3, 2, 2), jnp.bfloat16))
    assert (difference == -3).all() and constant == 9


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_gradients_are_equal(name, monkeypatch):
    """Bit by bit, with the gradients of each micro-batch added in their order."""
    sizes = {"vocab_size": 64, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}
    config = Llama3Config(**sizes, n_inner=64, precision=Precision(name))
    params = init_params(config, 0)
    tokens = jax.random.randint(jax.random.key(0), (3, 2, 17), 0, 64)

    def traced():
        f = functools.partial(step.loss_and_grads, graph(config))
        return len(jax.make_jaxpr(f)(params, tokens).eqns), jax.jit(f)(params, tokens)

    outside, moved = traced()
    monkeypatch.setattr(step, "sum_over", plain)
    fewer, expected = traced()
    assert outside > fewer + config.n_layer
    assert equal(moved, expected)
