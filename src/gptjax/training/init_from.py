"""Start a run from the parameters of another model: `--init-from`.

The optimizer state and the position in the data are new. A run that has a checkpoint resumes from
the checkpoint and does not read the other model again.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from gptjax import processes
from gptjax.config import Config, ConfigError, model_from_json
from gptjax.data import Dataset
from gptjax.fields import flag
from gptjax.models.base import ModelConfig, abstract_params
from gptjax.parallel import Parallel
from gptjax.training.resume import Resume
from gptjax.training.step import TrainState, init_state
from gptjax.weights import sources
from gptjax.weights.sources import Source


def resolve(config: Config, start: Resume | None = None) -> tuple[Config, Source | None]:
    """Return the config with the shape of the model at `init_from`, and the source of this model.

    If the run has a checkpoint, the config has the checkpoint's shape, and the second result is
    None.

    Args:
        start: the run's own checkpoint, if there is one; None if not.

    Raises:
        ConfigError: the config sets another shape, or a run with this shape is not possible.
        WeightsError: the path holds no model.
        ProcessError: the path does not hold the same model for all processes.
    """
    if config.init_from is None:
        return config, None
    kind = type(config.model)
    if start is not None and start.step is not None:
        try:
            own = model_from_json(sources.last_stage(start.meta), kind)
        except ConfigError:  # another architecture, which `Resume.check` reports
            return config, None
        return _with_model(config, own), None
    source = sources.find(config.init_from)
    if source.architecture != kind.__name__:
        raise ConfigError(
            f"--init-from {source} has a model of {source.architecture}, and the config has a "
            f"{kind.__name__}; choose a config of {source.architecture}"
        )
    processes.check_alike({f"--init-from {source}": source.identity()})
    model = source.config()
    resolved = _with_model(config, model)
    _refuse_conflicts(source, model, resolved.model)
    return resolved, source


def _shape(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that a model on disk determines."""
    names = {field.name for field in dataclasses.fields(model)} - model.operational - model.of_run
    return {name: getattr(model, name) for name in names - {"padded_vocab_size"}}


def _with_model(config: Config, found: ModelConfig) -> Config:
    """Return the config with the shape of `found`. Values other than the defaults are kept."""
    default, own = _shape(type(config.model)()), _shape(config.model)
    shape = _shape(found) | {name: x for name, x in own.items() if x != default[name]}
    if shape["vocab_size"] != config.model.vocab_size:
        shape["padded_vocab_size"] = found.padded_vocab_size
    try:
        model = dataclasses.replace(config.model, **shape)
        return dataclasses.replace(config, model=model)
    except ValueError as error:
        raise ConfigError(f"with the model at --init-from: {error}") from error


def _refuse_conflicts(source: Source, found: ModelConfig, model: ModelConfig) -> None:
    there, here = _shape(found), _shape(model)
    cropped = {"block_size"} if here["block_size"] < there["block_size"] else set()
    lines = [
        f"  {flag(f'model.{name}')}: {there[name]} there, {here[name]} in the config"
        for name in sorted(there.keys() - cropped)
        if there[name] != here[name]
    ]
    if lines:
        raise ConfigError(
            f"--init-from {source} has another model:\n" + "\n".join(lines) + "\n"
            "Use the values of that model; only --model.block-size may be smaller."
        )


def check_tokenizer(source: Source, dataset: Dataset) -> None:
    """Raise ConfigError if the model was trained on ids of another tokenizer."""
    if source.tokenizer not in (None, dataset.tokenizer):
        raise ConfigError(
            f"--init-from {source} has the tokenizer {source.tokenizer}, and {dataset.path} has "
            f"{dataset.tokenizer}; prepare the data with --tokenizer "
            f"{source.tokenizer_at or source.tokenizer}"
        )


def first_state(
    config: Config, tx: optax.GradientTransformation, parallel: Parallel, source: Source | None
) -> TrainState:
    """Return the state before the first step, with the parameters of `source` if there is one.

    Raises:
        WeightsError: the parameters are damaged.
    """
    params = None if source is None else read_params(config.model, parallel, source)
    return init_state(config.model, tx, config.seed, parallel, params)


def read_params(model: ModelConfig, parallel: Parallel, source: Source) -> PyTree:
    """Return the parameters of `source`, in the shapes of `model`; each is sharded before the next
    is read."""
    found = source.config(precision=model.precision)
    params = source.read(found, parallel.with_shardings(abstract_params(found)))
    return jax.tree.map(_fit, params, parallel.with_shardings(abstract_params(model)))


def _fit(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Crop positions; crop or add rows of padding, which are zeros."""
    if x.shape == like.shape:
        return x

    def resize(x):
        x = x[tuple(map(slice, like.shape))]
        return jnp.pad(x, [(0, n - m) for n, m in zip(like.shape, x.shape, strict=True)])

    return jax.jit(resize, out_shardings=like.sharding)(x)
