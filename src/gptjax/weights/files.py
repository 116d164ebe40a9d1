"""Reading, checking and atomic writing of the files of other programs."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gptjax import files
from gptjax.weights.errors import WeightsError

# Errors of readers for files with wrong contents, and of the system.
_ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, RecursionError),
    *(FloatingPointError, SafetensorError),
)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise any error of reading a file as a WeightsError that begins with the path."""
    try:
        yield
    except WeightsError:
        raise
    except _ERRORS as error:
        raise WeightsError(f"{path}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Return the first line of an exception, without the name of a temporary file."""
    lookup = isinstance(error, LookupError)
    text = getattr(error, "strerror", None) or (repr(error) if lookup else str(error))
    return text.split("\n", 1)[0]


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    found = json.loads(files.read_regular(file).decode())
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {type(found).__name__}")
    return found


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file as `gptjax.files.replacing` does.

    Raises:
        WeightsError: the folder does not exist, `path` is not a regular file, or writing fails.
    """
    try:
        with files.replacing(path) as temporary:
            yield temporary
    except files.OutputError as error:
        raise WeightsError(str(error)) from error
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"{path}: not written: {reason(error)}. An older file is unchanged"
        ) from error
