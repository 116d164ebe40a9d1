"""z-scores over a sliding window, to skip the update at a spike of loss or gradient norm.

As in llm.c (`-sl`, `-sg`), a value is first added to the window. Then the value is compared with
the mean and the standard deviation of the window. The computation is part of the jitted step, so
the host does not wait for the loss. The window is part of the saved state.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

WINDOW = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutlierWindow:
    """Ring buffer of the last `WINDOW` values, and the number of values so far.

    Attributes:
        values: fp32 of shape (WINDOW,), or a ShapeDtypeStruct.
        count: int32 scalar, or a ShapeDtypeStruct.
    """

    values: PyTree
    count: PyTree

    @classmethod
    def empty(cls) -> "OutlierWindow":
        """Return a window without values."""
        return cls(jnp.zeros((WINDOW,), jnp.float32), jnp.zeros((), jnp.int32))


def observe(
    window: OutlierWindow, value: Float[Array, ""]
) -> tuple[OutlierWindow, Float[Array, ""]]:
    """Add a value and return the window and the value's z-score.

    The score is 0 if the window is not full or the standard deviation is 0. A value that is not
    finite is not added, because later scores would be NaN.
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
