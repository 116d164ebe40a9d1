"""Facts of this machine: packages, driver and GPUs."""

import ctypes
import importlib.metadata
import os
import platform
import subprocess

from packaging.requirements import Requirement

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin"),
    *("jax-triton", "triton", "flax", "optax", "orbax-checkpoint", "grain", "gptjax"),
)


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that run gptjax."""
    return {"python": platform.python_version()} | {name: installed(name) for name in PACKAGES}


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
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "GPU-").split(",")  # GPU- begins every UUID
    return [
        int(index)
        for index, uuid in _nvidia_smi("index", "uuid")
        if any(name and (name == index or uuid.startswith(name)) for name in map(str.strip, names))
    ]


def cards() -> list[dict[str, str]]:
    """Return the name, driver and memory of every GPU; an empty list without nvidia-smi."""
    fields = ("index", "name", "driver_version", "memory.total")
    return [dict(zip(fields, row, strict=False)) for row in _nvidia_smi(*fields)]


def jax_devices() -> list[str]:
    """Return the devices that JAX uses; an empty list if JAX fails, as the check `gpus` shows."""
    try:
        import jax

        return [f"{device.platform} {device.id}: {device.device_kind}" for device in jax.devices()]
    except Exception:  # any error of a broken installation
        return []


def _nvidia_smi(*fields: str) -> list[list[str]]:
    """Return these fields of every GPU; an empty list without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.split(", ") for line in done.stdout.splitlines()]
