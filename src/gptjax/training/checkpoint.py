"""Checkpoints of a whole run with Orbax: written beside the training, complete or not there."""

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

import gptjax

FORMAT = "gptjax checkpoint 1"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read. What was complete before is still there."""


class Checkpoints:
    """The checkpoints of one run, a folder a step.

    Args:
        folder: made if absent. What a killed save left behind in it is removed before the next save.
        keep_last: newest checkpoints kept.
        keep_every: checkpoints at multiples of this step are kept for ever.
    """

    def __init__(self, folder: Path, *, keep_last: int = 1, keep_every: int | None = None):
        self.folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep_last, keep_period=keep_every, cleanup_tmp_directories=True
        )
        try:
            self._manager = ocp.CheckpointManager(
                self.folder,
                options=options,
                item_handlers={"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()},
            )
        except OSError as error:
            raise CheckpointError(f"cannot use {self.folder} for checkpoints: {error}") from error

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: PyTree, meta: dict[str, Any]) -> None:
        """Copies the state off the device, then writes it in the background.

        Args:
            state: a pytree of arrays.
            meta: anything that is JSON; comes back from `restore`.

        Raises:
            CheckpointError: this or the previous save failed (a full disk, say).
        """
        meta = {"format": FORMAT, "versions": versions(), **meta}
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        self._translate(lambda: self._manager.save(step, args=arguments, force=True))

    def check(self) -> None:
        """Raises CheckpointError if a save in the background has failed; does not wait."""
        self._translate(self._manager.check_for_errors)

    def wait(self) -> None:
        """Returns when every save is complete. Raises CheckpointError if one failed."""
        self._translate(self._manager.wait_until_finished)

    def close(self) -> None:
        self._translate(self._manager.close)

    def _translate(self, action) -> None:
        try:
            action()
        except Exception as error:  # Orbax passes on whatever its threads and its C++ store raised, of many types.
            # Read from the disk: in its own list Orbax counts the step whose save has just failed.
            last = max(self._manager.all_steps(read=True), default=None)
            good = "there is no complete checkpoint yet" if last is None else f"the checkpoint of step {last} is intact"
            raise CheckpointError(
                f"saving to {self.folder} failed: {_first_line(error)}; {good}. "
                "Free some space, then run the same command again to go on from it."
            ) from error

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON of a checkpoint.

        Raises:
            CheckpointError: it cannot be read, or gptjax did not write it.
        """
        try:
            meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        except Exception as error:
            raise self._unreadable(step, error) from error
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            found = meta.get("format") if isinstance(meta, dict) else type(meta).__name__
            raise CheckpointError(
                f"{self.folder / str(step)} is not a checkpoint of this program: expected {FORMAT!r}, found {found!r}"
            )
        return meta

    def restore(self, step: int, like: PyTree) -> PyTree:
        """The state of a checkpoint.

        Args:
            like: a pytree of `jax.ShapeDtypeStruct` with the shardings wanted. The number of devices may be another one
                than when it was saved.

        Raises:
            CheckpointError: it cannot be read, or its arrays differ in name, shape or dtype from `like`.
        """
        try:
            saved = self._manager.item_metadata(step)["state"]
            self._compare(step, saved, like)
            return self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]
        except CheckpointError:
            raise
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _compare(self, step: int, saved: PyTree, like: PyTree) -> None:
        # Orbax would cast a wrong dtype without a word.
        def flat(tree):
            leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
            return {
                jax.tree_util.keystr(path, simple=True, separator="."): (tuple(x.shape), str(x.dtype))
                for path, x in leaves
            }

        saved, wanted = flat(getattr(saved, "tree", saved)), flat(like)
        lines = [
            f"  {name}: the checkpoint has {saved.get(name, 'nothing')}, this run needs {wanted.get(name, 'nothing')}"
            for name in sorted({*saved, *wanted})
            if saved.get(name) != wanted.get(name)
        ]
        if lines:
            shown = "\n".join(lines[:10] + ([f"  … and {len(lines) - 10} more"] if len(lines) > 10 else []))
            raise CheckpointError(f"{self.folder / str(step)} does not fit this run:\n{shown}")

    def _unreadable(self, step: int, error: Exception) -> CheckpointError:
        others = [s for s in self._manager.all_steps() if s != step]
        advice = f"delete that folder to go on from step {max(others)}" if others else "there is no other one"
        return CheckpointError(f"cannot read {self.folder / str(step)}: {_first_line(error)}; {advice}")


def versions() -> dict[str, str]:
    """Versions of what a run's numbers depend on."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    return {"gptjax": gptjax.__version__} | {name: importlib.metadata.version(name) for name in packages}


def _first_line(error: BaseException) -> str:
    # TensorStore buries the system's words ("No space left on device") under the names of two files and, now and then,
    # between other annotations in brackets; the code is there each time.
    if code := re.search(r"\bos_error_code='?(\d+)", str(error)):
        return os.strerror(int(code[1]))
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:400]
