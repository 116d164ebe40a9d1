"""Kill one of several processes that train together, resume all of them with the same command, and
compare the run bit for bit with an undisturbed one.

    python benchmarks/experiments/attacks/processes.py --trials 10 \\
        --out benchmarks/results/attacks/processes.json

Trials alternate between 2 and 4 processes of one CPU device each, which start from the same command
with another --process-index. The moment of the kill and the killed process are random. The others
must end within 60 seconds, with exit code 1 and a message. With --gpus, process i has GPU i alone,
and the processes communicate through NCCL:

    python benchmarks/experiments/attacks/processes.py --gpus --counts 2 --trials 1
"""

import dataclasses
import json
import random
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import jax
import tyro
from _runs import arrays_and_losses, prepare_data, report, same, start, wait_for_log

from gptjax.distributed import ENDED

LIMIT_S = 60


@dataclasses.dataclass(frozen=True)
class Options:
    """Kill one of several processes of a small run; exit code 1 if one resume is not bit-exact or
    another process does not end in time."""

    trials: int = 10
    """Number of kills."""
    counts: tuple[int, ...] = (2, 4)
    """Numbers of processes, in alternation."""
    gpus: bool = False
    """One GPU for each process, deterministic kernels."""
    out: Path | None = None
    """JSON file for the results."""
    seed: int = 0
    """Seed of the moments."""


def group(folder: Path, name: str, count: int, gpus: bool) -> list[subprocess.Popen]:
    """Start the processes of a run; the output of process i goes to NAME-i.txt."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    options = ["--coordinator", coordinator, "--process-count", str(count), "--name", name]
    # The gradients of the other back ends of attention do not repeat bit for bit.
    deterministic = ["--device", "gpu", "--deterministic", "--model.attention", "xla"]
    options += deterministic if gpus else []
    # The first --name is that of the output; the command uses the last.
    return [
        start(folder, f"{name}-{i}", *options, "--process-index", str(i), gpu=i if gpus else None)
        for i in range(count)
    ]


def finish(folder: Path, name: str, count: int, gpus: bool) -> float:
    """Run a group to the end; return the seconds from the log's first line on."""
    processes = group(folder, name, count, gpus)
    began = wait_for_log(folder, name, processes=processes)
    for i, process in enumerate(processes):
        if code := process.wait():
            shown = (folder / f"{name}-{i}.txt").read_text()[-2000:]
            raise SystemExit(f"{name}: process {i} ended with code {code}:\n{shown}")
    return time.monotonic() - began


def kill_one(folder: Path, name: str, count: int, delay: float, victim: int, gpus: bool) -> dict:
    """Start a group, kill one process, and wait for the others.

    Returns:
        "ended_after_s": seconds until the last of the others ended; "outcome" if that failed.
    """
    processes = group(folder, name, count, gpus)
    wait_for_log(folder, name, processes=processes)
    time.sleep(delay)
    if processes[victim].poll() is not None:
        return {"killed": "not: it had ended"}
    processes[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    others = [i for i in range(count) if i != victim]
    try:
        for i in others:
            processes[i].wait(max(0.0, killed + LIMIT_S - time.monotonic()))
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        return {"killed": victim, "outcome": "hang"}
    row = {"killed": victim, "ended_after_s": round(time.monotonic() - killed, 2)}
    processes[victim].wait()
    for i in others:
        shown = (folder / f"{name}-{i}.txt").read_text()
        if "Traceback" in shown:
            row["outcome"] = "traceback"
        elif processes[i].returncode != 1 or ENDED not in shown:
            row["outcome"] = "crash"
    return row


def main(options: Options) -> None:
    # This process reads checkpoints on the CPU and leaves the GPUs alone.
    jax.config.update("jax_platforms", "cpu")
    device = f"{max(options.counts)} GPUs" if options.gpus else None
    rng = random.Random(options.seed)
    rows, alone, seconds = [], {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare_data(folder)
        for count in options.counts:
            seconds[count] = finish(folder, f"alone{count}", count, options.gpus)
            alone[count] = arrays_and_losses(folder, f"alone{count}")
        for trial in range(options.trials):
            count, name = options.counts[trial % len(options.counts)], f"trial{trial}"
            delay, victim = rng.random() * seconds[count], rng.randrange(count)
            row = {"trial": trial, "processes": count}
            row |= kill_one(folder, name, count, delay, victim, options.gpus)
            if "outcome" not in row:
                finish(folder, name, count, options.gpus)
                equal = same(arrays_and_losses(folder, name), alone[count])
                row["outcome"] = "bit-exact" if equal else "silent wrong"
            rows.append(row)
            print(json.dumps(row), flush=True)
    report("processes.py", rows, options.out, device=device)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
