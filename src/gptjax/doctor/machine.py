"""Facts of this machine: packages, driver, GPUs and their memory."""

import csv
import ctypes
import dataclasses
import importlib.metadata
import os
import subprocess
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from jax import Device


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
    """
    import jax

    try:
        devices = jax.devices("gpu")
    except AssertionError as error:  # if JAX_PLATFORMS names platforms that do not work
        raise RuntimeError("no platform of JAX_PLATFORMS works") from error
    return [device for device in devices if device.platform == "gpu"]
