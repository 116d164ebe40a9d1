"""Stages of a run: batch, sequence length, learning rate and model that change at given steps.

Steps are indices of updates, 0 for the first. A run without stages is one stage.

Data. A sequence length and a maximum document length define the training windows
(`gptjax.data.loader`). A stage with the same two lengths as the previous stage continues in the
same order of windows, with another batch. A stage that changes a length begins a new order of all
windows, and may read text of an earlier stage again. The first order equals that of a run without
stages. With the data order "sequential", each stage begins where the previous one ended.
"""

import bisect
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import optax

from gptjax.models.base import ModelConfig, abstract_params
from gptjax.precision import Precision
from gptjax.ranges import PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from gptjax.config import Config


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


# Options of a Stage that replace options of the config.
_REPLACED = ("batch_tokens", "sequence_length", "max_document_length", "micro_batch")


@dataclasses.dataclass(frozen=True)
class Span:
    """The steps begin … end − 1 of a run.

    Attributes:
        number: number of the stage, 1 for the first.
        config: the run's config with the options of the stage, and without stages.
        learning_rate_factor: as in `Stage`.
        order: number of the order of windows that the stage reads, 0 for the first.
        position: windows of this order that earlier stages consumed.
        tokens: tokens that earlier stages consumed.
    """

    number: int
    begin: int
    end: int
    config: "Config"
    learning_rate_factor: float = 1.0
    order: int = 0
    position: int = 0
    tokens: int = 0


class Timeline:
    """The stages of a run that begin before max_steps.

    Attributes:
        config: the run's config.
        spans: at least one, in order.
        total: number of stages in the config, including those that are not reached; at least 1.
    """

    def __init__(self, config: "Config"):
        self.config = config
        self.total = max(len(config.stages), 1)
        first = Span(1, 0, config.max_steps, config)
        self.spans = [first] if not config.stages else []
        begin = order = position = tokens = 0
        for number, stage in enumerate(config.stages, start=1):
            if begin >= config.max_steps:
                break
            own = stage_config(config, number)
            if self.spans and (
                config.data_order == "sequential"
                or _windows(own) != _windows(self.spans[-1].config)
            ):
                order, position = order + 1, 0
            end = min(stage.until or config.max_steps, config.max_steps)
            factor = stage.learning_rate_factor
            self.spans.append(Span(number, begin, end, own, factor, order, position, tokens))
            position += (end - begin) * own.batch
            tokens += (end - begin) * own.batch_tokens
            begin = end
        self._begins = [span.begin for span in self.spans]

    def at(self, step: int) -> Span:
        """Return the stage of the update with index `step`; the last stage for any later step."""
        return self.spans[bisect.bisect_right(self._begins, step) - 1]

    def name(self, span: Span) -> str:
        """Return "stage 2 of 3: ", which begins a message; "" in a run without stages."""
        return f"stage {span.number} of {self.total}: " if self.total > 1 else ""

    def tokens(self, step: int) -> int:
        """Return the number of tokens in the first `step` steps."""
        span = self.at(step)
        return span.tokens + (step - span.begin) * span.config.batch_tokens

    def position(self, step: int, span: Span | None = None) -> int:
        """Return the number of windows of one order that the first `step` steps consumed.

        Args:
            span: a stage that reads the order; `at(step)` if None.
        """
        span = span or self.at(step)
        return span.position + (step - span.begin) * span.config.batch


def _windows(config: "Config") -> tuple[int, int | None]:
    """Return the options that define the training windows."""
    return config.sequence_length, config.max_document_length


def stage_config(config: "Config", number: int) -> "Config":
    """Return the config with the options of stage `number`, and without stages.

    Raises:
        ValueError: the stage's options do not fit the config's.
    """
    stage = config.stages[number - 1]
    own = {name: value for name in _REPLACED if (value := getattr(stage, name)) is not None}
    try:
        model = _model(config.model, stage.model)
        result = dataclasses.replace(config, stages=(), model=model, **own)
    except ValueError as error:
        raise ValueError(f"stage {number}: {error}") from error
    if result.batch_tokens % result.sequence_length:
        raise ValueError(
            f"stage {number}: expected a batch of whole sequences, got batch_tokens "
            f"{result.batch_tokens} with sequence_length {result.sequence_length}"
        )
    return result


def _model(model: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    known = {field.name for field in dataclasses.fields(model)}
    if unknown := sorted(changes.keys() - known):
        raise ValueError(f"{type(model).__name__} has no fields {', '.join(map(repr, unknown))}")
    if isinstance(name := changes.get("precision"), str):  # as in JSON
        changes = {**changes, "precision": Precision(name)}
    changes = {name: _hashable(name, value) for name, value in changes.items()}
    result = dataclasses.replace(model, **changes)
    if changes and abstract_params(result) != abstract_params(model):
        raise ValueError(
            f"expected changes of the model that keep the shapes and dtypes of its parameters, got "
            f"{', '.join(changes)}"
        )
    return result


def _hashable(name: str, value: Any) -> Any:
    """Return the value with tuples in place of lists, as in a config file."""
    if isinstance(value, list):
        return tuple(_hashable(name, part) for part in value)
    if isinstance(value, Mapping):
        raise ValueError(f"expected a value of the model's field {name}, got {value}")
    return value


def check(config: "Config") -> None:
    """Check the schedules, the order of the stages, and the config of each.

    Raises:
        ValueError: the stages do not follow each other, do not cover the run, or have options that
            do not fit the config; a schedule does not fit into the run, or reaches learning rate 0
            before the run ends.
    """
    schedules(config)
    _check_rates(config)
    if not config.stages:
        return
    if config.overfit_one_batch:
        raise ValueError("--overfit-one-batch has one batch only: leave the stages out")
    begin: int | None = 0
    last = len(config.stages)
    packs = stage_config(config, 1).max_document_length is not None
    for number, stage in enumerate(config.stages, start=1):
        if stage.until is None and number < last:
            raise ValueError(f"stage {number} of {last} needs until, the step at which it ends")
        if stage.until is not None and begin is not None and stage.until <= begin:
            raise ValueError(
                f"stage {number} begins at step {begin} and must end after it, got until "
                f"{stage.until}"
            )
        own = stage_config(config, number)
        if config.data_order == "sequential" and packs != (own.max_document_length is not None):
            raise ValueError(
                f"stage {number}: --data-order sequential needs max_document_length in all stages, "
                "or in none"
            )
        begin = stage.until
    if begin is not None and begin < config.max_steps:
        raise ValueError(
            f"the last stage ends at step {begin}, before --max-steps {config.max_steps}; leave "
            "its until out, or add a stage"
        )


def _check_rates(config: "Config") -> None:
    """Raise ValueError if steps at the end of the run have the learning rate 0."""
    optimizer, steps = config.optimizer, config.max_steps
    zero_from = optimizer.zero_from(steps)
    if zero_from is None or zero_from >= steps:
        return
    given, choice = [], "--optimizer.final-steps 0"
    if optimizer.schedule_steps is not None:
        given = [f"--optimizer.schedule-steps {optimizer.schedule_steps}"]
        choice = f"--max-steps {zero_from}"
    if optimizer.final_steps:
        given.append(f"--optimizer.final-steps {optimizer.final_steps}")
    raise ValueError(
        f"--max-steps {steps} with {' and '.join(given)} trains with learning rate 0 from step "
        f"{zero_from} on; choose {choice}, or an --optimizer.final-fraction above 0; a run whose "
        "schedule has ended continues as a new run with --init-from"
    )


def other_schedule(config: "Config", end: Any) -> str:
    """Describe --max-steps of a resumed run whose checkpoint has a schedule that ends at step
    `end`, and name what to do."""
    text = f"--max-steps {config.max_steps}: the checkpoint's schedule ends at step {end}; "
    choices = [f"--max-steps {end}"]
    if isinstance(end, int) and end > 0:
        optimizer = dataclasses.replace(config.optimizer, schedule_steps=end)
        zero_from = optimizer.zero_from(config.max_steps)
        if zero_from is None or zero_from >= config.max_steps:
            choices.append(f"add --optimizer.schedule-steps {end}")
    choices.append(f"start a new run: --name NEW --init-from {config.run_dir}")
    return text + "choose " + ", or ".join(choices)


def schedules(config: "Config") -> dict[str, optax.Schedule]:
    """Return the optimizer's schedules with the learning-rate factors of the stages.

    In a stage, the peak learning rates are multiplied by the stage's factor; the learning rates at
    the schedule's end are not multiplied. The schedules depend on the update's index only, so one
    optimizer with one form of state serves all stages.

    Raises:
        ValueError: a stage's peak is below the learning rate at the schedule's end; a schedule does
            not fit into the run.
    """
    optimizer, stages = config.optimizer, config.stages
    if all(stage.learning_rate_factor == 1 for stage in stages):
        return optimizer.schedules(config.max_steps)
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
        return dataclasses.replace(optimizer, **own).schedules(config.max_steps)

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
    return json.loads(json.dumps(options, default=_plain))


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def from_json(text: str) -> Stage:
    """Return the stage of a JSON object, as on the command line.

    Raises:
        ValueError: the text is not a JSON object, or has an unknown field.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a stage as a JSON object, got {text!r:.60}: {error}") from error
    known = [field.name for field in dataclasses.fields(Stage)]
    if not isinstance(fields, dict) or not fields.keys() <= set(known):
        raise ValueError(f"expected a JSON object with fields of {', '.join(known)}, got {text}")
    return Stage(**fields)


def without_micro_batch(stages: Any) -> Any:
    """Return the JSON of `to_json` without micro_batch, which does not affect learning.

    Any other value, as from a damaged checkpoint, is returned unchanged.
    """
    if not isinstance(stages, list) or not all(isinstance(stage, Mapping) for stage in stages):
        return stages
    return [{n: value for n, value in s.items() if n != "micro_batch"} for s in stages]
