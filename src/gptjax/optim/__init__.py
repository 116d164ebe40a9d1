"""Optimizers and learning-rate schedules as optax transformations; nothing here knows gptjax's
model."""

from gptjax.optim.adamw import adamw, decay_mask
from gptjax.optim.groups import Group, GroupError, normuon_and_adamw
from gptjax.optim.mantissa import with_mantissa, with_stochastic_rounding
from gptjax.optim.normuon import (
    Matrices,
    add_cautious_decay,
    distributed,
    momentum_schedule,
    normuon,
    orthogonalize,
    scale_by_matrix_shape,
    scale_by_nesterov,
    scale_by_neuron_norm,
    scale_by_normuon,
)
from gptjax.optim.polar_express import newton_schulz, polar_express
from gptjax.optim.schedules import SCHEDULES, schedule

__all__ = [
    "SCHEDULES",
    "Group",
    "GroupError",
    "Matrices",
    "add_cautious_decay",
    "adamw",
    "decay_mask",
    "distributed",
    "momentum_schedule",
    "newton_schulz",
    "normuon",
    "normuon_and_adamw",
    "orthogonalize",
    "polar_express",
    "scale_by_matrix_shape",
    "scale_by_nesterov",
    "scale_by_neuron_norm",
    "scale_by_normuon",
    "schedule",
    "with_mantissa",
    "with_stochastic_rounding",
]
