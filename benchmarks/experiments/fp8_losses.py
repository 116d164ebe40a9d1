"""Train GPT-2 124M in bf16 and FP8 with the same tokens, and compare the losses.

    python benchmarks/experiments/fp8_losses.py --out runs/fp8_losses --data-dir data
    python benchmarks/experiments/fp8_losses.py --out runs/fp8_losses --report

Every run is a command of train.py on docs_corpus, printed before it starts. Without another number
below, a run has 1,000 steps of 65,536 tokens, 3.9 epochs. A seed determines the initial weights and
the order of the data.

Groups of runs, with AdamW and seeds 0, 1 and 2 unless stated otherwise:
- adamw: configs/gpt2_124m_docs.py in bf16 and in fp8.
- finish: adamw's fp8 with the last 100 steps in bf16.
- normuon: configs/gpt2_124m_normuon_docs.py in bf16 and in fp8, with NorMuon.
- moments: adamw's fp8 with both of AdamW's moments in bf16.
- short: adamw with 100 steps of warm-up, in bf16 and in fp8.
- control: short's bf16 with XLA's kernels of the MLP. Only the order of sums differs.
- start: short's fp8 with the first 150 steps in bf16.
- twice: short with twice the learning rate, in bf16 and in fp8, seed 0.
- medium: configs/gpt2_350m.py in bf16 and in fp8, 300 steps, seed 0.
- spike: 250 steps in bf16 and in fp8, one of them with a gradient multiplied by 100, seed 0
    (gradient_spike.py).
- speedrun: configs/speedrun_docs.py in bf16 and in fp8, with NorMuon, 512 steps of 32,768 tokens on
    average, seed 0.

A finished run is a line of OUT/runs_I.jsonl, and is not trained again: to continue a command that
was stopped, repeat the command. `--part 0/2` and `--part 1/2` divide the runs over two processes.
Both runs of a pair are in one part, and so on one GPU.

`--report` trains nothing and needs no GPU. It writes benchmarks/results/fp8_losses.json and the
picture of docs/fp8.md, and writes time and loss into the docstrings of the configs. Afterwards, run
benchmarks/tools/result_tables.py.
"""

import dataclasses
import fnmatch
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tyro
from _fp8_losses_report import final, report

from gptjax.bench import results
from gptjax.config import ConfigError
from gptjax.user_folders import data_folder

STARTED = time.perf_counter()
ROOT = Path(__file__).parents[2]
DOCS, NORMUON = "configs/gpt2_124m_docs.py", "configs/gpt2_124m_normuon_docs.py"
MEDIUM = (
    "configs/gpt2_350m.py --dataset docs_corpus --batch-tokens 65536 --max-steps 300 "
    "--optimizer.warmup-steps 100 --val-every 100 --val-tokens 655360 --sample-every 0"
)
SPIKE = "benchmarks/experiments/gradient_spike.py"
TIMES = ("ms", "tokens_per_second", "training_seconds", "command_seconds")


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare the losses of precisions and optimizers."""

    out: Path
    """Folder for the records and the logs. Created if absent."""
    part: str = "0/1"
    """I/N: train part I of N of the runs."""
    data_dir: Path = dataclasses.field(default_factory=data_folder)
    """Folder of prepared datasets, with docs_corpus."""
    limit_s: float = math.inf
    """End after this many seconds: stop the run in progress, and do not start a run whose expected
    time is longer than the time left."""
    runs: tuple[str, ...] = ("*",)
    """Names of the runs to train, GROUP_PRECISION_SEED, or patterns such as adamw_*."""
    shared_gpu: bool = False
    """Other processes use the GPU at the same time: do not record times and speeds."""
    train_options: str = ""
    """Further options of each train.py command, for a trial with a small model."""
    report: bool = False
    """Train nothing: write the results of all parts."""
    commit: str | None = None
    """With --report: commit of the runs without a recorded one, trained outside a checkout."""


class Run(NamedTuple):
    """A run: its place in the report, its command, and the expected seconds on an H200."""

    group: str
    optimizer: str
    precision: str
    seed: int
    options: str
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.group}_{self.precision}_{self.seed}"

    def command(self, o: Options) -> list[str]:
        """Return the command that a user types for this run."""
        precision = f"--seed {self.seed} --model.precision {self.precision}"
        text = f"train.py --config {self.options} {precision} {o.train_options}"
        return ["python", *shlex.split(text)]


def plan() -> list[list[Run]]:
    """Return the runs in the order of their importance, in units that stay on one GPU."""

    def pair(
        group: str, options: str, seed: int, bf16: float, fp8: float, optimizer: str = "adamw"
    ) -> list[Run]:
        return [
            Run(group, optimizer, "bf16", seed, options, bf16),
            Run(group, optimizer, "fp8", seed, options, fp8),
        ]

    def switched(group: str, options: str, *stages: dict) -> list[list[Run]]:
        options = shlex.join([*options.split(), "--stages", *map(json.dumps, stages)])
        return [[Run(group, "adamw", "fp8", seed, options, 120)] for seed in range(3)]

    bf16 = {"model": {"precision": "bf16"}}
    adamw = [pair("adamw", DOCS, seed, 125, 110) for seed in range(3)]
    finish = switched("finish", DOCS, {"until": 900}, bf16)
    normuon = [pair("normuon", NORMUON, seed, 130, 110, "normuon") for seed in range(3)]
    halved = f"{DOCS} --optimizer.first-moment-dtype bf16 --optimizer.second-moment-dtype bf16"
    moments = [[Run("moments", "adamw", "fp8", seed, halved, 110)] for seed in range(3)]
    shorter = f"{DOCS} --optimizer.warmup-steps 100"
    short = [pair("short", shorter, seed, 125, 110) for seed in range(3)]
    other = f"{shorter} --model.mlp xla"
    control = [[Run("control", "adamw", "bf16", seed, other, 130)] for seed in range(3)]
    start = switched("start", shorter, {"until": 150, **bf16}, {})
    twice = pair("twice", f"{shorter} --optimizer.learning-rate 2e-3", 0, 125, 110)
    medium, spike = pair("medium", MEDIUM, 0, 150, 135), pair("spike", SPIKE, 0, 60, 60)
    speedrun = pair("speedrun", "configs/speedrun_docs.py", 0, 200, 200, "normuon")
    units = [*adamw, *finish, *normuon, *moments, *short, *control, *start]
    return [*units, twice, medium, spike, speedrun]


def chosen(patterns: Sequence[str]) -> list[list[Run]]:
    """Return the units of the plan with the runs whose names match one of the patterns.

    Raises:
        ConfigError: a pattern matches no run.
    """
    names = [run.name for unit in plan() for run in unit]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"--runs {pattern}: expected names or patterns of {', '.join(names)}")

    def matches(run: Run) -> bool:
        return any(fnmatch.fnmatch(run.name, pattern) for pattern in patterns)

    return [unit for each in plan() if (unit := [run for run in each if matches(run)])]


def share(units: Sequence[list[Run]], parts: int) -> list[list[Run]]:
    """Divide the units over the parts in order, each to the part with the least time so far."""
    shares: list[list[Run]] = [[] for _ in range(parts)]
    for unit in units:
        least = min(shares, key=lambda runs: sum(run.seconds for run in runs))
        least += unit
    return shares


def part_of(o: Options) -> tuple[int, int]:
    """Return I and N of the option --part.

    Raises:
        ConfigError: it is not I/N with I < N.
    """
    matched = re.fullmatch(r"(\d+)/(\d+)", o.part)
    part, parts = map(int, matched.groups()) if matched else (0, 0)
    if part >= parts:
        raise ConfigError(f"--part {o.part}: expected I/N with I below N, such as 0/2")
    return part, parts


def read_records(folder: Path) -> list[dict]:
    """Return the records of all parts."""
    files = sorted(folder.glob("runs_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def elapsed_s() -> float:
    return time.perf_counter() - STARTED


def train(run: Run, o: Options) -> dict | None:
    """Train a run; return its record, or None if it failed or did not end in time.

    A run that NaN or infinity ended is recorded.
    """
    command, folder = run.command(o), o.out / "runs"
    shutil.rmtree(folder / run.name, ignore_errors=True)
    where = ["--name", run.name, "--runs-dir", str(folder), "--data-dir", str(o.data_dir)]
    print(f"{run.name}: {shlex.join(command)}, at {elapsed_s():.0f} s", flush=True)
    began = time.perf_counter()
    # No checkpoints: a run that was stopped is repeated.
    options = [*where, "--checkpoint-every", "0", "--log-every", "50"]
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-u", *command[1:], *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    limit = o.limit_s - elapsed_s()
    timer = threading.Timer(min(limit, threading.TIMEOUT_MAX), process.terminate)
    timer.start()
    last = ""
    with (o.out / f"{run.name}.log").open("w") as log:
        for line in process.stdout or ():
            log.write(line)
            last = line.strip() or last
            if line.startswith("step ") and "validation loss" in line:
                print(f"  {run.name}: {line.rstrip()[:120]}, at {elapsed_s():.0f} s", flush=True)
    code = process.wait()
    timer.cancel()
    found = read_log(folder / run.name / "log.jsonl")
    ended = code == 0 or (found is not None and found["not_finite"])
    if found is None or not ended:
        print(f"{run.name}: no result, exit code {code}: {last[:300]}", flush=True)
        return None
    identity = {"name": run.name, **run._asdict(), "command": shlex.join(command)}
    del identity["options"], identity["seconds"]
    found["command_seconds"] = round(time.perf_counter() - began, 1)
    if o.shared_gpu:
        found |= dict.fromkeys(TIMES)
    return identity | found | {"commit": results.commit()}


def read_log(path: Path) -> dict | None:
    """Return the part of a record that is in a run's log; None if no step was logged."""
    if not path.exists():
        return None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    start = next((line for line in lines if line.get("event") == "start"), None)
    steps = [line for line in lines if line["kind"] == "train"]
    if start is None or not steps:
        return None
    times = [line["ms"] for line in steps if line["ms"] is not None]
    ms = statistics.median(times) if times else None
    seconds = statistics.fmean(times) * len(steps) / 1e3 if times else None
    speed = ms and start["config"]["batch_tokens"] / ms * 1e3
    if seconds and start["config"].get("stages"):
        speed = steps[-1]["tokens"] / seconds
    return {
        "steps": steps[-1]["step"],
        "tokens": steps[-1]["tokens"],
        "loss": [rounded(line["loss"]) for line in steps],
        "grad_norm": [rounded(line["grad_norm"]) for line in steps],
        "val": [[line["step"], rounded(line["loss"])] for line in lines if line["kind"] == "val"],
        "not_finite": any(line.get("event") == "not finite" for line in lines),
        "ms": ms,
        "tokens_per_second": speed and round(speed),
        "training_seconds": seconds and round(seconds, 1),
        "spike_step": start["config"].get("model.spike_step"),
        "kernels": start["kernels"],
        "date": time.strftime("%Y-%m-%d"),
        "device": start["device"],
        "versions": start["versions"],
    }


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def main(o: Options) -> int:
    o = dataclasses.replace(o, out=o.out.resolve(), data_dir=o.data_dir.resolve())
    part, parts = part_of(o)
    if o.report:
        return report(read_records(o.out), o.commit)
    o.out.mkdir(parents=True, exist_ok=True)
    known = {(record["name"], record["command"]) for record in read_records(o.out)}
    missing = 0
    for run in share(chosen(o.runs), parts)[part]:
        if (run.name, shlex.join(run.command(o))) in known:
            continue
        if elapsed_s() + run.seconds > o.limit_s:
            print(f"{run.name}: not started, at {elapsed_s():.0f} s", flush=True)
            record = None
        else:
            record = train(run, o)
        if record is None:
            missing += 1
            continue
        with (o.out / f"runs_{part}.jsonl").open("a") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        print(
            f"{run.name}: validation loss {final(record)}, "
            f"{record['tokens_per_second'] or '–'} tokens/s, at {elapsed_s():.0f} s",
            flush=True,
        )
    if missing:
        print(f"{missing} runs are missing: the same command continues")
    return int(missing > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options, description=__doc__)))
    except (ConfigError, OSError) as error:
        sys.exit(f"fp8_losses: {error}")
