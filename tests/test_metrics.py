"""Peaks and MFU, speed, the run's log with its resume, and the status line."""

import errno
import inspect
import io
import json
import math
import os
import struct
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from gptjax import precision
from gptjax.training.metrics import (
    PEAK_FLOPS,
    LogError,
    RunLog,
    StatusLine,
    Throughput,
    mfu,
    peak_flops,
    read_log,
)

# ------------------------------------------------------------------------------------ peaks and MFU


@pytest.mark.parametrize(
    "device_kind, name",
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", "GH200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada Generation"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe"),
        ("Tesla V100S-PCIE-32GB", "V100S PCIe"),
        ("Tesla T4", "T4"),
    ],
)
def test_each_device_finds_its_own_row(device_kind, name):
    for column in ("fp32", "tf32", "bf16"):
        assert peak_flops(device_kind, column) == PEAK_FLOPS[name].get(column)


@pytest.mark.parametrize(
    "device_kind",
    [
        "cpu",
        "",
        "NVIDIA",
        "NVIDIA H20",
        "NVIDIA L2",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA Graphics Device",
    ],
)
def test_an_unknown_variant_has_no_peak(device_kind):
    assert peak_flops(device_kind, "bf16") is None
    assert mfu(1e6, 1e9, device_kind, "bf16", 1) is None


def test_every_name_finds_its_row_and_the_columns_are_in_order():
    for name, row in PEAK_FLOPS.items():
        # each name is its own key: none is swallowed by another
        assert peak_flops(name, "fp32") == row["fp32"]
        assert 8e12 <= row["fp32"] <= row.get("tf32", math.inf) <= row.get("bf16", math.inf)
        # bf16 runs at twice TF32's rate on every chip, up to the datasheet's rounding
        if "bf16" in row:
            assert row["bf16"] / row["tf32"] == pytest.approx(2, rel=0.03)


def test_every_precision_has_a_peak_and_no_other():
    for name in precision.NAMES:
        assert peak_flops("NVIDIA H200", name) is not None
    assert (
        peak_flops("NVIDIA H200", "bf16_residual_fp32")
        == peak_flops("NVIDIA H200", "bf16")
        == 989.4e12
    )
    assert peak_flops("Tesla V100-SXM2-16GB", "tf32") is None
    with pytest.raises(ValueError, match="unknown precision 'fp16'; choose one of"):
        peak_flops("NVIDIA H200", "fp16")


def test_mfu_is_the_fraction_of_all_devices():
    # 300,000 tokens/s at 800 MFLOP each are 240 TFLOP/s.
    assert mfu(300_000, 8e8, "NVIDIA A100-SXM4-80GB", "bf16", 1) == pytest.approx(240 / 312)
    assert mfu(300_000, 8e8, "NVIDIA A100-SXM4-80GB", "tf32", 8) == pytest.approx(240 / 156 / 8)


# --------------------------------------------------------------------------------------- throughput


def test_throughput_leaves_out_the_first_step_and_pauses():
    speed = Throughput(window=3)
    assert speed.step(100.0) is None  # ends the first step, which compiled
    assert speed.step(100.2) == pytest.approx(200)
    speed.pause()
    assert speed.step(150.0) == pytest.approx(200)  # the validation and the step after it
    assert speed.step(150.4) == pytest.approx(300)
    speed.step(150.8)
    assert speed.step(151.2) == pytest.approx(400)  # the 200 ms have left the window


# ------------------------------------------------------------------------------------------ the log


def board_events(folder):
    """Every event of a folder's TensorBoard files, in order: framed as length, its checksum, the
    bytes, their checksum."""
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


def test_a_line_holds_what_was_given(tmp_path):
    with RunLog(tmp_path / "new" / "run") as log:
        log.write(
            "train",
            3,
            3072,
            loss=jnp.float32(2.5),
            lr=np.float64(1e-3),
            norm=jnp.bfloat16(1.5),
            ok=True,
            note=None,
        )
        log.write("sample", 4, 4096, text="Grüße\n\u2028\N{DUCK}")
        # On the disk already, while the log is open.
        assert len(log.path.read_text().splitlines()) == 2
    assert read_log(log.path) == [
        {
            "kind": "train",
            "step": 3,
            "tokens": 3072,
            "loss": 2.5,
            "lr": 1e-3,
            "norm": 1.5,
            "ok": True,
            "note": None,
        },
        {"kind": "sample", "step": 4, "tokens": 4096, "text": "Grüße\n\u2028\N{DUCK}"},
    ]
    assert ("train/loss", 3, 2.5) in board_scalars(log.path.parent)


def test_nan_and_infinity_are_null_and_the_file_is_json(tmp_path):
    with RunLog(tmp_path) as log:
        log.write("train", 1, 1, loss=math.nan, norm=jnp.float32(jnp.inf), low=-math.inf, fine=1.0)
    (line,) = log.path.read_text().splitlines()

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    row = json.loads(line, parse_constant=refuse)
    assert row["loss"] is row["norm"] is row["low"] is None and row["fine"] == 1.0
    assert any(
        tag == "train/loss" and math.isnan(value) for tag, _, value in board_scalars(tmp_path)
    )


def test_a_wrong_kind_or_an_array_is_refused(tmp_path):
    with RunLog(tmp_path) as log:
        with pytest.raises(ValueError, match="unknown kind 'valid'; choose one of"):
            # outside pytest no annotation is checked
            inspect.unwrap(RunLog.write)(log, "valid", 1, 1, loss=1.0)
        with pytest.raises(ValueError):
            log.write("train", 1, 1, loss=jnp.ones(3))
    assert log.path.read_text() == ""


def test_resume_makes_one_curve_of_two_runs(tmp_path):
    with RunLog(tmp_path) as log:
        write_steps(log, range(1, 8))
    with RunLog(tmp_path, resume_step=4) as log:
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
        "event": [2, 4, 6, 6, 8],  # what happened, happened
    }
    assert not list(tmp_path.glob("*.tmp"))
    # TensorBoard hides steps ≥ the START event's of every file before it.
    starts = [event.step for event in board_events(tmp_path) if event.HasField("session_log")]
    assert starts == [5]
    assert [s for tag, s, _ in board_scalars(tmp_path) if tag == "train/loss"] == [
        *range(1, 8),
        *range(5, 9),
    ]


class FullDisk:
    """A file on a disk that takes `room` more bytes."""

    def __init__(self, file, room: int):
        self._file, self._room = file, room

    def write(self, data):
        taken = data[: self._room]
        if data and not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._room -= len(taken)
        return self._file.write(taken)

    def flush(self):
        self.write(b"x")

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 1, 30])
def test_a_full_disk_is_an_error_and_leaves_no_torn_line(tmp_path, room):
    with RunLog(tmp_path) as log:
        log.write("train", 1, 10, loss=1.0)
        real, log._file = log._file, FullDisk(log._file, room)
        with pytest.raises(OSError, match="No space left"):
            log.write("train", 2, 20, loss=1.0)
        log._file = real
        log.write("train", 2, 20, loss=2.0)
    assert [row["loss"] for row in read_log(log.path)] == [1.0, 2.0]


def test_tensorboard_is_turned_off_with_a_note_at_its_first_error(tmp_path):
    notes = []
    with RunLog(tmp_path, note=notes.append) as log:
        record_writer = log._events._writer._py_recordio_writer
        real, record_writer._writer = record_writer._writer, FullDisk(io.BytesIO(), 40)
        for step in range(1, 30):  # more than the ten events that tensorboardX's own queue holds
            log.write("train", step, step, loss=1.0, lr=0.1)
        real.close()
    assert notes == [
        "TensorBoard's events are no longer written: No space left on device; log.jsonl goes on"
    ]
    assert len(read_log(log.path)) == 29


def test_starting_over_keeps_only_events(tmp_path):
    with RunLog(tmp_path) as log:
        log.write("val", 0, 0, loss=11.0)
        log.write("event", 0, 0, what="started")
    RunLog(tmp_path, resume_step=-1).close()
    assert [row["kind"] for row in read_log(log.path)] == ["event"]
    assert [event.step for event in board_events(tmp_path) if event.HasField("session_log")] == [0]


def test_a_new_run_does_not_touch_an_old_log(tmp_path):
    with RunLog(tmp_path) as log:
        log.write("train", 1, 1, loss=1.0)
    with pytest.raises(
        FileExistsError, match="earlier run; resume that run, or choose another folder"
    ):
        RunLog(tmp_path)
    assert len(read_log(log.path)) == 1


@pytest.mark.parametrize(
    "tail",
    [
        '{"kind": "train", "st',
        '{"kind": "train"}',
        "\0\0\0\0",
        '{"kind": "train", "step": 3, "tokens',
    ],
)
def test_a_torn_last_line_is_left_out_and_dropped_on_resume(tmp_path, tail):
    with RunLog(tmp_path) as log:
        write_steps(log, [1, 3])
    log.path.write_text(log.path.read_text() + tail)
    assert [row["step"] for row in read_log(log.path)] == [1, 3]
    with RunLog(tmp_path, resume_step=3) as log:
        write_steps(log, [5])
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [1, 3, 5]


def test_a_whole_last_line_without_its_newline_counts(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"kind": "train", "step": 1, "tokens": 2, "loss": 3}')
    with RunLog(tmp_path, resume_step=1) as log:
        write_steps(log, [3])
    assert [row["step"] for row in read_log(log.path)] == [1, 3]


@pytest.mark.parametrize("bad", ["nonsense", "", "[1, 2]", '{"kind": "train", "step": 2}'])
def test_a_malformed_middle_line_is_named(tmp_path, bad):
    path = tmp_path / "log.jsonl"
    good = '{"kind": "train", "step": 1, "tokens": 2}'
    path.write_text(f"{good}\n{bad}\n{good}\n")
    with pytest.raises(
        ValueError, match=r"log\.jsonl, line 2: expected a JSON object.*mend or delete"
    ):
        read_log(path)
    with pytest.raises(LogError, match="line 2"):
        RunLog(tmp_path, resume_step=2)
    assert path.read_text().splitlines()[1] == bad  # left as it was, for the user to mend
    # What a power cut left after the steps that count: they come again.
    RunLog(tmp_path, resume_step=1).close()
    assert path.read_text() == good + "\n"


def test_a_missing_or_empty_log(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_log(tmp_path / "log.jsonl")
    (tmp_path / "log.jsonl").write_text("")
    assert read_log(tmp_path / "log.jsonl") == []


# -------------------------------------------------------------------------------------- status line


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


VALUES = dict(loss=3.25, lr=6e-4)


def plain_lines(updates, *, total=100, on_gpu=True, every=10, width=40):
    """What a status line prints where there is no terminal; `updates` are (seconds, step,
    values)."""
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, width=width)
    with StatusLine(total, on_gpu=on_gpu, every=every, console=console, clock=clock) as status:
        for clock.now, step, values in updates:
            status.update(step, **VALUES, **values)
    return stream.getvalue().splitlines()


def test_without_a_terminal_a_plain_line_every_n_steps():
    lines = plain_lines([(step, step, {}) for step in range(1, 26)], total=25)
    assert [line.split(" · ")[0] for line in lines] == [
        "step 1/25",
        "step 10/25",
        "step 20/25",
        "step 25/25",
    ]
    assert "\x1b" not in "".join(lines)


def test_the_line_says_everything():
    speed = dict(ms_per_step=123.45, tokens_per_second=1234567.8, mfu=0.4567)
    lines = plain_lines([(0, 1, {}), (18, 10, speed | {"val_loss": 3.5}), (38, 20, speed)])
    assert (
        lines[0]
        == "step 1/100 · loss 3.2500 · val – · lr 6.00e-04 · ETA – · – ms · – tok/s · MFU –"
    )
    # 9 steps in 18 s leave 90 steps 180 s; the validation loss stays.
    assert lines[1] == (
        "step 10/100 · loss 3.2500 · val 3.5000 · lr 6.00e-04 · ETA 3m00s · 123.5 ms · 1,234,568 "
        "tok/s · MFU 45.7%"
    )
    assert "val 3.5000" in lines[2] and "ETA 2m40s" in lines[2]
    assert plain_lines([(0, 10, speed | {"mfu": None})])[0].endswith("MFU unknown GPU")


def test_time_left_counts_from_a_resumed_step_and_in_hours():
    lines = plain_lines([(5, 1000, {}), (15, 1010, {}), (25, 1020, {})], total=10_000)
    assert "ETA 2h29m" in lines[1] and "ETA 2h29m" in lines[2]


def test_a_cpu_has_no_mfu():
    assert plain_lines([(0, 1, {})], on_gpu=False)[0].endswith("MFU –")


def terminal(width=120):
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        color_system=None,
        legacy_windows=False,
    )


def screen(text, width=120):
    """What a terminal shows after `text`: carriage return, newline, erase line, cursor up."""
    rows, at, col, i = [""], 0, 0, 0
    while i < len(text):
        if text[i] == "\x1b":
            end = next(j for j in range(i + 2, len(text)) if text[j].isalpha())
            code, i = text[i + 2 : end + 1], end + 1
            if code == "2K":
                rows[at] = ""
            elif code == "1A":
                at -= 1
            continue
        if text[i] == "\r":
            col = 0
        elif text[i] == "\n":
            at, col = at + 1, 0
            rows += [""] * (at + 1 - len(rows))
        else:
            rows[at] = rows[at][:col].ljust(col) + text[i] + rows[at][col + 1 :]
            col += 1
        i += 1
    return [row.rstrip() for row in rows if row.strip()]


def test_on_a_terminal_one_line_is_redrawn_and_prints_go_above_it():
    console, clock = terminal(), Clock()
    with StatusLine(100, on_gpu=True, console=console, clock=clock) as status:
        for step in range(1, 8):
            clock.now = float(step)
            status.update(step, **VALUES)
            if step == 3:
                status.console.print("a sample of text")
            if step == 5:
                print("a plain print")
    shown = screen(console.file.getvalue())
    assert shown[:2] == ["a sample of text", "a plain print"]
    assert len(shown) == 3 and shown[2].startswith("step 7/100 · loss 3.2500")


def test_a_narrow_terminal_gets_one_row():
    console = terminal(width=30)
    with StatusLine(100, on_gpu=True, console=console, clock=Clock()) as status:
        status.update(1, **VALUES)
        status.update(100, **VALUES)
    (row,) = screen(console.file.getvalue())
    assert row.startswith("step 100/100 · loss") and len(row) <= 30


FULL = dict(ms_per_step=815.12, tokens_per_second=643_700.4, mfu=0.5204, val_loss=3.2721)
PARTS = (
    *("step 9750/19560", "loss 3.2500", "815.1 ms", "643,700 tok/s"),
    *("ETA 2h43m", "val 3.2721", "MFU 52.0%", "lr 6.00e-04"),
)


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 16])
def test_a_narrow_terminal_loses_whole_parts_the_least_important_first(width):
    console, clock = terminal(width), Clock()
    with StatusLine(19_560, on_gpu=True, console=console, clock=clock) as status:
        status.update(1, **VALUES, **FULL)
        clock.now = 9749.0  # a second a step
        status.update(9750, **VALUES, **FULL)
    (row,) = screen(console.file.getvalue(), width)
    shown = row.split(" · ")
    assert len(row) <= width and set(shown) == set(PARTS[: len(shown)])
    dropped = PARTS[len(shown) :]
    assert not dropped or len(" · ".join([*shown, dropped[0]])) > width
    assert len(shown) == {200: 8, 100: 7, 80: 5, 60: 4, 40: 3, 16: 1}[width]


def test_elsewhere_the_line_is_complete_whatever_the_width():
    (line,) = plain_lines([(0, 10, FULL)], width=40)
    assert "val 3.2721" in line and "MFU 52.0%" in line and "lr 6.00e-04" in line


def test_the_last_line_has_the_validation_loss_of_the_last_step():
    """train.py reports the step, then validates."""
    for console in (terminal(), Console(file=io.StringIO())):
        with StatusLine(20, on_gpu=True, console=console, clock=Clock()) as status:
            status.validated(10.5)  # before the first step there is no line to show
            assert "val" not in console.file.getvalue()
            status.update(10, **VALUES)
            status.validated(4.5)
            status.update(20, **VALUES)
            status.validated(3.5)
        lines = screen(console.file.getvalue())
        assert lines[-1].startswith("step 20/20") and "val 3.5000" in lines[-1]
    assert [line.split(" · ")[2] for line in lines] == ["val 10.5000", "val 4.5000", "val 3.5000"]


def test_the_terminal_is_spared_but_the_last_state_is_shown():
    console, clock = terminal(), Clock()
    with StatusLine(1000, on_gpu=True, console=console, clock=clock) as status:
        for step in range(1, 501):
            clock.now = step / 1000
            status.update(step, **VALUES)
    text = console.file.getvalue()
    assert 4 <= text.count("step ") <= 8  # half a second at ten a second, and the end
    assert screen(text)[-1].startswith("step 500/1000")


def test_an_error_inside_leaves_the_terminal_usable():
    console, before = terminal(), (sys.stdout, sys.stderr)
    with (
        pytest.raises(KeyboardInterrupt),
        StatusLine(10, on_gpu=True, console=console, clock=Clock()) as status,
    ):
        status.update(1, **VALUES)
        raise KeyboardInterrupt
    assert (sys.stdout, sys.stderr) == before
    assert console.file.getvalue().endswith("\x1b[?25h")  # the cursor is back
