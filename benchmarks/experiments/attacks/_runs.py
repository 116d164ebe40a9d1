"""Shared parts of the attacks: a small CPU run in a separate folder, and the report."""

import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from gptjax import cli, parallel
from gptjax.bench import results
from gptjax.training.checkpoint import Checkpoints
from gptjax.training.step import init_state

ROOT = Path(__file__).parents[3]
# The tests' runs are shorter: a process is mostly its steps and their checkpoints.
STEPS = int(os.environ.get("ATTACK_STEPS", "300"))
CONFIG = f"""
from gptjax.config import Config, OptimizerConfig
from gptjax.models.gpt2 import GPT2Config

config = Config(
    device="cpu",
    model=GPT2Config(
        vocab_size=257, padded_vocab_size=384, block_size=32, n_layer=2, n_head=2, n_embd=64
    ),
    optimizer=OptimizerConfig(
        learning_rate=3e-3, warmup_steps=20, skip_loss_z=3.0, skip_grad_norm_z=3.0
    ),
    dataset="stdlib",
    tokenizer="byte",
    sequence_length=32,
    batch_tokens=512,
    micro_batch=4,
    max_steps={STEPS},
    val_every=50,
    val_tokens=1024,
    sample_every=0,
    checkpoint_every=15,
)
"""
# The speedrun's model with NorMuon: tied until two thirds, other windows and batches in each stage.
STAGED = f"""
from gptjax.config import Config, Stage
from gptjax.models.speedrun import SpeedrunConfig
from gptjax.models.speedrun import Stage as ModelStage
from gptjax.optim import NorMuonConfig

first = ModelStage(
    4, 9, (9,), (1.0, 0.5), tied=True, final_token_weights=(1.0, 0.0), steps=(0, {STEPS // 3})
)
second = ModelStage(8, 17, (9, 17), tied=True)
config = Config(
    device="cpu",
    model=SpeedrunConfig(
        vocab_size=257, padded_vocab_size=384, block_size=64, n_layer=3, n_head=2, n_embd=16,
        n_inner=64, bigram_rows=101, paired_layers=(0,), long_layers=(2,), value_layers=(2,),
        skip=(0, 1), lanes_from=2,
    ),
    optimizer=NorMuonConfig(
        learning_rate=0.008, matrix_learning_rate=0.023, warmup_steps=0, adam_every=2,
        cautious_decay=True, decay_form="lr_squared", clip_norm=None,
    ),
    stages=(
        Stage(until={STEPS // 3}, model={{"stage": first}}),
        Stage(until={2 * STEPS // 3}, sequence_length=64, micro_batch=2, model={{"stage": second}}),
        Stage(batch_tokens=256, model={{"stage": second._replace(tied=False)}}),
    ),
    dataset="stdlib",
    tokenizer="byte",
    sequence_length=32,
    batch_tokens=128,
    micro_batch=4,
    max_steps={STEPS},
    val_every=50,
    val_tokens=1024,
    sample_every=0,
    checkpoint_every=15,
)
"""
# Seconds from the start of a process to its log, compilation included.
LONGEST_START = 300.0
FAILURES = ("silent wrong", "hang", "lost", "traceback", "crash")


def prepare(folder: Path, config: str = CONFIG) -> float:
    """Write the config, prepare the corpus, fill the compilation cache, and train the run `alone`.

    Returns:
        Seconds from that run's first log line to its end.
    """
    prepare_data(folder, config)
    return finish(folder, "alone")


def prepare_data(folder: Path, config: str = CONFIG) -> None:
    """Write the config, prepare the corpus, and fill the compilation cache of one process."""
    (folder / "config.py").write_text(config)
    finish(folder, "first", "--max-steps", "15")


def start(
    folder: Path, name: str, *options: str, runs: Path | None = None, gpu: int | None = None
) -> subprocess.Popen:
    """Start a run in the background; its output goes to NAME.txt in the folder.

    Args:
        gpu: index of the only GPU that the process sees.
    """
    arguments = [
        "--config",
        folder / "config.py",
        "--runs-dir",
        runs or folder / "runs",
        "--data-dir",
        folder / "data",
    ]
    arguments += [
        "--compilation-cache",
        folder / "cache",
        "--name",
        name,
        "--optimizer.schedule-steps",
        STEPS,
        *options,
    ]
    log = (folder / f"{name}.txt").open("ab")
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)})
    return subprocess.Popen(
        [sys.executable, ROOT / "train.py", *map(str, arguments)],
        stdout=log,
        stderr=log,
        env=environment,
    )


def wait_for_log(
    folder: Path,
    name: str,
    runs: Path | None = None,
    processes: Sequence[subprocess.Popen] = (),
) -> float:
    """Return the time at which the run began to write its log, just before its first step.

    Args:
        processes: those of the run. If one of them fails first, this script ends.
    """
    end = time.monotonic() + LONGEST_START
    while not ((runs or folder / "runs") / name / "log.jsonl").exists():
        failed = any(process.poll() for process in processes)
        if failed or time.monotonic() > end:
            shown = {path.name: path.read_text()[-2000:] for path in folder.glob(f"{name}*.txt")}
            output = "\n".join(f"{file}:\n{text}" for file, text in sorted(shown.items()))
            raise SystemExit(f"{name} wrote no log:\n{output}")
        time.sleep(0.005)
    return time.monotonic()


def finish(folder: Path, name: str, *options: str, runs: Path | None = None) -> float:
    """Run to the end; return the seconds from the log's first line on."""
    process = start(folder, name, *options, runs=runs)
    began = wait_for_log(folder, name, runs, [process])
    if code := process.wait():
        raise SystemExit(
            f"{name} ended with code {code}:\n{(folder / f'{name}.txt').read_text()[-2000:]}"
        )
    return time.monotonic() - began


def abstract_state(folder: Path):
    """The state's shapes, on one CPU device."""
    config = cli.load(folder / "config.py")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tx = config.build_optimizer(parallel.data_mesh(jax.devices()[:1]))
    state = jax.eval_shape(lambda: init_state(config.model, tx, 0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)


def arrays_and_losses(
    folder: Path, name: str, runs: Path | None = None
) -> tuple[list[np.ndarray], dict]:
    """The arrays of the last step's checkpoint, and every logged loss and gradient norm."""
    run = (runs or folder / "runs") / name
    checkpoints = Checkpoints(run / "checkpoints", keep_last=2)
    leaves = [
        np.asarray(x) for x in jax.tree.leaves(checkpoints.restore(STEPS, abstract_state(folder)))
    ]
    checkpoints.close()
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = {
        (r["kind"], r["step"]): (r["loss"], r.get("grad_norm"))
        for r in rows
        if r["kind"] in ("train", "val")
    }
    return leaves, losses


def same(a: tuple[list[np.ndarray], dict], b: tuple[list[np.ndarray], dict]) -> bool:
    """Whether two results of `arrays_and_losses` are equal bit for bit."""
    return a[1] == b[1] and all(np.array_equal(x, y) for x, y in zip(a[0], b[0], strict=True))


def progress(trials: Iterable[dict], total: int) -> Iterator[dict]:
    """Yield the trials; print their number at each tenth of the total."""
    for number, row in enumerate(trials, start=1):
        if number % max(1, total // 10) == 0:
            print(f"{number} of {total}", file=sys.stderr, flush=True)
        yield row


def report(
    script: str,
    rows: Sequence[dict],
    out: Path | None,
    failures: Collection[str] = FAILURES,
    by: str | None = None,
    device: str | None = None,
) -> None:
    """Print the number of rows with each outcome, write the result, exit with 1 after a failure.

    Args:
        script: name of the file in this folder.
        failures: outcomes that are failures.
        by: for thousands of rows: the result has a row for each value of this field, with the
            counts of its outcomes, and all rows of failures.
        device: of the result; None for this machine's CPU.
    """
    counts = dict(Counter(row["outcome"] for row in rows).most_common())
    print(", ".join(f"{outcome}: {count}" for outcome, count in counts.items()))
    failed = [
        {"trial": number} | row for number, row in enumerate(rows) if row["outcome"] in failures
    ]
    fields = {"counts": counts}
    if by:
        for row in failed[:10]:
            print(json.dumps(row))
        fields["failures"] = failed
        outcomes = defaultdict(Counter)
        for row in rows:
            outcomes[row[by]][row["outcome"]] += 1
        rows = [{by: value, "outcomes": outcomes[value]} for value in sorted(outcomes)]
    if out:
        result = results.new(
            results.script_command(f"benchmarks/experiments/attacks/{script}"),
            rows,
            device=device or f"CPU, {os.cpu_count()} cores, {platform.machine()}",
            **fields,
        )
        results.write(out, result)
    raise SystemExit(bool(failed))
