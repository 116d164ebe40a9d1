"""The result of scaling.py: printed, as tables, and as a picture."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gptjax.bench import style
from gptjax.bench.table import Row, print_table

MODELS = {"gpt2": "124M", "gpt2-xl": "1558M"}
# The lines of zero1 and fsdp coincide in places: the lower one is wider.
LINES = {
    "data": {"color": style.BLUE, "marker": "o", "ms": 3},
    "zero1": {"color": style.ORANGE, "marker": "s", "ms": 5, "linewidth": 2.5},
    "fsdp": {"color": style.GREEN, "marker": "o", "ms": 3},
}
# The number of GPUs of the table with the collectives of a step.
DETAILED = 64


def case_of(row: dict) -> str:
    return f"{MODELS[row['model']]}, B = {row['batch']}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %".replace("-", "−")


def fp32_rows(result: dict) -> list[dict]:
    return [row for row in result["rows"] if row["reduce_dtype"] == "fp32"]


def print_steps(result: dict) -> None:
    """Print every predicted step, and the comparison with the measured ones."""
    names = ("GPUs", "compute ms", "communication ms", "exposed ms", "step ms", "scaling")
    table = [
        Row(
            f"{case_of(row)}, {row['strategy']}, {row['reduce_dtype']}",
            (
                str(row["devices"]),
                *(f"{row[name]:.2f}" for name in ("compute_ms", "communication_ms", "exposed_ms")),
                f"{row['step_ms']:.2f}",
                percent(row["scaling"]),
            ),
        )
        for row in result["rows"]
    ]
    print_table(f"Predicted steps, {result['device']}", names, table)
    table = [
        Row(
            f"{case_of(row)}, {row['strategy']}, {row['reduce_dtype']}",
            (
                str(row["devices"]),
                f"{row['measured_ms']:.2f}",
                f"{row['predicted_ms']:.2f}",
                percent(row["error"]),
            ),
        )
        for row in result["compared"]
    ]
    print_table("Measured steps", ("GPUs", "measured ms", "predicted ms", "error"), table)


def markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured_table(result: dict) -> str:
    names = (
        *("B", "GPUs", "strategy", "gradients", "one GPU, ms", "measured, ms", "predicted, ms"),
        *("error", "predicted without overlap, ms"),
    )
    rows = [
        (
            str(row["batch"]),
            str(row["devices"]),
            row["strategy"],
            row["reduce_dtype"],
            *(f"{row[name]:.2f}" for name in ("one_gpu_ms", "measured_ms", "predicted_ms")),
            percent(row["error"]),
            f"{row['predicted_without_overlap_ms']:.2f}",
        )
        for row in result["compared"]
    ]
    return markdown(names, rows)


def scaling_table(result: dict) -> str:
    counts = sorted({row["devices"] for row in result["rows"]})
    found: dict[tuple, dict[int, str]] = {}
    for row in fp32_rows(result):
        cells = found.setdefault((case_of(row), row["strategy"]), {})
        cells[row["devices"]] = percent(row["scaling"])
    rows = [(*key, *(cells[n] for n in counts)) for key, cells in found.items()]
    return markdown(("case", "strategy", *(f"{n} GPUs" for n in counts)), rows)


def collectives_table(result: dict) -> str:
    kinds = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter"}
    kinds["all_gather"] = "all-gather"
    names = ("case", "strategy", "compute, ms", *kinds.values())
    names += ("may overlap, ms", "exposed, ms")
    rows = []
    for row in fp32_rows(result):
        if row["devices"] != DETAILED:
            continue
        cells = []
        for kind in kinds:
            calls = [each for each in row["collectives"] if each["collective"] == kind]
            size = sum(each["bytes"] for each in calls) / 1e6
            ms = sum(each["ms"] for each in calls)
            cells.append(f"{size:,.{int(size < 10)}f} MB: {ms:.1f} ms" if calls else "")
        times = [f"{row[name]:.1f}" for name in ("compute_ms", "may_overlap_ms", "exposed_ms")]
        rows.append((case_of(row), row["strategy"], times[0], *cells, *times[1:]))
    return markdown(names, rows)


def limits_table(result: dict) -> str:
    names = ("case", "strategy", "global batch", "exposed share", "sharding")

    def cell(count: int | None) -> str:
        if count is None:
            return ""
        return f"{'≥ ' * (count == result['most_devices'])}{count:,}"

    rows = [
        (
            case_of(row),
            row["strategy"],
            *(cell(row.get(name)) for name in ("global_batch", "exposed", "sharded")),
        )
        for row in result["limits"]
    ]
    return markdown(names, rows)


TABLES: dict[str, Callable[[dict], str]] = {
    "measured": measured_table,
    "scaling": scaling_table,
    "collectives": collectives_table,
    "limits": limits_table,
}


def draw(result: dict, path: Path) -> None:
    """Draw the predicted scaling of each case over the number of GPUs, and the measured points."""
    cases = list(dict.fromkeys(case_of(row) for row in result["rows"]))
    counts = sorted({row["devices"] for row in result["rows"]})
    with style.picture(path, (10, 3.8), 1, len(cases), squeeze=False) as (panels,):
        for axes, case in zip(panels, cases, strict=True):
            for strategy in LINES:
                draw_strategy(axes, result, case, strategy)
            axes.plot([], [], "--", color=style.GREY, linewidth=0.8, label="without overlap")
            axes.plot([], [], "x", color=style.GREY, ms=7, mew=2, label="measured")
            axes.axvline(8, color=style.GREY, linewidth=0.6, zorder=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(n) for n in counts])
            axes.set(title=f"{case} per GPU", xlabel="GPUs (more than 8: several hosts)")
        panels[0].set_ylabel("step of one GPU / step, %")
        panels[0].legend(loc="lower left")


def draw_strategy(axes: Any, result: dict, case: str, strategy: str) -> None:
    """Draw the predictions of one strategy, with and without overlap, and its measured points."""
    of_case = [row for row in fp32_rows(result) if case_of(row) == case]
    rows = [row for row in of_case if row["strategy"] == strategy]
    x, line = [row["devices"] for row in rows], LINES[strategy]
    y = [100 * row["scaling"] for row in rows]
    axes.plot(x, y, label=f"{strategy}, predicted", **line)
    y = [100 * row["one_gpu_ms"] / row["step_without_overlap_ms"] for row in rows]
    axes.plot(x, y, "--", color=line["color"], linewidth=0.8)
    for row in result["compared"]:
        same = case_of(row) == case and row["strategy"] == strategy
        if same and row["reduce_dtype"] == "fp32":
            y = 100 * row["one_gpu_ms"] / row["measured_ms"]
            axes.plot(row["devices"], y, "x", ms=7, mew=2, color=line["color"])
