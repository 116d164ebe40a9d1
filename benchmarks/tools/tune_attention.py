"""Search for faster tiles of flash attention's Triton kernels on this GPU, one parameter at a time.

    python benchmarks/tools/tune_attention.py --kernel forward --shape 64 1024 12 64 --write

The search starts from the current tiles, tries every other value of each parameter, continues from
the best, and ends when no single change helps. Tiles that exceed shared memory or registers by an
estimate are not compiled. Tiles with a wrong result are reported and not used. `--write` stores the
best in pallas_kernels/attention/triton_tiles.json, which the kernels read.
"""

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from gptjax.bench import results
from gptjax.bench.harness import Case, seconds
from gptjax.bench.results import Row, print_table
from pallas_kernels import attention, extend

FOLDER = Path(__file__).parents[2] / "pallas_kernels" / "attention"
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Options:
    """Search for faster tiles of flash attention's Triton kernels on this GPU."""

    kernel: Literal["forward", "dkv", "dq"]
    shape: tuple[int, int, int, int] = (64, 1024, 12, 64)
    """Batch, time, heads, head dimension."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    true_fp32: bool = False
    """True fp32 matmuls instead of TF32."""
    causal: bool = True
    window: int | None = None
    limit_s: float = 300.0
    """Seconds after which no more tiles are tried."""
    write: bool = False
    """Store the best in the file of tiles."""
    out: Path | None = None
    """JSON file for every trial."""


@dataclasses.dataclass(frozen=True)
class Space:
    """The tiles to try."""

    start: dict
    values: dict[str, tuple]
    why_not: Callable[[dict], str | None]
    run: Callable[[dict], Callable]
    """Tiles → a function of (qkv, out, lse, dout)."""
    write: Callable[[dict], Path]


def triton(o: Options) -> Space:
    from pallas_kernels.attention import triton

    capability, head_dim = extend.capability(), o.shape[3]
    matmul = "fp32" if o.true_fp32 else "tf32" if o.dtype == "fp32" else "16"
    entry = triton.tuning(capability, matmul, head_dim)
    padded, size = max(16, 1 << (head_dim - 1).bit_length()), DTYPES[o.dtype].dtype.itemsize
    shared_kb = triton.SHARED_KB.get(capability, 99)

    def why_not(tile):
        # Tiles that a program keeps, and those that its pipeline has in flight; dS goes through
        # shared memory as well.
        tf32 = matmul == "tf32"  # some operands have two copies
        kept, flying = {
            "forward": (tile["M"], 2 * tile["N"]),
            "dq": (2 * tile["M"], (3 if tf32 else 2) * tile["N"]),
            "dkv": (2 * tile["N"], (4 if tf32 else 2) * tile["M"]),
        }[o.kernel]
        needed = padded * size * (kept + flying * max(1, tile["num_stages"] - 1))
        if needed > shared_kb * 1024:
            return f"{needed} bytes of shared memory are needed, and there are {shared_kb} KB"
        rows = tile["N"] if o.kernel == "dkv" else tile["M"]
        accumulators = {"forward": 1, "dq": 1, "dkv": 2}[o.kernel] * rows * padded
        scores = (1.5 if o.kernel == "forward" else 2.5) * tile["M"] * tile["N"]
        registers = (accumulators + scores) / (32 * tile["num_warps"])
        return f"about {registers:.0f} registers a thread are needed" if registers > 230 else None

    def run(tile):
        return _run(o, triton, entry | {o.kernel: tile})

    def write(tile):
        path = FOLDER / "triton_tiles.json"
        data = json.loads(path.read_text())
        name = f"{capability[0]}.{capability[1]}"
        if name not in data:
            raise SystemExit(
                f"{path.name} has no entry for {name}; make one first, from that of the nearest GPU"
            )
        entries = data[name][matmul]
        entries[min((p for p in entries if int(p) >= padded), key=int)][o.kernel] = tile
        path.write_text(results.compact_json(data) + "\n")
        return path

    values = {
        "M": (16, 32, 64, 128, 256),
        "N": (16, 32, 64, 128, 256),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
    }
    return Space(start=dict(entry[o.kernel]), values=values, why_not=why_not, run=run, write=write)


def _run(o: Options, module, tiles):
    options = attention.Options(
        o.causal, o.shape[3] ** -0.5, o.window, precision="highest" if o.true_fp32 else None
    )
    how = {"options": options, "tiles": tiles}
    if o.kernel == "forward":
        return lambda qkv, out, lse, dout: module.forward((qkv,), None, **how)
    return lambda qkv, out, lse, dout: module.backward((qkv,), None, lse, dout, out, None, **how)


def make(o: Options, run_forward: Callable, key: jax.Array) -> tuple:
    b, t, h, d = o.shape
    keys = jax.random.split(key)
    qkv = jax.random.normal(keys[0], (b, t, 3, h, d), DTYPES[o.dtype])
    dout = jax.random.normal(keys[1], (b, t, h, d), DTYPES[o.dtype])
    out, lse = run_forward(qkv, None, None, None)
    return qkv, out, lse, dout


def error(o: Options, f: Callable) -> float:
    """The largest difference from the definition on two heads of a short sequence, relative to the
    largest value."""
    b, t, h, d = 1, min(o.shape[1], 640), 2, o.shape[3]
    keys = jax.random.split(jax.random.key(7))
    qkv = jax.random.normal(keys[0], (b, t, 3, h, d), DTYPES[o.dtype])
    dout = jax.random.normal(keys[1], (b, t, h, d), DTYPES[o.dtype])

    def true(qkv):
        q, k, v = (qkv[:, :, i] for i in range(3))
        return attention.reference(q, k, v, causal=o.causal, window=o.window, return_lse=True)

    (out, lse), pull = jax.vjp(true, qkv.astype(jnp.float32))
    wanted = (out, lse)
    if o.kernel != "forward":
        wanted = pull((dout.astype(jnp.float32), jnp.zeros_like(lse)))
    found = jax.jit(f)(qkv, out.astype(qkv.dtype), lse, dout)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(
        float(np.abs(np.asarray(x, np.float32) - y).max() / np.abs(y).max()) for x, y in pairs
    )


def search(o: Options, args: list[str] | None) -> int:
    space, forward = triton(o), triton(dataclasses.replace(o, kernel="forward"))
    inputs = jax.jit(functools.partial(make, o, forward.run(forward.start)))
    b, t, h, d = o.shape
    case = Case(
        kernel="flash_attention",
        name=o.kernel,
        make=inputs,
        run={},
        flops=4
        * b
        * h
        * t
        * t
        * d
        / (2 if o.causal else 1)
        * (1 if o.kernel == "forward" else 2.5),
    )
    allowed = {"bf16": 2.0**-6, "fp16": 2.0**-9, "fp32": 2.0**-14 if o.true_fp32 else 2.0**-8}[
        o.dtype
    ]
    trials: dict[tuple, dict] = {}
    until = time.monotonic() + o.limit_s

    def attempt(tiles: dict) -> float:
        key = tuple(sorted((k, str(v)) for k, v in tiles.items()))
        if key in trials:
            return trials[key].get("ms", float("inf"))
        row = trials[key] = {"tiles": tiles}
        if why := space.why_not(tiles):
            row["why_not"] = why
            return float("inf")
        try:
            f = space.run(tiles)
            if (off := error(o, f)) > allowed:
                row["why_not"] = f"off by {off:.1e}"
            else:
                timed = dataclasses.replace(case, run={"tiles": f})
                row["ms"] = seconds(timed, ["tiles"])["tiles"] * 1e3
        except Exception as failure:  # what does not compile is no reason not to try the next
            row["why_not"] = (
                f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"[
                    :200
                ]
            )
        print(f"{tiles}: {row.get('ms', row.get('why_not'))}", file=sys.stderr, flush=True)
        return row.get("ms", float("inf"))

    best, best_ms = space.start, attempt(space.start)
    improved = True
    while improved and time.monotonic() < until:
        improved = False
        for name, values in space.values.items():
            for value in values:
                if value != best[name] and time.monotonic() < until:
                    if (ms := attempt(best | {name: value})) < 0.995 * best_ms:
                        best, best_ms, improved = best | {name: value}, ms, True

    found = sorted((row for row in trials.values() if "ms" in row), key=lambda row: row["ms"])
    title = f"{o.kernel}, {o.shape}, {o.dtype}, of {len(trials)} tried or ruled out"
    table = []
    for row in found[:12]:
        tiles = ", ".join(f"{name} {row['tiles'][name]}" for name in space.start)
        table.append(Row("", (f"{row['ms']:.4f}", f"{case.flops / row['ms'] / 1e9:.0f}"), tiles))
    print_table(title, ("ms", "TFLOP/s"), table)
    if o.out:
        result = results.new(
            results.command("benchmarks/tools/tune_attention.py", args),
            list(trials.values()),
            device=jax.devices()[0].device_kind,
            best=found[0] if found else None,
        )
        results.write(o.out, result)
    if not found:
        print("error: no tiles ran", file=sys.stderr)
        return 1
    if o.write:
        print(f"wrote {space.write(found[0]['tiles'])}")
    return 0


def main(args: list[str] | None = None) -> int:
    o = tyro.cli(Options, description=__doc__, args=args)
    try:
        extend.select(
            "flash_attention",
            "triton",
            dtype=DTYPES[o.dtype],
            length=o.shape[1],
            head_dim=o.shape[3],
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return search(o, args)


if __name__ == "__main__":
    sys.exit(main())
