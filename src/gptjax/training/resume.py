"""Resume from a run's newest checkpoint. Refuse a checkpoint of another config or other data."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from gptjax import config as configuration
from gptjax import distributed
from gptjax.config import Config, ConfigError
from gptjax.data import Dataset
from gptjax.timeline import Timeline
from gptjax.training import checkpoint
from gptjax.weights import checkpoint_files
from gptjax.weights.errors import CheckpointError, DamagedError
from gptjax.weights.sources import CHECKPOINTS


@dataclasses.dataclass(frozen=True)
class Resume:
    """Starting point of a run: its newest intact checkpoint, read and verified once.

    Attributes:
        folder: folder of the checkpoints.
        step: step of the checkpoint; None for a run without a checkpoint, which begins at step 0.
        meta: metadata of the checkpoint.
        damaged: the reason of each newer, damaged checkpoint, by step.
    """

    folder: Path
    step: int | None = None
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    damaged: dict[int, str] = dataclasses.field(default_factory=dict)

    def check(self, config: Config, dataset: Dataset) -> None:
        """Refuse a checkpoint of another config or other data. Call with the lock of the run.

        Raises:
            ConfigError: --resume excludes the checkpoint, or its config or data differ.
            CheckpointError: its data position is wrong, or there is a newer checkpoint.
        """
        newest = max(checkpoint_files.steps(self.folder) if self.folder.is_dir() else [0])
        if newest > max(self.step or 0, *self.damaged, 0):
            raise CheckpointError(
                f"{self.folder}: another process has just saved step {newest}; run the same "
                "command again"
            )
        if self.step is None:
            if config.resume == "must":
                raise ConfigError(f"--resume must: there is no checkpoint in {self.folder}")
            return
        if config.resume == "never":
            raise ConfigError(
                f"--resume never: {config.run_dir} already has a checkpoint of step {self.step}; "
                "choose another --name"
            )
        if lines := configuration.differences(self.meta.get("config"), config):
            raise ConfigError(
                f"{config.run_dir} was begun with another config:\n  " + "\n  ".join(lines) + "\n"
                "Use the old values to resume the run, or another --name for a new run."
            )
        place = self.meta.get("data") or {}
        if lines := dataset.differences(place.get("dataset")):
            raise ConfigError(
                f"{config.run_dir} was trained on other data:\n  " + "\n  ".join(lines) + "\n"
                "The checkpoint has a position in the old data: give the old data, or another "
                "--name for a new run."
            )
        expected = _place(config, self.step)["position"]
        product = "" if config.stages else f"{self.step} × {config.batch} = "
        if place.get("position") != expected:
            raise CheckpointError(
                f"{self.folder / str(self.step)}: expected a data position of "
                f"{product}{expected} sequences, found {place.get('position')!r}; "
                "move that folder away to resume from an older checkpoint"
            )

    def set_aside(self, say: Callable[[str, object], object]) -> None:
        """Rename the damaged checkpoints, so that the run can save their steps again.

        Args:
            say: prints a name and a text.
        """
        for step, reason in self.damaged.items():
            aside = self.folder / f"{step}.damaged"
            if jax.process_index() == 0:
                shutil.rmtree(aside, ignore_errors=True)
                (self.folder / str(step)).rename(aside)
            say("WARNING", f"{reason}; kept as {aside.name}")
        if self.damaged:
            say("WARNING", f"RESUMING FROM STEP {self.step}")
        distributed.exchange("the damaged checkpoints are renamed")

    def restore(self, like: PyTree) -> PyTree:
        """Return the state of the checkpoint. See `checkpoint.restore`."""
        return checkpoint.restore(self.folder / str(self.step), self.meta, like)

    def changes(self, config: Config) -> dict[str, tuple[Any, Any]]:
        """Return {option: (old, new)} of the options changed with --resume with_changes."""
        return {} if self.step is None else configuration.changes(self.meta["config"], config)


def find(config: Config) -> Resume:
    """Return the newest intact checkpoint of the run. All processes call this function.

    Raises:
        DamagedError: all checkpoints are damaged, or the newest one and --resume is must.
        CheckpointError: the checkpoint has another format.
        DistributedError: the processes do not see the same folder.
    """
    folder, damaged = (config.run_dir / CHECKPOINTS).absolute(), {}
    steps = checkpoint_files.steps(folder) if folder.is_dir() else []
    distributed.check_alike({f"checkpoints in {folder}": steps})
    for step in steps:
        meta, reason = {}, None
        try:
            meta = checkpoint_files.verify(folder / str(step))
        except DamagedError as error:
            reason = str(error)
        if not (reasons := [reason for reason in distributed.exchange(reason) if reason]):
            return Resume(folder, step, meta, damaged)
        damaged[step] = reasons[0]
        if config.resume == "must":
            break
    if damaged:
        advice = "no older checkpoint is read; choose another --name for a new run"
        raise DamagedError("\n".join([*damaged.values(), advice]))
    return Resume(folder)


def meta(config: Config, dataset: Dataset, step: int) -> dict[str, Any]:
    """Return the metadata of a checkpoint: the position in the data, and the config."""
    place = _place(config, step) | {"dataset": dataset.fingerprint()}
    return {"data": place, "config": configuration.to_json(config)}


def _place(config: Config, step: int) -> dict[str, int]:
    """Return the position in the data after `step` steps, in the stage of the last step.

    The next step's stage is not used: a resumed run with additional stages must compute the same
    position.
    """
    timeline = Timeline(config)
    span = timeline.at(max(step - 1, 0))
    place = {"position": timeline.position(step, span)}
    return place | ({"order": span.order, "stage": span.number} if config.stages else {})
