"""Score a model: `python -m gptjax.evaluate PATH --task hellaswag`."""

import dataclasses
import functools
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import tyro

from gptjax import data
from gptjax.bench import results
from gptjax.config import EVAL_TASKS
from gptjax.evaluation import EvaluationError, Scorer, from_dataset, from_file, score_text, tasks
from gptjax.files import output, write_atomically
from gptjax.model_options import ModelOptions
from gptjax.terminal import exit_code, hint, print_line
from gptjax.training import memory
from gptjax.user_folders import data_folder
from gptjax.weights import sources

TEXT_TASKS = ("loss", "bits-per-byte")
TASKS = (*TEXT_TASKS, *EVAL_TASKS)
# Seconds between lines of progress.
LINE_SECONDS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(ModelOptions):
    """Options of the command."""

    task: tuple[str, ...] = ()
    """One or several of loss, bits-per-byte, hellaswag, core. loss and bits-per-byte score every
    token of a text once."""
    file: Path | None = None
    """File of the task: a text (loss, bits-per-byte), hellaswag_val.jsonl or llm.c's
    hellaswag_val.bin, or the folder with core.yaml. None: in data-dir."""
    data_dir: Path = dataclasses.field(default_factory=data_folder)
    """Folder of the prepared datasets, of hellaswag_val.jsonl and of eval_bundle/."""
    dataset: str = "auto"
    """Dataset whose validation shards loss and bits-per-byte score, as for train.py. auto: that of
    the run, if PATH is a run."""
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
        one = len(self.task) == 1 or {*self.task} == {*TEXT_TASKS}
        if self.file is not None and not (one and self.dataset == "auto"):
            raise EvaluationError("--file is the file of one task, without --dataset")
        if self.limit is not None and self.limit < 1:
            raise EvaluationError(f"--limit must be at least 1, got {self.limit}")
        if self.out is not None and not output(self.out).parent.is_dir():
            raise EvaluationError(f"--out {self.out} must be a file in a folder that exists")


def run(options: Evaluate, command: str) -> dict[str, Any]:
    """Score the model; print a table and return the result.

    Raises:
        ConfigError, DataError, WeightsError, OSError: a wrong option or file.
    """
    options.check()
    if options.harness:
        from gptjax.evaluation.harness import LM, evaluate_tasks
    used = options.select_devices(print_line)
    inputs = {
        task: tasks.read(task, options.data_dir, options.file)
        for task in options.task
        if task not in TEXT_TASKS
    }
    model, tokenizer = options.load()
    scorer = Scorer.of(model, used, options.batch_tokens)
    about = f"{len(used)} × {used[0].device_kind}, {model.config.precision.name}"
    print_line(f"{options.path}: {about}")
    rows: list[dict[str, Any]] = []

    def timed(name: str, scorer: Scorer, score: Callable[[], dict[str, dict[str, Any]]]) -> None:
        """Add a row for each result; the last row has the seconds of all."""
        began, scorer.progress = time.perf_counter(), _progress(name)
        rows.extend({"task": task} | values for task, values in score().items())
        rows[-1]["seconds"] = round(time.perf_counter() - began, 3)

    try:
        if {*options.task} & {*TEXT_TASKS}:  # one pass for both metrics
            timed("windows", scorer, lambda: _score_text(options, scorer, tokenizer))
        for task, items in inputs.items():
            score = functools.partial(tasks.score, task, items, scorer, tokenizer, options.limit)
            timed(task, scorer, score)
        if options.harness:
            batch = options.batch_tokens and max(1, options.batch_tokens // scorer.max_length)
            lm = LM(model, tokenizer, batch, devices=used)
            limits = {"shots": options.shots, "limit": options.limit, "path": options.harness_path}
            score = functools.partial(evaluate_tasks, lm, options.harness, **limits)
            timed("harness", lm.scorer, score)
    except jax.errors.JaxRuntimeError as error:
        if not memory.is_full(error):
            raise
        raise EvaluationError(
            f"the device has no memory for batches of {scorer.batch_tokens:,} tokens: set a "
            "smaller --batch-tokens, or --device cpu"
        ) from error
    results.print_table("", ("metric", "value", "scored"), _table(rows))
    return results.new(
        command,
        rows,
        device=used[0].device_kind,
        packages=("lm_eval",) if options.harness else (),
        devices=len(used),
        model=str(options.path),
        precision=model.config.precision.name,
    )


def _score_text(options: Evaluate, scorer: Scorer, tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Print the path of the text; return loss and bits-per-byte, if they are asked for.

    The text is --file, or the validation shards of --dataset, by default the run's.
    """
    if options.file is not None:
        path, stream = options.file, from_file(options.file, tokenizer)
    else:
        meta = sources.find(options.path, step=options.step).meta  # empty, unless it is a run
        own = meta.get("config", {}).get("dataset", "auto")
        name = own if options.dataset == "auto" else options.dataset
        dataset = data.find_dataset(name, options.data_dir, tokenizer.name)
        path, stream = dataset.path, from_dataset(dataset, tokenizer)
    print_line(f"text: {path}")
    found = score_text(scorer, stream, stride=options.stride, max_tokens=options.limit)
    values = {"loss": found.loss, "bits-per-byte": found.bits_per_byte}
    about = {"dataset": str(path), "tokens": found.tokens, "bytes": found.bytes}
    return {name: {"value": values[name]} | about for name in TEXT_TASKS if name in options.task}


def _progress(name: str) -> Callable[[int, int], None]:
    """Return a function that prints the number of scored items, at most every ten seconds."""
    printed = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal printed
        if time.monotonic() - printed >= LINE_SECONDS:
            printed = time.monotonic()
            print_line(f"{name}: {done:,} of {total:,}")

    return progress


def _table(rows: list[dict[str, Any]]) -> list[results.Row]:
    table = []
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
                table.append(results.Row(row["task"], (name, f"{value:.4f}{plus}", scored)))
    return table


def main(args: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = sys.argv[1:] if args is None else args

    def command() -> None:
        options = tyro.cli(
            Evaluate,
            prog="gptjax evaluate",
            description="Score a model on texts, multiple choice, CORE, or tasks of\n"
            "lm-evaluation-harness. The files of hellaswag and core are not downloaded:\n"
            "an error names their address and the place for them.",
            args=args,
        )
        line = shlex.join(["python", "-m", "gptjax.evaluate", *arguments])
        result = run(options, line)
        if options.out is not None:
            write_atomically(options.out, f"{results.compact_json(result)}\n".encode())
            print_line(f"wrote {options.out}")
        hint(f"gptjax export {shlex.quote(str(options.path))} --to hf --out FOLDER", piped=False)

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
