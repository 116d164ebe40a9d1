"""Reading of regular files, and atomic and durable writing."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np


class OutputError(OSError):
    """A path that cannot be written: not a regular file, or in a folder that does not exist."""


def check_regular(path: str | os.PathLike) -> None:
    """Check that a path is a regular file, without opening it: `open` of a FIFO waits for a writer.

    Raises:
        OSError: the path does not exist, or is a directory, FIFO, socket or device.
    """
    if stat.S_ISREG(mode := os.stat(path).st_mode):
        return
    names = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    kind = names.get(stat.S_IFMT(mode), "a device")
    raise OSError(errno.EINVAL, f"{kind} instead of a regular file", os.fspath(path))


def read_regular(path: str | os.PathLike) -> bytes:
    """Return the contents of a regular file. Raise the errors of `check_regular`."""
    check_regular(path)
    return Path(path).read_bytes()


def output(path: Path) -> Path:
    """Return the file that is replaced when `path` is written: the target of a symbolic link.

    Raises:
        OutputError: the path exists and is not a regular file, such as /dev/null, or cannot be
            read.
    """
    try:
        check_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # also a link to a file that does not exist
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}; give another name") from error
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path, and rename it to `output(path)` at the end.

    Until the complete file is on disk, `path` stays unchanged.

    Raises:
        OutputError: the folder does not exist, or `path` is not a regular file.
        OSError: writing fails.
    """
    path = output(path)
    if not path.parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist. Create it")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)  # permissions of the umask
        yield temporary
        temporary.chmod(mode)  # safetensors creates files that only their owner can read
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_atomically(path: Path, *parts: bytes | np.ndarray) -> None:
    """Write the concatenated `parts` as `replacing` does."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        for part in parts:
            file.write(np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part)


def synchronize(paths: Iterable[Path]) -> None:
    """Call fsync for files and folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without fsync of folders
                raise
        finally:
            os.close(descriptor)
