"""train.py disturbed, in this process: NaN, signals, errors and damage; and the resumed run.

`test_attacks_runs.py` kills processes and fills the disk.
"""

import dataclasses
import os
import re
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_tools import check_same, last_state, run, same_as, steps_kept, train_py

from gptjax.config import ConfigError
from gptjax.data import Loader, ShardError
from gptjax.optim import OptimizerConfig
from gptjax.training import compilation, errors, progress, status_line
from gptjax.training import step as step_module
from gptjax.training.checkpoint import NotFiniteError
from gptjax.training.run_log import read_log


def test_nan_stops_the_run_names_the_step_and_keeps_the_checkpoint(config):
    optimizer = dataclasses.replace(config.optimizer, schedule_steps=20)
    config = dataclasses.replace(config, optimizer=optimizer)
    run(dataclasses.replace(config, max_steps=6))
    good = last_state(config)
    # The weights of the checkpoint are fine; an id beyond the table makes the loss NaN.
    put = lambda sharding, x: jax.device_put(x._replace(inputs=0 * x.inputs + 9999), sharding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_py, "put", put)
        with pytest.raises(NotFiniteError, match=r"step 7: loss nan.*checkpoint is of step 6"):
            run(config)
    assert steps_kept(config) == [6]
    assert all(np.array_equal(a, b) for a, b in zip(last_state(config), good, strict=True))
    log = read_log(config.run_dir / "log.jsonl")
    assert [row["event"] for row in log if row["kind"] == "event"][-1] == "not finite"

    # Each of the two pieces of advice is taken.
    slower = dataclasses.replace(optimizer, learning_rate=1e-3)
    with pytest.raises(ConfigError, match="--resume with_changes"):
        run(dataclasses.replace(config, optimizer=slower))
    skipping = dataclasses.replace(optimizer, skip_loss_z=5.0, skip_grad_norm_z=5.0)
    for steps, changed in ((8, slower), (9, skipping)):
        code, shown = run(
            dataclasses.replace(config, optimizer=changed, max_steps=steps, resume="with_changes")
        )
        assert code == 0 and "changed     optimizer." in shown
    log = read_log(config.run_dir / "log.jsonl")
    starts = [row for row in log if row.get("event") == "start"]
    assert starts[-2]["changes"] == {"optimizer.learning_rate": [1e-2, 1e-3]}
    assert {"optimizer.skip_loss_z", "optimizer.skip_grad_norm_z"} <= starts[-1]["changes"].keys()


def test_a_finished_run_is_extended(config):
    """With a constant schedule by one option; with cosine also by the one that the error names."""
    quiet = {"val_every": 0, "sample_every": 0, "checkpoint_every": 0}
    cosine = dataclasses.replace(config, name="cosine", max_steps=2, **quiet)
    constant = dataclasses.replace(config.optimizer, schedule="constant", schedule_steps=None)
    short = dataclasses.replace(cosine, name="constant", optimizer=constant)
    whole = dataclasses.replace(short, name="whole", max_steps=3)
    for each in (whole, short):
        assert run(each)[0] == 0
    changed = "changed     optimizer.schedule_steps: 2 until step 2, now 3"
    code, shown = run(dataclasses.replace(short, max_steps=3))
    assert code == 0 and "resuming from step 2" in shown and changed in shown
    check_same(short, whole)
    assert run(cosine)[0] == 0
    longer = dataclasses.replace(cosine, max_steps=3)
    with pytest.raises(ConfigError, match="--max-steps 3: .* cosine .*add --resume with_changes"):
        run(longer)
    code, shown = run(dataclasses.replace(longer, resume="with_changes"))
    assert code == 0 and changed in shown and steps_kept(cosine)[-1] == 3


def poisoned(monkeypatch, steps):
    """Make the loss and gradients of the given steps NaN."""
    real = step_module.loss_and_grads

    def loss_and_grads(graphdef, params, batch, parallel, step, has_metrics):
        found = real(graphdef, params, batch, parallel, step, has_metrics)
        bad = jnp.isin(step, jnp.asarray(steps) - 1)
        return jax.tree.map(lambda x: jnp.where(bad, jnp.nan, x), found)

    monkeypatch.setattr(step_module, "loss_and_grads", loss_and_grads)


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
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant")
    never = {"val_every": 0, "sample_every": 0}
    config = dataclasses.replace(
        config, max_steps=5, checkpoint_every=4, optimizer=optimizer, **never
    )

    def make(*args, **kwargs):
        def train_step(state, windows):
            state, metrics = inner(state, windows)
            poison = jnp.where(state.step == 5, jnp.inf, 1.0)
            params = jax.tree.map(lambda p: p * poison, state.params)
            return dataclasses.replace(state, params=params), metrics

        inner = step_module.make_train_step(*args, **kwargs)
        return train_step

    monkeypatch.setattr(compilation, "make_train_step", make)
    with pytest.raises(NotFiniteError, match=r"step 5: validation loss nan.*is of step 4"):
        run(config)
    assert steps_kept(config) == [4]


def at_step(step, owner, name, action):
    """Return a function that makes calls of `owner.name` with this step begin with `action`."""

    def install(monkeypatch):
        real = getattr(owner, name)

        def disturbed(self, *args, **kwargs):
            own = self.position // self._batch if isinstance(self, Loader) else None
            if step in (own, *args):
                action()
            return real(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, disturbed)

    return install


def raising(error):
    def fail():
        raise error

    return fail


FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2 B")
BUG = jax.errors.JaxRuntimeError("INTERNAL: another error")
DISK = OSError(28, "No space left on device")
PIPE = BrokenPipeError(32, "Broken pipe")
KEPT = "the newest complete checkpoint is of step 6; the same command resumes the run\n"
LOG = (train_py.RunLog, "write")
# One run, disturbed again and again: what happens, the exit code, and what is printed. After an
# error the newest checkpoint is that of step 6; a signal saves another.
FAULTS = {
    "log": (at_step(9, *LOG, raising(DISK)), 1, f"^error: stopped at step 9: No space .*; {KEPT}"),
    "terminal": (
        at_step(9, status_line.StatusLine, "update", raising(PIPE)),
        128 + signal.SIGPIPE,
        f"^error: stopped at step 9: the terminal or pipe .* is closed; {KEPT}",
    ),
    "data": (
        at_step(9, Loader, "__next__", raising(ShardError("changed"))),
        1,
        f"^error: stopped at step 9: changed; {KEPT}",
    ),
    "a later stage": (
        at_step(9, compilation.StagedStep, "at", raising(ConfigError("stage 2 of 2"))),
        1,
        f"^error: stopped at step 9: stage 2 of 2; {KEPT}",
    ),
    "memory": (
        at_step(9, train_py.Progress, "submit", raising(FULL)),
        1,
        f"^error: stopped at step 8: out of device memory.*; {KEPT}",
    ),
    "a bug": (
        at_step(9, train_py.Progress, "submit", raising(BUG)),
        1,
        r"(?s)^Traceback .*submit.*another error",
    ),
    "SIGTERM": (
        at_step(9, *LOG, lambda: os.kill(os.getpid(), signal.SIGTERM)),
        143,
        "by SIGTERM at step (9|10);",
    ),
    "SIGINT": (
        at_step(14, *LOG, lambda: os.kill(os.getpid(), signal.SIGINT)),
        130,
        "by SIGINT at step (14|15);",
    ),
}


def test_after_faults_the_same_command_goes_on_bit_for_bit(config, alone, monkeypatch, capsys):
    shown = []

    def command():
        code, text = run(config)
        shown.append(text)
        return code

    def end(code):
        raise SystemExit(code)

    for fault, (install, expected, says) in FAULTS.items():
        with monkeypatch.context() as patch:
            patch.setattr(os, "_exit", end)
            install(patch)
            try:
                code = errors.run(command)
            except SystemExit as ended:
                code = ended.code
        printed = "".join(shown) + capsys.readouterr().err
        assert code == expected and re.search(says, printed), (fault, printed)
        assert bool(shown) == fault.startswith("SIG")
        assert shown or steps_kept(config) == [6]
        shown.clear()
    same_as(alone, config, f"resuming from step {steps_kept(config)[-1]}")


def test_a_run_with_a_damaged_newest_checkpoint_resumes_from_the_one_before(config, alone):
    optimizer = dataclasses.replace(config.optimizer, schedule_steps=20)
    config = dataclasses.replace(config, optimizer=optimizer)
    run(dataclasses.replace(config, max_steps=12))
    folder = config.run_dir / "checkpoints"
    shutil.rmtree(folder / "12" / "state")
    shutil.copytree(folder / "6" / "state", folder / "12" / "state")
    same_as(alone, config, "12.damaged. RESUMING FROM STEP 6")
    assert (folder / "12.damaged").is_dir() and steps_kept(config) == [18, 20]
