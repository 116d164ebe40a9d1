"""Tests of chapter 2."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from tiny import CONFIG, gptjax_model, normal, params_of

from pallas_kernels import flash_attention


def qkv(batch=2, time=7, heads=3, head_dim=4):
    return normal(*[(batch, time, heads, head_dim)] * 3)


def test_softmax(chapter):
    p = chapter.softmax(jnp.array([[0.0, 0.0, jnp.log(2.0)], [-jnp.inf, 5.0, 5.0]]))
    np.testing.assert_allclose(p, [[0.25, 0.25, 0.5], [0, 0.5, 0.5]], rtol=1e-6)


def test_softmax_of_large_scores_does_not_overflow(chapter):
    np.testing.assert_allclose(chapter.softmax(jnp.array([1e4, 1e4, 0.0])), [0.5, 0.5, 0])


def test_each_row_has_its_own_maximum(chapter):
    # exp(0 − 1e4) is 0, so with one maximum for both rows the first would be 0/0.
    p = chapter.softmax(jnp.array([[0.0, 0.0], [1e4, 1e4]]))
    np.testing.assert_allclose(p, np.full((2, 2), 0.5))


def test_split_heads(chapter):
    qkv_BTF = jnp.arange(2 * 3 * 12).reshape(2, 3, 12)
    q_BTHD, k_BTHD, v_BTHD = chapter.split_heads(qkv_BTF, heads=2)
    assert q_BTHD.shape == (2, 3, 2, 2)
    np.testing.assert_array_equal(q_BTHD[0, 0], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(k_BTHD[0, 0], [[4, 5], [6, 7]])
    np.testing.assert_array_equal(v_BTHD[0, 0], [[8, 9], [10, 11]])


def test_the_first_query_sees_only_itself(chapter):
    q, k, v = qkv()
    np.testing.assert_allclose(jax.jit(chapter.causal_attention)(q, k, v)[:, 0], v[:, 0], rtol=1e-6)


def test_no_query_sees_a_later_key(chapter):
    q, k, v = qkv(time=5)
    # The sensitivity of the output at time 2 to the values at each time.
    grad = jax.jit(jax.grad(lambda v: chapter.causal_attention(q, k, v)[:, 2].sum()))(v)
    seen_S = jnp.abs(grad).sum(axis=(0, 2, 3)) > 0
    np.testing.assert_array_equal(seen_S, [True, True, True, False, False])


def test_attention_is_that_of_pallas_kernels(chapter):
    q, k, v = qkv()
    reference = functools.partial(flash_attention, implementation="reference")
    expected = jax.jit(reference)(q, k, v)
    np.testing.assert_allclose(jax.jit(chapter.causal_attention)(q, k, v), expected, atol=1e-6)


def test_scores_and_softmax_are_fp32(chapter):
    # Scores of up to 32: rounded to bf16, they would be wrong by 0.06, and the weights by 6 %.
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv(time=32, head_dim=16))
    y_BTHD = chapter.causal_attention(8 * q, k, v)
    assert y_BTHD.dtype == jnp.bfloat16
    exact_BTHD = chapter.causal_attention(*(x.astype(jnp.float32) for x in (8 * q, k, v)))
    np.testing.assert_allclose(y_BTHD.astype(jnp.float32), exact_BTHD, atol=0.03)


def test_the_layer_is_that_of_gptjax(chapter):
    model = gptjax_model()
    (x_BTC,) = normal((2, 9, CONFIG.n_embd))
    params = params_of(model)["blocks"][0]["attn"]
    y_BTC = jax.jit(chapter.attention, static_argnums=2)(x_BTC, params, CONFIG.n_head)
    # gptjax returns the matmul and the bias apart; the sum with zeros is the layer's output.
    expected = jax.jit(model.blocks[0].attn)(x_BTC).added_to(jnp.zeros_like(x_BTC))
    np.testing.assert_allclose(y_BTC, expected, atol=1e-6)


def test_the_layer_calls_attend(chapter):
    params = params_of(gptjax_model())["blocks"][0]["attn"]
    (x_BTC,) = normal((2, 9, CONFIG.n_embd))
    y_BTC = chapter.attention(x_BTC, params, CONFIG.n_head, lambda q, k, v: jnp.zeros_like(v))
    # Heads of zeros: only the bias of c_proj is left.
    np.testing.assert_array_equal(y_BTC, jnp.broadcast_to(params["c_proj"]["bias"], y_BTC.shape))
