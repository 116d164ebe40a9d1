"""Learning-rate schedules: functions of the update's index (0 for the first), with linear
warm-up."""

import jax.numpy as jnp
import optax

from gptjax.ranges import check_range

SCHEDULES = ("cosine", "linear", "constant", "wsd")

WSD_DECAY_FRACTION = 0.2


def schedule(
    name: str, *, peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.0
) -> optax.Schedule:
    """Return the schedule of a name.

    Warm-up: peak·(step+1)/warmup_steps for the first `warmup_steps` updates. After it, with
    progress p from 0 to 1 at `total_steps` and floor f = final_fraction:

        cosine    peak·(f + (1−f)·(1 + cos πp)/2)
        linear    peak·(1 − (1−f)·p)
        constant  peak
        wsd       peak, then over the last 20 % of all steps peak·(f + (1−f)·(1 − √q)), q from 0
                  to 1 (warmup, stable, decay: Hägele et al., 2024)

    Raises:
        ValueError: an unknown name (the message lists them); a number outside its range.
    """
    check_range("schedule", peak=peak, warmup_steps=warmup_steps, total_steps=total_steps)
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"schedule: final_fraction must be in [0, 1], got {final_fraction}")
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; choose one of {list(SCHEDULES)}")

    def decayed(step):
        if name == "constant":
            return jnp.ones_like(step)
        if name == "wsd":
            start = (1 - WSD_DECAY_FRACTION) * total_steps
            q = jnp.clip((step - start) / max(total_steps - start, 1), 0.0, 1.0)
            shape = 1 - jnp.sqrt(q)
        else:
            p = jnp.clip((step - warmup_steps) / max(total_steps - warmup_steps, 1), 0.0, 1.0)
            shape = (1 + jnp.cos(jnp.pi * p)) / 2 if name == "cosine" else 1 - p
        return final_fraction + (1 - final_fraction) * shape

    def learning_rate(count):
        step = jnp.asarray(count, jnp.float32)
        warm = (step + 1) / max(warmup_steps, 1)
        return peak * jnp.where(step < warmup_steps, warm, decayed(step))

    return learning_rate
