"""Request to save and stop, by SIGTERM or Ctrl-C."""

import os
import signal


class StopRequest:
    """Context in which SIGTERM or Ctrl-C requests that the training loop saves and stops.

    A second signal ends the process at once. Earlier checkpoints stay complete.

    Attributes:
        number: number of the signal; 0 before a signal.
    """

    number = 0

    def __enter__(self) -> "StopRequest":  # noqa: PYI034
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def _ask(self, number, frame):
        if self.number:
            os._exit(128 + number)
        self.number = number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
