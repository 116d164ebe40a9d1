"""Pictures of results: kernels against the ceiling, the ladder, and the profile of a step."""

from pathlib import Path

from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from gptjax.bench import style
from gptjax.bench.hlo import ORDER, PASSES

IMPLEMENTATIONS = {
    "mosaic": style.BLUE,
    "auto": style.BLUE,
    "triton": style.GREEN,
    "xla": style.GREY,
    "cudnn": style.DARK_GREY,
    "torch": style.ORANGE,
    "torch cudnn": style.ORANGE,
    "torch.compile": style.LIGHT_ORANGE,
    "torch flash": style.LIGHT_ORANGE,
}
SYSTEMS = {"gptjax": style.BLUE, "torch": style.ORANGE}
PASS_COLOURS = dict(zip(PASSES, (style.BLUE, style.VIOLET, style.ORANGE, style.GREEN), strict=True))
CEILINGS = {"memory": "copy rate", "bf16": "bf16 matmul"}


def draw_kernels(result: dict, path: Path) -> None:
    """Draw a group of bars for each case with a target, a bar for each implementation; 100 % is the
    ceiling of the same run.

    Args:
        result: a result of `python -m gptjax.bench kernels --out`.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in (row for row in result["rows"] if row["bar"]):
        groups.setdefault((row["kernel"], row["case"], row["bound"], row["bar"]), []).append(row)
    rows = sum(len(group) for group in groups.values())
    longest = max((row.get("ceiling", 0) for group in groups.values() for row in group), default=0)
    height = 0.2 * rows + 0.3 * len(groups) + 1.5
    with style.picture(path, (10, height)) as axes:
        style.bars(axes)
        y, used = 0.0, {}
        for (kernel, case, bound, bar), group in groups.items():
            heading = f"{kernel}: {case}   (of the {CEILINGS.get(bound, bound)}; target {bar})"
            axes.annotate(heading, (0, y), weight="bold", **style.BESIDE)
            y += 1
            for row in group:
                name = row["implementation"]
                colour = IMPLEMENTATIONS.get(name, style.VIOLET)
                used[name if name in IMPLEMENTATIONS else "other"] = colour
                if "error" in row:
                    label = f"{name}: did not run"
                else:
                    axes.barh(y, 100 * row["ceiling"], height=0.85, color=colour)
                    label = f"{name}  {row['ms']:.3g} ms"
                end = 100 * row.get("ceiling", 0)
                axes.annotate(label, (end, y), fontsize=7, **style.BESIDE)
                y += 1
            y += 0.4
        axes.axvline(100, color="black", linewidth=1, zorder=0)
        axes.set(ylim=(y, -1), xlim=(0, max(135, 135 * longest)), yticks=[])
        axes.set_xlabel("% of the ceiling measured in the same run (longer is faster)")
        limits = result["ceilings"]
        axes.set_title(
            f"{result['device']}, {result['date']}: copy "
            f"{limits['bytes_per_s'] / 1e12:.2f} TB/s, "
            f"bf16 matmul {limits['flops_per_s'] / 1e12:.0f} TFLOP/s"
        )
        handles = [Patch(color=colour, label=name) for name, colour in used.items()]
        axes.figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)))


def draw_ladder(result: dict, path: Path) -> None:
    """Draw a bar of tokens/s for each rung: JAX's ladder and, if it was measured, PyTorch's.

    Args:
        result: the result of `python -m gptjax.bench ladder --out`.
    """
    rows = result["rows"]
    first, longest = rows[0], max((row.get("tokens/s", 0) for row in rows), default=0) or 1
    titles = {"gptjax": "gptjax (JAX)", "torch": f"PyTorch {result['versions'].get('torch', '')}"}
    with style.picture(path, (10, 0.32 * len(rows) + 1.8)) as axes:
        style.bars(axes)
        y, rungs = 0.0, {}
        for system, title in titles.items():
            ladder = [row for row in rows if row["system"] == system]
            if ladder:
                axes.text(0, y, title, fontsize=9, weight="bold", va="center")
                y += 1
            for row in ladder:
                speed = row.get("tokens/s", 0)
                axes.barh(y, speed, height=0.8, color=SYSTEMS[system])
                factor = (
                    f"   {row['factor']:.2f} ×" if row is not ladder[0] and "factor" in row else ""
                )
                text = f" {speed:,.0f}{factor}" if "ms" in row else " did not run"
                axes.text(speed, y, text, va="center")
                rungs[y] = row["rung"]
                y += 1
            y += 0.5
        axes.set_yticks(list(rungs), list(rungs.values()))
        axes.set(ylim=(y - 0.5, -1), xlim=(0, 1.22 * longest))
        axes.set_xlabel("tokens/s of a full training step (× over the rung before)")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_title(
            f"{result['device']}, {result['date']}: {first['model']}, {first['batch']} × "
            f"{first['sequence_length']} tokens a step"
        )


def draw_profile(row: dict, title: str, path: Path) -> None:
    """Draw a bar for each part of the model, with a colour for each pass.

    Args:
        row: the row of `python -m gptjax.bench profile`.
    """
    names = [part for part in ORDER if any(each["part"] == part for each in row["parts"])]
    with style.picture(path, (9, 0.42 * (len(names) + 1) + 1.3)) as axes:
        style.bars(axes)
        used, longest = set(), row["idle_ms"]
        for y, part in enumerate(names):
            left = 0.0
            for each in (each for each in row["parts"] if each["part"] == part):
                colour = PASS_COLOURS[each["pass"]]
                axes.barh(y, each["ms"], left=left, height=0.7, color=colour)
                left += each["ms"]
                used.add(each["pass"])
            axes.text(left, y, f"  {left:.2f} ms, {left / row['span_ms']:.1%}", va="center")
            longest = max(longest, left)
        axes.barh(len(names), row["idle_ms"], height=0.7, color=style.LIGHT_GREY)
        idle = f"  {row['idle_ms']:.2f} ms, {row['idle_ms'] / row['span_ms']:.1%}"
        axes.text(row["idle_ms"], len(names), idle, va="center")
        axes.set_yticks(range(len(names) + 1), [*names, "idle"])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * longest)
        axes.set_xlabel("ms a step, in the trace")
        axes.set_title(title)
        handles = [Patch(color=PASS_COLOURS[p], label=p) for p in PASSES if p in used]
        axes.legend(handles=handles, loc="lower right")
