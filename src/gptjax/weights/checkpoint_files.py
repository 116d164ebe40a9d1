"""Reading and verification of a checkpoint's files. Nothing in the folder is created or changed.

`gptjax.training.checkpoint` writes the files. The folder of a step contains

    meta/metadata    JSON: format, step, config, data position, arrays, digests of files, checksum
    state/           Orbax's arrays: step, params, opt_state, rng, …

The digest of a file is the SHA-256 of the SHA-256 digests of its pieces of 16 MiB: the pieces are
read and hashed in parallel.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import traverse_util
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from gptjax.optim import low_precision
from gptjax.optim.transforms import EmaNesterovState, TailEmaState, evaluation_params
from gptjax.parallel import replicated
from gptjax.terminal import first_line
from gptjax.weights.errors import CheckpointError, DamagedError

FORMAT = "gptjax checkpoint 3"
# With digests of arrays, which are not verified any more; saved up to commit f85193a.
OLDER_FORMAT = "gptjax checkpoint 2"
METADATA = Path("meta", "metadata")
STATE = "state"
PARAMS = "params"
# Lower halves of parameters whose upper halves are in PARAMS, with --optimizer.param-storage.
LOW = ("opt_state", "low")

_PIECE = 2**24


def steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, the newest first."""
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    numbers = (int(name) for name in names if name.isdecimal())
    return sorted((number for number in numbers if str(number) in names), reverse=True)


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the metadata of a checkpoint after verifying the checksum.

    "arrays" has dtype and shape of each array by path, such as "float32[50304, 768]".

    Args:
        folder: folder of the step. If its name is a number, the checkpoint must be of this step.

    Raises:
        DamagedError: the metadata cannot be read, or changed after the checkpoint was saved.
        CheckpointError: the checkpoint has another format.
    """
    try:
        meta = dict(json.loads((folder / METADATA).read_text(encoding="utf-8")))
    # JSON nested too deeply is a RecursionError, another encoding a ValueError.
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise damaged(folder, system_error(error)) from error
    if meta.get("format") not in (FORMAT, OLDER_FORMAT):
        raise CheckpointError(
            f"{folder} is not a checkpoint that this version of gptjax reads: expected {FORMAT!r}, "
            f"found {meta.get('format')!r}. Commit f85193a reads 'gptjax checkpoint 1'"
        )
    if meta.get("checksum") != checksum(meta):
        raise damaged(folder, "the checksum of its metadata is wrong")
    if folder.name.isdecimal() and (step := meta.get("step")) != int(folder.name):
        raise damaged(folder, f"it was saved as step {step}; rename the folder to {step}")
    if meta["format"] == OLDER_FORMAT:
        meta["arrays"] = {path: text.rpartition(" ")[0] for path, text in meta["digests"].items()}
    return meta


def verify(folder: Path) -> dict[str, Any]:
    """Return the metadata of a checkpoint after comparing all files with their digests.

    Raises:
        DamagedError: a file is missing, or changed after the checkpoint was saved.
        CheckpointError: the checkpoint has another format.
    """
    meta = read_meta(folder)
    wanted = meta.get("files", {})
    try:
        found = file_digests(folder, wanted)
    except OSError as error:
        raise damaged(folder, f"{error.strerror}: {error.filename}") from error
    if changed := [name for name in wanted if found[name] != wanted[name]]:
        raise damaged(folder, f"the digest of {few(changed)} is wrong")
    return meta


def file_digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digest of each file, by its path inside the folder."""
    hashes = {name: hashlib.sha256() for name in names}
    sizes = {name: (folder / name).stat().st_size for name in hashes}
    pieces = [(name, at) for name, size in sizes.items() for at in range(0, size, _PIECE)]

    def digest(piece: tuple[str, int]) -> bytes:
        with (folder / piece[0]).open("rb") as file:
            file.seek(piece[1])
            return hashlib.sha256(file.read(_PIECE)).digest()

    with ThreadPoolExecutor() as pool:
        for (name, _), one in zip(pieces, pool.map(digest, pieces), strict=True):
            hashes[name].update(one)
    return {name: one.hexdigest() for name, one in hashes.items()}


def read_params(folder: Path, like: Mapping) -> dict:
    """Return the parameters that an evaluation uses, after verifying the files of a checkpoint.

    Arrays are found by name: the order of the names has no meaning. A parameter that is stored as
    two halves is joined, then corrected as by `gptjax.optim.evaluation_params`. No other array of
    the checkpoint is read.

    Args:
        folder: folder of the step.
        like: nested dict of `jax.ShapeDtypeStruct`s with the shardings of the result.

    Raises:
        DamagedError: the checkpoint cannot be read, or changed after it was saved.
        CheckpointError: the parameters differ in name, shape or dtype from `like`.
    """
    meta = verify(folder)
    keys: dict[tuple, Any] = traverse_util.flatten_dict(dict(like))
    split = (meta.get("config") or {}).get("optimizer.param_storage") == "bf16_mantissa"
    halves = {key for key in keys if split and dotted((*LOW, *key)) in meta["arrays"]}
    wanted = {(PARAMS, *key): _as(jnp.bfloat16, x, key in halves) for key, x in keys.items()}
    wanted |= {(*LOW, *key): _as(jnp.uint16, keys[key]) for key in halves}
    tree = traverse_util.unflatten_dict(wanted)
    read = (f"{PARAMS}.", f"{dotted(LOW)}.") if halves else f"{PARAMS}."
    saved = {path: text for path, text in meta["arrays"].items() if path.startswith(read)}
    by_path = leaves_by_path(restore(folder, saved, tree, needs="its config"))
    params = {key: by_path[dotted((PARAMS, *key))] for key in keys}
    low = {key: by_path[dotted((*LOW, *key))] for key in halves}
    params |= {key: low_precision.join(params[key], low[key]) for key in halves}
    return evaluation_params(traverse_util.unflatten_dict(params), _averages(folder, meta, keys))


def _averages(folder: Path, meta: dict[str, Any], like: Mapping[tuple, Any]) -> list[Any]:
    """Return the parts of a checkpoint's optimizer state that `evaluation_params` reads."""
    parts, arrays = [], meta["arrays"]
    for kind in (EmaNesterovState, TailEmaState):
        _, factor, average, *_ = kind._fields
        for path in [x for x in arrays if x.endswith(f".{factor}") and arrays[x] == "float32[]"]:
            prefix = path.removesuffix(factor) + average
            keys = {f"{prefix}.{dotted(key)}": key for key in like}
            wanted = {o: _as(jnp.float32, like[k]) for o, k in keys.items() if o in arrays}
            wanted[path] = jax.ShapeDtypeStruct((), jnp.float32, sharding=_scalar(like))
            # The structure distinguishes the state of a chain, which is a tuple, from a dict.
            structure = ocp.PyTreeCheckpointHandler().metadata(folder.absolute() / STATE).tree
            paths, treedef = leaves_by_path(structure), jax.tree.structure(structure)
            tree = treedef.unflatten([wanted.get(own, ocp.PLACEHOLDER) for own in paths])
            saved = {own: arrays[own] for own in wanted}
            found = leaves_by_path(restore(folder, saved, tree, needs="its config"))
            averages = {key: found.get(own, optax.MaskedNode()) for own, key in keys.items()}
            parts.append(kind((), float(found[path]), traverse_util.unflatten_dict(averages)))
    return parts


def _scalar(like: Mapping[tuple, Any]) -> Any:
    """Return the sharding of a number for arrays with the shardings of `like`."""
    sharding = next(iter(like.values())).sharding
    return replicated(sharding.mesh) if isinstance(sharding, NamedSharding) else sharding


def _as(dtype: Any, x: jax.ShapeDtypeStruct, changes: bool = True) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding) if changes else x


def dotted(key: Iterable[str | int]) -> str:
    """Return the path of an array as text, such as "params.blocks.0.attn.c_attn.kernel"."""
    return ".".join(map(str, key))


def restore(folder: Path, saved: Mapping[str, str], like: PyTree, *, needs: str) -> PyTree:
    """Return the arrays of `like`, in the shardings of `like`.

    The number of devices may differ from the number at the save.

    Args:
        folder: folder of the step, whose files are verified.
        saved: dtype and shape of each array to read, by path, from the metadata.
        like: pytree of `jax.ShapeDtypeStruct` and placeholders, which may be a part of the saved
            tree.
        needs: name of the owner of `like`, for the message.

    Raises:
        CheckpointError: names, shapes or dtypes differ; Orbax would cast a wrong dtype silently.
        DamagedError: the arrays cannot be read.
    """
    if text := differences(saved, arrays_of(like), "the checkpoint", needs):
        raise CheckpointError(f"{folder} does not fit {needs}: {text}")
    arguments = ocp.args.PyTreeRestore(
        item=like,
        restore_args=ocp.checkpoint_utils.construct_restore_args(like),
        partial_restore=True,
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(folder.absolute() / STATE, args=arguments)
    # Orbax's threads and C++ store raise errors of many types.
    except Exception as error:
        raise damaged(folder, system_error(error)) from error


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by path, such as "params.blocks.0.attn.c_attn.kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def arrays_of(tree: PyTree) -> dict[str, str]:
    """Return dtype and shape of each array or `jax.ShapeDtypeStruct`, by path; no placeholders."""
    return {
        path: f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}"
        for path, x in leaves_by_path(tree).items()
        if x is not ocp.PLACEHOLDER
    }


def differences(
    found: Mapping[str, str], wanted: Mapping[str, str], has: str, needs: str
) -> str | None:
    """Return the differences of two tables of arrays in one line; None if they are equal.

    Args:
        found: dtype and shape of each array by name.
        wanted: as `found`.
        has: name of the owner of `found`, for the text.
        needs: name of the owner of `wanted`.
    """
    lines = [
        f"{name[:100]}: {has} has {found.get(name, 'nothing')}, {needs} needs "
        f"{wanted.get(name, 'nothing')}"
        for name in {*found, *wanted}
        if found.get(name) != wanted.get(name)
    ]
    return few(lines) if lines else None


def damaged(folder: Path, reason: str) -> DamagedError:
    """Return the error of a checkpoint that changed after it was saved."""
    return DamagedError(f"{folder} is damaged: {reason}")


def checksum(meta: dict[str, Any]) -> str:
    """Return the SHA-256 of the metadata without the checksum."""
    text = json.dumps(
        {key: value for key, value in meta.items() if key != "checksum"}, sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()


def few(names: Iterable[str]) -> str:
    """Return the first three names, sorted, and the number of further names; "none" for none."""
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name[:300] for name in names[:3]) + more or "none"


def system_error(error: BaseException) -> str:
    """Return the text of the system error in an error of TensorStore, or the first line."""
    # TensorStore's messages contain the text of the system error ("No space left on device")
    # between file names and varying annotations. The error code is always present.
    if code := re.search(r"\bos_error_code='?(\d+)", str(error)):
        return os.strerror(int(code[1]))
    return first_line(error)
