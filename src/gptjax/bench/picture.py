"""Pictures from JSON: kernels against the ceiling (`python -m gptjax.bench kernels`), and the
ladder (`python -m gptjax.bench ladder`)."""

from pathlib import Path

COLOURS = {
    "mosaic": "#1b6ca8",
    "triton": "#3fa34d",
    "xla": "#9a9a9a",
    "cudnn": "#6f6f6f",
    "torch": "#e07b39",
    "torch cudnn": "#e07b39",
    "torch.compile": "#f2b880",
    "torch flash": "#f2b880",
}
OTHER = "#c9b7dd"
LADDERS = {"gptjax": COLOURS["mosaic"], "torch": COLOURS["torch"]}


def draw(results: list[dict], path: Path) -> None:
    """A group of bars for each case that has a bar to reach, a bar for each implementation; 100 %
    is the ceiling of the same run.

    Args:
        results: what `python -m gptjax.bench kernels --out` wrote, a dict for each kernel.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    groups: dict[tuple, list[dict]] = {}
    for row in (row for result in results for row in result["rows"] if row["bar"]):
        groups.setdefault((row["kernel"], row["case"], row["bound"], row["bar"]), []).append(row)
    rows = sum(len(group) for group in groups.values())
    longest = max((row.get("ceiling", 0) for group in groups.values() for row in group), default=0)
    figure, axes = plt.subplots(figsize=(10, 0.2 * rows + 0.3 * len(groups) + 1.4))
    y, used = 0.0, {}
    for (kernel, case, bound, bar), group in groups.items():
        ceiling = {"memory": "copy rate", "bf16": "bf16 product"}.get(bound, bound)
        axes.text(
            0,
            y,
            f"{kernel}: {case}   (of the {ceiling}; aim {bar})",
            fontsize=8,
            weight="bold",
            va="center",
        )
        y += 1
        for row in group:
            colour = COLOURS.get(row["implementation"], OTHER)
            used[row["implementation"] if colour != OTHER else "other"] = colour
            if "error" in row:
                label = f" {row['implementation']}: did not run"
            else:
                axes.barh(y, 100 * row["ceiling"], height=0.85, color=colour)
                label = f" {row['implementation']}  {row['ms']:.3g} ms"
            axes.text(100 * row.get("ceiling", 0), y, label, fontsize=7, va="center")
            y += 1
        y += 0.4
    axes.axvline(100, color="black", linewidth=1, zorder=0)
    axes.set(ylim=(y, -1), xlim=(0, max(135, 135 * longest)), yticks=[])
    axes.set_xlabel("% of the ceiling measured in the same run (longer is faster)")
    limits = results[0]["ceilings"]
    axes.set_title(
        f"{results[0]['device']}, {max(result['date'] for result in results)}: copy "
        f"{limits['bytes_per_s'] / 1e12:.2f} TB/s, "
        f"bf16 product {limits['flops_per_s'] / 1e12:.0f} TFLOP/s",
        fontsize=10,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(
        handles=[Patch(color=c, label=n) for n, c in used.items()], fontsize=7, loc="lower right"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def draw_ladder(result: dict, path: Path) -> None:
    """A bar of tokens/s for each rung, JAX's ladder above PyTorch's where both were climbed.

    Args:
        result: what `python -m gptjax.bench ladder --out` wrote.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import StrMethodFormatter

    rows = result["rows"]
    first, longest = rows[0], max((row.get("tokens/s", 0) for row in rows), default=0) or 1
    figure, axes = plt.subplots(figsize=(10, 0.32 * len(rows) + 1.8))
    y = 0.0
    for system, title in (
        ("gptjax", "gptjax (JAX)"),
        ("torch", f"PyTorch {result['versions'].get('torch', '')}"),
    ):
        its = [row for row in rows if row["system"] == system]
        if its:
            axes.text(0, y, title, fontsize=9, weight="bold", va="center")
            y += 1
        for row in its:
            speed = row.get("tokens/s", 0)
            axes.barh(y, speed, height=0.8, color=LADDERS[system])
            axes.text(-0.01 * longest, y, row["rung"], fontsize=8, va="center", ha="right")
            factor = f"   {row['factor']:.2f} ×" if row is not its[0] and "factor" in row else ""
            text = f" {speed:,.0f}{factor}" if "ms" in row else " did not run"
            axes.text(speed, y, text, fontsize=8, va="center")
            y += 1
        y += 0.5
    axes.set(ylim=(y - 0.5, -1), xlim=(0, 1.22 * longest), yticks=[])
    axes.set_xlabel("tokens/s of a full training step (× over the rung before)")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_title(
        f"{result['device']}, {result['date']}: {first['model']}, {first['batch']} × "
        f"{first['sequence_length']} tokens a step",
        fontsize=10,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
