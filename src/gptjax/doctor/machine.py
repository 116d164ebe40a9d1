"""Facts of this machine: packages, driver, GPUs, their memory and their measured speed."""

import csv
import ctypes
import dataclasses
import importlib.metadata
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from jax import Device

COPY_BYTES = 2**30
MATMUL_SIDE = 8192
ROUNDS, CALLS = 5, 10


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi reports it, before JAX allocates memory."""

    index: int
    uuid: str
    name: str
    total_mib: int
    used_mib: int
    driver: str
    processes: tuple[str, ...] = ()
    """Processes that use the GPU. In a container, processes outside the container are not
    listed."""


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements(package: str, extra: str = "") -> list[Requirement]:
    """Return the requirements of an installed package, or of one of its extras alone.

    A package that is not installed requires nothing.
    """
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []

    def applies(requirement: Requirement, extra: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})

    parsed = [Requirement(line) for line in lines]
    return [r for r in parsed if applies(r, extra) and not (extra and applies(r, ""))]


def requirement(package: str, needed: str, extra: str = "") -> Requirement | None:
    """Return a package's requirement of the package `needed`, or None."""
    name = canonicalize_name(needed)
    found = [r for r in requirements(package, extra) if canonicalize_name(r.name) == name]
    return found[0] if found else None


def cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports, or None without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def gpus() -> list[Gpu]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES; an empty list without nvidia-smi."""
    processes: dict[str, list[str]] = {}
    for uuid, pid, name, mib in _nvidia_smi("compute-apps=gpu_uuid,pid,process_name,used_memory"):
        processes.setdefault(uuid, []).append(f"{name}, pid {pid}, {mib} MiB")
    found = []
    for row in _nvidia_smi("gpu=index,uuid,name,memory.total,memory.used,driver_version"):
        index, uuid, name, total, used, driver = row
        if total.isdigit() and used.isdigit():  # not "[N/A]", the value of a lost GPU
            own = tuple(processes.get(uuid, ()))
            found.append(Gpu(int(index), uuid, name, int(total), int(used), driver, own))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    names = [name.strip() for name in visible.split(",")]
    return [
        gpu
        for gpu in found
        if any(name and (name == str(gpu.index) or gpu.uuid.startswith(name)) for name in names)
    ]


def _nvidia_smi(query: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    columns = query.count(",") + 1
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [row for row in rows if done.returncode == 0 and len(row) == columns]


def jax_gpus() -> "list[Device]":
    """Return the NVIDIA GPUs that JAX uses.

    Raises:
        RuntimeError: JAX has no GPU.
        ImportError: JAX cannot be imported.
    """
    import jax

    try:
        devices = jax.devices("gpu")
    except AssertionError as error:  # if JAX_PLATFORMS names platforms that do not work
        raise RuntimeError("no platform of JAX_PLATFORMS works") from error
    return [device for device in devices if device.platform == "gpu"]


def copy_rate(device: "Device") -> float:
    """Return the bandwidth of a copy on the device in bytes/s; reads and writes both count."""
    import jax
    import jax.numpy as jnp

    with jax.default_device(device):
        x = jnp.zeros(COPY_BYTES // 4, jnp.float32)
        return 2 * COPY_BYTES / _seconds(jax.jit(jnp.copy), x)


def matmul_rate(device: "Device") -> float:
    """Return the rate of a bf16 matmul in FLOP/s."""
    import jax
    import jax.numpy as jnp

    with jax.default_device(device):
        # A matmul of zeros would be faster: a GPU's power depends on the number of bit flips.
        x = jax.random.normal(jax.random.key(0), (MATMUL_SIDE, MATMUL_SIDE), jnp.bfloat16)
        return 2 * MATMUL_SIDE**3 / _seconds(jax.jit(jnp.matmul), x, x)


def _seconds(f: Callable, *arrays) -> float:
    """Return the median time of a call on the device over several rounds, with a pause before
    each."""
    f(*arrays).block_until_ready()
    rounds = []
    for _ in range(ROUNDS):
        time.sleep(0.05)
        started = time.perf_counter()
        for _ in range(CALLS):
            out = f(*arrays)
        out.block_until_ready()
        rounds.append((time.perf_counter() - started) / CALLS)
    return statistics.median(rounds)
