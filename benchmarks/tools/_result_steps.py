"""Tables of training steps: benchmarks/results/step, profile, startup and ladder."""

from collections.abc import Callable
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
STARTS = [
    ("empty caches", "startup", "cold"),
    ("full caches", "startup", "warm"),
    ("two GPUs, empty caches", "startup_devices_2", "cold"),
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
        rival = ["", "", ""]
        if torch:
            rival = [figure(torch["ms"]), f"{torch['peak_gib']:.1f}", ratio(ours["of_torch"])]
        speed = [figure(ours["ms"]), f"**{figure(ours['tokens/s'])}**", percent(ours["mfu"])]
        memory = f"{ours['peak_gib']:.1f}"
        lines.append(
            [results.link(f"step/{name}", label), *speed, memory, *rival, target(ours, *aim)]
        )
    head = ["step", "ms", "tokens/s", "MFU", "peak GiB", "PyTorch, ms", "PyTorch, GiB"]
    return markdown([*head, "speedup", "target"], lines)


def start_table(results: Results) -> str:
    """Seconds of each phase until the end of the first step."""
    starts = {}
    for label, name, start in STARTS:
        found = [row for row in results[name]["rows"] if row["start"] == start]
        starts[label] = found[0]
    phases = list(dict.fromkeys(name for row in starts.values() for name in row["parts"]))
    lines = [
        [phase, *(f"{row['parts'].get(phase, 0):.1f}" for row in starts.values())]
        for phase in phases
    ]
    lines.append(["**sum**", *(f"**{row['total']:.1f}**" for row in starts.values())])
    return markdown(["seconds", *starts], lines)


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


def parts_table(results: Results) -> str:
    """Time of each part of a traced step."""
    (row,) = results["profile/bf16_64"]["rows"]
    cells: dict[str, dict[str, tuple[float, float]]] = {}
    for part in row["parts"]:
        cells.setdefault(part["part"], {})[part["pass"]] = part["ms"], part["matmul_ms"]
    passes = ("forward", "backward", "update")
    lines = [
        [
            name,
            *(f"{found[p][0]:.2f}" if p in found else "" for p in passes),
            f"{sum(matmul for _, matmul in found.values()):.2f}",
        ]
        for name, found in cells.items()
    ]
    total = f"{row['span_ms']:.1f} ms, of which {row['idle_ms']:.1f} ms idle"
    head = ("part", *(f"{p}, ms" for p in passes), "of which matmuls, ms")
    return f"{markdown(head, lines)}\n\nThe whole trace: {total}."


def ladder_table(results: Results) -> str:
    """Every rung of gptjax and of PyTorch."""
    lines = [
        [
            {"gptjax": "gptjax", "torch": "PyTorch"}[row["system"]],
            row["rung"],
            figure(row["ms"]),
            f"{row['tokens/s']:,.0f}",
            percent(row["mfu"]),
            f"{row['gib']:.1f}",
            f"{row['factor']:.2f} ×",
            f"{figure(row['since_start'], 3)} ×",
        ]
        for row in results["ladder"]["rows"]
    ]
    head = ("system", "rung", "ms", "tokens/s", "MFU", "GiB", "speedup of the rung")
    return markdown([*head, "total speedup"], lines)


def normuon_step_table(results: Results) -> str:
    """The training step with NorMuon on one and two GPUs."""
    lines = [
        [
            row["devices"],
            figure(row["ms"]),
            figure(row["tokens/s"]),
            f"{row['peak_gib']:.1f}",
            percent(row["scaling"]) if "scaling" in row else "",
        ]
        for row in results["step/devices_bf16_64_normuon"]["rows"]
    ]
    head = ("GPUs", "ms", "tokens/s", "peak GiB per GPU", "compared with GPUs × one GPU")
    return markdown(head, lines)


def scaling_table(name: str) -> Callable[[Results], str]:
    """Return a table of the report of benchmarks/experiments/scaling.py."""

    def table(results: Results) -> str:
        # result_tables.py adds the folder of the experiments to the path.
        from _scaling_report import TABLES as reports  # pyright: ignore[reportMissingImports]

        text = reports[name](results["scaling"])
        if name == "measured":  # The caption also has the origin of the measured steps.
            for row in results["scaling"]["compared"]:
                results[f"step/{Path(row['result']).stem}"]
        return text

    return table


def constants_table(results: Results) -> str:
    """Measured and assumed constants of the predictions."""
    fits = results["collectives_devices_2"]["fits"]
    rates = sorted(rate for fit in fits if (rate := fit["bus_bytes_per_s"]))
    latencies = sorted(fit["latency_s"] for fit in fits)
    prediction = results["scaling"]
    network = prediction["assumptions"]
    lines = [
        [
            "bus bandwidth of a collective in a host (NVLink)",
            f"{rates[0] / 1e9:.0f} to {rates[-1] / 1e9:.0f} GB/s",
            "measured, two GPUs",
        ],
        [
            "latency of a collective in a host",
            f"{1e6 * latencies[0]:.0f} to {1e6 * latencies[-1]:.0f} µs",
            "measured, two GPUs",
        ],
        [
            "slowdown of the computation on several GPUs",
            percent(prediction["slowdown"]),
            "measured, two GPUs without overlap",
        ],
        [
            "bus bandwidth between hosts, per GPU",
            f"{network['network_bytes_per_s'] / 1e9:.0f} GB/s, of 400 Gb/s",
            "assumed",
        ],
        [
            "latency between two hosts",
            f"{1e6 * network['network_latency_s']:.0f} µs, times log2(hosts), for all-reduce twice",
            "assumed",
        ],
    ]
    return markdown(("constant", "value", "source"), lines)


SPEED, SCALING = Path("docs/speed.md"), Path("docs/scaling.md")
TABLES = {
    "steps": (SPEED, step_table),
    "start": (SPEED, start_table),
    "recompute": (SPEED, recompute_table),
    "parts": (SPEED, parts_table),
    "ladder": (Path("docs/ladder.md"), ladder_table),
    "normuon_step": (Path("docs/normuon.md"), normuon_step_table),
    "scaling_constants": (SCALING, constants_table),
    **{
        f"scaling_{name}": (SCALING, scaling_table(name))
        for name in ("measured", "scaling", "collectives", "limits")
    },
}
