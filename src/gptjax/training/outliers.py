"""z-scores of a series over a sliding window, so that a spike of loss or gradient norm can skip its
update.

What llm.c's `-sl` and `-sg` do: a value enters the window, then is compared with the window's mean
and deviation. It runs inside the jitted step, so the host need not wait for the loss to decide, and
it is saved with the rest of the state.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

WINDOW = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutlierWindow:
    """The last `WINDOW` values, oldest overwritten first, and how many were ever seen.

    Leaves are arrays, or their shapes where a state is only described: values fp32 of shape
    (WINDOW,), count an int32 scalar.
    """

    values: PyTree
    count: PyTree

    @classmethod
    def empty(cls) -> "OutlierWindow":
        return cls(jnp.zeros((WINDOW,), jnp.float32), jnp.zeros((), jnp.int32))


def observe(
    window: OutlierWindow, value: Float[Array, ""]
) -> tuple[OutlierWindow, Float[Array, ""]]:
    """Adds a value and returns its z-score.

    The score is 0 while the window is not full and where the deviation is 0. A value that is not
    finite does not enter the window (it would make every later score NaN).
    """
    finite = jnp.isfinite(value)
    values = jnp.where(finite, window.values.at[window.count % WINDOW].set(value), window.values)
    count = window.count + finite.astype(jnp.int32)
    deviation = values.std()
    z = jnp.where(
        (count >= WINDOW) & (deviation > 0),
        (value - values.mean()) / jnp.maximum(deviation, 1e-30),
        0.0,
    )
    return OutlierWindow(values, count), z
