"""Does NorMuon learn faster than AdamW? Train both from scratch on the same batches, AdamW with its
best learning rate.

    python benchmarks/experiments/learning.py --dataset docs_corpus \\
        --out benchmarks/results/learning

1. AdamW at each of its learning rates and warm-ups with one seed; then the best with every seed.
2. NorMuon in a fraction of the steps, where its schedule ends: each matrix learning rate, then each
   learning rate of the other parameters at the best of those, with one seed; then the best pair
   with every seed.
3. On request, with NorMuon's best pair: other lengths, and NorMuon with a part changed.

A seed determines the initial weights and the order of the data for all. All schedules have one
shape. A finished run is appended to OUT/runs.jsonl and not trained again: a command that was
stopped continues when it is repeated. If all runs are there, the command only writes
OUT/learning.json and OUT/learning.png, which needs no GPU.
"""

import dataclasses
import functools
import itertools
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from _learning_report import draw, final, sentences, shown, summary
from _recorded_runs import OutOfTime, RecordedRuns, elapsed_s, finite, of_this_run

from gptjax import cli, data, devices, optim, parallel
from gptjax import config as configuration
from gptjax.config import Config
from gptjax.models.base import graph
from gptjax.training.step import init_state, make_eval_step, make_train_step
from gptjax.user_folders import data_folder

# NorMuon with a part changed or left out. A neuron_b2 of 1 leaves neurons as they are.
VARIANTS = {
    "newton_schulz": {"orthogonalization": "newton_schulz"},
    "no neuron norm": {"neuron_b2": 1.0},
    "no decay of matrices": {"matrix_weight_decay": 0.0},
    "constant momentum": {"momentum_low": 0.95},
    "optax muon": {"algorithm": "muon"},
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Train with AdamW and with NorMuon, and compare the steps until the same validation loss."""

    out: Path
    """Folder for runs.jsonl, learning.json and learning.png. Created if absent."""
    adamw: Path = Path("configs/gpt2_124m.py")
    """Config with the model and AdamW's options."""
    normuon: Path = Path("configs/gpt2_124m_normuon.py")
    """Config with the same model and NorMuon's options."""
    dataset: str = "auto"
    """As for train.py: the name of a prepared dataset, or a folder of .bin shards."""
    data_dir: Path = dataclasses.field(default_factory=data_folder)
    """Folder of prepared datasets."""
    device: str = "gpu"
    """gpu, cpu or auto."""
    seeds: int = 3
    """Seeds 0, 1, … of the compared runs; the learning rates are chosen with seed 0."""
    steps: int = 400
    """AdamW's steps."""
    fractions: tuple[float, ...] = (0.75,)
    """NorMuon's steps, as fractions of AdamW's. Its learning rates are chosen at the first."""
    sequence_length: int = 1024
    """Tokens a sequence."""
    batch_tokens: int = 32_768
    """Tokens a step."""
    micro_batch: int = 32
    """Sequences at a time, also in a validation."""
    adamw_rates: tuple[float, ...] = (3e-4, 6e-4, 1.2e-3, 1.8e-3, 2.4e-3, 3.6e-3)
    """AdamW's peak learning rates."""
    adamw_warmups: tuple[float, ...] = ()
    """Further warm-ups of AdamW, as fractions of its steps: each is tried at the best learning rate
    and at the next higher."""
    matrix_rates: tuple[float, ...] = (0.02, 0.035, 0.05)
    """NorMuon's peak learning rates."""
    rest_rates: tuple[float, ...] = (2.4e-3, 1.2e-3, 4.8e-3)
    """Peak learning rates of the parameters that NorMuon leaves to AdamW; the matrix rates are
    tried at the first."""
    variants: tuple[str, ...] = ()
    """Also train NorMuon with these parts changed, with every seed: names of VARIANTS, "all" for
    all."""
    schedule: str = "linear"
    """Shape of both schedules after the warm-up."""
    warmup: float = 0.1
    """Fraction of a run's steps in which the learning rate rises."""
    final_fraction: float = 0.0
    """Learning rate at the end, as a fraction of the peak."""
    momentum_warmup: float = 0.2
    """Fraction of a run's steps in which NorMuon's momentum rises; in modded-nanogpt's record 300
    of 1,490."""
    momentum_cooldown: float = 0.03
    """Fraction in which it falls; in the record 50 of 1,490."""
    val_every: int = 25
    """Steps between validations; one more at the end."""
    val_tokens: int = 524_288
    """Tokens of a validation, always the same."""
    limit_s: float = math.inf
    """Start no run that might not end within this many seconds of the command's start."""


class Runs(RecordedRuns):
    """The runs of both optimizers. A record has [step, loss] of every validation and the loss of
    every step, null if not finite."""

    def outcome(self, record: dict) -> str:
        return shown(final(record))

    def settings(self, config: Config) -> dict:
        flat = configuration.to_json(config)
        kept = {
            name: flat[name]
            for name in flat
            if name not in configuration.operational(config) or name == "max_steps"
        }
        return kept | {
            "val_every": self.o.val_every,
            "val_tokens": self.o.val_tokens,
            "data": self.data_settings(),
        }

    def train(self, config: Config, label: str) -> dict:
        o = self.o
        self.dataset.validate(config.model.vocab_size, config.sequence_length)
        mesh, step, evaluate, windows_of_val = self.programs(compiled_part(config))
        count = jnp.arange(longest_run(o))
        tables = {
            name: jnp.broadcast_to(f(count), count.shape)
            for name, f in config.optimizer.schedules(config.max_steps).items()
        }
        state = jax.device_put(
            init_state(config.model, config.build_optimizer(mesh), config.seed),
            parallel.replicated(mesh),
        )
        val, train, paused = [], [], 0.0
        with self.loader(config) as loader:
            for done in range(1, config.max_steps + 1):
                windows = next(loader).reshape(
                    config.micro_batches(1), -1, config.sequence_length + 1
                )
                state, metrics = step(
                    state, parallel.put(parallel.over_batch(mesh, axis=1), windows), tables
                )
                train.append(metrics["loss"])
                if done == 1:  # its time includes the compilation
                    jax.block_until_ready(state)
                    began = time.perf_counter()
                if done % o.val_every and done != config.max_steps:
                    continue
                jax.block_until_ready(state)
                stopped = time.perf_counter()
                loss = float(
                    np.mean(
                        [evaluate(state.params, w).item() for w in windows_of_val], dtype=np.float64
                    )
                )
                val.append([done, finite(loss)])
                paused += time.perf_counter() - stopped
                if done % (4 * o.val_every) == 0:
                    print(
                        f"  {label}: step {done}, {shown(val[-1][1])}, at {elapsed_s()} s",
                        flush=True,
                    )
                if val[-1][1] is None:
                    break
                if elapsed_s() > o.limit_s:
                    raise OutOfTime
        ms = 1e3 * (time.perf_counter() - began - paused) / max(len(train) - 1, 1)
        return {
            "label": label,
            "val": val,
            "train": [finite(loss.item()) for loss in train],
            "ms": round(ms, 1),
            **of_this_run(mesh),
        }

    @functools.cache  # noqa: B019 (there is one object)
    def programs(self, config: Config):
        """Return mesh, training step, evaluation step and validation windows. The step reads the
        schedules from tables: one executable serves every learning rate and length."""
        mesh = parallel.data_mesh(self.device)
        graphdef = graph(config.model)

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, windows_ABT1, tables):
            changing = {name: functools.partial(looked_up, table) for name, table in tables.items()}
            tx = config.build_optimizer(mesh, changing)
            return make_train_step(graphdef, tx)(state, windows_ABT1)

        return mesh, step, jax.jit(make_eval_step(graphdef)), self.windows_of_val(config, mesh)


def looked_up(table, count):
    return table[count]


def longest_run(o: Options) -> int:
    return max(o.steps, *(round(fraction * o.steps) for fraction in o.fractions))


def compiled_part(config: Config) -> Config:
    """Return the config without the values that the tables hold, and without those on which the
    executable does not depend."""
    own = [
        "learning_rate",
        "schedule",
        "warmup_steps",
        "schedule_steps",
        "final_fraction",
        "matrix_learning_rate",
    ]
    if config.optimizer.name != "muon":
        own += ["matrix_weight_decay", "matrix_decay_form", "momentum", "momentum_low"]
    own += ["momentum_warmup_steps", "momentum_cooldown_steps"]
    default = type(config.optimizer)()
    plain = {name: getattr(default, name) for name in own if hasattr(default, name)}
    plain = dataclasses.replace(config.optimizer, **plain)
    return dataclasses.replace(config, max_steps=1, seed=0, optimizer=plain)


def config_of(recipe: Config, o: Options, steps: int, seed: int, **changed) -> Config:
    """Return the recipe with the options of a run; `algorithm` switches the optimizer."""
    algorithm = changed.pop("algorithm", recipe.optimizer.name)
    optimizer = optim.switch_algorithm(recipe.optimizer, algorithm)
    options = {
        "schedule": o.schedule,
        "schedule_steps": None,
        "warmup_steps": round(o.warmup * steps),
        "final_fraction": o.final_fraction,
        "momentum_warmup_steps": round(o.momentum_warmup * steps),
        "momentum_cooldown_steps": round(o.momentum_cooldown * steps),
    }
    options = {name: value for name, value in options.items() if hasattr(optimizer, name)}
    return dataclasses.replace(
        recipe,
        max_steps=steps,
        seed=seed,
        sequence_length=o.sequence_length,
        batch_tokens=o.batch_tokens,
        micro_batch=o.micro_batch,
        optimizer=dataclasses.replace(optimizer, **options | changed),
    )


def compare(o: Options, run: Runs) -> dict:
    """Train all runs.

    Returns:
        The best rates, the final loss of every trial, and `groups`: name → the records of every
        seed.
    """
    recipes = {name: cli.load(getattr(o, name)) for name in ("adamw", "normuon")}
    if recipes["adamw"].model != recipes["normuon"].model:
        raise configuration.ConfigError(
            f"{o.adamw} and {o.normuon} have different models; they must have one"
        )
    seeds, groups = range(o.seeds), {}

    def adamw(rate, warmup=o.warmup, seed=0):
        config = config_of(
            recipes["adamw"],
            o,
            o.steps,
            seed,
            learning_rate=rate,
            warmup_steps=round(warmup * o.steps),
        )
        return run(config, f"adamw lr {rate:g}, warm-up {warmup:g}, seed {seed}")

    tried = {(rate, o.warmup): adamw(rate) for rate in o.adamw_rates}
    rate, _ = min(tried, key=lambda pair: final(tried[pair]))
    higher = min((r for r in o.adamw_rates if r > rate), default=rate)
    tried |= {pair: adamw(*pair) for pair in itertools.product((rate, higher), o.adamw_warmups)}
    chosen = min(tried, key=lambda pair: final(tried[pair]))
    groups["adamw"] = [adamw(*chosen, seed) for seed in seeds]

    def normuon(matrix, rest, seed=0, fraction=o.fractions[0], name="normuon", **changed):
        steps = round(fraction * o.steps)
        config = config_of(
            recipes["normuon"],
            o,
            steps,
            seed,
            matrix_learning_rate=matrix,
            learning_rate=rest,
            **changed,
        )
        return run(config, f"{name} lr {matrix:g}, rest {rest:g}, {steps} steps seed {seed}")

    pairs = {
        (matrix, o.rest_rates[0]): normuon(matrix, o.rest_rates[0]) for matrix in o.matrix_rates
    }
    matrix, _ = min(pairs, key=lambda pair: final(pairs[pair]))
    pairs |= {(matrix, rest): normuon(matrix, rest) for rest in o.rest_rates}
    pair = min(pairs, key=lambda pair: final(pairs[pair]))
    for fraction in o.fractions:
        groups[f"normuon {fraction:g}×"] = [normuon(*pair, seed, fraction) for seed in seeds]
    for name in VARIANTS if o.variants == ("all",) else o.variants:
        groups[name] = [normuon(*pair, seed, name=name, **VARIANTS[name]) for seed in seeds]
    return {
        "adamw_chosen": chosen,
        "normuon_rates": pair,
        "adamw_tuning": [[*pair, finite(final(record))] for pair, record in tried.items()],
        "normuon_tuning": [[*pair, finite(final(record))] for pair, record in pairs.items()],
        "groups": groups,
    }


def main(o: Options, argv: list[str] | None = None) -> int:
    unknown = set(o.variants) - {*VARIANTS, "all"}
    if unknown:
        raise configuration.ConfigError(
            f"unknown variants {sorted(unknown)}; choose from {list(VARIANTS)}, or all"
        )
    o.out.mkdir(parents=True, exist_ok=True)
    run = Runs(o)
    try:
        found = compare(o, run)
    except OutOfTime:
        run.say_out_of_time()
        return 1
    if not all(math.isfinite(final(record)) for record in found["groups"]["adamw"]):
        print(
            f"AdamW's loss is not finite at learning rate {found['adamw_chosen'][0]:g}, its best: "
            "give lower --adamw-rates"
        )
        return 1
    result = summary(o, found)
    said = sentences(o, found, result)
    tuning = {name: found[name] for name in ("adamw_tuning", "normuon_tuning")}
    run.write(o.out / "learning.json", "learning.py", argv, result=result, said=said, **tuning)
    draw(o, found, result, o.out / "learning.png")
    print("\n".join([*said, f"wrote {o.out}/learning.json and learning.png"]))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options, description=__doc__)))
    except (configuration.ConfigError, data.DatasetError, devices.DeviceError) as error:
        sys.exit(f"learning: {error}")
