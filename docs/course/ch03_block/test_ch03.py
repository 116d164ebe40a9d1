"""Tests of chapter 3."""

import jax
import jax.numpy as jnp
import numpy as np
from tiny import CONFIG, gptjax_model, normal, params_of, read_windows

import pallas_kernels
from gptjax.models.blocks import run_blocks


def hidden():
    return 3 + 2 * normal((2, 9, CONFIG.n_embd))[0]


def norm_params():
    scale_C, bias_C = normal((CONFIG.n_embd,), (CONFIG.n_embd,))
    return {"scale": scale_C, "bias": bias_C}


def test_layer_norm(chapter):
    x_BTC, params = hidden(), norm_params()
    y_BTC = chapter.layer_norm(x_BTC, params)
    expected = pallas_kernels.layer_norm(
        x_BTC, params["scale"], params["bias"], implementation="reference"
    )
    np.testing.assert_allclose(y_BTC, expected, atol=1e-5)


def test_layer_norm_ignores_the_scale_of_its_input(chapter):
    x_BTC, params = hidden(), norm_params()
    y_BTC = chapter.layer_norm(x_BTC, params)
    np.testing.assert_allclose(chapter.layer_norm(7 * x_BTC - 2, params), y_BTC, atol=1e-4)


def test_layer_norm_of_bf16_computes_in_fp32(chapter):
    x_BTC, params = hidden().astype(jnp.bfloat16), norm_params()
    y_BTC = chapter.layer_norm(x_BTC, params)
    assert y_BTC.dtype == jnp.bfloat16
    # Only the result is rounded to bf16.
    exact_BTC = chapter.layer_norm(x_BTC.astype(jnp.float32), params)
    np.testing.assert_array_equal(y_BTC, exact_BTC.astype(jnp.bfloat16))


def test_gelu(chapter):
    x = jnp.linspace(-6, 6, 101)
    np.testing.assert_allclose(chapter.gelu(x), jax.nn.gelu(x, approximate=True), atol=1e-6)


def test_a_block_is_that_of_gptjax(chapter):
    model, x_BTC = gptjax_model(), hidden()
    params = params_of(model)["blocks"][1]
    y_BTC = jax.jit(chapter.block, static_argnums=2)(x_BTC, params, CONFIG.n_head)

    @jax.jit
    def expected(x_BTC):
        x_BTC, pending = run_blocks(CONFIG, [model.blocks[1]], x_BTC, None)
        return pending.added_to(x_BTC)

    np.testing.assert_allclose(y_BTC, expected(x_BTC), atol=1e-5)


def test_the_logits_are_those_of_gptjax(chapter):
    model = gptjax_model()
    tokens_BT = jnp.asarray(read_windows(2, 16))
    logits_BTV = jax.jit(chapter.gpt, static_argnums=2)(params_of(model), tokens_BT, CONFIG.n_head)
    np.testing.assert_allclose(logits_BTV, jax.jit(model)(tokens_BT), atol=1e-5)


def test_init_has_the_parameters_of_gptjax(chapter):
    params = jax.jit(chapter.init, static_argnums=1)(jax.random.key(0), CONFIG)
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes == jax.tree.map(jnp.shape, params_of(gptjax_model()))
    assert sum(x.size for x in jax.tree.leaves(params)) == CONFIG.num_params


def test_init_has_the_standard_deviations_of_gpt2(chapter):
    params = jax.jit(chapter.init, static_argnums=1)(jax.random.key(0), CONFIG)
    kernel = params["blocks"][0]["attn"]["c_attn"]["kernel"]
    for matrix in (kernel, params["wte"], params["wpe"]):
        np.testing.assert_allclose(np.std(matrix), 0.02, rtol=0.1)
    projection = params["blocks"][0]["mlp"]["c_proj"]["kernel"]
    np.testing.assert_allclose(np.std(projection), 0.01, rtol=0.1)  # 0.02/√(2 · 2 layers)


def test_init_uses_no_random_key_twice(chapter):
    params = jax.jit(chapter.init, static_argnums=1)(jax.random.key(0), CONFIG)
    matrices = [np.ravel(x)[:1000] for x in jax.tree.leaves(params) if x.ndim == 2]
    correlations = np.corrcoef(matrices)
    np.testing.assert_allclose(correlations, np.eye(len(matrices)), atol=0.2)


def test_every_block_calls_attend(chapter):
    params, calls = params_of(gptjax_model()), []

    def attend(q, k, v):
        calls.append(q.shape)
        return v

    chapter.gpt(params, jnp.asarray(read_windows(1, 8)), CONFIG.n_head, attend)
    assert len(calls) == CONFIG.n_layer, "gpt or block does not pass `attend` on"
