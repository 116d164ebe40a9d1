"""Tables of benchmarks/results/kernels: the time of each case and back end."""

import math
import re
from collections.abc import Callable
from pathlib import Path

from _result_files import FOLDER, Results, figure, markdown, percent

# What a file of the benchmarks calls an implementation, and what a table calls it.
NAMES = {"three bare matmuls": "three matmuls", "cudnn": "cuDNN", "xla": "XLA", "torch": "PyTorch"}
NAMES |= {"torch.compile": "PyTorch, compiled", "torch cudnn": "PyTorch, cuDNN"}
NAMES |= {"torch flash": "PyTorch, flash", "xla, nothing saved": "XLA, nothing saved"}
NAMES |= {"xla, rounded twice": "XLA, rounded twice"}
# Back ends that are kernels of pallas_kernels.
OURS = ("mosaic", "triton", "fused", "auto")
RIVALS = ("cudnn", "xla", "torch.compile")


def case_of(row: dict) -> str:
    """Return the operation and the case; the benchmark of linear_gelu has several operations."""
    several = row["kernel"] in ("flash_attention", "linear_gelu", "fused_classifier", "softmax")
    named = several or row["case"].startswith(row["kernel"])
    case = row["case"] if named else f"{row['kernel']} {row['case']}"
    return case.replace("bfloat16", "bf16").replace("float32", "fp32")


def target(text: str) -> str:
    return re.sub(r"(\d)×", r"\1 ×", "" if "auto takes" in text else text)


def cell(row: dict) -> str:
    """Return the time and the rate that limits the kernel."""
    if "ms" not in row:
        return row.get("error", "")
    if row["bound"] == "memory":
        return f"{figure(row['ms'], 3)} ({percent(row['ceiling'], 0)})"
    return f"{figure(row['ms'], 3)} ({row['TFLOP/s']:.0f})"


def kernel_table(stem: str, pattern: str = "") -> Callable[[Results], str]:
    """Return the table of a file in benchmarks/results/kernels.

    Args:
        pattern: a regular expression of the cases; all cases by default.
    """

    def table(results: Results) -> str:
        result = results[f"kernels/{stem}"]
        rows = [row for row in result["rows"] if re.search(pattern, case_of(row))]
        columns = list(dict.fromkeys(row["implementation"] for row in rows))
        cells: dict[str, dict[str, str]] = {}
        for row in rows:
            cells.setdefault(case_of(row), {})[row["implementation"]] = cell(row)
        targets = {case_of(row): target(row["bar"]) for row in rows}
        bar = ["target"] if any(targets.values()) else []
        lines = [
            [case, *(targets[case] for _ in bar), *(found.get(name, "") for name in columns)]
            for case, found in cells.items()
        ]
        ceilings, bounds = result["ceilings"], {row["bound"] for row in rows}
        units = []
        if "memory" in bounds:
            rate = f"{ceilings['bytes_per_s'] / 1e12:.2f} TB/s"
            units.append(f"in brackets the share of the copy rate of this run, {rate}")
        if bounds - {"memory"}:
            rate = f"{ceilings['flops_per_s'] / 1e12:.0f}"
            units.append(f"in brackets TFLOP/s; a large matmul of this run reaches {rate}")
        head = ["case", *bar, *(NAMES.get(name, name) for name in columns)]
        return f"Times in ms; {', or '.join(units)}.\n\n{markdown(head, lines)}"

    return table


def time(row: dict) -> float:
    return row.get("ms", math.inf)


def targets_table(results: Results) -> str:
    """Every case with a target: the fastest kernel, XLA and compiled PyTorch."""
    lines = []
    for path in sorted((FOLDER / "kernels").glob("*.json")):
        rows = results[f"kernels/{path.stem}"]["rows"]
        for case in dict.fromkeys((row["kernel"], row["case"]) for row in rows):
            of_case = [row for row in rows if (row["kernel"], row["case"]) == case]
            found = {row["implementation"]: row for row in of_case}
            first = of_case[0]
            if not target(first["bar"]):
                continue
            name = case_of(first)
            name = name if first["kernel"] in name or "linear_" in name else f"{case[0]} {name}"
            rivals = [cell(found[n]) if n in found else "" for n in RIVALS]
            best = min((row for row in of_case if row["implementation"] in OURS), key=time)
            ours = [best["implementation"], cell(best)]
            lines.append([name, target(first["bar"]), *ours, *rivals])
    head = ("case", "target", "back end", "ms (rate)", *(NAMES[name] for name in RIVALS))
    return markdown(head, lines)


def separate_ratios(results: Results) -> dict[str, float]:
    """Return cuDNN's time / gptjax's time of each case with separate q, k and v."""
    ms: dict[str, dict[str, float]] = {}
    for row in results["kernels/attention_separate"]["rows"]:
        ms.setdefault(row["case"], {})[row["implementation"]] = row["ms"]
    return {case: found["cudnn"] / found["auto"] for case, found in ms.items()}


def separate_table(results: Results) -> str:
    """Attention of separate q, k and v: time and rate of gptjax and cuDNN, and their ratio."""
    ratios = separate_ratios(results)
    rows = results["kernels/attention_separate"]["rows"]
    found = {(row["case"], row["implementation"]): cell(row) for row in rows}
    lines = [
        [case, found[case, "auto"], found[case, "cudnn"], f"{each:.2f}"]
        for case, each in ratios.items()
    ]
    units = "Times in ms; in brackets TFLOP/s. Above 1, gptjax is faster."
    return f"{units}\n\n{markdown(('case', 'gptjax', 'cuDNN', 'cuDNN / gptjax'), lines)}"


def sass_table(results: Results) -> str:
    """Registers and spills of the Mosaic kernels, compiled for an H200."""
    rows = results["mosaic_sass"]["rows"]
    head = ("kernel", "registers at launch", "spilled bytes", "serialized wgmma")
    return markdown(
        head,
        [[r["kernel"], r["registers"], r["spilled bytes"], len(r["remarks"])] for r in rows],
    )


def generate_table(results: Results) -> str:
    """Tokens per second of `bench generate`."""
    lines = []
    for path in sorted((FOLDER / "generate").glob("*.json")):
        for row in results[f"generate/{path.stem}"]["rows"]:
            times = [figure(row["step_us"]), figure(row["first_token_ms"], 3)]
            rate, limit = figure(row["tokens/s"]), percent(row["of_limit"])
            link = results.link(f"generate/{path.stem}", path.stem)
            lines.append([row["batch"], row["system"], row["case"], rate, *times, limit, link])
    head = ("batch", "system", "case", "tokens/s", "step, µs", "first token, ms", "of limit", "run")
    return markdown(head, lines)


KERNELS = Path("docs/kernels")
TABLES = {
    "kernel_targets": (KERNELS / "README.md", targets_table),
    "mosaic_sass": (KERNELS / "README.md", sass_table),
    "attention": (KERNELS / "attention.md", kernel_table("attention")),
    "attention_separate": (KERNELS / "attention.md", separate_table),
    "classifier": (KERNELS / "classifier.md", kernel_table("classifier")),
    "decode": (KERNELS / "decode.md", generate_table),
    "feed_forward": (KERNELS / "feed_forward.md", kernel_table("feed_forward", " forward [0-9]")),
    "feed_forward_backward": (
        KERNELS / "feed_forward.md",
        kernel_table("feed_forward", "^linear_.* backward [0-9]"),
    ),
    "mlp": (KERNELS / "feed_forward.md", kernel_table("feed_forward", "^mlp")),
    "gated_mlp": (KERNELS / "gated_mlp.md", kernel_table("gated_mlp")),
    "lm_head": (KERNELS / "lm_head.md", kernel_table("lm_head")),
    "norm": (KERNELS / "norm.md", kernel_table("norm")),
    "rotary": (KERNELS / "rotary.md", kernel_table("rotary")),
    "row_softmax": (KERNELS / "row_softmax.md", kernel_table("row_softmax")),
    "symmetric": (KERNELS / "symmetric.md", kernel_table("symmetric")),
    "polar_express": (Path("docs/normuon.md"), kernel_table("polar_express")),
    "transpose": (KERNELS / "transpose.md", kernel_table("transpose")),
}
