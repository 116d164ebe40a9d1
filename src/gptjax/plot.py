"""Plot of the loss curves of one or several runs.

    gptjax plot runs/gpt2_124m runs/gpt2_124m_normuon --out loss.png
    gptjax plot runs/lr1-seed0 runs/lr1-seed1 runs/lr2-seed0 runs/lr2-seed1 --group

This module does not import JAX, so that the command starts fast.
"""

import contextlib
import functools
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter, MaxNLocator, NullLocator, StrMethodFormatter
except ModuleNotFoundError:
    matplotlib = None

from gptjax.files import replacing
from gptjax.terminal import exit_code, hint
from gptjax.training.run_log import read_log

STYLE = {
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
BLUE, ORANGE, GREEN, DARK_GREY = "#1b6ca8", "#e07b39", "#3fa34d", "#6f6f6f"
COLOURS = (BLUE, ORANGE, GREEN, "#8a5aab", "#c44e52", "#8c6d31", "#d77fb3", DARK_GREY)

X = Literal["tokens", "steps", "time"]
_SEED = re.compile(r"[-_.]?seed[-_.]?\d+$")


@contextlib.contextmanager
def picture(
    path: Path, size: tuple[float | int, float | int], *shape: int, **how: Any
) -> Iterator[Any]:
    """Yield the axes of a picture in the common style; save it at the end.

    The global state of pyplot is not touched.

    Args:
        path: the suffix selects the format (png, pdf, svg, …). The folder is created if absent.
        size: width and height in inches.
        shape, how: arguments of `Figure.subplots`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: the suffix is not a supported format.
    """
    if matplotlib is None:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'gptjax[plot]'")
    with matplotlib.rc_context(STYLE | {"axes.prop_cycle": matplotlib.cycler(color=COLOURS)}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure.subplots(*shape, **how)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            figure.savefig(temporary, format=path.suffix[1:].lower())


class _Run(NamedTuple):
    """Arrays x and y of each curve; y is NaN where the metric is not finite."""

    name: str
    train: tuple[np.ndarray, np.ndarray]
    val: tuple[np.ndarray, np.ndarray]


def plot_runs(
    paths: Annotated[
        Sequence[Path | str],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint=""),
    ],
    out: Annotated[Path | str, tyro.conf.arg(metavar="PATH")] = "loss.png",
    x: X = "tokens",
    group: bool = False,
    metric: str = "loss",
) -> Path:
    """Plot training and validation loss of the runs, or another metric, in one figure.

    Args:
        paths: run folders or log.jsonl files.
        out: the image file; the suffix selects the format (png, pdf, svg).
        x: quantity of the horizontal axis; time: minutes of training steps.
        group: draw mean and deviation of runs whose names differ in a last part such as -seed3.
        metric: name of a number in the lines of log.jsonl, such as grad_norm.

    Returns:
        `out` as a Path.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        FileNotFoundError: a run does not exist.
        ValueError: no paths, a log without a finite training value or without times (for `x` of
            "time"), a malformed log, runs of a group that have no steps in common, or an unknown
            image format.
    """
    out = Path(out)
    if not paths:
        raise ValueError("nothing to plot: pass at least one run folder or log.jsonl")
    runs, groups = _read_all([Path(path) for path in paths], x, metric), {}
    for run in runs:
        groups.setdefault(_SEED.sub("", run.name) if group else run.name, []).append(run)
    # One width for all curves, which are compared.
    half_width = max(np.ptp(run.train[0]) for run in runs) / 50
    with picture(out, (9, 5.5)) as axes:
        colors = itertools.cycle(COLOURS)
        handles = [
            _draw(axes, name, seeds, half_width, color)
            for (name, seeds), color in zip(groups.items(), colors, strict=False)
        ]
        grouped = len(groups) < len(runs)
        what = ": mean of the seeds ± standard deviation" if grouped else ""
        handles.append(Line2D([], [], color="0.4", label=f"training, smoothed{what}"))
        marker = {"color": "0.4", "linestyle": "", "marker": "o", "markersize": 4}
        handles.append(Line2D([], [], label="validation", **marker))
        _scale(axes, np.concatenate([np.append(run.train[1], run.val[1]) for run in runs]))
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel("training time (minutes)" if x == "time" else f"training {x}")
        axes.set_ylabel("loss (nats per token)" if metric == "loss" else metric, parse_math=False)
        for text in axes.legend(handles=handles).get_texts():
            text.set_parse_math(False)  # a name may contain $
    return out


def _read_all(paths: list[Path], x: X, metric: str) -> list[_Run]:
    """Return the runs, named by their folders; by their paths if two names are equal."""
    logs = [path / "log.jsonl" if path.is_dir() else path for path in paths]
    for path, log in zip(paths, logs, strict=True):
        if not log.is_file():
            raise FileNotFoundError(f"no run at {path}: expected a run folder or a log.jsonl")
    runs = [log.parent if log.name == "log.jsonl" else log.with_suffix("") for log in logs]
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = map(str, runs)
    return [_read(log, name, x, metric) for log, name in zip(logs, names, strict=True)]


def _read(log: Path, name: str, x: X, metric: str) -> _Run:
    rows = read_log(log)
    column = "tokens" if x == "tokens" else "step"

    def values(kind: str, *names: str) -> np.ndarray:
        found = [[row[n] for n in names] for row in rows if row["kind"] == kind and metric in row]
        try:
            array = np.array(found, float).reshape(-1, len(names)).T  # None becomes NaN
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{log}: expected numbers as {' and '.join(names)}: {error}") from None
        return np.where(np.isfinite(array), array, np.nan)

    train, val = values("train", column, metric), values("val", column, metric)
    if not np.isfinite(train[1]).any():
        raise ValueError(f"{log}: no training {metric} in it yet; nothing to plot")
    if x == "time":
        (ms,) = values("train", "ms")
        timed = np.flatnonzero(np.isfinite(ms))
        if not timed.size:
            raise ValueError(f"{log}: no step has a time in ms; choose --x tokens or --x steps")
        # A step without a time, such as the first of a process, gets that of its neighbors.
        ms, steps = np.interp(np.arange(ms.size), timed, ms[timed]), np.append(0, train[0])
        minutes = np.append(0, np.cumsum(ms * np.diff(steps)) / 60_000)
        train[0], val[0] = (np.interp(at, steps, minutes) for at in (train[0], val[0]))
    return _Run(name, tuple(train), tuple(val))


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


def _mean(curves: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...]:
    """Return x, mean and standard deviation of curves, at the points of the first curve that are
    within all."""
    finite = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in curves]
    if any(len(x) == 0 for x, _ in finite):
        return np.zeros(0), np.zeros(0), np.zeros(0)
    low, high = max(x[0] for x, _ in finite), min(x[-1] for x, _ in finite)
    grid = finite[0][0]
    # Tolerance: sums of times are not exact.
    grid = grid[(grid >= low - 1e-9) & (grid <= high + 1e-9)]
    if len(grid) == 0:
        raise ValueError("the seeds of a group have no steps in common; plot without --group")
    values = np.stack([np.interp(grid, x, y) for x, y in finite])
    return grid, values.mean(0), values.std(0, ddof=len(curves) > 1)


def _draw(axes, name: str, runs: list[_Run], half_width: float, color: str) -> "Line2D":
    """Draw one run, or the mean of several; return the legend's line."""
    smoothed = []
    for x, y in (run.train for run in runs):
        spacing = np.ptp(x) / max(1, len(x) - 1)
        smoothed.append((x, smooth(y, round(half_width / (spacing or 1)))))
    x, mean, deviation = _mean(smoothed)
    val_x, val, val_deviation = _mean([run.val for run in runs])
    if several := len(runs) > 1:
        axes.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.25, lw=0)
    else:
        axes.plot(*runs[0].train, color=color, linewidth=0.5, alpha=0.3)
    axes.plot(x, mean, color=color, linewidth=1.6)
    # A dark edge separates the markers from the curve.
    marker = {"fmt": "o", "markersize": 4, "mec": "black", "mew": 0.5, "elinewidth": 1.2}
    axes.errorbar(val_x, val, val_deviation if several else None, color=color, zorder=3, **marker)
    ends = f" ± {(val_deviation if len(val) else deviation)[-1]:.4f}" if several else ""
    final = f"val {val[-1]:.4f}{ends}" if len(val) else f"train {mean[-1]:.4f}{ends}, no val"
    seeds = f" ({len(runs)} seeds)" if several else ""
    return Line2D([], [], color=color, linewidth=3, label=f"{name}{seeds} · {final}")


def _scale(axes, values: np.ndarray) -> None:
    """Make the vertical axis logarithmic, which shows both the first and the last steps."""
    low, high = np.nanmin(values), np.nanmax(values)
    if low > 0:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        if high < 20 * low:  # powers of ten would label at most two points of the axis
            axes.yaxis.set_major_locator(MaxNLocator(10))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.4g}"))


if __name__ == "__main__":
    plot = functools.partial(tyro.cli, plot_runs, prog="gptjax plot")

    def command() -> None:
        print(plot())
        hint("gptjax evaluate RUN --task bits-per-byte", piped=False)

    sys.exit(exit_code(command, (ModuleNotFoundError, ValueError)))
