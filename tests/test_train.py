"""train.py: a run from beginning to end."""

import dataclasses
import json
import os
import subprocess

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from train_tools import check_same, command_line, losses, rows, run, steps_kept, train_py

from gptjax import devices, parallel
from gptjax.config import Config
from gptjax.training import compilation, flops
from gptjax.training.run_log import read_log


def test_a_run_from_beginning_to_end(config, monkeypatch):
    monkeypatch.setattr(flops, "peak_flops", lambda kind, precision: 0.5e12)
    code, shown = run(config)
    assert code == 0
    kernels = "kernels     layer_norm: xla, flash_attention: xla, linear: xla, mlp: xla, lin"
    precision = "fp32: matmuls fp32, residual stream float32, parameters float32"
    for part in ("device", precision, kernels, "parameters", "GiB for a step", "sample ⟨"):
        assert part in shown
    train, val, sample = (rows(config, kind) for kind in ("train", "val", "sample"))
    assert ([*train], [*val], [*sample]) == ([*range(1, 21)], [0, 10, 20], [10, 20])
    assert val[0]["loss"] == pytest.approx(np.log(257), abs=0.5)
    assert val[20]["loss"] < val[0]["loss"] - 2
    assert {"lr", "grad_norm", "ms"} <= train[20].keys() and train[20]["tokens"] == 20 * 512
    per_token = config.model.flops_per_token(config.sequence_length)
    rate = train[15]["tokens_per_second"] * per_token / 0.5e12
    assert rate > 0 and train[15]["mfu"] == pytest.approx(rate)
    assert steps_kept(config) == [18, 20]
    assert list(config.run_dir.glob("events.out.tfevents.*"))
    start = json.loads((config.run_dir / "log.jsonl").read_text().splitlines()[0])
    assert start["event"] == "start"
    assert start.keys() >= {"command", "date", "commit", "versions", "kernels", "config"}
    before = (config.run_dir / "log.jsonl").read_bytes()
    code, shown = run(config)
    assert code == 0 and "is complete" in shown
    assert "a higher --max-steps with --resume with_changes extends it" in shown
    code, shown = run(dataclasses.replace(config, max_steps=15, resume="with_changes"))
    assert code == 0 and "it is at step 20 already, after --max-steps 15; a higher" in shown
    assert (config.run_dir / "log.jsonl").read_bytes() == before


def test_two_devices_learn_what_one_does_and_go_on_from_its_checkpoint(config, alone, monkeypatch):
    monkeypatch.setattr(parallel, "SMALLEST_SHARDED", 1024)
    optimizer = dataclasses.replace(config.optimizer, schedule_steps=20)
    config = dataclasses.replace(config, optimizer=optimizer, sample_every=0)
    run(dataclasses.replace(config, max_steps=6))
    monkeypatch.setattr(devices, "select", lambda kind: (jax.devices("cpu")[:2], None))
    code, shown = run(dataclasses.replace(config, parallel="fsdp"))
    assert code == 0 and "2 × cpu" in shown and "resuming from step 6" in shown
    assert "fsdp, gradients summed in fp32" in shown
    for step, (loss, *_) in losses(alone).items():
        assert losses(config)[step][0] == pytest.approx(loss, rel=2e-4), step


def test_a_step_is_dispatched_before_the_metrics_of_the_one_before_are_read(config, monkeypatch):
    never = {"val_every": 0, "sample_every": 0, "checkpoint_every": 0}
    config, events = dataclasses.replace(config, max_steps=5, **never), []
    real_compile, real_get = compilation.compile_to_fit, jax.device_get

    def compile_and_watch(*args):
        step = real_compile(*args)
        return lambda *a: events.append("dispatch") or step(*a)

    monkeypatch.setattr(compilation, "compile_to_fit", compile_and_watch)
    monkeypatch.setattr(train_py.memory, "of_step", lambda *_: "")
    monkeypatch.setattr(train_py.jax, "device_get", lambda x: events.append("read") or real_get(x))
    run(config)
    # The last: whether the saved state is finite.
    assert events == ["dispatch", *["dispatch", "read"] * 4, "read", "read"]


def test_a_second_run_finds_its_programs_and_learns_the_same(config, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "select", lambda kind: (jax.devices("cpu")[:2], None))
    compilation_cache.reset_cache()  # of other tests' folder
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    first = dataclasses.replace(config, max_steps=4, val_every=0, sample_every=0)
    second = dataclasses.replace(first, name="second", checkpoint_every=0, val_every=2)
    other_seed = dataclasses.replace(second, name="seed", seed=1)

    def counts(config: Config) -> tuple[int, int]:
        assert run(config)[0] == 0
        log = read_log(config.run_dir / "log.jsonl")
        (event,) = (row for row in log if row.get("event") == "first step")
        return event["cache_hits"], event["cache_misses"]

    assert counts(first)[1] >= 2
    for config in (second, other_seed):
        hits, misses = counts(config)
        assert hits >= 2 and misses == 0
    check_same(second, first)
    assert losses(other_seed)[1] != losses(first)[1]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_deterministic_run_on_a_gpu_goes_on_bit_for_bit(config, tmp_path, precision):
    def start(*more):
        options = "--device=gpu --deterministic --model.attention=xla --optimizer.schedule-steps=12"
        options = [*options.split(), f"--model.precision={precision}", *more]
        # XLA reads the flag once a process, so this test needs processes of its own.
        command = command_line(config, tmp_path, *options)
        return subprocess.Popen(command, env=os.environ | {"XLA_FLAGS": ""})

    for process in [start("--name", "alone"), start("--max-steps", "6")]:
        assert process.wait() == 0
    assert start().wait() == 0
    assert losses(config) == losses(dataclasses.replace(config, name="alone"))
    assert steps_kept(config)[-1] == 12
