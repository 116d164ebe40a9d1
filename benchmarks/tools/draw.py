"""Draw results of `python -m gptjax.bench` kernels, ladder and profile, or runs of learning.py, one
picture for each file.

    python benchmarks/tools/draw.py benchmarks/results/kernels docs/images/kernels
    python benchmarks/tools/draw.py benchmarks/results/learning/RUNS.jsonl docs/images
    python benchmarks/tools/draw.py benchmarks/results/step docs/images  # speed.png

Of kernels a bar is the speed of an implementation, as a share of the GPU's ceiling; cases without a
target are left out. Of ladder it is the tokens/s of a rung, of profile the time of a part. Of runs
the picture has the validation loss over steps and over seconds of training. Of the folder step, one
picture has the tokens/s of gptjax, llm.c and PyTorch.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import learning
import numpy as np

from gptjax.bench import results
from gptjax.bench.hlo import ORDER, PASSES
from gptjax.plot import BLUE, DARK_GREY, GREEN, ORANGE, picture

GREY, LIGHT_GREY, LIGHT_ORANGE, VIOLET = "#9a9a9a", "#d0d0d0", "#f2b880", "#c9b7dd"
# Of implementations and systems, by the first word of the name.
COLOURS = {"mosaic": BLUE, "auto": BLUE, "gptjax": BLUE, "triton": GREEN}
COLOURS |= {"xla": GREY, "cudnn": DARK_GREY, "torch": ORANGE}
COLOURS |= {"torch.compile": LIGHT_ORANGE}
PASS_COLOURS = dict(zip(PASSES, (BLUE, VIOLET, ORANGE, GREEN), strict=True))
# Title, result of `step`, tokens of a step, and milliseconds of llm.c's train_gpt2cu, which was
# measured in another run (docs/benchmarks.md).
SPEEDS = [
    ("bf16, 64 × 1024 tokens", "bf16_64.json", 65_536, 115.2),
    ("TF32, 32 × 1024 tokens", "tf32_32.json", 32_768, 176.3),
]
NAMES = {"gptjax": "gptjax", "torch": "PyTorch 2.11, compiled"}
SPEED_COLOURS = {"gptjax": BLUE, "llm.c": GREEN, "PyTorch 2.11, compiled": ORANGE}
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
    parser.add_argument("results", type=Path, help="folder of JSON files, or one .json or .jsonl")
    parser.add_argument("pictures", type=Path, help="folder: NAME.png for each file NAME")
    parser.add_argument("--groups", nargs="+", help="only these groups of runs")
    options = parser.parse_args(argv)
    if options.results.name == "step":
        draw_speed(options.results, out := options.pictures / "speed.png")
        print(f"wrote {out}")
        return 0
    is_folder = options.results.is_dir()
    for file in sorted(options.results.glob("*.json")) if is_folder else [options.results]:
        out = options.pictures / f"{file.stem}.png"
        if file.suffix == ".jsonl":
            records = learning.read_records(file)
            named = options.groups or [record["group"] for record in records]
            draw_runs([record for record in records if record["group"] in named], out)
        else:
            result = results.read(file)
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


def throughput(file: Path, tokens: int, llmc_ms: float) -> dict[str, float]:
    """Return the tokens per second of each program."""
    found = {NAMES[row["system"]]: row["tokens/s"] for row in results.read(file)["rows"]}
    return found | {"llm.c": 1000 * tokens / llmc_ms}


def draw_speed(folder: Path, path: Path) -> None:
    """Draw the throughput of gptjax, llm.c and PyTorch in each precision."""
    with picture(path, (7, 2.6)) as axes:
        style_bars(axes)
        y = 0.0
        for title, file, *sizes in SPEEDS:
            speeds = throughput(folder / file, *sizes)
            axes.annotate(title, (0, y), weight="bold", **BESIDE)
            for name, colour in SPEED_COLOURS.items():
                y += 1
                axes.barh(y, speeds[name], height=0.8, color=colour)
                axes.annotate(f"{name}  {speeds[name]:,.0f}", (speeds[name], y), **BESIDE)
            y += 1.4
        axes.set(ylim=(y, -1), xlim=(0, 850_000), yticks=[])
        axes.set_xlabel("tokens per second of training, GPT-2 124M on one H200")
        axes.xaxis.set_major_formatter("{x:,.0f}")


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


def draw_runs(records: list[dict], path: Path) -> None:
    """Draw the mean validation loss of each group of at least three seeds, with the range of the
    seeds, over steps and over the mean seconds of training.

    Raises:
        ValueError: no group has finite losses of three seeds.
    """
    curves = {}
    for name, group in learning.by_group(records).items():
        runs = list(group.values())
        if len(runs) >= 3 and all(run["finite"] for run in runs):
            steps = np.array([step for step, _ in runs[0]["val"]])
            losses = np.array([[loss for _, loss in run["val"]] for run in runs])
            seconds = np.mean([run["training_seconds"] / run["steps"] for run in runs])
            curves[name] = (steps, steps * seconds), losses
    if not curves:
        raise ValueError("no group of runs has finite losses of three seeds")
    low, high = min(losses.min() for _, losses in curves.values()), -np.inf
    with picture(path, (10, 4.2), 1, 2, sharey=True) as both:
        for name, (xs, losses) in sorted(curves.items(), key=lambda c: -c[1][1][:, -1].mean()):
            mean, least, greatest = losses.mean(0), losses.min(0), losses.max(0)
            # The first fifth, where losses fall steeply, would hide the differences.
            high = max(high, mean[xs[0] >= xs[0][-1] / 5][0])
            final = "{:.3f} ± {:.3f}".format(*learning.interval(losses[:, -1]))
            final += f" (95 %, {len(losses)} seeds)"
            for axes, x in zip(both, xs, strict=True):
                (line,) = axes.plot(x, mean, label=f"{name.replace('_', ' ')}: {final}")
                axes.fill_between(x, least, greatest, color=line.get_color(), alpha=0.3)
        devices = ", ".join(sorted({record["device"] for record in records}))
        for axes, label in zip(both, ("steps", f"seconds of training, one {devices}"), strict=True):
            axes.set(xlim=(0, None), xlabel=label)
        both[0].set(ylim=(low - 0.03 * (high - low), high), ylabel="validation loss")
        both[0].legend()


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
