"""Log of a run: `log.jsonl`, TensorBoard events, and Weights & Biases if asked for.

This module does not import JAX, so that commands that read a log start fast. Values are numbers or
arrays of one element.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from gptjax.files import read_regular, write_atomically
from gptjax.training.flops import Number
from gptjax.training.wandb_log import WandbLog, is_installed


class LogError(ValueError):
    """A log.jsonl that cannot be read, or a log that cannot be written."""


def check_wandb(project: str | None) -> None:
    """Check that wandb is installed if the run has a project on Weights & Biases.

    Raises:
        LogError: wandb is not installed, or the project has no name.
    """
    if project == "":
        raise LogError("--wandb must be the name of a project, got ''")
    if project is not None and not is_installed():
        raise LogError(
            f"--wandb {project} needs the package wandb: pip install -e '.[wandb]', or leave out "
            "--wandb"
        )


Kind = Literal["train", "val", "eval", "sample", "clipping", "event"]

# Interval of the flushes of TensorBoard's events, each with an fsync in the training loop.
_FLUSH_SECONDS = 30


@contextlib.contextmanager
def _without_torch():
    """Make `import torch` fail if torch is not imported yet.

    tensorboardX imports torch if possible. This import takes 1.2 s or more and is not needed.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None
    try:
        yield
    finally:
        del sys.modules["torch"]


class RunLog:
    """Writer of `log.jsonl`, one JSON object per line, and of TensorBoard events.

    Each line has `kind`, `step`, `tokens` and further fields. `write` passes the line to the
    operating system: a killed process loses at most the line that is being written. NaN and ±inf
    are written as null, because JSON does not represent them.

    On resume, all lines after `resume_step` except events are removed, because these steps are
    repeated. TensorBoard hides the earlier values of these steps.

    Args:
        run_dir: the run's folder, created if it does not exist.
        resume_step: step of the checkpoint from which the run resumes; -1 to restart in an existing
            folder. None for a new run.
        wandb: project of the run on Weights & Biases; None: do not use Weights & Biases.
        note: called with a sentence if lines are malformed or missing on resume. Also called if
            TensorBoard's events or Weights & Biases cannot be written any more; log.jsonl is still
            written.

    Raises:
        FileExistsError: `resume_step` is None and the folder already holds a log.
        LogError: on resume, a malformed line before the lines of `resume_step`, or a log that is
            not a regular file.
        OSError: the log cannot be opened.
    """

    def __init__(
        self,
        run_dir: str | Path,
        resume_step: int | None = None,
        *,
        wandb: str | None = None,
        note: Callable[[str], object] = print,
    ):
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "log.jsonl"
        if resume_step is not None:
            _drop_after(self.path, resume_step, note)
        elif self.path.exists():
            raise FileExistsError(
                f"{self.path} is the log of an earlier run; resume that run, or choose another "
                "folder for this one"
            )
        # Unbuffered: on a full disk, `write` raises the error, not `close`.
        self._file = self.path.open("ab", buffering=0)
        self._events = _Events(run_dir, None if resume_step is None else resume_step + 1, note)
        self._wandb = None if wandb is None else WandbLog(run_dir, wandb, note)

    def write(self, kind: Kind, step: int, tokens: int, **fields: Any) -> None:
        """Write one line to log.jsonl, and each number or text as `kind/name` to the other logs.

        Args:
            kind: "train", "val", "eval", "sample", "clipping" or "event".
            step: completed optimizer steps.
            tokens: tokens trained on so far.
            fields: numbers, arrays of one element, text, booleans, None, or other JSON values.

        Raises:
            ValueError: unknown kind, or an array of several elements.
            OSError: the line cannot be written to log.jsonl. No part of the line remains.
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
        if self._wandb is not None:
            self._wandb.write(kind, int(step), int(tokens), fields)

    def _append(self, line: bytes) -> None:
        length = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            # A partial line would make the next line unreadable.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), length)
            raise

    def sync(self) -> None:
        """Make the lines so far durable. Call this before a checkpoint of the same steps is
        durable.

        Raises:
            OSError: fsync failed.
        """
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close all logs without raising errors. The operating system already has every line."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._events.close()
        if self._wandb is not None:
            self._wandb.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


class NoLog(RunLog):
    """A log that writes nothing, for all processes of a run except process 0."""

    def __init__(self, run_dir: str | Path, *_: Any, **__: Any):
        self.path = Path(run_dir) / "log.jsonl"

    def write(self, kind: Kind, step: int, tokens: int, **fields: Any) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _Events:
    """Writer of TensorBoard's event file without a thread. After an error, the writer stops with a
    note.

    tensorboardX's `SummaryWriter` writes in a thread. On a full disk this thread ends, its queue of
    ten events fills up, and the next event blocks forever.
    """

    def __init__(self, run_dir: Path, purge_step: int | None, note: Callable[[str], object]):
        # Import here: only a training run needs tensorboardX.
        with _without_torch():
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto import event_pb2

        self._summary, self._proto, self._note = summary, event_pb2, note
        self._off, self._flushed = False, time.monotonic()

        def open_file():
            # tensorboardX names a file by the time in seconds and would overwrite the file of a run
            # that was killed in the same second, hence the suffix.
            self._writer = event_file_writer.EventsWriter(
                str(run_dir / "events"), f".{time.time_ns()}"
            )
            # TensorBoard hides the steps ≥ purge_step of earlier files.
            if purge_step is not None:
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._write(step=purge_step, file_version="brain.Event:2")
                self._write(step=purge_step, session_log=start)

        self._guard(open_file)

    def add(self, tag: str, value: str | Number, step: int) -> None:
        """Write a text or a number, without raising errors."""
        make = self._summary.text if isinstance(value, str) else self._summary.scalar
        self._guard(lambda: self._write(step=step, summary=make(tag, value)))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._flushed = time.monotonic()
            self._guard(lambda: self._writer.flush())

    def close(self) -> None:
        """Close the file without raising errors."""
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
                "is still written"
            )


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a `log.jsonl`, in order.

    A malformed last line, which a killed process leaves, is skipped.

    Raises:
        FileNotFoundError: the file does not exist.
        LogError: a malformed line before the last one (the message has file and line number), or
            the file cannot be read.
    """
    return _read(Path(path), complete_at=math.inf)[0]


def _read(path: Path, complete_at: Number) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the lines of a log, and the numbers of malformed lines before the last line.

    Raises:
        FileNotFoundError: the file does not exist.
        LogError: the file cannot be read, or a line before the last line is malformed and no
            earlier line has reached step `complete_at`.
    """
    try:
        text = read_regular(path).decode("utf-8", errors="replace")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from error
    rows, malformed, lines = [], [], text.removesuffix("\n").split("\n")
    newest = -math.inf
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not (isinstance(row, dict) and {"kind", "step", "tokens"} <= row.keys()):
                raise ValueError("kind, step or tokens is missing")
            if type(row["step"]) is not int:
                raise ValueError(f"step is {row['step']!r}")
        except (ValueError, RecursionError) as error:
            if number < len(lines) and newest < complete_at:
                raise LogError(
                    f"{path}, line {number}: expected a JSON object with kind, step and tokens, "
                    f"found {line[:60]!r} ({error}); correct or delete the line"
                ) from error
            if number < len(lines):
                malformed.append(number)
            continue
        rows.append(row)
        newest = max(newest, row["step"])
    return rows, malformed


def _drop_after(path: Path, step: int, note: Callable[[str], object]) -> None:
    # After a power cut, garbage may follow the lines that were durable before the checkpoint.
    rows, malformed = _read(path, complete_at=step) if path.exists() else ([], [])
    if malformed:
        lines = "1 malformed line" if len(malformed) == 1 else f"{len(malformed)} malformed lines"
        note(f"{path}: {lines} dropped, the first is line {malformed[0]}")
    # A checkpoint is saved after the lines of its step.
    newest = max((row["step"] for row in rows), default=None)
    if step > 0 and (newest is None or newest < step):
        found = "none" if newest is None else f"the last of step {newest}"
        note(f"{path}: expected lines up to step {step}, found {found}; later lines are lost")
    kept = [row for row in rows if row["kind"] == "event" or row["step"] <= step]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept).encode())


def _plain(value: Any) -> Any:
    """Convert a NumPy or JAX array of one element to a Python number; return other values
    unchanged."""
    return value.item() if hasattr(value, "item") else value


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
