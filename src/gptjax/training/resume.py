"""Resume from a run's newest checkpoint. Refuse a checkpoint of another config or other data."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree

from gptjax import config as configuration
from gptjax.config import Config, ConfigError
from gptjax.data import Dataset
from gptjax.stages import Timeline
from gptjax.training.checkpoint import CheckpointError, Checkpoints


@dataclasses.dataclass(frozen=True)
class Resume:
    """Starting point of a run.

    Attributes:
        step: step of the checkpoint; None for a run without a checkpoint, which begins at step 0.
        state: the restored training state; None before `restore`, or without a checkpoint.
        changes: {option: (old, new)} of the options changed with --resume-with-changes.
    """

    step: int | None = None
    state: PyTree | None = None
    changes: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)


def find(config: Config, dataset: Dataset, checkpoints: Checkpoints) -> Resume:
    """Return the newest readable checkpoint's step; no array is read.

    Raises:
        ConfigError: --resume excludes the checkpoint, or its config or data differ.
        CheckpointError: the checkpoint is damaged and --resume is must, or its data position is
            wrong.
    """
    step, meta, _ = checkpoints.newest(checkpoints.meta, fall_back=_may_fall_back(config)) or (
        None,
        None,
        None,
    )
    if step is None:
        if config.resume == "must":
            raise ConfigError(f"--resume must: there is no checkpoint in {checkpoints.folder}")
        return Resume()
    if config.resume == "never":
        raise ConfigError(
            f"--resume never: {config.run_dir} already has a checkpoint of step {step}; choose "
            "another --name"
        )
    _refuse_another_run(config, dataset, checkpoints, step, meta)
    return Resume(step)


def restore(
    config: Config,
    dataset: Dataset,
    checkpoints: Checkpoints,
    like: PyTree,
    say: Callable[[str, object], object],
) -> Resume:
    """Restore the newest readable checkpoint, and rename newer, damaged checkpoints.

    Args:
        like: the state as `jax.ShapeDtypeStruct`s with shardings.
        say: prints a name and a text.

    Raises:
        ConfigError, CheckpointError: as in `find`.
    """
    step, state, damaged = checkpoints.newest(
        lambda step: checkpoints.restore(step, like), fall_back=_may_fall_back(config)
    )
    meta = checkpoints.meta(step)
    if damaged:
        _refuse_another_run(config, dataset, checkpoints, step, meta)
        aside = checkpoints.set_aside(after=step)
        for line in damaged:
            say("WARNING", line)
        kept = f"what is damaged was kept as {', '.join(aside)}"
        say("WARNING", f"RESUMING FROM STEP {step}; {kept}")
    changes = configuration.changes(meta["config"], config)
    for name, (old, new) in changes.items():
        say("changed", f"{name}: {old} until step {step}, now {new}")
    return Resume(step, state, changes)


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


def _may_fall_back(config: Config) -> bool:
    """Return whether an older checkpoint may replace a damaged checkpoint."""
    return config.resume != "must"


def _refuse_another_run(
    config: Config, dataset: Dataset, checkpoints: Checkpoints, step: int, meta: dict
) -> None:
    if lines := configuration.differences(meta.get("config"), config):
        raise ConfigError(
            f"{config.run_dir} was begun with another config:\n  " + "\n  ".join(lines) + "\n"
            "Use the old values to resume the run, or another --name for a new run."
        )
    place = meta.get("data") or {}
    if lines := dataset.differences(place.get("dataset")):
        raise ConfigError(
            f"{config.run_dir} was trained on other data:\n  " + "\n  ".join(lines) + "\n"
            "The checkpoint has a position in the old data: give the old data, or another --name "
            "for a new run."
        )
    expected = _place(config, step)["position"]
    product = "" if config.stages else f"{step} × {config.batch} = "
    if place.get("position") != expected and not config.overfit_one_batch:
        raise CheckpointError(
            f"{checkpoints.folder / str(step)}: expected a data position of "
            f"{product}{expected} sequences, found {place.get('position')!r}; "
            "move that folder away to resume from an older checkpoint"
        )
