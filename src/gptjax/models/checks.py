"""Checks of configs' fields and of arrays of token ids."""

import jax.numpy as jnp


def check_size(config: str, name: str, value) -> None:
    """Raise ValueError unless a field of a config is an int of at least 1."""
    # bool is an int. NumPy's integers are not: a checkpoint stores the config as JSON.
    if type(value) is not int or value < 1:
        raise ValueError(
            f"{config}: {name} must be an int of at least 1, got {value!r} of type "
            f"{type(value).__name__}"
        )


def check_ids(name: str, ids) -> None:
    """Check that `ids` is a two-dimensional array of integers.

    Raises:
        ValueError: `ids` has another shape or dtype; the message begins with `name`.
    """
    if getattr(ids, "ndim", None) != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        got = f"{ids.shape} in {ids.dtype}" if hasattr(ids, "shape") else f"a {type(ids).__name__}"
        raise ValueError(
            f"{name}: expected an array of integer ids of shape (batch, time), such as "
            f"jnp.array([[1, 2]]), got {got}"
        )
