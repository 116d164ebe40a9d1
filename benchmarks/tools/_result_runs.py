"""Tables of training runs and robustness, and the overview of docs/results.md."""

from pathlib import Path

from _result_files import Results, figure, markdown, percent, ratio
from _result_kernels import separate_ratios

# Script in benchmarks/experiments/attacks, result, and what the script does.
ATTACKS = [
    ("kills", "kills a run and resumes it"),
    ("disk_full", "fills the disk, frees space, resumes"),
    ("power_cut", "cuts the power of an ext4 disk, resumes"),
    ("processes", "kills one of 2 or 4 processes on CPUs, resumes all"),
    ("processes_gpus", "kills one of 2 processes on GPUs, resumes both"),
    ("two_processes", "starts two processes with the same name"),
    ("checkpoints", "changes files and folders of a checkpoint, restores"),
    ("shards", "changes token shards and dataset.json, trains"),
    ("weights", "changes Hugging Face and llm.c files, loads"),
    ("command_lines", "passes invalid options and config files"),
]


def curve_table(results: Results) -> str:
    """Validation losses of a training run."""
    lines = results.log("gpt2_124m_docs")
    val = [line for line in lines if line["kind"] == "val"]
    head = ["step", *(str(line["step"]) for line in val)]
    return markdown(head, [["validation loss", *(f"{line['loss']:.3f}" for line in val)]])


def layers_table(results: Results) -> str:
    """Blocks unrolled or scanned: time, compilation and memory."""
    cells: dict[str, dict[str, dict]] = {}
    for row in results["layers"]["rows"]:
        cells.setdefault(row["case"], {})[row["layout"]] = row
    lines = []
    for case, found in cells.items():
        model, precision, batch = case.split(":")
        pairs = [
            f"{found[layout][key]:.1f}"
            for key in ("ms", "compile_s", "gib")
            for layout in ("unrolled", "scanned")
        ]
        lines.append([f"{model}, {precision}, B = {batch}", *pairs])
    head = ["model", "unrolled, ms", "scanned, ms", "unrolled, compile s", "scanned, compile s"]
    return markdown([*head, "unrolled, GiB", "scanned, GiB"], lines)


def checkpoint_table(results: Results) -> str:
    """Median seconds of saving and restoring a checkpoint."""
    files = {"124M": "checkpoint_gpt2", "1558M": "checkpoint_gpt2_xl"}
    medians = {
        f"{model}{text}": results[name]["median_seconds"][checkout]
        for model, name in files.items()
        for text, checkout in (("", "this"), (", 801a9fd", "other"))
    }
    phases = {"blocking": "training is blocked", "complete": "until the checkpoint is on disk"}
    phases["restore"] = "restore"
    lines = [
        [text, *(figure(median[key], 3) for median in medians.values())]
        for key, text in phases.items()
    ]
    return markdown(["seconds", *medians], lines)


def attacks_table(results: Results) -> str:
    """Outcomes of the scripts that damage runs and files."""
    lines = []
    for name, action in ATTACKS:
        counts = results[f"attacks/{name}"]["counts"]
        outcomes = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
        lines.append([results.link(f"attacks/{name}", name), action, outcomes])
    return markdown(("result", "action", "outcomes"), lines)


def evaluation_table(results: Results) -> str:
    """HellaSwag: time and rate of each pass."""
    rows = results["evaluation"]["rows"]
    return markdown(
        ("pass", "seconds", "items/s", "accuracy, random weights"),
        [[r["pass"], f"{r['seconds']:.1f}", figure(r["items/s"]), percent(r["acc"])] for r in rows],
    )


def fast_and_plain_table(results: Results) -> str:
    """Losses of the step with kernels, compared with plain JAX."""
    found = results["fast_and_plain/fast_and_plain"]["result"]["comparison"]
    training, validation = found["training"], found["validation"]
    lines = [
        [
            "means over the seeds: largest difference of all steps",
            f"{found['means_apart_of_spread']:.2f}",
        ],
        ["training loss, same seed: RMS difference", f"{training['apart_of_spread']:.2f}"],
        ["the same: largest difference", f"{training['apart_largest_of_spread']:.2f}"],
        [
            "final validation loss, same seed: RMS difference",
            f"{validation['apart_of_spread']:.2f}",
        ],
        ["the same: largest difference", f"{validation['apart_largest_of_spread']:.2f}"],
        ["final validation losses, fast", ", ".join(f"{x:.3f}" for x in validation["fast"])],
        ["final validation losses, plain", ", ".join(f"{x:.3f}" for x in validation["plain"])],
    ]
    return markdown(
        ("quantity (differences between fast and plain, divided by the spread)", "value"), lines
    )


def sizes_table(results: Results) -> str:
    """First and last loss of each size of GPT-2."""
    rows = results["fast_and_plain/fast_and_plain"]["result"]["sizes"]
    return markdown(
        ("model", "learning rate", "batch", "steps", "first loss", "last loss"),
        [
            [
                row["size"] + (f", recompute {r}" if (r := row["recompute"]) != "none" else ""),
                f"{row['learning_rate']:g}",
                f"{row['micro_batch']} × 1024",
                row["steps"],
                f"{row['first_loss']:.3f}",
                f"{row['last_loss']:.3f}",
            ]
            for row in rows
        ],
    )


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


def tuning_table(results: Results) -> str:
    """Learning rates that were tried, with one seed."""
    found = results["learning/learning"]
    lines = [
        ["AdamW", f"{rate:g}, warm-up {warmup:g}", f"{loss:.2f}"]
        for rate, warmup, loss in found["adamw_tuning"]
    ]
    lines += [
        ["NorMuon", f"matrices {matrix:g}, other parameters {rest:g}", f"{loss:.2f}"]
        for matrix, rest, loss in found["normuon_tuning"]
    ]
    return markdown(("optimizer", "learning rate", "validation loss"), lines)


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
    attention = [r for case, r in separate_ratios(results).items() if "backward" in case]
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
            "[ladder.md](ladder.md)",
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


MEASUREMENTS, NORMUON = Path("docs/measurements.md"), Path("docs/normuon.md")
TABLES = {
    "overview": (Path("docs/results.md"), overview_table),
    "learning_curve": (MEASUREMENTS, curve_table),
    "layers": (MEASUREMENTS, layers_table),
    "checkpoint": (MEASUREMENTS, checkpoint_table),
    "attacks": (MEASUREMENTS, attacks_table),
    "evaluation": (MEASUREMENTS, evaluation_table),
    "fast_and_plain": (MEASUREMENTS, fast_and_plain_table),
    "sizes": (MEASUREMENTS, sizes_table),
    "learning": (NORMUON, learning_table),
    "tuning": (NORMUON, tuning_table),
}
