"""Hugging Face's GPT-2 folders (config.json and safetensors), both ways.

Their Conv1D keeps its weight as (in, out), like our kernels, so no tensor is transposed. The vocabulary is stored without
padding; on the way in it is padded with zero rows to a multiple of 128.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gptjax.models.gpt2 import GPT2, GPT2Config
from gptjax.precision import Precision
from gptjax.weights._params import BLOCK_TENSORS, FP32, Key, arrays, build, replacing, shapes

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PREFIX = "transformer."
HEAD = "lm_head.weight"
# Causal masks that old versions of transformers stored beside the weights.
BUFFERS = (".attn.bias", ".attn.masked_bias")
FLOATS = ("F32", "F16", "BF16", "F64")

# What config.json must say for its model to be the one that gptjax computes; a field that is left out has the first value.
_REQUIRED: dict[str, tuple] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
_SIZES = ("vocab_size", "n_layer", "n_head", "n_embd")


def load_hf(
    path: str | os.PathLike,
    *,
    precision: Precision = FP32,
    padded_vocab_size: int | None = None,
    **how: Any,
) -> GPT2:
    """Reads a Hugging Face GPT-2 from disk. Tensors in bf16, fp16 or fp64 become fp32 masters.

    Dropout is left out: gptjax trains without it, as it computes without it.

    Args:
        path: a folder with config.json and model.safetensors (or its shards and their index), or one .safetensors file with
            config.json beside it.
        precision: of the model's computation; the parameters are fp32 in each.
        padded_vocab_size: rows of the embedding; the next multiple of 128 when None.
        **how: other fields of `GPT2Config` that the folder does not decide: attention, loss, loss_chunk, recompute.

    Raises:
        FileNotFoundError: config.json or the weights are not there.
        ValueError: a model that is not GPT-2 as gptjax computes it, or tensors that do not fit config.json; says what was
            expected, what is there and what to do.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    config = _read_config(folder / "config.json", precision, padded_vocab_size, how)
    with contextlib.ExitStack() as stack:
        files = _find(stack, path, config)
        return build(config, _tensors(files, config))


def save_hf(model: GPT2, path: str | os.PathLike) -> None:
    """Writes a folder that `transformers.GPT2LMHeadModel.from_pretrained(path)` and `load_hf(path)` read.

    Weights are fp32, the vocabulary without padding. Each file is replaced when the whole of it is on disk.

    Args:
        model: any GPT2, on any number of devices of this process.
        path: the folder, made where it is missing.
    """
    folder, config = Path(path), model.config
    folder.mkdir(parents=True, exist_ok=True)
    params = arrays(model)
    params[("wte",)] = params[("wte",)][: config.vocab_size]
    tensors = {
        PREFIX + name: np.ascontiguousarray(params[key], np.float32) for key, name in _names(config.n_layer).items()
    }
    with replacing(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(_config_json(config), indent=2) + "\n")


def _names(n_layer: int) -> dict[Key, str]:
    """Our key of every tensor → its name in the file, without the prefix."""
    names: dict[Key, str] = {("wte",): "wte.weight", ("wpe",): "wpe.weight"}
    for layer in range(n_layer):
        names |= {("blocks", layer, *key): f"h.{layer}.{name}" for key, name in BLOCK_TENSORS}
    return names | {("ln_f", "scale"): "ln_f.weight", ("ln_f", "bias"): "ln_f.bias"}


def _config_json(config: GPT2Config) -> dict[str, Any]:
    # GPT-2's end of text is its last token; another vocabulary has its own, which the model does not know.
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


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file}: not there. Give the folder of a Hugging Face GPT-2 on disk, or a .safetensors file beside config.json"
        ) from None
    except ValueError as error:
        raise ValueError(f"{file}: expected JSON: {error}. Download or export the model again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(found).__name__}")  # noqa: TRY004 (the file is wrong, not an argument)
    return found


def _read_config(file: Path, precision: Precision, padded_vocab_size: int | None, how: Mapping[str, Any]) -> GPT2Config:
    found = _read_json(file)
    for field, allowed in _REQUIRED.items():
        if (value := found.get(field, allowed[0])) not in allowed:
            raise ValueError(
                f"{file}: expected {field} to be {' or '.join(map(repr, allowed))}, found {value!r}: gptjax does not "
                "compute this model. Use a model of the original GPT-2 architecture"
            )
    missing = [name for name in _SIZES if name not in found]
    positions = found.get("n_positions", found.get("n_ctx"))
    if missing or positions is None:
        raise ValueError(f"{file}: expected {[*_SIZES, 'n_positions']}, missing {missing or ['n_positions']}")
    sizes = {name: found[name] for name in _SIZES} | {"block_size": positions}
    if found.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        raise ValueError(
            f"{file}: expected n_inner to be null or 4·n_embd = {4 * sizes['n_embd']}, found {found['n_inner']}: "
            "gptjax's MLP is four times as wide as its residual stream"
        )
    if decided := sorted(set(how) & set(sizes)):
        raise ValueError(f"load_hf: config.json decides {decided}; leave them out")
    if padded_vocab_size is None:
        padded_vocab_size = -(-sizes["vocab_size"] // 128) * 128
    return GPT2Config(**sizes, padded_vocab_size=padded_vocab_size, precision=precision, **how)


class _Stored(NamedTuple):
    """A tensor in an open file."""

    file: Path
    opened: Any
    name: str

    def read(self) -> np.ndarray:
        return self.opened.get_tensor(self.name).astype(np.float32)


def _find(stack: contextlib.ExitStack, path: Path, config: GPT2Config) -> dict[str, _Stored]:
    """Every tensor of the model, by its name without the prefix; all are there and of the right shape."""
    paths = _weight_files(path)
    files: dict[str, _Stored] = {}
    for file in paths:
        try:
            opened = stack.enter_context(safe_open(file, framework="numpy"))
        except SafetensorError as error:
            raise ValueError(
                f"{file}: expected a safetensors file: {error}. Download or export the model again"
            ) from error
        names_in_file = opened.keys()  # not a mapping: it has keys() and nothing to iterate over
        files |= {name.removeprefix(PREFIX): _Stored(file, opened, name) for name in names_in_file}
    files = {name: where for name, where in files.items() if not name.endswith(BUFFERS)}

    ours, names = shapes(config), _names(config.n_layer)
    missing = sorted(set(names.values()) - set(files))
    unexpected = sorted(set(files) - set(names.values()) - {HEAD})
    if missing or unexpected:
        raise ValueError(
            f"{', '.join(map(str, paths))}: expected the {len(names)} tensors of a GPT-2 of {config.n_layer} layers; "
            f"missing {_few(missing)}, unexpected {_few(unexpected)}. Check that config.json belongs to these weights"
        )
    for key, name in names.items():
        stored = files[name]
        expected = (config.vocab_size, config.n_embd) if key == ("wte",) else ours[key]
        tensor = stored.opened.get_slice(stored.name)
        if tuple(tensor.get_shape()) != expected or tensor.get_dtype() not in FLOATS:
            raise ValueError(
                f"{stored.file}: expected {stored.name} of shape {expected} and a type of {FLOATS}, found "
                f"{tuple(tensor.get_shape())} {tensor.get_dtype()}. Check that config.json belongs to these weights"
            )
    if HEAD in files and not np.array_equal(files[HEAD].read(), files["wte.weight"].read()):
        raise ValueError(
            f"{files[HEAD].file}: expected {HEAD} to be the same tensor as wte.weight, found other numbers: "
            "gptjax's head is tied to the token embedding. Use a model with a tied head"
        )
    return files


def _weight_files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"{path}: not there. Give a folder with {WEIGHTS}, or the file itself")
        return [path]
    if (path / WEIGHTS).exists():
        return [path / WEIGHTS]
    if not (path / INDEX).exists():
        found = sorted(file.name for file in path.iterdir())
        raise FileNotFoundError(
            f"{path}: expected {WEIGHTS} or {INDEX}, found {_few(found)}. Save a pickled model again with "
            "save_pretrained(path, safe_serialization=True)"
        )
    shards = sorted({path / name for name in _read_json(path / INDEX)["weight_map"].values()})
    if gone := [shard.name for shard in shards if not shard.exists()]:
        raise FileNotFoundError(f"{path}: {INDEX} names {_few(gone)}, which are not there. Download them")
    return shards


def _tensors(files: dict[str, _Stored], config: GPT2Config) -> Iterator[tuple[Key, np.ndarray]]:
    for key, name in _names(config.n_layer).items():
        tensor = files[name].read()
        if key == ("wte",):
            tensor = np.pad(tensor, ((0, config.padded_vocab_size - config.vocab_size), (0, 0)))
        yield key, tensor


def _few(names: list[str]) -> str:
    return f"{names[:6]}{f' and {len(names) - 6} more' if len(names) > 6 else ''}"
