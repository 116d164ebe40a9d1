"""Compile the Mosaic GPU kernels for an H200 with ptxas: registers, spills, serialized matmuls. No
GPU is needed.

    export JAX_PLATFORMS=cpu
    python benchmarks/tools/mosaic_sass.py --plugin plugin --keep sass

`compile_for_h200.py --help` tells how to get the folder `plugin`. nvdisasm and libdevice are
Triton's.
"""

import collections
import dataclasses
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro
from compile_for_h200 import Plugin
from jax.sharding import SingleDeviceSharding

from gptjax.bench import BenchError, results
from gptjax.bench.results import Row, print_table
from gptjax.terminal import exit_code


@dataclasses.dataclass(frozen=True)
class Options:
    """Compile the Mosaic GPU kernels for an H200 with ptxas, without a GPU."""

    plugin: Path
    """Folder in which the wheels of jax-cuda13-plugin and jax-cuda13-pjrt were unpacked."""
    kernels: tuple[str, ...] = ()
    """Only these kernels; all if none is named."""
    keep: Path | None = None
    """Folder for each kernel's PTX, SASS (with the cycles that instructions wait) and ptxas
    report."""
    out: Path | None = None
    """JSON file for the table."""


def programs() -> dict[str, tuple[Callable, tuple]]:
    """Name → a function and the shapes of its arguments, those of GPT-2 124M and of Llama 1B's MLP.
    Gradients have the forward kernel first, then the backward one."""
    import pallas_kernels as pk
    from pallas_kernels.feed_forward import activated_mlp

    def gradient(f, *shapes, **options):
        f = functools.partial(f, implementation="mosaic", **options)
        arrays = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
        argnums = (*range(len(shapes)),)
        return jax.grad(lambda *args: f(*args).astype(jnp.float32).sum(), argnums), arrays

    def symmetric(f, *shape, **options):
        arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16),)
        return functools.partial(f, implementation="mosaic", **options), arrays

    def with_documents(x, **options):
        ids = jnp.zeros(x.shape[:2], jnp.int32)
        return pk.flash_attention_qkv(x, segment_ids=ids, **options)

    def relu_squared(x, w, w2, **options):
        return activated_mlp(x, w, None, w2, activation="relu_squared", **options)

    packed = {
        "D=64": (64, 1024, 3, 12, 64),
        "D=128": (64, 1024, 3, 6, 128),
        "T=4096": (4, 4096, 3, 12, 64),
    }
    x, w, b, w2 = (65536, 768), (768, 3072), (3072,), (3072, 768)
    gated = (16384, 2048), (2048, 8192), (2048, 8192), (8192, 2048)
    projection = (64, 1024, 768), (768, 2304), (2304,)
    return {
        **{
            f"flash_attention {name}": gradient(pk.flash_attention_qkv, x)
            for name, x in packed.items()
        },
        **{
            f"flash_attention {name}, documents": gradient(with_documents, x)
            for name, x in packed.items()
        },
        "flash_attention window 256": gradient(
            pk.flash_attention_qkv, packed["T=4096"], window=256
        ),
        "linear_gelu": gradient(pk.linear_gelu, x, w, b),
        "mlp": gradient(pk.mlp, x, w, b, w2),
        "swiglu": gradient(pk.swiglu, *gated),
        "xxt": symmetric(pk.xxt, 48, 768, 768),
        "xtx": symmetric(pk.xtx, 24, 3072, 768),
        "ba_plus_caa": symmetric(pk.ba_plus_caa, 48, 768, 768, b=2.0, c=0.5),
        "ba_plus_caa, d": symmetric(pk.ba_plus_caa, 48, 768, 768, b=2.0, c=0.5, d=1.0),
        "mlp, fp8": gradient(pk.mlp, x, w, b, w2, numerics="fp8"),
        "relu_squared, fp8": gradient(relu_squared, x, w, w2, numerics="fp8"),
        "swiglu, fp8": gradient(pk.swiglu, *gated, numerics="fp8"),
        "projected_attention, fp8": gradient(
            pk.projected_attention, *projection, heads=12, numerics="fp8"
        ),
    }


def compile_program(f: Callable, shapes: tuple, folder: Path, device: jax.Device) -> list[dict]:
    """Compile a program with the kernels' code in `folder`. Return, of each kernel, its registers,
    spilled bytes, instructions and ptxas's remarks."""
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
    placed = SingleDeviceSharding(device)
    shapes = tuple(x.update(sharding=placed) for x in shapes)
    jax.jit(f, out_shardings=placed).lower(*shapes).compile()
    for passes in folder.glob("*.mlir-passes.log"):  # tens of megabytes
        passes.unlink()
    reports = sorted(folder.glob("*.ptxas"), key=lambda path: int(path.stem.rpartition("_")[2]))
    return [
        figures(path.read_text(), path.with_suffix(".sass_ctrl").read_text()) for path in reports
    ]


def figures(report: str, sass: str) -> dict:
    """Return the figures of a kernel from ptxas's report and the SASS."""
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", sass)
    counts = collections.Counter(lines)
    return {
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spilled bytes": int(re.search(r"stack frame, (\d+) bytes spill stores", report)[1]),
        "wgmma": counts["HGMMA"] + counts["QGMMA"],
        "instructions": sum(counts.values()),
        # C7510 and its like: the compiler waits for each product before the next.
        "remarks": sorted(set(re.findall(r"\((C75\d\d)\)", report)) - {"C7519"}),
    }


def set_up(options: Options, tools: Path) -> jax.Device:
    """Return the device to compile for. Mosaic dumps the code, and has its tools in `tools`."""
    import triton.backends.nvidia

    plugin, nvidia = Plugin(options.plugin), Path(triton.backends.nvidia.__file__).parent
    plugin.replace_launches()
    (tools / "nvvm/libdevice").mkdir(parents=True)
    (tools / "bin").symlink_to(nvidia / "bin")
    (tools / "nvvm/libdevice/libdevice.10.bc").symlink_to(nvidia / "lib/libdevice.10.bc")
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(tools)
    os.environ |= {f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("PTX", "PTXAS", "SASS")}
    return plugin.devices(1)[0]


def run(options: Options, args: list[str] | None) -> None:
    """Compile the kernels, and print and store the table."""
    found, rows = programs(), []
    if unknown := set(options.kernels) - set(found):
        raise BenchError(f"unknown kernels {sorted(unknown)}; choose from {list(found)}")
    with tempfile.TemporaryDirectory() as temporary:
        device = set_up(options, Path(temporary) / "tools")
        for name in options.kernels or found:
            folder = (options.keep or Path(temporary)) / name.replace(" ", "_").replace(",", "")
            folder.mkdir(parents=True)
            for i, row in enumerate(compile_program(*found[name], folder, device), start=1):
                rows.append({"kernel": f"{name}, {i}"} | row)
                print(rows[-1], file=sys.stderr, flush=True)
    columns = [name for name in rows[0] if name not in ("kernel", "remarks")]
    table = [
        Row(row["kernel"], [str(row[name]) for name in columns], ", ".join(row["remarks"]))
        for row in rows
    ]
    title = "sm_90a; registers are those of the launch, which warpgroups trade among themselves"
    print_table(title, columns, table)
    if options.out:
        command = results.command("benchmarks/tools/mosaic_sass.py", args)
        device = "NVIDIA H200, compiled for without a GPU"
        results.write(options.out, results.new(command, rows, device=device, packages=("triton",)))


def main(args: list[str] | None = None) -> int:
    options = tyro.cli(Options, description=__doc__, args=args)
    return exit_code(lambda: run(options, args))


if __name__ == "__main__":
    sys.exit(main())
