"""Models on disk: detection of the format of a path, and reading of config and parameters.

A path is a run's folder, a folder of checkpoints, the folder of one checkpoint, a Hugging Face
folder or .safetensors file, an llm.c .bin file, or a .pt file of modded-nanogpt. `find` reads no
array.
"""

import abc
import dataclasses
import json
import os
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from gptjax.config import ConfigError, model_from_json
from gptjax.data.tokenizers import TOKENIZERS, VOCABULARIES
from gptjax.models.base import ModelConfig
from gptjax.models.gpt2 import GPT2Config
from gptjax.models.registry import config_class
from gptjax.precision import Precision
from gptjax.weights import checkpoint_files, hf, llama, llmc, modded_nanogpt
from gptjax.weights.bpe_files import is_byte_tokenizer
from gptjax.weights.errors import CheckpointError, DamagedError, WeightsError
from gptjax.weights.files import reason, shown
from gptjax.weights.gpt2 import SIZES
from gptjax.weights.params import FP32, Key, check_options

CHECKPOINTS = "checkpoints"
HF_CONFIG = "config.json"
EXPECTED = (
    "expected a run's folder, the folder of a checkpoint, a Hugging Face folder with config.json, "
    "an llm.c .bin file, or a .pt file of modded-nanogpt"
)


@dataclasses.dataclass(frozen=True)
class Source(abc.ABC):
    """A model on disk.

    Attributes:
        path: the folder or file that is read.
        architecture: name of the model's config class.
        tokenizer: "gpt2" or "byte"; None if the source does not determine it.
    """

    path: Path
    architecture: str
    tokenizer: str | None

    @abc.abstractmethod
    def config(
        self,
        *,
        precision: Precision | None = None,
        kind: type[ModelConfig] | None = None,
        **options: Any,
    ) -> ModelConfig:
        """Return the model's config.

        Args:
            precision: precision of the model. None: the source's precision, or fp32.
            kind: the config class; None to find it by `architecture`.
            options: fields of the config that do not change what the model computes, such as
                attention. Missing options have their defaults, because the source's values may need
                another GPU.

        Raises:
            WeightsError: the source does not describe a model, or the architecture is not known.
            ValueError: a wrong option.
        """

    @abc.abstractmethod
    def read(self, config: ModelConfig, like: Mapping) -> dict:
        """Return the parameters as a nested dict of arrays, each read with the sharding in `like`.

        Args:
            config: from `config`.
            like: nested dict of `jax.ShapeDtypeStruct`s with shardings, in the shapes of `config`.

        Raises:
            WeightsError: the parameters are damaged or do not fit.
        """

    def identity(self) -> str:
        """Return a text that differs between models: lengths of files, or a checksum."""
        paths = [self.path] if self.path.is_file() else sorted(self.path.iterdir())
        return ", ".join(f"{path.name} {path.stat().st_size}" for path in paths)

    def __str__(self) -> str:
        return shown(self.path)


class Checkpoint(Source):
    """A checkpoint of a run."""

    def config(self, *, precision=None, kind=None, **options):
        kind, flat = kind or _config_class(self), self._saved_config()
        decided = {field.name for field in dataclasses.fields(kind)} - kind.operational
        if wrong := sorted(options.keys() & decided | options.keys() - _names(kind)):
            raise ValueError(
                f"{self}: unknown options {wrong}, or the checkpoint decides them; choose from "
                f"{sorted(kind.operational)}"
            )
        default = {
            f.name: f.default for f in dataclasses.fields(kind) if f.name in kind.operational
        }
        changes = default | options | ({} if precision is None else {"precision": precision})
        try:
            return model_from_json(flat, kind, **changes)
        except ConfigError as error:
            raise WeightsError(f"{self}: {error}") from error

    def read(self, config, like):
        return checkpoint_files.read_params(self.path, like)

    def identity(self):
        meta = checkpoint_files.read_meta(self.path)
        return f"step {meta.get('step')}, {meta.get('checksum')}"

    def _saved_config(self) -> dict[str, Any]:
        """Return the run's config with the model of the last stage that the checkpoint reached."""
        meta = checkpoint_files.read_meta(self.path)
        if (number := (meta.get("data") or {}).get("stage")) is None:
            return meta["config"]
        try:
            model = meta["config"]["stages"][number - 1].get("model", {})
        except (LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self}: expected stage {number} in its config") from error
        return meta["config"] | {f"model.{name}": value for name, value in model.items()}


class HuggingFaceGPT2(Source):
    """Hugging Face's config.json and safetensors of a GPT-2."""

    def config(self, *, precision=None, kind=None, **options):
        _check_gpt2_options(options, HF_CONFIG)
        return hf.read_config(self.path, precision=precision or FP32, **options)

    def read(self, config, like):
        with hf.tensors_of(self.path, config) as tensors:
            return _put_each(tensors, like)


class HuggingFaceLlama(Source):
    """Hugging Face's config.json and safetensors of a Llama."""

    def config(self, *, precision=None, kind=None, **options):
        return llama.read_config(self.path, precision=precision or FP32, **options)

    def read(self, config, like):
        with llama.tensors_of(self.path, config) as tensors:
            return _put_each(tensors, like)


class Llmc(Source):
    """llm.c's .bin file of a GPT-2."""

    def config(self, *, precision=None, kind=None, **options):
        _check_gpt2_options(options, "the file")
        return llmc.read_config(self.path, precision=precision or FP32, **options)

    def read(self, config, like):
        return _put_each(llmc.tensors_of(self.path, config), like)


@dataclasses.dataclass(frozen=True)
class ModdedNanoGPT(Source):
    """A .pt file of modded-nanogpt's record of pull request #233.

    Attributes:
        tensors: from `modded_nanogpt.read_tensors`.
    """

    tensors: Mapping[str, Any] = dataclasses.field(repr=False, compare=False)

    def config(self, *, precision=None, kind=None, **options):
        return modded_nanogpt.config_of(self.tensors, precision=precision or FP32, **options)

    def read(self, config, like):
        arrays = {name: x.float().numpy() for name, x in self.tensors.items()}
        params = modded_nanogpt.params_of(arrays, config)
        for name, x in params.items():
            if x.shape != like[name].shape:
                raise WeightsError(f"{self}: {name}: expected {like[name].shape}, found {x.shape}")
        return _put_each((((name,), x) for name, x in params.items()), like)


def _check_gpt2_options(options: dict[str, Any], source: str) -> None:
    check_options("load", GPT2Config, FP32, options, source=source, decided=SIZES)


# The source of each model_type in a config.json, with the name of the architecture.
HUGGING_FACE: dict[str, tuple[type[Source], str]] = {
    "gpt2": (HuggingFaceGPT2, "GPT2Config"),
    "llama": (HuggingFaceLlama, "Llama3Config"),
}


def find(path: str | os.PathLike, *, step: int | None = None) -> Source:
    """Return the model at a path; no array is read.

    Args:
        step: step of a run's checkpoint; None for the newest.

    Raises:
        WeightsError: the path holds no model, or there is no checkpoint of this step.
        DamagedError: the metadata of the checkpoint is damaged. The message names older
            checkpoints.
    """
    path = Path(path)
    try:
        folder = checkpoint_folder(path)
        if folder is not None:
            return _checkpoint(_step_folder(folder, path, step))
        if step is not None:
            raise WeightsError(
                f"{shown(path)}: expected a run's folder for step={step}; leave out the step"
            )
        return _find_model(path)
    except OSError as error:
        raise WeightsError(f"{shown(path)}: cannot be read: {reason(error)}") from error
    except ValueError as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{shown(path)}: {reason(error)}") from error  # a null byte in the name


def checkpoint_folder(path: Path) -> Path | None:
    """Return the folder of the checkpoints if `path` is a run or this folder itself, else None."""
    if (path / CHECKPOINTS).is_dir():
        return path / CHECKPOINTS
    steps = checkpoint_files.steps(path) if path.is_dir() else []
    if any((path / str(n) / checkpoint_files.METADATA).exists() for n in steps):
        return path
    if (path / "log.jsonl").is_file():
        raise WeightsError(f"{shown(path)}: expected a checkpoint, found a run without one")
    return None


def _step_folder(folder: Path, path: Path, step: int | None) -> Path:
    steps = checkpoint_files.steps(folder)
    if not steps:
        raise WeightsError(f"{shown(path)}: expected a checkpoint, found a run without one")
    if step is not None and step not in steps:
        raise WeightsError(f"{shown(path)}: expected one of the steps {steps}, found step={step!r}")
    return folder / str(steps[0] if step is None else step)


def _find_model(path: Path) -> Source:
    if not path.exists():
        raise WeightsError(f"{shown(path)}: {EXPECTED}; the path does not exist")
    if path.is_dir() and (path / checkpoint_files.METADATA).exists():
        return _checkpoint(path)
    if path.is_file() and path.suffix == ".bin":
        tokenizer = _tokenizer_of(llmc.read_config(path).vocab_size)
        return Llmc(path, "GPT2Config", tokenizer)
    if path.is_file() and path.suffix == ".pt":
        tensors = modded_nanogpt.read_tensors(path)
        real = (
            modded_nanogpt.config_of(tensors, precision=FP32).vocab_size >= VOCABULARIES["gpt2"][0]
        )
        return ModdedNanoGPT(path, "SpeedrunConfig", "gpt2" if real else None, tensors)
    config = (path if path.is_dir() else path.parent) / HF_CONFIG
    if config.is_file() and (path.is_dir() or path.suffix == ".safetensors"):
        return _hugging_face(path, config)
    found = "a folder without these files" if path.is_dir() else "another file"
    raise WeightsError(f"{shown(path)}: {EXPECTED}; found {found}")


def _checkpoint(folder: Path) -> Checkpoint:
    try:
        meta = checkpoint_files.read_meta(folder)
    except DamagedError as error:
        raise DamagedError(f"{error}{other_steps(folder)}") from error
    config = meta.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("model"), str):
        raise CheckpointError(f"{shown(folder)}: expected the config of a run, found none")
    data = meta.get("data") or {}
    tokenizer = (data.get("dataset") or {}).get("tokenizer")
    return Checkpoint(folder, config["model"], tokenizer if tokenizer in TOKENIZERS else None)


def other_steps(folder: Path) -> str:
    """Return the end of a message on a damaged checkpoint: steps of other checkpoints."""
    if not folder.name.isdecimal():
        return ""
    others = [step for step in checkpoint_files.steps(folder.parent) if step != int(folder.name)]
    if not others:
        return "; there is no other checkpoint"
    return f"; use another checkpoint: step={others[0]} (--step {others[0]}), of {others}"


def _hugging_face(path: Path, config: Path) -> Source:
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
        kind = found.get("model_type", "gpt2")
    except (ValueError, RecursionError, AttributeError):
        kind = "gpt2"  # For invalid JSON, reading as a GPT-2 raises an error with the reason.
    if not isinstance(kind, str) or kind not in HUGGING_FACE:
        raise WeightsError(
            f"{shown(config)}: expected model_type to be {' or '.join(map(repr, HUGGING_FACE))}, "
            f"found {reprlib.repr(kind)}: gptjax does not compute this model. Use a model of one "
            "of these types"
        )
    reader, architecture = HUGGING_FACE[kind]
    source = reader(path, architecture, None)
    tokenizer = _tokenizer_of(source.config().vocab_size)
    if tokenizer is None and is_byte_tokenizer(config.with_name("tokenizer.json")):
        tokenizer = "byte"
    return dataclasses.replace(source, tokenizer=tokenizer)


def _tokenizer_of(vocab_size: int) -> str | None:
    """Return the tokenizer of a file: "gpt2" for a vocabulary of 50,257."""
    return "gpt2" if vocab_size == VOCABULARIES["gpt2"][0] else None


def _config_class(source: Source) -> type[ModelConfig]:
    try:
        return config_class(source.architecture)
    except LookupError as error:
        raise WeightsError(f"{source}: {error.args[0]}") from error


def _names(kind: type[ModelConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _put_each(tensors: Iterable[tuple[Key, np.ndarray]], like: Mapping) -> dict:
    """Return arrays in the dtypes and shardings of `like`, with one tensor at a time on the
    host."""
    wanted = traverse_util.flatten_dict(dict(like))
    return traverse_util.unflatten_dict({key: put(x, wanted[key]) for key, x in tensors})


def put(tensor: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a global array of the complete `tensor`, of which every process has a copy."""
    # Copies: the tensor may be a view of a file that is about to be closed.
    return jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: np.array(tensor[index], like.dtype)
    )


def on_default_device(params: Mapping) -> dict:
    """Return `jax.ShapeDtypeStruct`s with JAX's default device as the sharding."""
    sharding = jnp.zeros(()).sharding
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), dict(params)
    )
