"""One process at a time in the folder of a run."""

import errno
import fcntl
import os
import socket
import subprocess
import sys

import pytest

from gptjax.training.lock import LockedError, locked


def test_the_second_is_refused_with_the_first_ones_pid_and_host(tmp_path):
    with locked(tmp_path / "run") as note:
        assert note is None
        with (
            pytest.raises(
                LockedError,
                match=f"run is in use by another process "
                f".pid {os.getpid()} on {socket.gethostname()}",
            ),
            locked(tmp_path / "run"),
        ):
            pass
    with locked(tmp_path / "run"):  # released
        pass


def test_the_kernel_releases_it_when_a_process_is_killed(tmp_path):
    code = "import pathlib, time\nfrom gptjax.training.lock import locked\n"
    code += f"with locked(pathlib.Path({str(tmp_path)!r})):\n"
    code += "    print('locked', flush=True)\n    time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(LockedError, match=f"pid {process.pid} on"), locked(tmp_path):
            pass
    finally:
        process.kill()
        process.communicate()
    with locked(tmp_path):
        pass


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path) as note:
        assert "file system without locks" in note
