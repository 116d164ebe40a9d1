"""Plot of the loss curves of one or several runs.

    python -m gptjax.plot runs/gpt2_124m runs/gpt2_124m_normuon --out loss.png

This module does not import JAX, so that the command starts fast.
"""

import dataclasses
import itertools
import math
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from gptjax.bench import style
from gptjax.terminal import printable
from gptjax.training.run_log import read_log

X = Literal["tokens", "steps"]


@dataclasses.dataclass(frozen=True)
class _Curves:
    name: str
    train_x: np.ndarray
    train_loss: np.ndarray
    val_x: np.ndarray
    val_loss: np.ndarray

    @property
    def smoothed(self) -> np.ndarray:
        return smooth(self.train_loss, half_width=max(1, len(self.train_loss) // 50))


def plot_runs(paths: list[Path] | list[str], out: Path | str, x: X = "tokens") -> Path:
    """Plot training and validation loss of the runs in one figure.

    Args:
        paths: run folders or log.jsonl files.
        out: the image file; the suffix selects the format (png, pdf, svg, …).
        x: quantity of the horizontal axis.

    Returns:
        `out` as a Path.

    Raises:
        FileNotFoundError: a run, a log.jsonl or the folder of `out` does not exist.
        ValueError: no paths, a log without a finite training loss, a malformed log, or an unknown
            image format.
    """
    out = Path(out)
    if not paths:
        raise ValueError("nothing to plot: give at least one run folder or log.jsonl")
    if not out.parent.is_dir():
        raise FileNotFoundError(
            f"no folder {out.parent} to write {out.name} into; create the folder first"
        )
    logs = [_log_file(Path(path)) for path in paths]
    names = [log.resolve().parent.name for log in logs]
    if len(set(names)) < len(names):
        names = [str(log.parent) for log in logs]
    names = [_shortened(printable(name), 60) for name in names]
    runs = [_read(log, name, x) for log, name in zip(logs, names, strict=True)]

    with style.picture(out, (9, 5.5)) as axes:
        colours = itertools.cycle(style.COLOURS)
        handles = [_draw(axes, run, colour) for run, colour in zip(runs, colours, strict=False)]
        handles.append(Line2D([], [], color="0.4", linewidth=1.6, label="training, smoothed"))
        if any(len(run.val_loss) for run in runs):
            marker = {"linestyle": "", "marker": "o", "markersize": 4}
            handles.append(Line2D([], [], color="0.4", label="validation", **marker))
        _scale_losses(axes, runs)
        axes.set_xlim(left=0)
        # A name may contain $.
        axes.set_title(_shortened(", ".join(names), 90), parse_math=False)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axes.set_xlabel(f"training {x}")
        scale = ", log scale" if axes.get_yscale() == "log" else ""
        axes.set_ylabel(f"loss (nats per token{scale})")
        for text in axes.legend(handles=handles).get_texts():
            text.set_parse_math(False)
    return out


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
            f"{log}: expected a file, found a folder, a pipe or a device; give a run folder"
        )
    return log


def _read(log: Path, name: str, x: X) -> _Curves:
    rows = read_log(log)
    column = {"tokens": "tokens", "steps": "step"}[x]

    def points(kind):
        found = []
        for line, row in enumerate(rows, start=1):
            if row["kind"] == kind:
                at, loss = row[column], row.get("loss")
                may_be_loss = loss is None or isinstance(loss, float) or _is_number(loss)
                if not _is_number(at) or not may_be_loss:
                    raise ValueError(
                        f"{log}, line {line}: expected numbers as {column} and loss, "
                        f"found {at!r:.40} and {loss!r:.40}; correct or delete the line"
                    )
                # A loss of NaN is null in the log and a gap in the curve.
                found.append((at, loss if _is_number(loss) else math.nan))
        array = np.array(found, float).reshape(-1, 2)
        return array[:, 0], array[:, 1]

    curves = _Curves(name, *points("train"), *points("val"))
    if not np.isfinite(curves.train_loss).any():
        raise ValueError(f"{log}: no training loss in it yet; nothing to plot")
    return curves


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _draw(axes, run: _Curves, color) -> Line2D:
    axes.plot(run.train_x, run.train_loss, color=color, linewidth=0.5, alpha=0.3)
    axes.plot(run.train_x, run.smoothed, color=color, linewidth=1.6)
    # A dark edge separates the markers from the curve.
    axes.plot(
        run.val_x,
        run.val_loss,
        color=color,
        linestyle="",
        marker="o",
        markersize=4,
        mec="black",
        mew=0.5,
        zorder=3,
    )
    val = run.val_loss[np.isfinite(run.val_loss)]
    final = (
        f"val {val[-1]:.4f}"
        if len(val)
        else f"train {run.smoothed[np.isfinite(run.smoothed)][-1]:.4f}, no val"
    )
    return Line2D([], [], color=color, linewidth=3, label=f"{run.name} · {final}")


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
) -> None:
    """Plot training and validation loss of one or several runs.

    Args:
        runs: run folders or log.jsonl files.
        out: the image file; the suffix selects the format (png, pdf, svg).
        x: quantity of the horizontal axis.
    """
    try:
        print(printable(str(plot_runs(list(runs), out, x))))
    except (OSError, ValueError) as error:
        sys.exit(printable(f"gptjax.plot: {error}"))


if __name__ == "__main__":
    # A reader that ends early, such as head, ends this process without a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    tyro.cli(main, prog="python -m gptjax.plot")
