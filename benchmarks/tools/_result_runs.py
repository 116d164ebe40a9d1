"""The table of NorMuon, and the overview of docs/results.md."""

from pathlib import Path

from _result_files import Results, figure, markdown, percent, ratio


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


DOCS = Path("docs")
TABLES = {
    "overview": (DOCS / "results.md", overview_table),
    "learning": (DOCS / "normuon.md", learning_table),
}
