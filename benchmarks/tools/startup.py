"""Measure the start of train.py until its first step, cold and warm, in checkouts of gptjax.

git worktree add ../before 6c032b1
python benchmarks/tools/startup.py --trees ../before . --gpus 3

In each case every checkout starts once cold, with an empty cache of JAX, then warm. The checkouts
start in turns; a process is killed when it prints the line `first step`. The parts of a start are
train.py's own, from log.jsonl; `loss` is the first step's. Several GPUs run different cases at the
same time.

A machine's first start also reads the packages from the disk: run train.py once before.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gptjax.bench import results

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    "bf16": "configs/gpt2_124m.py",
    "fp8": "configs/gpt2_124m.py --model.precision fp8",
    "llama_1b": "configs/llama_1b.py --micro-batch 16 --batch-tokens 16384 --val-every 0",
}


def start(tree: Path, options: str, cache: Path, gpu: int) -> dict:
    """Start train.py in a checkout, end it after its first step, and return a row's figures."""
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": str(gpu)}
    env["PYTHONPATH"] = os.pathsep.join([str(tree / "src"), *filter(None, [env.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as runs:
        where = ["--runs-dir", runs, "--name", "startup", "--max-steps", "2", "--sample-every", "0"]
        command = [sys.executable, "train.py", "--config", *options.split(), *where]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        began, lines = time.perf_counter(), [""]
        with subprocess.Popen(command, cwd=tree, env=env, **pipe) as process:
            limit = threading.Timer(120, process.kill)
            limit.start()
            while not lines[-1].startswith("first step") and (line := process.stdout.readline()):
                lines.append(line)
            total = time.perf_counter() - began
            limit.cancel()
            process.kill()
        if not lines[-1].startswith("first step"):
            return {"error": "".join(lines[-9:])}
        log = (Path(runs) / "startup" / "log.jsonl").read_text().splitlines()
    rows = {row.get("event", row["kind"]): row for row in map(json.loads, reversed(log))}
    facts, first = rows["start"], rows["first step"]
    return {
        **{name: facts[name] for name in ("device", "commit")},
        **{"total": total, "parts": first["seconds"]},
        **{name: first[name] for name in ("cache_hits", "cache_misses")},
        "loss": rows["train"]["loss"],
    }


def main() -> int:
    how = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**how)
    parser.add_argument("--trees", type=Path, nargs="+", default=[ROOT], help="checkouts")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--warm", type=int, default=2, help="warm starts of each (default: 2)")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that run cases (default: 1)")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    o = parser.parse_args()

    def lane(gpu: int) -> list[dict]:
        rows = []
        with tempfile.TemporaryDirectory() as caches:
            turns = itertools.product(o.cases[gpu :: o.gpus], range(1 + o.warm), enumerate(o.trees))
            for case, turn, (number, tree) in turns:
                row = {"case": case, "tree": str(tree), "start": "warm" if turn else "cold"}
                cache = Path(caches, case, str(number))
                rows.append(row | start(tree.resolve(), CASES[case], cache, gpu))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        return rows

    with ThreadPoolExecutor() as threads:
        rows = [row for rows in threads.map(lane, range(o.gpus)) for row in rows]
    if o.out:
        command = results.command("benchmarks/tools/startup.py")
        facts = {"device": next((row["device"] for row in rows if "device" in row), "none")}
        facts["packages"] = ("jax-triton", "triton")
        results.write(o.out, results.new(command, rows, **facts))
    for row in rows:
        seconds = {"total": row.get("total"), **row.get("parts", {})}
        parts = row.get("error") or ", ".join(f"{part} {x:.1f}" for part, x in seconds.items())
        print(f"{row['case']:8} {row['tree']} {row['start']}: {parts}")
    return any("error" in row for row in rows)


if __name__ == "__main__":
    sys.exit(main())
