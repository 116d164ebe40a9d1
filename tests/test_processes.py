"""Several processes, each with one CPU device, train as one process with two devices does."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from saved_run_tools import random_params, save_run

from gptjax import processes
from gptjax.config import Config
from gptjax.training import resume
from gptjax.weights import DamagedError

SCRIPT = Path(__file__).with_name("processes_runs.py")
STRATEGIES = ("data", "zero1", "fsdp")
CONFIG = """
from pathlib import Path
from gptjax import Config, GPT2Config, OptimizerConfig
model = GPT2Config(
    vocab_size=257, padded_vocab_size=264, block_size=32, n_layer=1, n_head=2, n_embd=16
)
config = Config(
    name="interrupted", runs_dir=Path({folder!r}), dataset={words!r}, device="cpu", model=model,
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5), max_steps=10,
    sequence_length=32, batch_tokens=512, micro_batch=4, val_every=5, val_tokens=1024,
    sample_every=0, checkpoint_every=2,
)
"""
# Compiles in half of the time.
XLA_FLAGS = "--xla_backend_optimization_level=0"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def group(scenario: str, file: Path, count: int) -> list[tuple[int, str]]:
    """Start processes and return the exit code and the output of each; check that all end soon
    after the first."""
    coordinator = f"localhost:{free_port()}"
    flags = XLA_FLAGS + (" --xla_force_host_platform_device_count=2" if count == 1 else "")
    # Most runs are one program.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(file.parent / "cache")}
    environment = os.environ | {"XLA_FLAGS": flags} | cache
    outputs = [file.with_name(f"{scenario} {count} {i}.txt") for i in range(count)]
    processes = []
    for i, output in enumerate(outputs):
        arguments = [scenario, file, i, count, coordinator]
        with output.open("w") as out:
            processes.append(
                subprocess.Popen(
                    list(map(str, [sys.executable, SCRIPT, *arguments])),
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            )
    try:
        end = time.monotonic() + 300
        while all(process.poll() is None for process in processes) and time.monotonic() < end:
            time.sleep(0.1)
        for process in processes:
            process.wait(60)
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, output.read_text())
        for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.fixture(scope="module")
def file(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "config.py").write_text(CONFIG.format(folder=str(folder), words=str(words)))
    return folder / "config.py"


def results(file: Path, ended: list[tuple[int, str]]) -> list[dict[str, str]]:
    """Return the results of the runs in each process."""
    files = [file.with_name(f"runs {len(ended)} {i}.json") for i in range(len(ended))]
    assert all(file.exists() for file in files), ended
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def one(file):
    return results(file, group("runs", file, 1))


@pytest.fixture(scope="module")
def failed(file):
    """How two processes end: after their runs, process 0 fails."""
    return group("runs", file, 2)


@pytest.fixture(scope="module")
def two(file, failed):
    return results(file, failed)


def losses(file: Path, name: str) -> list[float]:
    lines = (file.parent / name / "log.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] in ("train", "val")]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [*range(1, 11)]
    return [row["loss"] for row in rows]


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_processes_have_the_losses_of_one(file, one, two, name):
    assert [result[name] for result in (*one, *two)] == ["0"] * 3
    expected = losses(file, f"{name} 1")
    np.testing.assert_allclose(losses(file, f"{name} 2"), expected, rtol=1e-6, atol=0)
    assert expected[-1] < expected[0] - 0.5


def test_a_signal_an_error_and_a_kill_of_one_process_end_all_and_the_run_resumes(file, failed, two):
    """One run: process 1 gets SIGTERM, process 0 cannot write its log, process 1 is killed."""
    assert [result["stopped"] for result in two] == [str(128 + signal.SIGTERM)] * 2
    newest_is = "the newest complete checkpoint is of step 4; the same command resumes the run"
    message = f"error: stopped at step 5: No space left on device; {newest_is}\n"
    assert failed[0][0] == 1 and message in failed[0][1]
    assert "Traceback" not in failed[0][1] and "step 1/" not in failed[0][1]
    check_ended(failed[1])
    alive, killed = group("killed", file, 2)
    assert killed[0] == -signal.SIGKILL and "step 5/" in alive[1] and "step 4/" not in alive[1]
    check_ended(alive)
    assert 4 < newest(file) < 10
    first, second = group("command", file, 2)
    assert first[0] == second[0] == 0, first[1] + second[1]
    assert re.search(r"processes +0 on \S+: 1 × cpu\n +1 on \S+: 1 × cpu\n", first[1])
    assert "step 10/10" in first[1] and "step" not in second[1]
    assert losses(file, "interrupted") == losses(file, "data 2")


def check_ended(process: tuple[int, str]) -> None:
    """Check that a process ended because another one did, with the text of gptjax or of JAX."""
    code, shown = process
    assert code in (1, -signal.SIGABRT), shown
    assert processes.ENDED in shown or "another task died" in shown, shown


def newest(file: Path) -> int:
    folder = file.parent / "interrupted" / "checkpoints"
    return max(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def test_processes_that_do_not_fit_together_are_refused(file, two):
    refused = ("seed", "data", "batch", "commit")
    first, second = ({name: result[f"refused {name}"] for name in refused} for result in two)
    assert first == second
    host = re.escape(socket.gethostname())
    assert re.search(f"--seed: 0 in process 0 on {host}, 1 in process 1 on {host}$", first["seed"])
    assert "tokens of words_train_000001.bin: 12000 in process 0 on" in first["data"]
    assert "--batch-tokens 480 is not a multiple" in first["batch"]
    assert re.search(r"commit: \w+(-dirty)? in process 0 on \S+, other in proc", first["commit"])
    assert not (file.parent / "refused seed").exists()


def test_processes_that_cannot_be_connected(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    for place in ("", "x"):
        monkeypatch.setenv("JAX_PROCESS_ID", place)
        says = "JAX cannot connect the processes: .* set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_"
        with pytest.raises(processes.ProcessError, match=says):
            processes.initialize(Config(distributed="auto"))


def two_processes(monkeypatch, *theirs):
    """Process 0 of two; the other process answers with `theirs`."""
    answers = iter(theirs)
    monkeypatch.setattr(processes, "exchange", lambda value: [value, next(answers)])


def test_damage_that_one_process_finds_counts_for_all(tmp_path, monkeypatch):
    save_run(tmp_path / "runs" / "gpt2", {3: random_params(), 6: random_params(seed=1)})
    config = Config(runs_dir=tmp_path / "runs")
    steps = {"host": "", "value": {f"checkpoints in {config.run_dir}/checkpoints": [6, 3]}}
    two_processes(monkeypatch, steps, "6 is damaged", None)
    found = resume.find(config)
    assert found.step == 3 and found.damaged == {6: "6 is damaged"}
    two_processes(monkeypatch, steps, "6 is damaged", "3 is damaged")
    with pytest.raises(DamagedError, match=r"6 is damaged\n3 is damaged\nchoose another"):
        resume.find(config)
    two_processes(monkeypatch, steps | {"value": {}})
    with pytest.raises(processes.ProcessError, match="checkpoints in .*: .6, 3. in process 0"):
        resume.find(config)


@pytest.mark.parametrize(
    ("environment", "all_gpus"),
    [
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_NODES": "1"}, False),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "2"}, True),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_NODES": "1", "SLURM_GPUS_PER_TASK": "1"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, False),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "JAX_LOCAL_DEVICE_IDS": "0"}, False),
    ],
)
def test_the_gpus_of_a_process_under_a_scheduler(monkeypatch, environment, all_gpus):
    for name in [name for name in os.environ if name.startswith(("SLURM", "OMPI", "JAX_LOCAL"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert processes._has_all_gpus() == all_gpus
