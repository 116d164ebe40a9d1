"""The record of a run: `log.jsonl` and TensorBoard events.

No JAX here: values are numbers or arrays of one element, and reading a log must start fast.
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

from gptjax.training.flops import Number


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
