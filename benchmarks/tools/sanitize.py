"""Every kernel once, forward and backward, under compute-sanitizer's memcheck (bad addresses) and
racecheck (shared-memory races).

    python benchmarks/tools/sanitize.py --out benchmarks/results/sanitize.json

Shapes are small and ragged: the sanitizer slows a kernel down a thousandfold, and edges are where
addresses go wrong.
"""

import dataclasses
import json
import os
import re
import shlex
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
from gptjax.training.checkpoint import versions
from pallas_kernels.feed_forward import mlp
from pallas_kernels.matmul import linear

TOOLS = ("memcheck", "racecheck")


@dataclasses.dataclass(frozen=True)
class Options:
    """Runs compute-sanitizer (CUDA toolkit) over all kernels of this GPU's back ends."""

    out: Path | None = None
    """JSON file for the results."""
    inside: bool = False
    """Run the kernels, here and now: what the sanitizer is started on."""
    kernels: tuple[str, ...] = ()
    """Only these; all where none is named."""
    limit_s: float = 600.0
    """Seconds after which a tool is stopped, and what it found until then reported."""


def normal(i: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(i), shape, dtype)


def runs() -> dict[str, tuple[tuple[str, ...], Callable, tuple]]:
    """Kernel → its back ends that are kernels of ours, the function, and arrays: gradients are
    taken of floating ones."""
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
        "linear_gelu.mlp, fp32 as TF32": (
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
        "products.linear, fp32 as TF32": (
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


def main(options: Options) -> None:
    if options.inside:
        return run_inside(options.kernels)
    if (sanitizer := shutil.which("compute-sanitizer")) is None:
        sys.exit(
            "sanitize: compute-sanitizer is not on the PATH; it comes with NVIDIA's CUDA toolkit"
        )
    # A buffer of its own for each array, or an address past an array's end is still inside XLA's
    # pool; no trial runs of cuBLAS.
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0",
    }
    asked = ["--kernels", *options.kernels] if options.kernels else []
    found, started = {}, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        logs = {tool: Path(folder) / tool for tool in TOOLS}
        command = [sys.executable, __file__, "--inside", *asked]
        processes = {
            tool: subprocess.Popen(
                [sanitizer, "--tool", tool, "--error-exitcode", "1", *command],
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
                env=environment,
            )
            for tool, log in logs.items()
        }
        for tool, process in processes.items():
            try:
                code = process.wait(max(1.0, options.limit_s - time.perf_counter() + started))
            except subprocess.TimeoutExpired:
                process.kill()
                code = f"none: stopped after {options.limit_s} s"
            text = logs[tool].read_text()
            summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
            found[tool] = {
                "summary": summary[-1]
                if summary
                else f"no summary; exit code {code}: {text[-1000:]}",
                "ran": re.findall(r"^ran: (.*)$", text, re.MULTILINE),
                "clean": code == 0
                and bool(summary)
                and re.search(r"SUMMARY: 0 (errors|hazards)", summary[-1]) is not None,
            }
            complaints = [line for line in text.splitlines() if line.startswith("=========")]
            print(
                tool,
                json.dumps(found[tool], indent=1, ensure_ascii=False),
                *complaints[:40],
                sep="\n",
                flush=True,
            )
    if options.out:
        result = {
            "command": shlex.join(["python", "benchmarks/tools/sanitize.py", *asked]),
            "date": time.strftime("%Y-%m-%d"),
            "device": jax.devices()[0].device_kind,
            "versions": versions(),
            "tools": found,
        }
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if dirty := [tool for tool in TOOLS if not found[tool]["clean"]]:
        sys.exit(f"sanitize: not clean: {', '.join(dirty)}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
