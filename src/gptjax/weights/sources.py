"""Models on disk: detection of the format of a path, and reading of config and parameters.

A path is a run's folder, a folder of checkpoints, the folder of one checkpoint, a Hugging Face
folder or .safetensors file, or an llm.c .bin file. `find` reads no array.
"""

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
from gptjax.data.tokenizers import TOKENIZER_JSON, TOKENIZERS, is_name, name_in
from gptjax.models.base import ModelConfig, abstract_params
from gptjax.models.registry import config_class
from gptjax.precision import Precision
from gptjax.weights import checkpoint_files, hf, llmc
from gptjax.weights.errors import WeightsError
from gptjax.weights.files import reading
from gptjax.weights.params import Key

CHECKPOINTS = "checkpoints"
# Tokenizers of files by vocabulary size; 50,304 is GPT-2's vocabulary with padding.
_TOKENIZERS = {kind.vocab_size: name for name, kind in TOKENIZERS.items()} | {50304: "gpt2"}


@dataclasses.dataclass(frozen=True)
class Source:
    """A model on disk.

    Attributes:
        path: the folder or file that is read.
        stored: the model's config, with the defaults of the fields that are `operational`: the
            source's values may need another GPU.
        tokenizer: name of the tokenizer; None if the source does not determine it.
        tokenizer_at: the tokenizer for `get_tokenizer`: "gpt2", "byte", or the folder with its
            tokenizer.json; None if the source has none of them.
        format: `hf` or `llmc`: a module with `read_config(path)` and `tensors_of(path, config)`, an
            iterator of keys and host arrays. Their errors have no path. None for a checkpoint.
        meta: metadata of a checkpoint, from `checkpoint_files.read_meta`.
    """

    path: Path
    stored: ModelConfig
    tokenizer: str | None
    format: Any = None
    meta: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    tokenizer_at: str | None = None

    @property
    def architecture(self) -> str:
        """Name of the model's config class."""
        return type(self.stored).__name__

    def config(self, *, precision: Any = None, **options: Any) -> ModelConfig:
        """Return the model's config.

        Args:
            precision: a `Precision`. None: the source's precision, or fp32.
            options: fields of the config that do not change what the model computes, such as
                attention.

        Raises:
            ValueError: a wrong option.
        """
        if wrong := sorted(options.keys() - self.stored.operational):
            raise ValueError(
                f"unknown options {wrong}, or the file decides them; choose from "
                f"{sorted(self.stored.operational)}"
            )
        if precision is not None:
            if not isinstance(precision, Precision):
                raise ValueError(
                    "expected precision to be a gptjax.Precision, such as "
                    f"gptjax.Precision('bf16'), got {precision!r}"
                )
            options["precision"] = precision
        return dataclasses.replace(self.stored, **options)

    def read(self, config: ModelConfig, like: Mapping | None = None) -> dict:
        """Return the parameters as a nested dict of arrays.

        Args:
            config: from `config`.
            like: nested dict of `jax.ShapeDtypeStruct`s with shardings, in the shapes of `config`.
                None: on the default device.

        Raises:
            WeightsError: the parameters are damaged or do not fit.
        """
        if self.format is None:
            return checkpoint_files.read_params(self.path, like or on_default_device(config))
        with reading(self.path):
            tensors = self.format.tensors_of(self.path, config)
            shapes = dict(like or on_default_device(config))
            wanted: dict[Key, Any] = traverse_util.flatten_dict(shapes)
            return traverse_util.unflatten_dict({key: _put(x, wanted[key]) for key, x in tensors})

    def identity(self) -> str:
        """Return a text that differs between models: lengths of files, or a checksum."""
        if self.format is None:
            return f"step {self.meta['step']}, {self.meta['checksum']}"
        paths = [self.path] if self.path.is_file() else sorted(self.path.iterdir())
        return ", ".join(f"{path.name} {path.stat().st_size}" for path in paths)

    def __str__(self) -> str:
        return str(self.path)


def last_stage(meta: dict[str, Any]) -> dict[str, Any]:
    """Return a run's config with the model of the last stage that a checkpoint reached."""
    config, number = meta["config"], (meta.get("data") or {}).get("stage")
    model = {} if number is None else config["stages"][number - 1].get("model", {})
    return config | {f"model.{name}": value for name, value in model.items()}


def find(path: str | os.PathLike, *, step: int | None = None) -> Source:
    """Return the model at a path; no array is read.

    Args:
        step: step of a run's checkpoint; None for the newest.

    Raises:
        WeightsError: the path holds no model, or there is no checkpoint of this step.
        DamagedError: the metadata of the checkpoint is damaged.
    """
    path = Path(path)
    with reading(path):
        if (path / checkpoint_files.METADATA).exists() and step is None:
            return _checkpoint(path)
        folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
        steps = checkpoint_files.steps(folder) if folder.is_dir() else []
        if any((folder / str(n) / checkpoint_files.METADATA).exists() for n in steps):
            if step is not None and step not in steps:
                raise WeightsError(f"{path}: expected one of the steps {steps}, found step={step}")
            return _checkpoint(folder / str(steps[0] if step is None else step))
        if folder != path or (path / "log.jsonl").is_file():
            raise WeightsError(f"{path}: expected a checkpoint, found a run without one")
        if step is not None:
            raise WeightsError(f"{path}: expected a run for step={step}; leave out the step")
        source = file_source(path, _format(path))
        folder = path if path.is_dir() else path.parent
        if source.format is hf and (name := name_in(folder)) is not None:
            at = name if name in TOKENIZERS else str(folder)
            source = dataclasses.replace(source, tokenizer=name, tokenizer_at=at)
        return source


def _format(path: Path) -> Any:
    """Return the module of a file's format."""
    if path.is_file() and path.suffix == ".bin":
        return llmc
    folder = path if path.is_dir() else path.parent
    if (folder / hf.CONFIG).is_file() and (path.is_dir() or path.suffix == ".safetensors"):
        return hf
    raise WeightsError(
        f"{path}: expected a run's folder, the folder of a checkpoint, a Hugging Face folder with "
        "config.json, or an llm.c .bin file"
        + ("" if path.exists() else "; the path does not exist")
    )


def file_source(path: Path, format: Any) -> Source:
    """Return the model in a file or folder. Raise WeightsError if it is not of this format."""
    with reading(path):
        stored = format.read_config(path)
    tokenizer = _TOKENIZERS.get(stored.vocab_size)
    return Source(path, stored, tokenizer, format, tokenizer_at=tokenizer)


def _checkpoint(folder: Path) -> Source:
    meta = checkpoint_files.read_meta(folder)
    try:
        config = last_stage(meta)
        kind = config_class(config["model"])
        fields = [field for field in dataclasses.fields(kind) if field.name in kind.operational]
        defaults = {field.name: field.default for field in fields}
        stored = model_from_json(config, kind, **defaults)
    except (LookupError, ConfigError) as error:
        raise WeightsError(f"{folder}: {error.args[0]}") from error
    tokenizer = ((meta.get("data") or {}).get("dataset") or {}).get("tokenizer")
    if not is_name(tokenizer):
        return Source(folder, stored, None, meta=meta)
    run = folder.absolute().parents[1]  # RUN/checkpoints/STEP
    own = str(run) if (run / TOKENIZER_JSON).exists() else None
    at = tokenizer if tokenizer in TOKENIZERS else own
    return Source(folder, stored, tokenizer, meta=meta, tokenizer_at=at)


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
