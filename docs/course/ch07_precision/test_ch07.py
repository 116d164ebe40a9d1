"""Tests of chapter 7."""

import jax
import jax.numpy as jnp
import numpy as np
from ch03_block.solution import gpt, init
from ch05_adamw.solution import init_adam
from tiny import CONFIG, gptjax_model, normal, params_of, read_windows


def test_rounding_is_that_of_jax(chapter):
    x = jnp.asarray(normal((1000,))[0] * np.logspace(-20, 20, 1000, dtype=np.float32))
    np.testing.assert_array_equal(
        chapter.round_to_bf16(x), x.astype(jnp.bfloat16).astype(jnp.float32)
    )


def test_ties_go_to_even(chapter):
    # bf16 has 8 bits of precision: from 256 to 512 it has only the even integers.
    rounded = chapter.round_to_bf16(jnp.array([257.0, 259.0, -257.0, 256.0]))
    np.testing.assert_array_equal(rounded, [256.0, 260.0, -256.0, 256.0])


def test_a_matmul_sums_in_fp32(chapter):
    # In bf16 a sum of ones would stop at 256. An fp32 sum that is rounded to bf16 would be 4096.
    y_MN = chapter.matmul_bf16(jnp.ones((1, 4097)), jnp.ones((4097, 1)))
    assert y_MN.dtype == jnp.float32 and y_MN[0, 0] == 4097


def test_the_inputs_of_the_matmul_are_rounded(chapter):
    assert chapter.matmul_bf16(jnp.full((1, 1), 257.0), jnp.ones((1, 1)))[0, 0] == 256


def test_cast(chapter):
    params = chapter.cast({"a": jnp.ones(2), "b": [jnp.zeros((2, 2))]}, jnp.bfloat16)
    assert [x.dtype for x in jax.tree.leaves(params)] == [jnp.bfloat16, jnp.bfloat16]


def test_matmuls_are_bf16_and_the_gradients_fp32(chapter):
    params, windows_BT1 = params_of(gptjax_model()), jnp.asarray(read_windows(2, 16))
    value_and_grad = jax.value_and_grad(chapter.loss_bf16)
    jaxpr = jax.make_jaxpr(lambda p: value_and_grad(p, windows_BT1, CONFIG.n_head))(params)
    assert {aval.dtype for aval in jaxpr.out_avals} == {jnp.dtype(jnp.float32)}
    matmuls = [line for line in str(jaxpr).splitlines() if " dot_general[" in line]
    assert len(matmuls) > 20
    assert sum(":bf16[" in line for line in matmuls) > len(matmuls) / 2


def test_the_error_is_that_of_gptjax_in_bf16(chapter):
    """At most twice the error of gptjax's bf16 model, both measured from the fp32 model."""
    model, model_bf16 = gptjax_model(), gptjax_model("bf16")
    tokens_BT = jnp.asarray(read_windows(4, 16))
    params = params_of(model)
    exact = jax.jit(model)(tokens_BT)
    theirs = jax.jit(model_bf16)(tokens_BT).astype(jnp.float32)
    run = jax.jit(gpt, static_argnums=2)
    ours = run(chapter.cast(params, jnp.bfloat16), tokens_BT, CONFIG.n_head).astype(jnp.float32)
    error, their_error = (jnp.sqrt(jnp.square(x - exact).mean()) for x in (ours, theirs))
    assert 0 < error < 2 * their_error


def test_training_in_bf16_reaches_the_loss_of_fp32(chapter):
    windows_BT1 = jnp.asarray(read_windows(8, CONFIG.block_size))
    params = jax.jit(init, static_argnums=1)(jax.random.key(0), CONFIG)
    state = init_adam(params)
    step = jax.jit(chapter.train_step_bf16, static_argnums=3)
    for _ in range(50):
        params, state, loss = step(params, state, windows_BT1, CONFIG.n_head, 1e-2)
    print("loss after 50 steps in bf16:", round(float(loss), 3))
    assert loss < 0.4 and params["wte"].dtype == jnp.float32
