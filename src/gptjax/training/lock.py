"""Lock of a run's folder: one process at a time."""

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

FILE = "run.lock"


class LockedError(RuntimeError):
    """Another process holds the lock of the run's folder."""


@contextlib.contextmanager
def locked(run_dir: Path):
    """Hold the lock of a run's folder, which is created if it does not exist.

    The lock is an `flock`, which the operating system releases when the process ends for any
    reason. The lock file is kept; it holds the host and pid of the last process.

    Yields:
        A sentence for the user if the file system does not support locks, else None.

    Raises:
        LockedError: another process holds the lock. The message has the process's host and pid.
        OSError: the folder or the file cannot be created.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield _acquire(path, descriptor)
    finally:
        os.close(descriptor)


def _acquire(path: Path, descriptor: int) -> str | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        raise LockedError(
            f"{path.parent} is in use by another process ({holder or 'just started'}); "
            "wait for it, stop it, or choose another --name"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        return (
            f"{path.parent} is on a file system without locks: do not start a second process with "
            "this --name"
        )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    os.fsync(descriptor)  # make the text visible on other hosts
    return None
