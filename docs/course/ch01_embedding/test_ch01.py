"""Tests of chapter 1."""

import jax
import jax.numpy as jnp
import numpy as np
from tiny import gptjax_model, normal, params_of, read_windows


def test_linear_by_hand(chapter):
    x_BTI = jnp.array([[[1.0, 2.0], [0.0, -1.0]]])
    kernel_IO = jnp.array([[1.0, 0.0, 3.0], [0.5, 1.0, 0.0]])
    y_BTO = chapter.linear(x_BTI, kernel_IO, jnp.array([0.0, 10.0, 100.0]))
    np.testing.assert_allclose(y_BTO, [[[2.0, 12.0, 103.0], [-0.5, 9.0, 100.0]]])


def test_a_lookup_is_a_matmul(chapter):
    (wte_VC,) = normal((7, 4))
    tokens_BT = jnp.array([[3, 0, 6], [3, 3, 1]])
    np.testing.assert_allclose(chapter.embed_by_matmul(tokens_BT, wte_VC), wte_VC[tokens_BT])


def test_the_position_matters(chapter):
    wte_VC, wpe_SC = normal((7, 4), (5, 4))
    x_BTC = chapter.embed(jnp.array([[2, 2, 4]]), wte_VC, wpe_SC)
    assert x_BTC.shape == (1, 3, 4)
    np.testing.assert_allclose(x_BTC[0, 1] - x_BTC[0, 0], wpe_SC[1] - wpe_SC[0], rtol=1e-5)


def test_the_gradient_of_a_lookup_counts_tokens(chapter):
    wte_VC, wpe_SC = normal((5, 3), (4, 3))
    tokens_BT = jnp.array([[1, 1, 4, 1], [0, 4, 2, 2]])
    gradient = jax.grad(lambda wte_VC: chapter.embed(tokens_BT, wte_VC, wpe_SC).sum())
    grad_VC = jax.jit(gradient)(wte_VC)
    np.testing.assert_array_equal(np.asarray(grad_VC)[:, 0], [1, 3, 2, 0, 2])


def test_logits_are_dot_products(chapter):
    x_BTC, wte_VC = normal((2, 3, 4), (7, 4))
    logits_BTV = chapter.unembed(x_BTC, wte_VC)
    assert logits_BTV.shape == (2, 3, 7)
    np.testing.assert_allclose(logits_BTV[1, 2, 5], (x_BTC[1, 2] * wte_VC[5]).sum(), rtol=1e-5)


def test_gptjax_has_the_same_embedding_and_logits(chapter):
    model = gptjax_model()
    params = params_of(model)
    tokens_BT = jnp.asarray(read_windows(2, 8))
    x_BTC = chapter.embed(tokens_BT, params["wte"], params["wpe"])
    np.testing.assert_allclose(x_BTC, jax.jit(model.embed)(tokens_BT), atol=1e-7)
    logits_BTV = chapter.unembed(x_BTC, params["wte"])
    np.testing.assert_allclose(logits_BTV, jax.jit(model.logits)(x_BTC), atol=1e-6)
