"""What does the speedrun's model bring? Compare it with GPT-2, and leave out one idea at a time.

    python benchmarks/experiments/speedrun.py --dataset docs_corpus \\
        --out benchmarks/results/speedrun

compare  GPT-2 124M with AdamW, GPT-2 124M with NorMuon, and the speedrun's model with its stages,
         over the same number of tokens: each learning rate with seed 0, then the best with every
         seed. If the best is the first or the last, one more is tried: half or twice of it. Then
         the speedrun's model with GPT-2's sequence length, and with documents cut as in its stages,
         with seed 0.
ablate   The speedrun's model in one stage, that of the end, and without one idea at a time.

All models are validated on the same targets: the first --val-tokens of the validation split, in
contiguous windows of each model's sequence length. The loss is that of the next token alone.
Seconds are those of training, without compilation and validation.

A run is appended to a file of OUT and not trained again: a command that was stopped continues when
it is repeated. `--part 0/2` and `--part 1/2` divide the runs over two processes. If all runs are
there, the command only writes OUT/compare.json, OUT/ablate.json and the pictures, which needs no
GPU.
"""

import contextlib
import dataclasses
import functools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from _recorded_runs import OutOfTime, RecordedRuns, elapsed_s, finite, of_this_run
from _speedrun_ideas import AGAIN, ALL, IDEAS, Idea, replaced
from _speedrun_plan import NAMES, ablated, config_of, rates_to_try, with_sequences
from _speedrun_report import final, report_ablation, report_comparison, shown, write_part

from gptjax import config as configuration
from gptjax import data, devices, parallel
from gptjax.config import Config, ConfigError
from gptjax.models.base import ModelConfig, graph
from gptjax.timeline import Timeline
from gptjax.training.compilation import Compiler
from gptjax.training.inputs import Batches, Inputs
from gptjax.training.step import init_state, make_eval_step, make_train_step
from gptjax.user_folders import data_folder


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare the speedrun's model with GPT-2, and leave out its ideas."""

    out: Path
    """Folder for the runs, compare.json, ablate.json and their pictures. Created if absent."""
    experiments: tuple[Literal["compare", "ablate"], ...] = ("compare", "ablate")
    """Experiments, in this order."""
    part: str = "0/1"
    """I/N: train part I of N of each experiment's runs. The report needs the runs of all parts."""
    adamw: Path = Path("configs/gpt2_124m.py")
    """Config with GPT-2 and AdamW's options."""
    normuon: Path = Path("configs/gpt2_124m_normuon.py")
    """Config with GPT-2 and NorMuon's options."""
    speedrun: Path = Path("configs/speedrun_pr233.py")
    """Config with the speedrun's model, stages and optimizer."""
    dataset: str = "auto"
    """As for train.py: the name of a prepared dataset, or a folder of .bin shards."""
    data_dir: Path = dataclasses.field(default_factory=data_folder)
    """Folder of prepared datasets."""
    device: str = "gpu"
    """gpu, cpu or auto."""
    seeds: int = 3
    """Seeds 0, 1, … of the compared runs; the learning rates are chosen with seed 0."""
    tokens: int = 13_107_200
    """Tokens of each compared run."""
    ablate_tokens: int = 6_553_600
    """Tokens of a run without an idea."""
    batch_tokens: int = 32_768
    """Tokens a step; in a run with stages, approximately their mean over the steps."""
    sequence_length: int = 1024
    """Tokens of GPT-2's sequences."""
    long_sequence: int = 16_384
    """Tokens of the sequences of the speedrun's model, which pack documents."""
    micro_batch: int = 32
    """GPT-2's sequences at a time."""
    adamw_rates: tuple[float, ...] = (6e-4, 1.2e-3, 2.4e-3)
    """AdamW's peak learning rates."""
    normuon_rates: tuple[float, ...] = (0.0175, 0.035, 0.07)
    """NorMuon's peak learning rates of the matrices."""
    rest: float = 0.0686
    """NorMuon's learning rate of the other parameters, as a factor of that of the matrices."""
    speedrun_rates: tuple[float, ...] = (0.008, 0.016, 0.032)
    """Peak learning rates of the matrices of the speedrun's model; the config has the factor of the
    other parameters."""
    ablate_rate: float | None = None
    """The same in the ablation. None: the best of the comparison."""
    warmups: tuple[float, float] = (0.3, 0.1)
    """Fractions of the steps in which GPT-2's learning rate rises, with AdamW and with NorMuon. It
    then falls linearly to 0."""
    val_every: int = 819_200
    """Tokens between validations; one more at the end."""
    val_tokens: int = 262_144
    """Tokens of a validation, always the same."""
    data_order: Literal["shuffled", "sequential"] = "shuffled"
    """Order of the training data of the speedrun's model. GPT-2's is shuffled."""
    shared: bool = False
    """Other processes use the GPU: record no milliseconds."""
    page: Path | None = None
    """Page whose generated parts are replaced. The pictures are then in images/ beside it."""
    recorded_only: bool = False
    """Train nothing: report the runs that are there."""
    limit_s: float = math.inf
    """Start no run that might not end within this many seconds of the command's start."""


class Programs(NamedTuple):
    """Compiled steps of a run, one for each of its stages.

    Attributes:
        train: (state, windows, tables) → (state, metrics).
        shapes: those of the training windows.
        val: (params, windows) → loss.
        val_windows: batches of the validation.
    """

    mesh: jax.sharding.Mesh
    train: Sequence[Callable]
    shapes: Sequence[jax.ShapeDtypeStruct]
    val: Sequence[Callable]
    val_windows: Sequence[jax.Array]


class Runs(RecordedRuns):
    """The runs of this part; records of all parts are known.

    A record has [tokens, seconds, loss] of every validation, with null for a loss that is not
    finite, and the number of its part: parts run on different GPUs.

    Attributes:
        idea: the idea that the next runs leave out.
    """

    def __init__(self, o: Options):
        super().__init__(o)
        self.idea = ALL
        self._programs: dict[Any, Callable[[], Programs]] = {}
        self._ran: set[Any] = set()
        self.part, self.parts = part_of(o)
        if self.parts > 1:
            self.file = o.out / f"runs_{self.part}.jsonl"
        self.read()

    def read(self) -> None:
        """Read the records of all parts."""
        self.known = [
            {"part": int(file.stem.partition("_")[2] or 0)} | json.loads(line)
            for file in sorted(self.o.out.glob("runs*.jsonl"))
            for line in file.read_text().splitlines()
        ]

    def mine(self, names: Sequence[Any]) -> list[Any]:
        """Return this part of a list."""
        return list(np.array_split(np.array(names, object), self.parts)[self.part])

    def outcome(self, record: dict) -> str:
        return f"{shown(final(record))}, {record['val'][-1][1]} s of training"

    def settings(self, config: Config) -> dict:
        flat, other = configuration.to_json(config), configuration.operational(config)
        kept = {name: flat[name] for name in flat if name not in other or name == "max_steps"}
        o = self.o
        # Recorded runs are older than these options.
        for name in ("param_storage", "first_moment_dtype", "second_moment_dtype"):
            if kept[f"optimizer.{name}"] == "fp32":
                del kept[f"optimizer.{name}"]
        kept |= {"idea": self.idea.name, "val_every": o.val_every, "val_tokens": o.val_tokens}
        return kept | {"data": self.data_settings()}

    def train(self, config: Config, label: str) -> dict:
        o, programs, timeline = self.o, self.programs(config), Timeline(config)
        inputs = Inputs.find(config, programs.mesh)
        tables = {name: jnp.asarray(table) for name, table in tables_of(config).items()}
        state, val, seconds, validated = self.first_state(config, programs), [], 0.0, 0
        with contextlib.closing(Batches(inputs, 0)) as batches:
            batch = next(batches)  # the loader's threads start
            began = time.perf_counter()
            for step in range(config.max_steps):
                number = timeline.at(step).number - 1
                windows = parallel.put(inputs.train_sharding, batch)
                state, _ = programs.train[number](state, windows, tables)
                tokens, last = timeline.tokens(step + 1), step + 1 == config.max_steps
                if not last:
                    batch = next(batches)
                if not last and tokens // o.val_every == validated:
                    continue
                jax.block_until_ready(state)
                seconds += time.perf_counter() - began
                validated = tokens // o.val_every
                losses = [programs.val[number](state.params, w) for w in programs.val_windows]
                loss = float(np.mean(np.float64(jax.device_get(losses))))
                val.append([tokens, round(seconds, 3), finite(loss)])
                print(
                    f"  {label}: {tokens:,} tokens, {shown(loss)}, at {elapsed_s()} s", flush=True
                )
                if not math.isfinite(loss):
                    break
                if elapsed_s() > o.limit_s:
                    raise OutOfTime
                began = time.perf_counter()
        ms = None if o.shared else round(1e3 * seconds / (step + 1), 2)
        run = {"label": label, "val": val, "ms": ms, "part": self.part}
        return run | of_this_run(programs.mesh)

    def first_state(self, config: Config, programs: Programs) -> Any:
        """Return the state before the first step; each executable has run at least once."""

        def start():
            state = init_state(config.model, tx, config.seed)
            state = dataclasses.replace(state, params=self.idea.start(state.params))
            return jax.device_put(state, parallel.replicated(programs.mesh))

        tx, state = self.idea.hold(config.build_optimizer(programs.mesh)), None
        if self.key(config) not in self._ran:
            self._ran.add(self.key(config))
            state = start()
            for step, windows in zip(programs.train, programs.shapes, strict=True):
                zeros = jax.tree.map(
                    lambda x: jax.device_put(jnp.zeros(x.shape, jnp.int32), x.sharding), windows
                )
                state, _ = step(state, zeros, tables_of(config))
            for evaluate in programs.val:
                jax.block_until_ready(evaluate(state.params, programs.val_windows[0]))
            del state
        return jax.block_until_ready(start())

    def programs(self, config: Config) -> Programs:
        """Return the executables of a run, after waiting for all that compile."""
        self.compile(config)
        for wait in self._programs.values():
            wait()
        return self._programs[self.key(config)]()

    def key(self, config: Config) -> Any:
        """Return what the executables depend on. Learning rates and seeds are arguments."""
        shape = config.sequence_length, config.stages == ()
        return self.idea.name, config.optimizer.name, config.model, shape

    @functools.cached_property
    def compiler(self) -> Compiler:
        return Compiler(None)

    def compile(self, config: Config) -> None:
        """Start to compile the executables of a run: several compile at the same time."""
        if self.key(config) in self._programs:
            return
        mesh, idea, start = parallel.data_mesh(self.device), self.idea, self.compiler.start
        inputs, spans = Inputs.find(config, mesh), Timeline(config).spans
        tx, whole = idea.hold(config.build_optimizer(mesh)), parallel.replicated(mesh)

        def placed(tree):
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree
            )

        state = placed(jax.eval_shape(lambda: init_state(config.model, tx, 0)))
        tables = placed(tables_of(config))
        windows = self.windows_of_val(spans[0].config, mesh, inputs.eot)
        shapes, train, val = [inputs.abstract_train_batch(span.config) for span in spans], [], []
        of_val = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32, sharding=x.sharding), windows[0]
        )
        for span, shape in zip(spans, shapes, strict=True):
            step = train_step(config, span.config.model, idea, mesh)
            train.append(start(jax.jit(step, donate_argnums=0), state, shape, tables))
            evaluate = eval_step(span.config.model.for_evaluation(), idea)
            val.append(start(jax.jit(evaluate), state.params, of_val))

        @functools.cache
        def wait() -> Programs:
            made = Programs(mesh, [f() for f in train], shapes, [f() for f in val], windows)
            print(f"  executables, {idea.name}: at {elapsed_s()} s", flush=True)
            return made

        self._programs[self.key(config)] = wait

    def windows_of_val(
        self, config: Config, mesh: jax.sharding.Mesh, eot: int | None
    ) -> list[data.Batch]:
        """Return the first --val-tokens of the validation split, in batches: the same targets for
        every sequence length."""
        o, length, batch = self.o, config.sequence_length, config.micro_batch
        count, rest = divmod(o.val_tokens, batch * length)
        batches = data.fixed_batches(
            self.dataset.val,
            sequence_length=length,
            batch=batch,
            count=max(count, 1),
            vocab_size=config.model.vocab_size,
            eot=eot,
            first=True,
        )
        if rest or count > len(batches):
            raise ConfigError(
                f"--val-tokens {o.val_tokens}: expected a multiple of {batch} × {length} that is "
                f"at most the {len(batches) * batch * length} tokens of the validation split"
            )
        return [parallel.put(parallel.over_batch(mesh, axis=0), w) for w in batches]


def part_of(o: Options) -> tuple[int, int]:
    """Return I and N of the option --part.

    Raises:
        ConfigError: it is not I/N with I < N.
    """
    matched = re.fullmatch(r"(\d+)/(\d+)", o.part)
    part, parts = map(int, matched.groups()) if matched else (0, 0)
    if part >= parts:
        raise ConfigError(f"--part {o.part}: expected I/N with I below N, such as 0/2")
    return part, parts


def tables_of(config: Config) -> dict[str, np.ndarray]:
    """Return the schedules at each step: one executable serves every learning rate."""
    count, functions = jnp.arange(config.max_steps), config.schedules()
    return {
        name: np.broadcast_to(np.float32(f(count)), count.shape) for name, f in functions.items()
    }


def looked_up(table, count):
    return table[count]


def train_step(config: Config, model: ModelConfig, idea: Idea, mesh: Any):
    """Return the training step of a stage without an idea, with the schedules in an argument."""

    def step(state, windows_ABT1, tables):
        changing = {name: functools.partial(looked_up, table) for name, table in tables.items()}
        tx = idea.hold(config.build_optimizer(mesh, changing))
        run = make_train_step(graph(model), tx, loss_reduction=config.loss_reduction)
        with replaced(idea.functions):
            return run(state, windows_ABT1)

    return step


def eval_step(model: ModelConfig, idea: Idea):
    """Return the validation step without an idea."""

    def step(params, windows_BT1):
        with replaced(idea.functions):
            return make_eval_step(graph(model))(params, windows_BT1)

    return step


def made(run: Runs, config: Config, label: str) -> dict | None:
    """Return the record of a run; None with --recorded-only if there is none."""
    try:
        return run(config, label)
    except OutOfTime:
        if run.o.recorded_only:
            return None
        raise


def tune(o: Options, run: Runs, name: str) -> dict[float, dict]:
    """Train with each learning rate, and one more if the best is at the edge."""
    rates, tried = list(getattr(o, f"{name}_rates")), {}
    while todo := rates_to_try({rate: final(record) for rate, record in tried.items()}, rates):
        for rate in todo:
            record = made(run, config_of(o, name, rate, 0), f"{name} lr {rate:g}, seed 0")
            if record is not None:
                tried[rate] = record
            elif rate in rates:
                rates.remove(rate)
            else:
                return tried
    return tried


def best(tried: dict[float, dict]) -> float:
    return min(tried, key=lambda rate: final(tried[rate]))


def compare(o: Options, run: Runs) -> dict[str, dict]:
    """Train the models of this part; return rate, tuning and records of each."""
    result = {}
    for name in run.mine(NAMES):
        rate = getattr(o, f"{name}_rates")[0]
        if run.recorded(config := config_of(o, name, rate, 0)) is None and not o.recorded_only:
            run.compile(config)
    for name in run.mine(NAMES):
        if not (tried := tune(o, run, name)):
            continue
        rate = best(tried)
        seeds = [
            made(run, config_of(o, name, rate, seed), f"{name} lr {rate:g}, seed {seed}")
            for seed in range(o.seeds)
        ]
        tuning = [[rate, finite(final(record))] for rate, record in sorted(tried.items())]
        records = [record for record in seeds if record is not None]
        result[name] = {"rate": rate, "tuning": tuning, "records": records}
        if name == "speedrun":
            short = with_sequences(config_of(o, name, rate, 0), o.sequence_length)
            others = {f"sequences of {o.sequence_length:,}": short}
            others["documents cut"] = config_of(o, name, rate, 0, cut=True)
            runs = {
                what: made(run, config, f"{name}, {what}, lr {rate:g}, seed 0")
                for what, config in others.items()
            }
            result[name]["others"] = {what: record for what, record in runs.items() if record}
    return result


def ablate(o: Options, run: Runs) -> dict[str, dict]:
    """Train without each idea of this part; return the records by name.

    Raises:
        ConfigError: the learning rate is not given, and the comparison's runs are not there.
    """
    rate = o.ablate_rate
    if rate is None:
        run.read()
        try:
            known = Runs(dataclasses.replace(o, limit_s=-math.inf))
            tried = tune(o, known, "speedrun")
        except OutOfTime as error:
            raise ConfigError(
                "--ablate-rate: expected a learning rate, because the comparison has not tried all "
                "of its own yet; run it first, or give one"
            ) from error
        if not tried:  # with --recorded-only
            return {}
        rate = best(tried)
    names, result = run.mine([idea.name for idea in IDEAS]), {}
    mine = [(idea, ablated(o, idea, rate)) for idea in IDEAS if idea.name in names]
    for idea, config in mine:  # all compile first: compilation takes time of the GPU
        run.idea = idea
        if run.recorded(config) is None and not o.recorded_only:
            run.compile(config)
    for run.idea, config in mine:
        label = "" if run.idea.name in (ALL.name, AGAIN.name) else "without "
        record = made(run, config, f"{label}{run.idea.name}")
        result |= {} if record is None else {run.idea.name: record}
    run.idea = ALL
    return result


def main(o: Options, argv: list[str] | None = None) -> int:
    o.out.mkdir(parents=True, exist_ok=True)
    run = Runs(dataclasses.replace(o, limit_s=-math.inf) if o.recorded_only else o)
    try:
        for experiment in o.experiments:
            run.made = []
            result = {"compare": compare, "ablate": ablate}[experiment](o, run)
            if not result:
                print(f"{experiment}: no run with these settings is recorded in {o.out}")
            elif run.parts == 1:
                report(o, run, experiment, result, argv)
    except OutOfTime:
        run.say_out_of_time()
        return 1
    return 0


def report(o: Options, run: Runs, experiment: str, result: dict, argv: list[str] | None) -> None:
    """Write the result, the picture and the part of the page of an experiment."""
    path, title, make = {
        "compare": ("compare", "Validation loss over tokens and seconds", report_comparison),
        "ablate": ("ablate", "Loss and time without each idea", report_ablation),
    }[experiment]
    picture = o.out / f"{path}.png"
    if o.page is not None:
        picture = o.page.parent / "images" / f"speedrun_{path}.png"
    fields, lines = make(result, picture)
    run.write(o.out / f"{path}.json", "speedrun.py", argv, **fields)
    if o.page is not None:
        image = f"![{title}](images/{picture.name})"
        write_part(o.page, experiment, [image, "", *lines])
    print("\n".join([*lines, f"wrote {o.out / path}.json and {picture}"]))


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options, description=__doc__)))
    except (ConfigError, data.DataError, devices.DeviceError) as error:
        sys.exit(f"speedrun: {error}")
