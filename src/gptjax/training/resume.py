"""Resume from a run's newest checkpoint. Refuse a checkpoint of another config or other data."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from gptjax import config as configuration
from gptjax import processes
from gptjax.config import Config, ConfigError
from gptjax.data import Dataset
from gptjax.weights import checkpoint_files
from gptjax.weights.errors import DamagedError
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
        """Refuse a checkpoint of another config or other data.

        Raises:
            ConfigError: --resume excludes the checkpoint, or its config or data differ.
        """
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
        if lines := dataset.differences((self.meta.get("data") or {}).get("dataset")):
            raise ConfigError(
                f"{config.run_dir} was trained on other data:\n  " + "\n  ".join(lines) + "\n"
                "The checkpoint has a position in the old data: give the old data, or another "
                "--name for a new run."
            )

    def complete(self, config: Config) -> str | None:
        """Say that the checkpoint is of the run's last step, and how to extend the run; None if
        steps are left."""
        if self.step is None or self.step < config.max_steps:
            return None
        how = "" if config.optimizer.extensible else " with --resume with_changes"
        if self.step > config.max_steps:
            done = f"it is at step {self.step} already, after --max-steps {config.max_steps}"
        else:
            done = f"{self.step} of {config.max_steps} steps"
        return f"{config.run_dir} is complete: {done}; a higher --max-steps{how} extends it"

    def set_aside(self, say: Callable[[str, object], object]) -> None:
        """Rename the damaged checkpoints, so that the run can save their steps again.

        Args:
            say: prints a name and a text.
        """
        for step, reason in self.damaged.items():
            if jax.process_index() == 0:
                (self.folder / str(step)).rename(self.folder / f"{step}.damaged")
            say("WARNING", f"{reason}; kept as {step}.damaged. RESUMING FROM STEP {self.step}")
        processes.exchange("the damaged checkpoints are renamed")

    def restore(self, like: PyTree) -> PyTree:
        """Return the state of the checkpoint. See `checkpoint_files.restore`."""
        folder = self.folder / str(self.step)
        return checkpoint_files.restore(folder, self.meta["arrays"], like, needs="this run")

    def changes(self, config: Config) -> dict[str, tuple[Any, Any]]:
        """Return {option: (old, new)} of the options changed with --resume with_changes."""
        return {} if self.step is None else configuration.changes(self.meta["config"], config)


def find(config: Config) -> Resume:
    """Return the newest intact checkpoint of the run. All processes call this function.

    Raises:
        DamagedError: all checkpoints are damaged.
        CheckpointError: the checkpoint has another format.
        ProcessError: the processes do not see the same folder.
    """
    folder, damaged = (config.run_dir / CHECKPOINTS).absolute(), {}
    steps = checkpoint_files.steps(folder) if folder.is_dir() else []
    processes.check_alike({f"checkpoints in {folder}": steps})
    for step in steps:
        meta, reason = {}, None
        try:
            meta = checkpoint_files.verify(folder / str(step))
        except DamagedError as error:
            reason = str(error)
        if not (reasons := [reason for reason in processes.exchange(reason) if reason]):
            return Resume(folder, step, meta, damaged)
        damaged[step] = reasons[0]
    if damaged:
        raise DamagedError("\n".join([*damaged.values(), "choose another --name for a new run"]))
    return Resume(folder)
