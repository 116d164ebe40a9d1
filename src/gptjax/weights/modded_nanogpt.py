"""Checkpoints of modded-nanogpt's record of pull request #233 (`state_step001490.pt`): load.

The file is a dictionary that PyTorch saved; "model" is the state of the record's `GPT`. `_params`
maps its tensors to the parameters of `gptjax.models.speedrun.Speedrun`. Columns of the padding are
in the record's softmax, so the model's vocabulary is the padded one.

L layers, C channels, F channels of the MLP, P padded vocabulary.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gptjax.models.base import abstract_params
from gptjax.models.speedrun import SpeedrunConfig, Stage
from gptjax.weights.files import reason
from gptjax.weights.params import Key


def read_tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of the model in a `.pt` file by name, as PyTorch maps them into memory.

    No code from the file is executed: PyTorch's reader refuses other classes than tensors.

    Raises:
        ValueError: PyTorch is not installed, or the file is not a checkpoint of the record.
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError("PyTorch reads .pt files: pip install torch") from error
    # The optimizer's state in the file has objects of a dataclass of the record's script.
    plain = type("ParamConfig", (), {})
    try:
        with torch.serialization.safe_globals([(plain, "__main__.ParamConfig")]):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # The prefix is that of a model that torch.compile wraps.
        return {name.removeprefix("_orig_mod."): x for name, x in state["model"].items()}
    except Exception as error:  # torch.load raises errors of many types for a damaged file
        raise ValueError(
            f"expected a checkpoint of modded-nanogpt's train_gpt.py, found {reason(error)[:200]}"
        ) from error


def read_config(path: Path) -> SpeedrunConfig:
    """Return the config of the model in a `.pt` file.

    The layers with long windows, value embeddings, paired heads and the skip connection, which no
    tensor determines, are the record's, and the stage is that of its final validation.

    Raises:
        KeyError, ValueError: a tensor is missing, or the shapes do not fit together.
    """
    tensors = read_tensors(path)
    width, vocabulary = tensors["lm_head.weight"].shape
    return SpeedrunConfig(
        vocab_size=vocabulary,
        padded_vocab_size=vocabulary,
        n_layer=len(tensors["x0_lambdas"]),
        n_head=tensors["attn_gate_bank"].shape[1],
        n_embd=width,
        n_inner=tensors["mlp_bank"].shape[2],
        bigram_rows=len(tensors["bigram_embed.weight"]),
        stage=Stage(evaluation_window=20 * 128),
    )


def tensors_of(path: Path, config: SpeedrunConfig) -> Iterator[tuple[Key, np.ndarray]]:
    """Return an iterator over the parameters of a file whose config is `read_config(path)`."""
    tensors = {name: x.float().numpy() for name, x in read_tensors(path).items()}
    expected = abstract_params(config)
    for name, x in _params(tensors, config).items():
        if x.shape != (shape := expected[name].shape):
            raise ValueError(f"{name}: expected {shape}, found {x.shape}")
        yield (name,), x


def _params(tensors: Mapping[str, np.ndarray], config: SpeedrunConfig) -> dict[str, np.ndarray]:
    """Return the parameters of `Speedrun` by name, from the record's tensors."""
    layers, c, lanes = config.n_layer, config.n_embd, config.lanes_from
    # (2·L + 3 + padding): two for each layer, then smear, backout and skip.
    scalars = tensors["scalars"]
    # (L + 1, 2, F, C): the last layer is padding.
    mlp, post = tensors["mlp_bank"][:layers], tensors["post_lambdas"]
    return {
        "attention_bank": tensors["attn_bank"].reshape(layers - 1, 4, c, c),
        "mlp_in": mlp[:, 0],
        "mlp_out": mlp[:, 1],
        "embed": tensors["embed.weight"],
        "lm_head": tensors["lm_head.weight"],
        "bigram": tensors["bigram_embed.weight"],
        "values": tensors["value_embeds"].reshape(len(config.value_layers), -1, c),
        "attention_gates": tensors["attn_gate_bank"],
        "value_gates": tensors["ve_gate_bank"],
        "smear_gate": tensors["smear_gate.weight"].reshape(-1),
        "skip_gate": tensors["skip_gate.weight"].reshape(-1),
        "residual_lambdas": tensors["resid_lambdas"],
        "x0_lambdas": tensors["x0_lambdas"],
        "bigram_lambdas": tensors["bigram_lambdas"],
        "mlp_lambdas": post[:lanes, 1, 0],
        "lane_lambdas": post[lanes:],
        "qkvo_lambdas": np.delete(scalars[: 2 * layers].reshape(layers, 2), config.skip[1], axis=0),
        "smear_lambda": scalars[2 * layers, ...],
        "backout_lambda": scalars[2 * layers + 1, ...],
        "skip_lambda": scalars[2 * layers + 2, ...],
    }
