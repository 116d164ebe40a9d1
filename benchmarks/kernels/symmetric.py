"""Symmetric matmuls at the shapes of Polar Express for GPT-2's matrices.

    python -m gptjax.bench kernels benchmarks/kernels/symmetric.py

TFLOP/s count one half of each symmetric result.
"""

import functools

import jax
import jax.numpy as jnp

from gptjax.bench.harness import Case, eager_and_compiled
from pallas_kernels import symmetric

B, C = 4.042929935166739, -2.808917465908714

# (kernel, shape, bar): first the shapes with a bar, then other shapes that occur in training.
SHAPES = [
    ("ba_plus_caa", (48, 768, 768), "≥ 1.3× XLA"),
    ("xtx", (24, 3072, 768), "≥ 1.3× XLA"),
    ("xxt", (48, 768, 768), "≥ 1.0× XLA"),
    ("xxt", (12, 768, 768), ""),
    ("xtx", (12, 3072, 768), ""),
    ("xxt", (24, 768, 3072), ""),
    ("xxt", (48, 1600, 1600), ""),
    ("xxt", (1, 768, 768), "auto takes XLA"),
]


def make(kernel, shape, key):
    a = jax.random.normal(key, shape, jnp.bfloat16)
    return (symmetric.xxt(a, implementation="xla"),) if kernel == "ba_plus_caa" else (a,)


def in_jax(kernel, implementation):
    keywords = {"b": B, "c": C} if kernel == "ba_plus_caa" else {}
    return functools.partial(getattr(symmetric, kernel), implementation=implementation, **keywords)


def added_after_rounding(a):
    """Compute b·a + c·a a as plain JAX: the matmul is rounded to bf16, then scaled and added."""
    return jnp.asarray(B, a.dtype) * a + jnp.asarray(C, a.dtype) * (a @ a)


def in_torch(kernel, torch):
    if kernel == "ba_plus_caa":
        return lambda a: torch.baddbmm(a, a, a, beta=B, alpha=C)
    return lambda a: torch.bmm(a, a.mT) if kernel == "xxt" else torch.bmm(a.mT, a)


def cases() -> list[Case]:
    found = []
    for kernel, shape, bar in SHAPES:
        (batch, rows, columns), in_steps = shape, kernel == "ba_plus_caa"
        m, k = (columns, rows) if kernel == "xtx" else (rows, columns)
        found.append(
            Case(
                kernel=kernel,
                name=f"{'×'.join(map(str, shape))} bf16",
                make=functools.partial(make, kernel, shape),
                run={name: in_jax(kernel, name) for name in ("mosaic", "xla")}
                | ({"xla, rounded twice": added_after_rounding} if in_steps else {}),
                torch=eager_and_compiled(functools.partial(in_torch, kernel)),
                bytes=2 * batch * (rows * columns + m * m),
                flops=batch * m * (m + 1) * k,
                bound="bf16",
                bar=bar,
            )
        )
    return found
