"""Models on disk: detection of the format of a path, and reading of config and parameters.

A path is a run's folder, a folder of checkpoints, the folder of one checkpoint, a Hugging Face
folder or .safetensors file, an llm.c .bin file, or a .pt file of modded-nanogpt. `find` reads no
array.
"""

import abc
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from gptjax.config import ConfigError, model_from_json
from gptjax.data.tokenizers import TOKENIZERS, VOCABULARIES
from gptjax.models.base import ModelConfig, abstract_params
from gptjax.models.registry import config_class
from gptjax.precision import Precision
from gptjax.weights import checkpoint_files, hf, llmc, modded_nanogpt
from gptjax.weights.bpe_files import is_byte_tokenizer
from gptjax.weights.errors import CheckpointError, DamagedError, WeightsError
from gptjax.weights.files import reason, shown
from gptjax.weights.params import FP32, Key

CHECKPOINTS = "checkpoints"
FORMATS = {".bin": llmc, ".pt": modded_nanogpt}
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
    def read(self, config: ModelConfig, like: Mapping | None = None) -> dict:
        """Return the parameters as a nested dict of arrays.

        Args:
            config: from `config`.
            like: nested dict of `jax.ShapeDtypeStruct`s with shardings, in the shapes of `config`.
                None: on the default device.

        Raises:
            WeightsError: the parameters are damaged or do not fit.
        """

    @abc.abstractmethod
    def identity(self) -> str:
        """Return a text that differs between models: lengths of files, or a checksum."""

    def __str__(self) -> str:
        return shown(self.path)


@dataclasses.dataclass(frozen=True)
class File(Source):
    """A file or folder of another program.

    Attributes:
        format: module with `read_config(path, *, precision, **options)` and
            `tensors_of(path, config)`, which yields keys and host arrays.
    """

    format: Any

    def config(self, *, precision=None, kind=None, **options) -> ModelConfig:
        return self.format.read_config(self.path, precision=precision or FP32, **options)

    def read(self, config, like=None) -> dict:
        tensors = self.format.tensors_of(self.path, config)
        shapes = dict(like or on_default_device(config))
        wanted: dict[Key, Any] = traverse_util.flatten_dict(shapes)
        return traverse_util.unflatten_dict({key: _put(x, wanted[key]) for key, x in tensors})

    def identity(self) -> str:
        paths = [self.path] if self.path.is_file() else sorted(self.path.iterdir())
        return ", ".join(f"{path.name} {path.stat().st_size}" for path in paths)


@dataclasses.dataclass(frozen=True)
class Checkpoint(Source):
    """A checkpoint of a run.

    Attributes:
        meta: from `checkpoint_files.read_meta`.
    """

    meta: dict[str, Any] = dataclasses.field(repr=False, compare=False)

    def config(self, *, precision=None, kind=None, **options) -> ModelConfig:
        try:
            kind = kind or config_class(self.architecture)
        except LookupError as error:
            raise WeightsError(f"{self}: {error.args[0]}") from error
        if wrong := sorted(options.keys() - kind.operational):
            raise ValueError(
                f"{self}: unknown options {wrong}, or the checkpoint decides them; choose from "
                f"{sorted(kind.operational)}"
            )
        fields = dataclasses.fields(kind)
        changes = {f.name: f.default for f in fields if f.name in kind.operational} | options
        changes |= {} if precision is None else {"precision": precision}
        try:
            flat = last_stage(self.path, self.meta)
            return model_from_json(flat, kind, **changes)
        except ConfigError as error:
            raise WeightsError(f"{self}: {error}") from error

    def read(self, config, like=None) -> dict:
        return checkpoint_files.read_params(self.path, like or on_default_device(config))

    def identity(self) -> str:
        return f"step {self.meta['step']}, {self.meta['checksum']}"


def last_stage(folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Return a run's config with the model of the last stage that the checkpoint reached.

    Args:
        folder: folder of the checkpoint, for an error.
        meta: metadata of the checkpoint.
    """
    if (number := (meta.get("data") or {}).get("stage")) is None:
        return meta["config"]
    try:
        model = meta["config"]["stages"][number - 1].get("model", {})
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{shown(folder)}: expected stage {number} in its config") from error
    return meta["config"] | {f"model.{name}": value for name, value in model.items()}


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
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.suffix in FORMATS:
        return _file(path, FORMATS[path.suffix])
    if (folder / hf.CONFIG).is_file() and (path.is_dir() or path.suffix == ".safetensors"):
        return _file(path, hf)
    found = "a folder without these files" if path.is_dir() else "another file"
    raise WeightsError(f"{shown(path)}: {EXPECTED}; found {found}")


def _file(path: Path, format: Any) -> File:
    config = format.read_config(path, precision=FP32)
    tokenizer = None
    if config.vocab_size == (gpt2 := VOCABULARIES["gpt2"][0]):
        tokenizer = "gpt2"
    elif format is modded_nanogpt:
        tokenizer = "gpt2" if config.vocab_size > gpt2 else None  # its vocabulary has padding
    elif format is hf:
        folder = path if path.is_dir() else path.parent
        tokenizer = "byte" if is_byte_tokenizer(folder / "tokenizer.json") else None
    return File(path, type(config).__name__, tokenizer, format)


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
    known = tokenizer if tokenizer in TOKENIZERS else None
    return Checkpoint(folder, config["model"], known, meta)


def other_steps(folder: Path) -> str:
    """Return the end of a message on a damaged checkpoint: steps of other checkpoints."""
    if not folder.name.isdecimal():
        return ""
    others = [step for step in checkpoint_files.steps(folder.parent) if step != int(folder.name)]
    if not others:
        return "; there is no other checkpoint"
    return f"; use another checkpoint: step={others[0]} (--step {others[0]}), of {others}"


def _put(tensor: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a global array of the complete `tensor`, of which every process has a copy."""
    # Copies: the tensor may be a view of a file that is about to be closed.
    return jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: np.array(tensor[index], like.dtype)
    )


def on_default_device(config: ModelConfig) -> dict:
    """Return the parameters as `jax.ShapeDtypeStruct`s on JAX's default device."""
    sharding = jnp.zeros(()).sharding
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        dict(abstract_params(config)),
    )
