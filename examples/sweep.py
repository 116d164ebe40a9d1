"""Learning rate × seed on the GPUs of one machine: one train.py process per GPU, then a picture.

python examples/sweep.py --config configs/gpt2_124m.py --max-steps 2000
"""

import argparse
import os
import queue
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gptjax.doctor import machine

TRAIN = Path(__file__).parents[1] / "train.py"


def main(arguments: list[str] | None = None) -> int:
    """Train every combination and draw sweep.png; return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="All other options, such as --config and --max-steps, are those of train.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-4, 6e-4, 1.2e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("sweep"), help="folder of the runs")
    options, rest = parser.parse_known_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    gpus = queue.SimpleQueue()
    ids = [str(gpu) for gpu in machine.gpus()] or [""]  # "": no GPU, one run at a time
    for gpu in ids:
        gpus.put(gpu)

    def run(rate: float, seed: int) -> int:
        name, gpu = f"lr{rate:g}-seed{seed}", gpus.get()
        command = [sys.executable, TRAIN, *rest, "--runs-dir", options.out, "--name", name]
        command += ["--optimizer.learning-rate", f"{rate:g}", "--seed", f"{seed}"]
        where = f"GPU {gpu}" if gpu else "the CPU"
        print(f"{name} on {where}: {options.out / name}.txt", flush=True)
        with (options.out / f"{name}.txt").open("a") as file:
            env = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
            code = subprocess.run(list(map(str, command)), env=env, stdout=file, stderr=file)
        gpus.put(gpu)
        print(f"{name}: exit code {code.returncode}", flush=True)
        return code.returncode

    pairs = [(rate, seed) for rate in options.rates for seed in options.seeds]
    with ThreadPoolExecutor(len(ids)) as pool:
        try:
            failed = [*pool.map(lambda pair: run(*pair), pairs)]
        except KeyboardInterrupt:  # the runs have it too, and save; the others do not start
            pool.shutdown(cancel_futures=True)
            return 128 + signal.SIGINT
    if any(failed):
        print(f"a run failed: its message is at the end of its .txt file in {options.out}")
    if all(failed):
        return 1
    runs = [options.out / f"lr{rate:g}-seed{seed}" for rate, seed in pairs]
    picture = [sys.executable, "-m", "gptjax.plot", *runs, "--group"]
    drawn = subprocess.run([*map(str, picture), "--out", f"{options.out}/sweep.png"])
    return 1 if any(failed) or drawn.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
