"""Checks of files before reading, and atomic writing."""

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from gptjax import files
from gptjax.terminal import printable
from gptjax.weights.errors import WeightsError


def file_size(file: Path, *, missing: str = "Check the path") -> int:
    """Return the length of a regular file, without opening it.

    Args:
        missing: advice at the end of the error message if the file does not exist.

    Raises:
        WeightsError: the file does not exist or is not a regular file.
        OSError: `stat` failed.
    """
    try:
        status = file.stat()
    except FileNotFoundError:
        raise WeightsError(f"{shown(file)}: not there. {missing}") from None
    except ValueError as error:
        # a null byte in the name
        raise WeightsError(f"{shown(file)}: {reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        found = files.file_type(status.st_mode)
        raise WeightsError(f"{shown(file)}: expected a regular file, found {found}")
    return status.st_size


def shown(path: Path) -> str:
    """Return a path for a message."""
    return printable(str(path))


def reason(error: Exception) -> str:
    """Return the message of an exception without the name of a temporary file."""
    return getattr(error, "strerror", None) or printable(str(error))


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
        raise WeightsError(printable(str(error))) from error
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"{shown(path)}: not written: {reason(error)}. An older file is unchanged"
        ) from error
