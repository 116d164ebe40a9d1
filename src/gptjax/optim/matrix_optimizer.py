"""Common part of matrix optimizers: AdamW for all other parameters, and its options."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import optax

from gptjax.optim.adamw import OptimizerConfig, adam_with_decay, clip_by_global_norm
from gptjax.optim.partition import Group, assign, flatten, group_of
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
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    clip_norm: float | None = 1.0,
    every: int = 1,
    **adam: Any,
) -> optax.GradientTransformation:
    """Return clipping, then `matrix` for groups of matrices and AdamW for other groups.

    Args:
        groups: rules of `assign`, which `init` calls.
        matrix: transformation of the matrices, learning rate included.
        learning_rate, weight_decay, b1, b2, eps, clip_norm, adam: see `adamw`.
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

    def adam_of(group):
        betas = (b1 if group.b1 is None else group.b1), (b2 if group.b2 is None else group.b2)
        decay = weight_decay * group.weight_decay
        rate = scaled(group.learning_rate)
        return adam_with_decay(rate, b1=betas[0], b2=betas[1], eps=eps, weight_decay=decay, **adam)

    def label(group):
        return "matrix" if group.matrices is not None else str(groups.index(group))

    def labels(params):
        names, _, structure = flatten(params)
        return jax.tree.unflatten(structure, [label(group_of(groups, name)) for name in names])

    def checked_labels(params):
        assign(groups, flatten(params)[0])
        if every == 1:
            return labels(params)
        return jax.tree.map(lambda x: x if x == "matrix" else "rest", labels(params))

    rest = {label(group): adam_of(group) for group in groups if group.matrices is None}
    if every > 1:
        # AdamW computes in each update; only every N-th result is used. XLA removes MultiSteps'
        # conditional, whose predicate is constant. For another, the host would wait on a GPU.
        summed = optax.MultiSteps(optax.partition(rest, labels), every, use_grad_mean=False)
        rest = {"rest": summed.gradient_transformation()}
    parts = optax.partition({"matrix": matrix, **rest}, checked_labels)
    return Scheduled.of(optax.chain(clip_by_global_norm(clip_norm), parts), learning_rate)


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
        paths, leaves, _ = flatten(params)
        assigned, kinds = assign(self._groups(groups), paths), {}
        for path, leaf in zip(paths, leaves, strict=True):
            key = re.sub(r"(?<=\.)\d+(?=\.)", "*", path), leaf.shape, assigned[path]
            kinds[key] = kinds.get(key, 0) + 1
        rows = [("parameter", "shape", "optimizer", "betas", "lr", "decay")]
        for (path, shape, group), count in kinds.items():
            optimizer, betas = "adamw", f"{group.b1:g}, {group.b2:g}"
            rate, decay = self.learning_rate, self.weight_decay
            if group.matrices is not None:
                *lead, n_in, n_out = group.matrices.shape(shape, path)
                many = f"{n} matrices" if (n := math.prod(lead)) > 1 else "1 matrix"
                optimizer, betas = f"{self.name}, {many} of {n_in} × {n_out}", ""
                rate, decay = self.matrix_learning_rate, self.matrix_weight_decay
            rows.append(
                (
                    path + (f" (of {count})" if count > 1 else ""),
                    " × ".join(map(str, shape)),
                    optimizer,
                    betas,
                    _product(rate, group.learning_rate),
                    _product(decay, group.weight_decay),
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return [*super().describe(params, groups), *lines]

    def _groups(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Return the groups with b1 and b2: this config's for their kind, their own, or AdamW's."""

        def beta(group: Group, name: str) -> float:
            values = getattr(self, f"{group.kind}_{name}", None), getattr(group, name)
            return next((x for x in values if x is not None), getattr(self, name))

        return tuple(
            dataclasses.replace(group, b1=beta(group, "b1"), b2=beta(group, "b2"))
            for group in groups
        )

    def _adamw_options(self, schedules: Mapping[str, optax.Schedule]) -> dict[str, Any]:
        return super()._adamw_options(schedules) | {"every": self.adam_every}


def _product(value: float, factor: float) -> str:
    """Return value · factor as text, with the factor if it is neither 0 nor 1."""
    return f"{value * factor:g}" + (f" (× {factor:g})" if factor not in (0, 1) else "")
