"""--optimizer.param-storage bf16_mantissa: matrices in bf16, with 16 more bits in the optimizer's
state, learn as matrices in fp32 do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kernel_tools import OPTIMIZED
from saved_run_tools import random_params, save_run

import gptjax
from gptjax import parallel
from gptjax.config import Config, ConfigError
from gptjax.models.base import graph, params_of
from gptjax.models.gpt2 import GPT2Config
from gptjax.optim import NorMuonConfig, OptimizerConfig
from gptjax.optim.low_precision import view, whole, with_mantissa
from gptjax.parallel import Parallel, over_batch
from gptjax.precision import Precision
from gptjax.training.step import init_state, make_train_step

pytestmark = pytest.mark.usefixtures("optax_promotion")
BF16 = Precision("bf16")
MODEL = GPT2Config(vocab_size=61, block_size=16, n_layer=1, n_head=2, n_embd=16, precision=BF16)


def trained(optimizer):
    """Losses of six steps of two micro-batches with fsdp on two devices, and the last state."""
    config = Config(model=MODEL, optimizer=optimizer, sequence_length=16, micro_batch=4)
    p = Parallel.of(jax.devices()[:2], "fsdp")
    tx = config.build_optimizer(p.mesh)
    state = init_state(MODEL, tx, 0, p)
    step = make_train_step(graph(MODEL), tx, parallel=p)
    shardings = p.shardings(state), p.replicated
    step = jax.jit(step, out_shardings=shardings, compiler_options=OPTIMIZED)
    tokens_ABT1 = np.random.default_rng(0).integers(0, 61, (2, 4, 17), np.int32)
    windows_ABT1, found = jax.device_put(tokens_ABT1, over_batch(p.mesh, axis=1)), []
    for _ in range(6):
        state, metrics = step(state, windows_ABT1)
        found.append(float(metrics["loss"]))
    return found, state


def test_losses_are_those_of_fp32_parameters_bit_for_bit(monkeypatch):
    """The model reads the same bf16 values. A tie, one of 2¹⁷ values, moves by one last bit."""
    monkeypatch.setattr(parallel, "SMALLEST_SHARDED", 200)
    plain = OptimizerConfig(learning_rate=1e-2, warmup_steps=2)
    wanted, fp32 = trained(plain)
    split = dataclasses.replace(plain, param_storage="bf16_mantissa")
    found, state = trained(split)
    assert found == wanted and found[-1] < found[0]
    dtypes = {str(x.dtype) for x in jax.tree.leaves(state.params["blocks"][0]["attn"])}
    assert dtypes == {"bfloat16", "float32"}  # kernels and biases
    assert state.params["wte"].dtype == jnp.float32
    joined = whole(state.params, state.opt_state)
    for x, half, y in zip(*map(jax.tree.leaves, (joined, state.params, fp32.params)), strict=True):
        np.testing.assert_array_max_ulp(np.asarray(x), np.asarray(y), maxulp=8)
        np.testing.assert_array_equal(np.asarray(x.astype(half.dtype)), np.asarray(half))
    kernel = state.params["blocks"][0]["mlp"]["c_fc"]["kernel"]
    low = state.opt_state.low["blocks"][0]["mlp"]["c_fc"]["kernel"]
    assert low.dtype == jnp.uint16 and low.sharding == kernel.sharding


def test_a_checkpoint_is_loaded_with_all_bits(tmp_path):
    """test_transforms.py resumes such a run."""
    params, tx = random_params(), with_mantissa(optax.sgd(0.1))
    halves, state = view(params), tx.init(params)
    changes = {"optimizer.param_storage": "bf16_mantissa"}
    save_run(tmp_path, {1: halves}, changes=changes, opt_state=state)
    loaded = params_of(gptjax.load(tmp_path, tokenizer=None).model)
    jax.tree.map(np.testing.assert_array_equal, loaded, whole(halves, state))
    assert not np.array_equal(loaded["wpe"], halves["wpe"].astype(jnp.float32))


def test_a_model_that_reads_32_bits_is_refused():
    optimizer = OptimizerConfig(param_storage="bf16_mantissa")
    with pytest.raises(
        ConfigError, match="needs matmuls in bf16, and --model.precision tf32 reads"
    ):
        model = dataclasses.replace(MODEL, precision=Precision("tf32"))
        Config(model=model, optimizer=optimizer, sequence_length=16)


def test_models_without_groups_of_matrices_are_refused(monkeypatch):
    monkeypatch.setattr(GPT2Config, "parameter_groups", lambda self: ())
    storage = "--optimizer.param-storage bf16_mantissa needs a model with groups of matrices"
    for optimizer, message in (
        (OptimizerConfig(param_storage="bf16_mantissa"), storage),
        (NorMuonConfig(), "--optimizer normuon cannot train .* no groups of matrices"),
    ):
        with pytest.raises(ConfigError, match=message):
            Config(model=MODEL, optimizer=optimizer, sequence_length=16, micro_batch=4)
