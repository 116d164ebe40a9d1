"""Tests of chapter 9."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from ch03_block.solution import gpt
from tiny import CONFIG, gptjax_model, normal, params_of, read_windows

import pallas_kernels

BATCH, TIME, HEADS, HEAD_DIM = 2, 48, 2, 8


def arrays():
    """q, k, v and the gradient of the output."""
    return normal(*[(BATCH, TIME, HEADS, HEAD_DIM)] * 4)


def reference(q, k, v):
    return pallas_kernels.flash_attention(q, k, v, return_lse=True, implementation="reference")


def test_masked_scores(chapter):
    ones_XD = jnp.ones((chapter.TILE, 4))
    scores_XY = chapter.masked_scores(ones_XD, ones_XD, 1, 1)
    np.testing.assert_array_equal(jnp.isfinite(scores_XY), np.tri(chapter.TILE, dtype=bool))
    np.testing.assert_allclose(scores_XY[3, 2], 2.0)
    assert jnp.isfinite(chapter.masked_scores(ones_XD, ones_XD, 2, 1)).all()


@functools.cache
def results(chapter):
    """The output, the log-sum-exp of the first head, and the gradients."""

    def run(q, k, v, dout):
        out, pull = jax.vjp(chapter.flash_attention, q, k, v)
        _, (*_, lse_NT) = chapter.flash_forward(q[:, :, 0], k[:, :, 0], v[:, :, 0])
        return out, lse_NT, pull(dout)

    return jax.jit(run)(*arrays())


@functools.cache
def expected():
    def run(q, k, v, dout):
        (out, lse_BHT), pull = jax.vjp(reference, q, k, v)
        return out, lse_BHT[:, 0], pull((dout, jnp.zeros_like(lse_BHT)))

    return jax.jit(run)(*arrays())


def test_the_output_is_that_of_pallas_kernels(chapter):
    np.testing.assert_allclose(results(chapter)[0], expected()[0], atol=1e-5)


def test_the_log_sum_exp_is_that_of_pallas_kernels(chapter):
    np.testing.assert_allclose(results(chapter)[1], expected()[1], atol=1e-5)


def test_the_gradients_are_those_of_pallas_kernels(chapter):
    for name, grad, other in zip("qkv", results(chapter)[2], expected()[2], strict=True):
        np.testing.assert_allclose(grad, other, atol=1e-5, err_msg=f"gradient of {name}")


def test_no_array_has_a_score_for_each_query_and_key(chapter):
    def gradients(q, k, v, dout):
        return jax.vjp(chapter.flash_attention, q, k, v)[1](dout)

    jaxpr = str(jax.make_jaxpr(gradients)(*arrays()))
    assert f"{chapter.TILE},{chapter.TILE}]" in jaxpr
    assert f"{TIME},{TIME}]" not in jaxpr


def test_the_kernels_read_no_hidden_tile(chapter):
    """NaN in the last tile of keys, then in the first tile of queries.

    The causal mask hides the last keys from the tiles before, and the tiles after from the first
    queries. A program that reads a hidden tile stores NaN.
    """
    q, k, v, dout = arrays()
    first, last = slice(0, chapter.TILE), slice(TIME - chapter.TILE, TIME)
    before, after = slice(0, TIME - chapter.TILE), slice(chapter.TILE, TIME)

    @jax.jit
    def run(q, k, v, dout):
        out, pull = jax.vjp(chapter.flash_attention, q, k, v)
        return out, *pull(dout)

    out, dq, _, _ = run(q, *(x.at[:, last].set(jnp.nan) for x in (k, v)), dout)
    assert jnp.isfinite(out[:, before]).all(), "forward_kernel reads later key tiles"
    assert jnp.isfinite(dq[:, before]).all(), "dq_kernel reads later key tiles"
    q, dout = (x.at[:, first].set(jnp.nan) for x in (q, dout))
    _, _, dk, dv = run(q, k, v, dout)
    assert jnp.isfinite(dk[:, after]).all(), "dkv_kernel reads earlier query tiles"
    assert jnp.isfinite(dv[:, after]).all(), "dkv_kernel reads earlier query tiles"


def test_the_model_has_the_same_logits(chapter):
    params, tokens_BT = params_of(gptjax_model()), jnp.asarray(read_windows(2, 31))
    run = jax.jit(gpt, static_argnums=(2, 3))
    logits_BTV = run(params, tokens_BT, CONFIG.n_head, chapter.flash_attention)
    plain_BTV = run(params, tokens_BT, CONFIG.n_head)
    np.testing.assert_allclose(logits_BTV, plain_BTV, atol=1e-5)
