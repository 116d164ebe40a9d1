"""Run every kernel once, forward and backward, under compute-sanitizer's memcheck (invalid
addresses) and racecheck (shared-memory races).

    python benchmarks/tools/sanitize.py --out benchmarks/results/sanitize.json

Shapes are small and ragged: the sanitizer slows down a kernel a thousandfold, and invalid addresses
occur at edges.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro

import pallas_kernels
from gptjax.bench import results
from pallas_kernels.feed_forward import mlp
from pallas_kernels.matmul import linear

TOOLS = ("memcheck", "racecheck")


@dataclasses.dataclass(frozen=True)
class Options:
    """Run compute-sanitizer (CUDA toolkit) on all kernels of this GPU's back ends."""

    out: Path | None = None
    """JSON file for the results."""
    inside: bool = False
    """Run the kernels in this process; the script starts itself so under the sanitizer."""
    kernels: tuple[str, ...] = ()
    """Only these kernels; all if none is named."""
    limit_s: float = 600.0
    """Seconds after which a tool is stopped; its report so far counts."""


def normal(i: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(i), shape, dtype)


def runs() -> dict[str, tuple[tuple[str, ...], Callable, tuple]]:
    """Return kernel → its custom back ends, the function, and its arrays. Floating-point arrays are
    differentiated."""
    targets = jax.random.randint(jax.random.key(9), (130,), 0, 1001)
    attention = tuple(normal(i, 1, 200, heads, 64) for i, heads in enumerate((4, 2, 2)))
    return {
        "flash_attention": (("mosaic", "triton"), pallas_kernels.flash_attention, attention),
        "flash_attention, window": (
            ("mosaic", "triton"),
            lambda *qkv, **how: pallas_kernels.flash_attention(*qkv, window=70, **how),
            attention,
        ),
        "flash_attention, deterministic": (
            ("mosaic", "triton"),
            lambda *qkv, **how: pallas_kernels.flash_attention(*qkv, deterministic=True, **how),
            attention,
        ),
        "flash_attention_qkv": (
            ("mosaic", "triton"),
            pallas_kernels.flash_attention_qkv,
            (normal(0, 1, 200, 3, 2, 64),),
        ),
        "flash_attention_qkv, fp32": (
            ("triton",),
            pallas_kernels.flash_attention_qkv,
            (normal(0, 1, 200, 3, 2, 64, dtype=jnp.float32),),
        ),
        "flash_attention_qkv, true fp32": (
            ("triton",),
            lambda qkv, **how: pallas_kernels.flash_attention_qkv(qkv, precision="highest", **how),
            (normal(0, 1, 200, 3, 2, 64, dtype=jnp.float32),),
        ),
        "softmax": (("triton",), pallas_kernels.softmax, (normal(0, 37, 1000),)),
        "softmax, causal": (
            ("triton",),
            lambda x, **how: pallas_kernels.softmax(x, causal=True, **how),
            (normal(0, 3, 70, 70),),
        ),
        "softmax, long": (("triton",), pallas_kernels.softmax, (normal(0, 5, 50304),)),
        "fused_classifier": (
            ("triton",),
            lambda x, t, **how: pallas_kernels.fused_classifier(x, t, vocab_size=1001, **how)[0],
            (normal(0, 130, 1024), targets),
        ),
        "layer_norm": (
            ("triton",),
            lambda x, r, s, b, c, **how: pallas_kernels.layer_norm(
                x, s, b, residual=r, residual_bias=c, **how
            ),
            (
                normal(0, 67, 768),
                normal(1, 67, 768),
                *(normal(i, 768, dtype=jnp.float32) for i in (2, 3, 4)),
            ),
        ),
        "rms_norm": (("triton",), pallas_kernels.rms_norm, (normal(0, 67, 768),)),
        "linear_gelu": (
            ("mosaic", "triton"),
            pallas_kernels.linear_gelu,
            (normal(0, 256, 768), normal(1, 768, 1024), normal(2, 1024)),
        ),
        "linear_relu_squared": (
            ("mosaic", "triton"),
            pallas_kernels.linear_relu_squared,
            (normal(0, 256, 768), normal(1, 768, 1024)),
        ),
        "mlp, fp32 as TF32": (
            ("triton",),
            lambda *args, **how: mlp(*args, precision=jax.lax.Precision.HIGH, **how),
            tuple(
                normal(i, *n, dtype=jnp.float32)
                for i, n in enumerate(((68, 96), (96, 132), (132,), (132, 96)))
            ),
        ),
        "xxt": (("mosaic", "triton"), pallas_kernels.xxt, (normal(0, 2, 256, 384),)),
        "xtx": (("mosaic", "triton"), pallas_kernels.xtx, (normal(0, 2, 384, 256),)),
        "ba_plus_caa": (
            ("mosaic", "triton"),
            lambda a, **how: pallas_kernels.ba_plus_caa(
                a + jnp.swapaxes(a, -1, -2), b=2.0, c=0.5, **how
            ),
            (normal(0, 2, 256, 256),),
        ),
        "transpose_copy": (("triton",), pallas_kernels.transpose_copy, (normal(0, 131, 97),)),
        "linear, fp32 as TF32": (
            ("triton",),
            # Its backward pass has transpose_sum_rows.
            lambda *args, implementation: linear(*args, jax.lax.Precision.HIGH),
            tuple(
                normal(i, *n, dtype=jnp.float32)
                for i, n in enumerate(((68, 96), (96, 132), (132,)))
            ),
        ),
        "transpose_add": (
            ("triton",),
            pallas_kernels.transpose_add,
            (normal(0, 97, 131), normal(1, 131, 97)),
        ),
    }


def run_inside(names: tuple[str, ...]) -> None:
    for name, (implementations, f, args) in runs().items():
        if names and name not in names:
            continue
        for implementation in implementations:
            differentiated = tuple(
                i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)
            )

            def total(*args, f=f, implementation=implementation):
                return sum(
                    jnp.sum(out.astype(jnp.float32))
                    for out in jax.tree.leaves(f(*args, implementation=implementation))
                )

            jax.block_until_ready(jax.jit(jax.grad(total, differentiated))(*args))
            print(f"ran: {name} · {implementation}", flush=True)


def run_tool(tool: str, sanitizer: str, asked: list[str], log: Path) -> subprocess.Popen:
    """Start this script under one of compute-sanitizer's tools."""
    # A separate buffer for each array: otherwise an address out of bounds is inside XLA's pool. No
    # autotuning of cuBLAS.
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0",
    }
    return subprocess.Popen(
        [sanitizer, "--tool", tool, "--error-exitcode", "1"]
        + [sys.executable, __file__, "--inside", *asked],
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env=environment,
    )


def row_of(tool: str, code: int | str, text: str) -> dict:
    """Return the row of one tool from its exit code and output."""
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
    clean = re.compile(r"SUMMARY: 0 (errors|hazards)")
    return {
        "tool": tool,
        "summary": summary[-1] if summary else f"no summary; exit code {code}: {text[-1000:]}",
        "ran": re.findall(r"^ran: (.*)$", text, re.MULTILINE),
        "clean": code == 0 and bool(summary) and clean.search(summary[-1]) is not None,
    }


def main(options: Options) -> None:
    if options.inside:
        return run_inside(options.kernels)
    if (sanitizer := shutil.which("compute-sanitizer")) is None:
        sys.exit(
            "sanitize: compute-sanitizer is not on the PATH; it comes with NVIDIA's CUDA toolkit"
        )
    asked = ["--kernels", *options.kernels] if options.kernels else []
    rows, started = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        logs = {tool: Path(folder) / tool for tool in TOOLS}
        processes = {tool: run_tool(tool, sanitizer, asked, log) for tool, log in logs.items()}
        for tool, process in processes.items():
            print(f"{tool}: running", file=sys.stderr, flush=True)
            try:
                code = process.wait(max(1.0, options.limit_s - time.perf_counter() + started))
            except subprocess.TimeoutExpired:
                process.kill()
                code = f"none: stopped after {options.limit_s} s"
            text = logs[tool].read_text()
            rows.append(row_of(tool, code, text))
            complaints = [line for line in text.splitlines() if line.startswith("=========")]
            print(results.compact_json(rows[-1]), *complaints[:40], sep="\n", flush=True)
    if options.out:
        command = results.script_command("benchmarks/tools/sanitize.py", asked)
        device = jax.devices()[0].device_kind
        results.write(options.out, results.new(command, rows, device=device))
    if dirty := [row["tool"] for row in rows if not row["clean"]]:
        sys.exit(f"sanitize: not clean: {', '.join(dirty)}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
