"""Optimizers and learning-rate schedules as optax transformations; nothing here knows gptjax's model."""

from gptjax.optim.adamw import adamw, decay_mask
from gptjax.optim.polar_express import newton_schulz, polar_express
from gptjax.optim.schedules import SCHEDULES, schedule

__all__ = ["SCHEDULES", "adamw", "decay_mask", "newton_schulz", "polar_express", "schedule"]
