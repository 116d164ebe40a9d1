"""Finding the GPU, or saying plainly why there is none."""

import importlib.util
import os
from pathlib import Path

import jax

PIP_LINE = "pip install -e '.[cuda13]'"


class DeviceError(RuntimeError):
    """The device that was asked for cannot be used."""


def select(kind: str) -> tuple[list[jax.Device], str | None]:
    """Makes JAX use the devices of a kind. Has to come before anything else uses JAX.

    Args:
        kind: "gpu": all NVIDIA GPUs; "cpu": the CPU; "auto": GPUs where JAX sees some, else the
            CPU.

    Returns:
        The devices, and a sentence for the user where a GPU is left idle.

    Raises:
        DeviceError: "gpu" was asked for and JAX has none; the message says what is missing.
    """
    if kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return jax.devices(), None
    try:
        gpus = jax.devices("gpu")
    except RuntimeError as error:
        missing = _what_is_missing(str(error))
        if kind == "gpu":
            raise DeviceError(
                f"{missing} To train on the CPU all the same, give --device cpu."
            ) from error
        jax.config.update("jax_platforms", "cpu")
        return jax.devices("cpu"), missing if has_nvidia_driver() else None
    return gpus, None


def make_deterministic() -> None:
    """Asks XLA for operations that repeat bit for bit on a GPU. Has to come before JAX starts its
    devices."""
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"


def _what_is_missing(jax_error: str) -> str:
    if not has_nvidia_driver():
        return (
            f"This run needs an NVIDIA GPU, and this machine shows none. "
            f"On one that has a GPU: {PIP_LINE}."
        )
    if not has_cuda_plugin():
        return f"An NVIDIA GPU is here, but this JAX has no CUDA plugin: {PIP_LINE}."
    return f"An NVIDIA GPU and JAX's CUDA plugin are here, but JAX cannot start it: {jax_error}."


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()


def has_cuda_plugin() -> bool:
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (13, 12))
