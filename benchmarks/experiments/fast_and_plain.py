"""Does the fast bf16 step train as the plain one does? And is every loss finite at the published
learning rates?

    python benchmarks/experiments/fast_and_plain.py --dataset docs_corpus --sizes gpt2 gpt2-medium gpt2-large
    gpt2-xl \\
        --out benchmarks/results/fast_and_plain

1. The card's model on real text, for each seed twice: plain, which is what autodiff and XLA make of
   it (every back end "xla"), and fast, with the back ends that "auto" takes. Both have the card's
   precision, bf16, the same weights at the start and the same batches. Losses are smoothed over
   some steps. The spread at a step is the standard deviation between plain's seeds. Fast is within
   it if all of this holds:
   - every loss and gradient norm is finite;
   - at every step the mean of fast's seeds is no further than the spread there from the mean of
     plain's seeds;
   - fast and plain of the same seed are no further apart than the spread, in the root mean square
     over all steps;
   - nor are they in the validation loss at the end, in the root mean square over the seeds.
   In training the seeds are apart also because they see different batches; the validation is the
   same for all. Counted beside that, and not judged: steps at which fast's mean is not between the
   least and the greatest of plain's seeds. Where the curves of the seeds happen to cross, a hair is
   enough for that.
2. Each of --sizes for some steps of the fast step in bf16, at GPT-3's learning rate for that size,
   reached after ten steps and kept. The batch is far smaller than the published one: at the same
   rate its gradients are noisier.

Exit code 0 if all that was asked for held. Losses stay on the device until a run ends. A finished
run is written to OUT/runs.jsonl and not made again: a command that was stopped goes on when it is
given again, and one whose runs are all there only writes OUT/fast_and_plain.json and .png, for
which no GPU is needed. After a change of the code take a new OUT.
"""

import dataclasses
import functools
import json
import math
import shlex
import sys
import time
from pathlib import Path

import jax
import numpy as np
import tyro
from learning import OutOfTime, elapsed_s, finite
from learning import Runs as RunsOfLearning

from gptjax import cli, data, devices, sharding
from gptjax import config as configuration
from gptjax.bench.kernels import BenchError
from gptjax.bench.step import one_device
from gptjax.config import Config, ConfigError
from gptjax.models.base import graph
from gptjax.models.gpt2 import PRESETS, GPT2Config
from gptjax.plot import smooth
from gptjax.precision import Precision
from gptjax.training.checkpoint import versions
from gptjax.training.compilation import Compiler, compile_to_fit
from gptjax.training.step import init_state, make_eval_step, make_train_step

BACK_ENDS = {"plain": "xla", "fast": "auto"}
PARTS = ("attention", "norm", "mlp", "loss")

# Brown et al., "Language Models are Few-Shot Learners", table 2.1: Small, Medium, Large, XL.
RATES = {"gpt2": 6e-4, "gpt2-medium": 3e-4, "gpt2-large": 2.5e-4, "gpt2-xl": 2e-4}
# Sequences at a time, and what is computed again in the backward pass.
MEMORY = {
    "gpt2": (32, "none"),
    "gpt2-medium": (32, "none"),
    "gpt2-large": (16, "none"),
    "gpt2-xl": (8, "block"),
}
RATES_WARMUP = 10

# Three seeds give a poor standard deviation: its square is averaged over so many steps on both
# sides.
SPREAD_HALF_WIDTH = 25
PROGRESS_EVERY = 50
PROGRESS_LAG = 10

WITHIN = (
    "every loss and gradient norm is finite; at every step the means of fast's and plain's seeds "
    "are no further "
    "apart than the spread there, the standard deviation between plain's seeds; and fast and plain "
    "of the same seed "
    "are no further apart than the spread, in the root mean square: in training over all steps, "
    "and in the validation "
    "loss at the end"
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Trains with and without the kernels, and compares the losses with the spread between
    seeds."""

    out: Path
    """Folder for runs.jsonl, fast_and_plain.json and fast_and_plain.png; made if absent."""
    card: Path = Path("configs/gpt2_124m.py")
    """Config whose model, AdamW, learning rate and schedule are taken."""
    dataset: str = "auto"
    """As train.py has it: the name of a prepared dataset, or a folder of .bin shards."""
    data_dir: Path = Path("data")
    """Where prepared datasets lie."""
    device: str = "gpu"
    """gpu, cpu or auto; one GPU."""
    seeds: int = 3
    """Seeds 0, 1, … of both; 0 leaves the comparison out."""
    steps: int = 300
    """Steps of each of its runs, at whose end the schedule ends."""
    warmup_steps: int = 30
    """In place of the card's, which are made for longer runs."""
    sequence_length: int = 1024
    """Tokens a sequence."""
    batch_tokens: int = 32_768
    """Tokens a step."""
    micro_batch: int = 32
    """Sequences at a time, also in the validation."""
    smooth_steps: int = 11
    """Losses are compared as means over so many steps; an odd number."""
    val_tokens: int = 524_288
    """Tokens of the validation at the end, always the same."""
    sizes: tuple[str, ...] = ()
    """Presets to train at the published learning rates: gpt2-xl, or gpt2-xl:4:sublayer to choose
    micro-batch and recomputation. Otherwise 32 sequences of gpt2 and gpt2-medium, 16 of gpt2-large,
    8 of gpt2-xl with block."""
    size_steps: int = 50
    """Steps of each."""
    limit_s: float = math.inf
    """Stop rather than begin a run that might not end within so many seconds of the start."""


class Runs(RunsOfLearning):
    """Runs that are trained once and remembered in a file; here the back ends are a setting like
    any other."""

    def settings(self, config: Config) -> dict:
        flat = configuration.to_json(config)
        counts = {"max_steps", "micro_batch", *(name for name in flat if name.startswith("model."))}
        kept = {
            name: flat[name]
            for name in flat
            if name not in configuration.operational(config) or name in counts
        }
        data = self.dataset.fingerprint()
        data = {key: data[key] for key in ("tokenizer", "train", "val")}
        return kept | {"val_tokens": config.val_tokens if config.val_every else 0, "data": data}

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
        state = jax.device_put(init_state(config.model, tx, config.seed), sharding.replicated(mesh))
        jax.block_until_ready(state)
        kept, began = [], time.perf_counter()
        with self.loader(config) as loader:
            for done in range(1, config.max_steps + 1):
                windows = next(loader).reshape(
                    config.micro_batches(1), -1, config.sequence_length + 1
                )
                state, metrics = step(
                    state, sharding.put(sharding.over_batch(mesh, axis=1), windows)
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
            "date": time.strftime("%Y-%m-%d"),
            "device": mesh.devices.item().device_kind,
            "versions": versions(),
        }

    # The last alone is kept, so that what a size's programs hold on the device is free again while
    # the next one trains.
    @functools.lru_cache(maxsize=1)  # noqa: B019 (there is one object)
    def programs(self, config: Config):
        """Mesh, optimizer, training step and evaluation step, compiled as train.py does."""
        device = self.device[0]
        mesh, graphdef, compiler = sharding.data_mesh([device]), graph(config.model), Compiler(None)
        replicated, tx = sharding.replicated(mesh), config.build_optimizer(mesh)

        def abstract(tree, sharding):
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
            )

        def windows(*shape):
            at = sharding.over_batch(mesh, axis=len(shape) - 1)
            return jax.ShapeDtypeStruct((*shape, config.sequence_length + 1), np.int32, sharding=at)

        state = abstract(jax.eval_shape(lambda: init_state(config.model, tx, 0)), replicated)
        step = make_train_step(graphdef, tx, config.learning_rate_schedule())
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


def shown(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def listed(kernels: dict[str, str]) -> str:
    return ", ".join(f"{part} {name}" for part, name in kernels.items())


def is_finite(record: dict) -> bool:
    return None not in (*record["loss"], *record["grad_norm"])


def broke_at(record: dict) -> int | None:
    """The first step whose loss or gradient norm is not finite."""
    pairs = zip(record["loss"], record["grad_norm"], strict=True)
    return next((step for step, pair in enumerate(pairs, 1) if None in pair), None)


def with_back_ends(model: GPT2Config, name: str, recompute: str = "none") -> GPT2Config:
    return dataclasses.replace(
        model, **dict.fromkeys(PARTS, name), loss_chunk=None, recompute=recompute
    )


def config_of_seed(card: Config, o: Options, side: str, seed: int) -> Config:
    return dataclasses.replace(
        card,
        model=with_back_ends(card.model, BACK_ENDS[side]),
        seed=seed,
        max_steps=o.steps,
        sequence_length=o.sequence_length,
        batch_tokens=o.batch_tokens,
        micro_batch=o.micro_batch,
        val_every=o.steps,
        val_tokens=o.val_tokens,
        optimizer=dataclasses.replace(
            card.optimizer, warmup_steps=o.warmup_steps, schedule_steps=None
        ),
    )


def config_of_size(card: Config, o: Options, text: str) -> Config:
    """The config that one of --sizes means: a preset's name, and what may follow it.

    Raises:
        ConfigError: it means none.
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
        card,
        model=with_back_ends(model, "auto", recompute),
        seed=0,
        max_steps=o.size_steps,
        sequence_length=o.sequence_length,
        batch_tokens=int(micro_batch) * o.sequence_length,
        micro_batch=int(micro_batch),
        val_every=0,
        optimizer=dataclasses.replace(
            card.optimizer,
            learning_rate=RATES[size],
            schedule="constant",
            warmup_steps=RATES_WARMUP,
            schedule_steps=None,
        ),
    )


# ----------------------------------------------------------------------------------- the comparison
# Shapes: S seeds, K steps.


def curves(records: list[dict], smooth_steps: int) -> np.ndarray:
    """Smoothed losses, (S, K); NaN where all that is averaged is not finite."""
    losses_SK = np.array([record["loss"] for record in records], float)  # None becomes NaN
    return np.stack([smooth(losses_K, half_width=smooth_steps // 2) for losses_K in losses_SK])


def spread_of(plain_SK: np.ndarray) -> np.ndarray:
    """The standard deviation between seeds at each step, (K,)."""
    return np.sqrt(smooth(plain_SK.var(0, ddof=1), half_width=SPREAD_HALF_WIDTH))


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def distances(apart: np.ndarray, spread: np.ndarray) -> dict:
    """How far fast is from plain of the same seed, in nats and as parts of the spread's root mean
    square."""
    far, largest, unit = rms(apart), float(np.abs(apart).max()), rms(spread)
    return {
        "spread": unit,
        "apart": far,
        "apart_largest": largest,
        "apart_of_spread": far / unit,
        "apart_largest_of_spread": largest / unit,
    }


def judge(plain: list[dict], fast: list[dict], smooth_steps: int) -> dict:
    """Whether fast is `WITHIN` the spread between plain's seeds, and by how much. Records are in
    the order of seeds."""
    records = [*plain, *fast]
    if not all(is_finite(record) and record["val"] is not None for record in records):
        return {
            "within": False,
            "finite": False,
            "not_finite": {r["label"]: broke_at(r) for r in records if broke_at(r)},
        }
    plain_SK, fast_SK = curves(plain, smooth_steps), curves(fast, smooth_steps)
    spread_K, mean_K = spread_of(plain_SK), fast_SK.mean(0)
    of_means_K = np.abs(mean_K - plain_SK.mean(0)) / spread_K
    outside_K = (mean_K < plain_SK.min(0)) | (mean_K > plain_SK.max(0))
    val_plain_S, val_fast_S = (
        np.array([record["val"] for record in side]) for side in (plain, fast)
    )
    training = distances(fast_SK - plain_SK, spread_K)
    validation = distances(val_fast_S - val_plain_S, val_plain_S.std(ddof=1))
    farthest = int(of_means_K.argmax())
    return {
        "within": bool(
            of_means_K.max() <= 1
            and training["apart_of_spread"] <= 1
            and validation["apart_of_spread"] <= 1
        ),
        "finite": True,
        "means_apart_of_spread": float(of_means_K[farthest]),
        "at_step": farthest + 1,
        "steps_outside_of_seeds": int(outside_K.sum()),
        "training": training,
        "validation": validation | {"plain": val_plain_S.tolist(), "fast": val_fast_S.tolist()},
    }


def sentences(o: Options, sides: dict[str, list[dict]], found: dict) -> list[str]:
    settings = sides["fast"][0]["settings"]
    said = [f"{side}: {listed(records[0]['kernels'])}" for side, records in sides.items()]
    rate, schedule = settings["optimizer.learning_rate"], settings["optimizer.schedule"]
    said.append(
        f"{o.steps} steps of {o.batch_tokens:,} tokens, {o.seeds} seeds, learning rate {rate:g}, "
        f"{schedule} after a "
        f"warm-up of {o.warmup_steps}; losses are means over {o.smooth_steps} steps"
    )
    if not found["finite"]:
        return [*said, f"not finite: {found['not_finite'] or 'a validation loss'}: NOT within"]
    for name in ("training", "validation"):
        its = found[name]
        said.append(
            f"{name}: fast and plain of the same seed are {its['apart']:.4f} apart (root mean "
            "square) and "
            f"{its['apart_largest']:.4f} at most, {its['apart_of_spread']:.2f} and "
            f"{its['apart_largest_of_spread']:.2f} of the spread between plain's seeds, "
            f"{its['spread']:.4f}"
        )
    said.append(
        f"the means over the seeds are {found['means_apart_of_spread']:.2f} of the spread apart at "
        "most (step "
        f"{found['at_step']}); fast's is outside of plain's seeds at "
        f"{found['steps_outside_of_seeds']} of {o.steps}"
    )
    return [
        *said,
        "within the spread between seeds"
        if found["within"]
        else "NOT within the spread between seeds",
    ]


def draw(o: Options, sides: dict[str, list[dict]], found: dict, path: Path) -> None:
    """Losses above, fast − plain of each seed over the spread below."""
    from matplotlib.figure import Figure

    plain_SK, fast_SK = (curves(sides[side], o.smooth_steps) for side in ("plain", "fast"))
    steps_K, spread_K = np.arange(1, o.steps + 1), spread_of(plain_SK)
    figure = Figure(figsize=(9, 7), dpi=150, layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, 1))
    grey = {"color": "0.6", "alpha": 0.5, "linewidth": 0}
    axes.fill_between(
        steps_K,
        plain_SK.min(0),
        plain_SK.max(0),
        label=f"plain, {o.seeds} seeds: least to greatest",
        **grey,
    )
    axes.plot(steps_K, plain_SK.mean(0), color="0.3", linewidth=1, label="plain, mean of the seeds")
    below.fill_between(
        steps_K, -spread_K, spread_K, label="± standard deviation between plain's seeds", **grey
    )
    for seed, (record, plain) in enumerate(zip(sides["fast"], sides["plain"], strict=True)):
        vals = f"validation {shown(record['val'])}, plain {shown(plain['val'])}"
        axes.plot(
            steps_K,
            fast_SK[seed],
            color=f"C{seed}",
            linewidth=0.8,
            label=f"fast, seed {seed}: {vals}",
        )
        below.plot(steps_K, fast_SK[seed] - plain_SK[seed], color=f"C{seed}", linewidth=0.8)
    below.axhline(0, color="0.3", linewidth=0.8)
    settled = plain_SK[:, o.steps // 20 :]
    if np.isfinite(settled).all():
        margin = 0.03 * (settled.max() - settled.min())
        axes.set_ylim(settled.min() - margin, settled.max() + margin)
    axes.set_ylabel("training loss (nats per token)")
    axes.set_title(
        f"{sides['fast'][0]['device']}: {o.batch_tokens:,} tokens a step, means over "
        f"{o.smooth_steps} steps",
        fontsize=10,
    )
    figures = (
        f", root mean square {found['training']['apart_of_spread']:.2f} of the spread"
        if found["finite"]
        else ""
    )
    below.set_title(f"fast − plain of the same seed{figures}", fontsize=10)
    below.set(xlabel="steps", ylabel="nats per token", xlim=(0, o.steps))
    for each in (axes, below):
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
        each.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def row_of_size(size: str, record: dict) -> dict:
    """What came of one of --sizes."""
    settings = record["settings"]
    return {
        "size": size,
        "learning_rate": settings["optimizer.learning_rate"],
        "micro_batch": settings["micro_batch"],
        "recompute": settings["model.recompute"],
        "kernels": record["kernels"],
        "steps": len(record["loss"]),
        "first_loss": record["loss"][0],
        "last_loss": record["loss"][-1],
        "finite": is_finite(record),
        "not_finite_at_step": broke_at(record),
        "ms": record["ms"],
    }


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
    card = cli.load(o.card)
    sizes = {text: config_of_size(card, o, text) for text in o.sizes}
    o.out.mkdir(parents=True, exist_ok=True)
    run = Runs(o)
    try:
        sides = {
            side: [
                run(config_of_seed(card, o, side, seed), f"{side}, seed {seed}")
                for seed in range(o.seeds)
            ]
            for side in BACK_ENDS
        }
        rows = [
            row_of_size(size, run(config, f"{size} at {config.optimizer.learning_rate:g}"))
            for size, config in sizes.items()
        ]
    except OutOfTime:
        print(
            f"stopped at {elapsed_s()} s: {len(run.made)} runs are in {run.file}; the same command "
            "goes on"
        )
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
    content = {
        "command": shlex.join(
            [
                "python",
                "benchmarks/experiments/fast_and_plain.py",
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
        "runs": run.made,
    }
    (o.out / "fast_and_plain.json").write_text(
        json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"
    )
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
