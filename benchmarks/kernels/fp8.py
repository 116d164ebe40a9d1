"""FP8 matmuls of GPT-2 124M at a micro-batch of 64, and two FP8 matmuls with a fused epilogue.

    python -m gptjax.bench kernels benchmarks/kernels/fp8.py

Names are M×K×N. "xla" is cuBLASLt's FP8 matmul, "xla, fp32 sums" the same matmul without fast
accumulation, "bf16" XLA's matmul of bf16 operands. The bound is the rate of a bf16 matmul, which
FP8 may exceed.

The matmuls with an activation, and their gradient, are compared with "xla": an FP8 matmul with a
bf16 result, followed by the epilogue in plain JAX.
"""

import functools

import jax.numpy as jnp

from gptjax.bench import harness
from gptjax.bench.harness import Case
from pallas_kernels.feed_forward import mosaic
from pallas_kernels.feed_forward.activations import ACTIVATIONS
from pallas_kernels.gemm import E4M3, E5M2, Fp8, largest, scaled_matmul

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


def normal(key, *arrays):
    shapes, dtypes = zip(*arrays, strict=True)
    drawn = harness.normal(key, *shapes)
    return tuple(x.astype(dtype) for x, dtype in zip(drawn, dtypes, strict=True))


def matmul_case(name, m, k, n, a_dtype, out_dtype) -> Case:
    def run(a, b, implementation, **options):
        return scaled_matmul(
            a, b, 2.0**-5, out_dtype=out_dtype, implementation=implementation, **options
        )

    def bf16(a, b):
        return jnp.matmul(a.astype(BF16), b.astype(BF16).T, preferred_element_type=out_dtype)

    return Case(
        kernel="scaled_matmul",
        name=f"{name} {m}×{k}×{n}",
        make=lambda key: normal(key, ((m, k), a_dtype), ((n, k), E4M3)),
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


def quantized_twice(v, scale, dtype):
    q = (v * scale).clip(-largest(dtype), largest(dtype)).astype(dtype)
    return q, q.T


def forward_case(name: str, m, k, n) -> Case:
    scale, bias, stored = k**-0.5, name == "gelu", Fp8().hidden_format(name, BF16)

    def fused(x, w, b):
        how = {"activation": name, "stored": stored}
        return mosaic.activated(x, w, b if bias else None, (scale,), **how)

    def xla(x, w, b):
        u = scaled_matmul(x, w, scale, implementation="xla").astype(F32)
        y, derivative = ACTIVATIONS[name](u + b[None] if bias else u)
        saved = (derivative * stored.saved_scale).astype(stored.saved_dtype or E4M3)
        return *quantized_twice(y, stored.scale, E4M3), saved if bias else None

    return Case(
        kernel="mlp in FP8",
        name=f"linear_{name} {m}×{k}×{n}",
        make=lambda key: normal(key, ((m, k), E4M3), ((n, k), E4M3), ((n,), F32)),
        run={"mosaic": fused, "xla": xla},
        bytes=m * k + n * k + (3 if bias else 2) * m * n,
        flops=2 * m * k * n,
        bound="bf16",
    )


def backward_case(name: str, m, c, o) -> Case:
    scale, du_scale, bias, stored = c**-0.5, 32.0, name == "gelu", Fp8().hidden_format(name, BF16)

    def fused(dy, w2, saved):
        return mosaic.du(dy, w2, saved, (scale,), du_scale, stored=stored, bias=bias)

    def xla(dy, w2, saved):
        dh = scaled_matmul(dy, w2, scale, implementation="xla").astype(F32)
        du = dh * stored.derivative(saved.astype(F32)) / stored.derivative_scale
        return *quantized_twice(du, du_scale, E5M2), du.sum(0) if bias else None

    def make(key):
        dy, w2, saved = normal(key, ((m, c), E5M2), ((o, c), E4M3), ((m, o), BF16))
        return dy, w2, jnp.abs(saved).astype(E4M3)

    return Case(
        kernel="mlp in FP8",
        name=f"{name} backward {m}×{c}×{o}",
        make=make,
        run={"mosaic": fused, "xla": xla},
        bytes=m * c + o * c + 3 * m * o,
        flops=2 * m * c * o,
        bound="bf16",
    )


def cases() -> list[Case]:
    """Return the cases: all matmuls of a training step, and the kernels with an activation."""
    return [
        *(matmul_case(*matmul) for matmul in MATMULS),
        *(forward_case(name, TOKENS, 768, 3072) for name in ACTIVATIONS),
        *(backward_case(name, TOKENS, 768, 3072) for name in ACTIVATIONS),
    ]
