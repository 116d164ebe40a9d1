"""Conversion between models and arrays, for every architecture and file format."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from gptjax.models.base import Model, ModelConfig, abstract_params, graph, params_of
from gptjax.weights.checkpoint_files import arrays_of, differences, leaves_by_path
from gptjax.weights.errors import WeightsError

Key = tuple[str | int, ...]
"""Path of a parameter in the nested dict: ("blocks", 0, "attn", "c_attn", "kernel")."""

STORED = {"fp32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16)}
"""Types of the tensors in written files."""


def host_arrays(model: Model) -> dict[Key, np.ndarray]:
    """Return every parameter, copied to the host."""
    params = traverse_util.flatten_dict(params_of(model))
    return {key: np.asarray(leaf) for key, leaf in params.items()}


def check_writable(function: str, model: Any, dtype: str, *expected: type[Model]) -> None:
    """Check the arguments of a function that writes a model.

    Args:
        function: the writer's name, the first word of the error message.
        expected: classes of the model. A subclass may compute something else than the files
            describe.

    Raises:
        WeightsError: the model is of another class, or of a subclass.
        ValueError: an unknown type of the tensors.
    """
    if type(model) not in expected:
        name = " or ".join(kind.__name__ for kind in expected)
        raise WeightsError(
            f"{function}: expected a {name}, found a {type(model).__name__}, which the file would "
            f"not describe. Copy the parameters to a {name} with "
            "gptjax.weights.model_from_params, or see the formats of python -m gptjax.export"
        )
    if dtype not in STORED:
        raise ValueError(f"{function}: unknown dtype {dtype!r}; choose one of {[*STORED]}")


def model_from_params(config: ModelConfig, params: Mapping) -> Model:
    """Return a model with the parameters in a nested dict, such as the parameters of a checkpoint.

    Args:
        config: shape and precision of the model.
        params: nested dict of arrays, such as {"wte": …, "blocks": {0: {"ln_1": …, …}, …}, …}, or
            an `nnx.State`.

    Raises:
        WeightsError: names, shapes or dtypes differ from the model's. A block's index may be a
            string, as Orbax restores it if it is given no target.
    """
    like = abstract_params(config)
    tree = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    if text := differences(arrays_of(tree), arrays_of(like), "the argument", "the config"):
        raise WeightsError(f"model_from_params: {text}")
    found = leaves_by_path(tree)
    # Copies of NumPy arrays: JAX may share their memory on a CPU.
    leaves = [
        jnp.array(found[path]) if isinstance(found[path], np.ndarray) else found[path]
        for path in leaves_by_path(like)
    ]
    return nnx.merge(graph(config), jax.tree.unflatten(jax.tree.structure(like), leaves))
