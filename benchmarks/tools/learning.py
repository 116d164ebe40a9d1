"""Train the runs of a plan, one on each GPU, and print the table of their final losses.

python benchmarks/tools/learning.py --gpus 4 --limit-s 560 --data-dir data

A plan is a TOML file (benchmarks/learning_plan.toml). Each `[[runs]]` has a `name`, the `options`
of train.py, the `seeds`, the `purpose` (what the result decides), a `config` if it differs from the
plan's, and a `base`, the group that it is compared with, if that is not the first. `$NAME` in
options is the text NAME of the table `[options]`. Each `[[compare]]` names a `base` and runs of a
`rival` at several lengths.

Each run is a process of train.py. A finished run is one line of --out; a run that NaN ended is
finished. A run that fails or does not end in time is not recorded. The same command trains the runs
that are not recorded, in the order of the plan.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import Template
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from gptjax.bench.results import Row, print_table
from gptjax.doctor import machine
from gptjax.training.run_log import read_log

STARTED = time.perf_counter()
ROOT = Path(__file__).parents[2]
TRAIN = [sys.executable, str(ROOT / "train.py")]
LAST = 50
INTERVAL = "± 95 %"
TITLES = (
    *("seeds", "steps", "final loss", INTERVAL, "− base", INTERVAL),
    *(f"training, last {LAST}", "range", "− base", INTERVAL, "ms a step", INTERVAL, "seconds"),
)


class Run(NamedTuple):
    """A run of the plan: group and seed, and the command that a user types."""

    group: str
    seed: int
    command: tuple[str, ...]
    base: str

    @property
    def name(self) -> str:
        return f"{self.group}-seed{self.seed}"


def read_plan(path: Path) -> tuple[list[Run], list[dict]]:
    """Return the runs in their order, and the comparisons.

    Raises:
        ValueError: two runs have the same name, or a run has no purpose.
    """
    plan = tomllib.loads(path.read_text(encoding="utf-8"))
    runs = []
    for row in plan["runs"]:
        if not row.get("purpose"):
            raise ValueError(f"{path}: the run {row['name']!r} has no purpose")
        options = f"{row.get('config', plan['config'])} {row.get('options', '')}"
        options = shlex.split(Template(options).substitute(plan.get("options", {})))
        base = row.get("base", plan["runs"][0]["name"])
        for seed in row["seeds"]:
            command = ("python", "train.py", "--config", *options, "--seed", str(seed))
            runs.append(Run(row["name"], seed, command, base))
    if len({run.name for run in runs}) < len(runs):
        raise ValueError(f"{path}: two runs have the same name and seed")
    return runs, plan.get("compare", [])


def read_records(path: Path) -> list[dict]:
    """Return the records of a file, none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def record_of(run: Run, log: Path) -> dict | None:
    """Return the record of a finished run from its log.jsonl; None if the run did not finish."""
    lines = read_log(log) if log.exists() else []
    events = {line["event"]: line for line in lines if line["kind"] == "event"}
    start, steps = events.get("start"), [line for line in lines if line["kind"] == "train"]
    val = [[line["step"], line["loss"]] for line in lines if line["kind"] == "val"]
    failed = "not finite" in events
    if not start or not (failed or val and val[-1][0] == start["config"]["max_steps"]):
        return None
    times = [line["ms"] for line in steps if line["ms"] is not None]
    ms = statistics.median(times) if times else None
    last = [line["loss"] for line in steps[-LAST:]]
    return {
        **{"name": run.name, "group": run.group, "seed": run.seed},
        "command": shlex.join(run.command),
        **{key: start[key] for key in ("commit", "date", "device", "versions")},
        **{"steps": start["config"]["max_steps"], "finite": not failed, "val": val, "ms": ms},
        "tokens_per_second": ms and start["config"]["batch_tokens"] / ms * 1e3,
        "training_seconds": ms and sum(times) / len(times) * len(steps) / 1e3,
        "last_training_loss": None if failed else statistics.fmean(last),
        "fp8": fp8_shares(lines),
    }


def fp8_shares(lines: Sequence[dict]) -> dict[str, float]:
    """Return the greatest share of clipped numbers and of zeros (".zero") of each FP8 operand, over
    the calls of an operation and the logged steps: {"swiglu.hidden.zero": 0.01, …}."""
    greatest: dict[str, float] = {}
    for line in lines:
        if line["kind"] == "clipping":
            for name in line.keys() - {"kind", "step", "tokens"}:
                operation, _, operand = name.split(".", 2)
                key = f"{operation}.{operand}"
                greatest[key] = max(greatest.get(key, 0.0), line[name])
    return dict(sorted(greatest.items()))


class Driver:
    """Trains runs that are not recorded, and records them.

    Args:
        limit_s: seconds from the start of this process at which runs in progress are stopped. A
            run does not start if the median recorded run would not end in time.
        commit: recorded where Git does not know the commit.
    """

    def __init__(
        self,
        out: Path,
        runs_dir: Path,
        data_dir: Path | None = None,
        limit_s: float = math.inf,
        commit: str | None = None,
    ):
        self.out, self.runs_dir, self.limit_s = out, runs_dir.resolve(), limit_s
        self.records, self._commit = read_records(out), commit
        self.missing: list[str] = []
        self._data = ["--data-dir", str(data_dir.resolve())] if data_dir else []
        self._lock = threading.Lock()

    def known(self, run: Run) -> bool:
        """Return whether a record has the name and the command of this run."""
        wanted = run.name, shlex.join(run.command)
        return any((r["name"], r["command"]) == wanted for r in self.records)

    def train(self, runs: Sequence[Run], gpus: Sequence[str]) -> None:
        """Train the runs, at any time one on each GPU."""
        waiting = deque(run for run in runs if not self.known(run))

        def work(gpu: str) -> None:
            while True:
                with self._lock:
                    if not waiting:
                        return
                    run = waiting.popleft()
                if not self._train(run, gpu):
                    self.missing.append(run.name)

        with ThreadPoolExecutor(len(gpus)) as pool:
            list(pool.map(work, gpus))

    def _train(self, run: Run, gpu: str) -> bool:
        """Train one run; return whether it is recorded."""
        left = self.limit_s - (time.perf_counter() - STARTED)
        if left < (statistics.median(r["seconds"] for r in self.records) if self.records else 0):
            return False
        folder, output = self.runs_dir / run.name, self.runs_dir / f"{run.name}.txt"
        shutil.rmtree(folder, ignore_errors=True)
        self.runs_dir.mkdir(parents=True, exist_ok=True)
        where = ["--name", run.name, "--runs-dir", str(self.runs_dir), *self._data]
        command = [*TRAIN, *run.command[2:], *where, "--checkpoint-every", "0"]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        began = time.perf_counter()
        with output.open("w") as file:
            how = {"cwd": ROOT, "env": env, "stdout": file, "stderr": subprocess.STDOUT}
            try:
                subprocess.run(command, **how, timeout=min(left, threading.TIMEOUT_MAX))
            except subprocess.TimeoutExpired:
                pass  # `record_of` returns None
        seconds, record = time.perf_counter() - began, record_of(run, folder / "log.jsonl")
        shutil.rmtree(folder, ignore_errors=True)
        if record is None:
            last = output.read_text(errors="replace").splitlines()[-5:]
            print(f"{run.name}: not finished after {seconds:.0f} s", *last, sep="\n  ", flush=True)
            return False
        with self._lock, self.out.open("a") as file:
            record |= {"commit": record["commit"] or self._commit, "seconds": round(seconds, 1)}
            self.records.append(record)
            file.write(json.dumps(record) + "\n")
        print(f"{run.name}: {final(record):.4f}, {seconds:.0f} s", flush=True)
        return True


def final(record: dict) -> float:
    """Return the last validation loss; infinity if NaN ended the run."""
    return record["val"][-1][1] if record["finite"] else math.inf


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval by Student's t; NaN for one value."""
    n = len(values)
    if n < 2 or not np.isfinite(values).all():
        return float(np.mean(values)) if n else math.nan, math.nan
    half = student.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n)
    return float(np.mean(values)), float(half)


def by_group(records: Sequence[dict]) -> dict[str, dict[int, dict]]:
    """Return the records of each group by seed; a later record of a run replaces earlier ones."""
    groups: dict[str, dict[int, dict]] = {}
    for record in records:
        groups.setdefault(record["group"], {})[record["seed"]] = record
    return groups


def share_of_steps(base: dict[int, dict], rival: Sequence[dict[int, dict]]) -> list[float]:
    """Return for each common seed the rival's steps to the base's final loss, as a share of the
    base's steps.

    The schedule of each run ends at its last step. The final losses of a seed's runs of the rival
    define a line over the logarithm of the steps.
    """
    shares = []
    for seed in sorted(set(base).intersection(*rival)):
        runs = [lengths[seed] for lengths in rival]
        slope, offset = np.polyfit([math.log(r["steps"]) for r in runs], [*map(final, runs)], 1)
        shares.append(math.exp((final(base[seed]) - offset) / slope) / base[seed]["steps"])
    return shares


def report(runs: Sequence[Run], comparisons: Sequence[dict], records: Sequence[dict]) -> None:
    """Print the groups of the plan, each with its differences from its base over common seeds, and
    the comparisons."""
    groups = by_group(records)
    rows = [
        row_of(run.group, groups[run.group], groups.get(run.base, {}))
        for run in {run.group: run for run in runs}.values()
        if run.group in groups
    ]
    if rows:
        print_table("validation loss and training loss", TITLES, rows)
    for compare in comparisons:
        base, *rival = (groups.get(name, {}) for name in (compare["base"], *compare["rival"]))
        if len(shares := share_of_steps(base, rival)) > 1:
            mean, half = interval(shares)
            text = f"{mean:.3f} ± {half:.3f} (95 %, {len(shares)} seeds)"
            print(f"steps of {compare['rival'][0]} to the loss of {compare['base']}: {text}")


def row_of(name: str, group: dict[int, dict], base: dict[int, dict]) -> Row:
    """Return the row of a group, with the greatest shares of its FP8 operands as a note."""
    seeds, found = sorted(set(group) & set(base)), list(group.values())

    def cells(of: Callable[[dict], float]) -> tuple[list[float], tuple[str, ...], tuple[str, ...]]:
        losses = [*map(of, found)]
        mean, half = interval(losses)
        less, half_less = interval([of(group[seed]) - of(base[seed]) for seed in seeds])
        return losses, (text(mean), text(half)), (text(less, "+.4f"), text(half_less))

    steps = "/".join(map(str, sorted({r["steps"] for r in found})))
    _, final_loss, final_less = cells(final)
    last, (mean, _), last_less = cells(lambda r: r.get("last_training_loss") or math.nan)
    ms, half = interval([r["ms"] or math.nan for r in found])
    seconds = statistics.median(r["seconds"] for r in found)
    figures = (str(len(group)), steps, *final_loss, *final_less)
    figures += (mean, f"{min(last):.4f}–{max(last):.4f}" if mean else "", *last_less)
    fp8 = [(share, operand) for r in found for operand, share in r.get("fp8", {}).items()]
    kinds = [max(x for x in fp8 if x[1].endswith(".zero") == zero) for zero in (False, True) if fp8]
    note = ", ".join(f"FP8 {operand} ≤ {share:.1e}" for share, operand in kinds)
    return Row(name, (*figures, text(ms, ".1f"), text(half, ".1f"), f"{seconds:.0f}"), note)


def text(number: float, form: str = ".4f") -> str:
    """Return the number as text, empty for NaN."""
    return "" if math.isnan(number) else format(number, form)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 1 if runs are missing."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--plan", type=Path, default=ROOT / "benchmarks" / "learning_plan.toml")
    results = ROOT / "benchmarks" / "results" / "learning" / "runs_optimizer_track.jsonl"
    parser.add_argument("--out", type=Path, default=results, help="records of finished runs")
    parser.add_argument("--gpus", type=int, default=1, help="runs at a time; 0: only the table")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="end after this many s")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / "learning")
    parser.add_argument("--data-dir", type=Path, help="folder of the datasets; train.py's default")
    parser.add_argument("--commit", help="commit of a copy of the files without Git")
    o = parser.parse_args(argv)
    runs, comparisons = read_plan(o.plan)
    driver = Driver(o.out, o.runs_dir, o.data_dir, o.limit_s, o.commit)
    if o.gpus:
        gpus = [*map(str, machine.gpus())] or [""] * o.gpus  # "": the CPU
        driver.train(runs, gpus[: o.gpus])
    report(runs, comparisons, driver.records)
    if driver.missing:
        print(f"missing: {', '.join(driver.missing)}; the same command continues")
    return int(bool(driver.missing))


if __name__ == "__main__":
    raise SystemExit(main())
