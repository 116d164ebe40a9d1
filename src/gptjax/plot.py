"""Plot of the loss curves of one or several runs.

    python -m gptjax.plot runs/gpt2_124m runs/gpt2_124m_normuon --out loss.png
    python -m gptjax.plot runs/lr1-seed0 runs/lr1-seed1 runs/lr2-seed0 runs/lr2-seed1 --group

This module does not import JAX, so that the command starts fast.
"""

import dataclasses
import itertools
import math
import re
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from gptjax.bench import style
from gptjax.terminal import command_line, printable
from gptjax.training.run_log import read_log

X = Literal["tokens", "steps", "time"]
_SEED = re.compile(r"[-_.]?seed[-_.]?\d+$")


@dataclasses.dataclass(frozen=True)
class _Curves:
    name: str
    train_x: np.ndarray
    train_loss: np.ndarray
    val_x: np.ndarray
    val_loss: np.ndarray

    @property
    def _spacing(self) -> float:
        return float(np.ptp(self.train_x)) / max(1, len(self.train_x) - 1)

    @property
    def half_width(self) -> float:
        """2 % of the curve, and at least the distance of two points, in units of x."""
        return max(self._spacing, float(np.ptp(self.train_x)) / 50)

    def smoothed(self, half_width: float) -> np.ndarray:
        """Return the moving mean of the training loss over 2·half_width, in units of x."""
        return smooth(self.train_loss, round(half_width / (self._spacing or 1)))


def plot_runs(
    paths: list[Path] | list[str],
    out: Path | str,
    x: X = "tokens",
    group: bool = False,
    metric: str = "loss",
) -> Path:
    """Plot training and validation loss of the runs, or another metric, in one figure.

    Args:
        paths: run folders or log.jsonl files.
        out: the image file; the suffix selects the format (png, pdf, svg, …).
        x: quantity of the horizontal axis. The time is the time of training steps, without
            compilation, validation and checkpoints.
        group: average runs whose names differ only in a last part such as "-seed3". Draw the mean,
            with a band of one standard deviation to each side.
        metric: name of a number in the lines of the log, such as grad_norm.

    Returns:
        `out` as a Path.

    Raises:
        FileNotFoundError: a run, a log.jsonl or the folder of `out` does not exist.
        ValueError: no paths, a log without a finite training value or without times (for `x` of
            "time"), a malformed log, runs of a group that have no steps in common, or an unknown
            image format.
    """
    out = Path(out)
    if not paths:
        raise ValueError("nothing to plot: pass at least one run folder or log.jsonl")
    if not out.parent.is_dir():
        raise FileNotFoundError(
            f"no folder {out.parent} to write {out.name} into; create the folder first"
        )
    logs = [_log_file(Path(path)) for path in paths]
    names = [_run_name(log) for log in logs]
    if len(set(names)) < len(names):
        paths = [log.parent if log.name == "log.jsonl" else log.with_suffix("") for log in logs]
        names = [str(path) for path in paths]
    names = [printable(name) for name in names]
    runs = [_read(log, name, x, metric) for log, name in zip(logs, names, strict=True)]
    groups = _grouped(runs) if group else [[run] for run in runs]

    half_width = max(run.half_width for run in runs)  # one for all curves, which are compared

    with style.picture(out, (9, 5.5)) as axes:
        colours = itertools.cycle(style.COLOURS)
        pairs = zip(groups, colours, strict=False)
        handles = [_draw(axes, runs, half_width, color) for runs, color in pairs]
        grey = {"color": "0.4", "linewidth": 1.6}
        handles.append(Line2D([], [], **grey, label="training, smoothed"))
        if any(len(runs) > 1 for runs in groups):
            handles[-1].set_label("training, smoothed: mean of the seeds ± standard deviation")
        if any(len(run.val_loss) for run in runs):
            marker = {"linestyle": "", "marker": "o", "markersize": 4}
            handles.append(Line2D([], [], color="0.4", label="validation", **marker))
        _scale_losses(axes, runs)
        axes.set_xlim(left=0)
        # A name may contain $.
        title = ", ".join(_group_name(runs) for runs in groups)
        axes.set_title(_shortened(title, 90), parse_math=False)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axes.set_xlabel("training time (minutes)" if x == "time" else f"training {x}")
        scale = ", log scale" if axes.get_yscale() == "log" else ""
        label = f"loss (nats per token{scale})" if metric == "loss" else f"{metric}{scale}"
        axes.set_ylabel(label, parse_math=False)
        for text in axes.legend(handles=handles).get_texts():
            text.set_parse_math(False)
    return out


def _run_name(log: Path) -> str:
    """Return the name of the run's folder; of a copied log such as gpt2.jsonl, "gpt2"."""
    return log.resolve().parent.name if log.name == "log.jsonl" else log.stem


def smooth(values: np.ndarray, half_width: int) -> np.ndarray:
    """Return the centred moving mean over 2·half_width + 1 points, ignoring NaN.

    The mean of a window of NaN is NaN. At the start, where the loss falls steeply, the window
    shrinks on both sides; at the end it shrinks on the right side only.
    """
    index = np.arange(len(values))
    low = np.maximum(index - half_width, 0)
    high = np.minimum(index + np.minimum(half_width, index) + 1, len(values))
    finite = np.isfinite(values)
    total, count = (
        np.concatenate([[0.0], np.cumsum(terms)])
        for terms in (np.where(finite, values, 0.0), finite.astype(float))
    )
    count = count[high] - count[low]
    return np.where(count > 0, (total[high] - total[low]) / np.maximum(count, 1), np.nan)


def short_number(value: float | int) -> str:
    """Format a number with at most four significant digits and a suffix: 950, 10k, 2.5M, 1B."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.4g}"


def _log_file(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"no run at {path}: expected a run folder or a log.jsonl")
    log = path / "log.jsonl" if path.is_dir() else path
    if not log.exists():
        raise FileNotFoundError(f"no log.jsonl in {path}: is it a run folder?")
    if not log.is_file():
        raise ValueError(
            f"{log}: expected a file, found a folder, a pipe or a device; pass a run folder"
        )
    return log


def _read(log: Path, name: str, x: X, metric: str = "loss") -> _Curves:
    rows = read_log(log)
    column = {"tokens": "tokens", "steps": "step", "time": "step"}[x]

    def points(kind):
        found = []
        for line, row in enumerate(rows, start=1):
            if row["kind"] == kind and (metric == "loss" or metric in row):
                at, loss = row[column], row.get(metric)
                may_be_loss = loss is None or isinstance(loss, float) or _is_number(loss)
                if not _is_number(at) or not may_be_loss:
                    raise ValueError(
                        f"{log}, line {line}: expected numbers as {column} and {metric}, "
                        f"found {at!r:.40} and {loss!r:.40}; correct or delete the line"
                    )
                # A loss of NaN is null in the log and a gap in the curve.
                found.append((at, loss if _is_number(loss) else math.nan))
        array = np.array(found, float).reshape(-1, 2)
        return _minutes(log, rows, array[:, 0]) if x == "time" else array[:, 0], array[:, 1]

    curves = _Curves(name, *points("train"), *points("val"))
    if not np.isfinite(curves.train_loss).any():
        raise ValueError(f"{log}: no training {metric} in it yet; nothing to plot")
    return curves


def _minutes(log: Path, rows: list[dict], steps: np.ndarray) -> np.ndarray:
    """Return the training time at each of `steps`: the sum of the times of all earlier steps.

    A step without a time, such as the first of a process, gets the time of the next timed step.

    Raises:
        ValueError: no step has a time.
    """
    train = [row for row in rows if row["kind"] == "train"]
    known = [i for i, row in enumerate(train) if _is_number(row.get("ms"))]
    if not known:
        raise ValueError(f"{log}: no step has a time in ms; choose --x tokens or --x steps")
    nearest = np.minimum(np.searchsorted(known, np.arange(len(train))), len(known) - 1)
    ms = np.array([train[known[i]]["ms"] for i in nearest], float)
    # The log may lack steps.
    at = np.array([0, *(row["step"] for row in train)], float)
    return np.interp(steps, at, np.cumsum([0, *(ms * np.diff(at))]) / 60_000)


def _grouped(runs: list[_Curves]) -> list[list[_Curves]]:
    """Return the runs by name without the seed, in the order of the first run of each name."""
    groups: dict[str, list[_Curves]] = {}
    for run in runs:
        groups.setdefault(_SEED.sub("", run.name), []).append(run)
    return list(groups.values())


def _group_name(runs: list[_Curves]) -> str:
    name = runs[0].name
    if len(runs) > 1:
        name = f"{_SEED.sub('', name)} ({len(runs)} seeds)".strip()
    return _shortened(name, 60)


def _mean(curves: list[tuple[np.ndarray, np.ndarray]], what: str):
    """Return x, mean and standard deviation of several curves, at the points of the first curve
    that are within all.

    Raises:
        ValueError: there are no such points.
    """
    finite = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in curves]
    if any(len(x) == 0 for x, _ in finite):
        return np.zeros(0), np.zeros(0), np.zeros(0)
    low, high = max(x[0] for x, _ in finite), min(x[-1] for x, _ in finite)
    grid = finite[0][0]
    # Tolerance: sums of times are not exact.
    grid = grid[(grid >= low - 1e-9) & (grid <= high + 1e-9)]
    if len(grid) == 0:
        raise ValueError(f"the seeds of {what} have no steps in common; plot them without --group")
    values = np.stack([np.interp(grid, x, y) for x, y in finite])
    return grid, values.mean(0), values.std(0, ddof=1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _draw(axes, runs: list[_Curves], half_width: float, color) -> Line2D:
    """Draw one run, or the mean of several; return the legend's line."""
    # A dark edge separates the markers from the curve.
    marker = {"linestyle": "", "marker": "o", "markersize": 4, "mec": "black", "mew": 0.5}
    name = _group_name(runs)
    if len(runs) > 1:
        x, mean, deviation = _mean([(run.train_x, run.smoothed(half_width)) for run in runs], name)
        axes.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.25, lw=0)
        axes.plot(x, mean, color=color, linewidth=1.6)
        val_x, val, val_deviation = _mean([(run.val_x, run.val_loss) for run in runs], name)
        axes.errorbar(val_x, val, val_deviation, color=color, elinewidth=1.2, zorder=3, **marker)
        ends = f" ± {val_deviation[-1]:.4f}" if len(val) else f" ± {deviation[-1]:.4f}"
    else:
        (run,) = runs
        axes.plot(run.train_x, run.train_loss, color=color, linewidth=0.5, alpha=0.3)
        smoothed = run.smoothed(half_width)
        axes.plot(run.train_x, smoothed, color=color, linewidth=1.6)
        axes.plot(run.val_x, run.val_loss, color=color, zorder=3, **marker)
        mean = smoothed[np.isfinite(smoothed)]
        val, ends = run.val_loss[np.isfinite(run.val_loss)], ""
    final = f"val {val[-1]:.4f}{ends}" if len(val) else f"train {mean[-1]:.4f}{ends}, no val"
    return Line2D([], [], color=color, linewidth=3, label=f"{name} · {final}")


def _scale_losses(axes, runs: list[_Curves]) -> None:
    """Make the vertical axis logarithmic, which shows both the first and the last steps."""
    losses = np.concatenate([[*run.train_loss, *run.val_loss] for run in runs])
    low, high = np.nanmin(losses), np.nanmax(losses)
    if low <= 0:
        return
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    if high < 20 * low:  # powers of ten would label at most two points of the axis
        axes.yaxis.set_major_locator(MaxNLocator(10))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length // 2]}…{text[-(length // 2) :]}"


def main(
    runs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint=""),
    ],
    out: Path = Path("loss.png"),
    x: X = "tokens",
    group: bool = False,
    metric: str = "loss",
) -> None:
    """Plot training and validation loss, or another metric, of one or several runs.

    Args:
        runs: run folders or log.jsonl files.
        out: the image file; the suffix selects the format (png, pdf, svg).
        x: quantity of the horizontal axis; time: minutes of training steps.
        group: average runs whose names differ only in a last part such as -seed3. Draw mean and
            standard deviation.
        metric: name of a number in the lines of log.jsonl, such as grad_norm.
    """
    try:
        print(printable(str(plot_runs(list(runs), out, x, group, metric))))
    except (OSError, ValueError) as error:
        sys.exit(printable(f"gptjax.plot: {error}"))


if __name__ == "__main__":
    # End without a traceback if the reader, such as head, ends early.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    command_line(main, prog="python -m gptjax.plot")
