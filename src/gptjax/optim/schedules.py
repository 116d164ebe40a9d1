"""Learning-rate schedules with linear warm-up, as functions of the update's index (0 for the
first)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

SHAPES: dict[str, Callable[[jax.Array], jax.Array] | None] = {
    "cosine": lambda p: (1 + jnp.cos(jnp.pi * p)) / 2,
    "linear": lambda p: 1 - p,
    "constant": None,
    "wsd": lambda p: 1 - jnp.sqrt(p),
    "powercool": lambda p: (1 - p) ** 1.2,
}
"""Name of a schedule → its fall from 1 to 0 as a function of the cooldown's progress p in [0, 1].
None: no cooldown."""
SCHEDULES = (*SHAPES,)
"""The names that `schedule` accepts."""

COOLDOWN_FRACTIONS = {"wsd": 0.2, "powercool": 0.82}
"""Part of the steps that a schedule's cooldown takes by default. Other schedules: all steps after
the warm-up."""


class Scheduled(optax.GradientTransformation):
    """A transformation with its learning rate, which the metrics of a training step show.

    Example:
        >>> tx = gptjax.optim.Scheduled.of(optax.lion(rate), rate)
    """

    learning_rate: optax.ScalarOrSchedule

    @classmethod
    def of(
        cls, tx: optax.GradientTransformation, learning_rate: optax.ScalarOrSchedule
    ) -> "Scheduled":
        """Return `tx`, which reads `learning_rate`."""
        result = cls(tx.init, tx.update)
        result.learning_rate = learning_rate
        return result

    def learning_rate_at(self, step: Any) -> jax.Array:
        """Return the learning rate of the update with index `step`, fp32."""
        rate = self.learning_rate
        return jnp.asarray(rate(step) if callable(rate) else rate, jnp.float32)


def schedule(
    name: str,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    final_fraction: float = 0.0,
    cooldown_steps: int | float | None = None,
    final_steps: int = 0,
) -> optax.Schedule:
    """Return the schedule with this name.

    Warm-up: peak·(step+1)/warmup_steps for the first `warmup_steps` updates. Then the peak until
    the cooldown. In the cooldown, with progress p from 0 to 1 and floor f = final_fraction:

        cosine    peak·(f + (1−f)·(1 + cos πp)/2)
        linear    peak·(1 − (1−f)·p)
        constant  peak
        wsd       peak·(f + (1−f)·(1 − √p)) (warmup, stable, decay: Hägele et al., 2024)
        powercool peak·(f + (1−f)·(1 − p)^1.2) (modded-nanogpt's optimizer track, 2026, written
                  there as min(peak, k·(total_steps − step)^1.2))

    Args:
        cooldown_steps: steps of the cooldown. None: all steps after the warm-up; for wsd, the last
            20 %; for powercool, the last 82 %.
        final_steps: steps with the final learning rate, between the cooldown and `total_steps`.
            The final learning rate of constant is the peak.

    Raises:
        ValueError: an unknown name (the message lists them); a cooldown that begins before the
            warm-up ends.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; choose one of {list(SCHEDULES)}")

    end = total_steps - final_steps
    cooldown = cooldown_steps
    if cooldown is None and name in COOLDOWN_FRACTIONS:
        cooldown = COOLDOWN_FRACTIONS[name] * end
    begin = warmup_steps if cooldown is None else end - cooldown
    # Without a cooldown of its own length, a warm-up may be longer than a short trial.
    if begin < warmup_steps or (final_steps and begin > end):
        raise ValueError(
            f"schedule: expected {warmup_steps} steps of warm-up, {cooldown or 0:g} of cooldown "
            f"and {final_steps} final ones to fit into {total_steps}; lower warmup_steps, "
            "cooldown_steps or final_steps (--optimizer.warmup-steps …), or train more steps"
        )

    def decayed(step):
        if (shape := SHAPES[name]) is None:
            return jnp.ones_like(step)
        p = jnp.clip((step - begin) / max(end - begin, 1), 0.0, 1.0)
        return final_fraction + (1 - final_fraction) * shape(p)

    def learning_rate(count):
        step = jnp.asarray(count, jnp.float32)
        warm = (step + 1) / max(warmup_steps, 1)
        return peak * jnp.where(step < warmup_steps, warm, decayed(step))

    return learning_rate
