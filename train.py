"""Trains a GPT-2: python train.py --config configs/gpt2_124m.py

Reads from top to bottom. Every option of the config can be given on the command line, --help lists them, and the same command
again goes on from the newest checkpoint.
"""

import os
import time

BEGAN = time.perf_counter()

# Before JAX starts: a training run has the GPU to itself, and JAX would leave it a quarter of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import functools
import logging
import math
import signal
import sys

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from gptjax import config as configuration
from gptjax import data, devices, sharding
from gptjax.config import Config, ConfigError
from gptjax.sampling import generate
from gptjax.training import optimizer
from gptjax.training.checkpoint import CheckpointError, Checkpoints, versions
from gptjax.training.compilation import Compiler, compile_to_fit
from gptjax.training.memory import GIB, available_bytes, needed_bytes, peak_bytes
from gptjax.training.metrics import RunLog, StatusLine, Throughput, mfu
from gptjax.training.startup import StartUp
from gptjax.training.step import graph, init_state, make_eval_step, make_train_step


class NonFiniteError(RuntimeError):
    """A loss or gradient that is NaN or infinite."""


def train(config: Config, console: Console) -> int:
    # ------------------------------------------------------------------------------------------------ devices, data
    start_up = StartUp(BEGAN)
    start_up.mark("imports")
    if config.deterministic:
        devices.make_deterministic()
    found, idle_gpu = devices.select(config.device)
    device, device_count = found[0], len(found)
    micro_batches, kernels = config.micro_batches(device_count), config.kernels()
    start_up.mark("devices")

    dataset = data.find_dataset(config.dataset, config.data_dir, config.tokenizer)
    dataset.validate(config.model.vocab_size, config.sequence_length)
    try:
        tokenizer = data.get_tokenizer(dataset.tokenizer) if config.sample_every else None
    except data.TokenizerUnavailable as error:
        raise ConfigError(f"samples cannot be decoded: {error}; or train without samples: --sample-every 0") from error

    val_batch = config.micro_batch * device_count
    val_batch = min(val_batch, (dataset.val_tokens - 1) // config.sequence_length // device_count * device_count)
    if not val_batch:
        raise ConfigError(
            f"{dataset.path} has {dataset.val_tokens} validation tokens: too few for one sequence of "
            f"{config.sequence_length} on each of {device_count} devices"
        )

    # ------------------------------------------------------------------------------------------------ where to start
    checkpoints = Checkpoints(config.run_dir / "checkpoints", keep_last=config.keep_last, keep_every=config.keep_every)
    start_step, position = checkpoints.latest_step(), 0
    if start_step is None and config.resume == "must":
        raise ConfigError(f"--resume must: there is no checkpoint in {checkpoints.folder}")
    if start_step is not None and config.resume == "never":
        raise ConfigError(
            f"--resume never: {config.run_dir} already has a checkpoint of step {start_step}; choose another --name"
        )
    if start_step is not None:
        saved = checkpoints.meta(start_step)
        if lines := configuration.differences(saved["config"], config):
            raise ConfigError(
                f"{config.run_dir} was begun with another config:\n  " + "\n  ".join(lines) + "\n"
                "Give the old values to go on from it, or another --name to begin anew."
            )
        if saved["data"]["dataset"] != dataset.fingerprint():
            raise ConfigError(
                f"{config.run_dir} was trained on other data: the checkpoint has {saved['data']['dataset']}, "
                f"now {dataset.fingerprint()}; its place in the data would be meaningless"
            )
        position = saved["data"]["position"]
        if start_step >= config.max_steps:
            console.print(f"{config.run_dir} is complete: {start_step} of {config.max_steps} steps")
            return 0

    # ------------------------------------------------------------------------------------------------ say what was chosen
    def say(name: str, text: object) -> None:
        console.print(f"{name:<11} {text}", markup=False)

    model, epochs = config.model, config.max_steps * config.batch_tokens / dataset.train_tokens
    say(
        "run",
        f"{config.run_dir}, " + ("from the beginning" if start_step is None else f"going on from step {start_step}"),
    )
    say("device", f"{device_count} × {device.device_kind}" + (f"; A GPU STAYS IDLE: {idle_gpu}" if idle_gpu else ""))
    say("precision", model.precision)
    say("kernels", ", ".join(f"{part}: {chosen}" for part, chosen in kernels.items()))
    say("model", f"{model.num_params:,} parameters: {model.n_layer} layers, {model.n_embd} wide, {model.n_head} heads")
    say("data", f"{dataset.path}, {dataset.train_tokens:,} tokens ({dataset.tokenizer}), {epochs:.2f} epochs")
    if dataset.note:
        say("", dataset.note)
    say(
        "batch",
        f"{config.batch_tokens:,} tokens: {micro_batches} × {config.micro_batch} sequences of {config.sequence_length} "
        f"on each device, recompute {model.recompute}",
    )
    for i, line in enumerate(optimizer.lines(config)):
        say("" if i else "optimizer", line)
    say("compiling", "…")
    start_up.mark("data")

    # ------------------------------------------------------------------------------------------------ compile
    mesh = sharding.data_mesh(found)
    replicated = sharding.replicated(mesh)
    train_sharding, val_sharding = sharding.over_batch(mesh, axis=1), sharding.over_batch(mesh, axis=0)

    o, learning_rate, tx = config.optimizer, config.learning_rate_schedule(), optimizer.build(config, mesh)
    graphdef = graph(config.model)
    compiler = Compiler(config.compilation_cache, configuration.made_into_programs(config))

    def abstract(tree, sharding):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    def first_state(seed):
        return init_state(config.model, tx, seed)

    seed = np.uint32(config.seed % 2**32)  # which is what JAX takes of it, too
    abstract_state = abstract(jax.eval_shape(first_state, seed), replicated)
    train_fn = jax.jit(
        make_train_step(graphdef, tx, learning_rate, skip_loss_z=o.skip_loss_z, skip_grad_norm_z=o.skip_grad_norm_z),
        donate_argnums=0,
        out_shardings=replicated,
    )

    @functools.cache
    def start_train_step(micro_batch: int):
        shape = (config.batch // (micro_batch * device_count), micro_batch * device_count, config.sequence_length + 1)
        return compiler.start(train_fn, abstract_state, jax.ShapeDtypeStruct(shape, np.int32, sharding=train_sharding))

    val_shape = jax.ShapeDtypeStruct((val_batch, config.sequence_length + 1), np.int32, sharding=val_sharding)
    eval_fn = jax.jit(make_eval_step(graphdef), out_shardings=replicated)
    start_train_step(config.micro_batch)  # first: it compiles longest, and the others are lowered meanwhile
    eval_step = compiler.start(eval_fn, abstract_state.params, val_shape)
    make_state = compiler.start(jax.jit(first_state, out_shardings=replicated), seed) if start_step is None else None
    train_step = compile_to_fit(lambda micro_batch: start_train_step(micro_batch)(), config, device)
    eval_step = eval_step()
    make_state = make_state and make_state()
    start_up.mark("compilation")
    say("compiled", compiler)
    for note in compiler.notes:
        say("", note)
    say("memory", f"{needed_bytes(train_step) / GIB:.2f} GiB for a step, of {available_bytes(device) / GIB:.1f} GiB")

    # ------------------------------------------------------------------------------------------------ state, loaders, log
    if start_step is None:
        state = make_state(seed)
    else:
        state = checkpoints.restore(start_step, abstract_state)
    step = start_step or 0
    start_up.mark("state")

    process = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    loader = data.Loader(
        dataset.train,
        sequence_length=config.sequence_length,
        batch=config.batch,
        seed=config.seed,
        start=0 if config.overfit_one_batch else position,
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
    log = RunLog(config.run_dir, resume_step=-1 if start_step is None else start_step)

    log.write(
        "event", step, step * config.batch_tokens, event="start", device=device.device_kind, devices=device_count,
        kernels=kernels, versions=versions(), config=configuration.to_json(config),
    )  # fmt: skip
    start_up.mark("loader and log")

    # ------------------------------------------------------------------------------------------------ the loop
    stop = StopRequest()
    throughput = Throughput()
    flops_per_token = config.model.flops_per_token(config.sequence_length)
    status = StatusLine(config.max_steps, on_gpu=device.platform == "gpu", every=config.log_every, console=console)
    val_loss = None
    pending = None  # the newest step and its metrics, which may still be on their way from the device
    saved_step, first_step = start_step, step + 1
    one_batch = next(loader) if config.overfit_one_batch else None

    def report() -> None:
        """Waits for the newest step's metrics and writes them down."""
        nonlocal pending
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
        log.write("train", done, done * config.batch_tokens, **values, ms=ms, tokens_per_second=speed, mfu=share)
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            raise NonFiniteError(f"step {done}: loss {values['loss']}, gradient norm {values['grad_norm']}")
        if values["skipped"]:
            console.print(
                f"step {done}: update skipped, z-scores: loss {values['loss_z']:.1f}, "
                f"gradient norm {values['grad_norm_z']:.1f}"
            )
        status.update(
            done,
            loss=values["loss"],
            lr=values["lr"],
            ms_per_step=ms,
            tokens_per_second=speed,
            mfu=share,
            val_loss=val_loss,
        )

    def validate() -> float:
        losses = [eval_step(state.params, windows) for windows in val_windows]
        loss = float(np.mean(jax.device_get(losses), dtype=np.float64))
        log.write("val", step, step * config.batch_tokens, loss=loss)
        console.print(f"step {step}: validation loss {loss:.4f}")
        return loss

    def sample() -> None:
        prompt = np.full((1, 1), tokenizer.eot, np.int32)
        length = min(config.sample_tokens, config.model.block_size - 1)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), step)
        tokens = generate(nnx.merge(graphdef, state.params), prompt, max_new_tokens=length, key=key)
        tokens = np.asarray(tokens)[0, 1:]
        text = tokenizer.decode(tokens[tokens < tokenizer.vocab_size])  # the model's vocabulary may be the larger one
        log.write("sample", step, step * config.batch_tokens, text=text)
        # An untrained model also writes control characters, which would act on the terminal.
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        console.print(f"step {step}: sample ⟨{shown}⟩", markup=False)

    def save() -> None:
        nonlocal saved_step
        if step == saved_step:
            return
        saved_step = step
        meta = {
            "config": configuration.to_json(config),
            "data": {"position": loader.position, "dataset": dataset.fingerprint()},
        }
        checkpoints.save(step, state, meta)

    def due(every: int) -> bool:
        return every > 0 and step % every == 0

    try:
        with stop, status:
            if config.val_every and start_step is None:
                val_loss = validate()
                start_up.mark("validation")
            while step < config.max_steps and not stop.number:
                windows = one_batch if one_batch is not None else next(loader)
                windows = windows.reshape(micro_batches, -1, config.sequence_length + 1)
                state, newest = train_step(state, sharding.put(train_sharding, windows))
                report()  # of the step before, while the device works on this one
                step += 1
                pending = (step, newest)

                last = step == config.max_steps
                wants_val = due(config.val_every) or (last and config.val_every)
                wants_sample = due(config.sample_every) or (last and config.sample_every)
                wants_save = due(config.checkpoint_every) or last
                if wants_val or wants_sample or wants_save:
                    report()  # a step that is not finite must not be saved
                    val_loss = validate() if wants_val else val_loss
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
    except NonFiniteError as error:
        checkpoints.wait()
        kept = checkpoints.latest_step()
        log.write("event", step, step * config.batch_tokens, event="not finite", message=str(error))
        raise NonFiniteError(
            f"{error}; stopped. "
            + (f"The checkpoint of step {kept} is intact. " if kept is not None else "No checkpoint was made yet. ")
            + "A lower --optimizer.learning-rate or --optimizer.skip-grad-norm-z 3 may help."
        ) from error
    finally:
        log.close()
        loader.close()

    # ------------------------------------------------------------------------------------------------ what came of it
    checkpoints.close()
    peak = peak_bytes(device)
    console.print(f"checkpoint  {checkpoints.folder}/{step}")
    console.print(f"log         {log.path}")
    if step:
        from gptjax.plot import (
            plot_runs,
        )  # Matplotlib takes a third of a second, which the first step need not wait for

        console.print(f"picture     {plot_runs([config.run_dir], config.run_dir / 'loss.png')}")
    if peak is not None:
        console.print(f"memory      {peak / GIB:.2f} GiB at the most")
    if stop.number:
        console.print(
            f"stopped by {signal.Signals(stop.number).name} at step {step}; the same command goes on from there"
        )
        return 128 + stop.number
    if val_loss is not None:
        console.print(f"done        {step} steps, validation loss {val_loss:.4f}")
    return 0


class StopRequest:
    """Within it, SIGTERM or Ctrl-C asks the loop to save and stop; the second one ends the process at once."""

    number = 0

    def __enter__(self):
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _ask(self, number, frame):
        self.number = number
        signal.signal(number, signal.SIG_DFL)

    def __exit__(self, *exc_info):
        for number, handler in self._before.items():
            signal.signal(number, handler)


# What a user can put right: said in a sentence, without a traceback. Anything else is a bug and shows where.
USER_ERRORS = (
    ConfigError, devices.DeviceError, CheckpointError, NonFiniteError,
    data.DatasetError, data.PrepareError, data.ShardError, data.TokenizerUnavailable,
)  # fmt: skip

if __name__ == "__main__":
    # Where one of a checkpoint's arrays cannot be read or written, Orbax's threads log it and find their event loop gone,
    # a traceback each. The error itself is raised, and said below.
    for noisy in ("absl", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    sys.unraisablehook = lambda it: None if "loop is closed" in str(it.exc_value) else sys.__unraisablehook__(it)
    try:
        sys.exit(train(configuration.from_command_line(), Console(highlight=False, soft_wrap=True)))
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # At once: threads of a save or restore that failed would print tracebacks over the sentence.
