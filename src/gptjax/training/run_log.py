"""Log of a run: `log.jsonl`, TensorBoard events, and Weights & Biases if asked for.

This module does not import JAX, so that commands that read a log start fast. Values are numbers or
arrays of one element.
"""

import contextlib
import importlib.util
import json
import math
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from gptjax.files import read_regular, write_atomically
from gptjax.terminal import UserError
from gptjax.training.imports import without_torch

Kind = Literal["train", "val", "eval", "sample", "clipping", "event"]

# Interval of the flushes of TensorBoard's events, each with an fsync in the training loop.
_FLUSH_SECONDS = 30


class LogError(UserError, ValueError):
    """A log.jsonl that cannot be read, or a log that cannot be written."""


def check_wandb(project: str | None) -> None:
    """Raise LogError if the run has a project on Weights & Biases and wandb is not installed."""
    # Python finds a folder `wandb`, which wandb itself writes, as a package without an origin.
    spec = importlib.util.find_spec("wandb")
    if project is not None and (spec is None or spec.origin is None):
        raise LogError(
            f"--wandb {project} needs the package wandb: pip install 'gptjax[wandb]', or leave out "
            "--wandb"
        )


def has_tensorboard() -> bool:
    """Return whether tensorboardX is installed, which writes TensorBoard's events."""
    return importlib.util.find_spec("tensorboardX") is not None


class RunLog:
    """Writer of `log.jsonl`, one JSON object per line, of TensorBoard events if tensorboardX is
    installed, and of a run on Weights & Biases.

    Each line has `kind`, `step`, `tokens` and further fields. `write` passes the line to the
    operating system: a killed process loses at most the line that is being written. NaN and ±inf
    are written as null, because JSON does not represent them.

    On resume, all lines after `resume_step` except events are removed, because these steps are
    repeated. TensorBoard hides the earlier values of these steps; Weights & Biases shows both.

    Args:
        run_dir: the run's folder, created if it does not exist.
        resume_step: step of the checkpoint from which the run resumes; None for none.
        wandb: project of the run on Weights & Biases; None: do not use Weights & Biases.
        note: called with a sentence if Weights & Biases cannot be written any more; the other logs
            are still written.

    Raises:
        LogError: a malformed line of the earlier log, or a log that is not a regular file.
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
        first = 0 if resume_step is None else resume_step + 1
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "log.jsonl"
        if self.path.exists():
            rows = read_log(self.path)
            kept = [row for row in rows if row["kind"] == "event" or row["step"] < first]
            write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self._file = self.path.open("ab")
        self._events = _Events(run_dir, first) if has_tensorboard() else None
        self._wandb = None if wandb is None else _Wandb(run_dir, wandb, note)

    def write(self, kind: Kind, step: int, tokens: int, **fields: Any) -> None:
        """Write one line to log.jsonl, and each number or text as `kind/name` to the other logs.

        Args:
            step: completed optimizer steps.
            tokens: tokens trained on so far.
            fields: numbers, arrays of one element, text, booleans, None, or other JSON values. The
                dictionary `config` becomes the run's config on Weights & Biases.

        Raises:
            ValueError: an array of several elements.
            OSError: a line or an event cannot be written.
        """
        fields = {name: x.item() if hasattr(x, "item") else x for name, x in fields.items()}
        line = {"kind": kind, "step": int(step), "tokens": int(tokens)}
        for name, x in fields.items():
            line[name] = None if isinstance(x, float) and not math.isfinite(x) else x
        self._file.write((json.dumps(line, allow_nan=False) + "\n").encode())
        self._file.flush()
        values = {f"{kind}/{k}": x for k, x in fields.items() if isinstance(x, str | int | float)}
        if self._events is not None:
            self._events.write(values, int(step))
        if self._wandb is not None:
            self._wandb.write(values, int(step), int(tokens), fields.get("config"))

    def sync(self) -> None:
        """Make the lines so far durable. Call this before a checkpoint of the same steps is
        durable.

        Raises:
            OSError: fsync failed.
        """
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close all logs without raising errors. The operating system already has every line."""
        for log in (self._file, self._events, self._wandb):
            with contextlib.suppress(OSError):
                log is not None and log.close()


class NoLog(RunLog):
    """A log that writes nothing, for all processes of a run except process 0."""

    def __init__(self, run_dir: str | Path, *_: Any, **__: Any):
        self.path = Path(run_dir) / "log.jsonl"

    def write(self, *_: Any, **__: Any) -> None:
        """Do nothing, as `sync` and `close`."""

    sync = close = write


class _Events:
    """Writer of TensorBoard's event file without a thread.

    tensorboardX's `SummaryWriter` writes in a thread. On a full disk this thread ends, its queue of
    ten events fills up, and the next event blocks forever.
    """

    def __init__(self, run_dir: Path, purge_step: int):
        with without_torch():
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto import event_pb2
        self._summary, self._proto = summary, event_pb2
        # tensorboardX names a file by the time in seconds and would overwrite the file of a run
        # that was killed in the same second, hence the suffix.
        path, suffix = str(run_dir / "events"), f".{time.time_ns()}"
        self._writer = event_file_writer.EventsWriter(path, suffix)
        self._flushed = time.monotonic()
        # TensorBoard hides the steps ≥ purge_step of earlier files.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=purge_step, file_version="brain.Event:2")
        self._write(step=purge_step, session_log=start)

    def write(self, values: dict[str, str | float | int], step: int) -> None:
        for tag, value in values.items():
            make = self._summary.text if isinstance(value, str) else self._summary.scalar
            self._write(step=step, summary=make(tag, value))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._flushed = time.monotonic()
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write_event(self._proto.Event(wall_time=time.time(), **fields))


class _Wandb:
    """Writer of a run on Weights & Biases. After the first error, the writer stops with a note.

    The run's id is kept in the file `wandb_id` of the run's folder: a resumed run continues the
    same run there.
    """

    def __init__(self, run_dir: Path, project: str, note: Callable[[str], object]):
        self._note, self._run = note, None
        if not (file := run_dir / "wandb_id").exists():
            file.write_text(secrets.token_hex(8) + "\n")
        options = {"project": project, "name": run_dir.name, "dir": run_dir, "resume": "allow"}
        with self._noted():
            import wandb

            # Otherwise wandb replaces the process's stdout.
            options |= {"settings": wandb.Settings(console="off")}
            self._run = wandb.init(id=file.read_text().strip(), **options)
            self._run.define_metric("*", step_metric="step")

    def write(self, values: dict[str, Any], step: int, tokens: int, config: dict | None) -> None:
        with self._noted():
            if self._run is not None and config is not None:
                self._run.config.update(config, allow_val_change=True)
            if self._run is not None and values:
                self._run.log({"step": step, "tokens": tokens, **values})

    def close(self) -> None:
        """Finish the run. Wait until wandb has sent its data."""
        with self._noted():
            if self._run is not None:
                self._run.finish()

    @contextlib.contextmanager
    def _noted(self):
        try:
            yield
        except Exception as error:  # errors of wandb, of the network, of the disk
            self._run = None
            text = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._note(f"Weights & Biases is no longer written: {text}; log.jsonl is still written")


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a `log.jsonl`, in order.

    A malformed last line, which a killed process leaves, is skipped.

    Raises:
        FileNotFoundError: the file does not exist.
        LogError: a malformed line before the last one (the message has file and line number), or
            the file cannot be read.
    """
    try:
        text = read_regular(path).decode("utf-8", errors="replace")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from error
    rows, lines = [], text.removesuffix("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int or not {"kind", "tokens"} <= row.keys():
                raise ValueError("step is not an integer, or kind or tokens is missing")
            rows.append(row)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if number < len(lines):
                raise LogError(
                    f"{path}, line {number}: expected a JSON object with kind, step and tokens, "
                    f"found {line[:60]!r} ({error}); correct or delete the line"
                ) from error
    return rows
