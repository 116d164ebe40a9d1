"""Signals that ask a run to stop. Imports nothing heavy: train.py installs the first handler before
it imports JAX."""

import contextlib
import os
import signal

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def end_at_once(number: int, frame: object = None) -> None:
    """Print one sentence and end the process: the handler while there is nothing to save.

    `os._exit`, because Python's own exit would wait for threads that compile, and XLA aborts if
    they still run then.
    """
    name = signal.Signals(number).name
    _tell(f"stopped by {name}; nothing new was saved. The same command starts or resumes the run.")
    os._exit(128 + number)


def install(handler) -> dict[int, object]:
    """Set the handler of every stopping signal, and return the previous handlers.

    A SIGHUP that is ignored, as under `nohup`, stays ignored.
    """
    numbers = [n for n in STOPPING if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


class StopRequest:
    """Context in which a signal asks the training loop to save and stop.

    The first signal sets `number`. The second prints that the save is under way. The third ends the
    process without waiting for the save; the checkpoints before it stay complete.
    """

    number = 0

    def __enter__(self):
        self._count = 0
        self._before = install(self._ask)
        return self

    def _ask(self, number, frame):
        self._count += 1
        self.number = self.number or number
        if self._count == 2:
            _tell(
                "stopping: the checkpoint is being saved. One more signal ends the process without "
                "it."
            )
        if self._count >= 3:
            _tell(
                "ended before the last checkpoint was complete; the same command resumes from the "
                "one before."
            )
            os._exit(128 + number)

    def __exit__(self, *exc_info):
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _tell(sentence: str) -> None:
    # Not `print`: a handler may interrupt a write to the same stream, and the stream may be gone.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{sentence}\n".encode())
