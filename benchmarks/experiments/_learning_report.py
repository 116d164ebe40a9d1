"""The result of learning.py: steps to AdamW's best loss, in numbers, in words and as a picture."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from _recorded_runs import finite

from gptjax.bench import style


def final(record: dict) -> float:
    """Return the last validation loss; infinite if a run was not finite."""
    loss = record["val"][-1][1]
    return math.inf if loss is None else loss


def shown(loss: float | None) -> str:
    """Return a validation loss in words."""
    return "not finite" if loss is None or math.isinf(loss) else f"validation loss {loss:.4f}"


def mean_curve(records: list[dict]) -> np.ndarray:
    """Return steps and the mean, minimum and maximum validation loss over the seeds, (4,
    validations); infinite after the end of a run that was not finite."""
    steps = max(([step for step, _ in record["val"]] for record in records), key=len)
    losses = np.full((len(records), len(steps)), np.inf)
    for row, record in zip(losses, records, strict=True):
        found = [math.inf if loss is None else loss for _, loss in record["val"]]
        row[: len(found)] = found
    return np.stack([steps, losses.mean(0), losses.min(0), losses.max(0)])


def reached(steps: np.ndarray, losses: np.ndarray, target: float) -> float | None:
    """Return the first step at which a curve, linear between its points, is at the target."""
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return None
    i = below[0]
    if i == 0 or not np.isfinite(losses[i - 1]):
        return float(steps[i])
    return float(np.interp(-target, -losses[[i - 1, i]], steps[[i - 1, i]]))


def summary(o: Any, found: dict) -> dict:
    """Return the fraction of AdamW's steps after which NorMuon has AdamW's best final loss, by
    means over the seeds, and what it follows from."""
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


def sentences(o: Any, found: dict, result: dict) -> list[str]:
    """Return the summary in words."""
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


def draw(o: Any, found: dict, result: dict, path: Path) -> None:
    """Draw the seeds' mean curves with their range, and the final loss of each learning rate."""
    with style.picture(path, (11, 5), 1, 2, width_ratios=(2.4, 1)) as (axes, tuning):
        _draw_curves(o, found, result, axes)
        _draw_tuning(found, tuning)


def _draw_curves(o: Any, found: dict, result: dict, axes: Any) -> None:
    fractions = zip(o.fractions, (style.BLUE, style.GREEN, *style.COLOURS[3:]), strict=False)
    colours = {"adamw": style.ORANGE} | {f"normuon {f:g}×": colour for f, colour in fractions}
    target, ends = result["adamw"]["final"], []
    for name, colour in colours.items():
        steps, mean, low, high = mean_curve(found["groups"][name])
        if not np.isfinite(mean).any():
            continue
        label = (
            f"{'AdamW' if name == 'adamw' else 'NorMuon'}, {steps[-1]:.0f} steps: {mean[-1]:.4f}"
        )
        axes.plot(steps, mean, color=colour, label=label, linewidth=1.5)
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
    mean = mean_curve(found["groups"]["adamw"])[1]
    settled = mean[len(mean) // 4 :]
    top = np.nanmax(np.where(np.isfinite(settled), settled, np.nan))
    axes.set(xlabel="steps", ylabel="validation loss (nats per token)", xlim=(0, None))
    axes.set_ylim(min(ends) - 0.05 * (top - min(ends)), top)
    axes.set_title(f"mean and range of {o.seeds} seeds, {o.batch_tokens:,} tokens a step")
    axes.legend()


def _draw_tuning(found: dict, axes: Any) -> None:
    groups = (
        ("AdamW, warm-up", found["adamw_tuning"], style.ORANGE),
        ("NorMuon, other parameters", found["normuon_tuning"], style.BLUE),
    )
    for name, trials, colour in groups:
        for i, value in enumerate(sorted({other for _, other, _ in trials})):
            points = sorted(
                (rate, loss) for rate, other, loss in trials if other == value and loss is not None
            )
            if points:
                marker = "os^v"[i % 4] + "-"
                label = f"{name} {value:g}"
                axes.plot(*zip(*points, strict=True), marker, color=colour, mfc="none", label=label)
    axes.set_xscale("log")
    axes.set(xlabel="learning rate (NorMuon: of the matrices)", title="final loss, seed 0")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12))
