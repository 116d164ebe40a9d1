"""gptjax.weights.hf against the GPT-2 of transformers.

fp32 logits agree to 3.4e-6 on these shapes (standard deviation of the logits: 0.7 to 2); the bound
is 2e-5.
"""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hf_tools import edit_config, edit_tensors
from jax.sharding import NamedSharding, PartitionSpec
from reference.torch_gpt2 import flatten

import gptjax
from gptjax.weights import WeightsError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

# (vocabulary, positions, layers, heads, width): odd sizes; a prime vocabulary, a head dimension of
# 5, one layer.
SHAPES = [(61, 9, 2, 3, 12), (131, 33, 1, 1, 5), (128, 16, 3, 2, 32)]


def theirs(vocab, positions, layers, heads, width, **kwargs):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=vocab,
        n_positions=positions,
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        bos_token_id=None,
        eos_token_id=None,
        **kwargs,
    )
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


def batch(vocab, time, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, (2, 2, time), dtype=np.int32)


def params(model):
    return {
        k: np.asarray(v)
        for k, v in flatten(nnx.to_pure_dict(nnx.split(model, nnx.Param)[1])).items()
    }


def assert_same(model, other):
    ours, others = params(model), params(other)
    assert ours.keys() == others.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], others[name], err_msg=name)


@pytest.fixture
def small(tmp_path):
    theirs(61, 9, 2, 3, 12).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_loss_are_those_of_transformers(tmp_path, shape):
    reference = theirs(*shape)
    reference.save_pretrained(tmp_path)
    model = gptjax.load_hf(tmp_path)
    vocab, positions = shape[:2]
    tokens, targets = batch(vocab, positions)
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens).long()).logits
        expected_loss = torch.nn.functional.cross_entropy(
            expected.reshape(-1, vocab), torch.from_numpy(targets).long().reshape(-1)
        )
    logits = model(jnp.asarray(tokens))
    assert expected.std() > 0.5
    print(f"transformers, {shape}: logits off by {np.abs(logits - expected.numpy()).max():.2g}")
    np.testing.assert_allclose(logits, expected.numpy(), rtol=0, atol=2e-5)
    loss = gptjax.loss_fn(model, jnp.asarray(tokens), jnp.asarray(targets))
    np.testing.assert_allclose(loss, expected_loss.numpy(), rtol=0, atol=2e-6)


def test_vocabulary_is_padded_to_a_multiple_of_128_with_zero_rows(small):
    model = gptjax.load_hf(small)
    assert (model.config.vocab_size, model.config.padded_vocab_size) == (61, 128)
    assert (
        model.wte.shape == (128, 12)
        and not np.asarray(model.wte[61:]).any()
        and np.asarray(model.wte[60]).all()
    )
    assert gptjax.load_hf(small, padded_vocab_size=61).wte.shape == (61, 12)


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_reads_the_files_of_save_hf(tmp_path, shape):
    theirs(*shape).save_pretrained(tmp_path / "theirs")
    model = gptjax.load_hf(tmp_path / "theirs")
    gptjax.save_hf(model, tmp_path / "new" / "ours")
    found, info = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "new" / "ours", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        info
    )
    before = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "theirs").state_dict()
    assert found.state_dict().keys() == before.keys()
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name]), name
    assert found.config.n_positions == shape[1] and found.config.activation_function == "gelu_new"
    assert_same(gptjax.load_hf(tmp_path / "new" / "ours"), model)
    assert sorted(p.name for p in (tmp_path / "new" / "ours").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_a_sharded_model_is_saved_whole(small):
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


def test_shards_and_a_single_file_are_read(small):
    model = gptjax.load_hf(small)
    assert_same(gptjax.load_hf(small / "model.safetensors"), model)
    theirs(61, 9, 2, 3, 12).save_pretrained(small / "shards", max_shard_size="4KB")
    assert len(list((small / "shards").glob("*.safetensors"))) > 1
    assert_same(gptjax.load_hf(small / "shards"), model)
    gone = min((small / "shards").glob("*.safetensors"))
    gone.unlink()
    with pytest.raises(WeightsError, match=gone.name):
        gptjax.load_hf(small / "shards")


def test_names_without_prefix_buffers_and_tied_head_are_read(small):
    model = gptjax.load_hf(small)

    def old_style(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.tril(np.ones((1, 1, 9, 9), np.float32))
        tensors["h.1.attn.masked_bias"] = np.float32([-1e4])
        tensors["lm_head.weight"] = tensors["wte.weight"].copy()

    edit_tensors(small, old_style)
    assert_same(gptjax.load_hf(small), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_become_fp32(tmp_path, dtype):
    reference = theirs(61, 9, 2, 3, 12).to(dtype)
    reference.save_pretrained(tmp_path)
    found = params(gptjax.load_hf(tmp_path))
    expected = reference.transformer.h[1].mlp.c_fc.weight.detach().float().numpy()
    assert found["blocks.1.mlp.c_fc.kernel"].dtype == np.float32
    np.testing.assert_array_equal(found["blocks.1.mlp.c_fc.kernel"], expected)


def test_how_the_model_computes_is_the_callers_choice(small):
    model = gptjax.load_hf(
        small, precision=gptjax.Precision("bf16"), recompute="block", loss_chunk=9
    )
    assert (model.config.precision.name, model.config.recompute, model.config.loss_chunk) == (
        "bf16",
        "block",
        9,
    )
    assert model(jnp.zeros((1, 3), jnp.int32)).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in params(model).values()} == {np.dtype("float32")}
    with pytest.raises(ValueError, match=re.escape("config.json decides ['n_layer']")):
        gptjax.load_hf(small, n_layer=3)


def test_all_files_have_the_permissions_of_the_umask(small):
    gptjax.save_hf(gptjax.load_hf(small), small)
    (small / "other").touch()
    modes = {(small / name).stat().st_mode for name in ("other", "model.safetensors")}
    assert modes == {(small / "config.json").stat().st_mode}


@pytest.mark.parametrize(
    "field, value",
    [
        ("activation_function", "gelu_pytorch_tanh"),
        ("n_inner", 48),
        ("layer_norm_epsilon", 0.00001),
    ],
)
def test_other_spellings_of_gpt2_are_read(small, field, value):
    edit_config(small, **{field: value})
    gptjax.load_hf(small)
