"""Console and live status line of a run."""

import contextlib
import errno
import math
import os
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from gptjax.terminal import wrapped
from gptjax.training.flops import Number


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


@contextlib.contextmanager
def elapsed(console: Console) -> Iterator[None]:
    """Show the time since the start of the block, on a terminal and until the block ends."""
    columns, off = (TextColumn(" " * 11), TimeElapsedColumn()), not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=off) as clock:
        console.show_cursor(True)  # a signal may end the process inside the block
        clock.add_task("")
        yield


class StatusLine:
    """Line with the state of training, redrawn in place on a terminal, else printed regularly.

    Inside the context, text from `console.print` or `print` appears above the line. On a terminal,
    the least important parts are omitted until the line fits. Without a terminal, the line is
    complete.

    Args:
        total_steps: last step of training.
        on_gpu: whether an unknown MFU means an unknown GPU rather than a CPU.
        every: steps between lines if the output is not a terminal.
        console: output; None: standard output.
        clock: function that returns the time in seconds.
        tokens: function that returns the tokens in a number of steps, for the remaining time.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        on_gpu: bool,
        every: int = 10,
        console: Console | None = None,
        clock: Callable[[], Number] = time.monotonic,
        tokens: Callable[[int], Number] = lambda steps: steps,
    ):
        self.console = console or Console()
        self._total_steps = total_steps
        self._on_gpu = on_gpu
        self._every = every
        self._clock = clock
        self._tokens = tokens
        self._live: Live | None = None
        self._first: tuple[int, Number] | None = None
        self._drawn_at = -math.inf
        self._val_loss: Number | None = None
        self._eval = ""
        self._clipped = ""
        self._step = -1
        self._parts: dict[str, str] = {}

    def __enter__(self) -> "StatusLine":
        if self.console.is_terminal:
            # `update` redraws: a thread would compete with the training loop for the GIL.
            self._live = Live(Text(""), console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc_info) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(
        self,
        step: int,
        *,
        loss: Number,
        lr: Number,
        ms_per_step: Number | None = None,
        tokens_per_second: Number | None = None,
        mfu: Number | None = None,
        val_loss: Number | None = None,
        stage: str | None = None,
    ) -> None:
        """Show the state after `step` completed steps.

        Args:
            step: completed steps.
            loss: training loss in nats per token.
            lr: learning rate.
            ms_per_step: step time in milliseconds; None if unknown.
            tokens_per_second: throughput; None if unknown.
            mfu: fraction of the peak; None if the peak is unknown.
            val_loss: validation loss in nats per token; None: the previous one.
            stage: number of the stage / number of stages, such as "2/3"; None without stages.
        """
        now = self._clock()
        self._val_loss = self._val_loss if val_loss is None else val_loss
        if self._first is None:
            self._first = step, now
        self._step = step
        self._parts = {
            "step": f"step {step}/{self._total_steps}",
            "loss": f"loss {loss:.4f}",
            "val": "",  # set by `_show`, because `validated` is called after `update`
            "lr": f"lr {lr:.2e}",
            "eta": f"ETA {self._eta(step, now)}",
            "ms": f"{_or_dash(ms_per_step, '.1f')} ms",
            "speed": f"{_or_dash(tokens_per_second, ',.0f')} tok/s",
            "mfu": f"MFU {self._mfu(mfu, measured=tokens_per_second is not None)}",
        }
        if stage is not None:
            self._parts["stage"] = f"stage {stage}"
        last = step >= self._total_steps
        if self._live is not None:
            self._show(due=last or now - self._drawn_at >= 0.1)
        elif last or step % self._every == 0 or step == self._first[0]:
            self._show()

    def validated(self, val_loss: Number) -> None:
        """Show the validation loss after the newest step.

        On a terminal the line is redrawn. Without a terminal, only the line of the last step is
        printed again, so that the final line is complete.
        """
        self._val_loss = val_loss
        if self._parts and (self._live is not None or self._step >= self._total_steps):
            self._show()

    def evaluated(self, metrics: dict[str, Number]) -> None:
        """From the next update on, show the metric of each evaluation task."""
        self._eval = " · ".join(f"{task} {value:.4f}" for task, value in metrics.items())

    def clipped(self, text: str) -> None:
        """From the next update on, show this text about clipped numbers."""
        self._clipped = text

    def _show(self, due: bool = True) -> None:
        parts = self._parts | {"val": f"val {_or_dash(self._val_loss, '.4f')}"}
        if self._eval:
            parts["eval"] = self._eval
        if self._clipped:
            parts["clipped"] = self._clipped
        if self._live is None:
            line = " · ".join(parts.values())
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)
            return
        line = _fitted(parts, self.console.width)
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=due)
        self._drawn_at = self._clock() if due else self._drawn_at

    def _eta(self, step: int, now: Number) -> str:
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

    def _mfu(self, fraction: Number | None, *, measured: bool) -> str:
        if fraction is None:
            return "unknown GPU" if self._on_gpu and measured else "–"
        return f"{100 * fraction:.1f}%"


# Parts of the status line that are omitted on a narrow terminal, in this order.
_EXPENDABLE = ("stage", "lr", "mfu", "eval", "val", "eta", "speed", "ms", "clipped", "loss")


def _fitted(parts: dict[str, str], width: int) -> str:
    """Join the parts, omitting expendable ones until the line fits in `width` characters."""
    parts = dict(parts)
    for name in _EXPENDABLE:
        if len(" · ".join(parts.values())) <= width:
            break
        parts.pop(name, None)
    return " · ".join(parts.values())


def _or_dash(value: Number | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
