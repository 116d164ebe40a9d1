"""`python -m gptjax.bench startup`: seconds from the command to the first finished step, by part.

The training script runs three times as a process of its own: "cold", with empty caches; "warm",
with the caches that the first run left; "resumed", with these caches and from a checkpoint. The
clock starts before the process. The script's log has the time of the first finished step and the
seconds of each part; "python" is the rest: the interpreter's own start.
"""

import dataclasses
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from gptjax import cli
from gptjax.bench import results
from gptjax.bench.errors import BenchError
from gptjax.bench.rows import say
from gptjax.bench.table import Row, print_table
from gptjax.data.manifest import Manifest, ShardInfo
from gptjax.data.shards import Shard, write_shard
from gptjax.training.run_log import read_log

STEPS = 2
TOKENS = 4_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Startup:
    """Measure the seconds from the command to the first finished step of train.py: with empty
    caches, with full caches, and resumed from a checkpoint."""

    config: Path
    """Config file, as for train.py."""
    train: Path = Path("train.py")
    """The training script: train.py of the repository."""
    options: str = ""
    """Further options of train.py, in one string after an equals sign: --options="--device cpu
    --val-every 0"."""
    out: Path | None = None
    """JSON file for the results."""

    def run(self) -> None:
        if self.out:
            results.check_file(self.out)
        try:
            options = shlex.split(self.options)
        except ValueError as error:
            raise BenchError(
                f"--options={self.options}: expected options as in a shell ({error}): close the "
                "quotation"
            ) from error
        rows = starts(self.train, self.config, options)
        try:
            if self.out:
                command = ["python", "-m", "gptjax.bench", "startup", "--config", str(self.config)]
                command += ["--train", str(self.train)] if self.train != Path("train.py") else []
                command += [f"--options={self.options}"] if self.options else []
                device = rows[0]["device"]
                results.write(self.out, results.new(shlex.join(command), rows, device=device))
        finally:  # the table shows the measurement even if it cannot be written
            show(rows)
        if self.out:
            print(f"wrote {self.out}")


def starts(train: Path, config: Path, options: list[str]) -> list[dict]:
    """Return a dict for each of the three starts, from `row_of`, with "device" and "versions".

    Args:
        train: the training script.
        options: further options of the script.

    Raises:
        BenchError: no such script, or a run failed; its last lines are in the message.
        ConfigError: no such config.
    """
    if not train.is_file():
        raise BenchError(
            f"there is no {train}: give the path of the repository's train.py with --train"
        )
    loaded = cli.load(config)
    schedule_steps = loaded.optimizer.schedule_steps or loaded.max_steps
    with tempfile.TemporaryDirectory(prefix="gptjax-startup-") as temporary:
        folder = Path(temporary)
        _write_random_tokens(folder / "random", loaded.model.vocab_size)
        common = [
            *("--config", config.absolute(), "--dataset", folder / "random"),
            *("--runs-dir", folder / "runs", "--compilation-cache", folder / "cache"),
            *("--sample-every", 0, "--checkpoint-every", 0),
            # By default the schedule's length is max_steps: a longer run would not be the same run.
            # The config's own length has room for its warm-up and cooldown.
            *("--optimizer.schedule-steps", max(1000, schedule_steps)),
            *options,
        ]

        def start(name: str, run: str, steps: int) -> dict:
            own = ("--name", run, "--max-steps", steps)
            return _start(train, name, run, [str(word) for word in (*common, *own)], folder)

        return [
            start("cold", "cold", STEPS),
            start("warm", "warm", STEPS),
            start("resumed", "warm", 2 * STEPS),
        ]


def _write_random_tokens(folder: Path, vocab_size: int) -> None:
    """Write a dataset of random bytes. The preparation of a dataset is not part of a start, and
    might download a tokenizer."""
    folder.mkdir()
    rng, shards = np.random.default_rng(0), {}
    for name, count in (
        ("random_train_000001.bin", TOKENS),
        ("random_val_000000.bin", TOKENS // 2),
    ):
        tokens = rng.integers(0, min(256, vocab_size), count, dtype=np.uint16)
        write_shard(folder / name, tokens)
        shards[name] = ShardInfo.from_shard(Shard(folder / name))
    Manifest("byte", 257, 256, "random", None, shards).write(folder)


def _start(train: Path, name: str, run: str, arguments: list[str], folder: Path) -> dict:
    """Run the training script to the end of its few steps; return the row of this start."""
    environment = os.environ | {"CUDA_CACHE_PATH": str(folder / "cuda")}
    # `python -m gptjax.bench` sets it for itself; a training run preallocates its memory.
    environment.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
    launched = time.time()
    done = subprocess.run(
        [sys.executable, train.name, *arguments],
        cwd=train.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchError(
            f"the {name} start failed; the last lines of train.py:\n"
            + "\n".join(done.stdout.splitlines()[-15:])
        )
    log = read_log(folder / "runs" / run / "log.jsonl")
    events = [row for row in log if row["kind"] == "event"]
    *_, start = (row for row in events if row["event"] == "start")
    *_, first = (row for row in events if row["event"] == "first step")
    row = row_of(name, launched, first)
    row |= {"device": start["device"], "versions": start["versions"]}
    say(f"{name}: {row['total']:.1f} s")
    return row


def row_of(name: str, launched: float, first: dict) -> dict:
    """Return the row of one start.

    Args:
        launched: `time.time()` before the process was started.
        first: the log's event "first step".

    Returns:
        "start" (its name), "total" and "parts" in seconds, "executables" compiled ahead of time,
        "cache_hits", "cache_misses".
    """
    total = first["time"] - launched
    return {
        "start": name,
        "total": total,
        "parts": {"python": total - sum(first["seconds"].values())} | first["seconds"],
        **{key: first[key] for key in ("executables", "cache_hits", "cache_misses")},
    }


def show(rows: list[dict]) -> None:
    """Print a row for each part, a column for each start."""
    table = []

    def add(label: str, seconds: Iterable[float | None]) -> None:
        table.append(Row(label, [_figure(value) for value in seconds]))

    for part in dict.fromkeys(part for row in rows for part in row["parts"]):
        add(part, (row["parts"].get(part) for row in rows))
        if part == "compilation":
            for name in dict.fromkeys(e["name"] for row in rows for e in row["executables"]):
                for stage, words in (
                    ("lower", "traced and lowered"),
                    ("compile", "compiled, or read"),
                ):
                    add(f"  {name}: {words}", (_seconds(row, name, stage) for row in rows))
    table.append(Row())
    add("total", (row["total"] for row in rows))
    table.append(Row("cache hits", [str(row["cache_hits"]) for row in rows]))
    table.append(Row("cache misses", [str(row["cache_misses"]) for row in rows]))
    title = f"seconds to the first finished step, {rows[0]['device']}"
    print_table(title, [row["start"] for row in rows], table)


def _seconds(row: dict, name: str, stage: str) -> float | None:
    seconds = [e[stage] for e in row["executables"] if e["name"] == name]
    return sum(seconds) if seconds else None


def _figure(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.2f}"
