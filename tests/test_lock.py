"""One run at a time in a folder."""

import errno
import fcntl
import os
import socket

import pytest

from gptjax.training.lock import LockedError, locked


def test_the_second_is_refused_with_the_first_ones_pid_and_host(tmp_path):
    says = f"run is in use by another process .pid {os.getpid()} on {socket.gethostname()}"
    with (
        locked(tmp_path / "run", pytest.fail),
        pytest.raises(LockedError, match=says),
        locked(tmp_path / "run", pytest.fail),
    ):
        pass
    with locked(tmp_path / "run", pytest.fail):  # released
        pass


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    notes = []
    with locked(tmp_path, notes.append):
        assert "file system without locks" in notes[0]
