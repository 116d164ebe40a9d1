"""Selection of JAX's devices, with an error that says why there is no GPU."""

import importlib.util
import os
import threading
from pathlib import Path

import jax
import numpy as np

from gptjax.terminal import UserError

PIP_LINE = "pip install 'gptjax[cuda13]'"


class DeviceError(UserError, RuntimeError):
    """The requested device cannot be used."""


def select(kind: str) -> tuple[list[jax.Device], str | None]:
    """Select the devices of JAX. Call this function before any other use of JAX.

    Args:
        kind: "gpu": all NVIDIA GPUs; "cpu": the CPU; "auto": all GPUs if JAX finds any, else the
            CPU.

    Returns:
        The devices, and a sentence for the user if the machine has a GPU that is not used.

    Raises:
        DeviceError: `kind` is "gpu" and JAX has no GPU, or no platform of JAX_PLATFORMS works. The
            message says what is missing.
    """
    if kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return jax.devices(), None
    try:
        gpus = jax.devices("gpu")
    except AssertionError as error:  # jax's, if no platform of JAX_PLATFORMS works
        named = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}"
        missing = _missing_part(f"no platform of {named} works")
        raise DeviceError(f"{named}: {missing} Without a GPU, unset JAX_PLATFORMS.") from error
    except RuntimeError as error:
        missing = _missing_part(str(error))
        if kind == "gpu":
            raise DeviceError(f"{missing} To train on the CPU, use --device cpu.") from error
        jax.config.update("jax_platforms", "cpu")
        return jax.devices("cpu"), missing if has_nvidia_driver() else None
    return gpus, None


def reserve_memory(devices: list[jax.Device]) -> None:
    """Start threads in which JAX reserves its share of the devices' memory, and return at once.

    JAX reserves the memory with the first array. On an H200, the reservation takes 1.7 s, and
    tracing can overlap with it.
    """
    for device in devices:
        if device.platform == "gpu" and device.process_index == jax.process_index():
            threading.Thread(
                target=jax.device_put, args=(np.zeros((), np.int32), device), daemon=True
            ).start()


def make_deterministic() -> None:
    """Make XLA's operations on a GPU deterministic. Call this function before JAX starts."""
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"


def _missing_part(jax_error: str) -> str:
    if not has_nvidia_driver():
        return (
            f"This run needs an NVIDIA GPU, and this machine has none. "
            f"On a machine with a GPU: {PIP_LINE}."
        )
    if not has_cuda_plugin():
        return f"This machine has an NVIDIA GPU, but JAX has no CUDA plugin: {PIP_LINE}."
    return (
        "This machine has an NVIDIA GPU and JAX's CUDA plugin, but JAX cannot use the GPU: "
        f"{jax_error}."
    )


def has_nvidia_driver() -> bool:
    """Return whether the machine has NVIDIA's driver."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()


def has_cuda_plugin() -> bool:
    """Return whether a CUDA plugin of JAX is installed."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (13, 12))
