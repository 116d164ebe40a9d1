"""The status line, the time of a step, and the parts of the start."""

import time
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from gptjax.config import Config
from gptjax.training.progress import Progress
from gptjax.training.run_log import RunLog
from gptjax.training.signals import StopRequest
from gptjax.training.status_line import StartUpTime, StatusLine

VALUES = dict(loss=3.25, lr=6e-4, ms=None, tokens_per_second=None, mfu=None)
FULL = dict(ms=815.12, tokens_per_second=643_700.4, mfu=0.5204)


def plain_lines(updates, *, total=100):
    """Return the output; `updates` are (seconds, step, values)."""
    lines = []
    status = StatusLine(total, lines.append, tokens=lambda steps: steps)
    for at, step, values in updates:
        with mock.patch("time.monotonic", return_value=float(at)):
            status.update(step, **VALUES | values)
        status.val = "3.5000"
    return lines


def test_a_line_every_n_steps():
    lines = plain_lines([(step, step, {}) for step in range(1, 26)], total=25)
    steps = [line.split(" · ")[0].split()[1] for line in lines]
    assert steps == ["1/25", "10/25", "20/25", "25/25"]


def test_the_line_says_everything():
    lines = plain_lines([(0, 1, {}), (18, 10, FULL), (38, 20, FULL)])
    first = "step 1/100 · loss 3.2500 · val – · – ms · – tok/s · ETA – · MFU – · lr 6.00e-04"
    assert lines[0] == first
    # 9 steps in 18 s leave 90 steps 180 s; the validation loss stays.
    assert lines[1] == (
        "step 10/100 · loss 3.2500 · val 3.5000 · 815.1 ms · 643,700 tok/s · ETA 3m00s · "
        "MFU 52.0% · lr 6.00e-04"
    )
    assert "val 3.5000" in lines[2] and "ETA 2m40s" in lines[2]


def test_time_left_counts_from_a_resumed_step_and_in_hours():
    lines = plain_lines([(5, 1000, {}), (15, 1010, {}), (25, 1020, {})], total=10_000)
    assert "ETA 2h29m" in lines[1] and "ETA 2h29m" in lines[2]


def test_the_time_of_a_step_leaves_out_the_first_one_and_pauses():
    log, stop = mock.Mock(spec=RunLog), mock.Mock(spec=StopRequest)
    stop.metrics.return_value = {}
    how = {"step": 0, "devices": jax.devices()[:1], "stop": stop}
    progress = Progress(Config(), log, lambda line: None, **how)
    metrics = dict.fromkeys(("loss", "grad_norm", "lr"), jnp.ones(())) | {"skipped": jnp.zeros(())}

    def ms(now):
        progress.submit(progress.step + 1, metrics)
        with mock.patch("time.perf_counter", return_value=now):
            progress.read()
        return log.write.call_args.kwargs["ms"]

    assert ms(100.0) is None  # ends the first step, which compiled
    assert ms(100.2) == pytest.approx(200)
    progress.pause()
    assert ms(150.0) == pytest.approx(200)  # the validation and the step after it
    assert ms(150.4) == pytest.approx(300)
    later = [ms(150.4 + 0.4 * i) for i in range(1, 20)]
    assert later[-1] == pytest.approx(400)  # the 200 ms are not among the last 20 times


def test_the_parts_of_the_start_have_no_gap_between_them(monkeypatch):
    now = iter([12.0, 15.0, 15.5, 16.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    start_up = StartUpTime(10.0)
    for part in ("imports", "data", "imports", "state"):
        start_up.mark(part)
    assert start_up.seconds == {"imports": 2.5, "data": 3.0, "state": 0.5}
    assert str(start_up) == "after 6.0 s: imports 2.5, data 3.0, state 0.5"
