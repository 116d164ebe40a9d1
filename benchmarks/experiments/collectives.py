"""Time all-reduce, reduce-scatter and all-gather over the GPUs of one host.

    python benchmarks/experiments/collectives.py --devices 2 4 \\
        --out benchmarks/results/collectives.json

The collectives run inside `jax.shard_map`, as in the training step. An executable has `--calls`
consecutive calls. Each call depends on the call before through one element of its input: between
two calls there is a kernel that copies this element, and nothing else. The input is zero.

Definitions are those of NCCL's tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), for n
devices and a time t of one call:

    bytes S              all-reduce: the array of one device; reduce-scatter: the input of one
                         device; all-gather: the output of one device
    algorithm bandwidth  S/t
    bus bandwidth        S/t · 2(n − 1)/n for all-reduce, S/t · (n − 1)/n for the others

The bus bandwidth is comparable with the bandwidth of a link, for any collective and any n.

For each collective, number of devices and dtype, the script fits t = latency + S/bandwidth. The
fit minimizes the sum of the squared relative errors: with absolute errors the largest sizes alone
would determine it.
"""

import dataclasses
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh, PartitionSpec

from gptjax.bench import results
from gptjax.bench.errors import BenchError
from gptjax.bench.rows import first_line
from gptjax.bench.table import Row, print_table
from gptjax.parallel import AXIS, data_mesh, over_batch
from gptjax.training.compilation import compiler_options

KINDS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all_reduce": lambda x: jax.lax.psum(x, AXIS),
    "reduce_scatter": lambda x: jax.lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True),
    "all_gather": lambda x: jax.lax.all_gather(x, AXIS, axis=0, tiled=True),
}
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
# They change the algorithm of NCCL.
VARIABLES = ("NCCL_NVLS_ENABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS")


@dataclasses.dataclass(frozen=True)
class Options:
    """Time collectives over several devices."""

    devices: tuple[int, ...] = (2, 4)
    """Numbers of devices."""
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    """fp32, bf16."""
    smallest: int = 4**6
    """Bytes of the smallest array; each further array is four times as large."""
    largest: int = 4**15
    """Bytes of the largest array."""
    calls: int = 20
    """Consecutive calls in an executable."""
    rounds: int = 7
    """Timed rounds; the median counts."""
    seconds: float = 0.05
    """Duration of a round."""
    out: Path | None = None
    """JSON file for the results."""


def bus_factor(kind: str, devices: int) -> float:
    """Return bus bandwidth divided by algorithm bandwidth, as NCCL's tests define both."""
    factor = (devices - 1) / devices
    return 2 * factor if kind == "all_reduce" else factor


def chain(kind: str, mesh: Mesh, calls: int) -> Callable[[jax.Array], jax.Array]:
    """Return a function of a sharded array that runs so many consecutive collectives."""

    def on_one_device(x):
        for _ in range(calls):
            # The barrier keeps XLA from reducing or gathering the one element alone.
            y = jax.lax.optimization_barrier(KINDS[kind](x))
            x = jax.lax.dynamic_update_slice(x, y[:1], (0,))
        return x

    spec = PartitionSpec(AXIS)
    return jax.shard_map(on_one_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def launched(kind: str, text: str) -> int:
    """Return the number of collectives of one kind in the text of an executable."""
    return len(re.findall(rf" {kind.replace('_', '-')}(?:-start)?\(", text))


def measure(options: Options, kind: str, devices: int, dtype: str, size: int) -> dict:
    """Return the row of one collective.

    Raises:
        BenchError: XLA removed, added or combined collectives.
    """
    mesh = data_mesh(jax.devices()[:devices])
    sharding = over_batch(mesh, axis=0)
    elements = size // DTYPES[dtype].dtype.itemsize
    # The input of all devices together.
    shape = (elements if kind == "all_gather" else devices * elements,)
    make = jax.jit(lambda: jnp.zeros(shape, DTYPES[dtype]), out_shardings=sharding)
    x = make()
    call = (
        jax.jit(chain(kind, mesh, options.calls), donate_argnums=0)
        .lower(x)
        .compile(compiler_options=compiler_options())
    )
    if (count := launched(kind, call.as_text() or "")) != options.calls:
        raise BenchError(f"{kind}: expected {options.calls} in the executable, found {count}")

    def run(repeats: int) -> float:
        nonlocal x
        jax.block_until_ready(x)
        started = time.perf_counter()
        for _ in range(repeats):
            x = call(x)
        jax.block_until_ready(x)
        return (time.perf_counter() - started) / (repeats * options.calls)

    run(1)  # NCCL connects the devices
    repeats = max(1, round(options.seconds / (options.calls * run(1))))
    times = [run(repeats) for _ in range(options.rounds)]
    seconds = statistics.median(times)
    return {
        "collective": kind,
        "devices": devices,
        "dtype": dtype,
        "bytes": size,
        "seconds": seconds,
        "seconds_lowest": min(times),
        "seconds_highest": max(times),
        "algorithm_bytes_per_s": size / seconds,
        "bus_bytes_per_s": size / seconds * bus_factor(kind, devices),
    }


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> dict:
    """Return the least-squares fit of seconds = latency + bytes/bandwidth, by relative errors.

    Latency and bandwidth are not negative. The bandwidth is None if the times do not increase with
    the bytes.
    """
    t, s = np.asarray(seconds, float), np.asarray(sizes, float)
    (latency, per_byte), *_ = np.linalg.lstsq(np.stack([1 / t, s / t], 1), np.ones_like(t))
    if latency < 0:
        latency, per_byte = 0.0, (s / t).sum() / ((s / t) ** 2).sum()
    elif per_byte <= 0:
        latency, per_byte = (1 / t).sum() / (1 / t**2).sum(), 0.0
    return {
        "latency_s": float(latency),
        "bytes_per_s": float(1 / per_byte) if per_byte else None,
        "largest_error": float(np.abs((latency + s * per_byte) / t - 1).max()),
    }


def fits(rows: Sequence[dict]) -> list[dict]:
    """Return the fit of each collective, number of devices and dtype; `bytes_per_s` is the
    algorithm bandwidth."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["collective"], row["devices"], row["dtype"]), []).append(row)
    found = []
    for (kind, devices, dtype), group in groups.items():
        line = fit([row["bytes"] for row in group], [row["seconds"] for row in group])
        bandwidth = line["bytes_per_s"]
        line["bus_bytes_per_s"] = bandwidth and bandwidth * bus_factor(kind, devices)
        found.append({"collective": kind, "devices": devices, "dtype": dtype} | line)
    return found


def gigabytes(bytes_per_s: float | None) -> str:
    return "none" if bytes_per_s is None else f"{bytes_per_s / 1e9:,.1f}"


def report(options: Options, rows: list[dict]) -> None:
    """Print all rows and fits; write them if asked."""
    device = jax.devices()[0].device_kind
    table = [
        Row(
            f"{row['collective']}, {row['devices']} devices, {row['dtype']}",
            (
                f"{row['bytes']:,}",
                f"{1e6 * row['seconds']:,.1f}",
                gigabytes(row["algorithm_bytes_per_s"]),
                gigabytes(row["bus_bytes_per_s"]),
            ),
        )
        for row in rows
    ]
    print_table(device, ("bytes", "µs", "algorithm GB/s", "bus GB/s"), table)
    lines = fits(rows)
    table = [
        Row(
            f"{line['collective']}, {line['devices']} devices, {line['dtype']}",
            (
                f"{1e6 * line['latency_s']:,.1f}",
                gigabytes(line["bytes_per_s"]),
                gigabytes(line["bus_bytes_per_s"]),
                f"{line['largest_error']:.0%}",
            ),
        )
        for line in lines
    ]
    names = ("latency µs", "algorithm GB/s", "bus GB/s", "largest error")
    print_table("Fit: seconds = latency + bytes/bandwidth", names, table)
    if options.out:
        command = results.script_command("benchmarks/experiments/collectives.py")
        variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        fields = {"environment": variables, "fits": lines}
        results.write(options.out, results.new(command, rows, device=device, **fields))
        print(f"wrote {options.out}")


def sizes(options: Options) -> list[int]:
    """Return the sizes of the arrays in bytes.

    Raises:
        BenchError: the smallest array has less than one element for each device.
    """
    if options.smallest % (4 * max(options.devices)):
        raise BenchError(
            f"--smallest {options.smallest}: expected a multiple of {4 * max(options.devices)}, "
            "an fp32 element for each device"
        )
    found = [options.smallest]
    while 4 * found[-1] <= options.largest:
        found.append(4 * found[-1])
    return found


def main(options: Options) -> None:
    if wrong := [n for n in options.devices if not 2 <= n <= len(jax.devices())]:
        raise BenchError(f"--devices {wrong[0]}: expected 2 to {len(jax.devices())}")
    if unknown := [name for name in options.dtypes if name not in DTYPES]:
        raise BenchError(f"--dtypes {unknown[0]}: expected one of {list(DTYPES)}")
    cases = [
        (kind, devices, dtype, size)
        for devices in options.devices
        for kind in KINDS
        for dtype in options.dtypes
        for size in sizes(options)
    ]
    rows, failures = [], []
    for number, case in enumerate(cases, 1):
        kind, devices, dtype, size = case
        label = f"{kind}, {devices} devices, {dtype}, {size:,} bytes"
        try:
            rows.append(row := measure(options, *case))
            result = f"{1e6 * row['seconds']:,.1f} µs, bus {gigabytes(row['bus_bytes_per_s'])} GB/s"
        except Exception as error:  # a failure must not lose the other rows
            failures.append(f"{label}: {first_line(error)}")
            result = "failed"
        print(f"{number} of {len(cases)}: {label}: {result}", flush=True)
        # A machine may be taken away: the devices measured so far are kept.
        if rows and (number == len(cases) or cases[number][1] != devices):
            report(options, rows)
    if failures:
        raise BenchError("did not run:\n" + "\n".join(failures))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
