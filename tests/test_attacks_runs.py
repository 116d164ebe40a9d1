"""A run that is interrupted, killed, cut off from its reader and out of disk space, each time by
another process, resumes bit for bit: every logged loss and gradient norm, and every array of the
last checkpoint, are those of an undisturbed run."""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from train_tools import ROOT, last_state, rows

from gptjax import cli

# The fixture `words`.
pytest_plugins = ["train_tools"]

STEPS = 60
CONFIG = """
from pathlib import Path
from gptjax import Config, GPT2Config, OptimizerConfig

config = Config(
    name="attacked",
    runs_dir=Path({runs!r}),
    device="cpu",
    model=GPT2Config(
        vocab_size=257, padded_vocab_size=384, block_size=32, n_layer=1, n_head=2, n_embd=64
    ),
    optimizer=OptimizerConfig(
        learning_rate=3e-3, warmup_steps=20, skip_loss_z=3.0, skip_grad_norm_z=3.0
    ),
    dataset={words!r},
    sequence_length=32,
    batch_tokens=512,
    micro_batch=4,
    max_steps={steps},
    val_every=20,
    val_tokens=1024,
    sample_every=0,
    checkpoint_every=6,
)
"""


@pytest.fixture(scope="module")
def file(words, tmp_path_factory):
    """A config file."""
    folder = tmp_path_factory.mktemp("runs")
    fields = {"runs": str(folder / "runs"), "words": str(words), "steps": STEPS}
    (folder / "config.py").write_text(CONFIG.format(**fields))
    return folder / "config.py"


def start(file: Path, *options: str, before: tuple[str, ...] = ()) -> subprocess.Popen:
    """Start a run; `before` are words of the command line before Python."""
    return subprocess.Popen(
        [*before, sys.executable, ROOT / "train.py", "--config", file, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(file.with_name("cache"))},
    )


def read_until(process: subprocess.Popen, text: str) -> None:
    for line in process.stdout:
        if line.startswith(text):
            return
    pytest.fail(f"no {text}: {process.communicate()}")


def interrupt_compilation(file: Path) -> None:
    process = start(file)
    read_until(process, "compiling")
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "" and process.returncode == -signal.SIGINT


def kill_in_a_save(file: Path) -> None:
    process, folder = start(file), file.parent / "runs" / "attacked" / "checkpoints"
    seen: set[str] = set()
    while len(seen) < 3:  # the third save that is seen
        assert process.poll() is None
        paths = list(folder.glob("*")) if folder.exists() else []
        seen |= {path.name for path in paths if not (path / "commit_success.txt").exists()}
    time.sleep(0.02 * random.Random(0).random())
    process.kill()
    process.communicate()


def kill(file: Path) -> None:
    process = start(file)
    read_until(process, "step 30/")
    process.kill()
    process.communicate()


def close_the_pipe(file: Path) -> None:
    process = start(file)
    read_until(process, "step 40/")
    process.stdout.close()
    said = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGPIPE, said
    assert said.startswith("error: stopped at step ") and ": the terminal or pipe " in said
    assert "Traceback" not in said


def fill_the_disk(file: Path) -> None:
    """A full disk, as far as a file can tell: none may grow past 128 KiB; a checkpoint has more."""
    process = start(file, before=("bash", "-c", 'trap "" XFSZ; ulimit -f 128; exec "$@"', "-"))
    said = process.communicate()[1]
    assert process.returncode == 1 and "Traceback" not in said, said
    assert "failed: File too large; the newest complete checkpoint is of step " in said


def finish(file: Path, *options: str) -> None:
    process = start(file, *options)
    shown = process.communicate()
    assert process.returncode == 0, shown


def test_a_run_after_every_attack_is_the_undisturbed_run(file, optax_promotion):
    finish(file, "--name", "alone")
    for attack in (
        *(interrupt_compilation, kill_in_a_save, kill, close_the_pipe, fill_the_disk, finish),
    ):
        attack(file)
    attacked = cli.load(file)
    alone = dataclasses.replace(attacked, name="alone")
    for kind in ("train", "val"):
        found, expected = (
            {step: (row["loss"], row.get("grad_norm")) for step, row in rows(config, kind).items()}
            for config in (attacked, alone)
        )
        assert found == expected and max(found) == STEPS
    both = zip(last_state(attacked), last_state(alone), strict=True)
    assert all(np.array_equal(a, b) for a, b in both)
