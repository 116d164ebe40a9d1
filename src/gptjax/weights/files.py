"""Checks of files before reading, and atomic writing."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

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
        found = _file_type(status.st_mode)
        raise WeightsError(f"{shown(file)}: expected a regular file, found {found}")
    return status.st_size


def _file_type(mode: int) -> str:
    names = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return names.get(stat.S_IFMT(mode), "a device")


def shown(path: Path) -> str:
    """Return a path for a message."""
    return printable(str(path))


def reason(error: Exception) -> str:
    """Return the message of an exception without the name of a temporary file."""
    return getattr(error, "strerror", None) or printable(str(error))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path, and rename it to `path` at the end.

    Until the complete file is on disk, `path` stays unchanged.

    Raises:
        WeightsError: the folder does not exist, `path` is not a regular file, or writing fails.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        if not path.parent.is_dir():
            raise WeightsError(
                f"{shown(path)}: the folder {shown(path.parent)} does not exist. Create it"
            )
        if path.exists():
            # os.replace would also replace a device or a FIFO.
            file_size(path)
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)  # permissions of the umask
        yield temporary
        temporary.chmod(mode)  # safetensors creates files that only their owner can read
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"{shown(path)}: not written: {reason(error)}. An older file is unchanged"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
