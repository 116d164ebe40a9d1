"""Fill the disk of a run at many sizes, free space again, and resume the run.

    python benchmarks/experiments/attacks/disk_full.py --trials 31 \\
        --out benchmarks/results/attacks/disk_full.json

Root is needed to mount a tmpfs of a given size with the run's folder. The first size has room for
almost nothing, the last for all but the last few checkpoints. The run must end by itself with a
sentence and exit code 1. The same command, with more space, must then end with the arrays and
losses of an undisturbed run.

Outcomes: `refused and resumed` (a sentence, then bit-exact), `enough room`. Failures: `hang`,
`traceback`, `lost` (the run could not be resumed), `silent wrong` (resumed to other numbers).
"""

import dataclasses
import json
import subprocess
import tempfile
from pathlib import Path

import jax
import tyro
from _runs import arrays_and_losses, prepare, report, same, start


@dataclasses.dataclass(frozen=True)
class Options:
    """Train on disks that fill up; exit code 1 if one run hangs or loses anything."""

    trials: int = 31
    """Number of disk sizes."""
    smallest_kib: int = 16
    """Size of the first disk."""
    largest_kib: int = 5_600
    """Size of the last one."""
    out: Path | None = None
    """JSON file for the results."""
    timeout: float = 120.0
    """Seconds after which a run counts as hanging."""


def attempt(folder: Path, name: str, runs: Path, timeout: float) -> tuple[int | None, str]:
    """Run train.py; return its exit code, None for a hang, and what it printed."""
    log = folder / f"{name}.txt"
    log.unlink(missing_ok=True)
    process = start(folder, name, runs=runs)
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = None
    return code, log.read_text()


def mount(disk: Path, kib: int, *, again: bool = False) -> None:
    options = f"size={kib}k" + (",remount" if again else "")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)


def trial(folder: Path, name: str, kib: int, alone, timeout: float) -> dict:
    disk = folder / name
    disk.mkdir()
    mount(disk, kib)
    try:
        code, said = attempt(folder, name, disk, timeout)
        row = {
            "kib": kib,
            "exit_code": code,
            "said": said.strip().splitlines()[-1][:300] if said.strip() else "",
        }
        if code is None:
            return row | {"outcome": "hang"}
        if "Traceback" in said:
            return row | {"outcome": "traceback"}
        if code == 0:
            return row | {"outcome": "enough room"}
        mount(disk, 100_000, again=True)
        code, said = attempt(folder, name, disk, timeout)
        if code != 0:
            return row | {"outcome": "lost", "said": said[-300:]}
        right = same(arrays_and_losses(folder, name, disk), alone)
        return row | {"outcome": "refused and resumed" if right else "silent wrong"}
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def main(options: Options) -> None:
    jax.config.update("jax_platforms", "cpu")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        alone = arrays_and_losses(folder, "alone")
        steps = max(options.trials - 1, 1)
        for number in range(options.trials):
            kib = (
                options.smallest_kib
                + (options.largest_kib - options.smallest_kib) * number // steps
            )
            rows.append(trial(folder, f"disk{number}", kib, alone, options.timeout))
            print(json.dumps(rows[-1]), flush=True)
    report("disk_full.py", rows, options.out)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
