"""`python -m gptjax.bench draw`: pictures of results of kernels, ladder and profile."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro

from gptjax.bench import results, style
from gptjax.bench.errors import BenchError
from gptjax.bench.hlo import ORDER, PASSES

# Of implementations and systems, by the first word of the name.
COLOURS = {"mosaic": style.BLUE, "auto": style.BLUE, "gptjax": style.BLUE, "triton": style.GREEN}
COLOURS |= {"xla": style.GREY, "cudnn": style.DARK_GREY, "torch": style.ORANGE}
COLOURS |= {"torch.compile": style.LIGHT_ORANGE}
PASS_COLOURS = dict(zip(PASSES, (style.BLUE, style.VIOLET, style.ORANGE, style.GREEN), strict=True))
CEILINGS = {"memory": "copy rate", "bf16": "bf16 matmul"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """Draw results, one picture for each file. Of `kernels` a bar is the speed of an
    implementation, as a share of the GPU's ceiling; cases without a target are left out. Of
    `ladder` it is the tokens/s of a rung, of `profile` the time of a part."""

    results: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RESULTS")]]
    """Folder of the JSON files."""
    pictures: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="PICTURES")]]
    """Folder of the pictures: NAME.png for each file NAME.json."""

    def run(self) -> None:
        files = sorted(self.results.glob("*.json"))
        if not files:
            raise BenchError(f"no JSON files in {self.results}: expected a folder of results")
        for file in files:
            result, picture = results.read(file), self.pictures / f"{file.stem}.png"
            try:
                draw(result, picture)
            except KeyError as error:
                kinds = "kernels, ladder or profile"
                raise BenchError(f"{file}: expected a result of {kinds} (no {error})") from error
            print(f"wrote {picture}")


def draw(result: dict, path: Path) -> None:
    """Draw a result by its kind. Raise KeyError if it is a result of another command."""
    first = result["rows"][0]
    kind = draw_profile if "parts" in first else draw_ladder if "rung" in first else draw_kernels
    kind(result, path)


def draw_kernels(result: dict, path: Path) -> None:
    """Draw a group of bars for each case with a target, a bar for each implementation; 100 % is the
    ceiling of the same run."""
    lines, last = [], None
    for row in (row for row in result["rows"] if row["bar"]):
        bound = CEILINGS.get(row["bound"], row["bound"])
        case = f"{row['kernel']}: {row['case']}   (of the {bound}; target {row['bar']})"
        if case != last:
            lines.append((case, None, ""))
        last, name = case, row["implementation"]
        text = f"{name}: did not run" if "error" in row else f"{name}  {row['ms']:.3g} ms"
        colour = COLOURS.get(name.split()[0].rstrip(","), style.VIOLET)
        lines.append((text, 100 * row.get("ceiling", 0), colour))
    limits = result["ceilings"]
    rates = f"copy {limits['bytes_per_s'] / 1e12:.2f} TB/s, bf16 matmul"
    rates += f" {limits['flops_per_s'] / 1e12:.0f} TFLOP/s"
    label = "% of the ceiling measured in the same run (longer is faster)"
    _draw(path, lines, f"{result['device']}, {result['date']}: {rates}", label)


def draw_ladder(result: dict, path: Path) -> None:
    """Draw a bar of tokens/s for each rung of each system."""
    lines, last, first = [], None, result["rows"][0]
    for row in result["rows"]:
        if row["system"] != last:
            lines.append((row["system"], None, ""))
        last, speed = row["system"], row.get("tokens/s", 0)
        text = f"{row['rung']}: " + (f"{speed:,.0f}" if speed else "did not run")
        factor = f"   {row['factor']:.2f} ×" if row.get("factor", 1) != 1 else ""
        lines.append((text + factor, speed, COLOURS[row["system"]]))
    size = f"{first['model']}, {first['batch']} × {first['sequence_length']} tokens a step"
    label = "tokens/s of a full training step (× over the rung before)"
    _draw(path, lines, f"{result['device']}, {result['date']}: {size}", label)


def draw_profile(result: dict, path: Path) -> None:
    """Draw a bar for each part of the model and pass."""
    (row,) = result["rows"]
    lines, span = [], row["span_ms"]
    for part in ORDER:
        passes = {each["pass"]: each["ms"] for each in row["parts"] if each["part"] == part}
        if passes:
            ms = sum(passes.values())
            lines.append((f"{part}: {ms:.2f} ms, {ms / span:.1%}", None, ""))
            lines += [(f"{p}  {ms:.2f}", ms, PASS_COLOURS[p]) for p, ms in passes.items()]
    idle = row["idle_ms"]
    lines.append((f"idle: {idle:.2f} ms, {idle / span:.1%}", idle, style.LIGHT_GREY))
    step = f"{row['model']} {row['precision']}, {row['untraced_ms']:.2f} ms a step"
    _draw(path, lines, f"{row['device']}: {step}", "ms a step, in the trace")


def _draw(path: Path, lines: list[tuple[str, Any, str]], title: str, label: str) -> None:
    """Draw horizontal bars, each with its text behind it.

    Args:
        lines: text, length and colour of each bar; a length of None is a heading.
        label: of the axis.
    """
    with style.picture(path, (10, 0.22 * len(lines) + 1.5)) as axes:
        style.bars(axes)
        for y, (text, length, colour) in enumerate(lines):
            if length is not None:
                axes.barh(y, length, height=0.85, color=colour)
            weight = "bold" if length is None else "normal"
            axes.annotate(text, (length or 0, y), fontsize=7, weight=weight, **style.BESIDE)
        longest = max((length for _, length, _ in lines if length), default=1)
        axes.set(ylim=(len(lines), -1), xlim=(0, 1.35 * longest), yticks=[])
        axes.set(xlabel=label, title=title)
        axes.xaxis.set_major_formatter("{x:,.0f}")
