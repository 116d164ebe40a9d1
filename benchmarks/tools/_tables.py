"""The tables of docs/: the results that they read, and a function for each table."""

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _back_ends

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"


class Results:
    """The results that a table reads, in the order of the first reading."""

    def __init__(self, page: Path):
        self.page = page
        self.read: dict[str, dict] = {}

    def __getitem__(self, name: str) -> dict:
        """Return the result benchmarks/results/NAME.json."""
        if name not in self.read:
            self.read[name] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        return self.read[name]

    def link(self, name: str, text: str | None = None) -> str:
        """Return a link from the page to the file of a result."""
        path = FOLDER / f"{name}.json"
        target = os.path.relpath(path, self.page.parent)
        return f"[{text or path.name}]({target})"

    def caption(self) -> str:
        """Return one list item for each device and date, with links to the results.

        The files have the command, the versions, the commit and a note on other processes.
        """
        items: dict[str, list[str]] = {}
        for name, result in self.read.items():
            origin = f"{hardware(name, result)}, {result['date']}"
            items.setdefault(origin, []).append(self.link(name))
        return "\n".join(f"- {origin}: {', '.join(links)}" for origin, links in items.items())


def hardware(name: str, result: dict) -> str:
    """Return the devices: their number is in the rows, or in the name of a file with several."""
    if result.get("kind") == "prediction":
        return f"predicted for {result['device']}"
    counts = {row["devices"] for row in result.get("rows", []) if "devices" in row}
    if found := re.search(r"devices_(\d+)$", name):
        counts |= {int(found[1])}
    if max(counts, default=1) == 1:
        return result["device"]
    return f"{' and '.join(map(str, sorted(counts)))} × {result['device']}"


def figure(value: float, digits: int = 4) -> str:
    """Return a number with this many significant digits, and commas from 1,000 on."""
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(places, 0)}f}"


def percent(share: float, places: int = 1) -> str:
    return f"{100 * share:.{places}f} %".replace("-", "−")


def ratio(value: float) -> str:
    return f"{figure(value)} ×"


def markdown(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    if wrong := [row for row in rows if len(row) != len(names)]:
        raise ValueError(f"expected {len(names)} cells, got {wrong[0]}")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


STEPS = {
    "124M, bf16, B = 64": "bf16_64",
    "124M, bf16, B = 4": "bf16_4",
    "124M, TF32, B = 32": "tf32_32",
    "124M, TF32, B = 4": "tf32_4",
    "124M, true fp32, B = 8": "fp32_8",
    "350M, bf16, B = 96": "gpt2_medium_96",
    "774M, bf16, B = 64": "gpt2_large_64",
    "1558M, bf16, B = 36": "gpt2_xl_36",
    "1558M, bf16, B = 24": "gpt2_xl_24",
    "Llama 3, 124M, bf16, B = 64": "llama3_124m_64_torch",
    "Llama 3, 1B, bf16, B = 16": "llama3_1b_16_torch",
    "124M, bf16, B = 4, forward pass and loss": "forward_4",
}


def step_table(results: Results) -> str:
    """Time, throughput and memory of each step, compared with PyTorch."""
    lines = []
    for label, name in STEPS.items():
        rows = {row["system"]: row for row in results[f"step/{name}"]["rows"]}
        ours, torch = rows["gptjax"], rows.get("torch")
        rival = [figure(torch["ms"]), ratio(ours["of_torch"])] if torch else ["", ""]
        speed = [figure(ours["ms"]), f"**{figure(ours['tokens/s'])}**", percent(ours["mfu"])]
        link = results.link(f"step/{name}", label)
        lines.append([link, *speed, f"{ours['peak_gib']:.1f}", *rival])
    return markdown(("step", "ms", "tokens/s", "MFU", "GiB", "PyTorch, ms", "speedup"), lines)


def recompute_table(results: Results) -> str:
    """Memory and time of each value of --model.recompute."""
    rows = results["step/recompute_64"]["rows"]
    return markdown(
        ("`--model.recompute`", "memory, GiB", "ms", "compared with none"),
        [
            [
                row["recompute"],
                f"{row['needed_gib']:.1f}",
                figure(row["ms"]),
                ratio(row["ms"] / rows[0]["ms"]),
            ]
            for row in rows
        ],
    )


def scaling_table(results: Results) -> str:
    """Steps of two GPUs, compared with the step of one GPU and with the prediction."""
    lines = []
    for row in results["scaling"]["compared"]:
        results[f"step/{Path(row['result']).stem}"]  # The caption also has these files.
        case = f"{row['model']}, B = {row['batch']}"
        times = [f"{row[name]:.2f}" for name in ("one_gpu_ms", "measured_ms", "predicted_ms")]
        lines.append([case, row["strategy"], row["reduce_dtype"], *times])
    head = ("model", "strategy", "gradients", "one GPU, ms", "two GPUs, ms", "predicted, ms")
    return markdown(head, lines)


def learning_table(results: Results) -> str:
    """NorMuon and AdamW: validation loss after the last step."""
    lines = []
    for name, found in results["learning/learning"]["result"].items():
        rates = found.get("learning_rates") or [found["learning_rate"]]
        seeds = ", ".join(f"{loss:.3f}" for loss in found["seeds"])
        reached = found.get("step_of_adamw_final")
        lines.append(
            [
                "NorMuon" if "normuon" in name else "AdamW",
                found["steps"],
                ", ".join(f"{rate:g}" for rate in rates),
                f"{found['final']:.3f} ({seeds})",
                f"{reached:.0f}: {found['fraction_of_steps']:.2f} of AdamW's" if reached else "",
            ]
        )
    head = ("optimizer", "steps", "learning rates", "validation loss, mean (seeds)")
    return markdown([*head, "step with AdamW's final loss"], lines)


def separate_ratios(results: Results) -> list[float]:
    """Return cuDNN's time / gptjax's time of each training shape of separate q, k and v."""
    ms: dict[str, dict[str, float]] = {}
    for row in results["kernels/attention_separate"]["rows"]:
        ms.setdefault(row["case"], {})[row["implementation"]] = row["ms"]
    return [found["cudnn"] / found["auto"] for case, found in ms.items() if "backward" in case]


def overview_table(results: Results) -> str:
    """One line for each page of results."""

    def step(name: str) -> dict:
        return results[f"step/{name}"]["rows"][0]

    bf16, tf32 = step("bf16_64"), step("tf32_32")
    rows = [row for row in results["ladder"]["rows"] if row["system"] == "gptjax"]
    ladder = {row["precision"]: row["since_start"] for row in rows}  # the last rung of each
    start = {row["start"]: row["total"] for row in results["startup"]["rows"]}
    fastest = ratio(bf16["of_torch"])
    two = [r for r in results["scaling"]["compared"] if r["batch"] == 64][0]
    scaled = percent(two["one_gpu_ms"] / two["measured_ms"])
    normuon = [v for k, v in results["learning/learning"]["result"].items() if "normuon" in k][0]
    attention = separate_ratios(results)
    generation = results["generate/batch_64"]["rows"][0]
    speed = "[speed.md](speed.md)"
    lines = [
        ["124M, bf16, B = 64, tokens/s", figure(bf16["tokens/s"]), speed],
        ["the same, compared with compiled PyTorch", fastest, speed],
        ["124M, TF32, B = 32, compared with PyTorch", ratio(tf32["of_torch"]), speed],
        ["start until the first step, empty caches", f"{start['cold']:.1f} s", speed],
        ["the same, full caches", f"{start['warm']:.1f} s", speed],
        [
            "all accelerations, compared with fp32 without jit: in bf16, and in FP8",
            f"{figure(ladder['bf16'], 3)} ×, {figure(ladder['fp8'], 3)} ×",
            "[speed.md](speed.md#ladder)",
        ],
        ["two GPUs, compared with two times one GPU", scaled, "[scaling.md](scaling.md)"],
        [
            "flash_attention on an H100, forward and backward, compared with cuDNN: lowest and "
            f"highest of {len(attention)} shapes",
            f"{min(attention):.2f} ×, {max(attention):.2f} ×",
            "[kernels/attention.md](kernels/attention.md)",
        ],
        [
            "generation, 64 sequences, compared with transformers",
            ratio(generation["of_torch"]),
            "[kernels/decode.md](kernels/decode.md)",
        ],
        [
            "NorMuon: share of AdamW's steps for AdamW's loss",
            f"{normuon['fraction_of_steps']:.2f}",
            "[normuon.md](normuon.md)",
        ],
    ]
    return markdown(("quantity, GPT-2 on H200", "result", "page"), lines)


GROUPS = {
    "adamw": "AdamW",
    "normuon": "NorMuon",
    "short": "AdamW, 100 steps of warm-up",
}
# Results of `bench step`, each with the rows that one command measured.
FP8_STEPS = (
    "step/fp8_and_bf16_64",
    "step/fp8_64_torch",
    "step/fp8_gpt2_large_64",
    "step/fp8_gpt2_xl_36",
    "step/fp8_speedrun_stage_5",
)
CONFIGS = {
    "adamw": "configs/gpt2_124m_docs.py",
    "normuon": "configs/gpt2_124m_normuon_docs.py",
}


def loss(value: float | None, sign: str = "") -> str:
    return "not finite" if value is None else f"{value:{sign}.4f}".replace("-", "−")


def times(runs: dict) -> tuple[str, str]:
    """Return tokens/s and seconds of training; empty if other processes used the GPU."""
    if runs["tokens_per_second"] is None:
        return "", ""
    return f"{runs['tokens_per_second']:,}", f"{runs['training_seconds']:.0f}"


def fp8_step_table(results: Results) -> str:
    """Training steps in FP8. The first row of each file has the speed 1."""
    lines = []
    for name in FP8_STEPS:
        rows = results[name]["rows"]
        lines += [
            [
                f"{row['model']}, B = {row['batch']}, {row['system'].replace('torch', 'PyTorch')}",
                row["precision"],
                figure(row["tokens/s"]),
                f"{row.get('needed_gib', row['peak_gib']):.1f}",
                ratio(rows[0]["ms"] / row["ms"]),
            ]
            for row in rows
        ]
    head = ("model", "precision", "tokens/s", "GiB", "speed")
    return markdown(head, lines)


def losses_table(results: Results) -> str:
    """Final losses of FP8 and bf16 with the same tokens."""
    found, lines = results["fp8_losses"]["result"], []
    for group, name in GROUPS.items():
        for precision, runs in found[group].items():
            difference, error = (
                "" if runs.get(key) is None else loss(runs[key], sign)
                for key, sign in (("difference", "+"), ("standard_error", ""))
            )
            row = [f"{name}, {precision}", len(runs["finals"]), loss(runs["final"])]
            lines.append([*row, difference, error])
    return markdown(("run", "seeds", "final loss, mean", "difference", "standard error"), lines)


def recipes_table(results: Results) -> str:
    """Loss and time of the configs for docs_corpus."""
    found, lines = results["fp8_losses"]["result"], []
    for group, config in CONFIGS.items():
        runs = found[group]["bf16"]
        seeds = ", ".join(map(loss, runs["finals"]))
        final = loss(runs["final"])
        lines.append([f"`{config}`", runs["steps"][0], final, seeds, *times(runs)])
    head = ("config", "steps", "final loss, mean", "seeds", "tokens/s", "seconds of training")
    return markdown(head, lines)


def back_ends_table(results: Results) -> str:
    """What runs on which GPU, from the registry of pallas_kernels."""
    return markdown(*_back_ends.table())


DOCS = Path("docs")
# Name → page from the repository's root, and the function that returns the table.
TABLES: dict[str, tuple[Path, Callable[[Results], str]]] = {
    "overview": (DOCS / "results.md", overview_table),
    "recipes": (DOCS / "results.md", recipes_table),
    "steps": (DOCS / "speed.md", step_table),
    "recompute": (DOCS / "speed.md", recompute_table),
    "scaling": (DOCS / "scaling.md", scaling_table),
    "fp8_step": (DOCS / "fp8.md", fp8_step_table),
    "fp8_losses": (DOCS / "fp8.md", losses_table),
    "learning": (DOCS / "normuon.md", learning_table),
    "back_ends": (DOCS / "cards.md", back_ends_table),
}
