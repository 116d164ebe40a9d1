"""A run that is killed, or whose disk is full, resumes bit for bit: every logged loss and gradient
norm, and every array of the last checkpoint, are those of an undisturbed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from gptjax import cli, parallel
from gptjax.training.checkpoint import Checkpoints
from gptjax.training.step import init_state

ROOT = Path(__file__).parents[1]
STEPS = 120
CONFIG = f"""
from gptjax.config import Config, OptimizerConfig
from gptjax.models.gpt2 import GPT2Config

config = Config(
    device="cpu",
    model=GPT2Config(
        vocab_size=257, padded_vocab_size=384, block_size=32, n_layer=2, n_head=2, n_embd=64
    ),
    optimizer=OptimizerConfig(
        learning_rate=3e-3, warmup_steps=20, skip_loss_z=3.0, skip_grad_norm_z=3.0
    ),
    dataset="stdlib",
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
# Seconds of a process from its start to its log, compilation included, or of a whole run.
LONGEST = 300.0


def start(folder: Path, name: str, *options: str, runs: Path | None = None) -> subprocess.Popen:
    """Start a run in the background; its output goes to NAME.txt in the folder."""
    arguments = {
        "--config": folder / "config.py",
        "--runs-dir": runs or folder / "runs",
        "--data-dir": folder / "data",
        "--name": name,
        "--optimizer.schedule-steps": STEPS,
    }
    words = [str(word) for pair in arguments.items() for word in pair]
    with (folder / f"{name}.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, ROOT / "train.py", *words, *options],
            stdout=log,
            stderr=log,
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")},
        )


def wait_for_log(folder: Path, name: str, process: subprocess.Popen) -> float:
    """Return the time at which the run began to write its log, just before its first step."""
    end = time.monotonic() + LONGEST
    while not (folder / "runs" / name / "log.jsonl").exists():
        assert not process.poll() and time.monotonic() < end, said(folder, name)
        time.sleep(0.005)
    return time.monotonic()


def finish(folder: Path, name: str, *options: str) -> float:
    """Run to the end; return the seconds from the log's first line on."""
    process = start(folder, name, *options)
    began = wait_for_log(folder, name, process)
    assert process.wait(LONGEST) == 0, said(folder, name)
    return time.monotonic() - began


def said(folder: Path, name: str) -> str:
    return (folder / f"{name}.txt").read_text()


def arrays_and_losses(folder: Path, run: Path) -> tuple[list[np.ndarray], dict]:
    """Return the arrays of the last step's checkpoint, and every logged loss and gradient norm."""
    config = cli.load(folder / "config.py")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tx = config.build_optimizer(parallel.data_mesh(jax.devices()[:1]))
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        state = jax.eval_shape(lambda: init_state(config.model, tx, 0))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)
    checkpoints = Checkpoints(run / "checkpoints", keep_last=2)
    leaves = [np.asarray(x) for x in jax.tree.leaves(checkpoints.restore(STEPS, state))]
    checkpoints.close()
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = {
        (r["kind"], r["step"]): (r["loss"], r.get("grad_norm"))
        for r in rows
        if r["kind"] in ("train", "val")
    }
    return leaves, losses


def check_same(a: tuple[list[np.ndarray], dict], b: tuple[list[np.ndarray], dict]) -> None:
    assert a[1] == b[1]
    assert all(np.array_equal(x, y) for x, y in zip(a[0], b[0], strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with the config, the corpus and a full compilation cache; what the undisturbed run
    ends with; and the seconds of its steps."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "config.py").write_text(CONFIG)
    finish(folder, "first", "--max-steps", "15")
    seconds = finish(folder, "alone")
    return folder, arrays_and_losses(folder, folder / "runs" / "alone"), seconds


def kill_in_a_save(run: Path, process: subprocess.Popen, rng: random.Random) -> bool:
    """Wait for a later save to be under way, then kill. False if the run ended before one was
    seen."""
    skip, seen, folder = rng.randrange(8), set(), run / "checkpoints"
    while process.poll() is None:
        for path in folder.glob("*") if folder.exists() else ():
            if path.name not in seen and (
                "tmp" in path.name or not (path / "commit_success.txt").exists()
            ):
                seen.add(path.name)
                if len(seen) > skip:
                    time.sleep(rng.random() * 0.02)
                    process.send_signal(signal.SIGKILL)
                    return True
    return False


def test_kill_9_in_training_and_while_saving(alone):
    folder, expected, seconds = alone
    rng = random.Random(102)  # the second or third save; a third of the run
    for name in ("while_saving", "at_random"):
        process = start(folder, name)
        if name == "while_saving":
            assert kill_in_a_save(folder / "runs" / name, process, rng)
        else:
            wait_for_log(folder, name, process)
            time.sleep(rng.random() * seconds)
            assert process.poll() is None
            process.send_signal(signal.SIGKILL)
        process.wait()
        finish(folder, name)
        check_same(arrays_and_losses(folder, folder / "runs" / name), expected)


def mount(disk: Path, kib: int, *options: str) -> bool:
    """Return whether a tmpfs of this size was mounted, which needs root."""
    how = ",".join((f"size={kib}k", *options))
    command = ["mount", "-t", "tmpfs", "-o", how, "tmpfs", str(disk)]
    return os.geteuid() == 0 and not subprocess.run(command, check=False).returncode


def test_a_full_disk_ends_a_run_and_room_lets_it_resume(alone, tmp_path):
    folder, expected, _ = alone
    if not mount(tmp_path, 2_600):
        pytest.skip("needs root and the right to mount a tmpfs")
    try:
        assert start(folder, "disk", runs=tmp_path).wait(LONGEST) == 1
        assert "Traceback" not in said(folder, "disk")
        assert mount(tmp_path, 100_000, "remount")
        assert start(folder, "disk", runs=tmp_path).wait(LONGEST) == 0, said(folder, "disk")
        check_same(arrays_and_losses(folder, tmp_path / "disk"), expected)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
