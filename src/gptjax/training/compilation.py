"""Ahead-of-time compilation with a cache on disk, and a check that the step fits into memory."""

import contextvars
import functools
import os
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.extend as jex
import optax

from gptjax import processes
from gptjax.config import Config, ConfigError
from gptjax.data import Batch
from gptjax.models.base import ModelConfig, graph
from gptjax.parallel import Parallel
from gptjax.terminal import first_line
from gptjax.timeline import Span
from gptjax.training.imports import without_torch
from gptjax.training.inputs import Inputs
from gptjax.training.memory import GIB, available_bytes, needed_bytes
from gptjax.training.step import (
    TrainState,
    make_eval_step,
    make_fp8_clipping_step,
    make_train_step,
)


def compiler_options() -> dict[str, bool]:
    """Return XLA options for a step on the default device, in addition to XLA's defaults.

    By default, XLA also generates Triton variants of every matmul and times them. On an H200, this
    autotuning takes most of 78 s of compilation of GPT-2 124M's step in bf16. The selected variants
    of matmuls with a bias take 0.93 ms per layer; cuBLASLt's epilogue takes 0.82 ms.

    By default, XLA also compiles each fusion, 60 in that step, by itself to select its emitter.
    """
    options = "xla_gpu_enable_triton_gemm", "xla_gpu_experimental_enable_fusion_autotuner"
    return dict.fromkeys(options, False) if jax.default_backend() == "gpu" else {}


def check_private(folder: Path) -> None:
    """Create a cache folder with mode 700, or check that no other user can write to the folder.

    Loading an executable runs its code.

    Raises:
        ConfigError: another user owns or can write to the folder.
        OSError: the folder cannot be created or read.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()  # of the target of a symbolic link
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"executables in {folder} could run another user's code: expected a folder that only "
            f"user {os.geteuid()} (you) can write, found user {status.st_uid} and mode "
            f"{stat.S_IMODE(status.st_mode):o}. If the folder is yours: chmod go-w {folder}. "
            "Otherwise set JAX_COMPILATION_CACHE_DIR"
        )


def compile_triton_kernels(jaxpr: jex.core.Jaxpr) -> None:
    """Compile the Triton kernels of a jaxpr concurrently. jax-triton, which compiles when JAX
    lowers a launch, then finds them in its cache.

    JAX lowers one launch after another. Triton's compiler releases the interpreter's lock for most
    of its time.
    """
    launches = {}
    for launch in _triton_launches(jaxpr, set()):
        given = {name: x for name, x in launch.params.items() if name not in ("grid", "out_shapes")}
        dtypes = [x.aval.dtype for x in (*launch.invars, *launch.outvars)]
        launches.setdefault((*dtypes, *given.items()), launch)

    def lower(launch: jex.core.JaxprEqn) -> None:
        # Without the Refs of arrays that a kernel overwrites: the compiled code is the same.
        arrays = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in launch.invars]
        f = functools.partial(launch.primitive.bind, **launch.params)
        jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",))

    # Triton 3.6 would import PyTorch with its first kernel.
    with without_torch(), ThreadPoolExecutor() as threads:
        # Each thread has a copy of the context, for `without_torch`.
        compiled = [
            threads.submit(contextvars.copy_context().run, lower, launch)
            for launch in launches.values()
        ]
    for kernel in compiled:
        kernel.result()  # raises the error of a kernel that does not compile


def _triton_launches(jaxpr: jex.core.Jaxpr, seen: set[int]) -> Iterator[jex.core.JaxprEqn]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "triton_kernel_call":
            yield equation
        for inner in jax.tree.leaves([*equation.params.values()]):
            inner = getattr(inner, "jaxpr", inner)  # of a ClosedJaxpr
            if hasattr(inner, "eqns") and id(inner) not in seen:
                seen.add(id(inner))
                yield from _triton_launches(inner, seen)


class Compiler:
    """Compile executables concurrently and cache them on disk.

    Args:
        cache: folder of the caches; None for no cache.

    Raises:
        ConfigError: as in `check_private`.

    Attributes:
        note: the reason why there is no cache, if `cache` cannot be created; else None.
        seconds: from the construction to the end of the newest compilation.
    """

    def __init__(self, cache: Path | None):
        self.note: str | None = None
        self.seconds, self._began = 0.0, time.perf_counter()
        self._cache, self._events, self._threads = cache, [], ThreadPoolExecutor(max_workers=4)
        try:
            if cache is not None:
                check_private(cache)
        except OSError as error:
            self.note = f"no cache: {first_line(error)}; set JAX_COMPILATION_CACHE_DIR"
            self._cache = None
        if self._cache is not None:
            jax.config.update("jax_compilation_cache_dir", str(cache.absolute()))
            # By default, JAX does not store the dozens of executables that compile in less than a
            # second.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            # Appending to a list is thread-safe, incrementing a counter is not.
            jax.monitoring.register_event_listener(lambda event, **_: self._events.append(event))

    def start(
        self, lowerable: jax.stages.Wrapped, *abstract: object
    ) -> Future[jax.stages.Compiled]:
        """Lower for these shapes, dtypes and shardings; return the future of the executable.

        `lowerable` is lowered in this thread and compiled, or loaded, in another.
        """
        traced = lowerable.trace(*abstract)
        if jax.default_backend() == "gpu":
            compile_triton_kernels(traced.jaxpr.jaxpr)
        return self._threads.submit(self._compile, traced.lower())

    def _compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        compiled = lowered.compile(compiler_options=compiler_options())
        self.seconds = time.perf_counter() - self._began
        return compiled

    def summary(self) -> dict[str, int]:
        """Return the numbers of cache hits and misses, including executables that JAX compiles by
        itself."""
        counted = [event.rpartition("/")[2] for event in self._events]
        return {name: counted.count(name) for name in ("cache_hits", "cache_misses")}

    def __str__(self) -> str:
        if self._cache is None:
            return f"{self.seconds:.1f} s ({self.note or 'no cache'})"
        found = self.summary()
        outcome = "hit" if found["cache_hits"] and not found["cache_misses"] else "miss"
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
        f"device, and {device.device_kind} has {available / GIB:.1f} GiB. "
    )
    chunk = config.model.loss_chunk or 1
    for smaller in range(config.micro_batch - 1, 0, -1):
        # `Config` refuses a micro-batch that the chunk does not divide. Memory grows with the
        # micro-batch: skip one whose proportional need is far too large.
        if (
            config.micro_batch % smaller == 0
            and smaller * config.sequence_length % chunk == 0
            and needed * smaller / config.micro_batch <= 2 * available
            and (fits := needed_bytes(compile_step(smaller))) <= available
        ):
            raise ConfigError(message + f"--micro-batch {smaller} fits, with {fits / GIB:.1f} GiB")
    raise ConfigError(
        message + "No micro-batch of this model and sequence length fits; "
        "--model.recompute block and --model.loss-chunk 1024 need less, as does a smaller model"
    )


class StagedStep:
    """The compiled training and validation steps of each stage.

    Stages with one model and one shape of the batch share an executable. The compilation of the
    first stage begins at once, and ends at the first call of `at`. Then later stages are compiled
    one after another in a thread. Tracing in this thread ignores `with` statements around it.

    Args:
        compiler: compiles the executables.
        inputs: stages of the run, and shapes of the batches.
        tx: the optimizer of all stages.
        state: the training state as `jax.ShapeDtypeStruct`s with shardings.
        parallel: devices and strategy.
        step: first step of the run.
        say: prints a name and a text.
    """

    def __init__(
        self,
        compiler: Compiler,
        inputs: Inputs,
        tx: optax.GradientTransformation,
        state: TrainState,
        parallel: Parallel,
        step: int,
        say: Callable[[str, object], object],
    ):
        options = inputs.config.step_options()

        @functools.cache
        def start_train(model: ModelConfig, batch: Batch):
            out = parallel.shardings(state), parallel.replicated
            step = make_train_step(graph(model), tx, parallel=parallel, **options)
            return compiler.start(jax.jit(step, donate_argnums=0, out_shardings=out), state, batch)

        @functools.cache
        def start_eval(model: ModelConfig):
            step = make_eval_step(graph(model.for_evaluation()), parallel)
            function = jax.jit(step, out_shardings=parallel.replicated)
            return compiler.start(function, state.params, inputs.abstract_val_batch())

        @functools.cache
        def clipping(model: ModelConfig):  # compiles at its first call
            counts = make_fp8_clipping_step(graph(model), parallel)
            return jax.jit(counts, compiler_options=compiler_options())

        self._start_train, self._start_eval, self._clipping = start_train, start_eval, clipping
        self._inputs, self._timeline, self._say = inputs, inputs.timeline, say
        self._device = processes.local([*parallel.mesh.devices.flat])[0]
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._span: Span | None = None
        self._later: dict[int, Future] = {}
        self._start(self._timeline.at(step).config)

    def _start(self, stage: Config) -> Future[jax.stages.Compiled]:
        """Compile both executables in threads; return the future of the second."""
        self._train(stage, stage.micro_batch)
        return self._start_eval(stage.model)

    def _train(self, stage: Config, micro_batch: int) -> Future[jax.stages.Compiled]:
        return self._start_train(stage.model, self._inputs.abstract_train_batch(stage, micro_batch))

    def _compile(self, stage: Config) -> tuple[Callable, Callable]:
        """Return both executables of a stage. Raise ConfigError as `compile_to_fit` does."""
        evaluated = self._start(stage)
        step = compile_to_fit(lambda size: self._train(stage, size).result(), stage, self._device)
        return step, evaluated.result()

    def at(self, step: int) -> tuple[Callable, Callable]:
        """Return the executables of a step, after waiting for them at a stage's first step.

        Raises:
            ConfigError: a stage cannot be compiled, or its step does not fit. The error of a later
                stage is raised after its compilation; with several processes, at the stage's first
                step and in all processes.
        """
        span = self._timeline.at(step)
        # Several processes must stop at the same step, but compile at different speeds.
        early = jax.process_count() == 1
        for number, compiled in self._later.items():
            if number == span.number or (early and compiled.done()):
                self._check(number, compiled)
        if span is not self._span:
            compiled = self._later.pop(span.number, None)
            # A run that resumes from an older checkpoint may begin in an earlier stage.
            self._current = compiled.result() if compiled else self._compile(span.config)
            if self._span is None:
                later = [one for one in self._timeline.spans if one.begin > step]
                submit = self._thread.submit
                self._later = {one.number: submit(self._compile, one.config) for one in later}
            else:
                needed = needed_bytes(self._current[0]) / GIB
                self._say("stage", f"{span.number}, from step {step}: {needed:.2f} GiB for a step")
            self._span = span
        return self._current

    def fp8_clipping(self, state: TrainState, batch: Batch) -> dict[str, float]:
        """Return the shares of clipped numbers and of zeros of each FP8 operand, in the current
        stage."""
        shares = self._clipping(self._span.config.model)(state.params, batch, state.step)
        return {name: x.item() for name, x in jax.device_get(shares).items()}

    def close(self) -> None:
        """Cancel stages that are not compiled yet; wait for a running compilation."""
        self._thread.shutdown(cancel_futures=True)

    def _check(self, number: int, compiled: Future) -> None:
        """Raise ConfigError in all processes if a stage cannot be compiled in one of them."""
        error = compiled.exception()
        reason = error and (str(error) if isinstance(error, ConfigError) else first_line(error))
        if reasons := [reason for reason in processes.exchange(reason) if reason]:
            raise ConfigError(f"stage {number} of {self._timeline.total}: {reasons[0]}") from error
