"""Draw docs/images/speed.png: training throughput of gptjax, llm.c and PyTorch on one H200.

python benchmarks/tools/draw_speed.py

gptjax and PyTorch are read from benchmarks/results/step. llm.c was measured in another run
(docs/benchmarks.md), so its times are constants of this file.
"""

import argparse
from pathlib import Path

from draw import BESIDE, style_bars

from gptjax.bench import results
from gptjax.plot import BLUE, GREEN, ORANGE, picture

ROOT = Path(__file__).parents[2]
# Title, result, tokens of a step, and the milliseconds of llm.c's train_gpt2cu.
CASES = [
    ("bf16, 64 × 1024 tokens", "bf16_64.json", 65_536, 115.2),
    ("TF32, 32 × 1024 tokens", "tf32_32.json", 32_768, 176.3),
]
NAMES = {"gptjax": "gptjax", "torch": "PyTorch 2.11, compiled"}


def throughput(file: str, tokens: int, llmc_ms: float) -> dict[str, float]:
    """Return the tokens per second of each program."""
    rows = results.read(ROOT / "benchmarks" / "results" / "step" / file)["rows"]
    found = {NAMES[row["system"]]: row["tokens/s"] for row in rows}
    return found | {"llm.c": 1000 * tokens / llmc_ms}


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "speed.png")
    out = parser.parse_args(argv).out
    colours = {
        "gptjax": BLUE,
        "llm.c": GREEN,
        "PyTorch 2.11, compiled": ORANGE,
    }
    with picture(out, (7, 2.6)) as axes:
        style_bars(axes)
        y = 0.0
        for title, *case in CASES:
            speeds = throughput(*case)
            axes.annotate(title, (0, y), weight="bold", **BESIDE)
            for name in colours:
                y += 1
                axes.barh(y, speeds[name], height=0.8, color=colours[name])
                text = f"{name}  {speeds[name]:,.0f}"
                axes.annotate(text, (speeds[name], y), **BESIDE)
            y += 1.4
        axes.set(ylim=(y, -1), xlim=(0, 850_000), yticks=[])
        axes.set_xlabel("tokens per second of training, GPT-2 124M on one H200")
        axes.xaxis.set_major_formatter("{x:,.0f}")
    print(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
