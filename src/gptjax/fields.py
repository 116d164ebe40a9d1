"""Fields of a dataclass of options: ranges as annotations, `eps: PositiveFloat = 1e-8`, and checks.

A step computes in fp32, which rounds numbers below the smallest fp32 number to 0, and numbers
between 1 − 2⁻²⁴ and 1 to 1. Steps are counted in int32.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from gptjax.terminal import has_control_characters

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


def flag(field: str) -> str:
    """Return the command-line option of a field, such as "--optimizer.clip-norm"."""
    return "--" + field.replace("_", "-")


def fields_from_json(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of the fields of a dataclass, from JSON: tuples in place of lists, and a named
    tuple or a dataclass of one text, such as `Precision`, where the field has this type.

    Raises:
        ValueError: a field that the class does not have, or a text that its type refuses.
    """
    hints, known = typing.get_type_hints(kind), {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(
            f"{kind.__name__} has no fields {', '.join(map(repr, unknown))}; if a checkpoint names "
            "them, another version of its file saved the config"
        )

    def made(value: Any, hint: Any) -> Any:
        if isinstance(value, list) and hasattr(hint, "_fields"):
            return hint(*_tuples(value))
        if isinstance(value, str) and dataclasses.is_dataclass(hint):
            return hint(value)
        return _tuples(value)

    return {name: made(value, hints[name]) for name, value in values.items()}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def check_fields(options: Any, prefix: str = "") -> None:
    """Check the type of each field, and the range of each number.

    Args:
        options: instance of a dataclass.
        prefix: prefix of each option's name, such as "optimizer.".

    Raises:
        ValueError: the message names the option, the allowed values and the value.
    """
    hints = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        value, expected = getattr(options, field.name), hints[field.name]
        option = flag(prefix + field.name)
        if not _has_type(value, expected):
            kind, found = _in_words(expected), f"{value!r} ({type(value).__name__})"
            named = isinstance(value, str) and dataclasses.is_dataclass(expected)
            give = f"; give {kind}({value!r})" if named else ""
            raise ValueError(f"{option} must be {kind}, got {found}{give}")
        if isinstance(value, (str, Path)) and has_control_characters(str(value)):
            raise ValueError(
                f"{option} must be valid UTF-8 without control characters, got {str(value)!r}"
            )
    for name, interval in ranges(type(options)).items():
        value = getattr(options, name)
        if value is not None and not interval.low <= value <= interval.high:  # NaN too
            raise ValueError(f"{flag(prefix + name)} must be {interval.text}, got {value}")


def _has_type(value: Any, expected: Any) -> bool:
    """Return True for an instance of a type; an int is also a float, a bool is neither."""
    if typing.get_origin(expected) is tuple:
        kind = typing.get_args(expected)[0]
        return isinstance(value, tuple) and all(_has_type(item, kind) for item in value)
    if typing.get_origin(expected) is Literal:
        return isinstance(value, str) and value in typing.get_args(expected)
    if isinstance(value, bool):
        return expected is bool
    kinds = typing.get_args(expected) or (expected,)
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


def _in_words(expected: Any) -> str:
    """Return a type as text: "one of a, b", "float | None", "Path"."""
    arguments = typing.get_args(expected)
    if typing.get_origin(expected) is tuple:
        return f"tuple of {arguments[0].__name__}"
    if typing.get_origin(expected) is Literal:
        return f"one of {', '.join(arguments)}"
    return " | ".join(
        "None" if kind is types.NoneType else kind.__name__ for kind in arguments or (expected,)
    )
