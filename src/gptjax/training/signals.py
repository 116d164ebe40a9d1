"""Handlers of the signals that stop a run.

train.py installs the first handler before it imports JAX, so this module imports the standard
library only.
"""

import contextlib
import os
import signal

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def end_at_once(number: int, frame: object = None) -> None:
    """Print one sentence and end the process. Handler of signals before there is a state to save.

    The function calls `os._exit`: a normal exit of Python waits for compiling threads, and XLA
    aborts if these threads are still running.
    """
    name = signal.Signals(number).name
    _tell(f"stopped by {name}; nothing new was saved. The same command starts or resumes the run.")
    os._exit(128 + number)


def end_after_training(number: int, frame: object = None) -> None:
    """Print one sentence and end the process. Handler of signals after the last checkpoint."""
    name = signal.Signals(number).name
    _tell(
        f"stopped by {name} after the end of training; the saved checkpoints are complete. The "
        "same command resumes a run that has steps left."
    )
    os._exit(128 + number)


def install(handler) -> dict[int, object]:
    """Set the handler of SIGTERM, SIGINT and SIGHUP, and return the previous handlers.

    An ignored SIGHUP, as under `nohup`, stays ignored.
    """
    numbers = [n for n in STOPPING if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


class StopRequest:
    """Context in which a signal requests that the training loop saves and stops.

    The first signal sets `number`. The second signal prints that the checkpoint is being saved. The
    third signal ends the process without the new checkpoint; earlier checkpoints stay complete.
    After the context, the previous handlers are restored, but `end_after_training` replaces
    `end_at_once`.

    Attributes:
        number: number of the first signal; 0 before a signal.
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
            signal.signal(number, end_after_training if handler is end_at_once else handler)


def _tell(sentence: str) -> None:
    # Not `print`: the handler may interrupt a write to the stream, and the stream may be closed.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{sentence}\n".encode())
