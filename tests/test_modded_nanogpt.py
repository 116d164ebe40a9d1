"""Checkpoints of modded-nanogpt's pull request #233, written as PyTorch writes them."""

import dataclasses
import os

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf_tools import assert_same
from test_speedrun import random_of

import __main__
import gptjax
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
    """The same parameters, rounded to bf16 where the record stores bf16."""
    params = random_of(SMALL)
    save(path := tmp_path / "state_step001490.pt", record_tensors(params), monkeypatch)
    model, tokenizer = gptjax.load(path)
    assert tokenizer is None, "a vocabulary of 128 is not GPT-2's"
    assert model.config.for_evaluation().stage.long_window == 20 * 128
    assert dataclasses.replace(model.config, stage=SMALL.stage) == SMALL

    def stored(name, x):
        return jnp.asarray(x if "lambda" in name else x.astype(jnp.bfloat16), jnp.float32)

    assert_same(model, {name: stored(name, x) for name, x in params.items()})
    with pytest.raises(ValueError, match=r"unknown options \['n_embd'\], or the file decides"):
        gptjax.load(path, n_embd=96)


class Planted:
    """A class that PyTorch's reader does not know."""

    def __reduce__(self):
        return os.mkdir, ("planted",)


def test_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, tensors = tmp_path / "state.pt", record_tensors(random_of(SMALL))
    other, bank = "expected a checkpoint of modded-nanogpt's train_gpt.py", "attn_gate_bank"
    for message, edit, more in (
        (other, {}, {"code": Planted()}),
        (r"state.pt: KeyError\('mlp_bank'\)", {"mlp_bank": None}, {}),
        ("state.pt: cannot reshape", {"value_embeds": tensors["value_embeds"][:-1]}, {}),
        (r"attention_gates: expected \(10, 6, 12\), found \(9, 6", {bank: tensors[bank][1:]}, {}),
    ):
        edited = {name: x for name, x in (tensors | edit).items() if x is not None}
        save(path, edited, monkeypatch, **more)
        with pytest.raises(WeightsError, match=message):
            gptjax.load(path)
    assert not (tmp_path / "planted").exists(), "code from the file was executed"
    path.write_bytes(b"no checkpoint")
    with pytest.raises(WeightsError, match=other):
        gptjax.load(path)
