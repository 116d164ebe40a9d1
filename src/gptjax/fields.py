"""Checks of a dataclass's fields by their annotations: types, and the ranges of `gptjax.ranges`."""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, Literal

from gptjax.ranges import ranges
from gptjax.terminal import has_control_characters


def flag(field: str) -> str:
    """Return the command-line option of a field, such as "--optimizer.clip-norm"."""
    return "--" + field.replace("_", "-")


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
            raise ValueError(
                f"{option} must be {_in_words(expected)}, got {value!r} ({type(value).__name__})"
            )
        if isinstance(value, (str, Path)) and has_control_characters(str(value)):
            raise ValueError(
                f"{option} must be valid UTF-8 without control characters, got {str(value)!r}"
            )
    check_ranges(options, prefix)


def check_ranges(options: Any, prefix: str = "") -> None:
    """Check the range of each number. Args and errors are those of `check_fields`."""
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
