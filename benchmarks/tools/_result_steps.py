"""Tables of training steps: benchmarks/results/step and scaling.json."""

from pathlib import Path

from _result_files import Results, figure, markdown, percent, ratio

# Label, result, and target: a speedup over PyTorch, or milliseconds.
STEPS = [
    ("124M, bf16, B = 64", "bf16_64", (1.20, None)),
    ("124M, bf16, B = 4", "bf16_4", (None, 8.5)),
    ("124M, TF32, B = 32", "tf32_32", (1.5, None)),
    ("124M, TF32, B = 4", "tf32_4", (None, 18.0)),
    ("124M, true fp32, B = 8", "fp32_8", (1.0, None)),
    ("350M, bf16, B = 96", "gpt2_medium_96", (1.15, None)),
    ("774M, bf16, B = 64", "gpt2_large_64", (1.15, None)),
    ("1558M, bf16, B = 36", "gpt2_xl_36", (1.15, None)),
    ("1558M, bf16, B = 24", "gpt2_xl_24", (None, None)),
    ("Llama 3, 124M, bf16, B = 64", "llama3_124m_64_torch", (None, None)),
    ("Llama 3, 1B, bf16, B = 16", "llama3_1b_16_torch", (None, None)),
    ("124M, bf16, B = 4, forward pass and loss", "forward_4", (None, None)),
]


def target(row: dict, speedup: float | None, ms: float | None) -> str:
    """Return a target, and whether the step misses it."""
    if speedup is not None:
        reached, text = row["of_torch"] >= speedup, f"≥ {speedup:g} ×"
    elif ms is not None:
        reached, text = row["ms"] <= ms, f"≤ {ms:g} ms"
    else:
        return ""
    return text if reached else f"{text}: **not reached**"


def step_table(results: Results) -> str:
    """Time, throughput and memory of each step, compared with PyTorch."""
    lines = []
    for label, name, aim in STEPS:
        rows = {row["system"]: row for row in results[f"step/{name}"]["rows"]}
        ours, torch = rows["gptjax"], rows.get("torch")
        rival = ["", ""]
        if torch:
            rival = [figure(torch["ms"]), ratio(ours["of_torch"])]
        speed = [figure(ours["ms"]), f"**{figure(ours['tokens/s'])}**", percent(ours["mfu"])]
        memory = f"{ours['peak_gib']:.1f}"
        lines.append(
            [results.link(f"step/{name}", label), *speed, memory, *rival, target(ours, *aim)]
        )
    head = ["step", "ms", "tokens/s", "MFU", "GiB", "PyTorch, ms"]
    return markdown([*head, "speedup", "target"], lines)


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


SPEED = Path("docs/speed.md")
TABLES = {
    "steps": (SPEED, step_table),
    "recompute": (SPEED, recompute_table),
    "scaling": (Path("docs/scaling.md"), scaling_table),
}
