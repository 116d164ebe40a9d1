"""Search for faster tiles of flash attention's Triton kernels on this GPU, one parameter at a time.

    python benchmarks/tools/tune_attention.py --kernel forward --shape 64 1024 12 64 --write

The search starts from the current tiles, tries every other value of each parameter, continues from
the best, and ends when no single change helps. Tiles that exceed shared memory or registers by an
estimate are not compiled. Tiles with a wrong result are reported and not used. `--write` stores the
best in pallas_kernels/attention/triton_tiles.json, which the kernels read. Several searches may run
at once on one GPU: they compile in parallel, and measure one after the other.
"""

import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from gptjax.bench import BenchError, harness, results
from gptjax.bench.harness import Case, seconds
from gptjax.bench.results import Row, print_table
from gptjax.terminal import exit_code, first_line
from pallas_kernels import attention, extend
from pallas_kernels.attention import triton

FOLDER = Path(__file__).parents[2] / "pallas_kernels" / "attention"
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Options:
    """Search for faster tiles of flash attention's Triton kernels on this GPU."""

    kernel: Literal["forward", "dkv", "dq"]
    shape: tuple[int, int, int, int] = (64, 1024, 12, 64)
    """Batch, time, heads, head dimension."""
    value_dim: int | None = None
    """Head dimension of the values, if another."""
    bias: Literal["scores", "slopes"] | None = None
    """A bias of all heads, or ALiBi's slopes."""
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


class Space:
    """The tiles to try for a kernel."""

    values: ClassVar[dict[str, tuple[int, ...]]] = {
        "M": (16, 32, 64, 128, 256),
        "N": (16, 32, 64, 128, 256),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
    }

    def __init__(self, o: Options):
        self.o, head_dim = o, max(o.shape[3], o.value_dim or 0)
        self.matmul = "fp32" if o.true_fp32 else "tf32" if o.dtype == "fp32" else "16"
        bias = jax.eval_shape(functools.partial(make_bias, o, *o.shape[1:3]))
        self.option = triton.tuned_option(bias, o.shape[3], o.value_dim or o.shape[3])
        self.padded, self.capability = triton.padded(head_dim), extend.capability()
        self.entry = triton.tuning(self.capability, self.matmul, head_dim, self.option)
        self.start = dict(self.entry[o.kernel])

    def why_not(self, tile: dict) -> str | None:
        """Return why tiles are not compiled, by an estimate; else None."""
        # Tiles that a program keeps, and those that its pipeline has in flight; dS goes through
        # shared memory as well. In TF32, some operands have two copies.
        tf32, kernel = self.matmul == "tf32", self.o.kernel
        kept, flying = {
            "forward": (tile["M"], 2 * tile["N"]),
            "dq": (2 * tile["M"], (3 if tf32 else 2) * tile["N"]),
            "dkv": (2 * tile["N"], (4 if tf32 else 2) * tile["M"]),
        }[kernel]
        size = DTYPES[self.o.dtype].dtype.itemsize
        shared_kb = triton.SHARED_KB.get(self.capability, 99)
        needed = self.padded * size * (kept + flying * max(1, tile["num_stages"] - 1))
        if needed > shared_kb * 1024:
            return f"{needed} bytes of shared memory are needed, and there are {shared_kb} KB"
        rows = tile["N"] if kernel == "dkv" else tile["M"]
        accumulators = {"forward": 1, "dq": 1, "dkv": 2}[kernel] * rows * self.padded
        scores = (1.5 if kernel == "forward" else 2.5) * tile["M"] * tile["N"]
        registers = (accumulators + scores) / (32 * tile["num_warps"])
        return f"about {registers:.0f} registers a thread are needed" if registers > 230 else None

    def run(self, tile: dict) -> Callable:
        """Return a function of (operands, bias, out, lse, dout) with these tiles."""
        o = self.o
        precision = "highest" if o.true_fp32 else None
        scale = o.shape[3] ** -0.5
        options = attention.Options(o.causal, scale, o.window, precision=precision, start=0)
        how = {"options": options, "tiles": self.entry | {o.kernel: tile}}
        if o.kernel == "forward":
            return lambda operands, bias, *_: triton.forward(operands, None, bias, **how)
        return lambda operands, bias, out, lse, dout: triton.backward(
            operands, None, lse, dout, out, None, bias, **how
        )

    def write(self, tile: dict) -> Path:
        """Store tiles in the file that the kernels read; return the file."""
        path, name = FOLDER / "triton_tiles.json", "{}.{}".format(*self.capability)
        with alone():
            data = json.loads(path.read_text())
            if name not in data:
                raise SystemExit(
                    f"{path.name} has no entry for {name}; make one first, from that of the "
                    "nearest GPU"
                )
            entries = data[name][self.matmul]
            tiles = entries[min((p for p in entries if int(p) >= self.padded), key=int)]
            if self.option is not None:
                tiles = tiles.setdefault(self.option, {})
            tiles[self.o.kernel] = tile
            path.write_text(results.compact_json(data) + "\n")
        return path


def make_bias(o: Options, t: int, h: int):
    """Return ALiBi's slopes, or a bias of all heads of a sequence, or None."""
    if o.bias is None:
        return None
    dtype = DTYPES[o.dtype]
    slopes_H = 2.0 ** -jnp.linspace(1, 8, h, dtype=dtype)
    if o.bias == "slopes":
        return slopes_H
    return slopes_H[:, None, None] * jnp.arange(t, dtype=dtype)[None, None] / t + jnp.zeros(
        (1, t, 1), dtype
    )


def draw(o: Options, b: int, t: int, h: int, key: jax.Array) -> tuple:
    """Return the operands, packed if the call may be, the bias, and the gradient of the output."""
    d, e = o.shape[3], o.value_dim or o.shape[3]
    sizes, keys = ((t, h, d), (t, h, d), (t, h, e), (t, h, e)), jax.random.split(key, 4)
    q, k, v, dout = (
        jax.random.normal(key, (b, *size), DTYPES[o.dtype])
        for key, size in zip(keys, sizes, strict=True)
    )
    packed = e == d and o.bias is None
    return (jnp.stack((q, k, v), 2),) if packed else (q, k, v), make_bias(o, t, h), dout


def make(o: Options, run_forward: Callable, key: jax.Array) -> tuple:
    operands, bias, dout = draw(o, *o.shape[:3], key)
    out, lse = run_forward(operands, bias)
    return operands, bias, out, lse, dout


@functools.cache
def example(o: Options) -> tuple:
    """Return arguments of two heads of a short sequence, and the definition's results."""
    operands, bias, dout = draw(o, 1, min(o.shape[1], 640), 2, jax.random.key(7))

    def true(operands):
        qkv = operands if len(operands) == 3 else [operands[0][:, :, i] for i in range(3)]
        rows = bias[None] if o.bias == "scores" else bias
        how = {"causal": o.causal, "window": o.window, "bias": rows, "return_lse": True}
        return attention.reference(*qkv, **how)

    exact = [x.astype(jnp.float32) for x in operands]
    (out, lse), pull = jax.vjp(true, tuple(exact))
    wanted = (out, lse)
    if o.kernel != "forward":
        wanted = pull((dout.astype(jnp.float32), jnp.zeros_like(lse)))
    return (operands, bias, out.astype(dout.dtype), lse, dout), wanted


def error(o: Options, f: Callable) -> float:
    """Return the largest difference from the definition, relative to the largest value."""
    args, wanted = example(o)
    pairs = zip(jax.tree.leaves(jax.jit(f)(*args)), jax.tree.leaves(wanted), strict=True)
    return max(
        float(np.abs(np.asarray(x, np.float32) - y).max() / np.abs(y).max()) for x, y in pairs
    )


@contextlib.contextmanager
def alone():
    """Wait for the other searches, which measure on the same GPU and write the same file."""
    with (Path(tempfile.gettempdir()) / "tune_attention.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def search(o: Options, args: list[str] | None) -> None:
    """Search, print and store the tiles. Raise ValueError if the kernels or no tiles run here."""
    how = {"dtype": DTYPES[o.dtype], "length": o.shape[1], "head_dim": o.shape[3]}
    extend.select("flash_attention", "triton", **how)
    harness.MOST_BYTES = 3e9  # several searches share the GPU's memory
    space, forward = Space(o), Space(dataclasses.replace(o, kernel="forward"))
    inputs = jax.jit(functools.partial(make, o, forward.run(forward.start)))
    b, t, h, d = o.shape
    flops = 2 * b * h * t * t * (d + (o.value_dim or d)) / (2 if o.causal else 1)
    flops *= 1 if o.kernel == "forward" else 2.5
    case = Case(kernel="flash_attention", name=o.kernel, make=inputs, run={}, flops=flops)
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
                jax.jit(f).lower(*jax.eval_shape(inputs, jax.random.key(0)))  # compiles the kernel
                with alone():
                    row["ms"] = seconds(timed, ["tiles"])["tiles"] * 1e3
        except Exception as failure:  # what does not compile is no reason not to try the next
            row["why_not"] = first_line(failure)
        print(f"{tiles}: {row.get('ms', row.get('why_not'))}", file=sys.stderr, flush=True)
        return row.get("ms", float("inf"))

    best, best_ms = space.start, attempt(space.start)
    improved = True
    while improved and time.monotonic() < until:
        improved = False
        for name, values in space.values.items():
            nearest = sorted(values, key=lambda value: abs(math.log2(value / best[name])))
            for value in nearest:
                if value != best[name] and time.monotonic() < until:
                    if (ms := attempt(best | {name: value})) < 0.995 * best_ms:
                        best, best_ms, improved = best | {name: value}, ms, True

    found = sorted((row for row in trials.values() if "ms" in row), key=lambda row: row["ms"])
    how = "".join(f", {name} {x}" for name in ("value_dim", "bias") if (x := getattr(o, name)))
    title = f"{o.kernel}, {o.shape}{how}, {o.dtype}, of {len(trials)} tried or ruled out"
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
        raise BenchError("no tiles ran")
    if o.write:
        print(f"wrote {space.write(found[0]['tiles'])}")


def main(args: list[str] | None = None) -> int:
    o = tyro.cli(Options, description=__doc__, args=args)
    return exit_code(lambda: search(o, args), (ValueError,))


if __name__ == "__main__":
    sys.exit(main())
