"""The result of fast_and_plain.py: the verdict, in numbers, in words and as a picture.

Shapes: S seeds, K steps.
"""

from pathlib import Path
from typing import Any

import numpy as np

from gptjax.bench import style
from gptjax.plot import smooth

# Three seeds give a poor standard deviation: the variance is averaged over this many steps on both
# sides.
SPREAD_HALF_WIDTH = 25

WITHIN = (
    "every loss and gradient norm is finite; at every step the means of fast's and plain's seeds "
    "are no further "
    "apart than the spread there, the standard deviation between plain's seeds; and fast and plain "
    "of the same seed "
    "are no further apart than the spread, in the root mean square: in training over all steps, "
    "and in the validation "
    "loss at the end"
)


def shown(loss: float | None) -> str:
    """Return a loss in words."""
    return "not finite" if loss is None else f"{loss:.4f}"


def listed(kernels: dict[str, str]) -> str:
    return ", ".join(f"{part} {name}" for part, name in kernels.items())


def is_finite(record: dict) -> bool:
    return None not in (*record["loss"], *record["grad_norm"])


def broke_at(record: dict) -> int | None:
    """Return the first step whose loss or gradient norm is not finite."""
    pairs = zip(record["loss"], record["grad_norm"], strict=True)
    return next((step for step, pair in enumerate(pairs, 1) if None in pair), None)


def curves(records: list[dict], smooth_steps: int) -> np.ndarray:
    """Return the smoothed losses, (S, K); NaN where no averaged loss is finite."""
    losses_SK = np.array([record["loss"] for record in records], float)  # None becomes NaN
    return np.stack([smooth(losses_K, half_width=smooth_steps // 2) for losses_K in losses_SK])


def spread_of(plain_SK: np.ndarray) -> np.ndarray:
    """Return the standard deviation between the seeds at each step, (K,)."""
    return np.sqrt(smooth(plain_SK.var(0, ddof=1), half_width=SPREAD_HALF_WIDTH))


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def distances(apart: np.ndarray, spread: np.ndarray) -> dict:
    """Return the distance between fast and plain of the same seed, in nats and as fractions of the
    spread's root mean square."""
    far, largest, unit = rms(apart), float(np.abs(apart).max()), rms(spread)
    return {
        "spread": unit,
        "apart": far,
        "apart_largest": largest,
        "apart_of_spread": far / unit,
        "apart_largest_of_spread": largest / unit,
    }


def judge(plain: list[dict], fast: list[dict], smooth_steps: int) -> dict:
    """Return whether fast is `WITHIN` the spread between plain's seeds, and by how much.

    The records are in the order of the seeds."""
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


def sentences(o: Any, sides: dict[str, list[dict]], found: dict) -> list[str]:
    """Return the verdict in words."""
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


def row_of_size(size: str, record: dict) -> dict:
    """Return the result of one of --sizes."""
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


def draw(o: Any, sides: dict[str, list[dict]], verdict: dict, path: Path) -> None:
    """Draw the losses above, and fast − plain of each seed over the spread below."""
    plain_SK, fast_SK = (curves(sides[side], o.smooth_steps) for side in ("plain", "fast"))
    steps_K, spread_K = np.arange(1, o.steps + 1), spread_of(plain_SK)
    grey = {"color": "0.6", "alpha": 0.5, "linewidth": 0}
    shape = {"sharex": True, "height_ratios": (1.6, 1)}
    with style.picture(path, (9, 7), 2, 1, **shape) as (axes, below):
        label = f"plain, {o.seeds} seeds: minimum to maximum"
        axes.fill_between(steps_K, plain_SK.min(0), plain_SK.max(0), label=label, **grey)
        label = "plain, mean of the seeds"
        axes.plot(steps_K, plain_SK.mean(0), color="0.3", linewidth=1, label=label)
        label = "± standard deviation between plain's seeds"
        below.fill_between(steps_K, -spread_K, spread_K, label=label, **grey)
        for seed, (record, plain) in enumerate(zip(sides["fast"], sides["plain"], strict=True)):
            colour = style.COLOURS[seed % len(style.COLOURS)]
            vals = f"validation {shown(record['val'])}, plain {shown(plain['val'])}"
            label = f"fast, seed {seed}: {vals}"
            axes.plot(steps_K, fast_SK[seed], color=colour, linewidth=0.8, label=label)
            below.plot(steps_K, fast_SK[seed] - plain_SK[seed], color=colour, linewidth=0.8)
        below.axhline(0, color="0.3", linewidth=0.8)
        settled = plain_SK[:, o.steps // 20 :]
        if np.isfinite(settled).all():
            margin = 0.03 * (settled.max() - settled.min())
            axes.set_ylim(settled.min() - margin, settled.max() + margin)
        axes.set_ylabel("training loss (nats per token)")
        axes.set_title(
            f"{sides['fast'][0]['device']}: {o.batch_tokens:,} tokens a step, means over "
            f"{o.smooth_steps} steps"
        )
        figures = (
            f", root mean square {verdict['training']['apart_of_spread']:.2f} of the spread"
            if verdict["finite"]
            else ""
        )
        below.set_title(f"fast − plain of the same seed{figures}")
        below.set(xlabel="steps", ylabel="nats per token", xlim=(0, o.steps))
        axes.legend()
        below.legend()
