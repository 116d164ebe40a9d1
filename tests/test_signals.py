"""Signals: a sentence and the exit code before training, a request to save during training."""

import os
import signal
import subprocess
import sys

import pytest

from gptjax.training import signals


def run(code: str) -> subprocess.CompletedProcess:
    code = "import os, signal\nfrom gptjax.training import signals\n" + code
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("number", signals.STOPPING)
def test_before_training_a_signal_ends_the_process_with_a_sentence(number):
    done = run(f"signals.install(signals.end_at_once)\nos.kill(os.getpid(), {int(number)})")
    assert done.returncode == 128 + number
    assert done.stderr.strip().splitlines() == [
        f"stopped by {number.name}; nothing new was saved. The same command starts or resumes the "
        "run."
    ]


def test_the_first_signal_asks_the_second_explains_the_third_ends():
    kill = f"os.kill(os.getpid(), {int(signal.SIGTERM)})\n    "
    done = run(
        f"with signals.StopRequest() as stop:\n    {kill}print(stop.number)\n    "
        f"{kill}print('on')\n    {kill}print('never')"
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert "never" not in done.stdout
    second, third = filter(None, done.stderr.splitlines())
    assert "One more signal ends" in second and "resumes from the one before" in third


def test_handlers_come_back_and_nohup_is_respected():
    before = {number: signal.getsignal(number) for number in signals.STOPPING}
    with signals.StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.number == signal.SIGHUP
    assert {number: signal.getsignal(number) for number in signals.STOPPING} == before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.number == 0
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])


def test_after_training_a_signal_ends_the_process_with_another_sentence():
    done = run(
        "signals.install(signals.end_at_once)\nwith signals.StopRequest():\n    pass\n"
        f"os.kill(os.getpid(), {int(signal.SIGINT)})"
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.strip() == (
        "stopped by SIGINT after the end of training; the saved checkpoints are complete. The same "
        "command resumes a run that has steps left."
    )
