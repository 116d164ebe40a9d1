"""Cut the power of a disk while a run saves its checkpoints, and resume from the disk's contents.

    python benchmarks/experiments/attacks/power_cut.py --trials 17 \\
        --out benchmarks/results/attacks/power_cut.json

Root is needed to mount a file as an ext4 disk. At a random moment the training process is stopped
and the file copied: the copy has the contents of the disk, without the kernel's write cache. The
copy is mounted (ext4 replays its journal), and the same command must resume on it and end with the
arrays and losses of an undisturbed run. The file system is mounted without its own
protections for programs that do not synchronize (data=writeback, noauto_da_alloc).

Outcomes: `resumed` (from a checkpoint, bit-exact), `began anew` (before the first checkpoint was
complete). Failures: `lost` (a checkpoint had been reported complete, and none was left, or the run
did not go on), `silent wrong`, `traceback`.
"""

import contextlib
import dataclasses
import json
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import jax
import tyro
from _runs import arrays_and_losses, prepare, report, same, start, wait_for_log


@dataclasses.dataclass(frozen=True)
class Options:
    """Cut the power while checkpoints are saved; exit code 1 if a run is lost."""

    trials: int = 17
    """Number of power cuts."""
    out: Path | None = None
    """JSON file for the results."""
    seed: int = 0
    """Seed of the moments."""
    size_mib: int = 64
    """Size of the disk in MiB."""


@contextlib.contextmanager
def mounted(image: Path, folder: Path):
    folder.mkdir(exist_ok=True)
    options = "loop,data=writeback,noauto_da_alloc,commit=300"
    subprocess.run(["mount", "-o", options, str(image), str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def complete(run: Path) -> list[int]:
    folder = run / "checkpoints"
    return (
        sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit()) if folder.exists() else []
    )


def trial(
    folder: Path, number: int, seconds: float, alone, options: Options, rng: random.Random
) -> dict:
    name, image, cut = f"cut{number}", folder / f"disk{number}.img", folder / f"cut{number}.img"
    disk, after = folder / f"disk{number}", folder / f"after{number}"
    with image.open("wb") as file:
        file.truncate(options.size_mib << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    with mounted(image, disk):
        process = start(folder, name, runs=disk)
        wait_for_log(folder, name, disk)
        time.sleep(rng.random() * seconds)
        if number % 2:  # the moment after an older checkpoint was deleted is the most dangerous one
            before = complete(disk / name)
            while process.poll() is None and complete(disk / name)[:1] == before[:1]:
                time.sleep(0.002)
        process.send_signal(signal.SIGSTOP)
        had = complete(disk / name)
        shutil.copyfile(image, cut)
        process.kill()
        process.wait()
    image.unlink()
    row = {"complete_before": had}
    with mounted(cut, after):
        row["complete_after"] = complete(after / name)
        process = start(folder, name, runs=after)
        code = process.wait()
        said = (folder / f"{name}.txt").read_text()
        resumed = re.findall("resuming from step ([0-9]+)|is complete: ([0-9]+) of", said)
        resumed = ["".join(match) for match in resumed]
        row["resumed_from_step"] = int(resumed[-1]) if resumed else None
        row["damaged"] = said.count("is damaged")
        if "Traceback" in said:
            outcome = "traceback"
        elif code or (had and not resumed):
            outcome, row["said"] = "lost", said[-500:]
        elif not same(arrays_and_losses(folder, name, after), alone):
            outcome = "silent wrong"
        else:
            outcome = "resumed" if resumed else "began anew"
    cut.unlink()
    return row | {"outcome": outcome}


def main(options: Options) -> None:
    jax.config.update("jax_platforms", "cpu")
    rng, rows = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        seconds = prepare(folder)
        alone = arrays_and_losses(folder, "alone")
        for number in range(options.trials):
            rows.append(trial(folder, number, seconds, alone, options, rng))
            print(json.dumps(rows[-1]), flush=True)
    report("power_cut.py", rows, options.out)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
