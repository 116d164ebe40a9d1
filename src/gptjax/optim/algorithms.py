"""Optimizers by name, and Muon (Jordan et al., 2024) as optax implements it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import optax
import optax.contrib
from jax.sharding import Mesh

from gptjax.optim.adamw import OptimizerConfig
from gptjax.optim.matrix_optimizer import MatrixOptimizerConfig, matrices_and_adamw
from gptjax.optim.normuon import NorMuonConfig
from gptjax.optim.partition import Group, Matrices


@dataclasses.dataclass(frozen=True)
class MuonConfig(MatrixOptimizerConfig):
    """optax's Muon for the matrices inside the blocks, AdamW for all other parameters.

    Each parameter is one matrix, even if its layout packs several matrices.
    """

    name: ClassVar[str] = "muon"

    def why_not(self, groups: Sequence[Group]) -> str | None:
        plain = Matrices(), 1.0, 1.0
        for group in self._groups(groups):
            own = group.matrices, group.learning_rate, group.weight_decay
            if group.matrices is not None and own != plain:
                return (
                    f"the group {group.paths!r} is not one matrix of (inputs, outputs) with the "
                    "optimizer's own learning rate and decay; choose --optimizer normuon"
                )
        return super().why_not(groups)

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
        return matrices_and_adamw(self._groups(groups), muon, **options)

    def _groups(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        def whole(group: Group) -> Group:
            layout = group.matrices and dataclasses.replace(group.matrices, packed=1)
            return dataclasses.replace(group, matrices=layout)

        return tuple(map(whole, super()._groups(groups)))


ALGORITHMS: dict[str, type[OptimizerConfig]] = {
    "adamw": OptimizerConfig,
    "normuon": NorMuonConfig,
    "muon": MuonConfig,
}


def switch_algorithm(config: OptimizerConfig, name: str) -> OptimizerConfig:
    """Return the config of another algorithm; options of both algorithms keep their values.

    Raises:
        ValueError: an unknown name (the message lists them).
    """
    if name == config.name:
        return config
    if name not in ALGORITHMS:
        raise ValueError(f"unknown optimizer {name!r}; choose one of {list(ALGORITHMS)}")
    options = {field.name for field in dataclasses.fields(ALGORITHMS[name])}
    kept = {option: value for option, value in vars(config).items() if option in options}
    return ALGORITHMS[name](**kept)
