"""Conversion between models and arrays, for every architecture and file format."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from gptjax.models.base import Model, ModelConfig, abstract_params, graph, params_of
from gptjax.precision import Precision
from gptjax.weights.errors import WeightsError

FP32 = Precision("fp32")

Key = tuple[str | int, ...]
"""Path of a parameter in the nested dict: ("blocks", 0, "attn", "c_attn", "kernel")."""


def host_arrays(model: Model) -> dict[Key, np.ndarray]:
    """Return every parameter, copied to the host."""
    params = traverse_util.flatten_dict(params_of(model))
    return {key: np.asarray(leaf) for key, leaf in params.items()}


def check_model(function: str, model: Any, expected: type[Model]) -> None:
    """Raise WeightsError if a model is not of a class, or is of a subclass.

    A subclass may compute something else than the files describe.

    Args:
        function: the writer's name, the first word of the error message.
    """
    if type(model) is not expected:
        name = expected.__name__
        raise WeightsError(
            f"{function}: expected a {name}, found a {type(model).__name__}, which the file would "
            f"not describe. Copy the parameters to a {name} with "
            "gptjax.weights.model_from_params, or see the formats of python -m gptjax.export"
        )


def model_from_tensors(config: ModelConfig, tensors: Iterable[tuple[Key, np.ndarray]]) -> Model:
    """Return a model with the parameters that an iterator reads from a file.

    No other weights are allocated, and only one tensor at a time is on the host.
    """
    dtype = config.precision.param_dtype
    # Copies: the arrays may be views of a file that is about to be closed.
    params = {key: jnp.array(tensor, dtype=dtype) for key, tensor in tensors}
    return model_from_params(config, traverse_util.unflatten_dict(params))


def model_from_params(config: ModelConfig, params: Mapping) -> Model:
    """Return a model with the parameters in a nested dict, such as the parameters of a checkpoint.

    Args:
        config: shape and precision of the model.
        params: nested dict of arrays, such as {"wte": …, "blocks": {0: {"ln_1": …, …}, …}, …}, or
            an `nnx.State`.

    Raises:
        WeightsError: keys, shapes or dtypes differ from the model's. Block indices
            must be integers: Orbax restores integers as strings if it is given no target, and
            strings sort as 0, 1, 10, 11, 2.
    """
    abstract = abstract_params(config)
    tree = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    if not isinstance(tree, Mapping):
        raise WeightsError(
            "model_from_params: expected a dict or nnx.State of arrays, "
            f"found {type(params).__name__}"
        )
    _check_indices(abstract, tree)
    expected, found = traverse_util.flatten_dict(abstract), dict(_flatten(tree))
    missing, unexpected = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing or unexpected:
        raise WeightsError(
            f"model_from_params: expected the {len(expected)} parameters of this config, missing "
            f"{few(map(_dotted, missing))}, unexpected {few(map(_dotted, unexpected))}. "
            "Check that the config is the one of these parameters"
        )
    for key, like in expected.items():
        _check_array(key, found[key], like)
    # Copies of NumPy arrays: JAX may share their memory on a CPU.
    leaves = {
        key: jnp.array(found[key]) if isinstance(found[key], np.ndarray) else found[key]
        for key in expected
    }
    return nnx.merge(graph(config), traverse_util.unflatten_dict(leaves))


def _check_indices(expected: Mapping, found: Mapping, where: str = "params") -> None:
    """Raise WeightsError for a list of modules that is not a dict with integers as keys."""
    for key in expected.keys() & found.keys():
        if not isinstance(expected[key], Mapping):
            continue
        name, blocks = f"{where}[{key!r}]", found[key]
        indexed = all(isinstance(index, int) for index in expected[key])
        if indexed and not isinstance(blocks, Mapping):
            raise WeightsError(
                f"model_from_params: expected {name} to be a dict, found {type(blocks).__name__}"
            )
        if indexed and any(isinstance(index, str) for index in blocks):
            raise WeightsError(
                f"model_from_params: expected the integers 0, 1, … as keys of {name}, found "
                f"{few(blocks)}. Orbax restores integers as strings if it is given no target, and "
                f"strings sort as 0, 1, 10, 11, 2. Convert them: {name} = "
                f"{{int(i): block for i, block in {name}.items()}}"
            )
        if isinstance(blocks, Mapping):
            _check_indices(expected[key], blocks, name)


def _flatten(tree: Mapping, prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    for key, value in tree.items():
        # An empty dict is yielded as a leaf; no model has such a leaf.
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def _check_array(key: Key, found: Any, like: jax.ShapeDtypeStruct) -> None:
    expected = f"an array of shape {like.shape} and dtype {like.dtype}"
    if not isinstance(found, (jax.Array, np.ndarray)):
        raise WeightsError(
            f"model_from_params: expected {_dotted(key)} to be {expected}, "
            f"found {type(found).__name__}"
        )
    if found.shape != like.shape or found.dtype != like.dtype:
        raise WeightsError(
            f"model_from_params: expected {_dotted(key)} to be {expected}, found {found.shape} "
            f"{found.dtype}. Check the config, or convert the array"
        )


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))


def few(names: Iterable) -> str:
    """Return the first six names, sorted and quoted, and the number of further names."""
    names = sorted(map(str, names))
    first = [name[:100] for name in names[:6]]
    return f"{first}{f' and {len(names) - 6} more' if len(names) > 6 else ''}"


def check_options(
    function: str,
    config_class: type[ModelConfig],
    precision: Any,
    options: dict[str, Any],
    *,
    source: str,
    decided: Iterable[str],
) -> None:
    """Check the options of a loader before a file is read, so that errors do not blame the file.

    Args:
        function: the loader's name, the first word of the error message.
        config_class: the architecture's config; `options` are fields of this class.
        source: the file that determines the sizes.
        decided: fields of config_class that the file determines.

    Raises:
        ValueError: precision is not a Precision; an option that the file determines; an unknown
            option; a wrong value.
    """
    if not isinstance(precision, Precision):
        raise ValueError(
            f"{function}: expected precision to be a gptjax.Precision, such as "
            f"gptjax.Precision('bf16'), got {precision!r}"
        )
    fields = {field.name for field in dataclasses.fields(config_class)} - {"precision"}
    decided = {*decided, "padded_vocab_size"}
    if wrong := sorted(decided & options.keys()):
        raise ValueError(f"{function}: {source} decides {wrong}; leave them out")
    if wrong := sorted(options.keys() - fields):
        choices = sorted(fields - decided)
        raise ValueError(f"{function}: unknown options {wrong}; choose from {choices}")
    config_class(precision=precision, **options)
