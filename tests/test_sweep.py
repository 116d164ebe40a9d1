"""examples/sweep.py: the command lines of its runs, one at a time on each GPU."""

import importlib.util
import subprocess
import threading
import time
from pathlib import Path

import pytest

from gptjax import cli

ROOT = Path(__file__).parents[1]


@pytest.fixture
def sweep():
    spec = importlib.util.spec_from_file_location("sweep", ROOT / "examples" / "sweep.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def started(sweep, monkeypatch):
    """Commands and GPUs of the processes; no process starts. Runs of seed 1 fail if `fail`."""
    commands, gpus, busy, lock = [], [], set(), threading.Lock()

    def run(command, env=None, **_):
        if "gptjax.plot" in command:
            commands.append(command)
            return subprocess.CompletedProcess(command, 0)
        gpu = env["CUDA_VISIBLE_DEVICES"]
        with lock:
            assert gpu not in busy
            busy.add(gpu)
        time.sleep(0.01)
        with lock:
            busy.remove(gpu)
            commands.append(command)
            gpus.append(gpu)
        return subprocess.CompletedProcess(command, 1 if command[-1] == started.fail else 0)

    started = type("Started", (), {"commands": commands, "gpus": gpus, "fail": None})
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sweep.machine, "gpus", lambda: [2, 5])
    return started


def test_each_run_has_its_own_command_and_a_gpu_to_itself(sweep, started, tmp_path):
    tiny = str(ROOT / "configs" / "gpt2_tiny.py")
    more = ["--rates", "1e-3", "0.002", "--seeds", "0", "7", "--out", str(tmp_path / "out")]
    assert sweep.main(["--config", tiny, *more, "--max-steps", "5"]) == 0
    *runs, plot = started.commands
    configs = [cli.from_command_line(command[2:]) for command in runs]
    found = {(c.name, c.optimizer.learning_rate, c.seed) for c in configs}
    assert found == {
        ("lr0.001-seed0", 1e-3, 0), ("lr0.001-seed7", 1e-3, 7),
        ("lr0.002-seed0", 2e-3, 0), ("lr0.002-seed7", 2e-3, 7),
    }  # fmt: skip
    assert {(c.max_steps, c.runs_dir) for c in configs} == {(5, tmp_path / "out")}
    assert {*started.gpus} == {"2", "5"} and all(Path(r[1]) == ROOT / "train.py" for r in runs)
    folders = [str(tmp_path / "out" / name) for name in ("lr0.001-seed0", "lr0.001-seed7")]
    assert plot[1:5] == ["-m", "gptjax.plot", *folders]
    assert plot[-3:] == ["--group", "--out", str(tmp_path / "out" / "sweep.png")]


def test_a_failed_run_fails_the_sweep_and_leaves_the_others(sweep, started, tmp_path):
    started.fail = "1"
    assert sweep.main(["--rates", "1e-3", "--seeds", "0", "1", "2", "--out", str(tmp_path)]) == 1
    assert len(started.commands) == 4
    assert sweep.main(["--rates", "1e-3", "--seeds", "1", "--out", str(tmp_path)]) == 1
    assert len(started.commands) == 5  # without a picture
