"""FP8 matmuls of GPT-2 124M at a micro-batch of 64. feed_forward.py and gated_mlp.py have the MLPs.

    python -m gptjax.bench kernels benchmarks/kernels/fp8.py

Names are M×K×N. "xla" is cuBLASLt's FP8 matmul, "xla, fp32 sums" the same matmul without fast
accumulation, "bf16" XLA's matmul of bf16 operands. The bound is the rate of a bf16 matmul, which
FP8 may exceed.
"""

import functools

import jax.numpy as jnp

from gptjax.bench.harness import Case, normal
from pallas_kernels.gemm import E4M3, E5M2, scaled_matmul

BF16, F32 = jnp.bfloat16, jnp.float32
TOKENS, CHUNK = 65536, 16384
VOCABULARY = 50304
# name, M, K, N, type of a (b is e4m3), type of the result
MATMULS = [
    ("qkv", TOKENS, 768, 2304, E4M3, BF16),
    ("attention out", TOKENS, 768, 768, E4M3, BF16),
    ("fc", TOKENS, 768, 3072, E4M3, BF16),
    ("proj", TOKENS, 3072, 768, E4M3, BF16),
    ("head", CHUNK, 768, VOCABULARY, E4M3, BF16),
    ("dx of qkv", TOKENS, 2304, 768, E5M2, BF16),
    ("dx of fc", TOKENS, 3072, 768, E5M2, BF16),
    ("dx of the head", CHUNK, VOCABULARY, 768, E5M2, BF16),
    ("dw of qkv", 2304, TOKENS, 768, E5M2, F32),
    ("dw of attention out", 768, TOKENS, 768, E5M2, F32),
    ("dw of fc", 3072, TOKENS, 768, E5M2, F32),
    ("dw of proj", 768, TOKENS, 3072, E5M2, F32),
    ("dw of the head", VOCABULARY, CHUNK, 768, E5M2, F32),
]


def matmul_case(name, m, k, n, a_dtype, out_dtype) -> Case:
    def run(a, b, implementation, **options):
        return scaled_matmul(
            a, b, 2.0**-5, out_dtype=out_dtype, implementation=implementation, **options
        )

    def make(key):
        a, b = normal(key, (m, k), (n, k))
        return a.astype(a_dtype), b.astype(E4M3)

    def bf16(a, b):
        return jnp.matmul(a.astype(BF16), b.astype(BF16).T, preferred_element_type=out_dtype)

    return Case(
        kernel="scaled_matmul",
        name=f"{name} {m}×{k}×{n}",
        make=make,
        run={
            "xla": functools.partial(run, implementation="xla"),
            "xla, fp32 sums": functools.partial(run, implementation="xla", fast_accumulation=False),
            "bf16": bf16,
        },
        prepare={"bf16": lambda a, b: (a.astype(BF16), b.astype(BF16))},
        bytes=m * k + n * k + m * n * jnp.dtype(out_dtype).itemsize,
        flops=2 * m * k * n,
        bound="bf16",
    )


def cases() -> list[Case]:
    """Return the cases: all matmuls of a training step."""
    return [matmul_case(*matmul) for matmul in MATMULS]
