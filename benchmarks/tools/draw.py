"""Draw results of `python -m gptjax.bench` kernels, ladder and profile, one picture for each file.

    python benchmarks/tools/draw.py benchmarks/results/kernels docs/images/kernels

Of kernels a bar is the speed of an implementation, as a share of the GPU's ceiling; cases without a
target are left out. Of ladder it is the tokens/s of a rung, of profile the time of a part.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gptjax.bench import results
from gptjax.bench.hlo import ORDER, PASSES
from gptjax.plot import BLUE, DARK_GREY, GREEN, ORANGE, picture

GREY, LIGHT_GREY, LIGHT_ORANGE, VIOLET = "#9a9a9a", "#d0d0d0", "#f2b880", "#c9b7dd"
# Of implementations and systems, by the first word of the name.
COLOURS = {"mosaic": BLUE, "auto": BLUE, "gptjax": BLUE, "triton": GREEN}
COLOURS |= {"xla": GREY, "cudnn": DARK_GREY, "torch": ORANGE}
COLOURS |= {"torch.compile": LIGHT_ORANGE}
PASS_COLOURS = dict(zip(PASSES, (BLUE, VIOLET, ORANGE, GREEN), strict=True))
CEILINGS = {"memory": "copy rate", "bf16": "bf16 matmul"}
# A text to the right of a point, on a background that hides grid lines.
BESIDE = {
    "xytext": (4, 0),
    "textcoords": "offset points",
    "va": "center",
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5},
}
# The heading of a group of bars; text, length and colour of a bar.
Bar = tuple[str, str, float, str]


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("results", type=Path, help="folder of JSON files, or one file")
    parser.add_argument("pictures", type=Path, help="folder: NAME.png for each file NAME.json")
    options = parser.parse_args(argv)
    is_folder = options.results.is_dir()
    for file in sorted(options.results.glob("*.json")) if is_folder else [options.results]:
        result, out = results.read(file), options.pictures / f"{file.stem}.png"
        first = result["rows"][0]
        draw = draw_profile if "parts" in first else draw_ladder
        (draw if "model" in first else draw_kernels)(result, out)
        print(f"wrote {out}")
    return 0


def draw_kernels(result: dict, path: Path) -> None:
    """Draw a bar for each implementation of each case with a target; 100 % is the ceiling of the
    same run."""
    limits, bars = result["ceilings"], []
    for row in (row for row in result["rows"] if row["bar"]):
        bound = CEILINGS.get(row["bound"], row["bound"])
        case = f"{row['kernel']}: {row['case']}   (of the {bound}; target {row['bar']})"
        name = row["implementation"]
        text = f"{name}: did not run" if "error" in row else f"{name}  {row['ms']:.3g} ms"
        colour = COLOURS.get(name.split()[0].rstrip(","), VIOLET)
        bars.append((case, text, 100 * row.get("ceiling", 0), colour))
    rates = f"copy {limits['bytes_per_s'] / 1e12:.2f} TB/s, bf16 matmul"
    rates += f" {limits['flops_per_s'] / 1e12:.0f} TFLOP/s"
    label = "% of the ceiling measured in the same run (longer is faster)"
    _draw(path, bars, f"{result['device']}, {result['date']}: {rates}", label)


def draw_ladder(result: dict, path: Path) -> None:
    """Draw a bar of tokens/s for each rung of each system."""
    bars, first = [], result["rows"][0]
    for row in result["rows"]:
        speed = row.get("tokens/s", 0)
        text = f"{row['rung']}: " + (f"{speed:,.0f}" if speed else "did not run")
        factor = f"   {row['factor']:.2f} ×" if row.get("factor", 1) != 1 else ""
        bars.append((row["system"], text + factor, speed, COLOURS[row["system"]]))
    size = f"{first['model']}, {first['batch']} × {first['sequence_length']} tokens a step"
    label = "tokens/s of a full training step (× over the rung before)"
    _draw(path, bars, f"{result['device']}, {result['date']}: {size}", label)


def draw_profile(result: dict, path: Path) -> None:
    """Draw a bar for each part of the model and pass."""
    (row,) = result["rows"]
    bars, span = [], row["span_ms"]
    for part in ORDER:
        passes = {each["pass"]: each["ms"] for each in row["parts"] if each["part"] == part}
        ms = sum(passes.values())
        heading = f"{part}: {ms:.2f} ms, {ms / span:.1%}"
        bars += [(heading, f"{p}  {ms:.2f}", ms, PASS_COLOURS[p]) for p, ms in passes.items()]
    idle = row["idle_ms"]
    bars.append((f"idle: {idle / span:.1%}", f"idle  {idle:.2f}", idle, LIGHT_GREY))
    step = f"{row['model']} {row['precision']}, {row['untraced_ms']:.2f} ms a step"
    _draw(path, bars, f"{row['device']}: {step}", "ms a step, in the trace")


def _draw(path: Path, bars: Iterable[Bar], title: str, label: str) -> None:
    """Draw horizontal bars under their headings, each with its text behind it."""
    lines: list[tuple[str, float | None, str]] = []
    last = None
    for heading, *bar in bars:
        lines += [(heading, None, "")] if heading != last else []
        lines.append(tuple(bar))
        last = heading
    with picture(path, (10, 0.22 * len(lines) + 1.5)) as axes:
        style_bars(axes)
        for y, (text, length, colour) in enumerate(lines):
            if length is not None:
                axes.barh(y, length, height=0.85, color=colour)
            weight = "bold" if length is None else "normal"
            axes.annotate(text, (length or 0, y), fontsize=7, weight=weight, **BESIDE)
        longest = max((length for _, length, _ in lines if length), default=1)
        axes.set(ylim=(len(lines), -1), xlim=(0, 1.35 * longest), yticks=[])
        axes.set(xlabel=label, title=title)
        axes.xaxis.set_major_formatter("{x:,.0f}")


def style_bars(axes: Any) -> None:
    """Style axes with horizontal bars and their own labels: a grid across the bars alone."""
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


if __name__ == "__main__":
    raise SystemExit(main())
