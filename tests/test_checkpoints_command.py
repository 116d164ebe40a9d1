"""python -m gptjax.checkpoints: list and average."""

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


def test_average(run, tmp_path, capsys):
    chosen = [10, 30]
    said = command(capsys, run, "average", "--steps", *chosen, "--out", tmp_path / "mean")
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
    for chosen, message in (
        ((20, 30), "20 is damaged"),
        ((10, 11), r"expected different steps of [30, 20, 10], found [10, 11]"),
        ((10, 10), "expected different steps"),
    ):
        assert message in command(capsys, run, "average", "--steps", *chosen, *out, code=1)
    refused = command(capsys, run, "average", "--steps", 30, "--out", run, code=1)
    assert "existing one" in refused
    assert "expected a run's folder" in command(capsys, tmp_path / "no", "list", code=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


# The command line with a slow save: a thread of Orbax creates files for a second.
SLOW = """
import runpy, sys, time
from gptjax.training import checkpoint
synchronize = checkpoint.synchronize
def slow(paths):
    print("saving", flush=True)
    folder = paths[0].parent if paths[0].is_file() else paths[0]
    for number in range(20):
        time.sleep(0.05)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"late{number}").touch()
    synchronize(paths)
checkpoint.synchronize = slow
sys.argv[0] = "gptjax.checkpoints"
runpy.run_module("gptjax.checkpoints", run_name="__main__")
"""


def test_an_interrupted_average_leaves_nothing(run, tmp_path):
    args = [str(run), "average", "--steps", "20", "30", "--out", str(tmp_path / "mean")]
    line, pipes = [sys.executable, "-c", SLOW, *args], {"stdout": subprocess.PIPE}
    with subprocess.Popen(line, env=ENVIRONMENT, stderr=subprocess.PIPE, **pipes) as process:
        assert process.stdout.readline() == b"saving\n"
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (128 + signal.SIGTERM, b"interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
