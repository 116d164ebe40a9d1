"""Train a language model: python train.py --config configs/gpt2_124m.py

The script reads from top to bottom. The command line can override every option of the config:
--help lists the options. The same command again resumes from the newest checkpoint.
"""

import gc
import os
import signal
import time

BEGAN = time.perf_counter()

if __name__ == "__main__":
    # Until there is a state to save, Ctrl-C ends the process at once, as SIGTERM does.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # the collector takes an eighth of the time of imports, tracing and lowering

# Before JAX starts: no other process uses the GPU, and JAX's default is 75 % of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import jax
import numpy as np

from gptjax import cli, devices, processes
from gptjax.config import Config
from gptjax.parallel import put
from gptjax.terminal import hint, print_line
from gptjax.training import errors, init_from, memory, resume
from gptjax.training.checkpoint import Checkpoints, metadata, silence_orbax
from gptjax.training.compilation import Compiler, StagedStep
from gptjax.training.evaluations import Evaluations
from gptjax.training.header import header
from gptjax.training.inputs import Inputs
from gptjax.training.lock import locked
from gptjax.training.progress import Progress
from gptjax.training.run_log import NoLog, RunLog, check_wandb
from gptjax.training.signals import StopRequest
from gptjax.training.status_line import StartUpTime
from gptjax.training.step import init_state
from gptjax.user_folders import cache_folder
from gptjax.weights import checkpoint_files


def train(config: Config, show: Callable[[str], object] = print_line) -> int:
    """Train with a config, and show each line of progress; return the exit code."""
    with ExitStack() as stack:  # lock, log, threads, signal handlers
        return _train(config, show, stack)


def _train(config: Config, show: Callable[[str], object], stack: ExitStack) -> int:
    def say(name: str, text: object) -> None:
        show(f"{name:<11} {text}")

    # --------------------------------------------------------------------------- config and devices
    start_up = StartUpTime(BEGAN)
    start_up.mark("imports")
    check_wandb(config.wandb)
    if config.deterministic:
        devices.make_deterministic()
    processes.initialize(config)
    used, idle_gpu = devices.select(config.device)
    device = processes.local(used)[0]
    first = jax.process_index() == 0  # the process that prints and writes, except checkpoints
    show = show if first else lambda text: None
    start = resume.find(config)
    config, source = init_from.resolve(config, start)
    kernels, parallel = config.kernels(), config.parallel_on(used)
    start_up.mark("devices")

    # ----------------------------------------------------------------------------------------- data
    inputs = Inputs.find(config, parallel.mesh)
    devices.reserve_memory(used)  # after the checks of the data
    evaluations = Evaluations(config, inputs.tokenizer, parallel)
    warn = functools.partial(say, "WARNING")
    stack.enter_context(locked(config.run_dir, warn))
    if source:
        init_from.check_tokenizer(source, inputs.dataset)
    group = processes.check_inputs(used, inputs.dataset)
    start.check(config, inputs.dataset)
    if (complete := start.complete(config)) is not None:
        say("complete", complete)
        return 0
    start.set_aside(say)
    checkpoints = Checkpoints(start.folder, config.keep_last, config.keep_every)
    for name, text in header(config, inputs, parallel, idle_gpu, kernels, start, group, source):
        say(name, text)
    start_up.mark("data")

    # ----------------------------------------------------------------- shapes, shardings, optimizer
    tx = config.build_optimizer(parallel.mesh)
    abstract_state = parallel.with_shardings(
        jax.eval_shape(lambda: init_state(config.model, tx, config.seed))
    )

    # -------------------------------------------------------------------------------------- compile
    say("compiling", "… usually less than a minute")
    threads = stack.enter_context(ThreadPoolExecutor())  # for work while the steps compile
    step, compiler = start.step or 0, Compiler(cache_folder())
    if start.step is None:
        first_state = threads.submit(init_from.first_state, config, tx, parallel, source)
    steps = StagedStep(compiler, inputs, tx, abstract_state, parallel, step, say)
    stack.callback(steps.close)
    train_step, eval_step = steps.at(step)
    gc.freeze()  # most objects so far stay: a collection would visit them all
    gc.enable()
    start_up.mark("compilation")
    say("compiled", compiler)
    say("memory", memory.of_step(train_step, device))

    # ------------------------------------------------------------ resume, init-from or from scratch
    # 1. The run's newest intact checkpoint: parameters, optimizer state, position in the data.
    # 2. Otherwise --init-from: the parameters of another model; the rest as in 3.
    # 3. Otherwise random parameters from the seed, an empty optimizer state, the first batch.
    state = first_state.result() if start.step is None else start.restore(abstract_state)
    saved = start.step
    start_up.mark("state")

    # ------------------------------------------------------------------------------------------ log
    batches, val_batches = inputs.train_batches(step), inputs.val_batches()
    stack.callback(batches.close)
    val_weights = inputs.val_weights(val_batches)
    log = (RunLog if first else NoLog)(config.run_dir, start.step, wandb=config.wandb, note=warn)
    stack.callback(log.close)
    if first:
        inputs.dataset.copy_tokenizer(config.run_dir)
    stop = stack.enter_context(StopRequest(parallel.mesh))
    progress = Progress(config, log, show, step=step, devices=used, stop=stop)
    progress.started(kernels, start.changes(config), source)
    start_up.mark("loader and log")

    # ------------------------------------------------------------------------ the parts of the loop
    def read_metrics() -> None:
        """Wait for the newest step's metrics; log and print the metrics."""
        if progress.read():
            start_up.mark("first step")
            event = {"time": time.time(), "seconds": start_up.seconds, **compiler.summary()}
            progress.write("event", progress.step, event="first step", **event)
            say("first step", start_up)

    def validate() -> None:
        params = state.evaluation_params()
        losses = jax.device_get([eval_step(params, batch) for batch in val_batches])
        progress.validated(step, float(np.average(np.float64(losses), weights=val_weights)))

    def save() -> None:
        """Save the state if the validation loss is finite; delete older states."""
        if progress.val_step != step:
            progress.check_loss(step, float(eval_step(state.params, val_batches[0])))
        log.sync()
        checkpoints.save(step, state, metadata(config, inputs.dataset, step))

    def due(every: int | None, last: bool = False) -> bool:
        return bool(every) and (last or step % every == 0)

    # ------------------------------------------------------------------------------------- the loop
    with errors.of_training(progress, checkpoints):
        if config.val_every and start.step is None:
            validate()
            start_up.mark("validation")
        while step < config.max_steps and not stop.number:
            train_step, eval_step = steps.at(step)
            batch = put(inputs.train_sharding, next(batches))
            state, metrics = train_step(state, batch)
            step += 1
            read_metrics()  # of the previous step, while the device computes the current step
            progress.submit(step, metrics)

            last, own = step == config.max_steps, inputs.timeline.at(step - 1).config
            wants_val, wants_eval = due(config.val_every, last), due(config.eval_every, last)
            wants_sample = due(config.sample_every, last)
            wants_save = last or due(config.checkpoint_every)
            if wants_val or wants_eval or wants_sample or wants_save:
                read_metrics()  # raises if the loss is not finite: do not save such a state
                if wants_val:
                    validate()
                if wants_save:
                    save()  # before code of the model that may run for the first time
                    saved = step
                if wants_val and own.model.precision.fp8_head:
                    progress.fp8_clipping(step, steps.fp8_clipping(state, batch))
                if wants_eval:
                    progress.evaluated(step, evaluations.results(state, own.model))
                if wants_sample:
                    progress.sampled(step, evaluations.sample(own.model, state, step))
                progress.pause()
            checkpoints.check()
        read_metrics()
        if stop.number and saved != step:
            save()

    # -------------------------------------------------------------------------------------- results
    checkpoints.close()
    checkpoint_files.verify(checkpoints.folder / str(step))
    say("checkpoint", f"{checkpoints.folder}/{step}")
    say("log", log.path)
    if (peak := memory.peak_bytes(device)) is not None:
        say("memory", f"peak {peak / memory.GIB:.2f} GiB")
    if stop.number and step < config.max_steps:
        name = signal.Signals(stop.number).name
        show(f"stopped by {name} at step {step}; the same command resumes the run")
        return 128 + stop.number
    if progress.val_loss is not None:
        say("done", f"{step} steps, validation loss {progress.val_loss:.4f}")
    if first:
        option = cli.config_option(config)
        hint(f"gptjax sample {config.run_dir}{option}", f"gptjax plot {config.run_dir}")
    return 0


if __name__ == "__main__":
    silence_orbax()
    sys.exit(errors.run(lambda: train(cli.from_command_line())))
