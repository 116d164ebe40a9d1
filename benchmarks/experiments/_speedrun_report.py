"""The results of speedrun.py: in numbers, as tables and as pictures."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _recorded_runs import finite

from gptjax.bench import style
from gptjax.config import ConfigError

MODELS = {
    "adamw": ("GPT-2 124M, AdamW", style.ORANGE),
    "normuon": ("GPT-2 124M, NorMuon", style.BLUE),
    "speedrun": ("speedrun", style.GREEN),
}


def final(record: dict) -> float:
    """Return the last validation loss; infinite if a run was not finite."""
    loss = record["val"][-1][2]
    return math.inf if loss is None else loss


def shown(loss: float) -> str:
    """Return a validation loss in words."""
    return f"validation loss {loss:.4f}" if math.isfinite(loss) else "not finite"


def curve(records: Sequence[dict]) -> np.ndarray:
    """Return tokens, mean seconds, and the mean, minimum and maximum loss over the seeds, (5,
    validations)."""
    losses = mean_curve([{"val": [[t, loss] for t, _, loss in r["val"]]} for r in records])
    longest = max((r["val"] for r in records), key=len)
    times = [[s for _, s, _ in r["val"]] for r in records if len(r["val"]) == len(longest)]
    return np.stack([losses[0], np.mean(times, axis=0), *losses[1:]])


def comparison(models: Mapping[str, dict]) -> dict:
    """Return the cost of each model until the target, the best loss that all reach in the mean.

    Args:
        models: name → rate, tuning and records, as from `compare`.
    """
    curves = {name: curve(model["records"]) for name, model in models.items()}
    target = max(float(np.min(mean)) for _, _, mean, _, _ in curves.values())
    result: dict[str, Any] = {"target": finite(target)}
    for name, (tokens, seconds, mean, _, _) in curves.items():
        records = models[name]["records"]
        result[name] = {
            "learning_rate": models[name]["rate"],
            "tuning": models[name]["tuning"],
            "final": finite(float(mean[-1])),
            "seeds": [finite(final(record)) for record in records],
            "tokens": reached(tokens, mean, target),
            "seconds": reached(seconds, mean, target),
            "tokens_per_second": round(float(tokens[-1] / seconds[-1])),
        }
        others = models[name].get("others", {})
        result[name]["others"] = {what: finite(final(record)) for what, record in others.items()}
    return result


def markdown(*rows: Sequence[str]) -> list[str]:
    """Return the lines of a table; the first row has its names."""
    first, *others = [f"| {' | '.join(row)} |" for row in rows]
    return [first, f"|{' --- |' * len(rows[0])}", *others]


def comparison_table(result: dict) -> list[str]:
    target = result["target"]
    names = ("model", "best learning rate", "final loss (least, greatest seed)", "tokens/s")
    rows = [(*names, f"tokens to {target:.3f}", f"seconds to {target:.3f}")]
    for name, its in result.items():
        if name == "target":
            continue
        seeds = [math.inf if loss is None else loss for loss in its["seeds"]]
        loss = math.inf if its["final"] is None else its["final"]
        rows.append(
            (
                MODELS[name][0],
                f"{its['learning_rate']:g}",
                f"{loss:.3f} ({min(seeds):.3f}, {max(seeds):.3f})",
                f"{its['tokens_per_second']:,}",
                "not reached" if its["tokens"] is None else f"{its['tokens'] / 1e6:.2f} M",
                "not reached" if its["seconds"] is None else f"{its['seconds']:.1f}",
            )
        )
    return markdown(*rows)


def notes(result: dict) -> list[str]:
    """Return sentences about seeds, learning rates and other runs, after an empty line."""
    said, most = [], max(len(its["seeds"]) for name, its in result.items() if name != "target")
    for name, its in result.items():
        if name == "target":
            continue
        if (seeds := len(its["seeds"])) < most:
            said.append(f"{MODELS[name][0]} has {seeds} seeds, not {most}.")
        tried = [rate for rate, _ in its["tuning"]]
        if len(tried) > 1 and its["learning_rate"] in (tried[0], tried[-1]):
            said.append(f"The best learning rate of {MODELS[name][0]} is the last one tried.")
        for what, loss in its["others"].items():
            loss = "a loss that is not finite" if loss is None else f"{loss:.3f}"
            said.append(f"With {what}, the speedrun's model ends at {loss} (seed 0).")
    return ["", *said] if said else []


def report_comparison(models: Mapping[str, dict], picture: Path) -> tuple[dict, list[str]]:
    """Draw the comparison; return the fields of the result and the lines of its table."""
    result = comparison(models)
    with style.picture(picture, (10, 4), 1, 2, sharey=True) as panels:
        for i, (axes, name) in enumerate(zip(panels, ("tokens (M)", "seconds"), strict=True)):
            for model in models:
                label, colour = MODELS[model]
                points = curve(models[model]["records"])
                x, (mean, low, high) = points[i] / (1e6 if i == 0 else 1), points[2:]
                axes.plot(x, mean, color=colour, label=f"{label}: {mean[-1]:.3f}")
                axes.fill_between(x, low, high, color=colour, alpha=0.3, linewidth=0)
            axes.axhline(result["target"], color="0.4", linestyle=":", linewidth=1)
            axes.set(xlabel=f"training {name}", xlim=(0, None))
        losses = np.concatenate([curve(model["records"])[2] for model in models.values()])
        settled = losses[np.isfinite(losses)]
        panels[0].set_ylim(settled.min() - 0.1, min(settled.max(), settled.min() + 3))
        panels[0].set_ylabel("validation loss (nats per token)")
        seeds = max(len(model["records"]) for model in models.values())
        panels[0].set_title(f"mean and range of {seeds} seeds")
        panels[0].legend(loc="upper right")
    return {"result": result}, [*comparison_table(result), *notes(result)]


def ablation(records: Mapping[str, dict]) -> list[dict]:
    """Return a row for each idea: loss and milliseconds without the idea, and their differences to
    those with all ideas. The milliseconds are compared with a run of the same part, if any. They
    are None in runs that shared their GPU."""
    whole, rows = final(records["all ideas"]), []
    ms = {r["part"]: r["ms"] for name, r in records.items() if name.startswith("all ideas")}
    for name, record in records.items():
        loss, base = final(record), ms.get(record["part"])
        rows.append(
            {
                "without": name,
                "loss": finite(loss),
                "more_loss": finite(round(loss - whole, 4)),
                "ms": record["ms"],
                "more_ms": None if base is None else round(record["ms"] - base, 2),
            }
        )
    first, *others = rows
    return [first, *sorted(others, key=lambda row: -final(records[row["without"]]))]


def ablation_table(rows: Sequence[dict]) -> list[str]:
    names = ["left out", "final loss", "difference"]
    timed = any(row["ms"] is not None for row in rows)
    names += ["ms a step", "difference in ms"] if timed else []
    cells = []
    for row in rows:
        loss = ("not finite", "") if row["loss"] is None else (f"{row['loss']:.4f}",)
        name = row["without"].replace("all ideas", "nothing")
        more = () if row["loss"] is None else (f"{row['more_loss']:+.4f}",)
        ms = "" if row["more_ms"] is None else f"{row['more_ms']:+.1f}"
        cells.append((name, *loss, *more, *((f"{row['ms']:.1f}", ms) if timed else ())))
    return markdown(names, *cells)


def report_ablation(records: Mapping[str, dict], picture: Path) -> tuple[dict, list[str]]:
    """Draw the ablation; return the fields of the result and the lines of its table."""
    rows = ablation(records)
    drawn = [row for row in rows[1:] if row["loss"] is not None][::-1]
    names = [row["without"] for row in drawn]
    fields = {"more_loss": "loss (nats per token)", "more_ms": "ms a step"}
    fields = {name: fields[name] for name in fields if any(row[name] is not None for row in drawn)}
    size = 2 + 4 * len(fields), 0.9 + 0.25 * len(rows)
    with style.picture(picture, size, 1, len(fields), sharey=True) as panels:
        for axes, (field, unit) in zip(np.atleast_1d(panels), fields.items(), strict=True):
            known = [row for row in drawn if row[field] is not None]
            axes.barh(names, 0)  # all names, in order
            axes.barh([r["without"] for r in known], [r[field] for r in known], color=style.BLUE)
            axes.axvline(0, color="0.3", linewidth=0.8)
            axes.set_xlabel(f"without the idea − with all ideas: {unit}")
            style.bars(axes)
    return {"result": rows}, ablation_table(rows)


def write_part(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace the part of an experiment in a page.

    Raises:
        ConfigError: the page lacks the part's begin or end.
    """
    begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
    parts = re.split(f"{begin}.*?{end}", page.read_text(), flags=re.DOTALL)
    if len(parts) != 2:
        raise ConfigError(f"{page}: expected {begin} and {end} once")
    page.write_text(f"{parts[0]}{begin}\n\n{'\n'.join(lines)}\n\n{end}{parts[1]}")


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
