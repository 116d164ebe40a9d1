"""Facts of this machine: packages, driver and GPUs."""

import ctypes
import importlib.metadata
import os
import subprocess

from packaging.requirements import Requirement


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements(package: str, extra: str = "") -> list[Requirement]:
    """Return the requirements of a package, or of one of its extras alone; none if the package is
    not installed."""
    if installed(package) is None:
        return []
    parsed = map(Requirement, importlib.metadata.requires(package) or [])

    def applies(requirement: Requirement, extra: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})

    return [r for r in parsed if applies(r, extra) and not (extra and applies(r, ""))]


def plugins() -> list[int]:
    """Return the CUDA versions of the installed plugins of JAX, the newest first."""
    return [n for n in (13, 12) if installed(f"jax-cuda{n}-plugin") is not None]


def cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports, or None without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except OSError:
        return None
    return version.value // 1000, version.value % 1000 // 10


def gpus() -> list[int]:
    """Return the indices of the GPUs in CUDA_VISIBLE_DEVICES; an empty list without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = [line.split(", ") for line in done.stdout.splitlines()]
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "GPU-").split(",")  # GPU- begins every UUID
    return [
        int(index)
        for index, uuid in found
        if any(name and (name == index or uuid.startswith(name)) for name in map(str.strip, names))
    ]
