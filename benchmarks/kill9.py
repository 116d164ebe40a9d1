"""Kills a training run with SIGKILL at random moments, resumes it, and compares it bit for bit with a run left alone.

    python benchmarks/kill9.py --trials 20 --out benchmarks/results/kill9.json

Half of the trials kill while a checkpoint is being written, the others anywhere between the first step and the end. The run has
accumulation, shuffled data and a schedule. Compared are every logged loss and gradient norm, and every array of the last
checkpoint.
"""

import dataclasses
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import tyro

from gptjax import config as configuration
from gptjax import optim
from gptjax.training.checkpoint import Checkpoints, versions
from gptjax.training.step import init_state

ROOT = Path(__file__).parent.parent
STEPS = 300
CONFIG = f"""
from gptjax.config import Config, OptimizerConfig
from gptjax.models.gpt2 import GPT2Config

config = Config(
    device="cpu",
    model=GPT2Config(vocab_size=257, padded_vocab_size=384, block_size=32, n_layer=2, n_head=2, n_embd=64),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20, skip_loss_z=3.0, skip_grad_norm_z=3.0),
    dataset="stdlib",
    tokenizer="byte",
    sequence_length=32,
    batch_tokens=512,
    micro_batch=4,
    max_steps={STEPS},
    val_every=50,
    val_tokens=1024,
    sample_every=0,
    checkpoint_every=15,
)
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """Kills and resumes a small CPU run; exit code 1 if one resume was not bit-exact."""

    trials: int = 20
    """Kills."""
    out: Path | None = None
    """JSON file for the results."""
    seed: int = 0
    """Of the moments."""


def start(folder: Path, name: str) -> subprocess.Popen:
    arguments = ["--config", folder / "config.py", "--runs-dir", folder / "runs", "--data-dir", folder / "data"]
    arguments += ["--compilation-cache", folder / "cache", "--name", name]
    log = (folder / f"{name}.txt").open("ab")
    return subprocess.Popen([sys.executable, ROOT / "train.py", *map(str, arguments)], stdout=log, stderr=log)


def wait_for_log(folder: Path, name: str) -> float:
    """Returns the time at which the run began to write its log, just before its first step."""
    while not (folder / "runs" / name / "log.jsonl").exists():
        time.sleep(0.005)
    return time.monotonic()


def finish(folder: Path, name: str) -> float:
    """Runs to the end; returns the seconds from the log's first line on."""
    process = start(folder, name)
    began = wait_for_log(folder, name)
    if code := process.wait():
        raise SystemExit(f"{name} ended with code {code}:\n{(folder / f'{name}.txt').read_text()[-2000:]}")
    return time.monotonic() - began


def kill_in_a_save(run: Path, process: subprocess.Popen, rng: random.Random) -> bool:
    """Waits for a later save to be under way, then kills. False if the run ended before one was seen."""
    skip = rng.randrange(8)
    seen: set[str] = set()
    while process.poll() is None:
        folder = run / "checkpoints"
        under_way = {p.name for p in folder.glob("*")} if folder.exists() else set()
        under_way = {n for n in under_way if "tmp" in n or not (folder / n / "commit_success.txt").exists()}
        for name in under_way - seen:
            seen.add(name)
            if len(seen) > skip:
                time.sleep(rng.random() * 0.02)
                process.send_signal(signal.SIGKILL)
                return True
    return False


def arrays_and_losses(folder: Path, name: str) -> tuple[list[np.ndarray], dict]:
    run = folder / "runs" / name
    config = configuration.load(folder / "config.py")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = jax.eval_shape(lambda: init_state(config.model, optim.adamw(config.learning_rate_schedule()), 0))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)
    checkpoints = Checkpoints(run / "checkpoints", keep_last=2)
    leaves = [np.asarray(x) for x in jax.tree.leaves(checkpoints.restore(STEPS, like))]
    checkpoints.close()
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = {(r["kind"], r["step"]): (r["loss"], r.get("grad_norm")) for r in rows if r["kind"] in ("train", "val")}
    return leaves, losses


def main(options: Options) -> None:
    jax.config.update("jax_platforms", "cpu")
    rng = random.Random(options.seed)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.py").write_text(CONFIG)
        finish(folder, "first")  # prepares the corpus and fills the compilation cache
        seconds = finish(folder, "alone")
        want_arrays, want_losses = arrays_and_losses(folder, "alone")
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
            finish(folder, name)
            log = (folder / f"{name}.txt").read_text()
            resumed = [line.rsplit(" ", 1)[1] for line in log.splitlines() if "going on from step" in line]
            arrays, losses = arrays_and_losses(folder, name)
            exact = losses == want_losses and all(
                np.array_equal(a, b) for a, b in zip(arrays, want_arrays, strict=True)
            )
            rows.append(
                {
                    "trial": trial,
                    "killed": "not: it had ended" if not killed else "while saving" if in_save else "at random",
                    "resumed_from_step": int(resumed[0]) if resumed else 0,
                    "bit_exact": exact,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    passed = sum(row["bit_exact"] for row in rows)
    if options.out:
        result = {
            "command": f"python benchmarks/kill9.py --trials {options.trials} --seed {options.seed}",
            "date": time.strftime("%Y-%m-%d"),
            "device": f"CPU, {os.cpu_count()} cores, {platform.machine()}",
            "versions": versions(),
            "bit_exact": passed,
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{passed} of {options.trials} resumed bit-exactly")
    raise SystemExit(passed != options.trials)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
