"""Where the time goes between the command and the first finished step."""

import time


class StartUpTime:
    """Seconds of each part of a start, one after the other: with no gap between them, their sum is
    the whole.

    Args:
        began: `time.perf_counter()` when the program began.

    Attributes:
        seconds: of each part so far, in order.
    """

    def __init__(self, began: float):
        self.seconds: dict[str, float] = {}
        self._last = began

    def mark(self, part: str) -> None:
        """Says that a part is done: it took the time since the last mark."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"after {sum(self.seconds.values()):.1f} s: {parts}"
