"""Runs of a small model on 1, 2, 4 and 8 devices, for test_parallel.py.

`python parallel_runs.py FOLDER` writes the results to FOLDER/results.json. It needs 8 devices; the
tests' own process has 2.
"""

import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from saved_run_tools import restored

from gptjax import parallel
from gptjax.models.base import graph
from gptjax.models.gpt2 import GPT2Config
from gptjax.optim import NorMuonConfig, OptimizerConfig
from gptjax.parallel import Parallel, Strategy, over_batch
from gptjax.training.checkpoint import Checkpoints
from gptjax.training.step import init_state, make_train_step

STEPS, RATE, SEQUENCES = 10, 1e-2, 16
# Shards the embeddings and the kernels; biases and norms are replicated. wpe is sharded along
# another axis on 8 devices than on 2 and 4.
SMALLEST_SHARDED = 200
CONFIG = GPT2Config(
    vocab_size=29, padded_vocab_size=40, block_size=20, n_layer=2, n_head=2, n_embd=16
)
OPTIMIZERS = {
    "adamw": OptimizerConfig(learning_rate=RATE, warmup_steps=1),
    # Orthogonalization amplifies rounding errors by the inverse of the smallest singular value.
    "normuon": NorMuonConfig(learning_rate=RATE, matrix_learning_rate=5e-4, warmup_steps=1),
}
# Most of the parameters are in the blocks.
LARGE = dataclasses.replace(CONFIG, n_layer=2, n_embd=64)
# A minute of compilation at XLA's defaults. The other scheduler starts all gathers at once.
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_cpu_enable_concurrency_optimized_scheduler=false"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """What an executable depends on."""

    devices: int
    strategy: Strategy
    optimizer: str = "adamw"
    micro_batches: int = 2
    recompute: str = "none"

    def __str__(self) -> str:
        return " ".join(str(value) for value in dataclasses.astuple(self))


# Each strategy, and each option of the step, on few and many devices.
ADAMW = [
    Case(1, "data"),
    Case(2, "data", micro_batches=1),
    Case(8, "zero1"),
    Case(2, "fsdp", recompute="sublayer"),
    Case(8, "fsdp", micro_batches=1, recompute="block"),
]
CASES = [*ADAMW, Case(1, "data", "normuon"), Case(4, "fsdp", "normuon")]
# The second of a pair restores the checkpoint of the first.
RESUMED = [*itertools.pairwise(ADAMW), (ADAMW[-1], ADAMW[0])]
LARGE_CASES = [Case(4, "zero1"), Case(4, "fsdp")]


class Run:
    """The training step of a case."""

    def __init__(self, case: Case, config: GPT2Config = CONFIG):
        self.config = dataclasses.replace(config, recompute=case.recompute)
        self.parallel = Parallel.of(jax.devices()[: case.devices], case.strategy)
        self.micro_batches = case.micro_batches
        self.tx = OPTIMIZERS[case.optimizer].build(
            total_steps=STEPS, groups=self.config.parameter_groups(), mesh=self.parallel.mesh
        )
        self.abstract_state = self.parallel.with_shardings(
            jax.eval_shape(lambda: init_state(self.config, self.tx, 0))
        )
        self.shardings = self.parallel.shardings(self.abstract_state)
        step = make_train_step(graph(self.config), self.tx, parallel=self.parallel)
        self.step = jax.jit(step, out_shardings=(self.shardings, self.parallel.replicated))

    def first_state(self) -> Any:
        return jax.device_put(init_state(self.config, self.tx, 0), self.shardings)

    def windows(self, step: int) -> jax.Array:
        """Return the same tokens for each number of devices and of micro-batches."""
        shape = (self.micro_batches, SEQUENCES // self.micro_batches, CONFIG.block_size + 1)
        tokens = np.random.default_rng(step).zipf(1.5, shape).clip(max=CONFIG.vocab_size) - 1
        return jax.device_put(tokens.astype(np.int32), over_batch(self.parallel.mesh, axis=1))

    def steps(self, state: Any, first: int, last: int) -> tuple[Any, dict[str, list[float]]]:
        """Return the state after the steps in [first, last), and their metrics."""
        result: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        for step in range(first, last):
            state, metrics = self.step(state, self.windows(step))
            for name, values in result.items():
                values.append(float(metrics[name]))
        return state, result


def bytes_of(leaves: list[jax.Array]) -> int:
    """Return the bytes of arrays on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


def is_copied(leaf: jax.Array) -> bool:
    """Return whether every device has a copy."""
    return leaf.sharding.is_fully_replicated


def different_copies(leaves: list[jax.Array]) -> int:
    """Return the number of replicated arrays that differ between two devices."""
    return sum(
        len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) > 1
        for leaf in filter(is_copied, leaves)
    )


def main(folder: Path) -> None:
    """Write the results of all cases, of resuming with each pair of layouts, and the memory."""
    parallel.SMALLEST_SHARDED = SMALLEST_SHARDED
    results: dict[str, Any] = {"runs": {}, "resumed": {}, "memory": {}}
    runs = {}
    for case in CASES:
        run = Run(case)
        state, metrics = run.steps(run.first_state(), 0, STEPS // 2)
        if case in ADAMW:
            runs[case], checkpoints = run, Checkpoints(folder / str(case))
            checkpoints.save(STEPS // 2, state, {})
            checkpoints.close()
        state, later = run.steps(state, STEPS // 2, STEPS)
        leaves = jax.tree.leaves(state)
        results["runs"][str(case)] = {
            **{name: metrics[name] + later[name] for name in metrics},
            "bytes": bytes_of(leaves),
            "copied": bytes_of(list(filter(is_copied, leaves))),
            "different_copies": different_copies(leaves),
        }
    for before, after in RESUMED:
        run = runs[after]
        state = restored(folder / str(before), STEPS // 2, run.abstract_state)
        metrics = run.steps(state, STEPS // 2, STEPS)[1]
        results["resumed"][f"{before} → {after}"] = metrics["loss"]
    for case in LARGE_CASES:
        run = Run(case, LARGE)
        compiled = run.step.lower(run.abstract_state, run.windows(0)).compile()
        memory, hlo = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None and hlo is not None
        results["memory"][str(case)] = {
            "temporary": memory.temp_size_in_bytes,
            "gathers": gathers_by_computation(hlo),
        }
    (folder / "results.json").write_text(json.dumps(results))


def gathers_by_computation(hlo: str) -> list[int]:
    """Return the number of all-gathers of kernels in each computation of an executable."""
    # An instruction is indented, a computation is not; the optimizer gathers vectors only.
    computations = re.split(r"\n(?=\S)", hlo)
    counts = [len(re.findall(r"= f32\[\d+,\d+\]\S* all-gather\(", text)) for text in computations]
    return [count for count in counts if count]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
