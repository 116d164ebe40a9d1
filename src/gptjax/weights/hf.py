"""Hugging Face's folders (config.json and safetensors) of GPT-2 and Llama.

The files hold the vocabulary without padding; reading pads the embedding with rows of zeros.
"""

import dataclasses
import json
import os
import reprlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gptjax.models.base import Model, ModelConfig
from gptjax.models.gpt2 import PRESETS
from gptjax.precision import Precision
from gptjax.terminal import printable
from gptjax.weights.architectures import (
    ARCHITECTURES,
    MAX_JSON_BYTES,
    Architecture,
    config_json,
    expect,
    of_config,
    read_json,
)
from gptjax.weights.errors import WeightsError
from gptjax.weights.files import file_size, reason, replacing, shown
from gptjax.weights.params import FP32, Key, check_model, check_options, few, host_arrays

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
HEAD = "lm_head.weight"
# Causal masks and frequencies that old versions of transformers stored with the weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
FLOATS = ("F32", "F16", "BF16", "F64")


def read_config(
    path: Path,
    *,
    precision: Precision = FP32,
    padded_vocab_size: int | None = None,
    **options: Any,
) -> ModelConfig:
    """Return the config of a Hugging Face model; no tensor is read. Arguments: see `load_hf`."""
    try:
        if not path.is_dir():
            file_size(path, missing=_how_to_get(path))
        file = (path if path.is_dir() else path.parent) / CONFIG
        found = read_json(file, "Pass the folder of a Hugging Face GPT-2 or Llama on disk")
    except OSError as error:
        raise WeightsError(f"{shown(path)}: cannot be read: {reason(error)}") from error
    kind = found.get("model_type", "gpt2")
    expect(file, "model_type", kind, (*ARCHITECTURES,))
    architecture = ARCHITECTURES[kind]
    sizes, decided = architecture.sizes, (*architecture.sizes, *architecture.decided)
    check_options(architecture.model.Config, precision, options, source=CONFIG, decided=decided)
    if kind == "gpt2":
        found.setdefault("n_positions", found.get("n_ctx"))
    if missing := sorted(name for name in sizes.values() if found.get(name) is None):
        raise WeightsError(f"{shown(file)}: expected {[*sizes.values()]}, missing {missing}")
    fields = {name: found[theirs] for name, theirs in sizes.items()}
    fields |= architecture.more(file, found)
    try:
        config = architecture.model.Config(**fields, precision=precision, **options)
    except (ValueError, TypeError) as error:
        raise WeightsError(
            f"{shown(file)}: not a {architecture.model.__name__}: {reason(error).splitlines()[0]}"
        ) from error
    for field, allowed in architecture.required(config).items():
        expect(file, field, found.get(field, allowed[0]), allowed)
    if padded_vocab_size is None:
        return config
    return dataclasses.replace(config, padded_vocab_size=padded_vocab_size)


def tensors_of(path: Path, config: ModelConfig) -> Iterator[tuple[Key, np.ndarray]]:
    """Return an iterator that reads the parameters of a model, one at a time.

    Raises:
        WeightsError: the weights do not exist, or a tensor does not fit the config.
    """
    architecture = of_config(config)
    try:
        stored = _check(_find_tensors(path, architecture.prefix), architecture, config)
    except OSError as error:
        raise WeightsError(f"{shown(path)}: cannot be read: {reason(error)}") from error
    padding = ((0, config.padded_vocab_size - config.vocab_size), (0, 0))
    return (
        (key, np.pad(array, padding) if key in (("wte",), ("lm_head",)) else array)
        for kind in architecture.kinds(config)
        for key, name, _ in kind.each()
        for array in (_turned(stored[name].read(), key, architecture),)
    )


def _turned(array: np.ndarray, key: Key, architecture: Architecture) -> np.ndarray:
    """Convert between the layouts of a parameter and of Hugging Face's tensor, both ways."""
    return array.T if architecture.transposed and key[-1] == "kernel" else array


def save_hf(model: Model, path: str | os.PathLike) -> None:
    """Save a GPT-2 or Llama as a folder that `transformers` and `load_hf` read.

    The transformers call is `AutoModelForCausalLM.from_pretrained(path)`. Weights are fp32, the
    vocabulary is stored without padding. Each file is written atomically.

    Args:
        model: a GPT2 or Llama3 on any number of devices of this process.
        path: the folder, created if it does not exist.

    Raises:
        WeightsError: the model is of another class or a subclass; the folder or a file cannot be
            written, for example because the disk is full.
    """
    check_model("save_hf", model, *(found.model for found in ARCHITECTURES.values()))
    folder, architecture = Path(path), of_config(model.config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsError(
            f"{shown(folder)}: the folder cannot be created: {reason(error)}"
        ) from error
    params, tensors = host_arrays(model), {}
    for kind in architecture.kinds(model.config):
        for key, name, _ in kind.each():
            array = _turned(params[key][: kind.shape[0]], key, architecture)
            tensors[architecture.prefix + name] = np.ascontiguousarray(array, np.float32)
    with replacing(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    with replacing(folder / CONFIG) as temporary:
        temporary.write_text(json.dumps(config_json(model.config), indent=2) + "\n")


def _how_to_get(path: Path) -> str:
    folder = path.parent if path.suffix else path
    name = folder.name if folder.name in PRESETS else "gpt2"
    return (
        f"load_hf reads a folder on disk. To download {name}: pip install huggingface_hub, then "
        f"hf download openai-community/{name} config.json model.safetensors --local-dir "
        f"{printable(shlex.quote(str(folder)))}"
    )


class _Stored(NamedTuple):
    """A tensor in an open file."""

    file: Path
    opened: Any
    name: str

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise WeightsError for another shape, or a dtype that is not a float."""
        tensor = self.opened.get_slice(self.name)
        found, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        if found != shape or dtype not in FLOATS:
            raise WeightsError(
                f"{shown(self.file)}: expected {printable(self.name)} of shape {shape} and a type "
                f"of {FLOATS}, found {found} {dtype}. Check that config.json belongs to these "
                "weights"
            )

    def read(self) -> np.ndarray:
        """Return the tensor in fp32."""
        try:
            # A finite fp64 number outside fp32's range would become infinite.
            with np.errstate(over="raise", invalid="ignore"):
                return self.opened.get_tensor(self.name).astype(np.float32)
        except FloatingPointError:
            raise WeightsError(
                f"{shown(self.file)}: expected {printable(self.name)} to hold numbers of fp32's "
                "range, found larger ones"
            ) from None


def _find_tensors(path: Path, prefix: str) -> dict[str, _Stored]:
    """Open the files and return every tensor by name, without the prefix."""
    tensors: dict[str, _Stored] = {}
    for file in _weight_files(path):
        try:
            opened = _open(file)
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"{shown(file)}: expected a safetensors file: {reason(error)}. "
                "Download or export the model again"
            ) from error
        names_in_file = opened.keys()  # not a mapping: it has keys() and nothing to iterate over
        for name in names_in_file:
            if (short := name.removeprefix(prefix)) in tensors:
                raise WeightsError(
                    f"{shown(file)}: expected one tensor {printable(short)}, found two"
                )
            tensors[short] = _Stored(file, opened, name)
    return {name: stored for name, stored in tensors.items() if not name.endswith(BUFFERS)}


def _open(file: Path) -> Any:
    length = file_size(file)
    with open(file, "rb") as raw:
        header = int.from_bytes(raw.read(8), "little")
    if length < 8 or header > min(length - 8, MAX_JSON_BYTES):
        raise SafetensorError(f"a header of {header} bytes in a file of {length}")
    return safe_open(file, framework="numpy")


def _check(
    tensors: dict[str, _Stored], architecture: Architecture, config: ModelConfig
) -> dict[str, _Stored]:
    """Compare the tensors with the config, before an array of these sizes is allocated."""
    kinds = architecture.kinds(config)
    files = ", ".join(sorted({shown(stored.file) for stored in tensors.values()}))
    expected = (
        f"{files}: expected the {sum(kind.layers or 1 for kind in kinds)} tensors of a "
        f"{architecture.model.__name__} of {config.n_layer} layers"
    )
    what_to_do = "Check that config.json belongs to these weights"
    if config.n_layer > len(tensors):
        raise WeightsError(f"{expected}, found {len(tensors)}. {what_to_do}")
    shapes = {
        name: kind.shape[::-1] if architecture.transposed and key[-1] == "kernel" else kind.shape
        for kind in kinds
        for key, name, _ in kind.each()
    }
    missing, unexpected = shapes.keys() - tensors.keys(), tensors.keys() - shapes.keys() - {HEAD}
    if missing or unexpected:
        raise WeightsError(
            f"{expected}; missing {few(missing)}, unexpected {few(unexpected)}. {what_to_do}"
        )
    embedding = kinds[0].name
    tied = HEAD in tensors and HEAD not in shapes
    shapes |= {HEAD: shapes[embedding]} if tied else {}
    for name, shape in shapes.items():
        tensors[name].check(shape)
    if tied and not np.array_equal(tensors[HEAD].read(), tensors[embedding].read()):
        raise WeightsError(
            f"{shown(tensors[HEAD].file)}: expected {HEAD} to be the same tensor as {embedding}, "
            "found other numbers: by config.json, the head is tied to the token embedding"
        )
    return tensors


def _weight_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / WEIGHTS).exists():
        return [path / WEIGHTS]
    if not (path / INDEX).exists():
        raise WeightsError(
            f"{shown(path)}: expected {WEIGHTS} or {INDEX}, found "
            f"{few(file.name for file in path.iterdir())}. Save a pickled model again with "
            "save_pretrained(path, safe_serialization=True)"
        )
    weight_map = read_json(path / INDEX, "").get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else [weight_map]
    for name in names:
        if not isinstance(weight_map, dict) or not _is_file_name(name):
            raise WeightsError(
                f"{shown(path / INDEX)}: expected weight_map to give each tensor the name of a "
                f"file in this folder, found {reprlib.repr(name)}"
            )
    for name in sorted(set(names)):
        file_size(path / name, missing=f"{INDEX} names it; download it")
    return [path / name for name in sorted(set(names))]


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name
