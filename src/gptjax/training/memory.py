"""How much device memory a compiled program needs, told before any of it is allocated."""

import os

import jax

GIB = 2**30


def needed_bytes(compiled: jax.stages.Compiled) -> int:
    """Arguments, results and temporaries of a compiled program on one device; donated results count
    once."""
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.generated_code_size_in_bytes
    )


def available_bytes(device: jax.Device) -> int:
    """What JAX may allocate on a device: its own limit on a GPU, the machine's memory on a CPU."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_bytes(device: jax.Device) -> int | None:
    """The most that was allocated on a device so far, or None where it is not counted (CPU)."""
    stats = device.memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None
