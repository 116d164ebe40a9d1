"""Common part of matrix optimizers: AdamW for all other parameters, and its options."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import optax

from gptjax.optim.adamw import OptimizerConfig, adam_with_decay, clip_or_identity
from gptjax.optim.partition import Group, assign, describe, group_of, paths_of
from gptjax.optim.schedules import Scheduled
from gptjax.ranges import (
    DecayRate,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check_range,
)


def matrices_and_adamw(
    groups: Sequence[Group],
    matrix: optax.GradientTransformation,
    *,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.1,
    decay_form: Literal["lr", "lr_squared"] = "lr",
    cautious_decay: bool = False,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    clip_norm: float | None = 1.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
    nu_dtype: jax.typing.DTypeLike | None = None,
    every: int = 1,
) -> optax.GradientTransformation:
    """Return clipping, then `matrix` for groups of matrices and AdamW for other groups.

    Args:
        groups: rules of `assign`, which `init` calls.
        matrix: transformation of the matrices, learning rate included.
        learning_rate, weight_decay, decay_form, cautious_decay, b1, b2, eps, clip_norm, mu_dtype,
            nu_dtype: see `adamw`.
        every: period of AdamW in updates. AdamW steps at the end of a period with the sum of the
            period's clipped gradients. With a period of 2, AdamW steps in the updates with indices
            1, 3, ….

    Raises:
        GroupError: at `init`, as in `assign`.
        ValueError: a number outside its range.
    """
    groups = tuple(groups)
    check_range("matrices_and_adamw", at_least=1, every=every)

    def scaled(by):
        # AdamW counts its own updates; the schedule counts all updates.
        return (
            (lambda n: by * learning_rate(every * n + every - 1))
            if callable(learning_rate)
            else by * learning_rate
        )

    def adam(group):
        own: dict[str, Any] = {
            "b1": b1 if group.b1 is None else group.b1,
            "b2": b2 if group.b2 is None else group.b2,
        }
        own |= {"weight_decay": weight_decay * group.weight_decay, "decay_form": decay_form}
        own |= {"cautious_decay": cautious_decay, "eps": eps}
        own |= {"mu_dtype": mu_dtype, "nu_dtype": nu_dtype}
        return adam_with_decay(scaled(group.learning_rate), **own)

    def labels(params):
        names = [
            "matrix" if group.matrices is not None else str(groups.index(group))
            for group in (group_of(groups, path) for path in paths_of(params))
        ]
        return jax.tree.unflatten(jax.tree.structure(params), names)

    def checked_labels(params):
        assign(groups, paths_of(params))
        names = labels(params)
        return names if every == 1 else jax.tree.map(_matrix_or_rest, names)

    rest = {str(i): adam(group) for i, group in enumerate(groups) if group.matrices is None}
    if every > 1:
        # AdamW computes in each update; only every N-th result is used. XLA removes MultiSteps'
        # conditional, whose predicate is constant. For another, the host would wait on a GPU.
        summed = optax.MultiSteps(optax.partition(rest, labels), every, use_grad_mean=False)
        rest = {"rest": summed.gradient_transformation()}
    parts = optax.partition({"matrix": matrix, **rest}, checked_labels)
    return Scheduled.of(optax.chain(clip_or_identity(clip_norm), parts), learning_rate)


def _matrix_or_rest(label: str) -> str:
    return label if label == "matrix" else "rest"


@dataclasses.dataclass(frozen=True)
class MatrixOptimizerConfig(OptimizerConfig):
    """Optimizer of the matrices inside the blocks, with AdamW for all other parameters."""

    changeable: ClassVar[frozenset[str]] = OptimizerConfig.changeable | {"matrix_learning_rate"}

    matrix_learning_rate: PositiveFloat = 0.035
    """Peak learning rate of the matrices; the schedule has the same shape as AdamW's."""
    matrix_weight_decay: NonNegativeFloat = 0.025
    """Weight decay of the matrices."""
    momentum: DecayRate = 0.95
    """Momentum of the matrices."""
    adam_every: PositiveInt = 1
    """Apply AdamW every N steps, using the sum of the N gradients. A step that an outlier skips
    adds no gradient; if that step is the Nth, the sum is kept for the next N steps."""
    embedding_b1: DecayRate | None = None
    """b1 of the embeddings; None for the value of b1."""
    embedding_b2: DecayRate | None = None
    """b2 of the embeddings; None for the value of b2."""
    vector_b1: DecayRate | None = None
    """b1 of norms and biases; None for the value of b1."""
    vector_b2: DecayRate | None = None
    """b2 of norms and biases; None for the value of b2."""

    def why_not(self, groups: Sequence[Group]) -> str | None:
        if all(group.matrices is None for group in groups):
            return "the model has no groups of matrices; choose --optimizer adamw"
        return None

    def schedules(self, total_steps: int) -> dict[str, optax.Schedule]:
        matrix_rate = self._learning_rate(self.matrix_learning_rate, total_steps)
        return super().schedules(total_steps) | {"matrix_learning_rate": matrix_rate}

    def describe(self, params: optax.Params, groups: Sequence[Group]) -> list[str]:
        rows = [("parameter", "shape", "optimizer", "betas", "lr", "decay")]
        for path, shape, kind, group in describe(self._with_betas(groups), params, self.name):
            rate, decay, betas = self.matrix_learning_rate, self.matrix_weight_decay, ""
            if group.matrices is None:
                rate, decay = self.learning_rate, self.weight_decay
                b1, b2 = self._betas_of(group.b1, group.b2)
                betas = f"{b1:g}, {b2:g}"
            rate, decay = _product(rate, group.learning_rate), _product(decay, group.weight_decay)
            rows.append((path, shape, kind, betas, rate, decay))
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return [*super().describe(params, groups), *lines]

    @property
    def _betas(self) -> dict[str | None, tuple[float | None, float | None]]:
        """Values of b1 and b2 of each `Group.kind`."""
        return {
            "embedding": (self.embedding_b1, self.embedding_b2),
            "vector": (self.vector_b1, self.vector_b2),
        }

    def _betas_of(self, b1: float | None, b2: float | None) -> tuple[float, float]:
        """Return b1 and b2; AdamW's values in place of None."""
        return self.b1 if b1 is None else b1, self.b2 if b2 is None else b2

    def _with_betas(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Return the groups with this config's b1 and b2 for their kind."""
        result = []
        for group in groups:
            b1, b2 = self._betas.get(group.kind, (None, None))
            b1, b2 = group.b1 if b1 is None else b1, group.b2 if b2 is None else b2
            result.append(dataclasses.replace(group, b1=b1, b2=b2))
        return tuple(result)

    def _adamw_options(self, schedules: Mapping[str, optax.Schedule]) -> dict[str, Any]:
        return super()._adamw_options(schedules) | {"every": self.adam_every}


def _product(value: float, factor: float) -> str:
    """Return value · factor as text, with the factor if it is neither 0 nor 1."""
    return f"{value * factor:g}" + (f" (× {factor:g})" if factor not in (0, 1) else "")
