"""Train a language model: python train.py --config configs/gpt2_124m.py

The script reads from top to bottom. The command line can override every option of the config:
--help lists the options. The same command again resumes from the newest checkpoint.
"""

import os
import time

BEGAN = time.perf_counter()

from gptjax.training import signals

# Before the import of JAX: a signal ends the process at once until there is a state to save.
if __name__ == "__main__":
    signals.install(signals.end_at_once)

# Before JAX starts: no other process uses the GPU, and JAX's default is 75 % of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import contextlib
import functools
import math
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from rich.console import Console

from gptjax import cli, data, devices, distributed, provenance
from gptjax import config as configuration
from gptjax.config import Config, ConfigError
from gptjax.models.base import ModelConfig, graph
from gptjax.parallel import put
from gptjax.terminal import printable
from gptjax.training import init_from, memory, resume, samples
from gptjax.training.checkpoint import (
    CheckpointError,
    Checkpoints,
    NotFiniteError,
    silence_orbax,
)
from gptjax.training.compilation import (
    Compiler,
    StagedStep,
    compile_to_fit,
    compiler_options,
)
from gptjax.training.evaluations import Evaluations
from gptjax.training.header import header
from gptjax.training.inputs import Batches, Inputs
from gptjax.training.lock import LockedError, locked
from gptjax.training.progress import Progress, draw_losses
from gptjax.training.run_log import LogError, NoLog, RunLog, check_wandb
from gptjax.training.start_up_time import StartUpTime
from gptjax.training.status_line import PipeConsole, elapsed, fitted
from gptjax.training.step import (
    init_state,
    make_clipping_step,
    make_eval_step,
    make_train_step,
)
from gptjax.weights.digests import compile_digests
from gptjax.weights.errors import WeightsError


class StoppedError(RuntimeError):
    """Error of the data, the log or the terminal that ended training."""


def train(config: Config, console: Console, given: frozenset[str] = frozenset()) -> int:
    """Train with a config; return the exit code. `given` is as in `init_from.resolve`."""
    with contextlib.ExitStack() as stack:  # lock, log, loader threads, signal handlers
        return _train(config, console, stack, given)


def _train(
    config: Config, console: Console, stack: contextlib.ExitStack, given: frozenset[str]
) -> int:
    def say(name: str, text: object) -> None:
        line = fitted(console, printable(f"{name:<11} {text}"), indent=12)
        console.print(line, markup=False)

    # -------------------------------------------------------------------------------- devices, data
    start_up = StartUpTime(BEGAN)
    start_up.mark("imports")
    check_wandb(config.wandb)
    if config.deterministic:
        devices.make_deterministic()
    distributed.initialize(config)
    config, source = init_from.resolve(config, given)
    used, idle_gpu = devices.select(config.device)
    device, kernels = distributed.local(used)[0], config.kernels()
    first = jax.process_index() == 0  # the process that prints and writes, except checkpoints
    console.quiet |= not first
    parallel = config.parallel_on(used)
    start_up.mark("devices")
    inputs = Inputs.find(config, parallel.mesh)
    devices.reserve_memory(used)  # after the checks of the data
    evaluations = Evaluations(config, inputs.dataset.tokenizer, parallel)

    # --------------------------------------------------------------------------------------- resume
    if first and (no_locks := stack.enter_context(locked(config.run_dir))):
        say("WARNING", no_locks)
    if source:
        init_from.check_tokenizer(source, inputs.dataset)
    processes = distributed.check_inputs(used, inputs.dataset)
    checkpoints = Checkpoints(
        config.run_dir / "checkpoints", keep_last=config.keep_last, keep_every=config.keep_every
    )
    start = resume.find(config, inputs.dataset, checkpoints)
    distributed.check_folder(config.run_dir, start.step)
    if start.step is not None and start.step >= config.max_steps:
        say("complete", f"{config.run_dir} is complete: {start.step} of {config.max_steps} steps")
        return 0
    compiler = Compiler(config.compilation_cache)
    chosen = (parallel, idle_gpu, kernels, start.step, processes, source)
    for name, text in header(config, inputs, *chosen):
        say(name, text)
    say("compiling", "… usually less than a minute")
    start_up.mark("data")

    # -------------------------------------------------------------------------------------- compile
    o, tx = config.optimizer, config.build_optimizer(parallel.mesh)
    abstract_state = parallel.with_shardings(
        jax.eval_shape(lambda: init_state(config.model, tx, config.seed))
    )
    update = {"skip_loss_z": o.skip_loss_z, "skip_grad_norm_z": o.skip_grad_norm_z}
    update["loss_reduction"] = config.loss_reduction

    @functools.cache
    def start_train_step(model: ModelConfig, batch: data.Batch):
        function = jax.jit(
            make_train_step(graph(model), tx, parallel=parallel, **update),
            donate_argnums=0,
            out_shardings=(parallel.shardings(abstract_state), parallel.replicated),
        )
        return compiler.start(function, abstract_state, batch)

    @functools.cache
    def start_eval_step(model: ModelConfig):
        evaluated = make_eval_step(graph(model.for_evaluation()), parallel)
        function = jax.jit(evaluated, out_shardings=parallel.replicated)
        arguments = abstract_state.params, inputs.abstract_val_batch()
        return compiler.start(function, *arguments)

    @functools.cache
    def clipping_step(model: ModelConfig):  # compiles at its first call
        counts = make_clipping_step(graph(model), parallel)
        return jax.jit(counts, compiler_options=compiler_options())

    def compile_stage(stage: Config):
        def compiled(size: int):
            return start_train_step(stage.model, inputs.abstract_train_batch(stage, size))()

        return compile_to_fit(compiled, stage, device), start_eval_step(stage.model)()

    step = start.step or 0
    stage = config.at(step)
    threads = stack.enter_context(ThreadPoolExecutor())  # while XLA compiles
    with elapsed(console):
        start_train_step(stage.model, inputs.abstract_train_batch(stage))  # compiles in a thread
        start_eval_step(stage.model)
        digests = threads.submit(compile_digests, abstract_state)
        if start.step is None:
            first_state = threads.submit(init_from.first_state, config, tx, parallel, source)
        steps = StagedStep(compile_stage, inputs.timeline, step, say)
    stack.callback(steps.close)
    start_up.mark("compilation")
    say("compiled", compiler)
    for note in compiler.notes:
        say("", note)
    needed, available = memory.needed_bytes(steps.at(step)[0]), memory.available_bytes(device)
    say("memory", f"{needed / memory.GIB:.2f} GiB for a step, of {available / memory.GIB:.1f} GiB")

    # -------------------------------------------------------------------------- state, batches, log
    if start.step is None:
        state = first_state.result()
    else:
        digests.result()
        start = resume.restore(config, inputs.dataset, checkpoints, abstract_state, say)
        state = start.state
    step = start.step or 0
    train_step, eval_step = steps.at(step)
    start_up.mark("state")

    batches, val_batches = Batches(inputs, step), inputs.val_batches()
    stack.callback(batches.close)
    val_weights = inputs.val_weights(val_batches)
    resume_step = -1 if start.step is None else step
    warn = functools.partial(say, "WARNING")
    log = (RunLog if first else NoLog)(config.run_dir, resume_step, wandb=config.wandb, note=warn)
    stack.callback(log.close)
    stop = distributed.SharedStop(stack.enter_context(signals.StopRequest()), parallel.mesh)
    progress = Progress(config, log, console, step=step, devices=used, stop=stop)
    progress.write(
        "event",
        step,
        event="start",
        device=device.device_kind,
        devices=len(used),
        kernels=kernels,
        **provenance.of_process(),
        config=configuration.to_json(config),
        changes=start.changes,
        init_from=source.identity() if source else None,
    )
    start_up.mark("loader and log")

    # ------------------------------------------------------------------------ the parts of the loop
    def read_metrics() -> None:
        """Wait for the newest step's metrics; log and print the metrics."""
        if progress.read():
            start_up.mark("first step")
            progress.write(
                "event",
                progress.step,
                event="first step",
                time=time.time(),
                seconds=start_up.seconds,
                executables=compiler.executables,
                cache_hits=compiler.hits,
                cache_misses=compiler.misses,
            )
            say("first step", start_up)

    def validate() -> None:
        losses = jax.device_get([eval_step(state.params, batch) for batch in val_batches])
        progress.validated(step, float(np.average(np.float64(losses), weights=val_weights)))

    def count_clipped() -> None:
        counted = put(inputs.train_sharding, batch)
        shares = clipping_step(config.at(step - 1).model)(state.params, counted, state.step)
        progress.clipped(step, {name: x.item() for name, x in jax.device_get(shares).items()})

    def sample() -> None:
        text = samples.draw(config.at(step - 1), inputs, parallel, state, step)
        if text is None:  # in all processes except the first
            return
        progress.write("sample", step, text=text)
        # Escape control characters in the sample: control characters would change the terminal.
        console.print(f"step {step}: sample ⟨{printable(text)}⟩", markup=False)

    def save() -> None:
        """Save the state if the validation loss is finite; delete older states."""
        if step == checkpoints.latest_step():
            return
        if progress.val_step != step:
            loss = float(eval_step(state.params, val_batches[0]))
            if not math.isfinite(loss):
                raise NotFiniteError(
                    f"step {step}: validation loss {loss}; this state was not saved"
                )
        log.sync()
        checkpoints.save(step, state, resume.meta(config, inputs.dataset, step))

    def last_save(cause: Exception) -> str:
        """Save the state after an error; return the sentence that is printed."""
        try:
            # All processes save together. Only a ConfigError is raised in all of them.
            if jax.process_count() == 1 or isinstance(cause, ConfigError):
                with contextlib.suppress(OSError):  # the cause may be the log or the terminal
                    if progress.step < step:
                        progress.submit(step, metrics)
                    read_metrics()
                save()
        except CheckpointError as error:
            return str(error)
        except (NotFiniteError, OSError) as error:
            return f"{error}; {checkpoints.outcome(step)}"
        return checkpoints.outcome(step)

    def due(every: int | None, last: bool) -> bool:
        return bool(every) and (last or step % every == 0)

    # ------------------------------------------------------------------------------------- the loop
    one_batch = next(batches) if config.overfit_one_batch else None
    try:
        with progress:
            if config.val_every and start.step is None:
                validate()
                start_up.mark("validation")
            while step < config.max_steps and not stop.number:
                batch = next(batches) if one_batch is None else one_batch
                train_step, eval_step = steps.at(step)
                state, metrics = train_step(state, put(inputs.train_sharding, batch))
                step += 1
                read_metrics()  # of the previous step, while the device computes the current step
                progress.submit(step, metrics)

                last = step == config.max_steps
                wants_val = due(config.val_every, last)
                wants_eval = due(config.eval_every, last)
                wants_sample = due(config.sample_every, last)
                wants_save = last or due(config.checkpoint_every, last)
                fp8 = config.at(step - 1).model.precision.fp8_head
                wants_clipped = fp8 and due(config.fp8_clipping_every, last=False)
                if wants_val or wants_eval or wants_sample or wants_save or wants_clipped:
                    read_metrics()  # raises if the loss is not finite: do not save such a state
                    if wants_val:
                        validate()
                    if wants_save:
                        save()  # before code of the model that may run for the first time
                    if wants_clipped:
                        count_clipped()
                    if wants_eval:
                        model = config.at(step - 1).model
                        progress.evaluated(step, evaluations.results(state.params, model))
                    if wants_sample:
                        sample()
                    progress.pause()
                checkpoints.check()
            read_metrics()
        if stop.number:
            save()
        checkpoints.wait()
    except NotFiniteError as error:
        checkpoints.wait()
        raise progress.stop_not_finite(error, step, checkpoints.latest_step()) from error
    except jax.errors.JaxRuntimeError as error:
        checkpoints.wait()
        if not memory.is_full(error):
            raise
        needed, kept = memory.needed_bytes(train_step), checkpoints.latest_step()
        raise memory.full_error(step, needed, available, kept) from error
    except (OSError, data.DataError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise StoppedError(f"stopped at step {step}: {reason}; {last_save(error)}") from error
    except Exception:
        checkpoints.wait()  # for a save in progress
        raise

    # -------------------------------------------------------------------------------------- results
    checkpoints.close()
    checkpoints.check_readable(step, abstract_state.params)
    say("checkpoint", f"{checkpoints.folder}/{step}")
    say("log", log.path)
    if step and first:
        say(*draw_losses(config.run_dir))
    if (peak := memory.peak_bytes(device)) is not None:
        say("memory", f"peak {peak / memory.GIB:.2f} GiB")
    if stop.number and step < config.max_steps:
        name = signal.Signals(stop.number).name
        console.print(f"stopped by {name} at step {step}; the same command resumes the run")
        return 128 + stop.number
    if progress.val_loss is not None:
        say("done", f"{step} steps, validation loss {progress.val_loss:.4f}")
    return 0


# Errors that the user can correct are printed as one sentence. Other exceptions are bugs.
USER_ERRORS = (ConfigError, devices.DeviceError, WeightsError, LockedError, LogError)
USER_ERRORS += (NotFiniteError, StoppedError, data.DataError, OSError)
USER_ERRORS += (distributed.DistributedError, memory.MemoryFullError)

if __name__ == "__main__":
    silence_orbax()
    try:
        console = PipeConsole(highlight=False, soft_wrap=True)
        code = train(cli.from_command_line(), console, cli.given_for_model())
        sys.stdout.flush()
        distributed.finish()
    except USER_ERRORS as error:
        with contextlib.suppress(OSError):
            print(f"error: {printable(distributed.explain(error))}", file=sys.stderr, flush=True)
        distributed.report(str(error))
        pipe = BrokenPipeError in (type(error), type(error.__cause__))
        # Exit at once: threads of a failed save or restore would print tracebacks afterwards.
        os._exit(128 + signal.SIGPIPE if pipe else 1)
    except Exception as error:
        distributed.end_at_once(error)
        raise
    sys.exit(code)
