"""What a run measures and where it goes: speed and MFU, a log file with TensorBoard events beside
it, a live status line.

No JAX here: values arrive as numbers, or as arrays of one element, and reading a log must start
fast.
"""

import collections
import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console
from rich.live import Live
from rich.text import Text

Number = float | int  # the tests' type checker takes `float` at its word

# Peak FLOP/s of one device: fp32 outside the tensor cores; tf32 and bf16 on the tensor cores with
# fp32 accumulation, dense. NVIDIA's datasheets mark figures with 2:4 sparsity by a footnote; those
# are halved here. A name stands for the SXM module where the same chip also comes on slower PCIe
# cards, which are named.
PEAK_FLOPS: dict[str, dict[str, float]] = {
    # HGX B200 / GB200 NVL72 datasheet (Blackwell), "individual Blackwell GPU"
    "B200": {"fp32": 75e12, "tf32": 1100e12, "bf16": 2250e12},
    "GB200": {"fp32": 80e12, "tf32": 1250e12, "bf16": 2500e12},
    # H100 Tensor Core GPU architecture whitepaper; H100, H200 and GH200 datasheets (the last two
    # carry the H100 SXM's chip)
    "H100": {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12},
    "H100 PCIe": {"fp32": 51.2e12, "tf32": 378e12, "bf16": 756e12},
    "H100 NVL": {"fp32": 60e12, "tf32": 417.5e12, "bf16": 835.5e12},
    "H200": {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12},
    "H200 NVL": {"fp32": 60e12, "tf32": 417.5e12, "bf16": 835.5e12},
    "GH200": {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12},
    # A100 datasheet: one peak for SXM and PCIe, 40 and 80 GB; A30 datasheet
    "A100": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12},
    "A100 PCIe": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12},
    "A30": {"fp32": 10.3e12, "tf32": 82e12, "bf16": 165e12},
    # L4, L40, L40S and RTX 6000 Ada datasheets; RTX 40: Ada GPU architecture whitepaper
    "L4": {"fp32": 30.3e12, "tf32": 60e12, "bf16": 121e12},
    "L40": {"fp32": 90.5e12, "tf32": 90.5e12, "bf16": 181e12},
    "L40S": {"fp32": 91.6e12, "tf32": 183e12, "bf16": 362e12},
    "RTX 6000 Ada Generation": {"fp32": 91.1e12, "tf32": 182.1e12, "bf16": 364.2e12},
    "RTX 4090": {"fp32": 82.6e12, "tf32": 82.6e12, "bf16": 165.2e12},
    "RTX 4080": {"fp32": 48.7e12, "tf32": 48.7e12, "bf16": 97.5e12},
    # RTX Blackwell GPU architecture whitepaper
    "RTX 5090": {"fp32": 104.8e12, "tf32": 104.8e12, "bf16": 209.5e12},
    "RTX 5080": {"fp32": 56.3e12, "tf32": 56.3e12, "bf16": 112.6e12},
    # A10, A40 and RTX A6000 datasheets; the A10G is Amazon's variant with half the tensor cores'
    # speed; RTX 30: Ampere GA102 GPU architecture whitepaper
    "A10": {"fp32": 31.2e12, "tf32": 62.5e12, "bf16": 125e12},
    "A10G": {"fp32": 35e12, "tf32": 35e12, "bf16": 70e12},
    "A40": {"fp32": 37.4e12, "tf32": 74.8e12, "bf16": 149.7e12},
    "RTX A6000": {"fp32": 38.7e12, "tf32": 77.4e12, "bf16": 154.8e12},
    "RTX 3090": {"fp32": 35.6e12, "tf32": 35.6e12, "bf16": 71e12},
    "RTX 3090 Ti": {"fp32": 40e12, "tf32": 40e12, "bf16": 80e12},
    # V100, V100S and T4 datasheets: tensor cores for fp16 alone, neither TF32 nor bf16
    "V100": {"fp32": 15.7e12},
    "V100 PCIe": {"fp32": 14e12},
    "V100S PCIe": {"fp32": 16.4e12},
    "T4": {"fp32": 8.1e12},
}

_COLUMN = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "bf16_residual_fp32": "bf16"}
# Words of a device's name that say nothing about its speed: makers' brands, the SXM socket, the
# memory's size and type.
_NOISE = re.compile(r"nvidia|tesla|geforce|sxm\d*|\d+gb?|hbm\d\w*")


def _model_words(name: str) -> tuple[str, ...]:
    return tuple(
        word for word in re.findall(r"[a-z0-9]+", name.lower()) if not _NOISE.fullmatch(word)
    )


_PEAK_BY_WORDS = {_model_words(name): peaks for name, peaks in PEAK_FLOPS.items()}


def peak_flops(device_kind: str, precision_name: str) -> float | None:
    """Dense peak of one device in FLOP/s.

    The whole model name has to match: an unknown variant (a laptop part, a MIG slice, an export
    model) has no known peak.

    Args:
        device_kind: `jax.Device.device_kind`, such as "NVIDIA H100 80GB HBM3".
        precision_name: a name of `gptjax.Precision`.

    Returns:
        FLOP/s, or None for an unknown device or a precision that the device does not have.

    Raises:
        ValueError: no such precision.
    """
    if precision_name not in _COLUMN:
        raise ValueError(f"unknown precision {precision_name!r}; choose one of {list(_COLUMN)}")
    return _PEAK_BY_WORDS.get(_model_words(device_kind), {}).get(_COLUMN[precision_name])


def mfu(
    tokens_per_second: Number,
    flops_per_token: Number,
    device_kind: str,
    precision_name: str,
    device_count: int,
) -> float | None:
    """Model FLOPs utilisation: tokens/s · FLOPs/token over the peak of all devices, as a fraction
    of 1.

    Args:
        tokens_per_second: of all devices together.
        flops_per_token: forward and backward, `GPT2Config.flops_per_token`.
        device_kind, precision_name: see `peak_flops`.
        device_count: devices of that kind.

    Returns:
        The fraction, or None where the peak is unknown.

    Raises:
        ValueError: no such precision.
    """
    peak = peak_flops(device_kind, precision_name)
    return None if peak is None else tokens_per_second * flops_per_token / (peak * device_count)


class Throughput:
    """Milliseconds a step, the mean of the last `window` steps.

    Time runs from one completed step to the next, so the first step, with its compilation, is never
    counted; nor is the one after `pause`, with the validation or checkpoint before it.
    """

    def __init__(self, window: int = 20):
        self._intervals_ms = collections.deque(maxlen=window)
        self._last: Number | None = None

    def step(self, now: Number) -> float | None:
        """Takes the time at which a step completed, in seconds; returns `ms_per_step`."""
        if self._last is not None:
            self._intervals_ms.append(1000 * (now - self._last))
        self._last = now
        return self.ms_per_step

    def pause(self) -> None:
        """Says that something other than a step is about to take time, or just did."""
        self._last = None

    @property
    def ms_per_step(self) -> float | None:
        """None until two steps in a row have completed."""
        return sum(self._intervals_ms) / len(self._intervals_ms) if self._intervals_ms else None


class LogError(ValueError):
    """A log.jsonl that cannot be read."""


Kind = Literal["train", "val", "sample", "event"]

# between flushes of TensorBoard's events, each with an fsync in the training loop
_FLUSH_SECONDS = 30


@contextlib.contextmanager
def _without_torch():
    """Makes `import torch` fail unless torch is there already: tensorboardX imports it where it
    can, 1.2 s and more, for nothing here."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None
    try:
        yield
    finally:
        del sys.modules["torch"]


class RunLog:
    """The record of a run: `log.jsonl`, one JSON object a line, and TensorBoard events in the same
    folder.

    Each line has `kind`, `step`, `tokens`, then the fields given, and is with the system when
    `write` returns: a killed process loses at most the line it was writing. NaN and ±inf are
    written as null, since JSON has no name for them.

    On resume, train, val and sample lines after `resume_step` are dropped, since those steps will
    come again; events stay. TensorBoard hides what it showed of these steps.

    Args:
        run_dir: the run's folder, made if missing.
        resume_step: the last step that counts, that of the checkpoint the run goes on from; -1 to
            start an old folder over. None for a new run.
        note: called with a sentence when TensorBoard's events cannot be written any more; log.jsonl
            goes on.

    Raises:
        FileExistsError: `resume_step` is None and the folder already holds a log.
        LogError: on resume, a malformed line in the log.
        OSError: the log cannot be opened.
    """

    def __init__(
        self,
        run_dir: str | Path,
        resume_step: int | None = None,
        *,
        note: Callable[[str], object] = print,
    ):
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "log.jsonl"
        if self.path.exists():
            if resume_step is None:
                raise FileExistsError(
                    f"{self.path} is the log of an earlier run; resume that run, or choose another "
                    "folder for this one"
                )
            _drop_after(self.path, resume_step)
        # Without a buffer: a line that does not fit on the disk is an error at once, and nothing is
        # left for `close`.
        self._file = self.path.open("ab", buffering=0)
        self._events = _Events(run_dir, None if resume_step is None else resume_step + 1, note)

    def write(self, kind: Kind, step: int, tokens: int, **fields: Any) -> None:
        """Write one line, and each number or text in it to TensorBoard as `kind/name`.

        Args:
            kind: "train", "val", "sample" or "event".
            step: completed optimizer steps.
            tokens: tokens trained on so far.
            fields: numbers, arrays of one element, text, booleans, None, or what JSON can hold.

        Raises:
            ValueError: no such kind, or an array of several elements.
            OSError: log.jsonl cannot take the line; no part of it stays.
        """
        if kind not in get_args(Kind):
            raise ValueError(f"unknown kind {kind!r}; choose one of {list(get_args(Kind))}")
        fields = {name: _plain(value) for name, value in fields.items()}
        line = {"kind": kind, "step": int(step), "tokens": int(tokens)} | {
            k: _finite(v) for k, v in fields.items()
        }
        self._append((json.dumps(line, allow_nan=False) + "\n").encode())
        for name, value in fields.items():
            if isinstance(value, (str, int, float)):
                self._events.add(f"{kind}/{name}", value, int(step))

    def _append(self, line: bytes) -> None:
        length = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            # A torn line would make the next one unreadable.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), length)
            raise

    def sync(self) -> None:
        """Make the lines written so far durable: a checkpoint must not survive a power cut that the
        log does not.

        Raises:
            OSError: the disk refused.
        """
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close both files; what was written is with the system. Raises nothing."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._events.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


class _Events:
    """TensorBoard's event file, written without a thread. The first error ends it with a note.

    tensorboardX's own `SummaryWriter` writes in a thread. On a full disk that thread dies, its
    queue of ten events fills up, and the next event waits for ever.
    """

    def __init__(self, run_dir: Path, purge_step: int | None, note: Callable[[str], object]):
        # Here, since only a training run should pay for it.
        with _without_torch():
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto import event_pb2

        self._summary, self._proto, self._note = summary, event_pb2, note
        self._off, self._flushed = False, time.monotonic()

        def open_file():
            # tensorboardX names a file by the second it was opened in and would overwrite that of a
            # run killed in the same second, hence the suffix.
            self._writer = event_file_writer.EventsWriter(
                str(run_dir / "events"), f".{time.time_ns()}"
            )
            # TensorBoard hides the steps ≥ purge_step of the files before
            if purge_step is not None:
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._write(step=purge_step, file_version="brain.Event:2")
                self._write(step=purge_step, session_log=start)

        self._guard(open_file)

    def add(self, tag: str, value: str | Number, step: int) -> None:
        """Write a text or a number."""
        make = self._summary.text if isinstance(value, str) else self._summary.scalar
        self._guard(lambda: self._write(step=step, summary=make(tag, value)))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._flushed = time.monotonic()
            self._guard(lambda: self._writer.flush())

    def close(self) -> None:
        self._guard(lambda: self._writer.close())
        self._off = True

    def _write(self, **fields: Any) -> None:
        self._writer.write_event(self._proto.Event(wall_time=time.time(), **fields))

    def _guard(self, action: Callable[[], object]) -> None:
        if self._off:
            return
        try:
            action()
        except OSError as error:
            self._off = True
            self._note(
                f"TensorBoard's events are no longer written: {error.strerror or error}; log.jsonl "
                "goes on"
            )


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a `log.jsonl`, in order, without a last line that a killed process left
    unfinished.

    Raises:
        FileNotFoundError: no such file.
        LogError: a malformed line before the last; names file and line number.
    """
    return _read(Path(path), complete_at=math.inf)


def _read(path: Path, complete_at: Number) -> list[dict[str, Any]]:
    """The lines of a log up to the first malformed one, which must be the last, or come after step
    `complete_at`."""
    rows, lines = (
        [],
        path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n"),
    )
    newest = -math.inf
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not (isinstance(row, dict) and {"kind", "step", "tokens"} <= row.keys()):
                raise ValueError("kind, step or tokens is missing")
            if type(row["step"]) is not int:
                raise ValueError(f"step is {row['step']!r}")
        except (ValueError, RecursionError) as error:
            if number == len(lines) or newest >= complete_at:
                break
            raise LogError(
                f"{path}, line {number}: expected a JSON object with kind, step and tokens, found "
                f"{line[:60]!r} ({error}); "
                "mend or delete the line"
            ) from error
        rows.append(row)
        newest = max(newest, row["step"])
    return rows


def _drop_after(path: Path, step: int) -> None:
    # After a power cut, garbage may follow what was synchronised with the checkpoint of this step.
    kept = [
        row
        for row in _read(path, complete_at=step)
        if row["kind"] == "event" or row["step"] <= step
    ]
    # Rename within the folder is atomic: a kill here leaves the old log or the new one.
    rewritten = path.with_name(path.name + ".tmp")
    with rewritten.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in kept)
        file.flush()
        os.fsync(file.fileno())
    rewritten.replace(path)


def _plain(value: Any) -> Any:
    """A NumPy or JAX array of one element as a Python number; anything else as it is."""
    return value.item() if hasattr(value, "item") else value


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StatusLine:
    """One line that shows where training stands: redrawn in place on a terminal, printed now and
    then elsewhere.

    Inside the `with`, print through `console.print` (plain `print` works too): the text goes above
    the line. On a terminal the least important parts are left out until the line fits. Elsewhere
    the line is complete.

    Args:
        total_steps: where training ends.
        on_gpu: whether a missing MFU means an unknown GPU rather than a CPU.
        every: steps between lines where the output is not a terminal.
        console: where to write; standard output by default.
        clock: seconds, for the time left and for sparing the terminal.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        on_gpu: bool,
        every: int = 10,
        console: Console | None = None,
        clock: Callable[[], Number] = time.monotonic,
    ):
        self.console = console or Console()
        self._total_steps = total_steps
        self._on_gpu = on_gpu
        self._every = every
        self._clock = clock
        self._live: Live | None = None
        self._first: tuple[int, Number] | None = None
        self._drawn_at = -math.inf
        self._val_loss: Number | None = None
        self._step = -1
        self._parts: dict[str, str] = {}

    def __enter__(self) -> "StatusLine":
        if self.console.is_terminal:
            # Redrawn by `update`, without a thread that would compete with the training loop for
            # the interpreter.
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
    ) -> None:
        """Shows the state after `step` completed steps.

        Args:
            loss, val_loss: nats a token; the last `val_loss` given stays on the line.
            lr: learning rate.
            ms_per_step, tokens_per_second: None while unknown.
            mfu: fraction of the peak, None where the peak is unknown.
        """
        now = self._clock()
        self._val_loss = self._val_loss if val_loss is None else val_loss
        if self._first is None:
            self._first = step, now
        self._step = step
        self._parts = {
            "step": f"step {step}/{self._total_steps}",
            "loss": f"loss {loss:.4f}",
            "val": "",  # `_show` fills it in: `validated` changes it after the step
            "lr": f"lr {lr:.2e}",
            "eta": f"ETA {self._eta(step, now)}",
            "ms": f"{_or_dash(ms_per_step, '.1f')} ms",
            "speed": f"{_or_dash(tokens_per_second, ',.0f')} tok/s",
            "mfu": f"MFU {self._mfu(mfu, measured=tokens_per_second is not None)}",
        }
        last = step >= self._total_steps
        if self._live is not None:
            self._show(due=last or now - self._drawn_at >= 0.1)
        elif last or step % self._every == 0 or step == self._first[0]:
            self._show()

    def validated(self, val_loss: Number) -> None:
        """Show the validation loss after the newest step.

        A terminal's line is redrawn. Elsewhere only the last step's line is printed again, so that
        the final line is complete.
        """
        self._val_loss = val_loss
        if self._parts and (self._live is not None or self._step >= self._total_steps):
            self._show()

    def _show(self, due: bool = True) -> None:
        parts = self._parts | {"val": f"val {_or_dash(self._val_loss, '.4f')}"}
        if self._live is None:
            line = " · ".join(parts.values())
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)
            return
        line = _fitted(parts, self.console.width)
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=due)
        self._drawn_at = self._clock() if due else self._drawn_at

    def _eta(self, step: int, now: Number) -> str:
        """Time left at the pace since the first update: with validation and checkpoints, without
        the compilation."""
        first_step, started = self._first
        if step <= first_step:
            return "–"
        seconds = round((self._total_steps - step) * (now - started) / (step - first_step))
        hours, minutes = seconds // 3600, seconds // 60 % 60
        return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds % 60:02d}s"

    def _mfu(self, fraction: Number | None, *, measured: bool) -> str:
        if fraction is None:
            return "unknown GPU" if self._on_gpu and measured else "–"
        return f"{100 * fraction:.1f}%"


# Parts of the status line that a narrow terminal loses, the first one first.
_EXPENDABLE = ("lr", "mfu", "val", "eta", "speed", "ms", "loss")


def _fitted(parts: dict[str, str], width: int) -> str:
    """Join the parts, without as many of the expendable ones as make the line fit."""
    parts = dict(parts)
    for name in _EXPENDABLE:
        if len(" · ".join(parts.values())) <= width:
            break
        del parts[name]
    return " · ".join(parts.values())


def _or_dash(value: Number | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
