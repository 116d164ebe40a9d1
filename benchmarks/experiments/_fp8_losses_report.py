"""The result of fp8_losses.py: numbers, a picture, and the results that the configs state."""

import math
import re
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptjax.bench import results, style
from gptjax.config import ConfigError

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "fp8_losses.json"
PICTURE = ROOT / "docs" / "images" / "fp8_losses.png"
COMMAND = "python benchmarks/experiments/fp8_losses.py --out FOLDER --data-dir data"
CONFIGS = {
    "adamw": ROOT / "configs" / "gpt2_124m_docs.py",
    "normuon": ROOT / "configs" / "gpt2_124m_normuon_docs.py",
    "speedrun": ROOT / "configs" / "speedrun_docs.py",
}
# Baseline of a group: the runs of this group and precision.
COMPARED_WITH = {
    "control": ("short", "bf16"),
    "finish": ("adamw", "bf16"),
    "moments": ("adamw", "fp8"),
    "start": ("short", "bf16"),
}
# Steps whose mean loss is compared before and after a spike.
AROUND = 20
# Last steps over which the training losses are compared.
LAST = 200
Runs = dict[str, dict[str, list[dict]]]


def final(record: dict) -> float | None:
    """Return the validation loss of the last step; None if the run ended before."""
    return None if record["not_finite"] or not record["val"] else record["val"][-1][1]


def grouped(records: Sequence[dict]) -> Runs:
    """Return group → precision → records by seed. The newest record of a run counts."""
    newest = {record["name"]: record for record in records}
    groups: Runs = {}
    for record in sorted(newest.values(), key=lambda record: record["seed"]):
        runs = groups.setdefault(record["group"], {}).setdefault(record["precision"], [])
        runs.append(record)
    return groups


def losses_of(records: Sequence[dict]) -> np.ndarray:
    """Return the training losses, (seeds, steps); NaN after the end of a run."""
    steps = max(len(record["loss"]) for record in records)
    losses = np.full((len(records), steps), np.nan)
    for row, record in zip(losses, records, strict=True):
        row[: len(record["loss"])] = [math.nan if x is None else x for x in record["loss"]]
    return losses


def of_runs(records: Sequence[dict]) -> dict[str, Any]:
    """Return the final losses and the speed of the runs with one precision."""
    finals = [final(record) for record in records]
    known = [loss for loss in finals if loss is not None]
    return {
        "seeds": [record["seed"] for record in records],
        "final": round(statistics.fmean(known), 5) if len(known) == len(finals) else None,
        "finals": finals,
        "steps": [record["steps"] for record in records],
        "tokens_per_second": mean_of_known(records, "tokens_per_second", None),
        "training_seconds": mean_of_known(records, "training_seconds", 1),
        "command_seconds": mean_of_known(records, "command_seconds", 1),
    }


def mean_of_known(records: Sequence[dict], name: str, digits: int | None) -> float | None:
    """Return the rounded mean of the records that have a value; None if none has."""
    known = [record[name] for record in records if record[name] is not None]
    return round(statistics.fmean(known), digits) if known else None


def compared(bf16: Sequence[dict], fp8: Sequence[dict]) -> dict[str, Any]:
    """Return the differences fp8 − bf16 over the seeds that both have.

    Returns:
        difference: of the mean final losses; None if a run was not finite.
        standard_error: of this mean of paired differences; None for one seed.
        steps_within_spread: share of the steps at which the mean training loss of fp8 is between
            the least and the greatest of bf16's seeds; None for one seed.
        training_difference: mean difference of the training losses over the last `LAST` steps.
        paired_rms: RMS difference of the training losses of a seed in the second half of the run.
    """
    both = {record["seed"] for record in bf16} & {record["seed"] for record in fp8}
    one, other = ([r for r in runs if r["seed"] in both] for runs in (bf16, fp8))
    if not both:
        return {}
    pairs = list(zip(map(final, one), map(final, other), strict=True))
    differences = [b - a for a, b in pairs if a is not None and b is not None]
    whole = len(differences) == len(pairs)
    a, b = losses_of(one), losses_of(other)
    steps = min(a.shape[1], b.shape[1])
    a, b = a[:, :steps], b[:, :steps]
    mean, several = b.mean(0), len(both) > 1
    within = (a.min(0) <= mean) & (mean <= a.max(0))
    rms = float(np.sqrt(np.mean((b - a)[:, steps // 2 :] ** 2)))
    error = statistics.stdev(differences) / len(both) ** 0.5 if whole and several else None
    return {
        "difference": round(statistics.fmean(differences), 5) if whole else None,
        "standard_error": None if error is None else round(error, 5),
        "steps_within_spread": round(float(within.mean()), 4) if several else None,
        "training_difference": finite(float((b - a)[:, -LAST:].mean())),
        "paired_rms": finite(rms),
    }


def recovery(record: dict) -> dict[str, Any]:
    """Return the losses around the step with the spike.

    Returns:
        before: mean of the losses of the `AROUND` steps before; None if one was not finite.
        greatest: greatest loss after the step; None if a loss was not finite.
        recovered_after: steps after which the mean of the last `AROUND` losses is at most `before`;
            None if never.
    """
    losses, at = losses_of([record])[0], record["spike_step"]
    before, after = losses[max(0, at - AROUND) : at].tolist(), losses[at + 1 :]
    mean = statistics.fmean(before) if before else math.nan
    means = np.convolve(after, np.ones(AROUND) / AROUND, "valid") if len(after) >= AROUND else []
    back = np.flatnonzero(np.asarray(means) <= mean)
    greatest = float(after.max()) if len(after) else math.nan
    return {
        "before": finite(mean),
        "greatest": finite(greatest),
        "recovered_after": int(back[0]) + AROUND if len(back) else None,
    }


def finite(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None


def summary(records: Sequence[dict]) -> dict[str, dict]:
    """Return the numbers of each group and precision that the tables show."""
    groups, result = grouped(records), {}
    for group, runs in groups.items():
        result[group] = {precision: of_runs(each) for precision, each in runs.items()}
        if "bf16" in runs and "fp8" in runs:
            result[group]["fp8"] |= compared(runs["bf16"], runs["fp8"])
        baseline, with_precision = COMPARED_WITH.get(group, (None, None))
        if same := groups.get(baseline, {}).get(with_precision):
            for precision, each in runs.items():
                result[group][precision] |= compared(same, each)
        if group == "spike":
            for precision, each in runs.items():
                result[group][precision] |= recovery(each[0])
    return result


def draw(records: Sequence[dict], path: Path) -> None:
    """Draw validation losses, and the difference of the training losses, with their ranges."""
    groups = grouped(records)
    curves = [
        (f"{name}, {precision}", groups.get(group, {}).get(precision), colour, line)
        for group, name, colours in (
            ("adamw", "AdamW", (style.ORANGE, style.GREEN)),
            ("normuon", "NorMuon", (style.BLUE, style.DARK_GREY)),
        )
        for precision, colour, line in zip(("bf16", "fp8"), colours, ("-", "--"), strict=True)
    ]
    with style.picture(path, (10, 4), 1, 2) as (left, right):
        for label, runs, colour, line in curves:
            if not runs:
                continue
            length = min(len(record["val"]) for record in runs)
            # The loss of step 0, about 11, would compress the rest of the curves.
            steps = [step for step, _ in runs[0]["val"][1:length]]
            losses = np.array([[loss for _, loss in r["val"][1:length]] for r in runs], float)
            label = f"{label}, {len(runs)} seeds"
            left.plot(steps, losses.mean(0), color=colour, linestyle=line, label=label)
            left.fill_between(steps, losses.min(0), losses.max(0), color=colour, alpha=0.3)
        left.set(xlabel="steps", ylabel="validation loss (nats per token)", xlim=(0, None))
        left.legend()
        _draw_differences(groups.get("adamw", {}), right)


def _draw_differences(runs: dict[str, list[dict]], axes: Any, window: int = 20) -> None:
    """Draw the training losses minus the mean of bf16's seeds, as means of `window` steps."""
    if not {"bf16", "fp8"} <= runs.keys():
        return
    bf16, fp8 = losses_of(runs["bf16"]), losses_of(runs["fp8"])
    length = min(bf16.shape[1], fp8.shape[1])
    mean, count = bf16[:, :length].mean(0), max(1, length // window)
    parts = np.array_split(np.arange(length), count)
    steps = [part.mean() for part in parts]

    def windowed(losses):
        return np.array([(losses[:, :length] - mean)[:, part].mean(1) for part in parts]).T

    spread, difference = windowed(bf16), windowed(fp8).mean(0)
    axes.fill_between(
        steps, spread.min(0), spread.max(0), color=style.ORANGE, alpha=0.3, label="bf16's seeds"
    )
    axes.plot(steps, difference, color=style.GREEN, label="fp8, mean of the seeds")
    axes.set(xlabel="steps", ylabel=f"AdamW: training loss − mean of bf16, {window} steps")
    axes.legend()


def commits_of(records: Sequence[dict], commit: str | None) -> list[str]:
    """Return the commits of the records; `commit` for records without one."""
    found = {record["commit"] or commit for record in records}
    return sorted(name for name in found if name)


def state_result(path: Path, records: Sequence[dict], commit: str | None) -> None:
    """Write time and loss of the runs into the docstring of a config.

    Raises:
        ConfigError: the docstring has no paragraph that ends with Time and Loss.
    """
    runs, first = of_runs(records), records[0]
    each = ", ".join("not finite" if loss is None else f"{loss:.4f}" for loss in runs["finals"])
    mean = "not finite" if runs["final"] is None else f"{runs['final']:.4f}"
    commits = commits_of(records, commit)
    named = ", ".join(name[:7] for name in commits) or "not recorded"
    time = f"not measured: other processes shared the {first['device']}"
    if runs["command_seconds"] is not None:
        time = (
            f"{runs['command_seconds']:.0f} s on one {first['device']}, from the command to its "
            f"end, at {runs['tokens_per_second']:,} tokens/s (runs without checkpoints)"
        )
    seeds = f"the mean of {len(records)} seeds ({each})"
    if len(records) == 1:
        seeds = f"seed {first['seed']}"
    texts = {
        "Time": time,
        "Loss": f"{mean} at step {runs['steps'][0]:,}, {seeds}; "
        f"{max(r['date'] for r in records)}, commit{'s' * (len(commits) > 1)} {named}",
    }
    lines = [
        textwrap.fill(text, 100, initial_indent=f"{name + ':':<11}", subsequent_indent=" " * 11)
        for name, text in texts.items()
    ]
    pattern = re.compile(r'^Time: .*?\n(?=\n|""")', re.MULTILINE | re.DOTALL)
    new, count = pattern.subn(lambda _: "\n".join(lines) + "\n", path.read_text(), count=1)
    if count != 1:
        raise ConfigError(f"{path}: expected a docstring with Time and Loss")
    path.write_text(new)


def report(
    records: Sequence[dict],
    commit: str | None,
    result: Path = RESULT,
    picture: Path = PICTURE,
    configs: dict[str, Path] | None = None,
) -> int:
    """Write the result, the picture and the configs' results; print the numbers. Return 0.

    Raises:
        ConfigError: there are no records.
    """
    if not records:
        raise ConfigError("expected runs_*.jsonl with records in --out, found none")
    found = summary(records)
    rows = [
        {name: value for name, value in row.items() if name != "grad_norm" or row["spike_step"]}
        for runs in grouped(records).values()
        for each in runs.values()
        for row in each
    ]
    devices = ", ".join(sorted({row["device"] for row in rows}))
    commits = ", ".join(commits_of(rows, commit)) or None
    written = results.new(COMMAND, rows, device=devices, result=found)
    written |= {"date": max(row["date"] for row in rows), "commit": commits}
    results.write(result, written | {"versions": rows[-1]["versions"]})
    draw(records, picture)
    for group, path in (CONFIGS if configs is None else configs).items():
        if runs := grouped(records).get(group, {}).get("bf16"):
            state_result(path, runs, commit)
    for group, runs in found.items():
        for precision, numbers in runs.items():
            print(f"{group} {precision}: {numbers}")
    print(f"wrote {result} and {picture}; run benchmarks/tools/result_tables.py")
    return 0
