"""Kill a training run with SIGKILL at random moments, resume it, and compare it bit for bit with an
undisturbed run.

    python benchmarks/experiments/attacks/kills.py --trials 20 \\
        --out benchmarks/results/attacks/kills.json

Half of the trials kill while a checkpoint is being written, the others anywhere between the first
step and the end. The run has accumulation, shuffled data and a schedule; with --stages also stages
and parameters that are tied at first. Compared are every logged
loss and gradient norm, and every array of the last checkpoint.
"""

import dataclasses
import json
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import jax
import tyro
from _runs import (
    CONFIG,
    STAGED,
    arrays_and_losses,
    finish,
    prepare,
    report,
    same,
    start,
    wait_for_log,
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Kill and resume a small CPU run; exit code 1 if one resume is not bit-exact."""

    trials: int = 20
    """Number of kills."""
    out: Path | None = None
    """JSON file for the results."""
    seed: int = 0
    """Seed of the moments."""
    stages: bool = False
    """Train the speedrun's model in three stages, which are untied in the last one."""


def kill_in_a_save(run: Path, process: subprocess.Popen, rng: random.Random) -> bool:
    """Wait for a later save to be under way, then kill. False if the run ended before one was
    seen."""
    skip = rng.randrange(8)
    seen: set[str] = set()
    while process.poll() is None:
        folder = run / "checkpoints"
        under_way = {p.name for p in folder.glob("*")} if folder.exists() else set()
        under_way = {
            n for n in under_way if "tmp" in n or not (folder / n / "commit_success.txt").exists()
        }
        for name in under_way - seen:
            seen.add(name)
            if len(seen) > skip:
                time.sleep(rng.random() * 0.02)
                process.send_signal(signal.SIGKILL)
                return True
    return False


def main(options: Options) -> None:
    jax.config.update("jax_platforms", "cpu")
    rng = random.Random(options.seed)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        seconds = prepare(folder, STAGED if options.stages else CONFIG)
        alone = arrays_and_losses(folder, "alone")
        for trial in range(options.trials):
            name, in_save = f"trial{trial}", trial % 2 == 0
            process = start(folder, name)
            if in_save:
                killed = kill_in_a_save(folder / "runs" / name, process, rng)
            else:
                wait_for_log(folder, name)
                time.sleep(rng.random() * seconds)
                killed = process.poll() is None
                process.send_signal(signal.SIGKILL)
            process.wait()
            finish(folder, name)  # or say that it is complete
            log = (folder / f"{name}.txt").read_text()
            resumed = [
                line.rsplit(" ", 1)[1] for line in log.splitlines() if "resuming from step" in line
            ]
            rows.append(
                {
                    "trial": trial,
                    "killed": "not: it had ended"
                    if not killed
                    else "while saving"
                    if in_save
                    else "at random",
                    "resumed_from_step": int(resumed[0]) if resumed else 0,
                    "outcome": "bit-exact"
                    if same(arrays_and_losses(folder, name), alone)
                    else "silent wrong",
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    report("kills.py", rows, options.out)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
