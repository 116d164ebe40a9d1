"""Signals: a request to save during training, and a second that ends the process."""

import os
import signal
import subprocess
import sys

import pytest

from gptjax.training.signals import StopRequest

NUMBERS = (signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_asks_and_the_second_ends(number):
    kill = f"os.kill(os.getpid(), {int(number)})\n    "
    code = (
        "import os, signal\nfrom gptjax.training.signals import StopRequest\n"
        f"with StopRequest() as stop:\n    {kill}print(stop.number, flush=True)\n    {kill}"
        "print('never')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 128 + number and done.stdout.strip() == str(int(number))


def test_handlers_come_back():
    before = {number: signal.getsignal(number) for number in NUMBERS}
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number == signal.SIGTERM
    assert {number: signal.getsignal(number) for number in NUMBERS} == before
