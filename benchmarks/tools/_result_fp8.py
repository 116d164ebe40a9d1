"""Tables of FP8 and of the two recipes on docs_corpus."""

from pathlib import Path

from _result_files import Results, figure, markdown, ratio

GROUPS = {
    "adamw": "AdamW",
    "normuon": "NorMuon",
    "short": "AdamW, 100 steps of warm-up",
}
# Results of `bench step`, each with the rows that one command measured.
STEPS = (
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


def step_table(results: Results) -> str:
    """Training steps in FP8. The first row of each file has the speed 1."""
    lines = []
    for name in STEPS:
        rows = results[name]["rows"]
        lines += [
            [
                f"{row['model']}, {row['system'].replace('torch', 'PyTorch')}",
                f"{row['batch']} × {row['sequence_length']:,}",
                row["precision"],
                figure(row["tokens/s"]),
                f"{row.get('needed_gib', row['peak_gib']):.1f}",
                ratio(rows[0]["ms"] / row["ms"]),
            ]
            for row in rows
        ]
    head = ("model", "tokens", "precision", "tokens/s", "GiB", "speed")
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


DOCS = Path("docs")
TABLES = {
    "fp8_step": (DOCS / "fp8.md", step_table),
    "fp8_losses": (DOCS / "fp8.md", losses_table),
    "recipes": (DOCS / "results.md", recipes_table),
}
