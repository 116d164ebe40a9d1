"""Compare the training steps of two checkouts of gptjax on one GPU, in alternation.

git worktree add ../before 6811bb8
python benchmarks/tools/compare_commits.py --before ../before --cases gpt2_124m:bf16:64 \\
    speedrun_pr233:bf16:1:5 --out benchmarks/results/step/commits.json

A case is CONFIG:PRECISION:BATCH or CONFIG:PRECISION:BATCH:STAGE, with a config file of each
checkout. Both checkouts have a process of their own, which keeps its step on the device. The
processes measure in turns; each pair of turns gives one ratio.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).resolve().parents[2]
TITLES = ("before ms", "after ms", "ratio", "lowest", "highest", "GiB before", "GiB after")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Compare the training steps of two checkouts on one GPU."""

    before: Path
    """Checkout of the commit before."""
    after: Path = ROOT
    """Checkout of the commit after."""
    cases: tuple[str, ...]
    """CONFIG:PRECISION:BATCH[:STAGE], such as gpt2_124m:bf16:64."""
    turns: int = 7
    """Turns of each checkout."""
    seconds: float = 1.0
    """Seconds of a turn."""
    out: Path | None = None
    """JSON file for the results."""


class Side:
    """A process that measures the steps of a checkout."""

    def __init__(self, tree: Path):
        path = os.pathsep.join([str(tree / "src"), str(tree), os.environ.get("PYTHONPATH", "")])
        more = {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--measure"],
            **{"cwd": tree, "env": os.environ | more, "text": True},
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE},
        )

    def send(self, message: Any) -> None:
        """Send a case, or a number of steps."""
        print(json.dumps(message), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """Return the answer of the process: the figures of a case, or seconds."""
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process of a checkout ended; its error is above")
        return json.loads(line)


def measure() -> None:
    """Answer the messages of `Side` with the gptjax of PYTHONPATH."""
    import jax

    from gptjax import cli
    from gptjax.bench.jax_step import JaxStep
    from gptjax.precision import Precision
    from gptjax.training.memory import GIB, needed_bytes

    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        message = json.loads(line)
        if isinstance(message, int):
            answer: Any = step.run(message)
        else:
            step = None  # frees the last case's state
            name, precision, batch, *stage = message.split(":")
            config = cli.load(Path("configs") / f"{name}.py")
            config = config.of_stage(int(stage[0])) if stage else config
            config = dataclasses.replace(
                config,
                model=dataclasses.replace(config.model, precision=Precision(precision)),
                micro_batch=int(batch),
                batch_tokens=int(batch) * config.sequence_length,
            )
            step = JaxStep(config, jax.devices()[0])
            step.compile()
            step.run(2)
            answer = {"gib": needed_bytes(step.compiled) / GIB, "device": step.device.device_kind}
        print(json.dumps(answer), file=answers, flush=True)


def compare(case: str, sides: list[Side], options: Options) -> dict:
    """Return the row of a case."""
    for side in sides:
        side.send(case)
    facts = [side.answer() for side in sides]
    sides[0].send(5)
    steps = max(1, round(options.seconds / (sides[0].answer() / 5)))
    turns = []
    for turn in range(options.turns + 1):
        for side in sides:
            side.send(steps)
            seconds = side.answer() / steps
            if turn:  # the first turn warms up
                turns.append(1e3 * seconds)
        print(f"{case}: turn {turn} of {options.turns}", file=sys.stderr, flush=True)
    before, after = turns[::2], turns[1::2]
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    return {
        **{"case": case, "steps": steps, "device": facts[0]["device"]},
        **{"before_ms": statistics.median(before), "after_ms": statistics.median(after)},
        **{"ratio": statistics.median(ratios), "ratios": ratios},
        **{"before_gib": facts[0]["gib"], "after_gib": facts[1]["gib"]},
    }


def main(options: Options) -> None:
    sides = [Side(options.before.resolve()), Side(options.after.resolve())]
    rows = []
    for case in options.cases:
        rows.append(compare(case, sides, options))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    from gptjax.bench import results  # only the processes use the GPU
    from gptjax.bench.results import Row, print_table

    command = results.command("benchmarks/tools/compare_commits.py")
    device = rows[0]["device"]
    result = results.new(command, rows, device=device, packages=("jax-triton", "triton"))
    if options.out:
        results.write(options.out, result)
    table = []
    for row in rows:
        times = f"{row['before_ms']:.3f}", f"{row['after_ms']:.3f}", f"{row['ratio']:.4f}"
        ends = f"{min(row['ratios']):.4f}", f"{max(row['ratios']):.4f}"
        memory = f"{row['before_gib']:.2f}", f"{row['after_gib']:.2f}"
        table.append(Row(row["case"], (*times, *ends, *memory)))
    print_table(device, TITLES, table)


if __name__ == "__main__":
    measure() if sys.argv[1:] == ["--measure"] else main(tyro.cli(Options))
