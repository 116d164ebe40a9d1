"""Predict the training step on 2 to 512 GPUs from one GPU's time and the rates of collectives.

    python benchmarks/experiments/scaling.py --out benchmarks/results/scaling.json \\
        --picture docs/images/scaling.png

No GPU is needed. For a model of L blocks on n GPUs:

    step    = compute + exposed
    compute = one GPU's step − optimizer · (sharded share of the parameters) · (1 − 1/n)
    exposed = start + max(0, forward − forward window) + max(0, backward − backward window) + end

The optimizer's time is that of 32 bytes a parameter at the copy rate. The other terms of `exposed`
are times of collectives, by the phase of the step in which they run:

    start     all-gathers of wte, wpe and the first block: the forward pass needs them to begin
    forward   all-gathers of the other blocks, overlapped with the forward pass
    backward  reductions of all gradients but those of `end`, and fsdp's second all-gathers,
              overlapped with the backward pass
    end       reductions of wte, wpe and the first block: these gradients are complete only at the
              end of the backward pass

One collective is counted for each block, kind and dtype. Collectives run one after the other. The
windows are the parts of the passes in which a collective has something to overlap with: (L − 1)/L
of the blocks' time, which is one third forward and two thirds backward. The head is not part of
them, because the first gradient of a block follows it.

Up to 8 GPUs are in one host. More of them communicate hierarchically: all-reduce is a
reduce-scatter in each host, an all-reduce of an eighth between hosts, and an all-gather in each
host. Reduce-scatter and all-gather consist of the same first or last two stages. A stage takes

    latency + bytes · factor / bus bandwidth

with the factor of NCCL's tests, 2(n − 1)/n or (n − 1)/n. Between hosts the latency is multiplied by
log2(hosts), and once more by two for all-reduce.

With --collectives, the constants inside a host are the fits of a result of collectives.py; for more
GPUs than it measured, the latency and the bus bandwidth of its largest number. Without it they are
assumptions, like those of the network always are.

Computation on several GPUs takes longer than on one: the slowest GPU determines the step, and
gradients are copied for the collectives. With --collectives, the slowdown is that of a measured
step of two GPUs without overlap, minus its collectives; without it, none.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import tyro
from _scaling_report import draw, print_steps
from collectives import KINDS, bus_factor

from gptjax.bench import results
from gptjax.bench.errors import BenchError
from gptjax.models.base import ModelConfig, read_dtypes
from gptjax.models.gpt2 import PRESETS
from gptjax.parallel import shard_axis
from gptjax.precision import Precision

STEPS = Path(__file__).parents[1] / "results" / "step"
COPY_RATE = Path(__file__).parents[1] / "results" / "kernels" / "norm.json"
# Rows of one GPU, and of two GPUs without overlap.
WITHOUT_OVERLAP = "devices_bf16_64_overlap.json"
PER_HOST = 8
DEVICES = (2, 4, 8, 64, 512)
STRATEGIES = ("data", "zero1", "fsdp")
BYTES = {"fp32": 4, "bf16": 2}
PHASES = ("start", "forward", "backward", "end")
SEQUENCE_LENGTH = 1024
# AdamW reads the parameter, its gradient and both moments, writes all but the gradient; the norm
# reads the gradient once more. All are fp32.
OPTIMIZER_BYTES = 8 * 4
# Tokens a step of the GPT-3 model of this size (Brown et al., 2020, table 2.1).
BATCH_TOKENS = {"gpt2": 2**19, "gpt2-xl": 2**20}
LARGEST_EXPOSED, SMALLEST_SHARDED, MOST_DEVICES = 0.2, 0.9, 4096


@dataclasses.dataclass(frozen=True)
class Options:
    """Predict the training step on several GPUs."""

    collectives: Path | None = None
    """Result of collectives.py; None for the assumptions below."""
    nvlink_gb_per_s: float = 370
    """Assumed bus bandwidth of every collective in a host, without --collectives."""
    nvlink_latency_us: float = 15
    """Assumed latency of every collective in a host, without --collectives."""
    network_gb_per_s: float = 45
    """Assumed bus bandwidth of every collective between hosts: 90 % of 400 Gb/s for each GPU."""
    network_latency_us: float = 15
    """Assumed latency of a collective between two hosts."""
    out: Path | None = None
    """JSON file for the results."""
    picture: Path | None = None
    """PNG file for the picture."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a batch on each GPU, with the results of `bench step` that have its time.

    Two results are interpolated linearly in the batch.
    """

    preset: str
    batch: int
    results: tuple[str, ...]


CASES = (
    Case("gpt2", 64, ("devices_bf16_64.json",)),
    Case("gpt2", 4, ("devices_bf16_4.json",)),
    Case(
        "gpt2-xl",
        32,
        (
            *("gpt2_xl_24.json", "gpt2_xl_36.json"),
            *("devices_gpt2_xl_32_zero1_torch.json", "devices_gpt2_xl_32_fsdp.json"),
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class Constants:
    """Latency in seconds and bus bandwidth in bytes/s of a collective."""

    latency: float
    bandwidth: float

    def seconds(self, kind: str, size: float, devices: int, hops: int = 1) -> float:
        """Return the time of one stage; the latency is counted once for each hop."""
        return self.latency * hops + size * bus_factor(kind, devices) / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Constants of the collectives in a host, by kind, dtype and number of devices, and of the
    network.

    Attributes:
        slowdown: time of the computation on several GPUs divided by that on one, minus 1.
    """

    in_host: dict[tuple[str, str, int], Constants]
    network: Constants
    slowdown: float = 0.0

    def seconds(self, kind: str, dtype: str, size: float, devices: int) -> float:
        """Return the time of a collective; `size` is in bytes as in NCCL's tests."""
        if devices == 1:
            return 0.0
        if devices <= PER_HOST:
            return self._local(kind, dtype, size, devices)
        hosts = devices // PER_HOST
        hops = math.ceil(math.log2(hosts)) * (2 if kind == "all_reduce" else 1)
        seconds = self.network.seconds(kind, size / PER_HOST, hosts, hops)
        if kind != "all_gather":
            seconds += self._local("reduce_scatter", dtype, size, PER_HOST)
        if kind != "reduce_scatter":
            seconds += self._local("all_gather", dtype, size, PER_HOST)
        return seconds

    def _local(self, kind: str, dtype: str, size: float, devices: int) -> float:
        measured = [n for k, d, n in self.in_host if (k, d) == (kind, dtype)]
        nearest = max((n for n in measured if n <= devices), default=min(measured))
        return self.in_host[kind, dtype, nearest].seconds(kind, size, devices)


def cluster(options: Options) -> Cluster:
    """Return the constants: measured ones with --collectives.

    Raises:
        BenchError: the result of collectives.py lacks a collective, or has no bandwidth for it.
    """
    network = Constants(1e-6 * options.network_latency_us, 1e9 * options.network_gb_per_s)
    kinds = list(itertools.product(KINDS, BYTES))
    if options.collectives is None:
        nvlink = Constants(1e-6 * options.nvlink_latency_us, 1e9 * options.nvlink_gb_per_s)
        return Cluster({(*kind, 2): nvlink for kind in kinds}, network)
    fits = [
        fit for fit in results.read(options.collectives).get("fits", []) if fit["bus_bytes_per_s"]
    ]
    in_host = {
        (fit["collective"], fit["dtype"], fit["devices"]): Constants(
            fit["latency_s"], fit["bus_bytes_per_s"]
        )
        for fit in fits
    }
    if missing := [kind for kind in kinds if kind not in {key[:2] for key in in_host}]:
        raise BenchError(f"{options.collectives}: no bandwidth of {' in '.join(missing[0])}")
    return Cluster(in_host, network, measured_slowdown(Cluster(in_host, network)))


def measured_slowdown(links: Cluster) -> float:
    """Return the slowdown of `WITHOUT_OVERLAP`, in which all collectives are exposed."""
    rows = [row for row in measured_rows(WITHOUT_OVERLAP) if row.get("reduce_dtype") != "bf16"]
    [one] = [row for row in rows if row["devices"] == 1]
    [two] = [row for row in rows if not row.get("overlap_reduce", True)]
    params = arrays(dataclasses.replace(PRESETS[one["model"]], precision=Precision("bf16")))
    sums = traffic(params, two["parallel"], two["devices"], two["reduce_dtype"])
    communication = sum(
        links.seconds(kind, dtype, size, two["devices"])
        for (_, kind, dtype, _), size in sums.items()
    )
    return (two["ms"] - 1e3 * communication) / one["ms"] - 1


@dataclasses.dataclass(frozen=True)
class Array:
    """A parameter: its block (None outside the blocks), and the dtype in which it is gathered."""

    name: str
    block: int | None
    shape: tuple[int, ...]
    gather_dtype: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@functools.cache
def arrays(config: ModelConfig) -> list[Array]:
    """Return the parameters of a model."""
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(read_dtypes(config)):
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        block = int(keys[1]) if keys[0] == "blocks" else None
        dtype = {4: "fp32", 2: "bf16"}[x.dtype.itemsize]
        found.append(Array(".".join(map(str, keys)), block, x.shape, dtype))
    return found


def is_sharded(array: Array, strategy: str, devices: int) -> bool:
    return strategy != "data" and shard_axis(array.shape, devices) is not None


def traffic(
    params: Sequence[Array], strategy: str, devices: int, reduce_dtype: str
) -> dict[tuple[str, str, str, int | None], int]:
    """Return the bytes of each collective of a step.

    Returns:
        (phase, kind, dtype, block) → bytes. The block is None for all parameters outside blocks.
    """
    found = collections.Counter()
    for array in params:
        first = array.block == 0 or array.name in ("wte", "wpe")
        sharded = is_sharded(array, strategy, devices)
        phase, kind = "end" if first else "backward", "reduce_scatter" if sharded else "all_reduce"
        found[phase, kind, reduce_dtype, array.block] += array.elements * BYTES[reduce_dtype]
        if sharded:
            size = array.elements * BYTES[array.gather_dtype]
            phases = ["start" if first else "forward"]
            phases += ["backward"] * (strategy == "fsdp" and array.block is not None)
            for phase in phases:
                found[phase, "all_gather", array.gather_dtype, array.block] += size
    return dict(found) if devices > 1 else {}


def windows(config: ModelConfig, one_gpu: float, optimizer: float) -> dict[str, float]:
    """Return the seconds of each phase in which collectives overlap with computation."""
    head = 6 * config.n_embd * config.vocab_size / config.flops_per_token(SEQUENCE_LENGTH)
    blocks = (one_gpu - optimizer) * (1 - head) * (config.n_layer - 1) / config.n_layer
    return {"start": 0.0, "forward": blocks / 3, "backward": blocks * 2 / 3, "end": 0.0}


def predict(
    config: ModelConfig,
    one_gpu: float,
    optimizer: float,
    links: Cluster,
    *,
    devices: int,
    strategy: str,
    reduce_dtype: str = "fp32",
) -> dict:
    """Return the predicted step.

    Args:
        one_gpu: seconds of the step on one GPU.
        optimizer: seconds of the optimizer in it.
    """
    params = arrays(config)
    total = sum(array.elements for array in params)
    shards = sum(array.elements for array in params if is_sharded(array, strategy, devices))
    seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    collected: dict[tuple, dict] = {}
    for (phase, kind, dtype, _), size in traffic(params, strategy, devices, reduce_dtype).items():
        taken = links.seconds(kind, dtype, size, devices)
        seconds[phase] += taken
        row = collected.setdefault(
            (phase, kind, dtype),
            {"phase": phase, "collective": kind, "dtype": dtype, "calls": 0, "bytes": 0, "ms": 0.0},
        )
        row["calls"] += 1
        row["bytes"] += size
        row["ms"] += 1e3 * taken
    slower = 1 + links.slowdown * (devices > 1)
    hidden = windows(config, one_gpu * slower, optimizer * slower)
    exposed = sum(max(0.0, seconds[phase] - hidden[phase]) for phase in PHASES)
    compute = slower * (one_gpu - optimizer * shards / total * (1 - 1 / devices))
    communication = sum(seconds.values())
    return {
        "devices": devices,
        "strategy": strategy,
        "reduce_dtype": reduce_dtype,
        "sharded_share": shards / total,
        "compute_ms": 1e3 * compute,
        "communication_ms": 1e3 * communication,
        "may_overlap_ms": 1e3 * (seconds["forward"] + seconds["backward"]),
        "forward_window_ms": 1e3 * hidden["forward"],
        "backward_window_ms": 1e3 * hidden["backward"],
        "exposed_ms": 1e3 * exposed,
        "step_ms": 1e3 * (compute + exposed),
        "step_without_overlap_ms": 1e3 * (compute + communication),
        "exposed_share": exposed / (compute + exposed),
        "scaling": one_gpu / (compute + exposed),
        "collectives": list(collected.values()),
    }


def optimizer_seconds(config: ModelConfig) -> float:
    """Return AdamW's time on one GPU: its bytes at the measured copy rate."""
    rate = results.read(COPY_RATE)["ceilings"]["bytes_per_s"]
    return OPTIMIZER_BYTES * config.num_allocated_params / rate


def measured_rows(name: str) -> list[dict]:
    """Return the rows of gptjax of a result of `bench step`, without failures."""
    rows = results.read_times(STEPS / name)["rows"]
    return [row for row in rows if row["system"] == "gptjax" and "ms" in row]


def one_gpu_seconds(case: Case) -> float:
    """Return the measured step on one GPU, interpolated linearly between two batches."""
    points = {
        row["batch"]: 1e-3 * row["ms"]
        for name in case.results
        for row in measured_rows(name)
        if row.get("devices", 1) == 1
    }
    if case.batch in points:
        return points[case.batch]
    smaller, larger = min(points), max(points)
    slope = (points[larger] - points[smaller]) / (larger - smaller)
    return points[smaller] + slope * (case.batch - smaller)


def compare(case: Case, config: ModelConfig, links: Cluster) -> list[dict]:
    """Return the measured steps of several GPUs and the predictions for them."""
    rows = []
    for name in case.results:
        for row in measured_rows(name):
            if row.get("devices", 1) == 1 or row["batch"] != case.batch:
                continue
            step = predict(
                config,
                one_gpu_seconds(case),
                optimizer_seconds(config),
                links,
                devices=row["devices"],
                strategy=row["parallel"],
                reduce_dtype=row["reduce_dtype"],
            )
            rows.append(
                {
                    "result": name,
                    "model": case.preset,
                    "batch": row["batch"],
                    "devices": row["devices"],
                    "strategy": row["parallel"],
                    "reduce_dtype": row["reduce_dtype"],
                    "one_gpu_ms": 1e3 * one_gpu_seconds(case),
                    "measured_ms": row["ms"],
                    "predicted_ms": step["step_ms"],
                    "predicted_without_overlap_ms": step["step_without_overlap_ms"],
                    "error": step["step_ms"] / row["ms"] - 1,
                }
            )
    return rows


def limits(case: Case, config: ModelConfig, links: Cluster, strategy: str) -> dict:
    """Return the largest numbers of GPUs, powers of two, within each limit of the design."""
    within = {"global_batch": 1, "exposed": 1, "sharded": 1}
    counts = [2**power for power in range(1, int(math.log2(MOST_DEVICES)) + 1)]
    reached = set()
    one_gpu, optimizer = one_gpu_seconds(case), optimizer_seconds(config)
    for devices in counts:
        step = predict(config, one_gpu, optimizer, links, devices=devices, strategy=strategy)
        tokens = case.batch * SEQUENCE_LENGTH * devices
        holds = {
            "global_batch": tokens <= BATCH_TOKENS[case.preset],
            "exposed": step["exposed_share"] <= LARGEST_EXPOSED,
            "sharded": strategy == "data" or step["sharded_share"] >= SMALLEST_SHARDED,
        }
        reached |= {name for name in holds if not holds[name]}
        within |= dict.fromkeys(holds.keys() - reached, devices)
    if strategy == "data":
        del within["sharded"]
    return {"model": case.preset, "batch": case.batch, "strategy": strategy} | within


def assumptions(options: Options) -> dict:
    """Return every constant that is not measured."""
    found = {
        "network_bytes_per_s": 1e9 * options.network_gb_per_s,
        "network_latency_s": 1e-6 * options.network_latency_us,
    }
    if options.collectives is None:
        found["nvlink_bus_bytes_per_s"] = 1e9 * options.nvlink_gb_per_s
        found["nvlink_latency_s"] = 1e-6 * options.nvlink_latency_us
    return found


def predictions(options: Options) -> dict:
    """Return the result: rows, comparisons with measurements, limits and assumptions."""
    links, rows, compared, limited = cluster(options), [], [], []
    for case in CASES:
        config = dataclasses.replace(PRESETS[case.preset], precision=Precision("bf16"))
        one_gpu, optimizer = one_gpu_seconds(case), optimizer_seconds(config)
        rows += [
            {
                "model": case.preset,
                "batch": case.batch,
                "one_gpu_ms": 1e3 * one_gpu,
                "optimizer_ms": 1e3 * optimizer,
                "global_batch_tokens": case.batch * SEQUENCE_LENGTH * devices,
                **predict(
                    config,
                    one_gpu,
                    optimizer,
                    links,
                    devices=devices,
                    strategy=strategy,
                    reduce_dtype=dtype,
                ),
            }
            for strategy in STRATEGIES
            for devices in DEVICES
            for dtype in BYTES
        ]
        compared += compare(case, config, links)
        limited += [limits(case, config, links, strategy) for strategy in STRATEGIES]
    sources = [name for case in CASES for name in case.results]
    device = results.read_times(STEPS / sources[0])["device"]
    return results.new(
        results.script_command("benchmarks/experiments/scaling.py"),
        rows,
        device=device,
        kind="prediction",
        sources=sources,
        collectives=None if options.collectives is None else options.collectives.name,
        assumptions=assumptions(options),
        slowdown=links.slowdown,
        most_devices=MOST_DEVICES,
        compared=compared,
        limits=limited,
    )


def main(options: Options) -> None:
    result = predictions(options)
    print_steps(result)
    if options.out:
        results.write(options.out, result)
        print(f"wrote {options.out}")
    if options.picture:
        draw(result, options.picture)
        print(f"wrote {options.picture}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
