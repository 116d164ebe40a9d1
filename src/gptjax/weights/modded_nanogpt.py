"""Checkpoints of modded-nanogpt's record of pull request #233 (`state_step001490.pt`): load.

The file is a dictionary that PyTorch saved; "model" is the state of the record's `GPT`. The names,
the record's left, the parameters of `gptjax.models.speedrun.Speedrun` right:

    attn_bank (L − 1, 4·C, C)        attention_bank
    mlp_bank (L + 1, 2, F, C)        mlp_in, mlp_out; the last layer is padding
    embed.weight (P, C) · lm_head.weight (C, P) · bigram_embed.weight   embed · lm_head · bigram
    value_embeds (5·P, C)            values
    attn_gate_bank · ve_gate_bank    attention_gates · value_gates
    smear_gate.weight (1, 12) · skip_gate.weight (1, 12)                smear_gate · skip_gate
    resid_lambdas · x0_lambdas · bigram_lambdas                         residual_lambdas · the same
    post_lambdas (L, 2, 2)           mlp_lambdas, lane_lambdas
    scalars (2·L + 3 + padding)      qkvo_lambdas, smear_lambda, backout_lambda, skip_lambda

L layers, C channels, F channels of the MLP, P padded vocabulary. Columns of the padding are in the
record's softmax, so the model's vocabulary is P.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gptjax.models.base import abstract_params
from gptjax.models.speedrun import SpeedrunConfig, Stage
from gptjax.precision import Precision
from gptjax.weights.errors import WeightsError
from gptjax.weights.files import reason, shown
from gptjax.weights.params import Key, check_options

_COMPILED = "_orig_mod."
"""Prefix of the names in the state of a model that torch.compile wraps."""


def read_tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of the model in a `.pt` file by name, as PyTorch maps them into memory.

    No code from the file is executed: PyTorch's reader refuses other classes than tensors.

    Raises:
        WeightsError: PyTorch is not installed, or the file is not a checkpoint of the record.
    """
    try:
        import torch
    except ImportError as error:
        raise WeightsError(
            f"{shown(path)}: expected PyTorch, which reads .pt files, found none: pip install torch"
        ) from error
    # The optimizer's state in the file has objects of a dataclass of the record's script.
    plain = type("ParamConfig", (), {})
    try:
        with torch.serialization.safe_globals([(plain, "__main__.ParamConfig")]):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {name.removeprefix(_COMPILED): x for name, x in state["model"].items()}
    except Exception as error:  # torch.load raises errors of many types for a damaged file
        raise WeightsError(
            f"{shown(path)}: expected a checkpoint of modded-nanogpt's train_gpt.py, found "
            f"{reason(error)[:200]}"
        ) from error


def read_config(path: Path, *, precision: Precision, **options: Any) -> SpeedrunConfig:
    """Return the config of the model in a `.pt` file.

    The layers with long windows, value embeddings, paired heads and the skip connection, which no
    tensor determines, are the record's, and the stage is that of its final validation.

    Raises:
        WeightsError: a tensor is missing, or the shapes do not fit together.
        ValueError: an option that the file determines, an unknown option or a wrong value.
    """
    fields = {field.name for field in dataclasses.fields(SpeedrunConfig)}
    decided = fields - SpeedrunConfig.operational - SpeedrunConfig.of_run
    check_options(SpeedrunConfig, precision, options, source="the file", decided=decided)
    tensors = read_tensors(path)
    try:
        width, vocabulary = tensors["lm_head.weight"].shape
        config = SpeedrunConfig(
            vocab_size=vocabulary,
            padded_vocab_size=vocabulary,
            n_layer=len(tensors["x0_lambdas"]),
            n_head=tensors["attn_gate_bank"].shape[1],
            n_embd=width,
            n_inner=tensors["mlp_bank"].shape[2],
            bigram_rows=len(tensors["bigram_embed.weight"]),
            stage=Stage(evaluation_window=20 * 128),
            precision=precision,
        )
    except (KeyError, ValueError, IndexError) as error:
        raise WeightsError(
            "expected the tensors of modded-nanogpt's pull request #233, found "
            f"{', '.join(sorted(tensors))[:200] or 'none'} ({error})"
        ) from error
    return dataclasses.replace(config, **options)


def tensors_of(path: Path, config: SpeedrunConfig) -> Iterator[tuple[Key, np.ndarray]]:
    """Return an iterator over the parameters of a file whose config is `read_config(path)`."""
    tensors = {name: x.float().numpy() for name, x in read_tensors(path).items()}
    params, expected = _params(tensors, config), abstract_params(config)
    for name, x in params.items():
        if x.shape != (shape := expected[name].shape):
            raise WeightsError(f"{shown(path)}: {name}: expected {shape}, found {x.shape}")
    return (((name,), x) for name, x in params.items())


def _params(tensors: Mapping[str, np.ndarray], config: SpeedrunConfig) -> dict[str, np.ndarray]:
    """Return the parameters of `Speedrun` by name, from the record's tensors."""
    layers, c, lanes = config.n_layer, config.n_embd, config.lanes_from
    try:
        qkvo = tensors["scalars"][: 2 * layers].reshape(layers, 2)
        smear, backout, skip, _ = np.split(tensors["scalars"][2 * layers :], (1, 2, 3))
        mlp, post = tensors["mlp_bank"][:layers], tensors["post_lambdas"]
        values = tensors["value_embeds"].reshape(len(config.value_layers), -1, c)
        return {
            "attention_bank": tensors["attn_bank"].reshape(layers - 1, 4, c, c),
            "mlp_in": mlp[:, 0],
            "mlp_out": mlp[:, 1],
            "embed": tensors["embed.weight"],
            "lm_head": tensors["lm_head.weight"],
            "bigram": tensors["bigram_embed.weight"],
            "values": values,
            "attention_gates": tensors["attn_gate_bank"],
            "value_gates": tensors["ve_gate_bank"],
            "smear_gate": tensors["smear_gate.weight"].reshape(-1),
            "skip_gate": tensors["skip_gate.weight"].reshape(-1),
            "residual_lambdas": tensors["resid_lambdas"],
            "x0_lambdas": tensors["x0_lambdas"],
            "bigram_lambdas": tensors["bigram_lambdas"],
            "mlp_lambdas": post[:lanes, 1, 0],
            "lane_lambdas": post[lanes:],
            "qkvo_lambdas": np.delete(qkvo, config.skip[1], axis=0),
            "smear_lambda": smear.reshape(()),
            "backout_lambda": backout.reshape(()),
            "skip_lambda": skip.reshape(()),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise WeightsError(f"expected the record's tensors and shapes: {error}") from error
