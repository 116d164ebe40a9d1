"""Several processes that train one model, through `jax.distributed`.

Process 0 hosts JAX's coordination service. The processes compare their configs, code and data
before training starts. Heartbeats detect a dead process, and end the others.
"""

import ctypes
import hashlib
import importlib.metadata
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import PyTree

import gptjax
import pallas_kernels
from gptjax import config as configuration
from gptjax.config import Config
from gptjax.data import Dataset

# Seconds in which all processes must start.
CONNECT_SECONDS = 300
# Seconds after which a process reports that it waits for the start of other processes.
_SAY_SECONDS = 10
# Seconds without a heartbeat after which a process counts as dead.
HEARTBEAT_SECONDS = 30
# Seconds for which a finished process waits for the other processes.
FINISH_SECONDS = 300

# Added to XLA_FLAGS unless a flag is set. An NCCL collective that a peer does not join ends the
# process; without sharded autotuning, no process waits for the compilation in another process.
_XLA_FLAGS = {
    "--xla_gpu_nccl_termination_timeout_seconds": "600",
    "--xla_gpu_shard_autotuning": "false",
}
# Options that may differ between the processes of a run. The data are compared by content.
PER_PROCESS = frozenset(("data_dir", "dataset"))


class DistributedError(RuntimeError):
    """The processes of a run cannot be connected, or do not fit together."""


def initialize(config: Config) -> None:
    """Connect the processes of a run if the config asks for several. Call before JAX starts.

    Raises:
        DistributedError: coordinator, count or index is missing, or the processes' configs, code
            or packages differ.
    """
    if config.distributed == "off":
        return
    if not is_initialized():
        _connect(config)
    options = configuration.to_json(config).items()
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    check_alike(
        {f"--{name.replace('_', '-')}": value for name, value in options if name not in PER_PROCESS}
        | {name: importlib.metadata.version(name) for name in packages}
        | {"source files": _digest_of_sources()},
    )


def _connect(config: Config) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"{flag}={value}" for flag, value in _XLA_FLAGS.items() if flag not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing])
    # JAX would install its own handler of SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    if config.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        # Concurrent executables could run their collectives in different orders.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    address, count, index = _place()
    given = None not in (address, count, index)
    me = f"process {index} of {count} with the coordinator {address}" if given else "this process"
    _end_with_a_message(
        f"the processes of this run did not connect within {CONNECT_SECONDS} s. This is {me}. "
        "Start all processes at the same time, with one JAX_NUM_PROCESSES N, each JAX_PROCESS_ID "
        "of 0 to N - 1 once, and as JAX_COORDINATOR_ADDRESS the host of process 0 and a free port "
        "that every host can reach"
    )
    text = f"{me} waits for the others, at most {CONNECT_SECONDS} s"
    # JAX does not report which processes have connected. The printed lines of the processes show a
    # wrong count or address.
    waiting = threading.Timer(_SAY_SECONDS, print, [text], {"file": sys.stderr, "flush": True})
    waiting.daemon = True
    waiting.start()
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            initialization_timeout=CONNECT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=FINISH_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise DistributedError(f"JAX cannot connect the processes: {error}") from error
    finally:
        waiting.cancel()
    _end_with_a_message(ENDED)
    if _has_all_gpus():
        jax.config.update("jax_cuda_visible_devices", "all")


ENDED = (
    "another process of this run ended or cannot be reached, so this one ended, too. The first "
    "error in the output of all processes is the cause. The same command in every process resumes "
    "from the newest checkpoint"
)


def _host() -> str:
    return socket.gethostname()


def is_initialized() -> bool:
    """Return whether this process is one of several."""
    return jax.distributed.is_initialized()


def _place() -> tuple[str | None, int | None, int | None]:
    """Return coordinator, count and index; None for a value that Slurm or Open MPI determines."""

    def environment(name: str) -> int | None:
        text = os.environ.get(name)
        if text is not None and not text.isdecimal():
            raise DistributedError(f"{name} must be a number, got {text!r}")
        return None if text is None else int(text)

    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    count, index = environment("JAX_NUM_PROCESSES"), environment("JAX_PROCESS_ID")
    scheduled = any(name in os.environ for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK"))
    if None in (address, count, index) and not scheduled:
        raise DistributedError(
            "several processes need JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID; leave them out only under Slurm's srun or Open MPI's mpirun. Found "
            f"{address}, {count} and {index}"
        )
    if count is not None and index is not None and index >= count:
        raise DistributedError(
            f"JAX_PROCESS_ID must be below JAX_NUM_PROCESSES {count}, got {index}"
        )
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        started = environment(name) or 1  # 1: the tasks are started individually
        if count is not None and started not in (1, count):
            raise DistributedError(
                f"JAX_NUM_PROCESSES is {count}, but {name} is {started}: leave out "
                "JAX_NUM_PROCESSES, or give the number of processes that are started"
            )
    return address, count, index


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


def _end_with_a_message(message: str) -> None:
    """Install a handler that prints `message` and exits with code 1 if JAX aborts the process.

    JAX's client calls abort() in its own thread when a process dies. A Python handler would not run
    any more, so the handler is a C function.
    """
    global _on_abort  # prevents garbage collection: C holds a pointer

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def _on_abort(number: int) -> None:
        os.write(2, f"\nerror: {message}\n".encode())
        os._exit(1)

    install = ctypes.CDLL(None).signal
    install.restype, install.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    install(signal.SIGABRT, ctypes.cast(_on_abort, ctypes.c_void_p))


def exchange(value: Any) -> list[Any]:
    """Return the values of all processes, ordered by index. Every process must call this function.

    Args:
        value: JSON.

    Raises:
        DistributedError: the processes have different numbers of devices.
    """
    if not is_initialized():
        return [value]
    count, own, total = jax.process_count(), jax.local_device_count(), jax.device_count()
    if total != count * own:
        raise DistributedError(
            f"expected the same number of devices in all {count} processes, found {own} in process "
            f"{jax.process_index()} on {_host()} and {total} in total"
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
        DistributedError: the values differ. The message has each difference and its processes.
    """
    mine = {"host": _host(), "value": value}
    all_of_them, lines = exchange(mine), []
    for name in dict.fromkeys(name for one in all_of_them for name in one["value"]):
        texts = [str(one["value"].get(name)) for one in all_of_them]
        other = next((i for i, text in enumerate(texts) if text != texts[0]), None)
        if other is not None:
            lines.append(
                f"  {name}: {texts[0]} in process 0 on {all_of_them[0]['host']}, {texts[other]} in "
                f"process {other} on {all_of_them[other]['host']}"
            )
    if lines:
        lines[10:] = [f"  … and {len(lines) - 10} more"] if len(lines) > 10 else []
        raise DistributedError(
            "the processes of this run differ:\n" + "\n".join(lines) + "\nStart every process with "
            "the same command, code, packages and data; only JAX_PROCESS_ID differs."
        )


def _digest_of_sources() -> str:
    folders = [Path(str(package.__file__)).parent for package in (gptjax, pallas_kernels)]
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def check_inputs(devices: list[jax.Device], dataset: Dataset) -> list[str]:
    """Compare devices and data of all processes; return one line per process with host and devices.

    Args:
        devices: the devices of all processes.

    Raises:
        DistributedError: the processes have different numbers or kinds of devices, or different
            data.
    """
    mine = local(devices)
    kinds = f"{len(mine)} × {', '.join(sorted({device.device_kind for device in mine}))}"
    shards = dataset.fingerprint() if is_initialized() else {"train": {}, "val": {}, "samples": {}}
    tokens = shards["train"] | shards["val"]
    check_alike(
        {"devices": kinds, "number of shards": len(tokens)}
        | {
            name: f"{tokens[name]} tokens, {digest}" if name in tokens else digest
            for name, digest in shards["samples"].items()
        },
    )
    return [f"{i} on {host}: {kinds}" for i, host in enumerate(exchange(_host()))]


def local(devices: list[jax.Device]) -> list[jax.Device]:
    """Return the devices of this process."""
    return [device for device in devices if device.process_index == jax.process_index()]


def on_one_device(tree: PyTree) -> PyTree:
    """Return the copies of replicated arrays on one device of this process."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def finish() -> None:
    """Wait until all processes have finished, and disconnect them."""
    if is_initialized():
        jax.distributed.shutdown()
