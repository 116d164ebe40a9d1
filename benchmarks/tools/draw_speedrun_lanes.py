"""Draw the residual lanes of the speedrun's model, from its config.

python benchmarks/tools/draw_speedrun_lanes.py --picture docs/images/speedrun_lanes.png
"""

import dataclasses
from pathlib import Path
from typing import Any

import tyro

from gptjax.bench import style
from gptjax.models.speedrun import SpeedrunConfig

# Layer i has x from i to i + 1; attention is left, the MLP right.
ATTENTION, MLP = 0.28, 0.74
LANE_0, LANE_1, SKIP, BACKOUT = 0.0, 1.3, 0.85, -0.75
WIDTH, HEIGHT = 0.36, 0.42
FIRST_ROW, ROW = -1.55, 0.34


@dataclasses.dataclass(frozen=True)
class Options:
    """Draw the residual lanes of the speedrun's model."""

    picture: Path = Path("docs/images/speedrun_lanes.png")
    """The picture to write."""


def box(axes: Any, x: float, y: float, text: str, colour: str, width: float = WIDTH) -> None:
    """Draw a box with a text around (x, y)."""
    from matplotlib.patches import FancyBboxPatch

    corner = (x - width / 2, y - HEIGHT / 2)
    look = {"boxstyle": "round,pad=0,rounding_size=0.06", "zorder": 3}
    axes.add_patch(FancyBboxPatch(corner, width, HEIGHT, fc=colour, ec="0.25", lw=0.8, **look))
    axes.text(x, y, text, ha="center", va="center", fontsize=7, zorder=4)


def arrow(axes: Any, *points: tuple[float, float], colour: str = "0.35") -> None:
    """Draw a line through the points, with an arrow at the last."""
    x, y = zip(*points[:-1], strict=True)
    axes.plot(x, y, color=colour, lw=1.1, zorder=2, solid_capstyle="round")
    head = {"arrowstyle": "-|>", "color": colour, "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", points[-1], points[-2], arrowprops=head, zorder=2)


def add(axes: Any, x: float, y: float) -> None:
    """Draw the sum of a lane and an arrow."""
    axes.plot(x, y, "o", ms=7, mfc="white", mec="0.25", zorder=5)
    axes.text(x, y, "+", ha="center", va="center_baseline", fontsize=7, zorder=6)


def draw_inputs(axes: Any) -> None:
    box(axes, -2.05, LANE_0, "embedding\nsmear, norm", style.LIGHT_GREY, 1.0)
    box(axes, -2.05, LANE_0 - 0.7, "bigram\nembedding", style.LIGHT_GREY, 1.0)
    arrow(axes, (-1.5, LANE_0 - 0.7), (-0.6, LANE_0 - 0.7), (-0.6, LANE_0 - 0.1))
    add(axes, -0.6, LANE_0)
    axes.text(-1.05, LANE_0 + 0.1, "x0", ha="center", fontsize=8)


def draw_layers(axes: Any, c: SpeedrunConfig) -> None:
    for i in range(c.n_layer):
        two = i >= c.lanes_from
        if i == c.skip[1]:
            add(axes, i + ATTENTION, LANE_0)
        else:
            box(axes, i + ATTENTION, LANE_0, "attn", style.LIGHT_ORANGE)
        box(axes, i + MLP, LANE_1 if two else LANE_0, "MLP", style.VIOLET)
        if two:
            arrow(axes, (i + ATTENTION, HEIGHT / 2), (i + ATTENTION, LANE_1 - 0.09))
            add(axes, i + ATTENTION, LANE_1)
            arrow(axes, (i + MLP, LANE_1 - HEIGHT / 2), (i + MLP, LANE_0 + 0.09))
            add(axes, i + MLP, LANE_0)


def draw_lanes(axes: Any, c: SpeedrunConfig) -> None:
    end = c.n_layer + 0.55
    axes.plot([-1.55, end], [LANE_0, LANE_0], color=style.BLUE, lw=2.4, zorder=1)
    begin = c.lanes_from - 0.02
    axes.plot(
        [begin, begin, end, end], [LANE_0, LANE_1, LANE_1, LANE_0 + 0.2], color=style.GREEN, lw=2.4
    )
    axes.text(-0.5, LANE_0 + 0.3, "lane 0", color=style.BLUE, fontsize=9)
    axes.text(begin + 0.05, LANE_1 + 0.32, "lane 1", color=style.GREEN, fontsize=9)
    arrow(axes, (end, LANE_0), (c.n_layer + 1.02, LANE_0))
    box(axes, end, LANE_0, "mean", style.LIGHT_GREY, 0.46)

    left, right = c.skip[0] + (ATTENTION + MLP) / 2, c.skip[1] + ATTENTION
    arrow(axes, (left, LANE_0), (left, SKIP), (right, SKIP), (right, LANE_0 + 0.1))
    axes.text((left + right) / 2, SKIP + 0.08, "skip connection, gated by x0", ha="center")

    left, right = c.lanes_from + 0.98, c.n_layer + 1.12
    points = (left, LANE_0), (left, BACKOUT), (right, BACKOUT), (right, LANE_0 - 0.1)
    arrow(axes, *points)
    add(axes, right, LANE_0)
    axes.text((left + right) / 2, BACKOUT + 0.08, "backout: − λ · lane 0", ha="center")
    arrow(axes, (right + 0.1, LANE_0), (right + 0.4, LANE_0))
    box(axes, right + 0.75, LANE_0, "norm\nhead", style.LIGHT_GREY, 0.66)


def draw_rows(axes: Any, c: SpeedrunConfig) -> None:
    rows = {
        "paired heads": c.paired_layers,
        "long window, key offset": c.long_layers,
        "value embedding": c.value_layers,
        "injection of x0 and bigram": [i for i in c.attention_layers if i],
        "gate of each head": c.attention_layers,
    }
    for number, (name, layers) in enumerate(rows.items()):
        y = FIRST_ROW - ROW * number
        axes.text(-0.25, y, name, ha="right", va="center")
        axes.plot([-0.1, c.n_layer], [y, y], color="0.9", lw=0.8, zorder=0)
        axes.plot([i + 0.5 for i in layers], [y] * len(layers), "o", color="0.3", ms=5)
    for i in range(c.n_layer):
        axes.text(i + 0.5, FIRST_ROW + 0.32, str(i), ha="center", va="center", weight="bold")
    axes.text(-0.25, FIRST_ROW + 0.32, "layer", ha="right", va="center", weight="bold")


def main(o: Options) -> None:
    config = SpeedrunConfig()
    with style.picture(o.picture, (12, 4.2)) as axes:
        axes.set_axis_off()
        axes.set_xlim(-2.65, config.n_layer + 2.3)
        axes.set_ylim(FIRST_ROW - 4.6 * ROW, LANE_1 + 0.6)
        draw_inputs(axes)
        draw_lanes(axes, config)
        draw_layers(axes, config)
        draw_rows(axes, config)
    print(f"wrote {o.picture}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
