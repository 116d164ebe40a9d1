"""python -m gptjax.checkpoints: list, average and delete."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from saved_run_tools import random_params, save_run

import gptjax
from gptjax import GPT2Config, checkpoints
from gptjax.models.base import params_of
from gptjax.training.lock import locked
from gptjax.weights import checkpoint_files

MODEL = GPT2Config(
    vocab_size=257, padded_vocab_size=264, block_size=16, n_layer=1, n_head=2, n_embd=8
)
STEPS = {10: 1, 20: 2, 30: 3}
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(gptjax.__file__).parents[1])}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    params = {step: random_params(MODEL, seed) for step, seed in STEPS.items()}
    run = save_run(tmp_path_factory.mktemp("checkpoints") / "run", params, model=MODEL)
    rows = [{"kind": "val", "step": step, "tokens": 0, "loss": step / 8} for step in (10, 30)]
    (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def command(capsys, *args, code=0):
    assert checkpoints.main([*map(str, args)]) == code
    captured = capsys.readouterr()
    assert code == 0 or captured.err.startswith("error: ")
    return captured.err if code else captured.out


def damage(run, step):
    for file in (run / "checkpoints" / str(step) / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:10])


def steps(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_list(run, capsys):
    damage(run, 30)
    lines = command(capsys, run, "list").splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["30", "3.7500"],
        ["20", "-"],
        ["10", "1.2500"],
    ]
    assert "damaged: " in lines[1] and [line.split()[3] for line in lines[2:]] == ["intact"] * 2
    assert all(float(line.split()[2]) > 0 for line in lines[1:])


@pytest.mark.parametrize("which", [["--steps", 10, 30], ["--last", 2]])
def test_average(run, tmp_path, capsys, which):
    chosen = [10, 30] if which[0] == "--steps" else [20, 30]
    said = command(capsys, run, "average", *which, "--out", tmp_path / "mean")
    assert str(chosen) in said
    model, tokenizer = gptjax.load(tmp_path / "mean")
    assert tokenizer.name == "byte" and model.config == MODEL
    parts = [random_params(MODEL, STEPS[step]) for step in chosen]
    mean = jax.tree.map(lambda *x: np.float32(sum(map(np.float64, x)) / 2), *parts)
    assert jax.tree.structure(params_of(model)) == jax.tree.structure(mean)
    for found, expected in zip(
        jax.tree.leaves(params_of(model)), jax.tree.leaves(mean), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    assert steps(run) == ["10", "20", "30"]


def test_averages_that_are_refused_leave_nothing(run, tmp_path, capsys):
    damage(run, 20)
    out = ("--out", tmp_path / "mean")
    for args, message in (
        (("--last", 2), "20 is damaged"),
        (("--last", 4), "--last must be 1 to 3"),
        (("--steps", 10, 11), r"expected different steps of [30, 20, 10], found [10, 11]"),
        (("--steps", 10, 10), "expected different steps"),
        ((), "expected --steps"),
        (("--steps", 10, "--last", 1), "and not both"),
    ):
        assert message in command(capsys, run, "average", *args, *out, code=1)
    assert "existing one" in command(capsys, run, "average", "--last", 1, "--out", run, code=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_the_newest_intact_checkpoint_is_deleted_by_force_only(run, capsys):
    damage(run, 30)
    assert "20 is the newest intact" in command(capsys, run, "delete", "--steps", 20, 10, code=1)
    assert steps(run) == ["10", "20", "30"]
    command(capsys, run, "delete", "--steps", 30, 10)
    assert steps(run) == ["20"]
    command(capsys, run, "delete", "--steps", 20, "--force")
    assert steps(run) == []


def test_a_run_in_use_keeps_its_checkpoints(run, tmp_path, capsys):
    with locked(run):
        assert "in use by another" in command(capsys, run, "delete", "--steps", 10, code=1)
    assert "found [40]" in command(capsys, run, "delete", "--steps", 40, code=1)
    assert steps(run) == ["10", "20", "30"]
    assert "expected a run's folder" in command(capsys, tmp_path / "no", "list", code=1)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(("args", "code"), [((), 130), ((signal.SIGTERM,), 143)])
def test_ctrl_c_and_sigterm_end_the_command_without_a_traceback(
    run, capsys, monkeypatch, args, code
):
    def interrupted(folder):
        raise KeyboardInterrupt(*args)

    monkeypatch.setattr(checkpoint_files, "steps", interrupted)
    assert checkpoints.main([str(run), "list"]) == code
    assert capsys.readouterr().err == "interrupted\n"


def test_a_closed_output_ends_the_command_without_a_message(run):
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-m", "gptjax.checkpoints", str(run), "list"]
    done = subprocess.run(
        line, env=ENVIRONMENT, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


# The command line with a slow save: a thread of Orbax creates files for a second.
SLOW = """
import runpy, sys, time
from gptjax.training import checkpoint
synchronize = checkpoint._synchronize
def slow(paths):
    print("saving", flush=True)
    folder = paths[0].parent if paths[0].is_file() else paths[0]
    for number in range(20):
        time.sleep(0.05)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"late{number}").touch()
    synchronize(paths)
checkpoint._synchronize = slow
sys.argv[0] = "gptjax.checkpoints"
runpy.run_module("gptjax.checkpoints", run_name="__main__")
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_average_leaves_nothing(run, tmp_path, number, code):
    args = [str(run), "average", "--last", "2", "--out", str(tmp_path / "mean")]
    line, pipes = [sys.executable, "-c", SLOW, *args], {"stdout": subprocess.PIPE}
    with subprocess.Popen(line, env=ENVIRONMENT, stderr=subprocess.PIPE, **pipes) as process:
        assert process.stdout.readline() == b"saving\n"
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (code, b"interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
