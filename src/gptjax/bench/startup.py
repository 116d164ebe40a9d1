"""`python -m gptjax.bench startup`: seconds from the command to the first finished step, and where
they go.

train.py runs as its users run it, as a process of its own, three times: "cold", with empty caches
of compiled programs; "warm", with what the first left there; "resumed", the same, going on from a
checkpoint. The clock starts before the process does. train.py's log says when the first step was
finished and how long each part took; "python" is what is left: the interpreter's own start.
"""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from gptjax import config as configuration
from gptjax.bench.kernels import BenchError
from gptjax.bench.table import Row, print_table
from gptjax.data.manifest import Manifest, ShardInfo
from gptjax.data.shards import Shard, write_shard
from gptjax.training.run_log import read_log

# Beside src/: it is part of the repository and not of the installed package.
TRAIN = Path(__file__).parents[3] / "train.py"
STEPS = 2
TOKENS = 4_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Startup:
    """Seconds from the command to train.py's first finished step: cold, with a warm cache, resumed.
    Needs a repository checkout."""

    config: Path
    """The experiment card, as for train.py."""
    options: str = ""
    """Further options of train.py, in one string after an equals sign: --options="--device cpu
    --val-every 0"."""
    out: Path | None = None
    """JSON file for the results."""

    def run(self) -> None:
        rows = starts(self.config, shlex.split(self.options))
        if self.out:
            command = ["python", "-m", "gptjax.bench", "startup", "--config", str(self.config)]
            command += [f"--options={self.options}"] if self.options else []
            result = {
                "command": shlex.join(command),
                "date": time.strftime("%Y-%m-%d"),
                "rows": rows,
            }
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        show(rows)
        if self.out:
            print(f"wrote {self.out}")


def starts(config: Path, options: list[str]) -> list[dict]:
    """A dict for each of the three starts, from `row_of`, with "device" and "versions".

    Args:
        options: further ones of train.py.

    Raises:
        BenchError: no train.py here, or a run failed; its last lines are in the message.
        ConfigError: no such config.
    """
    if not TRAIN.is_file():
        raise BenchError(
            f"there is no {TRAIN}: start-up is measured in a checkout of the repository"
        )
    vocab_size = configuration.load(config).model.vocab_size
    with tempfile.TemporaryDirectory(prefix="gptjax-startup-") as folder:
        folder = Path(folder)
        _write_random_tokens(folder / "random", vocab_size)
        given = [
            "--config",
            str(config.absolute()),
            "--dataset",
            str(folder / "random"),
            "--sample-every",
            "0",
        ]
        given += ["--runs-dir", str(folder / "runs"), "--compilation-cache", str(folder / "cache")]
        # Without an end of its own the schedule would follow max_steps, and a longer run would not
        # be the same run.
        given += ["--optimizer.schedule-steps", "1000", "--checkpoint-every", "0", *options]
        return [
            _start("cold", [*given, "--name", "cold", "--max-steps", str(STEPS)], folder),
            _start("warm", [*given, "--name", "warm", "--max-steps", str(STEPS)], folder),
            _start("resumed", [*given, "--name", "warm", "--max-steps", str(2 * STEPS)], folder),
        ]


def _write_random_tokens(folder: Path, vocab_size: int) -> None:
    """A dataset of random bytes: preparing one is not a part of starting, and a tokenizer might
    have to be downloaded."""
    folder.mkdir()
    rng, shards = np.random.default_rng(0), {}
    for name, count in (
        ("random_train_000001.bin", TOKENS),
        ("random_val_000000.bin", TOKENS // 2),
    ):
        tokens = rng.integers(0, min(256, vocab_size), count, dtype=np.uint16)
        write_shard(folder / name, tokens)
        shards[name] = ShardInfo.of(Shard(folder / name))
    Manifest("byte", 257, 256, "random", None, shards).write(folder)


def _start(name: str, arguments: list[str], folder: Path) -> dict:
    """One start of train.py, to the end of its few steps."""
    environment = os.environ | {"CUDA_CACHE_PATH": str(folder / "cuda")}
    # `python -m gptjax.bench` sets it for its own process; a training run takes its memory at once.
    environment.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
    launched = time.time()
    done = subprocess.run(
        [sys.executable, str(TRAIN), *arguments],
        cwd=TRAIN.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchError(
            f"the {name} start failed, train.py's last lines:\n"
            + "\n".join(done.stdout.splitlines()[-15:])
        )
    run_name = arguments[arguments.index("--name") + 1]
    events = [
        row for row in read_log(folder / "runs" / run_name / "log.jsonl") if row["kind"] == "event"
    ]
    *_, start = (row for row in events if row["event"] == "start")
    *_, first = (row for row in events if row["event"] == "first step")
    row = row_of(name, launched, first)
    row |= {"device": start["device"], "versions": start["versions"]}
    print(f"{name}: {row['total']:.1f} s", file=sys.stderr, flush=True)
    return row


def row_of(name: str, launched: float, first: dict) -> dict:
    """What is told of one start.

    Args:
        launched: `time.time()` before the process was started.
        first: the log's event "first step".

    Returns:
        "start" (its name), "total" and "parts" in seconds, the "programs" compiled ahead of time,
        "cache_hits", "cache_misses".
    """
    total = first["time"] - launched
    return {
        "start": name,
        "total": total,
        "parts": {"python": total - sum(first["seconds"].values())} | first["seconds"],
        **{key: first[key] for key in ("programs", "cache_hits", "cache_misses")},
    }


def show(rows: list[dict]) -> None:
    """Print a table: a part of the start a line, a start a column."""
    table = []

    def add(label: str, seconds: Iterable[float | None]) -> None:
        table.append(Row(label, [_figure(value) for value in seconds]))

    for part in dict.fromkeys(part for row in rows for part in row["parts"]):
        add(part, (row["parts"].get(part) for row in rows))
        if part == "compilation":
            for program in dict.fromkeys(
                program["name"] for row in rows for program in row["programs"]
            ):
                for stage, words in (
                    ("lower", "traced and lowered"),
                    ("compile", "compiled, or read"),
                ):
                    add(f"  {program}: {words}", (_seconds(row, program, stage) for row in rows))
    table.append(Row())
    add("total", (row["total"] for row in rows))
    table.append(Row("programs in the cache", [str(row["cache_hits"]) for row in rows]))
    table.append(Row("programs not in it", [str(row["cache_misses"]) for row in rows]))
    title = f"seconds to the first finished step, {rows[0]['device']}"
    print_table(title, [row["start"] for row in rows], table)


def _seconds(row: dict, program: str, stage: str) -> float | None:
    found = [p[stage] for p in row["programs"] if p["name"] == program]
    return sum(found) if found else None


def _figure(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.2f}"
