"""Start two processes with the name of one run.

    python benchmarks/experiments/attacks/two_processes.py --trials 11 \\
        --out benchmarks/results/attacks/two_processes.json

The second process starts at a random moment of the first one's life. Exactly one of them must
train; the other is refused with the first one's pid, and the run ends with the arrays and losses of
an undisturbed run.

Outcomes: `one refused`, `one after the other` (the first had ended). Failures: `silent wrong`,
`lost`, `traceback`.
"""

import dataclasses
import json
import random
import tempfile
import time
from pathlib import Path

import jax
import tyro
from _runs import arrays_and_losses, prepare, report, same, start


@dataclasses.dataclass(frozen=True)
class Options:
    """Start pairs of processes with one name; exit code 1 if both train at once."""

    trials: int = 11
    """Number of pairs."""
    out: Path | None = None
    """JSON file for the results."""
    seed: int = 0
    """Seed of the moments."""


def trial(folder: Path, name: str, delay: float, alone) -> dict:
    first = start(folder, name)
    time.sleep(delay)
    second = start(folder, name)
    codes = first.wait(), second.wait()
    said = (folder / f"{name}.txt").read_text()
    row = {"delay_s": round(delay, 2), "exit_codes": codes}
    if "Traceback" in said:
        return row | {"outcome": "traceback"}
    if sorted(codes) not in ([0, 1], [0, 0]):
        return row | {"outcome": "lost", "said": said[-300:]}
    if not same(arrays_and_losses(folder, name), alone):
        return row | {"outcome": "silent wrong"}
    winner = first if codes[0] == 0 else second
    if sorted(codes) == [0, 1]:
        named = f"pid {winner.pid} on" in said
        return row | {"outcome": "one refused" if named else "silent wrong"}
    return row | {"outcome": "one after the other" if "is complete" in said else "silent wrong"}


def main(options: Options) -> None:
    jax.config.update("jax_platforms", "cpu")
    rng, rows = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        seconds = prepare(folder)
        alone = arrays_and_losses(folder, "alone")
        for number in range(options.trials):
            delay = 0.0 if number == 0 else rng.random() * seconds
            rows.append(trial(folder, f"pair{number}", delay, alone))
            print(json.dumps(rows[-1]), flush=True)
    report("two_processes.py", rows, options.out)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
