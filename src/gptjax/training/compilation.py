"""Compiling the step ahead of time: kept on disk, counted as hit or miss, and refused when it will
not fit."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax._src import config as jax_config

from gptjax.config import Config, ConfigError
from gptjax.training.memory import GIB, available_bytes, needed_bytes
from gptjax.training.programs import NoKey, Programs, check_private


def compiler_options() -> dict[str, bool]:
    """What XLA is told beside its own defaults for a step on the default device.

    On a GPU it would also write every product in Triton and time the variants: on an H200 that was
    most of the 78 s that GPT-2 124M's step took to compile in bf16, and what it chose for the
    products with a bias took 0.93 ms a layer, cuBLASLt's epilogue 0.82.
    """
    return {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else {}


class Compiler:
    """Compiles programs, several at once, and keeps them on disk.

    They are kept whole (`gptjax.training.programs`), and found again before anything is traced. All
    that JAX compiles by itself, such as what draws samples, JAX keeps by its lowered text, and so
    these programs where `made_from` is not told.

    Args:
        cache: folder of both, created with mode 700 if absent; None to keep nothing.
        made_from: all values that the functions close over, or that their `jax.jit` options depend
            on; JSON.

    Raises:
        ConfigError: `cache` is not a folder, or another user owns or can write it or a file in it.

    Attributes:
        programs: one for each compiled so far: its "name"; where it was found: "whole", "text" (in
            JAX's cache) or "no"; and the seconds for "lower" (tracing, and what Triton and Mosaic
            do to their kernels; 0 where it was found whole) and "compile" (or reading it), keeping
            it included.
        notes: why a program was not found or kept whole, where it should have been; why there is no
            cache, if `cache` cannot be created.
    """

    def __init__(self, cache: Path | None, made_from: Any = None):
        self.programs: list[dict[str, str | float]] = []
        self.notes: list[str] = []
        if cache is not None:
            try:
                check_private(cache)
            except OSError as error:
                self.notes.append(f"no cache: {_first_line(error)}; choose --compilation-cache")
                cache = None
        self._cache, self._events, self._kept = cache, [], None
        self._began = self._ended = None
        self._threads = ThreadPoolExecutor(max_workers=4)
        if cache is not None:
            jax.config.update("jax_compilation_cache_dir", str(cache.absolute()))
            # By default what compiles in less than a second is not kept: dozens of small programs.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            # Appending is safe from several threads, counting is not. JAX calls the listener in the
            # thread that compiles.
            jax.monitoring.register_event_listener(
                lambda event, **_: self._record(event.rpartition("/")[2])
            )
            # Several processes compile a program together, and one that found it would leave the
            # others waiting.
            if made_from is not None and jax.process_count() == 1:
                self._kept = Programs(cache / "programs", made_from)

    @property
    def seconds(self) -> float:
        """From the first program's start to the end of the last that was waited for."""
        return 0.0 if self._ended is None else self._ended - self._began

    @property
    def hits(self) -> int:
        """Programs found on disk, those that JAX compiles by itself among them."""
        return [event for event, _ in self._events].count("cache_hits")

    @property
    def misses(self) -> int:
        """Programs not found there."""
        return [event for event, _ in self._events].count("cache_misses")

    def _record(self, event: str) -> None:
        self._events.append((event, threading.get_ident()))

    def start(
        self, lowerable: jax.stages.Wrapped, *abstract: object
    ) -> Callable[[], jax.stages.Compiled]:
        """Begins to read, in a thread, the program for arguments of these shapes, dtypes and
        shardings. Where it is not kept, lowers `lowerable` and begins to compile it in a thread.

        Returns:
            A function that waits for the compiled program and returns it.
        """
        self._began = self._began or time.perf_counter()
        key = None
        if self._kept:
            try:
                key = self._kept.key(lowerable, abstract, compiler_options())
            except NoKey as error:
                self.notes.append(f"{lowerable.__name__} is not kept whole: {error}")
        kept = key is not None and self._kept.has(key)
        future = (
            self._threads.submit(self._read, lowerable, key)
            if kept
            else self._compile(lowerable, abstract, key)
        )

        def wait() -> jax.stages.Compiled:
            compiled = future.result()
            if compiled is None:
                # Not in the thread that read: what `with` statements set in this one, such as a
                # matmul precision, is traced too.
                compiled = self._compile(lowerable, abstract, key).result()
            self._ended = time.perf_counter()
            return compiled

        return wait

    def _read(self, lowerable: jax.stages.Wrapped, key: str) -> jax.stages.Compiled | None:
        """The kept program; None where it cannot be read, which is noted."""
        started, name = time.perf_counter(), lowerable.__name__
        try:
            compiled = self._kept.read(key)
        except Exception as error:
            self.notes.append(
                f"{name} is compiled again, {self._kept.folder / key} cannot be read: "
                f"{_first_line(error)}"
            )
            return None
        self._record("cache_hits")
        self.programs.append(
            {"name": name, "found": "whole", "lower": 0.0, "compile": time.perf_counter() - started}
        )
        return compiled

    def _compile(self, lowerable: jax.stages.Wrapped, abstract: tuple, key: str | None) -> Future:
        """Lowers in this thread, compiles and keeps in another."""
        started, name = time.perf_counter(), lowerable.__name__
        lowered = lowerable.lower(*abstract)
        lowering = time.perf_counter() - started

        def compile_it() -> jax.stages.Compiled:
            started, before = time.perf_counter(), len(self._events)
            # JAX's cache shall not have what is kept whole: a program that XLA has read it cannot
            # write again (on the CPU it leaves out functions), so one that was found there could
            # not be kept here. JAX shows no other way to set this for one thread.
            writes_from = 0.0 if key is None else math.inf
            with jax_config.persistent_cache_min_compile_time_secs(writes_from):
                compiled = lowered.compile(compiler_options=compiler_options())
            of_jax = [
                event for event, thread in self._events[before:] if thread == threading.get_ident()
            ]
            found = "text" if "cache_hits" in of_jax else "no"
            if key is not None:
                self._keep(key, name, compiled, found)
                if found == "no":
                    self._record("cache_misses")  # JAX counts what it writes
            took = {"lower": lowering, "compile": time.perf_counter() - started}
            self.programs.append({"name": name, "found": found} | took)
            return compiled

        return self._threads.submit(compile_it)

    def _keep(self, key: str, name: str, compiled: jax.stages.Compiled, found: str) -> None:
        try:
            if found != "no":
                raise ValueError(
                    "it came from JAX's cache, and XLA cannot write it again; delete "
                    f"{self._cache} once"
                )
            self._kept.keep(key, compiled)
        except Exception as error:
            self.notes.append(f"{name} is not kept whole: {_first_line(error)}")

    def __call__(self, lowerable: jax.stages.Wrapped, *abstract: object) -> jax.stages.Compiled:
        """`start` and wait for it."""
        return self.start(lowerable, *abstract)()

    def __str__(self) -> str:
        if self._cache is None:
            return f"{self.seconds:.1f} s (no cache)"
        whole = [program["found"] for program in self.programs].count("whole")
        whole = f"{whole} of {len(self.programs)} programs found whole, " if self._kept else ""
        return f"{self.seconds:.1f} s ({whole}{'hit' if self.hits and not self.misses else 'miss'}, cache {self._cache})"


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
        f"a step with --micro-batch {config.micro_batch} needs {needed / GIB:.1f} GiB on each "
        "device, "
        f"and {device.device_kind} has {available / GIB:.1f} GiB; nothing was allocated. "
    )
    chunk = config.model.loss_chunk or 1
    for smaller in range(config.micro_batch - 1, 0, -1):
        # Memory grows with the micro-batch, so one that needs far too much in proportion is not
        # worth compiling.
        if config.micro_batch % smaller or needed * smaller / config.micro_batch > 2 * available:
            continue
        if smaller * config.sequence_length % chunk:  # this config would be refused
            continue
        if (fits := needed_bytes(compile_step(smaller))) <= available:
            raise ConfigError(message + f"--micro-batch {smaller} fits, with {fits / GIB:.1f} GiB.")
    raise ConfigError(
        message + "No micro-batch of this model and sequence length fits; "
        "--model.recompute block and --model.loss-chunk 1024 need less, as does a smaller model."
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
