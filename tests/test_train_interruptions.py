"""train.py interrupted: signals, kills, NaN, a full disk, a closed pipe; and the resumed run."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_tools import command_line, last_state, losses, run, steps_kept, train_py

from gptjax.config import ConfigError
from gptjax.data import ShardError
from gptjax.optim import OptimizerConfig
from gptjax.training import compilation, progress, status_line
from gptjax.training import step as step_module
from gptjax.training.checkpoint import NotFiniteError
from gptjax.training.errors import StoppedError
from gptjax.weights import CheckpointError

# The fixture `config`.
pytest_plugins = ["train_tools"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_and_the_same_command_goes_on_bit_for_bit(
    config, alone, monkeypatch, number
):
    real = train_py.RunLog.write

    def interrupt(self, kind, step, tokens, **fields):
        real(self, kind, step, tokens, **fields)
        if kind == "train" and step == 9:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(train_py.RunLog, "write", interrupt)
        code, shown = run(config)
    assert code == 128 + number and f"stopped by {number.name} at step" in shown
    (stopped_at,) = {steps_kept(config)[-1]}
    assert 9 <= stopped_at < 20
    code, shown = run(config)
    assert code == 0 and f"resuming from step {stopped_at}" in shown
    assert losses(config) == losses(alone)
    assert all(
        np.array_equal(a, b) for a, b in zip(last_state(config), last_state(alone), strict=True)
    )


def test_nan_stops_the_run_names_the_step_and_keeps_the_checkpoint(config):
    run(
        dataclasses.replace(
            config, max_steps=6, optimizer=dataclasses.replace(config.optimizer, schedule_steps=20)
        )
    )
    good = last_state(config)
    # The weights of the checkpoint are fine; the data is not: an id beyond the table makes the loss
    # NaN.
    bad = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, schedule_steps=20)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            train_py,
            "put",
            lambda sharding, x: jax.device_put(x._replace(inputs=0 * x.inputs + 9999), sharding),
        )
        with pytest.raises(NotFiniteError, match=r"step 7: loss nan.*checkpoint of step 6 is kept"):
            run(bad)
    assert steps_kept(config) == [6]
    assert all(np.array_equal(a, b) for a, b in zip(last_state(config), good, strict=True))
    lines = (config.run_dir / "log.jsonl").read_text().splitlines()
    assert [row for row in map(json.loads, lines) if row["kind"] == "event"][-1][
        "event"
    ] == "not finite"

    # Each of the two pieces of advice is taken.
    slower = dataclasses.replace(bad.optimizer, learning_rate=1e-3)
    with pytest.raises(ConfigError, match="--resume with_changes"):
        run(dataclasses.replace(bad, optimizer=slower))
    skipping = dataclasses.replace(bad.optimizer, skip_loss_z=5.0, skip_grad_norm_z=5.0)
    for max_steps, optimizer in ((8, slower), (9, skipping)):
        code, shown = run(
            dataclasses.replace(
                bad, optimizer=optimizer, max_steps=max_steps, resume="with_changes"
            )
        )
        assert code == 0 and "changed     optimizer." in shown
    lines = (config.run_dir / "log.jsonl").read_text().splitlines()
    starts = [row for row in map(json.loads, lines) if row.get("event") == "start"]
    assert starts[-2]["changes"] == {"optimizer.learning_rate": [1e-2, 1e-3]}
    assert {"optimizer.skip_loss_z", "optimizer.skip_grad_norm_z"} <= starts[-1]["changes"].keys()


def poisoned(monkeypatch, steps):
    """Make the loss and gradients of the given steps NaN."""
    real = step_module.loss_and_grads

    def make(*args, **how):
        inner = step_module.make_train_step(*args, **how)

        def train_step(state, windows):
            bad = jnp.isin(state.step, jnp.asarray(steps) - 1)
            with monkeypatch.context() as patch:
                patch.setattr(
                    step_module,
                    "loss_and_grads",
                    lambda *args: jax.tree.map(lambda x: jnp.where(bad, jnp.nan, x), real(*args)),
                )
                return inner(state, windows)

        return train_step

    monkeypatch.setattr(compilation, "make_train_step", make)


def test_an_update_that_is_not_finite_is_skipped_where_skipping_is_on(config, monkeypatch):
    poisoned(monkeypatch, [3, 4])
    config = dataclasses.replace(config, max_steps=8, sample_every=0)
    with pytest.raises(NotFiniteError, match="step 3: loss nan"):
        run(config)
    skipping = dataclasses.replace(
        config, name="skip", optimizer=OptimizerConfig(learning_rate=1e-2, skip_loss_z=5.0)
    )
    code, shown = run(skipping)
    assert code == 0 and shown.count("update skipped; loss nan") == 2
    assert all(np.isfinite(x).all() for x in last_state(skipping))
    monkeypatch.setattr(progress, "MOST_NOT_FINITE", 2)
    with pytest.raises(NotFiniteError, match="step 4: loss nan"):
        run(dataclasses.replace(skipping, name="limit"))


def test_a_last_step_that_is_not_finite_is_an_error(config, monkeypatch):
    # The loss of the last step is of the parameters before its update: it is finite, and what it
    # leaves is not.
    config = dataclasses.replace(
        config, max_steps=5, checkpoint_every=4, val_every=0, sample_every=0
    )
    config = dataclasses.replace(
        config, optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant")
    )
    real = step_module.make_train_step

    def make(*args, **kwargs):
        inner = real(*args, **kwargs)

        def train_step(state, windows):
            state, metrics = inner(state, windows)
            poison = jnp.where(state.step == 5, jnp.inf, 1.0)
            return dataclasses.replace(
                state, params=jax.tree.map(lambda p: p * poison, state.params)
            ), metrics

        return train_step

    monkeypatch.setattr(compilation, "make_train_step", make)
    with pytest.raises(
        NotFiniteError, match=r"step 5: validation loss nan.*checkpoint of step 4 is kept"
    ):
        run(config)
    assert steps_kept(config) == [4]


def test_a_learning_rate_that_explodes_stops_the_run(config):
    # The loss is finite when the gradient overflows or one step later: either way no later step is
    # saved.
    config = dataclasses.replace(
        config, optimizer=OptimizerConfig(learning_rate=1e30, warmup_steps=0), checkpoint_every=1
    )
    with pytest.raises(NotFiniteError, match=r"step \d+: .*stopped") as error:
        run(config)
    named = int(re.search(r"step (\d+)", str(error.value))[1])
    assert all(step < named for step in steps_kept(config))


def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint(config, tmp_path):
    command = command_line(config, tmp_path, "--optimizer.schedule-steps", "12")
    done = subprocess.run([*command, "--max-steps", "4"], check=False)
    assert done.returncode == 0 and steps_kept(config) == [4]
    # A full disk, as far as a file can tell: none may grow past 32 KiB, where a checkpoint has 400.
    limited = ["bash", "-c", 'trap "" XFSZ; ulimit -f 32; exec "$@"', "-", *command]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert "failed: File too large; the newest complete checkpoint is of step 4" in done.stderr
    assert "Traceback" not in done.stderr and steps_kept(config) == [4]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "resuming from step 4" in done.stdout, done.stderr


def raising(owner, name, error):
    """Return a function that makes calls of `owner.name` with the step 9 raise `error`."""

    def install(monkeypatch):
        real = getattr(owner, name)

        def fail(self, *args, **kwargs):
            if 9 in (getattr(self, "_step", None), *args):
                raise error
            return real(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, fail)

    return install


FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2 B")
BUG = jax.errors.JaxRuntimeError("INTERNAL: another error")
DISK = OSError(28, "No space left on device")
PIPE = BrokenPipeError(32, "Broken pipe")
KEPT = "the same command resumes from the checkpoint of step 6$"
# What fails at step 9, and the error of the run.
FAULTS = {
    "log": (raising(train_py.RunLog, "write", DISK), f"at step 9: No space .*; {KEPT}"),
    "terminal": (raising(status_line.StatusLine, "update", PIPE), f"at step 9: Broken .*; {KEPT}"),
    "data": (raising(train_py.Batches, "__next__", ShardError("changed")), f"9: changed; {KEPT}"),
    "memory": (
        raising(train_py.Progress, "submit", FULL),
        f"8: out of .* GiB.*{KEPT}",
    ),
    "a bug": (raising(train_py.Progress, "submit", BUG), "another error"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_after_an_error_the_same_command_goes_on_bit_for_bit(config, alone, monkeypatch, fault):
    install, says = FAULTS[fault]
    with monkeypatch.context() as patch:
        install(patch)
        expected = jax.errors.JaxRuntimeError if fault == "a bug" else StoppedError
        with pytest.raises(expected, match=says):
            run(config)
    assert steps_kept(config) == [6]
    code, shown = run(config)
    assert code == 0 and "resuming from step 6" in shown
    assert losses(config) == losses(alone) and list(losses(config)) == list(range(1, 21))
    both = zip(last_state(config), last_state(alone), strict=True)
    assert all(np.array_equal(a, b) for a, b in both)


def empty(folder):
    for file in folder.rglob("state/**/d/*"):
        file.write_bytes(b"")


def replace_state(folder):
    shutil.rmtree(folder / "state")
    shutil.copytree(folder.parent / "6" / "state", folder / "state")


DAMAGES = {
    "empty files": empty,
    "the state of another step": replace_state,
    "no metadata": lambda folder: (folder / "meta" / "metadata").unlink(),
    "no files": lambda folder: shutil.rmtree(folder / "state"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_with_a_damaged_newest_checkpoint_resumes_from_the_one_before(config, alone, damage):
    optimizer = dataclasses.replace(config.optimizer, schedule_steps=20)
    config = dataclasses.replace(config, optimizer=optimizer)
    run(dataclasses.replace(config, max_steps=12))
    DAMAGES[damage](config.run_dir / "checkpoints" / "12")
    with pytest.raises(CheckpointError, match=r"12 is damaged"):
        run(dataclasses.replace(config, resume="must"))
    code, shown = run(config)
    assert code == 0 and "RESUMING FROM STEP 6" in shown and "12 is damaged" in shown
    assert (config.run_dir / "checkpoints" / "12.damaged").is_dir()
    assert steps_kept(config) == [18, 20] and losses(config) == losses(alone)
    both = zip(last_state(config), last_state(alone), strict=True)
    assert all(np.array_equal(a, b) for a, b in both)


def test_a_signal_while_compiling_ends_the_process(config, tmp_path):
    command = command_line(config, tmp_path)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("compiling"):
                break
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGINT


def test_a_closed_pipe_ends_with_its_exit_code_and_no_traceback(config, tmp_path):
    command = command_line(
        config,
        tmp_path,
        "--max-steps",
        "400",
        "--optimizer.schedule-steps",
        "400",
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 10/"):
            break
    process.stdout.close()
    said = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in said and re.search(
        r"stopped at step \d+: the terminal or pipe ", said
    )
