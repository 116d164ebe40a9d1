"""The status line, on a terminal and elsewhere."""

import io
import sys
import time

import pytest
from rich.console import Console

from gptjax.training.status_line import StartUpTime, StatusLine, fitted


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


VALUES = dict(loss=3.25, lr=6e-4)
FULL = dict(ms=815.12, tokens_per_second=643_700.4, mfu=0.5204)


def plain_lines(updates, *, total=100):
    """Return the output without a terminal; `updates` are (seconds, step, values)."""
    stream, clock = io.StringIO(), Clock()
    with StatusLine(total, console=Console(file=stream, width=40), clock=clock) as status:
        for clock.now, step, values in ((float(at), *rest) for at, *rest in updates):
            status.update(step, **VALUES, **values)
            status.validated(3.5)
    return stream.getvalue().splitlines()


def test_without_a_terminal_a_plain_line_every_n_steps():
    lines = plain_lines([(step, step, {}) for step in range(1, 26)], total=25)
    steps = [line.split(" · ")[0].split()[1] for line in lines]
    assert steps == ["1/25", "10/25", "20/25", "25/25"] and "\x1b" not in "".join(lines)


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


def terminal(width=120):
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def screen(text, width=120):
    """Return the screen of a terminal that interprets CR, LF, erase line and cursor up."""
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
    with StatusLine(100, console=console, clock=clock) as status:
        status.validated(10.5)  # before the first step there is no line to show
        for step in range(1, 8):
            clock.now = float(step)
            status.update(step, **VALUES)
            if step == 3:
                status.console.print("a sample of text")
            if step == 5:
                print("a plain print")
                status.note("eval", "core 0.5")
        status.validated(4.5)
    shown = screen(console.file.getvalue())
    assert shown[:2] == ["a sample of text", "a plain print"] and len(shown) == 3
    assert shown[2].startswith("step 7/100 · loss 3.2500 · val 4.5000 · ")
    assert shown[2].endswith(" · core 0.5")


def test_a_narrow_terminal_cuts_the_line_and_is_spared_but_the_last_state_is_shown():
    console, clock = terminal(width=30), Clock()
    with StatusLine(1000, console=console, clock=clock) as status:
        for step in range(1, 501):
            clock.now = step / 1000
            status.update(step, **VALUES)
    text = console.file.getvalue()
    assert 4 <= text.count("step ") <= 8  # half a second at ten a second, and the end
    (row,) = screen(text)
    assert row.startswith("step 500/1000 · loss 3.2500 ·") and len(row) <= 30


def test_an_error_inside_leaves_the_terminal_usable():
    console, before = terminal(), (sys.stdout, sys.stderr)
    with pytest.raises(KeyboardInterrupt), StatusLine(10, console=console) as status:
        status.update(1, **VALUES)
        raise KeyboardInterrupt
    assert (sys.stdout, sys.stderr) == before
    assert console.file.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_the_parts_of_the_start_have_no_gap_between_them(monkeypatch):
    now = iter([12.0, 15.0, 15.5, 16.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    start_up = StartUpTime(10.0)
    for part in ("imports", "data", "imports", "state"):
        start_up.mark(part)
    assert start_up.seconds == {"imports": 2.5, "data": 3.0, "state": 0.5}
    assert str(start_up) == "after 6.0 s: imports 2.5, data 3.0, state 0.5"


@pytest.mark.parametrize(
    "terminal, columns, lines",
    [
        (True, None, ["data        /a/folder-of", "            shards, 5"]),
        (False, "24", ["data        /a/folder-of", "            shards, 5"]),
        (False, None, ["data        /a/folder-of shards, 5"]),
    ],
)
def test_a_line_of_the_header_breaks_between_words(monkeypatch, terminal, columns, lines):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    console = Console(file=io.StringIO(), width=24, force_terminal=terminal)
    assert fitted(console, "data        /a/folder-of shards, 5", 12).split("\n") == lines
    whole = fitted(console, "data        /a/very/long/path/of/shards", 12)
    assert "/a/very/long/path/of/shards" in whole
