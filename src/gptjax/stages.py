"""Options of a run's stages, and the schedules of a run with stages.

`gptjax.timeline` has the steps and the data of each stage.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from gptjax.fields import PositiveFloat, PositiveInt, fields_from_json
from gptjax.models.base import ModelConfig, abstract_params
from gptjax.optim import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class Stage:
    """Steps of a run with their own options. None: the run's value of the option."""

    until: PositiveInt | None = None
    """Step at which the stage ends, and the next begins. None in the last stage: max_steps."""
    batch_tokens: PositiveInt | None = None
    """Tokens of an optimizer step, over all devices and micro-batches."""
    sequence_length: PositiveInt | None = None
    """Tokens of a sequence."""
    max_document_length: PositiveInt | None = None
    """Tokens of a document that are read."""
    micro_batch: PositiveInt | None = None
    """Sequences on each device at a time."""
    learning_rate_factor: PositiveFloat = 1.0
    """Factor of all peak learning rates. The schedule continues to count the steps of the run, and
    the learning rates at its end do not change."""
    model: Mapping = dataclasses.field(default_factory=dict, hash=False)
    """Values of the model's fields; the parameters must keep their shapes."""


def with_changes(model: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    """Return the model config with the changes of a stage.

    Raises:
        ValueError: an unknown field, or a change of the shapes or dtypes of the parameters.
    """
    result = dataclasses.replace(model, **fields_from_json(type(model), changes))
    if changes and abstract_params(result) != abstract_params(model):
        raise ValueError(
            f"expected changes of the model that keep the shapes and dtypes of its parameters, got "
            f"{', '.join(changes)}"
        )
    return result


def schedules(
    optimizer: OptimizerConfig, stages: Sequence[Stage], total_steps: int
) -> dict[str, optax.Schedule]:
    """Return the optimizer's schedules with the learning-rate factors of the stages.

    In a stage, the peak learning rates are multiplied by the stage's factor; the learning rates at
    the schedule's end are not multiplied. The schedules depend on the update's index only, so one
    optimizer with one form of state serves all stages.

    Raises:
        ValueError: a stage's peak is below the learning rate at the schedule's end; a schedule does
            not fit into the run.
    """
    if all(stage.learning_rate_factor == 1 for stage in stages):
        return optimizer.schedules(total_steps)
    fields = (field.name for field in dataclasses.fields(optimizer))
    rates = [name for name in fields if name.endswith("learning_rate")]

    def scaled(factor):
        own = {name: factor * getattr(optimizer, name) for name in rates}
        if (final_fraction := optimizer.final_fraction / factor) > 1:
            raise ValueError(
                f"expected a learning_rate_factor of at least final_fraction, "
                f"{optimizer.final_fraction}, got {factor}"
            )
        own["final_fraction"] = final_fraction
        return dataclasses.replace(optimizer, **own).schedules(total_steps)

    *others, last = [(stage.until, scaled(stage.learning_rate_factor)) for stage in stages]

    def choose(name):
        def value(count):
            result = last[1][name](count)
            for until, own in reversed(others):
                result = jnp.where(count < until, own[name](count), result)
            return result

        return value

    return {name: choose(name) for name in last[1]}


def to_json(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """Return the options of each stage that differ from the defaults, as JSON."""
    default = vars(Stage())
    options = [
        {name: value for name, value in vars(stage).items() if value != default[name]}
        for stage in stages
    ]

    def plain(value: Any) -> Any:
        return dict(value) if isinstance(value, Mapping) else str(value)

    return json.loads(json.dumps(options, default=plain))


def from_json(text: str) -> Stage:
    """Return the stage of a JSON object, as on the command line.

    Raises:
        ValueError: the text is not a JSON object, or has an unknown field.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--stages: expected a JSON object, got {text!r:.60}: {error}") from error
    known = [field.name for field in dataclasses.fields(Stage)]
    if not isinstance(fields, dict) or not fields.keys() <= set(known):
        raise ValueError(f"--stages: expected the fields {', '.join(known)}, got {text}")
    return Stage(**fields)
