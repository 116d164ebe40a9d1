"""gptjax.Llama3 against LlamaForCausalLM of transformers, from the same random weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_side
from comparison_tools import assert_within_twice, max_abs, rms
from generation_tools import check_cache, greedy
from gpt2_tools import batch_of, build
from gpt2_tools import run as ours
from llama_tools import ODD, in_fp64, in_pytorch, random_of, run_theirs
from torch_gpt2 import How

from gptjax import Precision, loss_fn, parallel
from gptjax.config import Config
from gptjax.models.base import graph, init_params
from gptjax.models.llama3 import PRESETS
from gptjax.parallel import Parallel, over_batch
from gptjax.training.step import loss_and_grads

ONE = dataclasses.replace(ODD, n_layer=1)
TIED = dataclasses.replace(ONE, tie_embeddings=True, rope_scaling=1.0, n_kv_head=3)


@pytest.mark.parametrize("config", [ODD, TIED], ids=["grouped, scaled", "tied"])
def test_logits_loss_and_every_gradient(config):
    params, batch = random_of(config), batch_of(config)
    logits, loss, grads = ours(config, params, *batch)
    their_logits, their_loss, their_grads = run_theirs(config, params, *batch)
    with in_fp64():
        exact_logits, exact_loss, exact_grads = run_theirs(config, params, *batch)

    assert exact_logits.std() > 0.5, "logits this flat would agree with any model's"
    assert exact_logits.dtype == np.float64 and abs(their_loss - exact_loss) < 1e-5
    assert abs(loss - exact_loss) < 1e-5
    found = {name: array.numpy() for name, array in in_pytorch(config, grads).items()}
    assert found.keys() == their_grads.keys()
    for norm in (rms, max_abs):
        assert_within_twice(logits, their_logits, exact_logits, norm=norm, name="logits")
        for name, exact in exact_grads.items():
            assert_within_twice(found[name], their_grads[name], exact, norm=norm, name=name)


def gradient(config, params, windows):
    return jax.jit(lambda params: loss_and_grads(graph(config), params, windows))(params)


def test_bf16_is_near_fp32():
    params, tokens = jax.tree.map(jnp.asarray, random_of(ONE)), jnp.asarray(batch_of(ONE)[0])
    bf16 = dataclasses.replace(ONE, precision=Precision("bf16"))

    @jax.jit
    def both(params):
        loss = lambda p, config: loss_fn(build(config, p), tokens, tokens)
        return loss(params, ONE), jax.value_and_grad(loss)(params, bf16)

    expected, (near, grads) = both(params)
    assert 1e-5 < abs(near - expected) < 0.02
    assert all(grad.dtype == jnp.float32 for grad in jax.tree.leaves(grads))
    hidden = jax.eval_shape(lambda p: build(bf16, p).hidden(tokens), params)
    assert hidden.dtype == jnp.bfloat16


def test_generation_with_a_cache_of_the_key_heads():
    params, tokens = random_of(ONE), jnp.asarray(batch_of(ONE)[0])
    model = build(ONE, params)
    shapes = {(c.k_BSHD.shape, c.v_BSHD.shape) for c in model.init_cache(2, 33)}
    assert shapes == {((2, 33, 1, 16),) * 2}

    check_cache(model, tokens, (7, 1, 25))
    greedy(model, tokens[:, :5], 6)


def test_fsdp_on_two_devices_computes_the_gradient_of_one(monkeypatch):
    monkeypatch.setattr(parallel, "SMALLEST_SHARDED", 200)
    params = jax.tree.map(jnp.asarray, random_of(ONE))
    windows = batch_of(ONE, size=4)[:1]
    expected = gradient(ONE, params, jnp.asarray(windows))
    across = Parallel.of(jax.devices("cpu")[:2], "fsdp")
    arguments = (
        jax.device_put(params, across.shardings(params)),
        jax.device_put(windows, over_batch(across.mesh, axis=1)),
    )
    f = jax.jit(lambda params, windows: loss_and_grads(graph(ONE), params, windows, across))
    # Each kernel of a block in both passes: none is stored, alone or as a part of a larger one.
    assert str(f.trace(*arguments).jaxpr).count("all_gather[") == 2 * 7 + 2
    found = jax.device_get(f(*arguments))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_pytorchs_model_of_the_benchmark():
    """Attention by hand equals SDPA; the loss before the first step is that of random logits."""
    run = Config(model=ODD, sequence_length=7, batch_tokens=14, micro_batch=2)
    assert torch_side.why_no_rival(run) is None
    losses = []
    for flash in (True, False):
        how = How(precision="fp32", compiled=False, flash=flash, fused=False)
        step = torch_side.torch_step(run, how, jax.devices("cpu")[0])
        assert sum(p.numel() for p in step.model.parameters()) == ODD.num_allocated_params
        losses.append([step.step().item() for _ in range(3)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-5)
    assert losses[0][0] == pytest.approx(np.log(ODD.padded_vocab_size), abs=0.1)
    assert losses[0][0] > losses[0][2]


def test_initial_parameters():
    config = dataclasses.replace(ODD, n_embd=96, n_inner=None)
    params = jax.jit(lambda: init_params(config, 0))()
    assert params["blocks"][0]["mlp"]["gate"]["kernel"].shape == (96, 256)
    for name in ("wte", "lm_head"):
        assert np.std(params[name][:61]) == pytest.approx(0.02, rel=0.1)
    block = params["blocks"][1]
    assert np.std(block["attn"]["q"]["kernel"]) == pytest.approx(0.02, rel=0.1)
    for kernel in (block["attn"]["o"]["kernel"], block["mlp"]["down"]["kernel"]):
        assert np.std(kernel) == pytest.approx(0.01, rel=0.1)
    assert (block["norm_1"]["scale"] == 1).all()


def test_parameters_and_flops():
    attention, mlp = 768 * 64 * (2 * 12 + 2 * 4), 3 * 768 * 2432
    weights = 12 * (attention + mlp + 2 * 768) + 768
    config = PRESETS["llama3-124m"]
    assert config.num_params == weights + 50257 * 768 == 124_730_880
    assert config.flops_per_token(1024) == 6 * config.num_params + 6 * 12 * 768 * 1024
    untied = dataclasses.replace(config, tie_embeddings=False)
    assert untied.num_params == weights + 2 * 50257 * 768
    assert untied.flops_per_token(1024) == config.flops_per_token(1024)
    # Llama 3.2 1B has 1,235,814,400 parameters, with a vocabulary of 128,256.
    llama = dataclasses.replace(PRESETS["llama3-1b"], vocab_size=128_256, padded_vocab_size=None)
    assert llama.num_params == 1_235_814_400
