"""Train a GPT-2: python train.py --config configs/gpt2_124m.py

Reads from top to bottom. Every option of the config can be given on the command line, --help lists
them, and the same command again resumes from the newest checkpoint.
"""

import os
import time

BEGAN = time.perf_counter()

from gptjax.training import signals

if __name__ == "__main__":  # before JAX is imported: until training begins there is nothing to save
    signals.install(signals.end_at_once)

# Before JAX starts: a training run has the GPU to itself, and JAX would leave it a quarter of the
# memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import contextlib
import errno
import functools
import math
import signal
import sys
import threading

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from gptjax import config as configuration
from gptjax import data, devices, sharding
from gptjax.config import Config, ConfigError
from gptjax.sampling import generate
from gptjax.terminal import printable
from gptjax.training import optimizer
from gptjax.training.checkpoint import (
    CheckpointError,
    Checkpoints,
    NotFiniteError,
    silence_orbax,
    versions,
)
from gptjax.training.compilation import Compiler, compile_to_fit
from gptjax.training.digests import compile_digests
from gptjax.training.flops import Throughput, mfu
from gptjax.training.lock import LockedError, locked
from gptjax.training.memory import GIB, available_bytes, needed_bytes, peak_bytes
from gptjax.training.run_log import LogError, RunLog
from gptjax.training.start_up_time import StartUpTime
from gptjax.training.status_line import StatusLine
from gptjax.training.step import graph, init_state, make_eval_step, make_train_step

# Updates skipped in a row because of NaN or infinity before the run stops: no batch helps any more.
MOST_NOT_FINITE = 50


class StoppedError(RuntimeError):
    """Training ended by an error of the data, the log or the terminal."""


def train(config: Config, console: Console) -> int:
    """Train as the config says; return the exit code."""
    # the run's lock, its log, the loader's threads, the handlers of signals
    with contextlib.ExitStack() as held:
        return _train(config, console, held)


def _train(config: Config, console: Console, held: contextlib.ExitStack) -> int:
    def say(name: str, text: object) -> None:
        console.print(printable(f"{name:<11} {text}"), markup=False)

    # -------------------------------------------------------------------------------- devices, data
    start_up = StartUpTime(BEGAN)
    start_up.mark("imports")
    if config.deterministic:
        devices.make_deterministic()
    found, idle_gpu = devices.select(config.device)
    device, device_count = found[0], len(found)
    mesh, micro_batches = sharding.data_mesh(found), config.micro_batches(device_count)
    # With several devices the compiler splits the arrays, and kernels of ours are left out.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        kernels = config.kernels()
    start_up.mark("devices")

    dataset = data.find_dataset(config.dataset, config.data_dir, config.tokenizer)
    dataset.validate(config.model.vocab_size, config.sequence_length)
    try:
        tokenizer = data.get_tokenizer(dataset.tokenizer) if config.sample_every else None
    except data.TokenizerUnavailable as error:
        raise ConfigError(
            f"samples cannot be decoded: {error}; or train without samples: --sample-every 0"
        ) from error

    val_batch = config.micro_batch * device_count
    val_batch = min(
        val_batch, (dataset.val_tokens - 1) // config.sequence_length // device_count * device_count
    )
    if not val_batch:
        raise ConfigError(
            f"{dataset.path} has {dataset.val_tokens} validation tokens: too few for one sequence "
            "of "
            f"{config.sequence_length} on each of {device_count} devices"
        )
    chunk, val_rows = config.model.loss_chunk, val_batch * config.sequence_length
    if chunk and val_rows % chunk:
        raise ConfigError(
            f"--model.loss-chunk {chunk} must divide the {val_batch} × {config.sequence_length} = "
            f"{val_rows} tokens of a "
            "validation batch: this dataset's validation split is small"
        )

    # ------------------------------------------------------------------------------- where to start
    if jax.process_index() == 0 and (no_locks := held.enter_context(locked(config.run_dir))):
        say("WARNING", no_locks)
    checkpoints = Checkpoints(
        config.run_dir / "checkpoints", keep_last=config.keep_last, keep_every=config.keep_every
    )
    fall_back = config.resume != "must"  # at a damaged checkpoint, to the one before it

    def refuse_another_run(step: int, saved: dict) -> None:
        if lines := configuration.differences(saved.get("config"), config):
            raise ConfigError(
                f"{config.run_dir} was begun with another config:\n  " + "\n  ".join(lines) + "\n"
                "Give the old values to go on from it, or another --name to begin anew."
            )
        place = saved.get("data") or {}
        if lines := dataset.differences(place.get("dataset")):
            raise ConfigError(
                f"{config.run_dir} was trained on other data:\n  " + "\n  ".join(lines) + "\n"
                "Its place in the data would be meaningless: give the old data, or another --name "
                "to begin anew."
            )
        if place.get("position") != step * config.batch and not config.overfit_one_batch:
            raise CheckpointError(
                f"{checkpoints.folder / str(step)}: expected a data position of {step} × "
                f"{config.batch} = "
                f"{step * config.batch} sequences, found {place.get('position')!r}; "
                "move that folder away to resume from an older checkpoint"
            )

    start_step, saved, _ = checkpoints.newest(checkpoints.meta, fall_back=fall_back) or (
        None,
        None,
        None,
    )
    if start_step is None and config.resume == "must":
        raise ConfigError(f"--resume must: there is no checkpoint in {checkpoints.folder}")
    if start_step is not None and config.resume == "never":
        raise ConfigError(
            f"--resume never: {config.run_dir} already has a checkpoint of step {start_step}; "
            "choose another --name"
        )
    if start_step is not None:
        refuse_another_run(start_step, saved)
        if start_step >= config.max_steps:
            say(
                "complete",
                f"{config.run_dir} is complete: {start_step} of {config.max_steps} steps",
            )
            return 0

    # refuses an unsafe cache
    compiler = Compiler(config.compilation_cache, configuration.made_into_programs(config))

    # -------------------------------------------------------------------------- say what was chosen
    model, epochs = config.model, config.max_steps * config.batch_tokens / dataset.train_tokens
    say(
        "run",
        f"{config.run_dir}, "
        + ("from the beginning" if start_step is None else f"going on from step {start_step}"),
    )
    say(
        "device",
        f"{device_count} × {device.device_kind}"
        + (f"; A GPU STAYS IDLE: {idle_gpu}" if idle_gpu else ""),
    )
    say("precision", model.precision)
    say("kernels", ", ".join(f"{part}: {chosen}" for part, chosen in kernels.items()))
    padding = model.num_allocated_params - model.num_params
    allocated = f" ({model.num_allocated_params:,} with padding)" if padding else ""
    say(
        "model",
        f"{model.num_params:,} parameters{allocated}: {model.n_layer} layers, {model.n_embd} wide, "
        f"{model.n_head} heads",
    )
    say(
        "data",
        f"{dataset.path}, {dataset.train_tokens:,} tokens ({dataset.tokenizer}), {epochs:.2f} "
        "epochs",
    )
    for note in (dataset.note, data.few_tokens_note(dataset, epochs, config.data_dir)):
        if note:
            say("", note)
    say(
        "batch",
        f"{config.batch_tokens:,} tokens: {micro_batches} × {config.micro_batch} sequences of "
        f"{config.sequence_length} "
        f"on each device, recompute {model.recompute}",
    )
    for i, line in enumerate(optimizer.lines(config)):
        say("" if i else "optimizer", line)
    say("compiling", "…")
    start_up.mark("data")

    # -------------------------------------------------------------------------------------- compile
    replicated = sharding.replicated(mesh)
    train_sharding, val_sharding = (
        sharding.over_batch(mesh, axis=1),
        sharding.over_batch(mesh, axis=0),
    )

    o, learning_rate, tx = (
        config.optimizer,
        config.learning_rate_schedule(),
        optimizer.build(config, mesh),
    )
    graphdef = graph(config.model)

    def abstract(tree, sharding):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    def first_state(seed):
        return init_state(config.model, tx, seed)

    seed = np.uint32(config.seed)
    abstract_state = abstract(jax.eval_shape(first_state, seed), replicated)
    train_fn = jax.jit(
        make_train_step(
            graphdef,
            tx,
            learning_rate,
            skip_loss_z=o.skip_loss_z,
            skip_grad_norm_z=o.skip_grad_norm_z,
        ),
        donate_argnums=0,
        out_shardings=replicated,
    )

    @functools.cache
    def start_train_step(micro_batch: int):
        shape = (
            config.batch // (micro_batch * device_count),
            micro_batch * device_count,
            config.sequence_length + 1,
        )
        return compiler.start(
            train_fn, abstract_state, jax.ShapeDtypeStruct(shape, np.int32, sharding=train_sharding)
        )

    val_shape = jax.ShapeDtypeStruct(
        (val_batch, config.sequence_length + 1), np.int32, sharding=val_sharding
    )
    eval_fn = jax.jit(make_eval_step(graphdef), out_shardings=replicated)
    state_fn = jax.jit(first_state, out_shardings=replicated)
    # of checkpoints
    digests = threading.Thread(target=compile_digests, args=(abstract_state,), daemon=True)
    digests.start()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # for the choice of kernels, as above
        # first: it compiles longest, and the others are lowered meanwhile
        start_train_step(config.micro_batch)
        eval_step = compiler.start(eval_fn, abstract_state.params, val_shape)
        make_state = compiler.start(state_fn, seed) if start_step is None else None
        train_step = compile_to_fit(
            lambda micro_batch: start_train_step(micro_batch)(), config, device
        )
    eval_step = eval_step()
    make_state = make_state and make_state()
    digests.join()
    start_up.mark("compilation")
    say("compiled", compiler)
    for note in compiler.notes:
        say("", note)
    say(
        "memory",
        f"{needed_bytes(train_step) / GIB:.2f} GiB for a step, of "
        f"{available_bytes(device) / GIB:.1f} GiB",
    )

    # -------------------------------------------------------------------------- state, loaders, log
    if start_step is None:
        state, changes = make_state(seed), {}
    else:
        start_step, state, damaged = checkpoints.newest(
            lambda step: checkpoints.restore(step, abstract_state), fall_back=fall_back
        )
        saved = checkpoints.meta(start_step)
        if damaged:
            refuse_another_run(start_step, saved)
            aside = checkpoints.set_aside(after=start_step)
            for line in damaged:
                say("WARNING", line)
            say(
                "WARNING",
                f"RESUMING FROM STEP {start_step}; what is damaged was kept as {', '.join(aside)}",
            )
        changes = configuration.changes(saved["config"], config)
        for name, (old, new) in changes.items():
            say("changed", f"{name}: {old} until step {start_step}, now {new}")
    step = start_step or 0
    start_up.mark("state")

    process = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    loader = data.Loader(
        dataset.train,
        sequence_length=config.sequence_length,
        batch=config.batch,
        seed=config.seed,
        start=0 if config.overfit_one_batch else step * config.batch,
        vocab_size=config.model.vocab_size,
        **process,
    )
    val_windows = data.fixed_batches(
        dataset.val,
        sequence_length=config.sequence_length,
        batch=val_batch,
        count=math.ceil(config.val_tokens / (val_batch * config.sequence_length)),
        vocab_size=config.model.vocab_size,
        **process,
    )
    val_windows = [sharding.put(val_sharding, windows) for windows in val_windows]
    log = RunLog(
        config.run_dir,
        resume_step=-1 if start_step is None else start_step,
        note=lambda sentence: say("WARNING", sentence),
    )
    held.callback(log.close)
    held.callback(loader.close)

    log.write(
        "event", step, step * config.batch_tokens, event="start", device=device.device_kind, devices=device_count,
        kernels=kernels, versions=versions(), config=configuration.to_json(config), changes=changes,
    )  # fmt: skip
    start_up.mark("loader and log")

    # ------------------------------------------------------------------------------------- the loop
    stop = held.enter_context(signals.StopRequest())
    throughput = Throughput()
    flops_per_token = config.model.flops_per_token(config.sequence_length)
    status = StatusLine(
        config.max_steps, on_gpu=device.platform == "gpu", every=config.log_every, console=console
    )
    val_loss = val_step = None
    # the newest step and its metrics, which may still be on their way from the device
    pending = None
    saved_step, first_step = start_step, step + 1
    not_finite = 0  # updates skipped in a row because of NaN or infinity
    one_batch = next(loader) if config.overfit_one_batch else None

    def report() -> None:
        """Wait for the newest step's metrics and log them."""
        nonlocal pending, not_finite
        if pending is None:
            return
        done, values = pending
        pending = None
        values = {name: value.item() for name, value in jax.device_get(values).items()}
        if done == first_step:
            start_up.mark("first step")
            log.write(
                "event", done, done * config.batch_tokens, event="first step", time=time.time(), seconds=start_up.seconds,
                programs=compiler.programs, cache_hits=compiler.hits, cache_misses=compiler.misses,
            )  # fmt: skip
            say("first step", start_up)
        ms = throughput.step(time.perf_counter())
        speed = None if ms is None else config.batch_tokens / ms * 1e3
        share = None if ms is None else mfu(
            speed, flops_per_token, device.device_kind, config.model.precision.name, device_count
        )  # fmt: skip
        log.write(
            "train",
            done,
            done * config.batch_tokens,
            **values,
            ms=ms,
            tokens_per_second=speed,
            mfu=share,
        )
        finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        not_finite = 0 if finite else not_finite + 1
        if not finite and not (values["skipped"] and not_finite < MOST_NOT_FINITE):
            raise NotFiniteError(
                f"step {done}: loss {values['loss']}, gradient norm {values['grad_norm']}"
            )
        if values["skipped"]:
            console.print(
                f"step {done}: update skipped; loss {values['loss']:.4f} (z-score "
                f"{values['loss_z']:.1f}), "
                f"gradient norm {values['grad_norm']:.4f} (z-score {values['grad_norm_z']:.1f})"
            )
        status.update(
            done,
            loss=values["loss"],
            lr=values["lr"],
            ms_per_step=ms,
            tokens_per_second=speed,
            mfu=share,
        )

    def validate() -> None:
        nonlocal val_loss, val_step
        losses = [eval_step(state.params, windows) for windows in val_windows]
        val_loss, val_step = float(np.mean(jax.device_get(losses), dtype=np.float64)), step
        log.write("val", step, step * config.batch_tokens, loss=val_loss)
        console.print(f"step {step}: validation loss {val_loss:.4f}")
        status.validated(val_loss)
        if not math.isfinite(val_loss):
            raise NotFiniteError(f"step {step}: validation loss {val_loss}")

    def sample() -> None:
        prompt = np.full((1, 1), tokenizer.eot, np.int32)
        length = min(config.sample_tokens, config.model.block_size - 1)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), step)
        tokens = generate(nnx.merge(graphdef, state.params), prompt, max_new_tokens=length, key=key)
        tokens = np.asarray(tokens)[0, 1:]
        # the model's vocabulary may be the larger one
        text = tokenizer.decode(tokens[tokens < tokenizer.vocab_size])
        log.write("sample", step, step * config.batch_tokens, text=text)
        # An untrained model also writes control characters, which would act on the terminal.
        console.print(f"step {step}: sample ⟨{printable(text)}⟩", markup=False)

    def save() -> None:
        """Save the state, if its parameters and their loss are finite: older checkpoints are
        deleted afterwards."""
        nonlocal saved_step
        if step == saved_step:
            return
        if val_step != step and not math.isfinite(
            loss := float(eval_step(state.params, val_windows[0]))
        ):
            raise NotFiniteError(f"step {step}: validation loss {loss}; this state was not saved")
        meta = {
            "config": configuration.to_json(config),
            "data": {"position": step * config.batch, "dataset": dataset.fingerprint()},
        }
        log.sync()
        checkpoints.save(step, state, meta)
        saved_step = step

    def last_save() -> str:
        """Save after an error; return a sentence for the user."""
        try:
            save()
            checkpoints.wait()
        except (CheckpointError, NotFiniteError) as error:
            return str(error)
        return f"the state of step {step} is saved: the same command resumes from it"

    def due(every: int) -> bool:
        return every > 0 and step % every == 0

    try:
        with status:
            if config.val_every and start_step is None:
                validate()
                start_up.mark("validation")
            while step < config.max_steps and not stop.number:
                windows = one_batch if one_batch is not None else next(loader)
                windows = windows.reshape(micro_batches, -1, config.sequence_length + 1)
                state, newest = train_step(state, sharding.put(train_sharding, windows))
                step += 1
                report()  # of the step before, while the device works on this one
                pending = (step, newest)

                last = step == config.max_steps
                wants_val = due(config.val_every) or (last and config.val_every)
                wants_sample = due(config.sample_every) or (last and config.sample_every)
                wants_save = due(config.checkpoint_every) or last
                if wants_val or wants_sample or wants_save:
                    report()  # a step that is not finite must not be saved
                    if wants_val:
                        validate()
                    if wants_sample:
                        sample()
                    if wants_save:
                        save()
                    throughput.pause()
                checkpoints.check()
            report()
        if stop.number:
            save()
        checkpoints.wait()
    except NotFiniteError as error:
        checkpoints.wait()
        kept = checkpoints.latest_step()
        with contextlib.suppress(OSError):
            log.write(
                "event", step, step * config.batch_tokens, event="not finite", message=str(error)
            )
        raise NotFiniteError(
            f"{error}; stopped. "
            + ("There is no checkpoint yet. " if kept is None else
               f"The checkpoint of step {kept} is kept: its parameters and their loss were finite "
               "when it was saved. ")
            + "To go on, run the same command with --resume-with-changes and a lower --optimizer.learning-rate, or with "
            "--optimizer.skip-loss-z 5 --optimizer.skip-grad-norm-z 5, which also skip updates "
            "that are not finite."
        ) from error  # fmt: skip
    except (OSError, data.DataError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise StoppedError(f"stopped at step {step}: {reason}; {last_save()}") from error

    # ------------------------------------------------------------------------------ what came of it
    checkpoints.close()
    peak = peak_bytes(device)
    say("checkpoint", f"{checkpoints.folder}/{step}")
    say("log", log.path)
    if step:
        # Matplotlib takes a third of a second, which the first step need not wait for.
        from gptjax.plot import plot_runs

        try:
            say("picture", plot_runs([config.run_dir], config.run_dir / "loss.png"))
        except (OSError, ValueError) as error:
            say("WARNING", f"no picture: {error}")
    if peak is not None:
        say("memory", f"{peak / GIB:.2f} GiB at the most")
    if stop.number:
        name = signal.Signals(stop.number).name
        console.print(f"stopped by {name} at step {step}; the same command goes on from there")
        return 128 + stop.number
    if val_loss is not None:
        say("done", f"{step} steps, validation loss {val_loss:.4f}")
    return 0


class PipeConsole(Console):
    """A console that raises BrokenPipeError where Rich would end the process: the state is saved
    first."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError(errno.EPIPE, "the terminal or pipe that reads the output is closed")


# What a user can put right: said in a sentence, without a traceback. Anything else is a bug and
# shows where.
USER_ERRORS = (
    ConfigError, devices.DeviceError, CheckpointError, LockedError, LogError, NotFiniteError, StoppedError, data.DataError,
    OSError,
)  # fmt: skip

if __name__ == "__main__":
    silence_orbax()
    try:
        code = train(
            configuration.from_command_line(), PipeConsole(highlight=False, soft_wrap=True)
        )
        sys.stdout.flush()
    except USER_ERRORS as error:
        with contextlib.suppress(OSError):
            print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
        pipe = BrokenPipeError in (type(error), type(error.__cause__))
        # At once: threads of a save or restore that failed would print tracebacks over the
        # sentence.
        os._exit(128 + signal.SIGPIPE if pipe else 1)
    sys.exit(code)
