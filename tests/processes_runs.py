"""One process of a group that trains: runs of train.py that test_processes.py compares.

Command line: scenario, config file, process index, process count, coordinator.
"""

import dataclasses
import errno
import importlib.util
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np

from gptjax import parallel, processes, provenance
from gptjax.config import Config, ConfigError
from gptjax.data import write_shard
from gptjax.optim import NorMuonConfig
from gptjax.training import run_log, status_line

TRAIN = Path(__file__).parent.parent / "train.py"
spec = importlib.util.spec_from_file_location("train", TRAIN)
train = importlib.util.module_from_spec(spec)
sys.modules["train"] = train
spec.loader.exec_module(train)
# The arrays of a tiny model are sharded, too.
parallel.SMALLEST_SHARDED = 64

STOPPED_AT, FAILED_AT, KILLED_AT = 1, 5, 8


def run(config: Config) -> str:
    """Train; return the exit code or the error."""
    try:
        return str(train.train(config, lambda line: None))
    except (ConfigError, processes.ProcessError) as error:
        return f"{type(error).__name__}: {error}"


def strategies(config: Config) -> dict[str, Config]:
    """Return runs that are compared for one process and several."""
    config = dataclasses.replace(config, checkpoint_every=0)
    normuon = NorMuonConfig(learning_rate=1e-2, warmup_steps=5)
    return {
        "data": config,
        "zero1": dataclasses.replace(config, parallel="zero1", optimizer=normuon, val_every=0),
        "fsdp": dataclasses.replace(config, parallel="fsdp"),
    }


def put_as_processes(sharding, batch):
    """Put each device's sequences where they are with a process for each device.

    Process p of P loads every P-th sequence. Sums then have one order: NorMuon's bf16 matmuls would
    amplify a difference in the last bit.
    """

    def together(x):
        micro_batches, sequences, length = x.shape
        apart = x.reshape(micro_batches, -1, sharding.mesh.size, length)
        return apart.swapaxes(1, 2).reshape(micro_batches, sequences, length)

    return parallel.put(sharding, jax.tree.map(together, batch))


def refusals(config: Config, index: int) -> dict[str, Config]:
    """Return runs whose processes do not fit together, or not to the batch."""
    other = Path(config.dataset).parent / "other"
    if index:
        other.mkdir(exist_ok=True)
        for split in ("train", "val"):
            write_shard(other / f"x_{split}_000000.bin", np.full(4000, 7, np.uint16))
    return {
        "seed": dataclasses.replace(config, seed=index),
        "data": dataclasses.replace(config, dataset=str(other)) if index else config,
        "batch": dataclasses.replace(config, batch_tokens=32 * 15),
    }


def interrupt(step: int, number: int, checkpoint: Path | None = None) -> None:
    """Send this process a signal when it reads the metrics of a step.

    Args:
        checkpoint: wait, at most a minute, until this checkpoint is complete.
    """

    def write(self, kind, at, tokens, **fields):
        if kind == "train" and at == step:
            end = time.monotonic() + 60
            while checkpoint and not checkpoint.exists() and time.monotonic() < end:
                time.sleep(0.1)
            os.kill(os.getpid(), number)

    run_log.NoLog.write = write


def fail_log() -> None:
    """Raise an error when the log line of a step is written."""
    write = run_log.RunLog.write

    def fail(self, kind, step, tokens, **fields):
        if (kind, step) == ("train", FAILED_AT):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, kind, step, tokens, **fields)

    run_log.RunLog.write = fail


def command(file: str) -> None:
    """Run the command itself, for what it prints and how it ends."""
    sys.argv = ["train.py", "--config", file, "--distributed=auto"]
    runpy.run_path(str(TRAIN), run_name="__main__")


def main(scenario: str, file: str, index: int, count: int, coordinator: str) -> None:
    """Run a scenario; the results are written as JSON beside the config file."""
    group = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": count}
    os.environ.update({k: str(v) for k, v in (group | {"JAX_PROCESS_ID": index}).items()})
    status_line.LOG_EVERY = 1
    config = runpy.run_path(file)["config"]
    results = {}
    if scenario == "killed":
        processes.HEARTBEAT_SECONDS = 10
        interrupt(KILLED_AT, signal.SIGKILL, config.run_dir / "checkpoints" / str(KILLED_AT - 2))
    if scenario != "runs":
        command(file)
    if count == 1:
        train.put = put_as_processes
    else:
        config = dataclasses.replace(config, distributed="auto")
    for name, own in strategies(config).items():
        results[name] = run(dataclasses.replace(own, name=f"{name} {count}"))
    if count == 2:
        if index:
            interrupt(STOPPED_AT, signal.SIGTERM)
        results["stopped"] = run(dataclasses.replace(config, name="interrupted"))
        for name, refused in refusals(config, index).items():
            name = f"refused {name}"
            results[name] = run(dataclasses.replace(refused, name=name))
        commit = provenance.commit
        if index:
            provenance.commit = lambda: "other"
        results["refused commit"] = run(config)
    Path(file).with_name(f"{scenario} {count} {index}.json").write_text(json.dumps(results))
    if count == 2:
        provenance.commit = commit
        if index == 0:
            fail_log()
        command(file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
