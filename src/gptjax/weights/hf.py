"""Hugging Face's GPT-2 folders (config.json and safetensors): load and save.

Hugging Face's Conv1D stores its weight as (in, out), like gptjax's kernels, so no tensor is
transposed. The files hold the vocabulary without padding; `load_hf` pads the embedding with rows
of zeros.
"""

import contextlib
import dataclasses
import json
import os
import reprlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gptjax.models.gpt2 import GPT2, PRESETS, GPT2Config
from gptjax.precision import Precision
from gptjax.terminal import printable
from gptjax.weights.errors import WeightsError
from gptjax.weights.files import file_size, reason, replacing, shown
from gptjax.weights.gpt2 import SIZES, tensor_kinds
from gptjax.weights.params import (
    FP32,
    Key,
    check_model,
    check_options,
    few,
    host_arrays,
    model_from_tensors,
)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PREFIX = "transformer."
HEAD = "lm_head.weight"
# Causal masks that old versions of transformers stored with the weights.
BUFFERS = (".attn.bias", ".attn.masked_bias")
FLOATS = ("F32", "F16", "BF16", "F64")
# The header of a GPT-2 of 1,000 layers takes 2 MB. Parsed JSON takes many times the length of its
# text.
MAX_JSON_BYTES = 16 << 20

# Values of config.json that gptjax's GPT-2 implements. The first is the default of a missing field.
_REQUIRED: dict[str, tuple] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def load_hf(
    path: str | os.PathLike,
    *,
    precision: Precision = FP32,
    padded_vocab_size: int | None = None,
    **options: Any,
) -> GPT2:
    """Load a Hugging Face GPT-2 from disk.

    Tensors in bf16, fp16 or fp64 are converted to fp32. Dropout rates are ignored: gptjax has no
    dropout.

    Args:
        path: a folder with config.json and model.safetensors (or an index and shards), or one
            .safetensors file in the same folder as config.json.
        precision: precision of the model. The parameters are fp32 in every precision.
        padded_vocab_size: rows of the embedding. None: the next multiple of 128.
        **options: other fields of `GPT2Config` that the folder does not determine: attention, loss,
            loss_chunk, recompute.

    Raises:
        WeightsError: config.json or the weights do not exist; the model is not GPT-2 as gptjax
            implements it; a tensor does not fit config.json.
        ValueError: a wrong option.
    """
    check_options("load_hf", GPT2Config, precision, options, source="config.json", decided=SIZES)
    config = read_config(path, precision=precision, padded_vocab_size=padded_vocab_size, **options)
    with tensors_of(path, config) as tensors:
        return cast(GPT2, model_from_tensors(config, tensors))


def read_config(
    path: str | os.PathLike,
    *,
    precision: Precision = FP32,
    padded_vocab_size: int | None = None,
    **options: Any,
) -> GPT2Config:
    """Return the config of a Hugging Face GPT-2; no tensor is read. Arguments: see `load_hf`."""
    path = Path(path)
    try:
        folder = path if path.is_dir() else path.parent
        if not path.is_dir():
            file_size(path, missing=_how_to_get(path))
        return _read_config(folder / "config.json", precision, padded_vocab_size, options)
    except OSError as error:
        raise WeightsError(f"{shown(path)}: cannot be read: {reason(error)}") from error


@contextlib.contextmanager
def tensors_of(
    path: str | os.PathLike, config: GPT2Config
) -> Iterator[Iterator[tuple[Key, np.ndarray]]]:
    """Yield an iterator that reads the parameters of a Hugging Face GPT-2, one at a time.

    Raises:
        WeightsError: the weights do not exist, or a tensor does not fit the config.
    """
    path = Path(path)
    with contextlib.ExitStack() as stack:
        try:
            tensors = _check(find_tensors(stack, path), config)
        except OSError as error:
            raise WeightsError(f"{shown(path)}: cannot be read: {reason(error)}") from error
        yield _read(tensors, config)


def save_hf(model: GPT2, path: str | os.PathLike) -> None:
    """Save a model as a folder that `transformers` and `load_hf` read.

    The transformers call is `GPT2LMHeadModel.from_pretrained(path)`. Weights are fp32, the
    vocabulary is stored without padding. Each file is written atomically.

    Args:
        model: a GPT2 on any number of devices of this process.
        path: the folder, created if it does not exist.

    Raises:
        WeightsError: the model is a subclass of GPT2; the folder or a file cannot be written, for
            example because the disk is full.
    """
    check_model("save_hf", model, GPT2)
    folder, config = Path(path), model.config
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsError(
            f"{shown(folder)}: the folder cannot be created: {reason(error)}"
        ) from error
    params = host_arrays(model)
    params[("wte",)] = params[("wte",)][: config.vocab_size]
    tensors = {
        PREFIX + name: np.ascontiguousarray(params[key], np.float32)
        for kind in tensor_kinds(config)
        for key, name in kind.each()
    }
    with replacing(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(config_json(config), indent=2) + "\n")


def config_json(config: GPT2Config) -> dict[str, Any]:
    """Return the contents of config.json."""
    # GPT-2's end-of-text token is the last id. For other vocabularies, the model does not store it.
    end_of_text = 50256 if config.vocab_size == 50257 else None
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "use_cache": True,
        "torch_dtype": "float32",
    }


def _how_to_get(path: Path) -> str:
    folder = path.parent if path.suffix else path
    name = folder.name if folder.name in PRESETS else "gpt2"
    return (
        f"load_hf reads a folder on disk. To download {name}: pip install huggingface_hub, then "
        f"hf download openai-community/{name} config.json model.safetensors --local-dir "
        f"{printable(shlex.quote(str(folder)))}"
    )


def read_json(file: Path, missing: str) -> dict[str, Any]:
    """Return the object in a JSON file; `missing` says what to do if there is no file."""
    if (size := file_size(file, missing=missing)) > MAX_JSON_BYTES:
        raise WeightsError(
            f"{shown(file)}: expected at most {MAX_JSON_BYTES} bytes of JSON, found {size}"
        )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{shown(file)}: expected JSON: {reason(error)}. Download or export the model again"
        ) from error
    if not isinstance(found, dict):
        raise WeightsError(f"{shown(file)}: expected a JSON object, found {type(found).__name__}")
    return found


def _read_config(
    file: Path, precision: Precision, padded_vocab_size: int | None, options: dict[str, Any]
) -> GPT2Config:
    found = read_json(
        file,
        "Pass the folder of a Hugging Face GPT-2 on disk, or a .safetensors file beside this file",
    )
    other = "load_hf reads GPT-2 only. For a Llama, call gptjax.load"
    differs = (
        "gptjax's GPT-2 does not compute this model. Use a model of the original GPT-2 architecture"
    )
    for field, allowed in _REQUIRED.items():
        value = found.get(field, allowed[0])
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            raise WeightsError(
                f"{shown(file)}: expected {field} to be {' or '.join(map(repr, allowed))}, found "
                f"{reprlib.repr(value)}: {other if field == 'model_type' else differs}"
            )
    sizes = _sizes(file, found)
    try:
        config = GPT2Config(**sizes, precision=precision, **options)
    except ValueError as error:
        raise WeightsError(f"{shown(file)}: not a GPT-2: {error}") from error
    if padded_vocab_size is None:
        return config
    return dataclasses.replace(config, padded_vocab_size=padded_vocab_size)


def _sizes(file: Path, found: dict[str, Any]) -> dict[str, int]:
    """Return the sizes in config.json after checking that each is a positive integer."""
    positions = "n_positions" if "n_positions" in found else "n_ctx"
    names = {name: positions if name == "block_size" else name for name in SIZES}
    if missing := [name for name in names.values() if name not in found]:
        raise WeightsError(f"{shown(file)}: expected {[*names.values()]}, missing {missing}")
    for name in names.values():
        value = found[name]
        # A bool is an int, hence type(). The upper bound keeps messages short.
        if type(value) is not int or not 1 <= value < 2**63:
            raise WeightsError(
                f"{shown(file)}: expected {name} to be a positive integer, "
                f"found {reprlib.repr(value)}"
            )
    width, inner = 4 * found["n_embd"], found.get("n_inner")
    if inner is not None and (type(inner) is not int or inner != width):
        raise WeightsError(
            f"{shown(file)}: expected n_inner to be null or 4·n_embd = {width}, found "
            f"{reprlib.repr(inner)}: gptjax's MLP is four times as wide as its residual stream"
        )
    return {field: found[name] for field, name in names.items()}


class Stored(NamedTuple):
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


def find_tensors(stack: contextlib.ExitStack, path: Path) -> dict[str, Stored]:
    """Open the files and return every tensor by name, without the prefix."""
    tensors: dict[str, Stored] = {}
    for file in _weight_files(path):
        try:
            opened = _open(stack, file)
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"{shown(file)}: expected a safetensors file: {reason(error)}. "
                "Download or export the model again"
            ) from error
        names_in_file = opened.keys()  # not a mapping: it has keys() and nothing to iterate over
        for name in names_in_file:
            if (short := name.removeprefix(PREFIX)) in tensors:
                raise WeightsError(
                    f"{shown(file)}: expected one tensor {printable(short)}, found two"
                )
            tensors[short] = Stored(file, opened, name)
    return {name: stored for name, stored in tensors.items() if not name.endswith(BUFFERS)}


def _open(stack: contextlib.ExitStack, file: Path) -> Any:
    length = file_size(file)
    with open(file, "rb") as raw:
        header = int.from_bytes(raw.read(8), "little")
    if length < 8 or header > min(length - 8, MAX_JSON_BYTES):
        raise SafetensorError(f"a header of {header} bytes in a file of {length}")
    return stack.enter_context(safe_open(file, framework="numpy"))


def _check(tensors: dict[str, Stored], config: GPT2Config) -> dict[str, Stored]:
    """Compare the tensors with the config, before an array of these sizes is allocated."""
    files = ", ".join(sorted({shown(stored.file) for stored in tensors.values()}))
    count = sum(kind.layers or 1 for kind in tensor_kinds(config))
    expected = f"{files}: expected the {count} tensors of a GPT-2 of {config.n_layer} layers"
    what_to_do = "Check that config.json belongs to these weights"
    if config.n_layer > len(tensors):
        raise WeightsError(f"{expected}, found {len(tensors)}. {what_to_do}")
    shapes = {name: kind.shape for kind in tensor_kinds(config) for _, name in kind.each()}
    missing, unexpected = shapes.keys() - tensors.keys(), tensors.keys() - shapes.keys() - {HEAD}
    if missing or unexpected:
        raise WeightsError(
            f"{expected}; missing {few(missing)}, unexpected {few(unexpected)}. {what_to_do}"
        )
    # The vocabulary in the file has no padding.
    shapes["wte.weight"] = (config.vocab_size, config.n_embd)
    shapes |= {HEAD: shapes["wte.weight"]} if HEAD in tensors else {}
    for name, shape in shapes.items():
        tensors[name].check(shape)
    if HEAD in tensors and not np.array_equal(tensors[HEAD].read(), tensors["wte.weight"].read()):
        raise WeightsError(
            f"{shown(tensors[HEAD].file)}: expected {HEAD} to be the same tensor as wte.weight, "
            "found other numbers: gptjax's head is tied to the token embedding. "
            "Use a model with a tied head"
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


def _read(tensors: dict[str, Stored], config: GPT2Config) -> Iterator[tuple[Key, np.ndarray]]:
    for kind in tensor_kinds(config):
        for key, name in kind.each():
            tensor = tensors[name].read()
            if key == ("wte",):
                tensor = np.pad(tensor, ((0, config.padded_vocab_size - config.vocab_size), (0, 0)))
            yield key, tensor
