"""Hugging Face's Llama folders (config.json and safetensors): load and save.

Linear layers are stored as (out, in) and are transposed here. The files hold the vocabulary without
padding. Llama 3, 3.1 and 3.2 are supported, and other models of the type "llama" that differ in
sizes only.
"""

import contextlib
import dataclasses
import json
import os
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from safetensors.numpy import save_file

from gptjax.models.llama3 import HIGH_TURNS, LOW_TURNS, Llama3, Llama3Config
from gptjax.precision import Precision
from gptjax.weights.errors import WeightsError
from gptjax.weights.files import file_size, reason, replacing, shown
from gptjax.weights.hf import HEAD, WEIGHTS, Stored, find_tensors, read_json
from gptjax.weights.params import (
    FP32,
    Key,
    check_model,
    check_options,
    few,
    host_arrays,
    model_from_tensors,
)

# Field of the config, field of config.json.
SIZES = {
    "vocab_size": "vocab_size",
    "block_size": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
}
DECIDED = (
    *SIZES,
    *("n_kv_head", "tie_embeddings", "norm_eps"),
    *("rope_theta", "rope_scaling", "rope_original_length"),
)
# Values that gptjax's Llama 3 implements. The first is the default of a missing field.
_REQUIRED: dict[str, tuple] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
# Key in a block, name in the files.
BLOCK_TENSORS: tuple[tuple[Key, str], ...] = (
    (("norm_1", "scale"), "input_layernorm.weight"),
    *((("attn", name, "kernel"), f"self_attn.{name}_proj.weight") for name in "qkvo"),
    (("norm_2", "scale"), "post_attention_layernorm.weight"),
    *((("mlp", name, "kernel"), f"mlp.{name}_proj.weight") for name in ("gate", "up", "down")),
)
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def load_llama(
    path: str | os.PathLike,
    *,
    precision: Precision = FP32,
    padded_vocab_size: int | None = None,
    **options: Any,
) -> Llama3:
    """Load a Hugging Face Llama from disk.

    Args:
        path: a folder with config.json and model.safetensors (or an index and shards), or one
            .safetensors file in the same folder as config.json.
        precision: precision of the model. The parameters are fp32 in every precision.
        padded_vocab_size: rows of the embedding. None: the next multiple of 128.
        **options: other fields of `Llama3Config` that the folder does not determine: attention,
            loss, loss_chunk, mlp, norm, recompute.

    Raises:
        WeightsError: config.json or the weights do not exist; the model is not a Llama as gptjax
            implements it; a tensor does not fit config.json.
        ValueError: a wrong option.
    """
    check_options(
        "load_llama", Llama3Config, precision, options, source="config.json", decided=DECIDED
    )
    config = read_config(path, precision=precision, padded_vocab_size=padded_vocab_size, **options)
    with tensors_of(path, config) as tensors:
        return cast(Llama3, model_from_tensors(config, tensors))


def read_config(
    path: str | os.PathLike,
    *,
    precision: Precision = FP32,
    padded_vocab_size: int | None = None,
    **options: Any,
) -> Llama3Config:
    """Return the config of a Hugging Face Llama; no tensor is read. Arguments: see `load_llama`."""
    path = Path(path)
    file = (path if path.is_dir() else path.parent) / "config.json"
    try:
        if not path.is_dir():
            file_size(path, missing="load_llama reads a folder or a .safetensors file on disk")
        found = read_json(file, "Pass the folder of a Hugging Face Llama on disk")
    except OSError as error:
        raise WeightsError(f"{shown(path)}: cannot be read: {reason(error)}") from error
    for field, allowed in _REQUIRED.items():
        _expect(file, field, found.get(field, allowed[0]), allowed)
    fields = {name: found.get(theirs) for name, theirs in SIZES.items()}
    if missing := sorted(SIZES[name] for name, value in fields.items() if value is None):
        raise WeightsError(f"{shown(file)}: expected {[*SIZES.values()]}, missing {missing}")
    fields |= {
        "n_kv_head": found.get("num_key_value_heads"),
        "tie_embeddings": found.get("tie_word_embeddings", False),
        "norm_eps": found.get("rms_norm_eps", 1e-6),
        **_rope(file, found),
    }
    try:
        config = Llama3Config(**fields, precision=precision, **options)
    except (ValueError, TypeError) as error:
        raise WeightsError(f"{shown(file)}: not a Llama: {error}") from error
    if (head_dim := found.get("head_dim")) is not None:
        _expect(file, "head_dim", head_dim, (config.head_dim,))
    if padded_vocab_size is None:
        return config
    return dataclasses.replace(config, padded_vocab_size=padded_vocab_size)


def _rope(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the rotary embedding, which transformers 5 stores in rope_parameters."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise WeightsError(
            f"{shown(file)}: expected rope_scaling to be an object, found {reprlib.repr(rope)}"
        )
    fields = {"rope_theta": rope.get("rope_theta", found.get("rope_theta", 10_000.0))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    _expect(file, "rope_type", kind, ("default", "llama3"))
    if kind == "default":
        return fields
    for name, expected in (("low_freq_factor", LOW_TURNS), ("high_freq_factor", HIGH_TURNS)):
        _expect(file, name, rope.get(name), (expected, int(expected)))
    fields["rope_scaling"] = rope.get("factor")
    fields["rope_original_length"] = rope.get("original_max_position_embeddings")
    return fields


def _expect(file: Path, field: str, value: Any, allowed: tuple) -> None:
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        raise WeightsError(
            f"{shown(file)}: expected {field} to be {' or '.join(map(repr, allowed))}, found "
            f"{reprlib.repr(value)}: gptjax's Llama 3 does not compute this model. Use a model of "
            "Llama 3's architecture"
        )


class Tensor(NamedTuple):
    """A tensor of the model: key of the parameter, name and shape in the files."""

    key: Key
    name: str
    shape: tuple[int, ...]

    def ours(self, tensor: np.ndarray, config: Llama3Config) -> np.ndarray:
        """Return a stored tensor in the layout of the parameter, padded."""
        if self.key[-1] == "kernel":
            return tensor.T
        if self.key in (("wte",), ("lm_head",)):
            return np.pad(tensor, ((0, config.padded_vocab_size - config.vocab_size), (0, 0)))
        return tensor

    def theirs(self, array: np.ndarray) -> np.ndarray:
        """Return a parameter in the layout of the file, in fp32."""
        array = array.T if self.key[-1] == "kernel" else array[: self.shape[0]]
        return np.ascontiguousarray(array, np.float32)


def tensors_in(config: Llama3Config) -> Iterator[Tensor]:
    """Yield every tensor of a model, without allocating arrays."""
    c, d = config.n_embd, config.head_dim
    outputs = {"q": config.n_head * d, "k": config.kv_heads * d, "v": config.kv_heads * d, "o": c}
    outputs |= {"gate": config.inner, "up": config.inner, "down": c}
    inputs = {"o": config.n_head * d, "down": config.inner}
    yield Tensor(("wte",), EMBEDDING, (config.vocab_size, c))
    for layer in range(config.n_layer):
        for key, name in BLOCK_TENSORS:
            part = key[-2]
            shape = (outputs[part], inputs.get(part, c)) if key[-1] == "kernel" else (c,)
            yield Tensor(("blocks", layer, *key), f"model.layers.{layer}.{name}", shape)
    yield Tensor(("norm", "scale"), NORM, (c,))
    if not config.tie_embeddings:
        yield Tensor(("lm_head",), HEAD, (config.vocab_size, c))


@contextlib.contextmanager
def tensors_of(
    path: str | os.PathLike, config: Llama3Config
) -> Iterator[Iterator[tuple[Key, np.ndarray]]]:
    """Yield an iterator that reads the parameters of a Hugging Face Llama, one at a time.

    Raises:
        WeightsError: the weights do not exist, or a tensor does not fit the config.
    """
    path = Path(path)
    with contextlib.ExitStack() as stack:
        try:
            stored = find_tensors(stack, path)
            _check(path, stored, config)
        except OSError as error:
            raise WeightsError(f"{shown(path)}: cannot be read: {reason(error)}") from error
        yield (
            (tensor.key, tensor.ours(stored[tensor.name].read(), config))
            for tensor in tensors_in(config)
        )


def _check(path: Path, stored: dict[str, Stored], config: Llama3Config) -> None:
    """Compare the tensors with the config, before an array of these sizes is allocated."""
    what_to_do = "Check that config.json belongs to these weights"
    if config.n_layer > len(stored):
        raise WeightsError(
            f"{shown(path)}: expected the tensors of {config.n_layer} layers, found {len(stored)} "
            f"tensors. {what_to_do}"
        )
    shapes = {tensor.name: tensor.shape for tensor in tensors_in(config)}
    # A tied head may be stored twice; old files also have the frequencies of the rotary embedding.
    ignored = {name for name in stored if name.endswith(".rotary_emb.inv_freq")}
    ignored |= {HEAD} if config.tie_embeddings else set()
    missing, unexpected = shapes.keys() - stored.keys(), stored.keys() - shapes.keys() - ignored
    if missing or unexpected:
        raise WeightsError(
            f"{shown(path)}: expected the {len(shapes)} tensors of a Llama of {config.n_layer} "
            f"layers; missing {few(missing)}, unexpected {few(unexpected)}. {what_to_do}"
        )
    for name, shape in shapes.items():
        stored[name].check(shape)
    if config.tie_embeddings and HEAD in stored:
        if not np.array_equal(stored[HEAD].read(), stored[EMBEDDING].read()):
            raise WeightsError(
                f"{shown(stored[HEAD].file)}: expected {HEAD} to be the tensor {EMBEDDING}, "
                "because config.json has tie_word_embeddings; found other numbers"
            )


def save_llama(model: Llama3, path: str | os.PathLike) -> None:
    """Save a model as a folder that `transformers` and `load_llama` read.

    The transformers call is `LlamaForCausalLM.from_pretrained(path)`. Weights are fp32, the
    vocabulary is stored without padding. Each file is written atomically.

    Args:
        model: a Llama3 on any number of devices of this process.
        path: the folder, created if it does not exist.

    Raises:
        WeightsError: the model is a subclass of Llama3; the folder or a file cannot be written, for
            example because the disk is full.
    """
    check_model("save_llama", model, Llama3)
    folder, config = Path(path), cast(Llama3Config, model.config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsError(
            f"{shown(folder)}: the folder cannot be created: {reason(error)}"
        ) from error
    params = host_arrays(model)
    tensors = {tensor.name: tensor.theirs(params[tensor.key]) for tensor in tensors_in(config)}
    with replacing(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(config_json(config), indent=2) + "\n")


def config_json(config: Llama3Config) -> dict[str, Any]:
    """Return the contents of config.json."""
    # In GPT-2's vocabulary, the last id is the end-of-text token. For other vocabularies, the model
    # does not store this id.
    end_of_text = 50256 if config.vocab_size == 50257 else None
    # Names of transformers 4, which transformers 5 and other programs also read.
    scaling = {
        "rope_type": "llama3",
        "factor": config.rope_scaling,
        "low_freq_factor": LOW_TURNS,
        "high_freq_factor": HIGH_TURNS,
        "original_max_position_embeddings": config.rope_original_length,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if config.rope_scaling != 1 else None,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": 0.02,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "use_cache": True,
        "torch_dtype": "float32",
    }
