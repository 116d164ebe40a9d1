"""Compiling the step ahead of time: kept on disk, counted as hit or miss, and refused when it will not fit."""

import time
from collections.abc import Callable
from pathlib import Path

import jax

from gptjax.config import Config, ConfigError
from gptjax.training.memory import GIB, available_bytes, needed_bytes


class Compiler:
    """Compiles programs, with a cache on disk.

    Args:
        cache: folder of the cache, made if absent; None for no cache.

    Attributes:
        seconds: spent so far.
        hits, misses: programs found in the cache, and not.
    """

    def __init__(self, cache: Path | None):
        self.seconds, self.hits, self.misses = 0.0, 0, 0
        self._cache = cache
        if cache is not None:
            jax.config.update("jax_compilation_cache_dir", str(cache.absolute()))
            jax.monitoring.register_event_listener(self._count)

    def _count(self, event: str, **_: object) -> None:
        self.hits += event == "/jax/compilation_cache/cache_hits"
        self.misses += event == "/jax/compilation_cache/cache_misses"

    def __call__(self, lowerable: jax.stages.Wrapped, *abstract: object) -> jax.stages.Compiled:
        """`lowerable` compiled for arguments of these shapes, dtypes and shardings."""
        started = time.perf_counter()
        compiled = lowerable.lower(*abstract).compile()
        self.seconds += time.perf_counter() - started
        return compiled

    def __str__(self) -> str:
        if self._cache is None:
            found = "no cache"
        else:
            found = f"{'hit' if self.hits and not self.misses else 'miss'}, cache {self._cache}"
        return f"{self.seconds:.1f} s ({found})"


def compile_to_fit(
    compile_step: Callable[[int], jax.stages.Compiled], config: Config, device: jax.Device
) -> jax.stages.Compiled:
    """The compiled training step, if what it needs fits into the device's memory.

    Args:
        compile_step: compiles the step for a micro-batch of so many sequences.

    Raises:
        ConfigError: it does not fit; the message names the largest micro-batch that would.
    """
    available = available_bytes(device)
    compiled = compile_step(config.micro_batch)
    needed = needed_bytes(compiled)
    if needed <= available:
        return compiled
    message = (
        f"a step with --micro-batch {config.micro_batch} needs {needed / GIB:.1f} GiB on each device, "
        f"and {device.device_kind} has {available / GIB:.1f} GiB; nothing was allocated. "
    )
    for smaller in range(config.micro_batch - 1, 0, -1):
        # Memory grows with the micro-batch, so one that needs far too much in proportion is not worth compiling.
        if config.micro_batch % smaller or needed * smaller / config.micro_batch > 2 * available:
            continue
        if (fits := needed_bytes(compile_step(smaller))) <= available:
            raise ConfigError(message + f"--micro-batch {smaller} fits, with {fits / GIB:.1f} GiB.")
    raise ConfigError(
        message + "No micro-batch of this model and sequence length fits; "
        "--model.recompute block and --model.loss-chunk 1024 need less, as does a smaller model."
    )
