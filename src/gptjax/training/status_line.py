"""Console, live status line and start-up time of a run."""

import errno
import math
import os
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gptjax.terminal import wrapped

# Steps between printed lines without a terminal; log.jsonl has every step.
LOG_EVERY = 10


class PipeConsole(Console):
    """Console that raises BrokenPipeError instead of ending the process without a save."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError; print nothing afterwards."""
        self.quiet = True
        raise BrokenPipeError(errno.EPIPE, "the terminal or pipe that reads the output is closed")


def fitted(console: Console, text: str, indent: int) -> str:
    """Wrap a text between words if the console is a terminal, or if COLUMNS is set.

    Lines in a file or a pipe stay whole.

    Args:
        indent: spaces before each line except the first.
    """
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return text
    return wrapped(text, console.width, " " * indent)


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
    """Line with the state of training, redrawn in place on a terminal, else printed regularly.

    Inside the context, text from `console.print` or `print` appears above the line. A narrow
    terminal cuts the line, whose most important parts come first.

    Args:
        total_steps: last step of training.
        console: output; None: standard output.
        clock: function that returns the time in seconds.
        tokens: function that returns the tokens in a number of steps, for the remaining time.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        tokens: Callable[[int], int] = lambda steps: steps,
    ):
        self.console = console or Console()
        self._total_steps = total_steps
        self._clock, self._tokens = clock, tokens
        self._live: Live | None = None
        self._first: tuple[int, float] | None = None
        self._drawn_at = -math.inf
        self._val, self._notes, self._parts = "–", {}, []

    def __enter__(self) -> "StatusLine":
        if self.console.is_terminal:
            # `update` redraws: a thread would compete with the training loop for the GIL.
            self._live = Live(Text(""), console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc_info) -> None:
        if self._live is not None:
            self._live.stop()

    def update(
        self,
        step: int,
        *,
        loss: float,
        lr: float,
        ms: float | None = None,
        tokens_per_second: float | None = None,
        mfu: float | None = None,
    ) -> None:
        """Show the state after `step` completed steps.

        Args:
            loss: training loss in nats per token.
            lr: learning rate.
            ms, tokens_per_second, mfu: step time in milliseconds, throughput, and fraction of the
                peak; None if unknown.
        """
        now = self._clock()
        self._first = self._first or (step, now)
        self._parts = [
            f"step {step}/{self._total_steps} · loss {loss:.4f}",
            f"{_or_dash(ms, '.1f')} ms · {_or_dash(tokens_per_second, ',.0f')} tok/s",
            f"ETA {self._eta(step, now)} · MFU {_or_dash(mfu, '.1%')} · lr {lr:.2e}",
        ]
        last = step >= self._total_steps
        if self._live is not None:
            self._show(due=last or now - self._drawn_at >= 0.1)
        elif last or step % LOG_EVERY == 0 or step == self._first[0]:
            self._show()

    def validated(self, loss: float) -> None:
        """Show a validation loss."""
        self._val = f"{loss:.4f}"
        if self._parts and self._live is not None:
            self._show()

    def note(self, name: str, text: str) -> None:
        """From the next update on, end the line with this text, in place of that of this name."""
        self._notes[name] = text

    def _show(self, due: bool = True) -> None:
        first, *others = self._parts
        line = " · ".join([first, f"val {self._val}", *others, *filter(None, self._notes.values())])
        if self._live is None:
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)
            return
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=due)
        self._drawn_at = self._clock() if due else self._drawn_at

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


def _or_dash(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
