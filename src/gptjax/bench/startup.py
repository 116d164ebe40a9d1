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
        results.check_file(self.out)
        try:
            options = shlex.split(self.options)
        except ValueError as error:
            raise BenchError(f"--options={self.options}: expected shell words ({error})") from error
        rows = starts(self.train, self.config, options)
        command = results.bench_command("startup", self)
        results.report(results.new(command, rows, device=rows[0]["device"]), self.out, show)


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
        common = {
            "--config": config.absolute(),
            "--dataset": folder / "random",
            "--runs-dir": folder / "runs",
            "--sample-every": 0,
            "--checkpoint-every": 0,
            # By default the schedule's length is max_steps: a longer run would not be the same run.
            # The config's own length has room for its warm-up and cooldown.
            "--optimizer.schedule-steps": max(1000, schedule_steps),
        }
        rows = []
        for name, run, steps in (
            ("cold", "cold", STEPS),
            ("warm", "warm", STEPS),
            ("resumed", "warm", 2 * STEPS),
        ):
            own = common | {"--name": run, "--max-steps": steps}
            words = [str(word) for pair in own.items() for word in pair]
            rows.append(_start(train, name, words + options, folder / "runs" / run))
        return rows


def _write_random_tokens(folder: Path, vocab_size: int) -> None:
    """Write a dataset of random bytes. The preparation of a dataset is not part of a start, and
    might download a tokenizer."""
    folder.mkdir()
    rng, shards = np.random.default_rng(0), {}
    for name, count in (("train_000001", TOKENS), ("val_000000", TOKENS // 2)):
        file = folder / f"random_{name}.bin"
        write_shard(file, rng.integers(0, min(256, vocab_size), count, dtype=np.uint16))
        shards[file.name] = ShardInfo.from_shard(Shard(file))
    Manifest("byte", 257, 256, "random", None, shards).write(folder)


def _start(train: Path, name: str, arguments: list[str], run: Path) -> dict:
    """Run the training script to the end of its few steps; return the row of this start."""
    folder = run.parents[1]
    environment = os.environ | {"CUDA_CACHE_PATH": str(folder / "cuda")}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
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
        last = "\n".join(done.stdout.splitlines()[-15:])
        raise BenchError(f"the {name} start failed; the last lines of train.py:\n{last}")
    events = {row["event"]: row for row in read_log(run / "log.jsonl") if row["kind"] == "event"}
    row = row_of(name, launched, events["first step"])
    say(f"{name}: {row['total']:.1f} s")
    return row | {key: events["start"][key] for key in ("device", "versions")}


def row_of(name: str, launched: float, first: dict) -> dict:
    """Return the row of one start.

    Args:
        launched: `time.time()` before the process was started.
        first: the log's last event "first step".

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


def show(result: dict) -> None:
    """Print a row for each part, a column for each start."""
    rows, lines = result["rows"], {}
    for i, row in enumerate(rows):
        seconds = dict(row["parts"])
        for executable in row["executables"]:
            for stage, words in (("lower", "traced and lowered"), ("compile", "compiled, or read")):
                seconds[f"  {executable['name']}: {words}"] = executable[stage]
        for name, value in (seconds | {"total": row["total"]}).items():
            lines.setdefault(name, ["–"] * len(rows))[i] = f"{value:.2f}"
    lines["total"] = lines.pop("total")
    table = [Row(name, cells) for name, cells in lines.items()]
    for key in ("cache_hits", "cache_misses"):
        table.append(Row(key.replace("_", " "), [str(row[key]) for row in rows]))
    title = f"seconds to the first finished step, {rows[0]['device']}"
    print_table(title, [row["start"] for row in rows], table)
