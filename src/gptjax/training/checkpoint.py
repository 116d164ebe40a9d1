"""Saving of a run's checkpoints, with Orbax: asynchronous, atomic, and durable when complete.

`gptjax.weights.checkpoint_files` reads them.
"""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from gptjax import config as configuration
from gptjax.config import Config
from gptjax.data import Dataset
from gptjax.files import synchronize
from gptjax.provenance import versions
from gptjax.terminal import UserError
from gptjax.timeline import Timeline
from gptjax.weights import checkpoint_files as files
from gptjax.weights.checkpoint_files import METADATA, STATE, few, system_error
from gptjax.weights.errors import CheckpointError


class NotFiniteError(UserError, RuntimeError):
    """NaN or infinity in the parameters, the optimizer state or the loss. Nothing was saved."""


def metadata(config: Config, dataset: Dataset, step: int) -> dict[str, Any]:
    """Return the metadata of a checkpoint: the fingerprint of the data, the stage, the config."""
    data: dict[str, Any] = {"dataset": dataset.fingerprint()}
    if config.stages:
        # The stage of the last step, not of the next: a resumed run may have additional stages.
        data["stage"] = Timeline(config).at(max(step - 1, 0)).number
    return {"data": data, "config": configuration.to_json(config)}


class Checkpoints:
    """The checkpoints of a run, one folder for each step.

    The metadata of a checkpoint have a digest of each file. All files are durable before the
    checkpoint is renamed to its final name. Older checkpoints are deleted only after the rename.

    Args:
        folder: folder of the checkpoints, created if it does not exist. The next save removes
            partial files of a killed save.
        keep_last: number of newest checkpoints to keep.
        keep_every: keep checkpoints at multiples of this step permanently.

    Raises:
        CheckpointError: the folder cannot be used.
    """

    def __init__(self, folder: Path, keep_last: int = 1, keep_every: int | None = None):
        self.folder = folder.absolute()
        if any(character in str(self.folder) for character in "*?["):
            # Orbax interprets the path as a pattern when it merges the files of a save. The pattern
            # matches no file, and no array is saved.
            raise CheckpointError(
                f"cannot save checkpoints in {self.folder}: choose a path without *, ? and ["
            )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep_last,
            keep_period=keep_every,
            cleanup_tmp_directories=True,
            temporary_path_class=_DurablePath,
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        try:
            self._manager = ocp.CheckpointManager(
                self.folder, options=options, item_handlers=handlers
            )
        # Orbax reads the contents of the folder, which can raise errors of many types.
        except Exception as error:
            raise CheckpointError(
                f"cannot use {self.folder} for checkpoints: {system_error(error)}"
            ) from error

    def newest(self) -> str:
        """Return which checkpoint is the newest complete one, as text."""
        for step in files.steps(self.folder):
            return f"the newest complete checkpoint is of step {step}"
        return "there is no complete checkpoint yet"

    def save(self, step: int, state: PyTree, meta: dict[str, Any]) -> None:
        """Copy the state to the host and write a checkpoint in the background.

        Args:
            step: completed optimizer steps, the checkpoint's name.
            state: a pytree of arrays.
            meta: a JSON object, part of the metadata.

        Raises:
            CheckpointError: this or the previous save failed, for example because the disk is full.
            NotFiniteError: an array of the state holds NaN or infinity; nothing is written.
        """
        finite = {path: _is_finite(x) for path, x in files.leaves_by_path(state).items()}
        if bad := [path for path, is_finite in jax.device_get(finite).items() if not is_finite]:
            raise NotFiniteError(
                f"step {step}: NaN or infinity in {few(bad)}; this state was not saved"
            )
        meta = {"format": files.FORMAT, "versions": versions(), **meta, "step": step}
        meta["arrays"] = files.arrays_of(state)
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
        )
        self._translate(lambda: self._manager.save(step, args=arguments, force=True))

    def check(self) -> None:
        """Raise CheckpointError if a save in the background has failed, without waiting."""
        self._translate(self._manager.check_for_errors)

    def wait(self) -> None:
        """Wait until every save is complete. Raise CheckpointError if a save failed."""
        self._translate(self._manager.wait_until_finished)

    def close(self) -> None:
        """Wait for every save and release Orbax's threads. Raise the errors of `wait`."""
        self._translate(self._manager.close)

    def _translate(self, action) -> None:
        try:
            action()
        # Orbax's threads and C++ store raise errors of many types.
        except Exception as error:
            raise CheckpointError(
                f"saving to {self.folder} failed: {system_error(error)}; {self.newest()}. "
                "Free some space, then run the same command again to resume."
            ) from error


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()


class _DurablePath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Orbax's temporary folder. Before the final rename, the digests of all files are added to the
    metadata; before and after, all files are synchronized.

    Orbax calls fsync for arrays only. After a power cut, the metadata of a new checkpoint could be
    empty while the previous checkpoint is already deleted.
    """

    async def finalize(self, *args, **kwargs):
        folder = Path(self.get())
        # Skip parts of a checkpoint: the complete checkpoint is synchronized later.
        if "checkpoint-tmp" in folder.parent.name:
            return await super().finalize(*args, **kwargs)
        paths = [path for path in (folder / STATE).rglob("*") if path.is_file()]
        meta = json.loads((folder / METADATA).read_text())
        meta["files"] = files.file_digests(folder, [str(x.relative_to(folder)) for x in paths])
        meta["checksum"] = files.checksum(meta)
        (folder / METADATA).write_text(json.dumps(meta))
        synchronize([folder, *folder.rglob("*")])
        await super().finalize(*args, **kwargs)
        final = Path(self.get_final())
        # super().finalize writes files at the top of the folder and renames the folder.
        written = [path for path in final.iterdir() if path.is_file()]
        synchronize([*written, final, final.parent, final.parent.parent])


def silence_orbax() -> None:
    """Suppress log messages of Orbax's threads after a failed read or write, which raises an error.

    Each thread logs a traceback because its event loop is closed, sometimes after the call has
    returned.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)

    def hook(unraisable):
        text = str(unraisable.exc_value)
        if "loop is closed" not in text and "Encountered error while reading array" not in text:
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = hook
