"""Reading and verification of a checkpoint's files. Nothing in the folder is created or changed.

`gptjax.training.checkpoint` writes the files. The folder of a step contains

    meta/metadata    JSON: format, step, config, data position, digests of all arrays, checksum
    state/           Orbax's arrays: step, params, opt_state, rng, …
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import traverse_util
from jaxtyping import PyTree

from gptjax.optim import low_precision
from gptjax.weights.digests import digests, dtype_and_shape, leaves_by_path
from gptjax.weights.errors import CheckpointError, DamagedError

FORMAT = "gptjax checkpoint 2"
WITHOUT_DIGESTS = "gptjax checkpoint 1"
METADATA = Path("meta", "metadata")
STATE = "state"
PARAMS = "params"
# Lower halves of parameters whose upper halves are in PARAMS, with --optimizer.param-storage.
LOW = ("opt_state", "low")


def steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, the newest first."""
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    numbers = (int(name) for name in names if name.isdecimal())
    return sorted((number for number in numbers if str(number) in names), reverse=True)


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the metadata of a checkpoint after verifying the checksum.

    Args:
        folder: folder of the step. If its name is a number, the checkpoint must be of this step.

    Raises:
        DamagedError: the metadata cannot be read, or changed after the checkpoint was saved.
        CheckpointError: the checkpoint has another format.
    """
    check_regular(folder)
    try:
        meta = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    # JSON nested too deeply is a RecursionError, another encoding a ValueError.
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder, first_line(error)) from error
    if not isinstance(meta, dict):
        raise damaged(folder, f"its metadata is a {type(meta).__name__}, expected an object")
    if meta.get("format") == WITHOUT_DIGESTS and "digests" not in meta:
        return meta
    if meta.get("checksum") != checksum(meta):
        raise damaged(folder, "the checksum of its metadata is wrong")
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} is not a checkpoint of this program: "
            f"expected {FORMAT!r}, found {meta.get('format')!r}"
        )
    if not isinstance(step := meta.get("step"), int):
        raise damaged(folder, "its metadata has no step")
    if folder.name.isdecimal() and step != int(folder.name):
        raise damaged(folder, f"it was saved as step {step}; rename the folder to {step}")
    return meta


def check_regular(folder: Path, files: str = "**/*") -> None:
    """Raise DamagedError if a file is a FIFO, a socket or a device: Orbax would wait for it.

    Args:
        folder: folder of the step.
        files: pattern of the files to check.
    """
    for path in folder.glob(files):
        if path.exists() and not path.is_file() and not path.is_dir():
            name = path.relative_to(folder)
            found = "a FIFO, a socket or a device"
            raise damaged(folder, f"expected a regular file as {name}, found {found}")


def read_params(folder: Path, like: Mapping) -> dict:
    """Return the parameters of a checkpoint after verifying the digest of each array.

    Arrays are found by name: the order of the names has no meaning. A parameter that is stored as
    two halves is joined. No other array of the checkpoint is read.

    Args:
        folder: folder of the step.
        like: nested dict of `jax.ShapeDtypeStruct`s with the shardings of the result.

    Raises:
        DamagedError: the checkpoint cannot be read, or an array changed after it was saved.
        CheckpointError: the parameters differ in name, shape or dtype from `like`.
    """
    meta = read_meta(folder)
    keys: dict[tuple, Any] = traverse_util.flatten_dict(dict(like))
    saved = saved_arrays(meta) if "digests" in meta else _described(folder)
    halves = {key for key in keys if _is_split(key, meta, saved)}
    wanted = {(PARAMS, *key): _as(jnp.bfloat16, x, key in halves) for key, x in keys.items()}
    wanted |= {(*LOW, *key): _as(jnp.uint16, keys[key]) for key in halves}
    tree = traverse_util.unflatten_dict(wanted)
    read = (f"{PARAMS}.", f"{_dotted(*LOW)}.") if halves else f"{PARAMS}."
    saved = {path: text for path, text in saved.items() if path.startswith(read)}
    compare(folder, saved, tree, needs="its config")
    found = _restore(folder, tree)
    verify(folder, meta, found)
    by_path = leaves_by_path(found)
    params = {key: by_path[_dotted(PARAMS, *key)] for key in keys}
    params |= {key: _join(params[key], by_path[_dotted(*LOW, *key)]) for key in halves}
    return traverse_util.unflatten_dict(params)


def _is_split(key: tuple, meta: dict[str, Any], saved: dict[str, str]) -> bool:
    """Return whether a checkpoint has a parameter as two halves."""
    storage = (meta.get("config") or {}).get("optimizer.param_storage")
    return storage == "bf16_mantissa" and _dotted(*LOW, *key) in saved


def _as(dtype: Any, x: jax.ShapeDtypeStruct, changes: bool = True) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding) if changes else x


def _dotted(*key: str | int) -> str:
    return ".".join(map(str, key))


# The rounding of `OptimizerConfig.with_storage`.
_join = functools.partial(low_precision.join, rounding="nearest")


def params_like(folder: Path, meta: dict[str, Any]) -> dict:
    """Return the parameters of a checkpoint as `jax.ShapeDtypeStruct`s on JAX's default device.

    No model is needed, because the digests contain the shapes. All keys are strings, even block
    indices.

    Raises:
        CheckpointError: the checkpoint has no digests.
    """
    if "digests" not in meta:
        raise CheckpointError(
            f"{folder} has no digests: it was saved by an older version of gptjax"
        )
    sharding, like, saved = jnp.zeros(()).sharding, {}, saved_arrays(meta)
    for path, text in saved.items():
        first, *key = path.split(".")
        if first == PARAMS:
            dtype, _, sizes = text[:-1].partition("[")
            dtype = jnp.float32 if _is_split((*key,), meta, saved) else jnp.dtype(dtype)
            shape = tuple(int(size) for size in sizes.split(",") if size)
            like[(*key,)] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return traverse_util.unflatten_dict(like)


def verify_all(folder: Path) -> dict[str, Any]:
    """Read all arrays of a checkpoint and verify their digests; return the metadata.

    Raises:
        DamagedError: the checkpoint cannot be read, or an array changed after it was saved.
        CheckpointError: the checkpoint has another format.
    """
    meta, sharding = read_meta(folder), jnp.zeros(()).sharding
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), _description(folder)
    )
    if "digests" in meta and (lost := meta["digests"].keys() - leaves_by_path(like).keys()):
        raise damaged(folder, f"{few(sorted(lost))} are missing")
    verify(folder, meta, _restore(folder, like))
    return meta


def check_readable(folder: Path, params: Mapping) -> None:
    """Verify the metadata, the list of arrays, and the smallest parameter of a checkpoint.

    The other arrays are not read: the time does not grow with their size.

    Args:
        folder: folder of the step.
        params: parameters as nested dict of `jax.ShapeDtypeStruct`s, as they were saved.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    meta = read_meta(folder)
    if lost := meta.get("digests", {}).keys() - _described(folder).keys():
        raise damaged(folder, f"{few(sorted(lost))} are missing")
    arrays: dict[tuple, Any] = traverse_util.flatten_dict({PARAMS: dict(params)})
    key = min(arrays, key=lambda key: arrays[key].size)
    verify(folder, meta, _restore(folder, traverse_util.unflatten_dict({key: arrays[key]})))


def _description(folder: Path) -> PyTree:
    """Return Orbax's description of all arrays: a tree of objects with shape and dtype."""
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.metadata(folder.absolute() / STATE).item_metadata.tree
    # Orbax's threads and C++ store raise errors of many types.
    except Exception as error:
        raise damaged(folder, first_line(error)) from error


def _described(folder: Path) -> dict[str, str]:
    """Return dtype and shape of each array, by path, for a checkpoint without digests."""
    return {
        path: dtype_and_shape(leaf) for path, leaf in leaves_by_path(_description(folder)).items()
    }


def _restore(folder: Path, like: PyTree) -> PyTree:
    """Return the arrays of `like`, which may be a part of the saved tree."""
    arguments = ocp.args.PyTreeRestore(
        item=like,
        restore_args=ocp.checkpoint_utils.construct_restore_args(like),
        partial_restore=True,
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(folder.absolute() / STATE, args=arguments)
    except Exception as error:
        raise damaged(folder, first_line(error)) from error


def verify(folder: Path, meta: dict[str, Any], arrays: PyTree) -> None:
    """Raise DamagedError if an array changed after it was saved."""
    if "digests" in meta:
        found = digests(arrays)[0]
        if changed := [path for path in found if found[path] != meta["digests"].get(path)]:
            raise damaged(folder, f"the digest of {few(changed)} is wrong")


def saved_arrays(meta: dict[str, Any]) -> dict[str, str]:
    """Return dtype and shape of each array of a checkpoint with digests, by path.

    Orbax's description of the arrays has the same content. For the 1,747 arrays of GPT-2 1558M,
    reading the description takes 0.7 s, a seventh of the restore.
    """
    return {path: text.rpartition(" ")[0] for path, text in meta["digests"].items()}


def compare(folder: Path, saved: dict[str, str], like: PyTree, *, needs: str) -> None:
    """Raise CheckpointError if names, shapes or dtypes differ; Orbax casts a wrong dtype silently.

    Args:
        saved: dtype and shape of each array, by path.
        needs: name of the owner of `like`, for the message.
    """
    wanted = {path: dtype_and_shape(leaf) for path, leaf in leaves_by_path(like).items()}
    lines = [
        f"  {name}: the checkpoint has {saved.get(name, 'nothing')}, {needs} needs "
        f"{wanted.get(name, 'nothing')}"
        for name in sorted({*saved, *wanted})
        if saved.get(name) != wanted.get(name)
    ]
    if lines:
        more = [f"  … and {len(lines) - 10} more"] if len(lines) > 10 else []
        shown = "\n".join(lines[:10] + more)
        raise CheckpointError(f"{folder} does not fit {needs}:\n{shown}")


def damaged(folder: Path, reason: str) -> DamagedError:
    """Return the error of a checkpoint that changed after it was saved."""
    return DamagedError(f"{folder} is damaged: {reason}")


def checksum(meta: dict[str, Any]) -> str:
    """Return the SHA-256 of the metadata without the checksum."""
    text = json.dumps(
        {key: value for key, value in meta.items() if key != "checksum"}, sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()


def few(names: list[str]) -> str:
    """Return the first three names, and the number of further names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def first_line(error: BaseException) -> str:
    """Return the text of the system error in an error of TensorStore, or the first line."""
    # TensorStore's messages contain the text of the system error ("No space left on device")
    # between file names and varying annotations. The error code is always present.
    if code := re.search(r"\bos_error_code='?(\d+)", str(error)):
        return os.strerror(int(code[1]))
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]
