"""Does the fast bf16 step train as the plain one? Is every loss finite at the published learning
rates?

    python benchmarks/experiments/fast_and_plain.py --dataset docs_corpus \\
        --sizes gpt2 gpt2-medium gpt2-large gpt2-xl --out benchmarks/results/fast_and_plain

1. The config's model on real text, for each seed twice: plain, as autodiff and XLA compute it
   (every back end "xla"), and fast, with the default back ends ("auto"). Both have the config's
   precision, bf16, the same initial weights and the same batches. Losses are smoothed over several
   steps. The spread at a step is the standard deviation between plain's seeds. Fast is within the
   spread if
   - every loss and gradient norm is finite;
   - at every step the distance between the means of fast's and plain's seeds is at most the spread;
   - the distance between fast and plain of the same seed is at most the spread, in the root mean
     square over all steps;
   - the same holds for the validation loss at the end, in the root mean square over the seeds.
   In training the seeds also differ because they see different batches; the validation is the same
   for all. Also counted, but not judged: steps at which fast's mean is not between the minimum and
   the maximum of plain's seeds. Where the seeds' curves cross, a tiny difference suffices for that.
2. Each of --sizes for a number of steps of the fast step in bf16, at GPT-3's learning rate for that
   size, reached after ten steps and then constant. The batch is far smaller than the published one:
   at the same rate its gradients are noisier.

Exit code 0 if all of this holds. Losses stay on the device until a run ends. A finished run is
appended to OUT/runs.jsonl and not trained again: a command that was stopped continues when it is
repeated. If all runs are there, the command only writes OUT/fast_and_plain.json and .png, which
needs no GPU. After a change of the code use a new OUT.
"""

import dataclasses
import functools
import math
import sys
import time
from pathlib import Path

import jax
import numpy as np
import tyro
from _fast_and_plain_report import (
    WITHIN,
    broke_at,
    draw,
    is_finite,
    judge,
    listed,
    row_of_size,
    sentences,
    shown,
)
from _recorded_runs import OutOfTime, RecordedRuns, elapsed_s, finite, of_this_run

from gptjax import cli, data, devices, parallel
from gptjax import config as configuration
from gptjax.bench.errors import BenchError
from gptjax.bench.measuring import one_device
from gptjax.config import Config, ConfigError
from gptjax.models.base import graph
from gptjax.models.gpt2 import PRESETS, GPT2Config
from gptjax.precision import Precision
from gptjax.training.compilation import Compiler, compile_to_fit
from gptjax.training.step import init_state, make_eval_step, make_train_step
from gptjax.user_folders import data_folder

BACK_ENDS = {"plain": "xla", "fast": "auto"}
PARTS = ("attention", "norm", "mlp", "loss")

# Brown et al., "Language Models are Few-Shot Learners", table 2.1: Small, Medium, Large, XL.
RATES = {"gpt2": 6e-4, "gpt2-medium": 3e-4, "gpt2-large": 2.5e-4, "gpt2-xl": 2e-4}
# Micro-batch and recomputation.
MEMORY = {
    "gpt2": (32, "none"),
    "gpt2-medium": (32, "none"),
    "gpt2-large": (16, "none"),
    "gpt2-xl": (8, "block"),
}
RATES_WARMUP = 10

PROGRESS_EVERY = 50
PROGRESS_LAG = 10


@dataclasses.dataclass(frozen=True)
class Options:
    """Train with and without the kernels, and compare the losses with the spread between seeds."""

    out: Path
    """Folder for runs.jsonl, fast_and_plain.json and fast_and_plain.png. Created if absent."""
    config: Path = Path("configs/gpt2_124m.py")
    """Config with the model, AdamW, learning rate and schedule."""
    dataset: str = "auto"
    """As for train.py: the name of a prepared dataset, or a folder of .bin shards."""
    data_dir: Path = dataclasses.field(default_factory=data_folder)
    """Folder of prepared datasets."""
    device: str = "gpu"
    """gpu, cpu or auto; one GPU."""
    seeds: int = 3
    """Number of seeds 0, 1, … of both; 0 leaves out the comparison."""
    steps: int = 300
    """Steps of each run of the comparison, where the schedule ends."""
    warmup_steps: int = 30
    """Steps of warm-up; the config's are for longer runs."""
    sequence_length: int = 1024
    """Tokens a sequence."""
    batch_tokens: int = 32_768
    """Tokens a step."""
    micro_batch: int = 32
    """Sequences at a time, also in the validation."""
    smooth_steps: int = 11
    """Losses are compared as means over this many steps; an odd number."""
    val_tokens: int = 524_288
    """Tokens of the validation at the end, always the same."""
    sizes: tuple[str, ...] = ()
    """Presets to train at the published learning rates: gpt2-xl, or gpt2-xl:4:sublayer to choose
    micro-batch and recomputation. Otherwise 32 sequences of gpt2 and gpt2-medium, 16 of gpt2-large,
    8 of gpt2-xl with block."""
    size_steps: int = 50
    """Steps of each."""
    limit_s: float = math.inf
    """Start no run that might not end within this many seconds of the command's start."""


class Runs(RecordedRuns):
    """The runs of both sides and of the sizes. The back ends belong to the settings of a run."""

    def settings(self, config: Config) -> dict:
        flat = configuration.to_json(config)
        counts = {"max_steps", "micro_batch", *(name for name in flat if name.startswith("model."))}
        kept = {
            name: flat[name]
            for name in flat
            if name not in configuration.operational(config) or name in counts
        }
        val_tokens = config.val_tokens if config.val_every else 0
        return kept | {"val_tokens": val_tokens, "data": self.data_settings()}

    def outcome(self, record: dict) -> str:
        first, last = record["loss"][0], record["loss"][-1]
        said = (
            f"loss {shown(first)} → {shown(last)}"
            if is_finite(record)
            else f"not finite at step {broke_at(record)}"
        )
        return said if record["val"] is None else f"{said}, validation {shown(record['val'])}"

    def train(self, config: Config, label: str) -> dict:
        self.dataset.validate(config.model.vocab_size, config.sequence_length)
        mesh, tx, step, evaluate = self.programs(dataclasses.replace(config, seed=0))
        kernels = config.kernels()
        print(f"  {label}: compiled, {listed(kernels)}, at {elapsed_s()} s", flush=True)
        state = jax.device_put(init_state(config.model, tx, config.seed), parallel.replicated(mesh))
        jax.block_until_ready(state)
        kept, began = [], time.perf_counter()
        with self.loader(config) as loader:
            for done in range(1, config.max_steps + 1):
                windows = next(loader).reshape(
                    config.micro_batches(1), -1, config.sequence_length + 1
                )
                state, metrics = step(
                    state, parallel.put(parallel.over_batch(mesh, axis=1), windows)
                )
                kept.append({name: metrics[name] for name in ("loss", "grad_norm")})
                if done % PROGRESS_EVERY == 0:
                    # The loss of some steps ago: the device is not to wait for the host.
                    then = done - PROGRESS_LAG
                    loss = kept[then - 1]["loss"].item()
                    print(
                        f"  {label}: step {then}, loss {loss:.4f}, at {elapsed_s()} s", flush=True
                    )
                    if elapsed_s() > self.o.limit_s:
                        raise OutOfTime
        jax.block_until_ready(state)
        ms = 1e3 * (time.perf_counter() - began) / config.max_steps
        kept, val = jax.device_get(kept), None
        if config.val_every:
            losses = jax.device_get(
                [evaluate(state.params, w) for w in self.windows_of_val(config, mesh)]
            )
            val = float(np.mean(losses, dtype=np.float64))
        return {
            "label": label,
            "kernels": kernels,
            "loss": [finite(each["loss"].item()) for each in kept],
            "grad_norm": [finite(each["grad_norm"].item()) for each in kept],
            # A validation that was not made, and one that is not finite, are null; the losses tell
            # them apart.
            "val": None if val is None else finite(val),
            "ms": round(ms, 1),
            **of_this_run(mesh),
        }

    # The last alone is kept, so that what a size's programs hold on the device is free again while
    # the next one trains.
    @functools.lru_cache(maxsize=1)  # noqa: B019 (there is one object)
    def programs(self, config: Config):
        """Return mesh, optimizer, training step and evaluation step, compiled as by train.py."""
        device = self.device[0]
        mesh, graphdef, compiler = parallel.data_mesh([device]), graph(config.model), Compiler(None)
        replicated, tx = parallel.replicated(mesh), config.build_optimizer(mesh)

        def abstract(tree, sharding):
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
            )

        def windows(*shape):
            at = parallel.over_batch(mesh, axis=len(shape) - 1)
            return jax.ShapeDtypeStruct((*shape, config.sequence_length + 1), np.int32, sharding=at)

        state = abstract(jax.eval_shape(lambda: init_state(config.model, tx, 0)), replicated)
        step = make_train_step(graphdef, tx)
        step, evaluate = jax.jit(step, donate_argnums=0, out_shardings=replicated), None
        if config.val_every:
            evaluate = compiler.start(
                jax.jit(make_eval_step(graphdef)), state.params, windows(config.micro_batch)
            )
        step = compile_to_fit(
            lambda b: compiler(step, state, windows(config.batch // b, b)), config, device
        )
        return mesh, tx, step, evaluate and evaluate()

    @functools.cached_property
    def device(self) -> list[jax.Device]:
        devices.select(self.o.device)
        return [one_device()]


def with_back_ends(model: GPT2Config, name: str, recompute: str = "none") -> GPT2Config:
    return dataclasses.replace(
        model, **dict.fromkeys(PARTS, name), loss_chunk=None, recompute=recompute
    )


def config_of_seed(base: Config, o: Options, side: str, seed: int) -> Config:
    return dataclasses.replace(
        base,
        model=with_back_ends(base.model, BACK_ENDS[side]),
        seed=seed,
        max_steps=o.steps,
        sequence_length=o.sequence_length,
        batch_tokens=o.batch_tokens,
        micro_batch=o.micro_batch,
        val_every=o.steps,
        val_tokens=o.val_tokens,
        optimizer=dataclasses.replace(
            base.optimizer, warmup_steps=o.warmup_steps, schedule_steps=None
        ),
    )


def config_of_size(base: Config, o: Options, text: str) -> Config:
    """Return the config of one of --sizes: a preset's name, micro-batch and recomputation.

    Raises:
        ConfigError: it is of another form.
    """
    size, *own = text.split(":")
    micro_batch, recompute, *more = (*own, *MEMORY.get(size, (1, "none"))[len(own) :])
    if (
        size not in RATES
        or more
        or not str(micro_batch).isdigit()
        or recompute not in ("none", "block", "sublayer")
    ):
        raise ConfigError(
            f"--sizes {text}: expected one of {list(RATES)}, alone or with a micro-batch and none, "
            "block or sublayer, "
            "as in gpt2-xl:4 and gpt2-xl:4:sublayer"
        )
    model = dataclasses.replace(PRESETS[size], precision=Precision("bf16"))
    return dataclasses.replace(
        base,
        model=with_back_ends(model, "auto", recompute),
        seed=0,
        max_steps=o.size_steps,
        sequence_length=o.sequence_length,
        batch_tokens=int(micro_batch) * o.sequence_length,
        micro_batch=int(micro_batch),
        val_every=0,
        optimizer=dataclasses.replace(
            base.optimizer,
            learning_rate=RATES[size],
            schedule="constant",
            warmup_steps=RATES_WARMUP,
            schedule_steps=None,
        ),
    )


def main(o: Options, argv: list[str] | None = None) -> int:
    if o.seeds < 0 or o.seeds == 1 or not (o.seeds or o.sizes):
        raise ConfigError(
            f"--seeds {o.seeds}: a spread needs two at least; 0 leaves the comparison out, and "
            "then --sizes is needed"
        )
    if o.smooth_steps % 2 == 0:
        raise ConfigError(
            f"--smooth-steps {o.smooth_steps}: expected an odd number, the steps around one in the "
            "middle"
        )
    base = cli.load(o.config)
    sizes = {text: config_of_size(base, o, text) for text in o.sizes}
    o.out.mkdir(parents=True, exist_ok=True)
    run = Runs(o)
    try:
        sides = {
            side: [
                run(config_of_seed(base, o, side, seed), f"{side}, seed {seed}")
                for seed in range(o.seeds)
            ]
            for side in BACK_ENDS
        }
        rows = [
            row_of_size(size, run(config, f"{size} at {config.optimizer.learning_rate:g}"))
            for size, config in sizes.items()
        ]
    except OutOfTime:
        run.say_out_of_time()
        return 1
    result, said = {}, []
    if o.seeds:
        result["comparison"] = judge(sides["plain"], sides["fast"], o.smooth_steps) | {
            "definition_of_within": WITHIN,
            "kernels": {side: records[0]["kernels"] for side, records in sides.items()},
        }
        said += sentences(o, sides, result["comparison"])
        draw(o, sides, result["comparison"], o.out / "fast_and_plain.png")
    if rows:
        result["sizes"] = rows
    for row in rows:
        end = (
            "every loss and gradient norm finite"
            if row["finite"]
            else f"NOT finite at step {row['not_finite_at_step']}"
        )
        said.append(
            f"{row['size']} at {row['learning_rate']:g}: loss {shown(row['first_loss'])} → "
            f"{shown(row['last_loss'])} "
            f"in {row['steps']} steps, {end}"
        )
    run.write(o.out / "fast_and_plain.json", "fast_and_plain.py", argv, result=result, said=said)
    print(
        "\n".join(
            [
                *said,
                f"wrote {o.out}/fast_and_plain.json"
                + (" and fast_and_plain.png" if o.seeds else ""),
            ]
        )
    )
    held = all(row["finite"] for row in rows) and (not o.seeds or result["comparison"]["within"])
    return 0 if held else 1


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options, description=__doc__)))
    except (ConfigError, BenchError, data.DatasetError, devices.DeviceError) as error:
        sys.exit(f"fast_and_plain: {error}")
