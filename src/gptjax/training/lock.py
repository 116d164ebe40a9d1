"""Lock of a run's folder: one run at a time."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

import jax

from gptjax import processes
from gptjax.terminal import UserError

FILE = "run.lock"


class LockedError(UserError, RuntimeError):
    """Another process holds the lock of the run's folder."""


@contextlib.contextmanager
def locked(run_dir: Path, warn: Callable[[str], object]):
    """Hold the lock of a run's folder, which is created if it does not exist.

    The lock is an `flock` of process 0, which the operating system releases when the process ends
    for any reason. The lock file is kept; it holds the host and pid of the last process.

    Args:
        warn: receives a sentence for the user if the file system does not support locks.

    Raises:
        LockedError: another process holds the lock. The message has the process's host and pid.
        ProcessError: the processes of the run do not see the same folder.
        OSError: the folder or the file cannot be created.
    """
    path, own = run_dir / FILE, f"pid {os.getpid()} on {socket.gethostname()}"
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockedError(
                    f"{run_dir} is in use by another process ({path.read_text().strip()}); wait "
                    "for it, stop it, or choose another --name"
                ) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                warn(f"{run_dir} is on a file system without locks: do not start a second process")
            path.write_text(f"{own}\n")
            os.fsync(file.fileno())  # make the text visible on other hosts
        processes.exchange("process 0 has the lock")
        text = path.read_text() if path.exists() else ""
        processes.check_alike({f"{path} (on a file system of all hosts)": text})
        yield
