"""Ranges of the optimizers' options."""

import math


def check_range(
    where: str, /, *, at_least: float | int = 0, below: float | int = math.inf, **options
) -> None:
    """Refuse an option outside [at_least, below).

    Only Python numbers are checked: None, schedules and arrays pass.

    Raises:
        ValueError: an option is outside the range, or NaN.
    """
    for name, value in options.items():
        if isinstance(value, (int, float)) and not at_least <= value < below:
            bounded = below < math.inf
            expected = f"in [{at_least}, {below})" if bounded else f"finite and at least {at_least}"
            raise ValueError(f"{where}: {name} must be {expected}, got {value}")
