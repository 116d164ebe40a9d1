"""A run that is interrupted, killed, cut off from its reader and out of disk space, each time by
another process, resumes bit for bit: every logged loss and gradient norm, and every array of the
last checkpoint, are those of an undisturbed run."""

import dataclasses
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from train_tools import check_same, command_line, rows

from gptjax import cli

STEPS = 60
OPTIONS = (
    "--model.n-embd=64 --optimizer.learning-rate=3e-3 --optimizer.warmup-steps=20 "
    "--optimizer.skip-loss-z=3 --optimizer.skip-grad-norm-z=3 --micro-batch=4 "
    f"--max-steps={STEPS} --val-every=20 --val-tokens=1024 --checkpoint-every=6"
).split()


def start(command: list[str], *options: str) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, *options], text=True, **pipes)


def read_until(process: subprocess.Popen, text: str) -> None:
    for line in process.stdout:
        if line.startswith(text):
            return
    pytest.fail(f"no {text}: {process.communicate()}")


def interrupt_compilation(command: list[str], folder: Path) -> None:
    process = start(command)
    read_until(process, "compiling")
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "" and process.returncode == -signal.SIGINT


def kill_in_a_save(command: list[str], folder: Path) -> None:
    process, folder = start(command), folder / "checkpoints"
    seen: set[str] = set()
    while len(seen) < 3:  # the third save that is seen
        assert process.poll() is None
        paths = list(folder.glob("*")) if folder.exists() else []
        seen |= {path.name for path in paths if not (path / "commit_success.txt").exists()}
    time.sleep(0.02 * random.Random(0).random())
    process.kill()
    process.communicate()


def kill(command: list[str], folder: Path) -> None:
    process = start(command)
    read_until(process, "step 30/")
    process.kill()
    process.communicate()


def close_the_pipe(command: list[str], folder: Path) -> None:
    process = start(command)
    read_until(process, "step 40/")
    process.stdout.close()
    said = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGPIPE, said
    assert said.startswith("error: stopped at step ") and ": the terminal or pipe " in said
    assert "Traceback" not in said


def fill_the_disk(command: list[str], folder: Path) -> None:
    """A full disk, as far as a file can tell: none may grow past 128 KiB; a checkpoint has more."""
    process = start(["bash", "-c", 'trap "" XFSZ; ulimit -f 128; exec "$@"', "-", *command])
    said = process.communicate()[1]
    assert process.returncode == 1 and "Traceback" not in said, said
    assert "failed: File too large; the newest complete checkpoint is of step " in said


def finish(command: list[str], folder: Path, *options: str) -> None:
    process = start(command, *options)
    shown = process.communicate()
    assert process.returncode == 0, shown


def test_a_run_after_every_attack_is_the_undisturbed_run(config, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    command = command_line(config, tmp_path, *OPTIONS)
    finish(command, config.run_dir, "--name", "alone")
    for attack in (
        *(interrupt_compilation, kill_in_a_save, kill, close_the_pipe, fill_the_disk, finish),
    ):
        attack(command, config.run_dir)
    attacked = cli.from_command_line(command[2:])
    alone = dataclasses.replace(attacked, name="alone")
    found, expected = (
        {step: row["loss"] for step, row in rows(config, "val").items()}
        for config in (attacked, alone)
    )
    assert found == expected and max(found) == max(rows(attacked, "train")) == STEPS
    check_same(attacked, alone)
