"""Time saving and restoring a training state, alone or alternating with another checkout of gptjax.

    python benchmarks/experiments/checkpoint.py --preset gpt2 --compare PATH \\
        --out benchmarks/results/checkpoint_gpt2.json

The state has the shapes of GPT-2 with AdamW and random numbers in every array. Each turn is a
separate process. `blocking` is the time in which training waits, `complete` the time until the
checkpoint is on the disk, `restore` the time until the state is on the device.
"""

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[2]
MEASURED = ("blocking", "complete", "restore")


@dataclasses.dataclass(frozen=True)
class Options:
    """Time saves and restores."""

    preset: str = "gpt2"
    """Size of the model, a name of gptjax.PRESETS."""
    compare: Path | None = None
    """Another checkout of gptjax, measured alternately with this one."""
    turns: int = 3
    """Processes for each checkout."""
    saves: int = 3
    """Saves and restores in each process; the first does not count."""
    folder: Path | None = None
    """Folder for the checkpoints; a temporary one if None."""
    out: Path | None = None
    """JSON file for the results."""
    worker: bool = False
    """Measure in this process and print JSON; the script starts itself so."""


def measure(options: Options) -> list[dict[str, float]]:
    import jax
    import jax.numpy as jnp

    from gptjax import PRESETS, optim
    from gptjax.training.checkpoint import Checkpoints
    from gptjax.training.step import init_state

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.eval_shape(lambda: init_state(PRESETS[options.preset], optim.adamw(1e-3), 0))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract
    )
    key = jax.random.key(0)

    @jax.jit
    def fill(key):
        return jax.tree.map(
            lambda x: (
                jax.random.normal(key, x.shape, x.dtype)
                if x.dtype == jnp.float32
                else jnp.ones(x.shape, x.dtype)
            ),
            abstract,
        )

    state = jax.block_until_ready(fill(key))
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    rows = []
    try:
        checkpoints = Checkpoints(folder, keep_last=1)
        for step in range(1, options.saves + 1):
            began = time.perf_counter()
            checkpoints.save(step, state, {"config": {}})
            row = {"blocking": time.perf_counter() - began}
            checkpoints.wait()
            row["complete"] = time.perf_counter() - began
            began = time.perf_counter()
            back = jax.block_until_ready(checkpoints.restore(step, abstract))
            row["restore"] = time.perf_counter() - began
            del back
            rows.append(row)
        checkpoints.close()
    finally:
        shutil.rmtree(folder)
    return rows[1:]


def turn(options: Options, checkout: Path) -> list[dict[str, float]]:
    paths = os.pathsep.join(
        [str(checkout / "src"), str(checkout), os.environ.get("PYTHONPATH", "")]
    )
    command = [
        sys.executable,
        __file__,
        "--worker",
        "--preset",
        options.preset,
        "--saves",
        str(options.saves),
    ]
    command += ["--folder", str(options.folder)] if options.folder else []
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=checkout,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(options: Options) -> None:
    if options.worker:
        print(json.dumps(measure(options)))
        return
    rows: dict[str, list] = {"this": []} | ({"other": []} if options.compare else {})
    for number in range(options.turns):
        for name in rows:
            rows[name] += turn(options, ROOT if name == "this" else options.compare.absolute())
            print(f"turn {number + 1} of {options.turns}, {name}: {rows[name][-1]}", flush=True)
        report(options, rows)


def report(options: Options, rows: dict[str, list]) -> None:
    """Print the medians and write the results, after each turn: a turn may be interrupted."""
    # Imported here: a worker imports gptjax from the other checkout.
    from gptjax.bench import results
    from gptjax.bench.table import Row, print_table

    medians = {
        name: {m: round(statistics.median(row[m] for row in rows[name]), 3) for m in MEASURED}
        for name in rows
    }
    table = [Row(name, [f"{values[m]:.2f}" for m in MEASURED]) for name, values in medians.items()]
    print_table(f"{options.preset}: seconds", MEASURED, table)
    if options.out:
        import jax

        result = results.new(
            results.script_command("benchmarks/experiments/checkpoint.py"),
            [{"checkout": name} | row for name in rows for row in rows[name]],
            device=jax.devices()[0].device_kind,
            preset=options.preset,
            median_seconds=medians,
        )
        results.write(options.out, result)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
