"""What both weight formats share: the tensors of a GPT-2 in order, a model made from arrays, and atomic files."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from gptjax.models.gpt2 import GPT2, GPT2Config
from gptjax.precision import Precision

FP32 = Precision("fp32")

Key = tuple[str | int, ...]
"""Where a parameter is in `nnx.to_pure_dict`: ("blocks", 0, "attn", "c_attn", "kernel")."""

# Our place in a block and Hugging Face's name in it, in the order in which llm.c writes them.
BLOCK_TENSORS: tuple[tuple[Key, str], ...] = (
    (("ln_1", "scale"), "ln_1.weight"),
    (("ln_1", "bias"), "ln_1.bias"),
    (("attn", "c_attn", "kernel"), "attn.c_attn.weight"),
    (("attn", "c_attn", "bias"), "attn.c_attn.bias"),
    (("attn", "c_proj", "kernel"), "attn.c_proj.weight"),
    (("attn", "c_proj", "bias"), "attn.c_proj.bias"),
    (("ln_2", "scale"), "ln_2.weight"),
    (("ln_2", "bias"), "ln_2.bias"),
    (("mlp", "c_fc", "kernel"), "mlp.c_fc.weight"),
    (("mlp", "c_fc", "bias"), "mlp.c_fc.bias"),
    (("mlp", "c_proj", "kernel"), "mlp.c_proj.weight"),
    (("mlp", "c_proj", "bias"), "mlp.c_proj.bias"),
)


def shapes(config: GPT2Config) -> dict[Key, tuple[int, ...]]:
    """The shape of every parameter."""
    return {key: leaf.shape for key, leaf in _flat(_abstract(config)[1]).items()}


def arrays(model: GPT2) -> dict[Key, np.ndarray]:
    """Every parameter on the host, gathered from wherever it is."""
    return {key: np.asarray(leaf) for key, leaf in _flat(nnx.split(model, nnx.Param)[1]).items()}


def build(config: GPT2Config, tensors: Iterable[tuple[Key, np.ndarray]]) -> GPT2:
    """A model of these parameters. No other weights are made on the way, and one tensor at a time is on the host."""
    dtype = config.precision.param_dtype
    # Copies: the arrays may be views of a file that is about to be closed.
    params = {key: jnp.array(tensor, dtype=dtype) for key, tensor in tensors}
    return nnx.merge(_abstract(config)[0], traverse_util.unflatten_dict(params))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write that takes the name `path` when all of it is on disk; until then `path` stays as it was."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _abstract(config: GPT2Config):
    return nnx.split(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))), nnx.Param)


def _flat(state) -> dict:
    return traverse_util.flatten_dict(nnx.to_pure_dict(state))
