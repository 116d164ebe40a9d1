"""Tests of chapter 9."""

import jax
import jax.numpy as jnp
import numpy as np
from ch04_loss.solution import loss_fn
from tiny import CONFIG, gptjax_model, params_of, read_windows

import pallas_kernels

BATCH, TIME, HEADS, HEAD_DIM = 2, 48, 2, 8


def arrays():
    """q, k, v and the gradient of the output."""
    return jax.random.normal(jax.random.key(0), (4, BATCH, TIME, HEADS, HEAD_DIM))


def reference(q, k, v):
    return pallas_kernels.flash_attention(q, k, v, implementation="reference")


def gradients(attention, q, k, v, dout):
    return jax.vjp(attention, q, k, v)[1](dout)


def test_masked_scores(chapter):
    ones_XD = jnp.ones((chapter.TILE, 4))
    scores_XY = chapter.masked_scores(ones_XD, ones_XD, 1, 1)
    np.testing.assert_array_equal(jnp.isfinite(scores_XY), np.tri(chapter.TILE, dtype=bool))
    np.testing.assert_allclose(scores_XY[3, 2], 2.0)
    assert jnp.isfinite(chapter.masked_scores(ones_XD, ones_XD, 2, 1)).all()


def test_the_output_is_that_of_pallas_kernels(chapter):
    q, k, v, _ = arrays()
    out = jax.jit(chapter.flash_attention)(q, k, v)
    np.testing.assert_allclose(out, reference(q, k, v), atol=1e-5)


def test_the_log_sum_exp_is_that_of_pallas_kernels(chapter):
    q, k, v, _ = arrays()
    q_NTD, k_NTD, v_NTD = (x[:, :, 0] for x in (q, k, v))
    _, (*_, lse_NT) = jax.jit(chapter.flash_forward)(q_NTD, k_NTD, v_NTD)
    _, lse_BHT = pallas_kernels.flash_attention(
        q[:, :, :1], k[:, :, :1], v[:, :, :1], return_lse=True, implementation="reference"
    )
    np.testing.assert_allclose(lse_NT, lse_BHT[:, 0], atol=1e-5)


def test_the_gradients_are_those_of_pallas_kernels(chapter):
    grads = jax.jit(lambda *args: gradients(chapter.flash_attention, *args))(*arrays())
    expected = jax.jit(lambda *args: gradients(reference, *args))(*arrays())
    for name, grad, other in zip("qkv", grads, expected, strict=True):
        np.testing.assert_allclose(grad, other, atol=1e-5, err_msg=f"gradient of {name}")


def test_no_array_has_a_score_for_each_query_and_key(chapter):
    jaxpr = str(jax.make_jaxpr(lambda *args: gradients(chapter.flash_attention, *args))(*arrays()))
    assert f"{chapter.TILE},{chapter.TILE}]" in jaxpr
    assert f"{TIME},{TIME}]" not in jaxpr


def test_the_model_has_the_same_loss_and_gradient(chapter):
    params, windows_BT1 = params_of(gptjax_model()), jnp.asarray(read_windows(2, 32))
    value_and_grad = jax.jit(jax.value_and_grad(loss_fn), static_argnums=(2, 3))
    flash = value_and_grad(params, windows_BT1, CONFIG.n_head, chapter.flash_attention)
    plain = value_and_grad(params, windows_BT1, CONFIG.n_head)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), flash, plain)
