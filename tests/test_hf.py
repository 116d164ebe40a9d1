"""gptjax.weights.hf against the GPT-2 of transformers.

fp32 logits agree to 3.4e-6 on these shapes (standard deviation of the logits: 0.7 to 2); the bound
is 2e-5.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hf_tools import assert_same, edit_config, edit_tensors, transformers
from jax.sharding import NamedSharding, PartitionSpec

import gptjax
from gptjax.models.base import params_of
from gptjax.weights import WeightsError

# (vocabulary, positions, layers, heads, width): odd sizes; a prime vocabulary, a head dimension of
# 5, one layer.
SHAPES = [(61, 9, 2, 3, 12), (131, 33, 1, 1, 5), (128, 16, 3, 2, 32)]


def theirs(vocab, positions, layers, heads, width):
    torch.manual_seed(0)
    sizes = {"vocab_size": vocab, "n_positions": positions, "n_layer": layers, "n_head": heads}
    config = transformers.GPT2Config(**sizes, n_embd=width, bos_token_id=None, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config).eval()
    # With the usual initialization, attention is uniform and every bias is 0: a model that confuses
    # tensors would pass.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fan_in = parameter.shape[0] if ".h." in name and parameter.ndim == 2 else 10
            parameter.add_(
                torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else fan_in**-0.5)
            )
    return model


@pytest.fixture
def small(tmp_path):
    theirs(*SHAPES[0]).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_loss_are_those_of_transformers(tmp_path, shape):
    reference, (vocab, positions) = theirs(*shape), shape[:2]
    reference.save_pretrained(tmp_path)
    model, rng = gptjax.load_hf(tmp_path), np.random.default_rng(0)
    tokens, targets = rng.integers(0, vocab, (2, 2, positions), dtype=np.int32)
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens).long()).logits
        expected_loss = torch.nn.functional.cross_entropy(
            expected.reshape(-1, vocab), torch.from_numpy(targets).long().reshape(-1)
        )
    compute = nnx.jit(lambda model, *batch: (model(batch[0]), gptjax.loss_fn(model, *batch)))
    logits, loss = compute(model, jnp.asarray(tokens), jnp.asarray(targets))
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits, expected.numpy(), rtol=0, atol=2e-5)
    np.testing.assert_allclose(loss, expected_loss.numpy(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_reads_the_files_of_save_hf(tmp_path, shape):
    theirs(*shape).save_pretrained(tmp_path / "theirs")
    model, ours = gptjax.load_hf(tmp_path / "theirs"), tmp_path / "new" / "ours"
    gptjax.save_hf(model, ours)
    found, info = transformers.GPT2LMHeadModel.from_pretrained(ours, output_loading_info=True)
    problems = ("missing_keys", "unexpected_keys", "mismatched_keys")
    assert not any(info[kind] for kind in problems), info
    before = theirs(*shape).state_dict()
    assert found.state_dict().keys() == before.keys()
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name]), name
    assert found.config.n_positions == shape[1] and found.config.activation_function == "gelu_new"
    assert_same(gptjax.load_hf(ours), model)
    assert sorted(p.name for p in ours.iterdir()) == ["config.json", "model.safetensors"]


def test_the_vocabulary_is_padded_with_zero_rows_and_a_sharded_model_is_saved_whole(small):
    model = gptjax.load_hf(small)
    assert (model.config.vocab_size, model.config.padded_vocab_size) == (61, 128)
    assert model.wte.shape == (128, 12)
    assert not np.asarray(model.wte[61:]).any() and np.asarray(model.wte[60]).all()
    model = gptjax.load_hf(small, padded_vocab_size=62)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2])
    graph, state = nnx.split(model, nnx.Param)
    spread = lambda x: jax.device_put(
        x, NamedSharding(mesh, PartitionSpec("x") if x.shape[0] % 2 == 0 else PartitionSpec())
    )
    sharded = nnx.merge(graph, jax.tree.map(spread, state))
    assert len(sharded.wte[...].sharding.device_set) == 2
    gptjax.save_hf(sharded, small / "again")
    assert_same(gptjax.load_hf(small / "again", padded_vocab_size=62), model)


def test_other_forms_of_the_files(small):
    """A single file, shards, and names without prefix, with buffers and the tied head."""
    model = gptjax.load_hf(small)
    assert_same(gptjax.load_hf(small / "model.safetensors"), model)
    theirs(*SHAPES[0]).save_pretrained(small / "shards", max_shard_size="4KB")
    shards = list((small / "shards").glob("*.safetensors"))
    assert len(shards) > 1
    assert_same(gptjax.load_hf(small / "shards"), model)
    min(shards).unlink()
    with pytest.raises(
        WeightsError, match=r"h.0.ln_1.bias: the file has nothing, config.json needs"
    ):
        gptjax.load_hf(small / "shards")

    def old_style(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.tril(np.ones((1, 1, 9, 9), np.float32))
        tensors["h.1.attn.masked_bias"] = np.float32([-1e4])
        tensors["lm_head.weight"] = tensors["wte.weight"].copy()

    edit_tensors(small, old_style)
    other = {"activation_function": "gelu_pytorch_tanh", "n_inner": 48}
    edit_config(small, layer_norm_epsilon=0.00001, **other)
    assert_same(gptjax.load_hf(small), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_become_fp32(tmp_path, dtype):
    reference = theirs(*SHAPES[0]).to(dtype)
    reference.save_pretrained(tmp_path)
    found = params_of(gptjax.load_hf(tmp_path))["blocks"][1]["mlp"]["c_fc"]["kernel"]
    expected = reference.transformer.h[1].mlp.c_fc.weight.detach().float().numpy()
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
