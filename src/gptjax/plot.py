"""Loss curves of one or several runs over each other.

    python -m gptjax.plot runs/gpt2_124m runs/gpt2_124m_normuon --out loss.png

No JAX here, so that the command starts fast.
"""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from gptjax.training.metrics import read_log

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
    """Draws training and validation loss of the runs into one picture.

    Args:
        paths: run folders, or their log.jsonl files.
        out: the picture; its ending names the format (png, pdf, svg, …).
        x: what the losses are drawn against.

    Returns:
        `out` as a Path.

    Raises:
        FileNotFoundError: a folder or its log.jsonl is missing, or the folder of `out` is.
        ValueError: no paths, a log without a single finite training loss, a malformed log, or an unknown picture format.
    """
    out = Path(out)
    if not paths:
        raise ValueError("nothing to plot: give at least one run folder or log.jsonl")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"no folder {out.parent} to write {out.name} into; make it first")
    logs = [_log_file(Path(path)) for path in paths]
    names = [log.resolve().parent.name for log in logs]
    if len(set(names)) < len(names):
        names = [str(log.parent) for log in logs]
    runs = [_read(log, name, x) for log, name in zip(logs, names, strict=True)]

    # A Figure by itself draws with Agg and leaves the global state of pyplot alone.
    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    handles = [_draw(axes, run, colormaps["tab10"](i % 10)) for i, run in enumerate(runs)]
    handles.append(Line2D([], [], color="0.4", linewidth=1.6, label="training, smoothed"))
    if any(len(run.val_loss) for run in runs):
        handles.append(Line2D([], [], color="0.4", linestyle="", marker="o", markersize=4, label="validation"))
    axes.set_ylim(*_loss_limits(runs))
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axes.set_xlabel(f"training {x}")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    for text in axes.legend(handles=handles, frameon=False).get_texts():
        text.set_parse_math(False)  # a run's name may hold a $
    figure.savefig(out)
    return out


def smooth(values: np.ndarray, half_width: int) -> np.ndarray:
    """Centred moving mean over 2·half_width + 1 points that leaves NaN out; NaN where all are.

    At the start, where a loss falls steeply, the window shrinks on both sides; at the end on its right side only.
    """
    index = np.arange(len(values))
    low = np.maximum(index - half_width, 0)
    high = np.minimum(index + np.minimum(half_width, index) + 1, len(values))
    finite = np.isfinite(values)
    total, count = (
        np.concatenate([[0.0], np.cumsum(terms)]) for terms in (np.where(finite, values, 0.0), finite.astype(float))
    )
    count = count[high] - count[low]
    return np.where(count > 0, (total[high] - total[low]) / np.maximum(count, 1), np.nan)


def short_number(value: float | int) -> str:
    """950, 10k, 2.5M, 1B: at most three digits that matter."""
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
    return log


def _read(log: Path, name: str, x: X) -> _Curves:
    rows = read_log(log)
    column = {"tokens": "tokens", "steps": "step"}[x]

    def points(kind):
        # A loss of NaN is null in the log, and a gap in the curve.
        pairs = [(row[column], row.get("loss")) for row in rows if row["kind"] == kind]
        array = np.array([(at, math.nan if loss is None else loss) for at, loss in pairs], float).reshape(-1, 2)
        return array[:, 0], array[:, 1]

    curves = _Curves(name, *points("train"), *points("val"))
    if not np.isfinite(curves.train_loss).any():
        raise ValueError(f"{log}: no training loss in it yet; nothing to plot")
    return curves


def _draw(axes, run: _Curves, color) -> Line2D:
    axes.plot(run.train_x, run.train_loss, color=color, linewidth=0.5, alpha=0.3)
    axes.plot(run.train_x, run.smoothed, color=color, linewidth=1.6)
    # A dark rim keeps the marks apart from the curve that they lie on.
    axes.plot(
        run.val_x, run.val_loss, color=color, linestyle="", marker="o", markersize=4, mec="black", mew=0.5, zorder=3
    )
    val = run.val_loss[np.isfinite(run.val_loss)]
    final = f"val {val[-1]:.4f}" if len(val) else f"train {run.smoothed[np.isfinite(run.smoothed)][-1]:.4f}, no val"
    return Line2D([], [], color=color, linewidth=3, label=f"{run.name} · {final}")


def _loss_limits(runs: list[_Curves]) -> tuple[float, float]:
    """Limits that show the course of training: of a long run, the fall of the first twentieth may leave the picture."""
    settled = []
    for run in runs:
        cut = 0.05 if len(run.train_x) >= 200 else 0.0
        start = run.train_x[0] + cut * (run.train_x[-1] - run.train_x[0])
        settled += [run.smoothed[run.train_x >= start], run.val_loss[run.val_x >= start]]
    settled = np.concatenate(settled)
    if not np.isfinite(settled).any():
        settled = np.concatenate([run.smoothed for run in runs])
    low, high = np.nanmin(settled), np.nanmax(settled)
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin


def main(
    runs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")
    ],
    out: Path = Path("loss.png"),
    x: X = "tokens",
) -> None:
    """Draw training and validation loss of one or several runs over each other.

    Args:
        runs: run folders, or their log.jsonl files.
        out: the picture; its ending names the format (png, pdf, svg).
        x: what the losses are drawn against.
    """
    try:
        print(plot_runs(list(runs), out, x))
    except (OSError, ValueError) as error:
        sys.exit(f"gptjax.plot: {error}")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m gptjax.plot")
