"""Time from the command to the first completed step, by part."""

import time

from gptjax.training.start_up_time import StartUpTime


def test_the_parts_have_no_gap_between_them(monkeypatch):
    now = iter([12.0, 15.0, 15.5, 16.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    start_up = StartUpTime(10.0)
    for part in ("imports", "data", "imports", "state"):
        start_up.mark(part)
    assert start_up.seconds == {"imports": 2.5, "data": 3.0, "state": 0.5}
    assert str(start_up) == "after 6.0 s: imports 2.5, data 3.0, state 0.5"
