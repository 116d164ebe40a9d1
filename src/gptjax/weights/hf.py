"""Hugging Face's folders (config.json and safetensors) of GPT-2 and Llama.

The files hold the vocabulary without padding; reading pads the embedding with rows of zeros.
"""

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from gptjax.files import check_regular
from gptjax.models.base import Model, ModelConfig
from gptjax.weights.architectures import (
    ARCHITECTURES,
    Architecture,
    config_json,
    of_config,
    of_json,
)
from gptjax.weights.checkpoint_files import differences, few
from gptjax.weights.errors import WeightsError
from gptjax.weights.files import read_json, reading, reason, replacing
from gptjax.weights.params import STORED, Key, check_writable, host_arrays

WEIGHTS = "model.safetensors"
SHARDS = "model*.safetensors"
CONFIG = "config.json"
HEAD = "lm_head.weight"
# Causal masks and frequencies that old versions of transformers stored with the weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
FLOATS = ("F32", "F16", "BF16", "F64")


def read_config(path: Path) -> ModelConfig:
    """Return the config of a Hugging Face model; no tensor is read."""
    if not path.exists():
        folder = path.parent if path.suffix else path
        raise ValueError(
            "not there. load_hf reads a folder on disk. To download gpt2: pip install "
            "huggingface_hub, then hf download openai-community/gpt2 config.json "
            f"model.safetensors --local-dir {shlex.quote(str(folder))}"
        )
    file = (path if path.is_dir() else path.parent) / CONFIG
    with reading(file):
        return of_json(read_json(file))


def tensors_of(path: Path, config: ModelConfig) -> Iterator[tuple[Key, np.ndarray]]:
    """Return an iterator that reads the parameters of a model, one at a time.

    Raises:
        WeightsError, ValueError: the weights do not exist, or a tensor does not fit the config.
    """
    architecture = of_config(config)
    stored = _find_tensors(path, architecture.prefix)
    _check(stored, architecture, config)
    padding = ((0, config.padded_vocab_size - config.vocab_size), (0, 0))
    return (
        (key, np.pad(array, padding) if key in (("wte",), ("lm_head",)) else array)
        for kind in architecture.kinds(config)
        for key, name, _ in kind.each()
        for array in (_turned(_read(*stored[name]), key, architecture),)
    )


def save_hf(model: Model, path: str | os.PathLike, *, dtype: str = "fp32") -> None:
    """Save a GPT-2 or Llama as a folder that `transformers` and `load_hf` read.

    The transformers call is `AutoModelForCausalLM.from_pretrained(path)`. The vocabulary is stored
    without padding. Each file is written atomically.

    Args:
        model: a GPT2 or Llama3 on any number of devices of this process.
        path: the folder, created if it does not exist.
        dtype: "fp32", or "bf16" for half the size, rounded to nearest.

    Raises:
        ValueError: an unknown dtype.
        WeightsError: the model is of another class or a subclass; the folder or a file cannot be
            written, for example because the disk is full.
    """
    check_writable("save_hf", model, dtype, *(each.model for each in ARCHITECTURES.values()))
    folder, architecture = Path(path), of_config(model.config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsError(f"{folder}: the folder cannot be created: {reason(error)}") from error
    params, tensors = host_arrays(model), {}
    for kind in architecture.kinds(model.config):
        for key, name, _ in kind.each():
            array = _turned(params[key][: kind.shape[0]], key, architecture)
            tensors[architecture.prefix + name] = np.ascontiguousarray(array, STORED[dtype])
    with replacing(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    found = config_json(model.config) | {"torch_dtype": STORED[dtype].name}
    with replacing(folder / CONFIG) as temporary:
        temporary.write_text(json.dumps(found, indent=2) + "\n")


def _turned(array: np.ndarray, key: Key, architecture: Architecture) -> np.ndarray:
    """Convert between the layouts of a parameter and of Hugging Face's tensor, both ways."""
    return array.T if architecture.transposed and key[-1] == "kernel" else array


def _read(opened: Any, name: str) -> np.ndarray:
    """Return a tensor in fp32."""
    # A finite fp64 number outside fp32's range would become infinite.
    with np.errstate(over="raise", invalid="ignore"):
        return opened.get_tensor(name).astype(np.float32)


def _find_tensors(path: Path, prefix: str) -> dict[str, tuple[Any, str]]:
    """Return the open file and the full name of every tensor, by its name without the prefix."""
    files = sorted(path.glob(SHARDS)) if path.is_dir() else [path]
    if not files:
        raise ValueError(
            f"expected {SHARDS}, found {few(file.name for file in path.iterdir())}. Save a pickled "
            "model again with save_pretrained(path, safe_serialization=True)"
        )
    tensors: dict[str, tuple[Any, str]] = {}
    for file in files:
        with reading(file):
            check_regular(file)
            opened = safe_open(file, framework="numpy")
            names_in_file = opened.keys()  # safe_open is not iterable
            for name in names_in_file:
                if (short := name.removeprefix(prefix)) in tensors:
                    raise ValueError(f"expected one tensor {short}, found two")
                tensors[short] = opened, name
    return {name: stored for name, stored in tensors.items() if not name.endswith(BUFFERS)}


def _check(stored: dict[str, tuple], architecture: Architecture, config: ModelConfig) -> None:
    """Compare the tensors with the config, before an array of these sizes is allocated."""
    if config.n_layer > len(stored):
        raise ValueError(
            f"expected {config.n_layer} layers, as in {CONFIG}, found {len(stored)} tensors"
        )
    kinds = architecture.kinds(config)
    shapes = {
        name: kind.shape[::-1] if architecture.transposed and key[-1] == "kernel" else kind.shape
        for kind in kinds
        for key, name, _ in kind.each()
    }
    embedding = kinds[0].name
    if tied := HEAD in stored and HEAD not in shapes:
        shapes[HEAD] = shapes[embedding]
    found = {}
    for name, (opened, full_name) in stored.items():
        tensor = opened.get_slice(full_name)
        dtype = "float" if tensor.get_dtype() in FLOATS else tensor.get_dtype()
        found[name] = f"{dtype}{list(tensor.get_shape())}"
    wanted = {name: f"float{list(shape)}" for name, shape in shapes.items()}
    if text := differences(found, wanted, "the file", CONFIG):
        raise ValueError(text)
    if tied and not np.array_equal(_read(*stored[HEAD]), _read(*stored[embedding])):
        raise ValueError(
            f"expected {HEAD} to be the same tensor as {embedding}, found other numbers: by "
            f"{CONFIG}, the head is tied to the token embedding"
        )
