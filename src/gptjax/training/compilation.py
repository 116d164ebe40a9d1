"""Ahead-of-time compilation with a cache on disk, and a check that the step fits into memory."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax._src import config as jax_config

from gptjax import distributed
from gptjax.config import Config, ConfigError
from gptjax.stages import Timeline
from gptjax.training.executable_cache import ExecutableCache, NoKey, check_private
from gptjax.training.memory import GIB, available_bytes, needed_bytes


def compiler_options() -> dict[str, bool]:
    """Return XLA options for a step on the default device, in addition to XLA's defaults.

    By default, XLA also generates Triton variants of every matmul and times them. On an H200, this
    autotuning takes most of 78 s of compilation of GPT-2 124M's step in bf16. The selected variants
    of matmuls with a bias take 0.93 ms per layer; cuBLASLt's epilogue takes 0.82 ms.
    """
    return {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else {}


class Compiler:
    """Compile executables concurrently and cache them on disk.

    JAX's own cache looks up an executable by its lowered text. With `inputs`, an `ExecutableCache`
    stores the executables of `start` instead, and looks them up before tracing.

    Args:
        cache: folder of the caches, created with mode 700 if absent; None for no cache.
        inputs: all values that the functions close over, or that their `jax.jit` options depend on;
            JSON. None for JAX's cache alone.

    Raises:
        ConfigError: `cache` is not a folder, or another user owns or can write to the folder or a
            file in it.

    Attributes:
        executables: one dict per executable: "name"; "source": "executable cache", "JAX's cache" or
            "compiled"; and the seconds of "lower" (tracing, and the compilers of Triton and Mosaic;
            0 for a hit in the executable cache) and "compile" (or loading), including storing.
        notes: the reason why an executable was not loaded or stored; the reason why there is no
            cache, if `cache` cannot be created.
    """

    def __init__(self, cache: Path | None, inputs: Any = None):
        self.executables: list[dict[str, str | float]] = []
        self.notes: list[str] = []
        if cache is not None:
            try:
                check_private(cache)
            except OSError as error:
                self.notes.append(f"no cache: {_first_line(error)}; choose --compilation-cache")
                cache = None
        self._cache, self._events, self._stored = cache, [], None
        self._began = self._ended = None
        self._threads = ThreadPoolExecutor(max_workers=4)
        if cache is not None:
            # Several processes compile an executable together: with a cache hit in one process, the
            # other processes would wait forever.
            if inputs is not None and jax.process_count() == 1:
                self._stored = ExecutableCache(cache / "executables", inputs)
            # XLA cannot serialize a loaded executable (on a CPU, functions are missing). Hence an
            # executable from JAX's cache could not be stored in the executable cache.
            of_jax = cache / "jax" if self._stored else cache
            jax.config.update("jax_compilation_cache_dir", str(of_jax.absolute()))
            # By default, JAX does not store the dozens of executables that compile in less than a
            # second.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            # Appending to a list is thread-safe, incrementing a counter is not. JAX calls the
            # listener in the thread that compiles.
            jax.monitoring.register_event_listener(
                lambda event, **_: self._record(event.rpartition("/")[2])
            )

    @property
    def seconds(self) -> float:
        """Seconds from the first call of `start` to the end of the last wait."""
        return 0.0 if self._ended is None else self._ended - self._began

    @property
    def hits(self) -> int:
        """Number of cache hits, including executables that JAX compiles by itself."""
        return [event for event, _ in self._events].count("cache_hits")

    @property
    def misses(self) -> int:
        """Number of cache misses, including executables that JAX compiles by itself."""
        return [event for event, _ in self._events].count("cache_misses")

    def _record(self, event: str) -> None:
        self._events.append((event, threading.get_ident()))

    def start(
        self, lowerable: jax.stages.Wrapped, *abstract: object, inputs: Any = None
    ) -> Callable[[], jax.stages.Compiled]:
        """Start to load or compile the executable for these shapes, dtypes and shardings.

        A cached executable is loaded in a thread. Otherwise `lowerable` is lowered in this thread
        and compiled in another.

        Args:
            inputs: values that only this function closes over; JSON.

        Returns:
            A function that waits for the executable and returns it.
        """
        self._began = self._began or time.perf_counter()
        key = None
        if self._stored:
            try:
                key = self._stored.key(lowerable, abstract, compiler_options(), inputs)
            except NoKey as error:
                self.notes.append(f"{lowerable.__name__} is not stored: {error}")
        hit = key is not None and key in self._stored
        future = (
            self._threads.submit(self._read, lowerable, key)
            if hit
            else self._compile(lowerable, abstract, key)
        )

        def wait() -> jax.stages.Compiled:
            compiled = future.result()
            if compiled is None:
                # Lower in this thread: tracing depends on this thread's `with` statements, such as
                # a matmul precision.
                compiled = self._compile(lowerable, abstract, key).result()
            self._ended = time.perf_counter()
            return compiled

        return wait

    def _read(self, lowerable: jax.stages.Wrapped, key: str) -> jax.stages.Compiled | None:
        """Load the executable; if this fails, add a note and return None."""
        started, name = time.perf_counter(), lowerable.__name__
        try:
            compiled = self._stored.load(key)
        except Exception as error:
            self.notes.append(
                f"{name} is compiled again, {self._stored.folder / key} cannot be read: "
                f"{_first_line(error)}"
            )
            return None
        self._record("cache_hits")
        seconds = {"lower": 0.0, "compile": time.perf_counter() - started}
        self.executables.append({"name": name, "source": "executable cache"} | seconds)
        return compiled

    def _compile(self, lowerable: jax.stages.Wrapped, abstract: tuple, key: str | None) -> Future:
        """Lower in this thread; compile and store in another."""
        started, name = time.perf_counter(), lowerable.__name__
        lowered = lowerable.lower(*abstract)
        lowering = time.perf_counter() - started

        def compile_it() -> jax.stages.Compiled:
            started, before = time.perf_counter(), len(self._events)
            # An executable is stored in one cache only, see `__init__`. JAX has no other way to set
            # this option for one thread.
            writes_from = 0.0 if key is None else math.inf
            with jax_config.persistent_cache_min_compile_time_secs(writes_from):
                compiled = lowered.compile(compiler_options=compiler_options())
            of_jax = [
                event for event, thread in self._events[before:] if thread == threading.get_ident()
            ]
            source = "JAX's cache" if "cache_hits" in of_jax else "compiled"
            if key is not None:
                self._store(key, name, compiled)
                if source == "compiled":
                    self._record("cache_misses")  # JAX counts misses of its own cache
            seconds = {"lower": lowering, "compile": time.perf_counter() - started}
            self.executables.append({"name": name, "source": source} | seconds)
            return compiled

        return self._threads.submit(compile_it)

    def _store(self, key: str, name: str, compiled: jax.stages.Compiled) -> None:
        try:
            self._stored.store(key, compiled)
        except Exception as error:
            self.notes.append(f"{name} is not stored: {_first_line(error)}")

    def __call__(self, lowerable: jax.stages.Wrapped, *abstract: object) -> jax.stages.Compiled:
        """Call `start` and wait for the executable."""
        return self.start(lowerable, *abstract)()

    def __str__(self) -> str:
        if self._cache is None:
            return f"{self.seconds:.1f} s (no cache)"
        outcome = "hit" if self.hits and not self.misses else "miss"
        if self._stored:
            sources = [executable["source"] for executable in self.executables]
            hits = f"{sources.count('executable cache')} of {len(sources)}"
            outcome = f"{hits} from the executable cache, {outcome}"
        return f"{self.seconds:.1f} s ({outcome}, cache {self._cache})"


def compile_to_fit(
    compile_step: Callable[[int], jax.stages.Compiled], config: Config, device: jax.Device
) -> jax.stages.Compiled:
    """Compile the training step, and raise an error if it does not fit into the device's memory.

    Args:
        compile_step: compiles the step for a micro-batch of the given number of sequences.

    Raises:
        ConfigError: the step does not fit; the message names the largest micro-batch that does.
    """
    available = available_bytes(device)
    compiled = compile_step(config.micro_batch)
    needed = needed_bytes(compiled)
    if needed <= available:
        return compiled
    message = (
        f"a step with --micro-batch {config.micro_batch} needs {needed / GIB:.1f} GiB on each "
        "device, "
        f"and {device.device_kind} has {available / GIB:.1f} GiB. "
    )
    chunk = config.model.loss_chunk or 1
    for smaller in range(config.micro_batch - 1, 0, -1):
        # Memory grows with the micro-batch: skip a micro-batch whose proportional need is far too
        # large.
        if config.micro_batch % smaller or needed * smaller / config.micro_batch > 2 * available:
            continue
        if smaller * config.sequence_length % chunk:  # `Config` refuses such a chunk
            continue
        if (fits := needed_bytes(compile_step(smaller))) <= available:
            raise ConfigError(message + f"--micro-batch {smaller} fits, with {fits / GIB:.1f} GiB")
    raise ConfigError(
        message + "No micro-batch of this model and sequence length fits; "
        "--model.recompute block and --model.loss-chunk 1024 need less, as does a smaller model"
    )


class StagedStep:
    """The compiled training and validation steps of each stage.

    Later stages are compiled one after another in a thread, while the first stage runs. Tracing in
    this thread ignores `with` statements around the class.

    Args:
        compile_stage: returns both executables for the config of a stage, or raises an error.
        timeline: the stages of the run.
        step: first step of the run.
        say: prints a name and a text.

    Raises:
        ConfigError: the first stage's step does not fit into the device's memory.
    """

    def __init__(
        self,
        compile_stage: Callable[[Config], tuple[Callable, Callable]],
        timeline: Timeline,
        step: int,
        say: Callable[[str, object], object],
    ):
        self._timeline, self._compile, self._say = timeline, compile_stage, say
        self._span = timeline.at(step)
        self._current = compile_stage(self._span.config)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._later = {
            span.number: self._thread.submit(compile_stage, span.config)
            for span in timeline.spans
            if span.begin > step
        }

    def at(self, step: int) -> tuple[Callable, Callable]:
        """Return the executables of a step, after waiting for them at a stage's first step.

        Raises:
            ConfigError: a later stage cannot be compiled, or its step does not fit. The error is
                raised after the compilation; with several processes, at the stage's first step
                and in all processes.
        """
        span = self._timeline.at(step)
        # Several processes must stop at the same step, but compile at different speeds.
        early = jax.process_count() == 1
        for number, compiled in self._later.items():
            if number == span.number or (early and compiled.done()):
                self._check(number, compiled)
        if span.number != self._span.number:
            compiled = self._later.pop(span.number, None)
            # A run that resumes from an older checkpoint may begin in an earlier stage.
            self._current = compiled.result() if compiled else self._compile(span.config)
            self._span, needed = span, needed_bytes(self._current[0]) / GIB
            self._say("stage", f"{span.number}, from step {step}: {needed:.2f} GiB for a step")
        return self._current

    def close(self) -> None:
        """Cancel stages that are not compiled yet; wait for a running compilation."""
        self._thread.shutdown(cancel_futures=True)

    def _check(self, number: int, compiled: Future) -> None:
        """Raise ConfigError in all processes if a stage cannot be compiled in one of them."""
        error = compiled.exception()
        # The state is saved after a ConfigError, therefore any other error becomes a ConfigError.
        reason = error and (str(error) if isinstance(error, ConfigError) else _first_line(error))
        if reasons := [reason for reason in distributed.exchange(reason) if reason]:
            raise ConfigError(f"stage {number} of {self._timeline.total}: {reasons[0]}") from error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
