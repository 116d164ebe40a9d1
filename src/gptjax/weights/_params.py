"""Shared by both formats: the tensors of a GPT-2 in order, models from arrays, atomic files."""

import contextlib
import dataclasses
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from safetensors import SafetensorError

from gptjax.models.gpt2 import GPT2, GPT2Config
from gptjax.precision import Precision
from gptjax.terminal import printable

FP32 = Precision("fp32")
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")

Key = tuple[str | int, ...]
"""Path of a parameter in `nnx.to_pure_dict`: ("blocks", 0, "attn", "c_attn", "kernel")."""

# Key in a block, name in Hugging Face's files, and shape in multiples of n_embd, in llm.c's order.
BLOCK_TENSORS: tuple[tuple[Key, str, tuple[int, ...]], ...] = (
    (("ln_1", "scale"), "ln_1.weight", (1,)),
    (("ln_1", "bias"), "ln_1.bias", (1,)),
    (("attn", "c_attn", "kernel"), "attn.c_attn.weight", (1, 3)),
    (("attn", "c_attn", "bias"), "attn.c_attn.bias", (3,)),
    (("attn", "c_proj", "kernel"), "attn.c_proj.weight", (1, 1)),
    (("attn", "c_proj", "bias"), "attn.c_proj.bias", (1,)),
    (("ln_2", "scale"), "ln_2.weight", (1,)),
    (("ln_2", "bias"), "ln_2.bias", (1,)),
    (("mlp", "c_fc", "kernel"), "mlp.c_fc.weight", (1, 4)),
    (("mlp", "c_fc", "bias"), "mlp.c_fc.bias", (4,)),
    (("mlp", "c_proj", "kernel"), "mlp.c_proj.weight", (4, 1)),
    (("mlp", "c_proj", "bias"), "mlp.c_proj.bias", (1,)),
)


class WeightsError(ValueError):
    """A path, file or tree of arrays that is refused.

    The message says what was expected, what was found and what to do.
    """


@dataclasses.dataclass(frozen=True)
class Kind:
    """A tensor of the model, or the same tensor of every block.

    Attributes:
        key: path of the parameter; for blocks, path in the block.
        name: in Hugging Face's files; for blocks, name in the block.
        shape: of one tensor.
        layers: number of blocks; None for a tensor outside the blocks.
    """

    key: Key
    name: str
    shape: tuple[int, ...]
    layers: int | None = None

    @property
    def size(self) -> int:
        """Elements of one tensor."""
        return math.prod(self.shape)

    def each(self) -> Iterator[tuple[Key, str]]:
        """Key and name of every tensor of the kind."""
        if self.layers is None:
            yield self.key, self.name
        for layer in range(self.layers or 0):
            yield ("blocks", layer, *self.key), f"h.{layer}.{self.name}"


def kinds(config: GPT2Config) -> list[Kind]:
    """Return the kinds of tensors in llm.c's order.

    The list's length does not depend on the sizes, and nothing of these sizes is allocated.
    """
    c = config.n_embd
    return [
        Kind(("wte",), "wte.weight", (config.padded_vocab_size, c)),
        Kind(("wpe",), "wpe.weight", (config.block_size, c)),
        *(
            Kind(key, name, tuple(n * c for n in shape), config.n_layer)
            for key, name, shape in BLOCK_TENSORS
        ),
        Kind(("ln_f", "scale"), "ln_f.weight", (c,)),
        Kind(("ln_f", "bias"), "ln_f.bias", (c,)),
    ]


def arrays(model: GPT2) -> dict[Key, np.ndarray]:
    """Return every parameter, copied to the host from its devices."""
    params = nnx.to_pure_dict(nnx.split(model, nnx.Param)[1])
    return {key: np.asarray(leaf) for key, leaf in traverse_util.flatten_dict(params).items()}


def build(config: GPT2Config, tensors: Iterable[tuple[Key, np.ndarray]]) -> GPT2:
    """Return a model of these parameters.

    No other weights are allocated, and one tensor at a time is on the host.
    """
    dtype = config.precision.param_dtype
    # Copies: the arrays may be views of a file that is about to be closed.
    params = {key: jnp.array(tensor, dtype=dtype) for key, tensor in tensors}
    return model_from_params(config, traverse_util.unflatten_dict(params))


def model_from_params(config: GPT2Config, params: Mapping) -> GPT2:
    """Return a model of the parameters in a nested dict, such as a checkpoint's.

    Args:
        config: shape and precision of the model.
        params: {"wte": …, "wpe": …, "blocks": {0: {"ln_1": …, …}, …}, "ln_f": …} of arrays, or an
            `nnx.State`.

    Raises:
        WeightsError: keys, shapes or dtypes that are not exactly the model's. Block indices must be
            integers: Orbax restores them as strings where it is given no target, and strings sort
            as 0, 1, 10, 11, 2.
    """
    graphdef, abstract = nnx.split(
        nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))), nnx.Param
    )
    expected = traverse_util.flatten_dict(nnx.to_pure_dict(abstract))
    tree = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    _check_block_keys(tree)
    found = dict(_flatten(tree))
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
    return nnx.merge(graphdef, traverse_util.unflatten_dict(leaves))


def _check_block_keys(params: Any) -> None:
    if not isinstance(params, Mapping):
        raise WeightsError(
            "model_from_params: expected a dict or nnx.State of arrays, "
            f"found {type(params).__name__}"
        )
    blocks = params.get("blocks")
    if not isinstance(blocks, Mapping):
        raise WeightsError(
            "model_from_params: expected params['blocks'] to be a dict, "
            f"found {type(blocks).__name__}"
        )
    if any(isinstance(key, str) for key in blocks):
        raise WeightsError(
            "model_from_params: expected the integers 0, 1, … as keys of params['blocks'], found "
            f"{few(blocks)}. Orbax restores integers as strings where it is given no target, and "
            "strings sort as 0, 1, 10, 11, 2. Convert them: params['blocks'] = "
            "{int(i): block for i, block in params['blocks'].items()}"
        )


def _flatten(tree: Mapping, prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    for key, value in tree.items():
        # An empty dict is yielded as a leaf, which no model has.
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def _check_array(key: Key, found: Any, like: jax.ShapeDtypeStruct) -> None:
    kind = f"an array of shape {like.shape} and dtype {like.dtype}"
    if not isinstance(found, (jax.Array, np.ndarray)):
        raise WeightsError(
            f"model_from_params: expected {_dotted(key)} to be {kind}, found {type(found).__name__}"
        )
    if found.shape != like.shape or found.dtype != like.dtype:
        raise WeightsError(
            f"model_from_params: expected {_dotted(key)} to be {kind}, found {found.shape} "
            f"{found.dtype}. Check the config, or convert the array"
        )


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))


def few(names: Iterable) -> str:
    """Return the first six names, sorted and quoted, and the number of the others."""
    names = sorted(map(str, names))
    shown = [name[:100] for name in names[:6]]
    return f"{shown}{f' and {len(names) - 6} more' if len(names) > 6 else ''}"


def check_options(function: str, source: str, precision: Any, options: dict[str, Any]) -> None:
    """Refuse arguments of a loader before a file is read, so that no file is blamed for them.

    Raises:
        ValueError: precision is not a Precision; an option that the file decides; an unknown
            option; a wrong value.
    """
    if not isinstance(precision, Precision):
        raise ValueError(  # noqa: TRY004 (wrong options are ValueErrors in this package)
            f"{function}: expected precision to be a gptjax.Precision, such as "
            f"gptjax.Precision('bf16'), got {precision!r}"
        )
    fields = {field.name for field in dataclasses.fields(GPT2Config)} - {"precision"}
    decided = {*SIZES, "padded_vocab_size"}
    if wrong := sorted(decided & options.keys()):
        raise ValueError(f"{function}: {source} decides {wrong}; leave them out")
    if wrong := sorted(options.keys() - fields):
        choices = sorted(fields - decided)
        raise ValueError(f"{function}: unknown options {wrong}; choose from {choices}")
    GPT2Config(precision=precision, **options)


def file_size(file: Path, *, missing: str = "Check the path") -> int:
    """Return the length of a regular file, without opening it.

    Args:
        missing: what to do where it does not exist.

    Raises:
        WeightsError: it does not exist or is no regular file.
        OSError: it cannot be looked at.
    """
    try:
        status = file.stat()
    except FileNotFoundError:
        raise WeightsError(f"{shown(file)}: not there. {missing}") from None
    except ValueError as error:
        # A null byte in the name.
        raise WeightsError(f"{shown(file)}: {reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        found = _type_of(status.st_mode)
        raise WeightsError(f"{shown(file)}: expected a regular file, found {found}")
    return status.st_size


def _type_of(mode: int) -> str:
    names = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return names.get(stat.S_IFMT(mode), "a device")


def shown(path: Path) -> str:
    """Return a path for a message."""
    return printable(str(path))


def reason(error: Exception) -> str:
    """Return an exception's message without the name of a temporary file."""
    return getattr(error, "strerror", None) or printable(str(error))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write that is renamed to `path` when all of it is on disk.

    Until then `path` stays as it was.

    Raises:
        WeightsError: the folder does not exist, `path` is no regular file, or writing fails.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        if not path.parent.is_dir():
            raise WeightsError(
                f"{shown(path)}: the folder {shown(path.parent)} does not exist. Create it"
            )
        if path.exists():
            # os.replace would replace a device or a FIFO as well.
            file_size(path)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"{shown(path)}: not written: {reason(error)}. An older file stays as it was"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
