"""The tables of docs/: the results that they read, and a function for each table."""

import json
import math
import os
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _back_ends
import learning
from compile_for_cards import CARDS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"


class Results:
    """The results that a table reads, in the order of the first reading."""

    def __init__(self, page: Path):
        self.page = page
        self.read: dict[str, dict] = {}

    def __getitem__(self, name: str) -> dict:
        """Return the result NAME.json, or the records of NAME.jsonl as its "rows"."""
        if name not in self.read:
            path = file_of(name)
            if path.suffix == ".json":
                self.read[name] = json.loads(path.read_text(encoding="utf-8"))
            else:
                records = learning.read_records(path)
                last = {key: records[-1][key] for key in ("device", "date")}
                self.read[name] = last | {"date": last["date"][:10], "rows": records}
        return self.read[name]

    def caption(self) -> str:
        """Return a line with the devices, the dates, and one link: to the result, or the folder of
        all results. The files have the command, the versions, the commit and a note on other
        processes.
        """
        if not self.read:
            return ""
        devices = dict.fromkeys(hardware(name, result) for name, result in self.read.items())
        dates = sorted({result["date"] for result in self.read.values()})
        names = [file_of(name) for name in self.read]
        common = names[0] if len(names) == 1 else Path(os.path.commonpath(names))
        link = f"[{common.name}]({os.path.relpath(common, self.page.parent)})"
        return f"{'; '.join(devices)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}: {link}"


def file_of(name: str) -> Path:
    """Return the file of a result: NAME.jsonl if it is there, else NAME.json."""
    records = FOLDER / f"{name}.jsonl"
    return records if records.exists() else records.with_suffix(".json")


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
    "124M, TF32, B = 32": "tf32_32",
    "124M, true fp32, B = 8": "fp32_8",
    "350M, bf16, B = 96": "gpt2_medium_96",
    "774M, bf16, B = 64": "gpt2_large_64",
    "1558M, bf16, B = 36": "gpt2_xl_36",
    "Llama 3, 124M, bf16, B = 64": "llama3_124m_64_torch",
    "Llama 3, 1B, bf16, B = 16, H100": "llama3_1b_16_torch_h100",
    **{
        f"124M, {precision}, T = {length:,}": f"long_{length}:{precision.lower()}"
        for length in (32_768, 131_072)
        for precision in ("bf16", "FP8")
    },
}
"""Label → file, and the precision of the file's rows if the file has several."""


def step_table(results: Results) -> str:
    """Time, throughput and memory of each step, compared with PyTorch."""
    lines = []
    for label, name in STEPS.items():
        name, _, precision = name.partition(":")
        rows = [r for r in results[f"step/{name}"]["rows"] if precision in ("", r["precision"])]
        (ours,) = (row for row in rows if row["system"] == "gptjax")
        speed = [f"**{figure(ours['tokens/s'])}**", percent(ours["mfu"])]
        (torch,) = (row for row in rows if row["system"] == "torch")
        error = torch.get("error", "").split(":")[0]
        compared = f"PyTorch: {error}" if error else ratio(ours["of_torch"])
        lines.append([label, *speed, f"{ours['needed_gib']:.1f}", compared])
    return markdown(("step", "tokens/s", "MFU", "GiB", "compared with PyTorch"), lines)


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


RUNS = "learning/runs_optimizer_track"
# Groups of learning_final_plan.toml with 1,000 steps.
OPTIMIZERS = {"AdamW": "AdamW", "Muon": "Muon", "NorMuon": "NorMuon", "NorMuon_tuned": "NorMuon"}


def learning_table(results: Results) -> str:
    """Settings of each optimizer, and the loss after the last step."""
    groups = learning.by_group(results[RUNS]["rows"])
    lines = []
    for group, name in OPTIMIZERS.items():
        runs = list(groups[group].values())
        options = runs[0]["command"].removeprefix("python train.py ").rsplit(" --seed", 1)[0]
        loss, half = learning.interval([learning.final(run) for run in runs])
        ms = statistics.fmean(run["ms"] for run in runs)
        lines.append([name, f"`{options}`", f"{loss:.3f} ± {half:.3f} ({len(runs)})", f"{ms:.1f}"])
    head = ("optimizer", "options", "loss ± 95 % (seeds)", "ms a step")
    return markdown(head, lines)


def separate_ratios(results: Results) -> list[float]:
    """Return cuDNN's time / gptjax's time of each training shape of separate q, k and v."""
    ms: dict[str, dict[str, float]] = {}
    for row in results["kernels/attention_separate"]["rows"]:
        ms.setdefault(row["case"], {})[row["implementation"]] = row["ms"]
    return [found["cudnn"] / found["auto"] for case, found in ms.items() if "backward" in case]


def overview_table(results: Results) -> str:
    """One line for each quantity of the other tables and pictures."""
    rows = [row for row in results["ladder"]["rows"] if row["system"] == "gptjax"]
    ladder = {row["precision"]: f"{figure(row['since_start'], 3)} ×" for row in rows}  # last rungs
    started = [r for r in results["startup"]["rows"] if r.get("case", "bf16") == "bf16"]
    starts = ([r["total"] for r in started if r["start"] == how] for how in ("cold", "warm"))
    cold, warm = map(statistics.fmean, starts)
    two = [r for r in results["scaling"]["compared"] if r["batch"] == 64][0]
    scaled = percent(two["one_gpu_ms"] / two["measured_ms"])
    groups = learning.by_group(results[RUNS]["rows"])
    rival = [groups[f"NorMuon_tuned_{steps}"] for steps in (480, 400)]
    share = statistics.fmean(learning.share_of_steps(groups["AdamW"], rival))
    slowest, *others, fastest = sorted(separate_ratios(results))
    shapes = f"{len(others) + 2} shapes"
    generation = results["generate/batch_64"]["rows"][0]
    lines = [
        ["start to first step, H100, empty caches", f"{cold:.1f} s"],
        ["the same, full caches", f"{warm:.1f} s"],
        [
            "all accelerations in bf16, compared with fp32 without jit",
            ladder["bf16"],
        ],
        ["the same in FP8", ladder["fp8"]],
        ["two GPUs, compared with two times one GPU", scaled],
        [f"attention on an H100, compared with cuDNN: slowest of {shapes}", f"{slowest:.2f} ×"],
        ["the same: fastest", f"{fastest:.2f} ×"],
        ["generation, 64 sequences, compared with transformers", ratio(generation["of_torch"])],
        ["tuned NorMuon: share of AdamW's steps for AdamW's loss", f"{share:.2f}"],
    ]
    return markdown(("quantity, GPT-2 124M on an H200", "result"), lines)


# Results of `bench step`: a row in bf16, or with the head alone in FP8, then a row in FP8.
FP8_STEPS = (
    *("fp8_and_bf16_64", "fp8_gpt2_large_64", "fp8_gpt2_xl_15x32_h100", "llama3_1b_16_h100"),
    "fp8_speedrun_stage_5",
)


def fp8_step_table(results: Results) -> str:
    """Training steps in FP8, compared with the step of the same command before."""
    lines = []
    for name in FP8_STEPS:
        before, row = results[f"step/{name}"]["rows"]
        memory = [f"{r.get('needed_gib', r['peak_gib']):.1f}" for r in (before, row)]
        case = f"{row['model']}, B = {row['batch']}"
        if row.get("micro_batches", 1) > 1:
            case += f", {row['micro_batches']} micro-batches"
        lines.append([case, before["precision"], ratio(before["ms"] / row["ms"]), *memory])
    head = ("model", "compared with", "speed of `fp8`", "GiB before", "GiB with `fp8`")
    return markdown(head, lines)


def back_ends_table(results: Results) -> str:
    """What runs on which GPU, from the registry of pallas_kernels."""
    return markdown(*_back_ends.table())


def cards_table(results: Results) -> str:
    """Most shared memory of an operation's Triton kernels on each GPU, in KB. Operations with equal
    cells share a line; up to 16 KB are left out."""
    kb: dict[str, dict[int, float]] = {}
    dtypes: dict[str, dict[str, None]] = {}
    for row in results["cards"]["rows"]:
        name, capability = row["operation"], row["capability"]
        most = kb.setdefault(name, {})
        most[capability] = max(most.get(capability, 0), row["shared_kb"])
        dtypes.setdefault(name, {})[{"bfloat16": "bf16", "float32": "fp32"}[row["dtype"]]] = None
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, most in kb.items():
        if max(most.values()) > 16:
            cells = ", ".join(dtypes[name]), *(f"{most[capability]:g}" for capability in CARDS)
            alike.setdefault(cells, []).append(f"`{name}`")
    head = "operation", "dtypes", *(f"{card.names} (sm_{c})" for c, card in CARDS.items())
    limits = "*limit*", "", *(f"*{card.shared_kb}*" for card in CARDS.values())
    return markdown(head, [limits, *((", ".join(same), *cells) for cells, same in alike.items())])


DOCS = Path("docs")
# Name → page from the repository's root, and the function that returns the table.
TABLES: dict[str, tuple[Path, Callable[[Results], str]]] = {
    "overview": (DOCS / "benchmarks.md", overview_table),
    "steps": (DOCS / "benchmarks.md", step_table),
    "recompute": (DOCS / "precision.md", recompute_table),
    "scaling": (DOCS / "several_gpus.md", scaling_table),
    "fp8_step": (DOCS / "precision.md", fp8_step_table),
    "learning": (DOCS / "training.md", learning_table),
    "back_ends": (DOCS / "cards.md", back_ends_table),
    "cards": (DOCS / "cards.md", cards_table),
}
