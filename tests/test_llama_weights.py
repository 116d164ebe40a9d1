"""gptjax.weights.hf: the folders of transformers' Llama, both ways."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparison_tools import flatten
from gpt2_tools import batch_of, build
from hf_tools import assert_same, read_gguf, transformers
from llama_tools import ODD, in_pytorch, random_of, theirs

import gptjax
from gptjax.export import export
from gptjax.models.layers import rotary_angles
from gptjax.models.llama3 import frequencies
from gptjax.weights.hf import read_config
from pallas_kernels import rotary_qkv

TIED = dataclasses.replace(
    ODD, tie_embeddings=True, rope_scaling=1.0, rope_original_length=8192, n_kv_head=3
)
CONFIGS = pytest.mark.parametrize("config", [ODD, TIED], ids=["grouped, scaled", "tied"])


@CONFIGS
def test_a_folder_of_transformers_loads(config, tmp_path):
    params = random_of(config)
    theirs(config, params).save_pretrained(tmp_path)
    model = gptjax.load_hf(tmp_path)
    assert model.config == dataclasses.replace(config, padded_vocab_size=128)
    assert_same(model, params)


@CONFIGS
def test_transformers_loads_a_saved_folder(config, tmp_path):
    model, tokens = build(config, random_of(config)), batch_of(config)[0]
    gptjax.save_hf(model, tmp_path)
    same = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = same(torch.from_numpy(tokens).long()).logits
    logits = jax.jit(lambda tokens: model(tokens))(jnp.asarray(tokens))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)
    if not config.tie_embeddings:  # by the type in config.json
        assert gptjax.load(tmp_path).model.config == config
    again = gptjax.load_hf(tmp_path, padded_vocab_size=61)
    assert again.config == dataclasses.replace(config, padded_vocab_size=61)


def half_split(rows, head_dim):
    """The rows of each head from the order 0, D/2, 1, D/2 + 1, … to 0, 1, 2, …."""
    channels = np.arange(head_dim)
    order = np.concatenate([channels[::2], channels[1::2]])
    return rows.reshape(-1, head_dim, rows.shape[1])[:, order].reshape(rows.shape)


@CONFIGS
def test_gguf_has_llama_cpps_keys_and_every_tensor(config, tmp_path):
    params = random_of(config)
    export(build(config, params), tmp_path / "m.gguf", "gguf", tokenizer=None)
    fields, tensors = read_gguf(tmp_path / "m.gguf")
    expected = {
        "vocab_size": 61,
        "block_count": 2,
        "context_length": 33,
        "embedding_length": 48,
        "feed_forward_length": 56,
        "attention.head_count": 3,
        "attention.head_count_kv": config.n_kv_head,
        "rope.dimension_count": 16,
        "rope.freq_base": 5e5,
    }
    assert {name: fields(f"llama.{name}") for name in expected} == expected
    assert fields("llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-5)
    assert fields("general.architecture") == "llama"
    assert ("rope_freqs.weight" in tensors) == (config.rope_scaling != 1)
    tensors.pop("rope_freqs.weight", None)
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in in_pytorch(config, flatten(params)).items():
        found = tensors.pop(names.get_name(name, try_suffixes=(".weight",)))
        if ".q_proj." in name or ".k_proj." in name:
            assert not np.array_equal(found, tensor)
            found = half_split(found, config.head_dim)
        np.testing.assert_array_equal(found, tensor, err_msg=name)
    assert not tensors


def test_interleaved_rotation_of_ggufs_rows_has_our_scores(tmp_path):
    params = random_of(ODD)
    export(build(ODD, params), tmp_path / "m.gguf", "gguf", tokenizer=None)
    fields, tensors = read_gguf(tmp_path / "m.gguf")
    base, d = fields("llama.rope.freq_base"), fields("llama.rope.dimension_count")
    t = np.arange(ODD.block_size)
    # llama.cpp: base^(−2i/D), divided by rope_freqs.
    frequency = base ** -(np.arange(0, d, 2) / d) / tensors["rope_freqs.weight"]
    turn = np.exp(1j * t[:, None, None] * frequency)
    x = np.random.default_rng(0).normal(size=(len(t), ODD.n_embd))

    def theirs(part):
        heads = (x @ tensors[f"blk.1.attn_{part}.weight"].T).reshape(len(t), -1, d)
        return (heads[..., ::2] + 1j * heads[..., 1::2]) * turn

    packed = [x @ params["blocks"][1]["attn"][part]["kernel"] for part in "qkv"]
    q, k, _ = rotary_qkv(
        jnp.asarray(np.concatenate(packed, axis=1)[None], jnp.float32),
        *rotary_angles(frequencies(ODD), jnp.asarray(t)[None]),
        heads=ODD.n_head,
        key_heads=ODD.kv_heads,
        pairs="halves",
    )
    expected = np.einsum("the,ske->hts", theirs("q"), theirs("k").conj()).real
    found = np.einsum("bthd,bskd->hts", q, k)
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_llama_3_2_in_the_fields_of_transformers_4(tmp_path):
    found = {
        "model_type": "llama", "hidden_act": "silu", "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(found))
    config = read_config(tmp_path)
    assert config.num_params == 1_235_814_400
    assert (config.rope_theta, config.rope_scaling, config.block_size) == (5e5, 32.0, 131072)
