"""Optimizers and learning-rate schedules as optax transformations, independent of any model."""

from typing import TYPE_CHECKING

from gptjax.optim.adamw import adamw, add_cautious_decay, decay_mask, matrices_and_adamw
from gptjax.optim.low_precision import view, whole, with_mantissa, with_stochastic_rounding
from gptjax.optim.normuon import (
    distributed,
    momentum_schedule,
    normuon,
    normuon_and_adamw,
    orthogonalize,
    scale_by_matrix_shape,
    scale_by_nesterov,
    scale_by_neuron_norm,
    scale_by_normuon,
)
from gptjax.optim.partition import Group, GroupError, Matrices
from gptjax.optim.polar_express import newton_schulz, polar_express
from gptjax.optim.schedules import SCHEDULES, Scheduled, schedule
from gptjax.optim.transforms import (
    Metrics,
    ema_nesterov,
    evaluation_params,
    radial_pin,
    row_floor,
    tail_ema,
)

# Options of train.py: imported at their first use. The transformations do not need them.
if TYPE_CHECKING:
    from gptjax.optim.config import (
        ALGORITHMS,
        MatrixOptimizerConfig,
        MuonConfig,
        NorMuonConfig,
        OptimizerConfig,
        switch_algorithm,
    )

__all__ = [
    "ALGORITHMS",
    "SCHEDULES",
    "Group",
    "GroupError",
    "Matrices",
    "MatrixOptimizerConfig",
    "Metrics",
    "MuonConfig",
    "NorMuonConfig",
    "OptimizerConfig",
    "Scheduled",
    "add_cautious_decay",
    "adamw",
    "decay_mask",
    "distributed",
    "ema_nesterov",
    "evaluation_params",
    "matrices_and_adamw",
    "momentum_schedule",
    "newton_schulz",
    "normuon",
    "normuon_and_adamw",
    "orthogonalize",
    "polar_express",
    "radial_pin",
    "row_floor",
    "scale_by_matrix_shape",
    "scale_by_nesterov",
    "scale_by_neuron_norm",
    "scale_by_normuon",
    "schedule",
    "switch_algorithm",
    "tail_ema",
    "view",
    "whole",
    "with_mantissa",
    "with_stochastic_rounding",
]


def __getattr__(name: str):
    import importlib

    if name in __all__:
        return getattr(importlib.import_module("gptjax.optim.config"), name)
    raise AttributeError(f"module 'gptjax.optim' has no attribute {name!r}")
