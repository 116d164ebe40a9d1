"""Atomic writing, and the commands whose --out is not a regular file."""

import os
from pathlib import Path

import numpy as np
import pytest

from gptjax import evaluate, plot
from gptjax.bench import results
from gptjax.files import replacing, write_atomically
from gptjax.weights import WeightsError, files


def written(path):
    write_atomically(path, b"new ", np.frombuffer(b"text", np.uint8))


def exported(path):
    with files.replacing(path) as temporary:
        temporary.write_bytes(b"new text")


WRITERS = pytest.mark.parametrize("write", [written, exported])


@WRITERS
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed(write, exists, tmp_path):
    (tmp_path / "other").mkdir()
    link, target = tmp_path / "link.svg", tmp_path / "other" / "target.svg"
    link.symlink_to("other/target.svg")
    if exists:
        target.write_bytes(b"old")
    write(link)
    assert link.is_symlink() and [*target.parent.iterdir()] == [target]
    assert target.read_bytes() == b"new text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.svg", "other"]


@WRITERS
@pytest.mark.parametrize(
    "make, found",
    [
        (os.mkfifo, "a FIFO"),
        (os.mkdir, "a directory"),
        (lambda path: path.symlink_to("/dev/null"), "a device"),
    ],
)
def test_only_a_regular_file_is_replaced(write, make, found, tmp_path):
    path = tmp_path / "a.svg"
    make(path)
    mode = path.lstat().st_mode
    with pytest.raises(
        (OSError, WeightsError), match=rf"a\.svg: {found} instead of a regular file"
    ):
        write(path)
    assert path.lstat().st_mode == mode and [*tmp_path.iterdir()] == [path]


def test_after_an_error_the_old_file_is_left(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_bytes(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and [*tmp_path.iterdir()] == [path]


def test_a_device_is_refused_before_the_work(tmp_path, capsys):
    assert evaluate.main(["none", "--task", "loss", "--out", "/dev/null"]) == 1
    assert "/dev/null: a device instead of a regular file" in capsys.readouterr().err
    with pytest.raises(OSError, match="/dev/null: a device instead of a regular file"):
        results.check_file(Path("/dev/null"))
    (tmp_path / "log.jsonl").write_text('{"kind": "train", "step": 1, "tokens": 2, "loss": 3.0}\n')
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(OSError, match="a.png: a FIFO instead of a regular file"):
        plot.plot_runs([tmp_path], tmp_path / "a.png")
