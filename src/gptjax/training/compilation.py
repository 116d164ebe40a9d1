"""Compiling the step ahead of time: kept on disk, counted as hit or miss, and refused when it will not fit."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from gptjax.config import Config, ConfigError
from gptjax.training.memory import GIB, available_bytes, needed_bytes


def compiler_options() -> dict[str, bool]:
    """What XLA is told beside its own defaults for a step on the default device.

    On a GPU it would also write every product in Triton and time the variants: on an H200 that was most of the 78 s that GPT-2 124M's
    step took to compile in bf16, and what it chose for the products with a bias took 0.93 ms a layer, cuBLASLt's epilogue 0.82.
    """
    return {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else {}


class Compiler:
    """Compiles programs, several at once, with a cache on disk for these and all that JAX compiles by itself.

    Args:
        cache: folder of the cache, made if absent; None for no cache.

    Attributes:
        programs: one for each compiled so far: its "name", and the seconds for "lower" (tracing, and what Triton and Mosaic
            do to their kernels; the cache does not spare it) and "compile" (or reading the cache).
    """

    def __init__(self, cache: Path | None):
        self.programs: list[dict[str, str | float]] = []
        self._cache, self._events = cache, []
        self._began = self._ended = None
        self._threads = ThreadPoolExecutor(max_workers=4)
        if cache is not None:
            jax.config.update("jax_compilation_cache_dir", str(cache.absolute()))
            # By default what compiles in less than a second is not kept: the dozens of programs that make the first state.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            # Appending is safe from several threads, counting is not.
            jax.monitoring.register_event_listener(lambda event, **_: self._events.append(event))

    @property
    def seconds(self) -> float:
        """From the first program's start to the end of the last that was waited for."""
        return 0.0 if self._ended is None else self._ended - self._began

    @property
    def hits(self) -> int:
        """Programs found in the cache, JAX's own among them."""
        return self._events.count("/jax/compilation_cache/cache_hits")

    @property
    def misses(self) -> int:
        """Programs not found in it."""
        return self._events.count("/jax/compilation_cache/cache_misses")

    def start(self, lowerable: jax.stages.Wrapped, *abstract: object) -> Callable[[], jax.stages.Compiled]:
        """Lowers `lowerable` for arguments of these shapes, dtypes and shardings, and begins to compile it in a thread.

        Returns:
            A function that waits for the compiled program and returns it.
        """
        started = time.perf_counter()
        self._began = self._began or started
        lowered = lowerable.lower(*abstract)
        took = {"name": lowerable.__name__, "lower": time.perf_counter() - started}

        def compile_it() -> jax.stages.Compiled:
            started = time.perf_counter()
            compiled = lowered.compile(compiler_options=compiler_options())
            self.programs.append(took | {"compile": time.perf_counter() - started})
            return compiled

        future = self._threads.submit(compile_it)

        def wait() -> jax.stages.Compiled:
            compiled = future.result()
            self._ended = time.perf_counter()
            return compiled

        return wait

    def __call__(self, lowerable: jax.stages.Wrapped, *abstract: object) -> jax.stages.Compiled:
        """`start` and wait for it."""
        return self.start(lowerable, *abstract)()

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
