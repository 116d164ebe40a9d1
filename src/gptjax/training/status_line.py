"""Status line and start-up time of a run."""

import time
from collections.abc import Callable

# Steps between status lines; log.jsonl has every step.
LOG_EVERY = 10


class StartUpTime:
    """Time from the command to the first completed step, in parts without gaps.

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


class StatusLine:
    """Line with the state of training, printed every `LOG_EVERY` steps.

    Args:
        total_steps: last step of training.
        show: prints a line.
        tokens: function that returns the tokens in a number of steps, for the remaining time.

    Attributes:
        val: validation loss, as text.
        notes: further texts by name, at the end of the line.
    """

    def __init__(
        self, total_steps: int, show: Callable[[str], object], tokens: Callable[[int], int]
    ):
        self._total_steps, self._show, self._tokens = total_steps, show, tokens
        self._first: tuple[int, float] | None = None
        self.val, self.notes = "–", {}

    def update(self, step: int, **values: float | None) -> None:
        """Print the state after `step` completed steps, if a line is due.

        Args:
            values: loss, lr, ms, tokens_per_second and mfu, as in log.jsonl; None if unknown.
        """
        now = time.monotonic()
        self._first = self._first or (step, now)
        if step % LOG_EVERY and step not in (self._first[0], self._total_steps):
            return

        def shown(name: str, spec: str) -> str:
            return "–" if values[name] is None else format(values[name], spec)

        parts = [
            f"step {step}/{self._total_steps} · loss {shown('loss', '.4f')} · val {self.val}",
            f"{shown('ms', '.1f')} ms · {shown('tokens_per_second', ',.0f')} tok/s",
            f"ETA {self._eta(step, now)} · MFU {shown('mfu', '.1%')} · lr {shown('lr', '.2e')}",
            *filter(None, self.notes.values()),
        ]
        self._show(" · ".join(parts))

    def _eta(self, step: int, now: float) -> str:
        """Return the remaining time at the mean speed in tokens since the first update.

        The mean includes validation and checkpoints, but not compilation.
        """
        first_step, started = self._first
        if step <= first_step:
            return "–"
        tokens = self._tokens(step)
        left, done = self._tokens(self._total_steps) - tokens, tokens - self._tokens(first_step)
        seconds = round(left * (now - started) / done)
        hours, minutes = seconds // 3600, seconds // 60 % 60
        return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds % 60:02d}s"
