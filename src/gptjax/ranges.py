"""Ranges of numeric options, as annotations of a dataclass's fields: `eps: PositiveFloat = 1e-8`.

A step computes in fp32, which rounds numbers below the smallest fp32 number to 0, and numbers
between 1 − 2⁻²⁴ and 1 to 1. Steps are counted in int32.
"""

import dataclasses
import math
import typing
from typing import Annotated, Any

import numpy as np

_FP32, _INT32 = np.finfo(np.float32), np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class Range:
    """A closed interval.

    Attributes:
        text: the interval in words, for messages.
    """

    text: str
    low: float | int
    high: float | int


PositiveFloat = Annotated[
    float, Range("above 0 and finite in fp32", float(_FP32.tiny), float(_FP32.max))
]
NonNegativeFloat = Annotated[float, Range("at least 0 and finite in fp32", 0.0, float(_FP32.max))]
DecayRate = Annotated[float, Range("at least 0 and below 1 in fp32", 0.0, 1 - 2**-24)]
UnitFloat = Annotated[float, Range("in [0, 1]", 0.0, 1.0)]
PositiveInt = Annotated[int, Range(f"at least 1 and at most {_INT32.max}", 1, int(_INT32.max))]
NonNegativeInt = Annotated[int, Range(f"at least 0 and at most {_INT32.max}", 0, int(_INT32.max))]
Seed = Annotated[int, Range(f"at least 0 and at most {2**32 - 1}", 0, 2**32 - 1)]


def ranges(options: type) -> dict[str, Range]:
    """Return the range of each dataclass field that is annotated with a range."""
    hints = typing.get_type_hints(options, include_extras=True)
    found = {field.name: _range(hints[field.name]) for field in dataclasses.fields(options)}
    return {name: allowed for name, allowed in found.items() if allowed is not None}


def _range(hint: Any) -> Range | None:
    """Return the first range in an annotation, such as `Annotated[…] | None`."""
    if isinstance(hint, Range):
        return hint
    parts = (*typing.get_args(hint), *getattr(hint, "__metadata__", ()))
    return next((found for part in parts if (found := _range(part))), None)


def check_range(
    where: str, /, *, at_least: float | int = 0, below: float | int = math.inf, **options
) -> None:
    """Check that each option is in [at_least, below).

    Only Python numbers are checked: None, schedules and arrays pass.

    Raises:
        ValueError: an option is outside the range, or NaN.
    """
    for name, value in options.items():
        if isinstance(value, (int, float)) and not at_least <= value < below:
            bounded = below < math.inf
            expected = f"in [{at_least}, {below})" if bounded else f"finite and at least {at_least}"
            raise ValueError(f"{where}: {name} must be {expected}, got {value}")
