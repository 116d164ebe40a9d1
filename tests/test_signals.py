"""Signals: a request to save during training, and a second that ends the process."""

import os
import signal

import jax
import pytest

from gptjax.parallel import data_mesh
from gptjax.training.signals import StopRequest

NUMBERS = (signal.SIGTERM, signal.SIGINT)


def test_handlers_come_back():
    before = {number: signal.getsignal(number) for number in NUMBERS}
    with StopRequest(data_mesh(jax.devices("cpu")[:1])) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number == signal.SIGTERM
    assert {number: signal.getsignal(number) for number in NUMBERS} == before


@pytest.mark.parametrize("number", NUMBERS)
def test_the_second_signal_ends(monkeypatch, number):
    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    with StopRequest(data_mesh(jax.devices("cpu")[:1])), pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number
