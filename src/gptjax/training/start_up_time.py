"""Time from the command to the first completed step, split into parts."""

import time


class StartUpTime:
    """Seconds of each part of the start-up. The parts have no gaps, so their sum is the total.

    Args:
        began: `time.perf_counter()` at the start of the process.

    Attributes:
        seconds: duration of each part so far, in order.
    """

    def __init__(self, began: float):
        self.seconds: dict[str, float] = {}
        self._last = began

    def mark(self, part: str) -> None:
        """End a part: add the time since the previous mark to its seconds."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"after {sum(self.seconds.values()):.1f} s: {parts}"
