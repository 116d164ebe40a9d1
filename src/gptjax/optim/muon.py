"""Muon (Jordan et al., 2024), as optax implements it, for the matrices inside the blocks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import optax
import optax.contrib
from jax.sharding import Mesh

from gptjax.optim.matrices import Matrices
from gptjax.optim.matrix_optimizer import MatrixOptimizerConfig, matrices_and_adamw
from gptjax.optim.partition import Group


@dataclasses.dataclass(frozen=True)
class MuonConfig(MatrixOptimizerConfig):
    """optax's Muon for the matrices inside the blocks, AdamW for all other parameters.

    Each parameter is one matrix, even if its layout packs several matrices.
    """

    name: ClassVar[str] = "muon"

    def why_not(self, groups: Sequence[Group]) -> str | None:
        if (why := super().why_not(groups)) is not None:
            return why
        plain = Matrices(), 1.0, 1.0
        for group in groups:
            if group.matrices is None:
                continue
            layout = dataclasses.replace(group.matrices, packed=1)
            if (layout, group.learning_rate, group.weight_decay) != plain:
                return (
                    f"the group {group.paths!r} is not one matrix of (inputs, outputs) with the "
                    "optimizer's own learning rate and decay; choose --optimizer normuon"
                )
        return None

    def build(
        self,
        *,
        total_steps: int,
        groups: Sequence[Group],
        mesh: Mesh,
        schedules: Mapping[str, optax.Schedule] | None = None,
    ) -> optax.GradientTransformation:
        del mesh
        schedules = schedules or self.schedules(total_steps)
        whole = optax.contrib.MuonDimensionNumbers(0, 1)
        # The AdamW of optax.contrib.muon would have Nesterov momentum, and decay for all
        # parameters. Hence optax.contrib.muon gets matrices only.
        muon = optax.contrib.muon(
            schedules["matrix_learning_rate"],
            beta=self.momentum,
            weight_decay=self.matrix_weight_decay,
            muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: whole, params),
        )
        options = self._adamw_options(schedules)
        return matrices_and_adamw(self._with_betas(groups), muon, **options)

    def describe(self, params: optax.Params, groups: Sequence[Group]) -> list[str]:
        whole = [
            group if group.matrices is None else dataclasses.replace(group, matrices=Matrices())
            for group in groups
        ]
        return super().describe(params, whole)
