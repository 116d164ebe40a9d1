"""Device memory: the need of an executable before allocation, and memory in use."""

import os

import jax

GIB = 2**30


def needed_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the bytes of arguments, results, temporaries and code of an executable on one device.

    A result in the buffer of a donated argument counts once.
    """
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.generated_code_size_in_bytes
    )


def available_bytes(device: jax.Device) -> int:
    """Return the bytes that JAX may allocate: JAX's limit on a GPU, the host's memory on a CPU."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_bytes(device: jax.Device) -> int | None:
    """Return the peak of allocated bytes on a device so far, or None on a CPU."""
    stats = device.memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


def is_full(error: jax.errors.JaxRuntimeError) -> bool:
    """Return whether an error of JAX says that a device's memory is full."""
    return "RESOURCE_EXHAUSTED" in str(error)


def of_step(compiled: jax.stages.Compiled, device: jax.Device) -> str:
    """Return the need of a step and the available memory as text."""
    needed, available = needed_bytes(compiled), available_bytes(device)
    return f"{needed / GIB:.2f} GiB for a step, of {available / GIB:.1f} GiB"
