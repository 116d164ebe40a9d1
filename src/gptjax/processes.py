"""Several processes that train one model, through `jax.distributed`.

Process 0 hosts JAX's coordination service. The processes compare their configs, code and data
before training starts. Heartbeats detect a dead process, and end the others.
"""

import json
import os
import socket
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from gptjax import config as configuration
from gptjax import provenance
from gptjax.config import Config
from gptjax.data import Dataset
from gptjax.fields import flag
from gptjax.terminal import UserError

# Seconds without a heartbeat after which a process counts as dead.
HEARTBEAT_SECONDS = 30
# Added to XLA_FLAGS unless a flag is set. An NCCL collective that a peer does not join ends the
# process; without sharded autotuning, no process waits for the compilation in another process.
_XLA_FLAGS = {
    "--xla_gpu_nccl_termination_timeout_seconds": "600",
    "--xla_gpu_shard_autotuning": "false",
}
# Options that may differ between the processes of a run. The data are compared by content.
PER_PROCESS = frozenset(("data_dir", "dataset"))
ENDED = (
    "An error in one process ends all processes of the run: the first error in the output of all "
    "processes is the cause. The same command in every process resumes from the newest checkpoint."
)


class ProcessError(UserError, RuntimeError):
    """The processes of a run cannot be connected, or do not fit together."""


def initialize(config: Config) -> None:
    """Connect the processes of a run if the config asks for several. Call before JAX starts.

    Raises:
        ProcessError: coordinator, count or index is missing, or the processes' configs, commits
            or packages differ.
    """
    if config.distributed == "off":
        return
    if not is_initialized():
        _connect(config.device)
    options = configuration.to_json(config).items()
    check_alike(
        {flag(name): value for name, value in options if name not in PER_PROCESS}
        | provenance.versions()
        | {"commit": provenance.commit()},
    )


def _connect(device: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"{flag}={value}" for flag, value in _XLA_FLAGS.items() if flag not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing])
    # JAX would install its own handler of SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        # Concurrent executables could run their collectives in different orders.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    # JAX reads JAX_COORDINATOR_ADDRESS itself; None: from Slurm or Open MPI.
    place = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    try:
        jax.distributed.initialize(
            **{name: int(os.environ[key]) for name, key in place.items() if key in os.environ},
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise ProcessError(
            f"JAX cannot connect the processes: {error} Without Slurm's srun or Open MPI's mpirun, "
            "set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from error
    if _has_all_gpus():
        jax.config.update("jax_cuda_visible_devices", "all")


def is_initialized() -> bool:
    """Return whether this process is one of several."""
    return jax.distributed.is_initialized()


def _has_all_gpus() -> bool:
    """Return whether a process uses all GPUs that it sees.

    Under Slurm and Open MPI, JAX uses the GPU of the process's index on the host. This is wrong
    with one process per host, and if the scheduler shows each process only its own GPUs.
    """
    of = os.environ.get
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return False
    one_per_host = of("OMPI_COMM_WORLD_LOCAL_SIZE") == "1" or of("SLURM_STEP_NUM_NODES", "0") == of(
        "SLURM_NTASKS"
    )
    return one_per_host or "SLURM_GPUS_PER_TASK" in os.environ


def exchange(value: Any) -> list[Any]:
    """Return the values of all processes, ordered by index. Every process must call this function.

    Args:
        value: JSON.

    Raises:
        ProcessError: the processes have different numbers of devices.
    """
    if not is_initialized():
        return [value]
    count, own, total = jax.process_count(), jax.local_device_count(), jax.device_count()
    if total != count * own:
        raise ProcessError(
            f"expected the same number of devices in all {count} processes, found {own} in process "
            f"{jax.process_index()} on {socket.gethostname()} and {total} in total"
        )
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = process_allgather(np.int32(len(text)))
    texts = process_allgather(np.pad(text, (0, lengths.max() - len(text))))
    return [json.loads(row[:length].tobytes()) for row, length in zip(texts, lengths, strict=True)]


def check_alike(value: dict[str, Any]) -> None:
    """Refuse a run whose processes do not have the same value.

    Args:
        value: flat JSON; the keys are printed.

    Raises:
        ProcessError: the values differ. The message has the differences from process 0.
    """
    first, *others = exchange({"host": socket.gethostname(), "value": value})
    ours = first["value"]
    for i, other in enumerate(others, 1):
        theirs = other["value"]
        if different := [n for n in ours | theirs if ours.get(n) != theirs.get(n)]:
            here, there = f"process 0 on {first['host']}", f"process {i} on {other['host']}"
            lines = (f"{n}: {ours.get(n)} in {here}, {theirs.get(n)} in {there}" for n in different)
            raise ProcessError(
                "the processes of this run differ. Start every process with the same command, "
                "code, packages and data; only JAX_PROCESS_ID differs.\n" + "\n".join(lines)
            )


def check_inputs(devices: list[jax.Device], dataset: Dataset) -> list[str]:
    """Compare devices and data of all processes; return one line per process with host and devices.

    Args:
        devices: the devices of all processes.

    Raises:
        ProcessError: the processes have different numbers or kinds of devices, or different
            data.
    """
    mine = local(devices)
    kinds = f"{len(mine)} × {', '.join(sorted({device.device_kind for device in mine}))}"
    if is_initialized():
        shards = dataset.fingerprint()
        tokens = {f"tokens of {name}": n for name, n in (shards["train"] | shards["val"]).items()}
        digests = {f"digest of {name}": digest for name, digest in shards["samples"].items()}
        check_alike({"devices": kinds} | tokens | digests)
    return [f"{i} on {host}: {kinds}" for i, host in enumerate(exchange(socket.gethostname()))]


def local(devices: list[jax.Device]) -> list[jax.Device]:
    """Return the devices of this process."""
    return [device for device in devices if device.process_index == jax.process_index()]


def finish() -> None:
    """Wait until all processes have finished, and disconnect them."""
    if is_initialized():
        jax.distributed.shutdown()
