"""Does NorMuon learn faster than AdamW? Both trained from scratch on the same batches, AdamW tuned
over its learning rate.

    python benchmarks/experiments/learning.py --dataset docs_corpus --out benchmarks/results/learning

1. AdamW at each of its learning rates, one seed; other warm-ups where they are given; then its best
   with every seed.
2. NorMuon in a fraction of the steps, its schedule ending there: each matrix learning rate, then
   each learning rate of the rest at the best of those, one seed; then the best pair with every
   seed.
3. Whatever else is asked for, with NorMuon's best pair: other lengths, and NorMuon with a part
   changed.

A seed gives the initial weights and the order of the data, the same to all. Both have one shape of
schedule. A finished run is written to OUT/runs.jsonl at once and not made again: a command that was
stopped goes on when it is given again, and one whose runs are all there only writes
OUT/learning.json and OUT/learning.png, for which no GPU is needed.
"""

import dataclasses
import functools
import itertools
import json
import math
import shlex
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from gptjax import cli, data, devices, optim, sharding
from gptjax import config as configuration
from gptjax.config import Config
from gptjax.models.base import graph
from gptjax.training.checkpoint import versions
from gptjax.training.step import init_state, make_eval_step, make_train_step

STARTED = time.perf_counter()

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
    """Trains with AdamW and with NorMuon, and compares the steps that they need for the same
    validation loss."""

    out: Path
    """Folder for runs.jsonl, learning.json and learning.png; made if absent."""
    adamw: Path = Path("configs/gpt2_124m.py")
    """Config whose model and AdamW are taken."""
    normuon: Path = Path("configs/gpt2_124m_normuon.py")
    """Config whose NorMuon is taken; its model must be the same."""
    dataset: str = "auto"
    """As train.py has it: the name of a prepared dataset, or a folder of .bin shards."""
    data_dir: Path = Path("data")
    """Where prepared datasets lie."""
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
    """Other warm-ups that AdamW may have, as fractions of its steps: each is tried at its best
    learning rate and at the next higher."""
    matrix_rates: tuple[float, ...] = (0.02, 0.035, 0.05)
    """NorMuon's peak learning rates."""
    rest_rates: tuple[float, ...] = (2.4e-3, 1.2e-3, 4.8e-3)
    """Peak learning rates of the parameters that AdamW has beside NorMuon; the matrix rates are
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
    """Steps between validations; there is one at the end, too."""
    val_tokens: int = 524_288
    """Tokens of a validation, always the same."""
    limit_s: float = math.inf
    """Stop rather than begin a run that might not end within so many seconds of the start."""


class OutOfTime(Exception):
    """The next run would not end within the limit."""


class Runs:
    """Runs that are trained once and remembered in a file.

    Attributes:
        made: records of the file whose runs were asked for.
    """

    def __init__(self, o: Options):
        self.o, self.file, self.longest = o, o.out / "runs.jsonl", 0.0
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.known = [json.loads(line) for line in lines]
        self.made: list[dict] = []
        self.dataset = data.find_dataset(o.dataset, o.data_dir)

    def __call__(self, config: Config, label: str) -> dict:
        """The record of a run: settings, [step, loss] of every validation, the loss of every step
        (null where it is not finite)."""
        settings = self.settings(config)
        # A record that is older than an option had the option's default.
        defaults = configuration.defaults(config)

        def matches(record: dict) -> bool:
            recorded = defaults | record["settings"]
            return all(recorded.get(name) == value for name, value in settings.items())

        found = next((record for record in self.known if matches(record)), None)
        if found is None:
            elapsed = time.perf_counter() - STARTED
            if elapsed + 1.1 * self.longest > self.o.limit_s:
                raise OutOfTime
            found = {"settings": settings} | self.train(config, label)
            self.longest = max(self.longest, time.perf_counter() - STARTED - elapsed)
            self.known.append(found)
            with self.file.open("a") as file:
                file.write(json.dumps(found, allow_nan=False) + "\n")
        if found not in self.made:
            self.made.append(found)
            print(
                f"{label}: {self.outcome(found)}, {found['ms']} ms a step, at {elapsed_s()} s",
                flush=True,
            )
        return found

    def outcome(self, record: dict) -> str:
        return shown(final(record))

    def settings(self, config: Config) -> dict:
        """All that makes one run another; not what it is called or how fast it is."""
        flat = configuration.to_json(config)
        kept = {
            name: flat[name]
            for name in flat
            if name not in configuration.operational(config) or name == "max_steps"
        }
        data = self.dataset.fingerprint()
        return kept | {
            "val_every": self.o.val_every,
            "val_tokens": self.o.val_tokens,
            "data": {key: data[key] for key in ("tokenizer", "train", "val")},
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
            sharding.replicated(mesh),
        )
        val, train, paused = [], [], 0.0
        with self.loader(config) as loader:
            for done in range(1, config.max_steps + 1):
                windows = next(loader).reshape(
                    config.micro_batches(1), -1, config.sequence_length + 1
                )
                state, metrics = step(
                    state, sharding.put(sharding.over_batch(mesh, axis=1), windows), tables
                )
                train.append(metrics["loss"])
                if done == 1:  # with which the program may have been compiled
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
                if time.perf_counter() - STARTED > o.limit_s:
                    raise OutOfTime
        ms = 1e3 * (time.perf_counter() - began - paused) / max(len(train) - 1, 1)
        return {
            "label": label,
            "val": val,
            "train": [finite(loss.item()) for loss in train],
            "ms": round(ms, 1),
            "date": time.strftime("%Y-%m-%d"),
            "device": mesh.devices.item().device_kind,
            "versions": versions(),
        }

    @functools.cache  # noqa: B019 (there is one object)
    def programs(self, config: Config):
        """Mesh, training step, evaluation step and validation windows. The step takes the schedules
        as tables, so that one compiled program serves every learning rate and length."""
        mesh = sharding.data_mesh(self.device)
        graphdef = graph(config.model)

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, windows_ABT1, tables):
            changing = {name: functools.partial(looked_up, table) for name, table in tables.items()}
            tx = config.build_optimizer(mesh, changing)
            return make_train_step(graphdef, tx, changing["learning_rate"])(state, windows_ABT1)

        return mesh, step, jax.jit(make_eval_step(graphdef)), self.windows_of_val(config, mesh)

    def loader(self, config: Config) -> data.Loader:
        """The training batches of the config's seed."""
        return data.Loader(
            self.dataset.train,
            sequence_length=config.sequence_length,
            batch=config.batch,
            seed=config.seed,
            vocab_size=config.model.vocab_size,
        )

    def windows_of_val(self, config: Config, mesh: jax.sharding.Mesh) -> list[jax.Array]:
        """A validation's windows, on the device; the same for every seed."""
        windows = data.fixed_batches(
            self.dataset.val,
            sequence_length=config.sequence_length,
            batch=config.micro_batch,
            count=math.ceil(self.o.val_tokens / (config.micro_batch * config.sequence_length)),
            vocab_size=config.model.vocab_size,
        )
        return [sharding.put(sharding.over_batch(mesh, axis=0), w) for w in windows]

    @functools.cached_property
    def device(self) -> list[jax.Device]:
        return devices.select(self.o.device)[0][:1]


def looked_up(table, count):
    return table[count]


def longest_run(o: Options) -> int:
    return max(o.steps, *(round(fraction * o.steps) for fraction in o.fractions))


def compiled_part(config: Config) -> Config:
    """The config without what the tables hold, and what the compiled program does not know."""
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


def final(record: dict) -> float:
    """The last validation loss; infinite where a run broke off."""
    loss = record["val"][-1][1]
    return math.inf if loss is None else loss


def finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def shown(loss: float | None) -> str:
    return "not finite" if loss is None or math.isinf(loss) else f"validation loss {loss:.4f}"


def elapsed_s() -> int:
    return round(time.perf_counter() - STARTED)


def mean_curve(records: list[dict]) -> np.ndarray:
    """Steps and the mean, least and largest validation loss over the seeds, (4, validations); a run
    that broke off makes them infinite."""
    steps = max(([step for step, _ in record["val"]] for record in records), key=len)
    losses = np.full((len(records), len(steps)), np.inf)
    for row, record in zip(losses, records, strict=True):
        found = [math.inf if loss is None else loss for _, loss in record["val"]]
        row[: len(found)] = found
    return np.stack([steps, losses.mean(0), losses.min(0), losses.max(0)])


def reached(steps: np.ndarray, losses: np.ndarray, target: float) -> float | None:
    """The step at which a curve, straight between its points, is first down at the target."""
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return None
    i = below[0]
    if i == 0 or not np.isfinite(losses[i - 1]):
        return float(steps[i])
    return float(np.interp(-target, -losses[[i - 1, i]], steps[[i - 1, i]]))


def compare(o: Options, run: Runs) -> dict:
    """Makes all runs.

    Returns:
        The best rates, the final loss of each that was tried, and `groups`: name → the records of
        every seed.
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


def summary(o: Options, found: dict) -> dict:
    """What was asked: the fraction of AdamW's steps at which NorMuon has AdamW's best final loss,
    by means over the seeds."""
    adamw, *others = found["groups"].values()
    target = float(np.mean([final(record) for record in adamw]))
    result = {
        "adamw": {
            "learning_rate": found["adamw_chosen"][0],
            "warmup": found["adamw_chosen"][1],
            "steps": o.steps,
            "final": target,
            "seeds": [finite(final(r)) for r in adamw],
        }
    }
    for name, records in zip(list(found["groups"])[1:], others, strict=True):
        steps, mean, *_ = mean_curve(records)
        at = reached(steps, mean, target)
        each = [
            reached(*np.array([[s, math.inf if x is None else x] for s, x in r["val"]]).T, final(a))
            for r, a in zip(records, adamw, strict=True)
        ]
        result[name] = {
            "learning_rates": found["normuon_rates"],
            "steps": int(steps[-1]),
            "final": finite(float(mean[-1])),
            "seeds": [finite(final(r)) for r in records],
            "step_of_adamw_final": at,
            "fraction_of_steps": None if at is None else round(at / o.steps, 4),
            "fraction_of_each_seed": [None if x is None else round(x / o.steps, 4) for x in each],
        }
    return result


def sentences(o: Options, found: dict, result: dict) -> list[str]:
    adamw, target = result["adamw"], result["adamw"]["final"]
    tried = ", ".join(f"{rate:g}" for rate in o.adamw_rates)
    best = (
        f"AdamW, best at learning rate {adamw['learning_rate']:g} "
        f"of {tried}, warm-up {adamw['warmup']:g}"
    )
    said = [
        f"{best}, ends at {target:.4f} after {o.steps} steps (validation loss, mean of {o.seeds} "
        "seeds)."
    ]
    for name, its in list(result.items())[1:]:
        reached_it = (
            f"does not reach AdamW's {target:.4f}"
            if its["step_of_adamw_final"] is None
            else f"reaches AdamW's {target:.4f} at step {its['step_of_adamw_final']:.0f}: "
            f"{its['fraction_of_steps']:.3f}× the steps"
        )
        end = "not finite" if its["final"] is None else f"{its['final']:.4f}"
        said.append(f"{name}, {its['steps']} steps, ends at {end} and {reached_it}.")
    for name, chosen, tried in (
        ("AdamW's learning rate", found["adamw_chosen"][0], o.adamw_rates),
        ("NorMuon's matrix learning rate", found["normuon_rates"][0], o.matrix_rates),
        ("the learning rate beside NorMuon", found["normuon_rates"][1], o.rest_rates),
    ):
        if chosen in (min(tried), max(tried)) and len(tried) > 1:
            said.append(f"The best of {name} is at the edge of those tried: {chosen:g}.")
    return said


def draw(o: Options, found: dict, result: dict, path: Path) -> None:
    """Mean curves of the seeds with their spread, and what the learning rates came to."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    axes, tuning = figure.subplots(1, 2, width_ratios=(2.4, 1))
    colours = {"adamw": "tab:orange"} | {
        f"normuon {f:g}×": f"C{2 * i}" for i, f in enumerate(o.fractions)
    }
    target, ends = result["adamw"]["final"], []
    for name, colour in colours.items():
        steps, mean, low, high = mean_curve(found["groups"][name])
        if not np.isfinite(mean).any():
            continue
        axes.plot(steps, mean, color=colour, label=f"{name}: {mean[-1]:.4f}", linewidth=1.5)
        axes.fill_between(steps, low, high, color=colour, alpha=0.3, linewidth=0)
        ends.append(mean[-1])
        at = result[name].get("step_of_adamw_final")
        if at is not None:
            axes.plot(at, target, "o", color=colour, mec="black")
            axes.annotate(
                f"{at / o.steps:.2f}×",
                (at, target),
                textcoords="offset points",
                xytext=(-6, -14),
                ha="right",
            )
    axes.axhline(target, color="0.4", linestyle=":", linewidth=1)
    settled = mean_curve(found["groups"]["adamw"])[1]
    top = np.nanmax(
        np.where(np.isfinite(settled[len(settled) // 4 :]), settled[len(settled) // 4 :], np.nan)
    )
    axes.set(xlabel="steps", ylabel="validation loss (nats per token)", xlim=(0, None))
    axes.set_ylim(min(ends) - 0.05 * (top - min(ends)), top)
    axes.set_title(
        f"mean and spread of {o.seeds} seeds, {o.batch_tokens:,} tokens a step", fontsize=10
    )
    axes.legend(frameon=False)

    adamw, normuon = found["adamw_tuning"], found["normuon_tuning"]
    for i, warmup in enumerate(sorted({warmup for _, warmup, _ in adamw})):
        points = sorted((r, x) for r, w, x in adamw if w == warmup and x is not None)
        if points:
            style = "os^v"[i % 4] + "-"
            tuning.plot(
                *zip(*points, strict=True),
                style,
                color="tab:orange",
                label=f"adamw, warm-up {warmup:g}",
            )
    for i, rest in enumerate(sorted({rest for _, rest, _ in normuon})):
        points = sorted((m, x) for m, r, x in normuon if r == rest and x is not None)
        if points:
            tuning.plot(
                *zip(*points, strict=True),
                "os^v"[i % 4] + "-",
                color="C0",
                label=f"normuon, rest {rest:g}",
            )
    tuning.set_xscale("log")
    tuning.set(xlabel="learning rate (NorMuon: of the matrices)", title="final loss, seed 0")
    tuning.title.set_fontsize(10)
    tuning.legend(frameon=False, fontsize=8)
    for each in (axes, tuning):
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


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
        print(
            f"stopped at {elapsed_s()} s: {len(run.made)} runs are in {run.file}; the same command "
            "goes on"
        )
        return 1
    if not all(math.isfinite(final(record)) for record in found["groups"]["adamw"]):
        print(
            f"AdamW's loss is not finite at learning rate {found['adamw_chosen'][0]:g}, its best: "
            "give lower --adamw-rates"
        )
        return 1
    result = summary(o, found)
    said = sentences(o, found, result)
    content = {
        "command": shlex.join(
            [
                "python",
                "benchmarks/experiments/learning.py",
                *(sys.argv[1:] if argv is None else argv),
            ]
        ),
        "date": max(record["date"] for record in run.made),
        "device": sorted({record["device"] for record in run.made}),
        "versions": run.made[-1]["versions"],
        "options": {
            name: str(v) if isinstance(v, Path) else v
            for name, v in vars(o).items()
            if name != "limit_s"
        },
        "result": result,
        "said": said,
        "adamw_tuning": found["adamw_tuning"],
        "normuon_tuning": found["normuon_tuning"],
        "runs": run.made,
    }
    (o.out / "learning.json").write_text(
        json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"
    )
    draw(o, found, result, o.out / "learning.png")
    print("\n".join([*said, f"wrote {o.out}/learning.json and learning.png"]))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options, description=__doc__)))
    except (configuration.ConfigError, data.DatasetError, devices.DeviceError) as error:
        sys.exit(f"learning: {error}")
