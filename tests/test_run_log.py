"""The run's log: lines, resume, TensorBoard events, damaged files."""

import errno
import json
import math
import os
import struct
import sys
from contextlib import closing
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from gptjax.training.run_log import LogError, RunLog, check_wandb, read_log


def board_events(folder):
    """All events of a folder's TensorBoard files, in order. A record is length, checksum of the
    length, bytes, checksum of the bytes."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            events.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 12 + length + 4
    return events


def board_scalars(folder):
    return [
        (v.tag, e.step, v.simple_value)
        for e in board_events(folder)
        for v in e.summary.value
        if "text" not in v.tag
    ]


def write_steps(log, steps):
    for step in steps:
        log.write("train", step, 10 * step, loss=float(step))
        if step % 2 == 0:
            log.write("val", step, 10 * step, loss=float(step))
            log.write("sample", step, 10 * step, text=f"at {step}")
            log.write("event", step, 10 * step, what="checkpoint")


def test_a_line_holds_every_field(tmp_path):
    fields = {"loss": jnp.float32(2.5), "lr": np.float64(1e-3), "ok": True, "note": None}
    broken = {"nan": math.nan, "inf": jnp.float32(jnp.inf), "low": -math.inf}
    text = "Grüße\n\u2028\N{DUCK}"
    with closing(RunLog(tmp_path / "new" / "run")) as log:
        log.write("train", 3, 3072, norm=jnp.bfloat16(1.5), **fields, **broken)
        log.write("sample", 4, 4096, text=text)
        # The lines are in the file while the log is open.
        assert len(log.path.read_text().splitlines()) == 2
        with pytest.raises(ValueError):
            log.write("train", 1, 1, loss=jnp.ones(3))
    train = {"kind": "train", "step": 3, "tokens": 3072, "norm": 1.5}
    train |= {"loss": 2.5, "lr": 1e-3, "ok": True, "note": None} | dict.fromkeys(broken)
    assert read_log(log.path) == [
        train,
        {"kind": "sample", "step": 4, "tokens": 4096, "text": text},
    ]
    scalars = board_scalars(log.path.parent)
    assert ("train/loss", 3, 2.5) in scalars
    assert [math.isnan(value) for tag, _, value in scalars if tag == "train/nan"] == [True]


def test_resume_joins_two_runs_into_one_curve(tmp_path):
    with closing(RunLog(tmp_path)) as log:
        write_steps(log, range(1, 8))
    with closing(RunLog(tmp_path, resume_step=4)) as log:
        write_steps(log, range(5, 9))
    rows = read_log(log.path)
    steps = {
        kind: [row["step"] for row in rows if row["kind"] == kind]
        for kind in ("train", "val", "sample", "event")
    }
    assert steps == {
        "train": list(range(1, 9)),
        "val": [2, 4, 6, 8],
        "sample": [2, 4, 6, 8],
        "event": [2, 4, 6, 6, 8],  # events are kept
    }
    # TensorBoard hides steps ≥ the START event's of every file before it.
    starts = [event.step for event in board_events(tmp_path) if event.HasField("session_log")]
    assert starts == [0, 5]
    steps = [s for tag, s, _ in board_scalars(tmp_path) if tag == "train/loss"]
    assert steps == [*range(1, 8), *range(5, 9)]
    # Starting over keeps only the events.
    RunLog(tmp_path).close()
    assert {row["kind"] for row in read_log(log.path)} == {"event"}


STEP_1 = '{"kind": "train", "step": 1, "tokens": 2}\n'


class FullDisk:
    """A file on a disk with `room` free bytes."""

    def __init__(self, file, room: int):
        self._file, self._room = file, room

    def write(self, data):
        self._file.write(data[: self._room])
        self._file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 30])
def test_a_full_disk_is_an_error_and_the_run_resumes(tmp_path, room):
    with closing(RunLog(tmp_path)) as log:
        log.write("train", 1, 10, loss=1.0)
        log._file = FullDisk(log._file, room)
        with pytest.raises(OSError, match="No space left"):
            log.write("train", 2, 20, loss=1.0)
    with closing(RunLog(tmp_path, 1)) as log:
        log.write("train", 2, 20, loss=2.0)
    assert [row["loss"] for row in read_log(log.path)] == [1.0, 2.0]


@pytest.mark.parametrize(
    "tail, steps",
    [
        ('{"kind": "train", "st', [1]),
        ('{"kind": "train"}', [1]),
        ("\0\0\0\0", [1]),
        ('{"kind": "train", "step": 3, "tokens": 2}', [1, 3]),
    ],
)
def test_a_torn_last_line_is_left_out_and_dropped_on_resume(tmp_path, tail, steps):
    path = tmp_path / "log.jsonl"
    path.write_text(STEP_1 + tail)
    assert [row["step"] for row in read_log(path)] == steps
    with closing(RunLog(tmp_path, resume_step=3)) as log:
        write_steps(log, [5])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*steps, 5]


@pytest.mark.parametrize("bad", ["nonsense", "", "[1, 2]", '{"kind": "train", "step": 2}'])
def test_a_malformed_middle_line_is_named(tmp_path, bad):
    path = tmp_path / "log.jsonl"
    path.write_text(f"{STEP_1}{bad}\n{STEP_1}")
    for read in (read_log, lambda path: RunLog(path.parent, resume_step=2)):
        with pytest.raises(LogError, match=r"log\.jsonl, line 2: expected .*correct or delete"):
            read(path)
    assert path.read_text().splitlines()[1] == bad  # unchanged, for the user to correct


def test_a_log_that_is_not_a_regular_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_log(tmp_path / "log.jsonl")
    os.mkfifo(tmp_path / "log.jsonl")
    for read in (read_log, lambda path: RunLog(path.parent, resume_step=3)):
        with pytest.raises(LogError, match=r"log\.jsonl: cannot be read: a FIFO instead"):
            read(tmp_path / "log.jsonl")


# --------------------------------------------------------------------------------- Weights & Biases


@pytest.fixture
def wandb(monkeypatch):
    """A package that records its calls, of which one may fail."""

    def install(broken=None):
        fake = mock.MagicMock()
        calls = {"init": fake.init} | {c: getattr(fake.init(), c) for c in ("log", "finish")}
        if broken is not None:
            calls[broken].side_effect = ConnectionError(f"no network in {broken}\nmore")
        fake.init.reset_mock()
        monkeypatch.setitem(sys.modules, "wandb", fake)
        return fake

    return install


def test_wandb_gets_what_the_log_gets(tmp_path, wandb):
    fake, run = wandb(), tmp_path / "run"
    with closing(RunLog(run, wandb="gpt")) as log:
        log.write("event", 0, 0, event="start", config={"seed": 3})
        log.write("train", 1, 10, loss=jnp.float32(2.5), skipped=None)
        log.write("val", 1, 10, loss=2.0)
    written = fake.init.return_value
    assert [call.args[0] for call in written.log.call_args_list] == [
        {"step": 0, "tokens": 0, "event/event": "start"},
        {"step": 1, "tokens": 10, "train/loss": 2.5},
        {"step": 1, "tokens": 10, "val/loss": 2.0},
    ]
    written.config.update.assert_called_once_with({"seed": 3}, allow_val_change=True)
    written.define_metric.assert_called_once_with("*", step_metric="step")
    written.finish.assert_called_once_with()
    fake.Settings.assert_called_once_with(console="off")
    # A resumed run is the same run there.
    RunLog(run, 1, wandb="gpt").close()
    RunLog(tmp_path / "other", wandb="gpt").close()
    first, resumed, other = (call.kwargs for call in fake.init.call_args_list)
    assert (first["project"], first["name"], first["dir"]) == ("gpt", "run", run)
    assert resumed["id"] == first["id"] != other["id"] and resumed["resume"] == "allow"


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_wandb_is_turned_off_with_a_note_at_its_first_error(tmp_path, wandb, broken):
    fake, notes = wandb(broken), []
    with closing(RunLog(tmp_path, wandb="gpt", note=notes.append)) as log:
        write_steps(log, range(1, 4))
    assert notes == [
        f"Weights & Biases is no longer written: no network in {broken}; log.jsonl is still written"
    ]
    calls = {"init": 0, "log": 1, "finish": 6}[broken]  # none after the first error
    assert len(read_log(log.path)) == 6 and fake.init.return_value.log.call_count == calls


def test_wandb_is_refused_before_the_run_if_it_is_missing(monkeypatch, tmp_path):
    # A folder of the same name in the working directory, which wandb writes, is not the package.
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    check_wandb(None)
    with pytest.raises(LogError, match=r"--wandb gpt needs .*pip install 'gptjax\[wandb\]'"):
        check_wandb("gpt")
