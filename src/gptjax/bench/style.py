"""The style of every picture: of bench, of `gptjax.plot` and of the benchmarks. No JAX here."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from gptjax.bench import BenchError
from gptjax.files import replacing

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
BLUE, GREEN, GREY, DARK_GREY = "#1b6ca8", "#3fa34d", "#9a9a9a", "#6f6f6f"
ORANGE, LIGHT_ORANGE, VIOLET, LIGHT_GREY = "#e07b39", "#f2b880", "#c9b7dd", "#d0d0d0"
COLOURS = (BLUE, ORANGE, GREEN, "#8a5aab", "#c44e52", "#8c6d31", "#d77fb3", DARK_GREY)

# A text to the right of a point, on a background that hides grid lines.
BESIDE = {
    "xytext": (4, 0),
    "textcoords": "offset points",
    "va": "center",
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5},
}


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
        BenchError: the suffix is not a supported format.
    """
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        names = ", .".join(sorted(formats))
        raise BenchError(f"{path}: expected a picture's name that ends in one of .{names}")
    with matplotlib.rc_context(STYLE | {"axes.prop_cycle": matplotlib.cycler(color=COLOURS)}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure.subplots(*shape, **how)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            figure.savefig(temporary, format=path.suffix[1:].lower())


def bars(axes: Any) -> None:
    """Style axes with horizontal bars and their own labels: a grid across the bars alone."""
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
