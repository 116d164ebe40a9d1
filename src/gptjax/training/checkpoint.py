"""Checkpoints of a run, with Orbax.

A checkpoint is written asynchronously and atomically, is durable when complete, and is verified
when it is restored.
"""

import errno
import logging
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from gptjax import distributed
from gptjax.provenance import versions
from gptjax.weights.checkpoint_files import (
    FORMAT,
    check_readable,
    check_regular,
    checksum,
    compare,
    damaged,
    few,
    first_line,
    read_meta,
    saved_arrays,
    steps,
    verify,
)
from gptjax.weights.digests import digests, dtype_and_shape, leaves_by_path
from gptjax.weights.errors import CheckpointError, DamagedError

__all__ = ["CheckpointError", "Checkpoints", "DamagedError", "NotFiniteError"]


class NotFiniteError(RuntimeError):
    """NaN or infinity in the parameters, the optimizer state or the loss. Nothing was saved."""


class Checkpoints:
    """The checkpoints of a run, one folder for each step.

    A checkpoint holds a digest of each array and a checksum of the metadata; `restore` verifies
    both. All files are durable before the checkpoint is renamed to its final name. Older
    checkpoints are deleted only after the rename.

    Args:
        folder: folder of the checkpoints, created if it does not exist. The next save removes
            partial files of a killed save.
        keep_last: number of newest checkpoints to keep.
        keep_every: keep checkpoints at multiples of this step permanently.

    Raises:
        CheckpointError: the folder cannot be used.
        DamagedError: a file that Orbax would read at once is a FIFO or a device.
    """

    def __init__(self, folder: Path, *, keep_last: int = 1, keep_every: int | None = None):
        self.folder = folder.absolute()
        if any(character in str(self.folder) for character in "*?["):
            # Orbax interprets the path as a pattern when it merges the files of a save. The pattern
            # matches no file, and no array is saved.
            raise CheckpointError(
                f"cannot save checkpoints in {self.folder}: choose a path without *, ? and ["
            )
        for step in steps(self.folder) if self.folder.is_dir() else []:
            check_regular(self.folder / str(step), "*")  # Orbax reads them at once
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep_last,
            keep_period=keep_every,
            cleanup_tmp_directories=True,
            temporary_path_class=_DurablePath,
        )
        try:
            self._manager = ocp.CheckpointManager(
                self.folder,
                options=options,
                item_handlers={
                    "state": ocp.StandardCheckpointHandler(),
                    "meta": ocp.JsonCheckpointHandler(),
                },
            )
        # Orbax reads the contents of the folder, which can raise errors of many types.
        except Exception as error:
            raise CheckpointError(
                f"cannot use {self.folder} for checkpoints: {first_line(error)}"
            ) from error

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, the newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: PyTree, meta: dict[str, Any]) -> None:
        """Copy the state to the host and write a checkpoint in the background.

        Args:
            step: completed optimizer steps, the checkpoint's name.
            state: a pytree of arrays.
            meta: a JSON object, which `meta` returns.

        Raises:
            CheckpointError: this or the previous save failed, for example because the disk is full.
            NotFiniteError: an array of the state holds NaN or infinity; nothing is written.
        """
        values, not_finite = digests(state)
        if not_finite:
            raise NotFiniteError(
                f"step {step}: NaN or infinity in {few(not_finite)}; this state was not saved"
            )
        meta = {"format": FORMAT, "versions": versions(), **meta, "step": step, "digests": values}
        meta["checksum"] = checksum(meta)
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

    def outcome(self, step: int) -> str:
        """Wait until every save is complete; return a sentence for a run that stops at a step."""
        try:
            self.wait()
        except CheckpointError as error:
            return str(error)
        last = self.latest_step()
        text = f"the state of step {step} is saved" if last == step else self._newest_text()
        return text if last is None else f"{text}: the same command resumes from it"

    def close(self) -> None:
        """Wait for every save and release Orbax's threads. Raise the errors of `wait`."""
        self._translate(self._manager.close)

    def check_readable(self, step: int, params: PyTree) -> None:
        """Raise CheckpointError if a saved checkpoint cannot be read, without reading all of it.

        Args:
            step: step of the checkpoint.
            params: parameters of the state as `jax.ShapeDtypeStruct`s.
        """
        try:
            check_readable(self.folder / str(step), params)
        except CheckpointError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} was saved but cannot be read: {error}. "
                "Check the installed versions: python -m gptjax.doctor"
            ) from error

    def _translate(self, action) -> None:
        try:
            action()
        # Orbax's threads and C++ store raise errors of many types.
        except Exception as error:
            # Orbax's list of steps includes the step whose save has just failed.
            self._manager.reload()
            raise CheckpointError(
                f"saving to {self.folder} failed: {first_line(error)}; {self._newest_text()}. "
                "Free some space, then run the same command again to resume."
            ) from error

    def _newest_text(self) -> str:
        last = self.latest_step()
        if last is None:
            return "there is no complete checkpoint yet"
        return f"the newest complete checkpoint is of step {last}"

    def meta(self, step: int) -> dict[str, Any]:
        """Return the metadata of a checkpoint after verifying the checksum.

        Raises:
            DamagedError: the metadata cannot be read, or changed after the checkpoint was saved.
            CheckpointError: the checkpoint has another format.
        """
        return read_meta(self.folder / str(step))

    def restore(self, step: int, like: PyTree) -> PyTree:
        """Return the state of a checkpoint after verifying the digest of each array.

        Args:
            step: step of the checkpoint.
            like: a pytree of `jax.ShapeDtypeStruct` with the shardings of the result. The number of
                devices may differ from the number at the save.

        Raises:
            DamagedError: the checkpoint cannot be read, or an array changed after it was saved.
            CheckpointError: the arrays differ in name, shape or dtype from `like`.
        """
        meta = self.meta(step)
        folder = self.folder / str(step)
        compare(folder, self._saved_arrays(step, meta), like, needs="this run")
        try:
            arguments = ocp.args.Composite(state=ocp.args.StandardRestore(like))
            state = self._manager.restore(step, args=arguments)["state"]
        except Exception as error:
            raise damaged(folder, first_line(error)) from error
        verify(folder, meta, state)
        return state

    def newest[T](
        self, read: Callable[[int], T], *, fall_back: bool = True
    ) -> tuple[int, T, list[str]] | None:
        """Apply `read` to the newest checkpoint that is not damaged.

        Args:
            read: function of a step, such as `meta` or a call of `restore`.
            fall_back: whether to try older checkpoints if the newest checkpoint is damaged.

        Returns:
            The step, the result of `read`, and a sentence for each newer, damaged checkpoint. None
            if there is no checkpoint.

        Raises:
            DamagedError: no checkpoint can be read; without `fall_back`, the newest checkpoint
                cannot be read.
            DistributedError: only some processes of the run find a checkpoint damaged.
        """
        damaged: list[str] = []
        for step in self.steps():
            try:
                return step, read(step), damaged
            except DamagedError as error:
                if not fall_back:
                    raise
                distributed.wait_for_same_damage(step, error)
                damaged.append(str(error))
        if damaged:
            raise DamagedError(
                "\n".join(
                    [*damaged, "no older checkpoint is left; choose another --name for a new run"]
                )
            )
        return None

    def set_aside(self, after: int) -> list[str]:
        """Rename the checkpoints after a step to STEP.damaged and return the new names.

        The run can then save these steps again. All processes of a run call this function; process
        0 renames.
        """
        steps = [step for step in self.steps() if step > after]
        names = distributed.exchange(self._rename(steps) if jax.process_index() == 0 else [])[0]
        self._manager.reload()
        return names

    def _rename(self, steps: list[int]) -> list[str]:
        names = []
        for step in steps:
            target = self.folder / f"{step}.damaged"
            for number in range(2, 1000):
                if not target.exists():
                    break
                target = self.folder / f"{step}.damaged{number}"
            (self.folder / str(step)).rename(target)
            names.append(target.name)
        return names

    def _saved_arrays(self, step: int, meta: dict[str, Any]) -> dict[str, str]:
        """Return dtype and shape of each array of a checkpoint, by path."""
        if "digests" in meta:
            return saved_arrays(meta)
        folder = self.folder / str(step)
        try:
            saved = self._manager.item_metadata(step)["state"]
        except Exception as error:
            raise damaged(folder, first_line(error)) from error
        if saved is None:
            raise damaged(folder, "the description of its arrays cannot be read")
        tree = getattr(saved, "tree", saved)
        return {path: dtype_and_shape(leaf) for path, leaf in leaves_by_path(tree).items()}


class _DurablePath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Orbax's temporary folder, with fsync of all files before and after the final rename.

    Orbax calls fsync for arrays only. After a power cut, the metadata of a new checkpoint could be
    empty while the previous checkpoint is already deleted.
    """

    async def finalize(self, *args, **kwargs):
        folder = Path(self.get())
        # Skip parts of a checkpoint: the complete checkpoint is synchronized later.
        if "checkpoint-tmp" in folder.parent.name:
            return await super().finalize(*args, **kwargs)
        _synchronize([folder, *folder.rglob("*")])
        await super().finalize(*args, **kwargs)
        final = Path(self.get_final())
        # super().finalize writes files at the top of the folder and renames the folder.
        _synchronize(
            [
                *(path for path in final.iterdir() if path.is_file()),
                final,
                final.parent,
                final.parent.parent,
            ]
        )


def _synchronize(paths: list[Path]) -> None:
    """Call fsync for files and folders in parallel.

    A call takes 2 ms; parallel calls share the commits of the file system's journal.
    """
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(_fsync, paths))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without fsync of folders
            raise
    finally:
        os.close(descriptor)


def silence_orbax() -> None:
    """Suppress log messages of Orbax's threads after a failed read or write, which raises an error.

    Each thread logs a traceback because its event loop is closed, sometimes after the call has
    returned.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    expected, default = (
        ("loop is closed", "Encountered error while reading array"),
        sys.unraisablehook,
    )

    def hook(unraisable):
        if not any(text in str(unraisable.exc_value) for text in expected):
            default(unraisable)

    sys.unraisablehook = hook
