"""Tests of chapter 4."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tiny import CONFIG, gptjax_model, normal, params_of, read_windows

import gptjax
from pallas_kernels import fused_classifier


def logits_and_targets():
    (logits_NV,) = normal((6, 11))
    return 3 * logits_NV, jnp.array([0, 10, 3, 3, 7, 1])


def test_log_sum_exp(chapter):
    x_NV = jnp.array([[0.0, jnp.log(3.0)], [1000.0, 1000.0], [-1000.0, -2000.0]])
    expected_N = [np.log(4), 1000 + np.log(2), -1000]
    np.testing.assert_allclose(chapter.log_sum_exp(x_NV), expected_N, rtol=1e-6)


def test_equal_logits_have_the_loss_log_v(chapter):
    losses_N = chapter.cross_entropy(jnp.zeros((3, 257)), jnp.array([0, 5, 256]))
    np.testing.assert_allclose(losses_N, np.log(257), rtol=1e-6)


def test_losses_and_gradient_are_those_of_pallas_kernels(chapter):
    logits_NV, targets_N = logits_and_targets()
    reference = functools.partial(fused_classifier, implementation="reference")
    losses_N, grad_NV = jax.jit(reference)(logits_NV, targets_N)
    np.testing.assert_allclose(chapter.cross_entropy(logits_NV, targets_N), losses_N, rtol=1e-5)
    np.testing.assert_allclose(
        chapter.cross_entropy_gradient(logits_NV, targets_N), grad_NV, atol=1e-6
    )


def test_the_gradient_by_hand_is_that_of_jax(chapter):
    logits_NV, targets_N = logits_and_targets()
    gradient = jax.grad(lambda x_NV: chapter.cross_entropy(x_NV, targets_N).sum())
    grad_NV = jax.jit(gradient)(logits_NV)
    by_hand_NV = chapter.cross_entropy_gradient(logits_NV, targets_N)
    np.testing.assert_allclose(by_hand_NV, grad_NV, atol=1e-6)


def test_bf16_logits_have_a_loss_and_a_gradient_in_fp32(chapter):
    logits_NV, targets_N = logits_and_targets()
    logits_NV = logits_NV.astype(jnp.bfloat16)
    for function in (chapter.cross_entropy, chapter.cross_entropy_gradient):
        result = function(logits_NV, targets_N)
        assert result.dtype == jnp.float32
        exact = function(logits_NV.astype(jnp.float32), targets_N)
        np.testing.assert_allclose(result, exact, rtol=1e-6)


def test_the_loss_passes_attend_to_the_model(chapter):
    calls = []

    def attend(q, k, v):
        calls.append(q.shape)
        return v

    windows_BT1 = jnp.asarray(read_windows(1, 8))
    chapter.loss_fn(params_of(gptjax_model()), windows_BT1, CONFIG.n_head, attend)
    assert len(calls) == CONFIG.n_layer, "loss_fn does not pass `attend` on"


def test_the_loss_and_its_gradient_are_those_of_gptjax(chapter):
    model, windows_BT1 = gptjax_model(), jnp.asarray(read_windows(2, 16))
    graph, state = nnx.split(model)

    def gptjax_loss(state):
        return gptjax.loss_fn(nnx.merge(graph, state), windows_BT1[:, :-1], windows_BT1[:, 1:])

    value_and_grad = jax.jit(jax.value_and_grad(chapter.loss_fn), static_argnums=2)
    loss, grads = value_and_grad(params_of(model), windows_BT1, CONFIG.n_head)
    expected, expected_grads = jax.jit(jax.value_and_grad(gptjax_loss))(state)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    expected_grads = params_of(nnx.merge(graph, expected_grads))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), grads, expected_grads)
