"""Score a model: `python -m gptjax.evaluate PATH --task hellaswag`."""

import contextlib
import dataclasses
import functools
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from gptjax import data, devices
from gptjax.config import EVAL_TASKS, ConfigError
from gptjax.evaluation import (
    EvaluationError,
    Scorer,
    Stream,
    core_metric,
    evenly_spaced,
    from_dataset,
    from_file,
    score_choices,
    score_core,
    score_text,
)
from gptjax.evaluation.places import place, read
from gptjax.files import output, write_atomically
from gptjax.model_options import ModelOptions
from gptjax.terminal import command_line, exit_code, printable
from gptjax.user_folders import data_folder

TEXT_TASKS = ("loss", "bits-per-byte")
TASKS = (*TEXT_TASKS, *EVAL_TASKS)
# Seconds between lines of progress.
LINE_SECONDS = 10
# 256 times the default on a GPU.
MAX_BATCH_TOKENS = 2**24
USER_ERRORS = (EvaluationError, data.DataError, ConfigError, devices.DeviceError, OSError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(ModelOptions):
    """Options of the command."""

    task: tuple[str, ...] = ()
    """One or several of loss, bits-per-byte, hellaswag, core. loss and bits-per-byte score every
    token of a text once."""
    file: Path | None = None
    """File or folder of the task: text or folder of .bin shards (loss, bits-per-byte);
    hellaswag_val.jsonl or llm.c's hellaswag_val.bin; the folder with core.yaml. None: in
    data-dir."""
    data_dir: Path = dataclasses.field(default_factory=data_folder)
    """Folder of the prepared datasets, of hellaswag_val.jsonl and of eval_bundle/."""
    dataset: str = "auto"
    """Dataset whose validation shards loss and bits-per-byte score, as for train.py."""
    stride: int | None = None
    """Tokens scored in each window of loss and bits-per-byte. A smaller stride gives each token
    more context and takes longer. None: the model's block_size."""
    limit: int | None = None
    """Score only this number of items of each task, or tokens of a text."""
    harness: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness, which downloads their data."""
    harness_path: Path | None = None
    """Folder with more tasks of lm-evaluation-harness, as YAML."""
    shots: int | None = None
    """Few-shot examples of the tasks of lm-evaluation-harness. None: each task's default."""
    batch_tokens: int | None = None
    """Tokens that a device scores at a time. None: 65,536 on a GPU and 4,096 on a CPU."""
    out: Path | None = None
    """JSON file of the results."""

    def check(self) -> None:
        """Raise EvaluationError for options that contradict each other or are out of range."""
        if not self.task and not self.harness:
            raise EvaluationError("expected --task or --harness, got neither")
        if wrong := [task for task in self.task if task not in TASKS]:
            raise EvaluationError(
                f"--task must be names of {', '.join(TASKS)}, got {wrong[0]!r}; other tasks: "
                "python -m gptjax.evaluate RUN --harness mmlu"
            )
        if len({*self.task}) < len(self.task):
            raise EvaluationError(f"expected each task once, got {' '.join(self.task)}")
        texts = any(task in TEXT_TASKS for task in self.task)
        dataset = None if self.dataset == "auto" else self.dataset
        for option, value, needed, given in (
            ("--stride", self.stride, "--task loss or bits-per-byte", texts),
            ("--dataset", dataset, "--task loss or bits-per-byte", texts),
            ("--file", self.file, "--task", self.task),
            ("--shots", self.shots, "--harness", self.harness),
            ("--harness-path", self.harness_path, "--harness", self.harness),
        ):
            if value is not None and not given:
                raise EvaluationError(f"{option} needs {needed}, got none")
        if self.file is not None and dataset is not None:
            raise EvaluationError(
                f"expected --file or --dataset, got both, {self.file} and {dataset}; leave one out"
            )
        texts_only = all(task in TEXT_TASKS for task in self.task)
        if self.file is not None and not texts_only and len(self.task) > 1:
            raise EvaluationError("--file is the file of one task; set --data-dir for several")
        for name in ("limit", "batch_tokens", "stride"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise EvaluationError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.batch_tokens is not None and self.batch_tokens > MAX_BATCH_TOKENS:
            raise EvaluationError(
                f"--batch-tokens must be at most {MAX_BATCH_TOKENS}, got {self.batch_tokens}"
            )
        self.check_precision()
        if self.out is not None:
            try:
                folder = output(self.out).parent
            except OSError as error:
                raise EvaluationError(f"--out {error}") from error
            if not folder.is_dir():
                raise EvaluationError(f"--out {self.out} must be a file in a folder that exists")


def run(options: Evaluate, console: Console, command: str) -> dict[str, Any]:
    """Score the model; print a table and return the result.

    Raises:
        EvaluationError, DataError, WeightsError, OSError: a wrong option or file.
    """
    options.check()
    used = options.select_devices(lambda note: console.print(note, markup=False))
    from gptjax.training import memory

    inputs = {
        task: read(task, options.file or place(task, options.data_dir))
        for task in options.task
        if task not in TEXT_TASKS
    }
    model, tokenizer = options.load()
    scorer = Scorer.of(model, used, options.batch_tokens)
    about = f"{len(used)} × {used[0].device_kind}, {model.config.precision.name}"
    console.print(printable(f"{options.path}: {about}"), markup=False)
    rows = []
    texts = [task for task in options.task if task in TEXT_TASKS]
    try:
        if texts:  # one pass for both metrics
            with _progress(console, " and ".join(texts)) as scored:
                rows += _score_text(options, texts, scorer, tokenizer, console, scored)
        for task, items in inputs.items():
            with _progress(console, task) as scored:
                rows += _score(options, task, scorer, tokenizer, items, scored)
        if options.harness:
            rows += _harness(options, model, tokenizer, used, console)
    except jax.errors.JaxRuntimeError as error:
        if not memory.is_full(error):
            raise
        raise EvaluationError(
            f"the device has no memory for batches of {scorer.batch_tokens:,} tokens: set a "
            "smaller --batch-tokens, or --device cpu"
        ) from error
    console.print(_table(rows))
    return _result(options, command, rows, used, model)


def _score_text(
    options: Evaluate,
    tasks: list[str],
    scorer: Scorer,
    tokenizer: Any,
    console: Console,
    scored: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """Print the path of the text; return one row for loss and one for bits-per-byte."""
    began = time.perf_counter()
    path, stream = _stream(options, tokenizer)
    console.print(printable(f"text: {path}"), markup=False)
    tokens = min(stream.tokens, options.limit or stream.tokens)
    windows = -(-tokens // (options.stride or scorer.max_length))
    found = score_text(
        scorer,
        stream,
        stride=options.stride,
        max_tokens=options.limit,
        scored=lambda n: scored(n, windows),
    )
    values = {"loss": found.loss, "bits-per-byte": found.bits_per_byte}
    about = {"dataset": str(path), "tokens": found.tokens, "bytes": found.bytes}
    about["seconds"] = _since(began)
    return [{"task": task, "value": values[task]} | about for task in tasks]


def _score(
    options: Evaluate,
    task: str,
    scorer: Scorer,
    tokenizer: Any,
    items: Any,
    scored: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """Return the rows of hellaswag or core."""
    began = time.perf_counter()
    if task == "core":
        total = sum(min(len(each.items), options.limit or len(each.items)) for each in items)
        of_each = score_core(
            scorer,
            tokenizer,
            items,
            max_items=options.limit,
            scored=lambda n: scored(n, total),
        )
        rows = [{"task": f"core/{label}"} | values for label, values in of_each.items()]
        rows.append({"task": task, "value": core_metric(of_each), "items": total})
    else:
        questions = evenly_spaced(items, options.limit)
        total = sum(len(question.endings) for question in questions)
        choices = score_choices(scorer, tokenizer, questions, scored=lambda n: scored(n, total))
        rows = [{"task": task} | choices.metrics()]
    rows[-1]["seconds"] = _since(began)
    return rows


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 3)


def _stream(options: Evaluate, tokenizer: Any) -> tuple[Path, Stream]:
    """Return path and content of the text that loss and bits-per-byte score: --file, or the
    validation shards of a dataset."""
    if options.file is not None and not options.file.is_dir():
        return options.file, from_file(options.file, tokenizer)
    name = str(options.dataset if options.file is None else options.file.absolute())
    dataset = data.find_dataset(name, options.data_dir, tokenizer.name)
    return dataset.path, from_dataset(dataset, tokenizer)


def _harness(
    options: Evaluate, model: Any, tokenizer: Any, used: list, console: Console
) -> list[dict[str, Any]]:
    """Return the rows of the tasks of lm-evaluation-harness."""
    from gptjax.evaluation.harness import LM, evaluate_tasks

    batch = None
    if options.batch_tokens is not None:
        batch = max(1, options.batch_tokens // model.config.block_size)
    began = time.perf_counter()
    found = evaluate_tasks(
        LM(model, tokenizer, batch, devices=used, progress=functools.partial(_progress, console)),
        options.harness,
        path=options.harness_path,
        shots=options.shots,
        limit=options.limit,
    )
    rows = [{"task": f"harness/{name}", **values} for name, values in found.items()]
    rows[-1]["seconds"] = _since(began)
    return rows


@contextlib.contextmanager
def _progress(console: Console, task: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of the number of newly scored items and the total, which prints progress
    every ten seconds."""
    printed, total_scored = time.monotonic(), 0

    def advance(scored: int, total: int) -> None:
        nonlocal printed, total_scored
        total_scored += scored
        if time.monotonic() - printed >= LINE_SECONDS:
            printed = time.monotonic()
            console.print(f"{task}: {total_scored:,} of {total:,}", markup=False)
            console.file.flush()

    yield advance


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("task", "metric", "value", "scored")
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float) and name != "seconds" and "stderr" not in name:
                # lm-evaluation-harness has acc,none and acc_stderr,none.
                metric, comma, filter_name = name.partition(",")
                stderr = row.get(f"{metric}_stderr{comma}{filter_name}")
                plus = f" ± {stderr:.4f}" if isinstance(stderr, float) else ""
                items = row.get("items", row.get("sample_len", ""))
                scored = f"{row['tokens']:,} tokens" if "tokens" in row else f"{items:,} items"
                name = row["task"] if name == "value" else name
                table.add_row(row["task"], name, f"{value:.4f}{plus}", scored)
    return table


def _result(options: Evaluate, command: str, rows: list, used: list, model: Any) -> dict[str, Any]:
    from gptjax.bench import results

    return results.new(
        command,
        rows,
        device=used[0].device_kind,
        packages=("lm_eval",) if options.harness else (),
        devices=len(used),
        model=str(options.path),
        precision=model.config.precision.name,
    )


def main(args: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from gptjax.weights import WeightsError

    arguments = sys.argv[1:] if args is None else args

    def command() -> None:
        options = command_line(
            Evaluate,
            prog="python -m gptjax.evaluate",
            description="Score a model on texts, multiple choice, CORE, or tasks of "
            "lm-evaluation-harness. The files of hellaswag and core are not downloaded: "
            "an error names their address and the place for them.",
            args=args,
        )
        console = Console(highlight=False, soft_wrap=True)
        line = shlex.join(["python", "-m", "gptjax.evaluate", *arguments])
        result = run(options, console, line)
        if options.out is not None:
            from gptjax.bench.results import compact_json

            write_atomically(options.out, f"{compact_json(result)}\n".encode())
            console.print(printable(f"wrote {options.out}"), markup=False)

    return exit_code(command, (*USER_ERRORS, WeightsError))


if __name__ == "__main__":
    # No preallocation: the GPU may be shared with a training run.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sys.exit(main())
