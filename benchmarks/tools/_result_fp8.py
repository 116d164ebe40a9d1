"""Tables of FP8 and of the two recipes on docs_corpus."""

from pathlib import Path

from _result_files import FOLDER, Results, figure, markdown, ratio

# Largest difference of the final loss from bf16's at which FP8 is as good.
BAR = 0.003
ABSENT = "Not measured yet."
GROUPS = {
    "adamw": "124M, AdamW",
    "finish": "124M, AdamW, the last 100 steps in bf16",
    "moments": "124M, AdamW, moments in bf16",
    "normuon": "124M, NorMuon",
    "short": "124M, AdamW, 100 steps of warm-up",
    "control": "the same, MLP by XLA",
    "start": "the same, the first 150 steps in bf16",
    "twice": "the same, twice the learning rate",
    "medium": "350M, AdamW, 300 steps",
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


def losses_of(results: Results) -> dict | None:
    """Return the numbers of fp8_losses.json; None if the runs are not there."""
    if not (FOLDER / "fp8_losses.json").exists():
        return None
    return results["fp8_losses"]["result"]


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
                f"{row['ms']:.1f}",
                figure(row["tokens/s"]),
                f"{row.get('needed_gib', row['peak_gib']):.1f}",
                ratio(rows[0]["ms"] / row["ms"]),
            ]
            for row in rows
        ]
    head = ("model", "tokens", "precision", "ms", "tokens/s", "GiB", "speed")
    return markdown(head, lines)


def losses_table(results: Results) -> str:
    """Final losses of FP8 and bf16 with the same tokens."""
    found = losses_of(results)
    if found is None:
        return ABSENT
    lines = []
    for group, name in GROUPS.items():
        for precision, runs in found.get(group, {}).items():
            seeds = ", ".join(map(loss, runs["finals"]))
            difference = error = share = training = ""
            if "difference" in runs:
                difference = loss(runs["difference"], "+")
                error = "" if runs["standard_error"] is None else loss(runs["standard_error"])
                within = runs["steps_within_spread"]
                share = "" if within is None else f"{100 * within:.1f} %"
                training = loss(runs["training_difference"], "+")
            means = loss(runs["final"]), seeds, difference, error, training, share
            lines.append([f"{name}, {precision}", *means, *times(runs)])
    head = ["run", "final loss, mean", "of each seed", "difference", "standard error"]
    head += ["difference in training"]
    head += ["steps within bf16's spread", "tokens/s", "seconds of training"]
    picture = "\n\n![Losses of fp8 and bf16](images/fp8_losses.png)"
    return markdown(head, lines) + verdict(found) + picture


def verdict(found: dict) -> str:
    """Return a paragraph on whether the recipes are within the bar; empty without their runs."""
    sentences = []
    for group, name in {"adamw": "AdamW", "normuon": "NorMuon"}.items():
        fp8 = found.get(group, {}).get("fp8", {})
        if fp8.get("difference") is None:
            continue
        within = "within" if abs(fp8["difference"]) <= BAR else "not within"
        sentences.append(
            f"With {name} and {len(fp8['seeds'])} seeds, fp8's mean final loss is {within} {BAR} "
            "of bf16's."
        )
    return "\n\n" + "\n".join(sentences) if sentences else ""


def spike_table(results: Results) -> str:
    """Losses before and after a step with a gradient of 100 times its size."""
    found = (losses_of(results) or {}).get("spike")
    if found is None:
        return ABSENT
    lines = [
        [
            precision,
            loss(runs["before"]),
            loss(runs["greatest"]),
            "never" if runs["recovered_after"] is None else runs["recovered_after"],
            loss(runs["final"]),
        ]
        for precision, runs in found.items()
    ]
    head = ("precision", "training loss before", "greatest after", "steps to recover")
    return markdown((*head, "validation loss, step 250"), lines)


def recipes_table(results: Results) -> str:
    """Loss and time of the configs for docs_corpus."""
    found, lines = losses_of(results) or {}, []
    for group, config in CONFIGS.items():
        if (runs := found.get(group, {}).get("bf16")) is None:
            continue
        seeds = ", ".join(map(loss, runs["finals"]))
        final = loss(runs["final"])
        lines.append([f"`{config}`", runs["steps"][0], final, seeds, *times(runs)])
    head = ("config", "steps", "final loss, mean", "seeds", "tokens/s", "seconds of training")
    return markdown(head, lines) if lines else ABSENT


DOCS = Path("docs")
TABLES = {
    "fp8_step": (DOCS / "fp8.md", step_table),
    "fp8_losses": (DOCS / "fp8.md", losses_table),
    "fp8_spike": (DOCS / "fp8.md", spike_table),
    "recipes": (DOCS / "measurements.md", recipes_table),
}
