"""Score a model: `python -m gptjax.evaluate PATH --task hellaswag`."""

import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Callable
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
    from_dataset,
    from_file,
    score_text,
    tasks,
)
from gptjax.evaluation.scoring import Progress
from gptjax.files import output, write_atomically
from gptjax.model_options import ModelOptions
from gptjax.terminal import command_line, exit_code, printable
from gptjax.user_folders import data_folder

TEXT_TASKS = ("loss", "bits-per-byte")
TASKS = (*TEXT_TASKS, *EVAL_TASKS)
# Seconds between lines of progress.
LINE_SECONDS = 10
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
        others = [task for task in self.task if task not in TEXT_TASKS]
        texts = len(others) < len(self.task)
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
        if self.file is not None and others and len(self.task) > 1:
            raise EvaluationError("--file is the file of one task; set --data-dir for several")
        for name in ("limit", "batch_tokens", "stride"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise EvaluationError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        self.check_precision()
        if self.out is not None and not output(self.out).parent.is_dir():
            raise EvaluationError(f"--out {self.out} must be a file in a folder that exists")


def run(options: Evaluate, console: Console, command: str) -> dict[str, Any]:
    """Score the model; print a table and return the result.

    Raises:
        EvaluationError, DataError, WeightsError, OSError: a wrong option or file.
    """
    options.check()
    used = options.select_devices(lambda note: console.print(note, markup=False))
    from gptjax.training import memory

    texts = [task for task in TEXT_TASKS if task in options.task]
    inputs = {
        task: tasks.read(task, options.data_dir, options.file)
        for task in options.task
        if task not in TEXT_TASKS
    }
    model, tokenizer = options.load()
    scorer = Scorer.of(model, used, options.batch_tokens)
    about = f"{len(used)} × {used[0].device_kind}, {model.config.precision.name}"
    console.print(printable(f"{options.path}: {about}"), markup=False)
    rows, progress = [], _progress(console)
    try:
        if texts:  # one pass for both metrics
            rows += _timed(_score_text, options, texts, scorer, tokenizer, console)
        for task, items in inputs.items():
            arguments = (task, items, scorer, tokenizer, options.limit, progress)
            rows += _timed(tasks.score, *arguments)
        if options.harness:
            rows += _timed(_harness, options, model, tokenizer, used, progress)
    except jax.errors.JaxRuntimeError as error:
        if not memory.is_full(error):
            raise
        raise EvaluationError(
            f"the device has no memory for batches of {scorer.batch_tokens:,} tokens: set a "
            "smaller --batch-tokens, or --device cpu"
        ) from error
    console.print(_table(rows))
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


def _timed(score: Callable[..., dict[str, dict[str, Any]]], *arguments: Any) -> list[dict]:
    """Return a row for each result by task; the last row has the seconds of all."""
    began = time.perf_counter()
    rows = [{"task": task} | values for task, values in score(*arguments).items()]
    rows[-1]["seconds"] = round(time.perf_counter() - began, 3)
    return rows


def _score_text(
    options: Evaluate, metrics: list[str], scorer: Scorer, tokenizer: Any, console: Console
) -> dict[str, dict[str, Any]]:
    """Print the path of the text; return loss and bits-per-byte."""
    path, stream = _stream(options, tokenizer)
    console.print(printable(f"text: {path}"), markup=False)
    tokens = min(stream.tokens, options.limit or stream.tokens)
    windows = -(-tokens // (options.stride or scorer.max_length))
    scored = _progress(console)(" and ".join(metrics), windows)
    found = score_text(
        scorer, stream, stride=options.stride, max_tokens=options.limit, scored=scored
    )
    values = {"loss": found.loss, "bits-per-byte": found.bits_per_byte}
    about = {"dataset": str(path), "tokens": found.tokens, "bytes": found.bytes}
    return {name: {"value": values[name]} | about for name in metrics}


def _stream(options: Evaluate, tokenizer: Any) -> tuple[Path, Stream]:
    """Return path and content of the text that loss and bits-per-byte score: --file, or the
    validation shards of a dataset."""
    if options.file is not None and not options.file.is_dir():
        return options.file, from_file(options.file, tokenizer)
    name = str(options.dataset if options.file is None else options.file.absolute())
    dataset = data.find_dataset(name, options.data_dir, tokenizer.name)
    return dataset.path, from_dataset(dataset, tokenizer)


def _harness(
    options: Evaluate, model: Any, tokenizer: Any, used: list, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Return the metrics of the tasks of lm-evaluation-harness."""
    from gptjax.evaluation.harness import LM, evaluate_tasks

    batch = None
    if options.batch_tokens is not None:
        batch = max(1, options.batch_tokens // model.config.block_size)
    found = evaluate_tasks(
        LM(model, tokenizer, batch, devices=used, progress=progress),
        options.harness,
        path=options.harness_path,
        shots=options.shots,
        limit=options.limit,
    )
    return {f"harness/{name}": values for name, values in found.items()}


def _progress(console: Console) -> Progress:
    """Return a function that begins a progress, of which a line is printed every ten seconds."""

    def start(text: str, total: int) -> Callable[[int], None]:
        printed, done = time.monotonic(), 0

        def scored(count: int) -> None:
            nonlocal printed, done
            done += count
            if time.monotonic() - printed >= LINE_SECONDS:
                printed = time.monotonic()
                console.print(printable(f"{text}: {done:,} of {total:,}"), markup=False)
                console.file.flush()

        return scored

    return start


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
