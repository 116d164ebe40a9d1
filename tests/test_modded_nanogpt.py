"""Checkpoints of modded-nanogpt's pull request #233, written as PyTorch writes them."""

import dataclasses
import os

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from test_speedrun import random_of

import __main__
import gptjax
from gptjax.models.base import graph
from gptjax.models.speedrun import SpeedrunConfig
from gptjax.weights import WeightsError

# The record's layers, at a small width. Its vocabulary contains the padding.
SMALL = SpeedrunConfig(
    vocab_size=128, padded_vocab_size=128, n_embd=48, n_inner=192, bigram_rows=23
)


def record_tensors(params):
    """The record's tensors, as its `GPT` has them on the GPU: matrices and tables in bf16."""
    config, p = SMALL, {name: torch.from_numpy(np.array(x)) for name, x in params.items()}
    layers, c = config.n_layer, config.n_embd
    mlp = torch.stack([p["mlp_in"], p["mlp_out"]], 1)
    post = torch.ones(layers, 2, 2)
    post[: config.lanes_from, 1, 0] = p["mlp_lambdas"]
    post[config.lanes_from :] = p["lane_lambdas"]
    attention = torch.full((layers, 2), 9.0)  # those of the layer without attention are unused
    attention[list(config.attention_layers)] = p["qkvo_lambdas"]
    others = torch.stack([p["smear_lambda"], p["backout_lambda"], p["skip_lambda"]])
    tensors = {
        "attn_bank": p["attention_bank"].reshape(layers - 1, 4 * c, c),
        "mlp_bank": torch.cat([mlp, torch.zeros_like(mlp[:1])]),
        "embed.weight": p["embed"],
        "lm_head.weight": p["lm_head"],
        "bigram_embed.weight": p["bigram"],
        "value_embeds": p["values"].flatten(0, 1),
        "attn_gate_bank": p["attention_gates"],
        "ve_gate_bank": p["value_gates"],
        "smear_gate.weight": p["smear_gate"][None],
        "skip_gate.weight": p["skip_gate"][None],
        "resid_lambdas": p["residual_lambdas"],
        "x0_lambdas": p["x0_lambdas"],
        "bigram_lambdas": p["bigram_lambdas"],
        "post_lambdas": post,
        "scalars": torch.cat([attention.flatten(), others, torch.ones(7)]),
    }
    fp32 = ("scalars", "post_lambdas", "resid_lambdas", "x0_lambdas", "bigram_lambdas")
    return {n: x if n in fp32 else x.bfloat16() for n, x in tensors.items()}


@dataclasses.dataclass
class ParamConfig:
    label: str


def save(path, tensors, monkeypatch, **more):
    """Save a file as the record does, from a script with a compiled model."""
    monkeypatch.setattr(__main__, "ParamConfig", ParamConfig, raising=False)
    monkeypatch.setattr(ParamConfig, "__module__", "__main__")
    state = {
        "step": 1490,
        "code": "import os",
        "model": {f"_orig_mod.{name}": x for name, x in tensors.items()},
        "optimizer": {"param_cfgs": {1: ParamConfig("embed")}},
    }
    torch.save(state | more, path)


def test_load(tmp_path, monkeypatch):
    """The same logits as with the parameters, rounded to bf16 where the record stores bf16."""
    params = random_of(SMALL)
    tensors = record_tensors(params)
    save(path := tmp_path / "state_step001490.pt", tensors, monkeypatch)
    model, tokenizer = gptjax.load(path)
    assert tokenizer is None, "a vocabulary of 128 is not GPT-2's"
    assert model.config.for_evaluation().stage.long_window == 20 * 128
    assert dataclasses.replace(model.config, stage=SMALL.stage) == SMALL

    def stored(name, x):
        return jnp.asarray(x if "lambda" in name else x.astype(jnp.bfloat16), jnp.float32)

    near = {name: stored(name, x) for name, x in params.items()}
    expected = nnx.merge(graph(model.config), near)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 128, (2, 19)), jnp.int32)
    np.testing.assert_array_equal(model(tokens), expected(tokens))
    with pytest.raises(ValueError, match=r"the file decides \['n_embd'\]"):
        gptjax.load(path, n_embd=96)


class Planted:
    """A class that PyTorch's reader does not know."""

    def __reduce__(self):
        return os.mkdir, ("planted",)


def test_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, tensors = tmp_path / "state.pt", record_tensors(random_of(SMALL))
    save(path, tensors, monkeypatch, code=Planted())
    with pytest.raises(
        WeightsError, match="expected a checkpoint of modded-nanogpt's train_gpt.py"
    ):
        gptjax.load(path)
    assert not (tmp_path / "planted").exists(), "code from the file was executed"

    path.write_bytes(b"no checkpoint")
    with pytest.raises(
        WeightsError, match="expected a checkpoint of modded-nanogpt's train_gpt.py"
    ):
        gptjax.load(path)
    save(path, {n: x for n, x in tensors.items() if n != "mlp_bank"}, monkeypatch)
    with pytest.raises(WeightsError, match="expected the tensors of modded-nanogpt's pull request"):
        gptjax.load(path)
    save(path, tensors | {"value_embeds": tensors["value_embeds"][:-1]}, monkeypatch)
    with pytest.raises(WeightsError, match="expected the record's tensors and shapes"):
        gptjax.load(path)
    save(path, tensors | {"attn_gate_bank": tensors["attn_gate_bank"][1:]}, monkeypatch)
    with pytest.raises(
        WeightsError, match=r"attention_gates: expected \(10, 6, 12\), found \(9, 6"
    ):
        gptjax.load(path)
