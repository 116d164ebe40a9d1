"""FP8 matmuls of GPT-2 124M at a micro-batch of 64, and two FP8 matmuls with a fused epilogue.

    python -m gptjax.bench kernels benchmarks/kernels/fp8.py

Names are M×K×N. "xla" is cuBLASLt's FP8 matmul, "xla, fp32 sums" the same matmul without fast
accumulation, "bf16" XLA's matmul of bf16 operands. The bound is the rate of a bf16 matmul, which
FP8 may exceed.

`linear_gelu` and `gelu_backward` are compared with "xla": an FP8 matmul with a bf16 result,
followed by the epilogue in plain JAX.
"""

import functools

import jax
import jax.numpy as jnp

from gptjax.bench.harness import Case
from pallas_kernels import fp8
from pallas_kernels.feed_forward import ACTIVATIONS
from pallas_kernels.fp8 import mosaic

E4M3, E5M2, BF16, F32 = fp8.E4M3, fp8.E5M2, jnp.bfloat16, jnp.float32
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
    keys = jax.random.split(key, len(arrays))
    return tuple(
        jax.random.normal(k, shape, BF16).astype(dtype)
        for k, (shape, dtype) in zip(keys, arrays, strict=True)
    )


def matmul_case(name, m, k, n, a_dtype, out_dtype) -> Case:
    def run(a, b, implementation, **options):
        return fp8.scaled_matmul(
            a, b, 2.0**-5, out_dtype=out_dtype, implementation=implementation, **options
        )

    mosaic_run = functools.partial(run, implementation="mosaic")

    def bf16(a, b):
        return jnp.matmul(a.astype(BF16), b.astype(BF16).T, preferred_element_type=out_dtype)

    return Case(
        kernel="scaled_matmul",
        name=f"{name} {m}×{k}×{n}",
        make=functools.partial(_operands, m=m, k=k, n=n, a_dtype=a_dtype),
        run={
            # The padded vocabulary is no multiple of the kernel's tiles in M.
            **({"mosaic": mosaic_run} if mosaic.why_not(m, n, k) is None else {}),
            "xla": functools.partial(run, implementation="xla"),
            "xla, fp32 sums": functools.partial(run, implementation="xla", fast_accumulation=False),
            "bf16": bf16,
        },
        prepare={"bf16": lambda a, b: (a.astype(BF16), b.astype(BF16))},
        bytes=m * k + n * k + m * n * jnp.dtype(out_dtype).itemsize,
        flops=2 * m * k * n,
        bound="bf16",
    )


def _operands(key, *, m, k, n, a_dtype):
    return normal(key, ((m, k), a_dtype), ((n, k), E4M3))


def quantised_twice(v, scale, dtype):
    q = (v * scale).clip(-fp8.largest(dtype), fp8.largest(dtype)).astype(dtype)
    return q, q.T, jnp.abs(v).max()


def gelu_case(m, k, n) -> Case:
    scale, y_scale = k**-0.5, 32.0

    def fused(x, w, b, *, derivative_dtype=BF16):
        return mosaic.linear_gelu(x, w, b, scale, y_scale, derivative_dtype=derivative_dtype)

    def xla(x, w, b):
        u = fp8.scaled_matmul(x, w, scale, implementation="xla").astype(F32) + b[None]
        y, derivative = ACTIVATIONS["gelu"](u)
        return *quantised_twice(y, y_scale, E4M3), derivative.astype(BF16)

    return Case(
        kernel="fp8.linear_gelu",
        name=f"linear_gelu {m}×{k}×{n}",
        make=lambda key: normal(key, ((m, k), E4M3), ((n, k), E4M3), ((n,), F32)),
        run={
            "mosaic": fused,
            "mosaic, e4m3 derivative": functools.partial(fused, derivative_dtype=E4M3),
            "xla": xla,
        },
        bytes=m * k + n * k + 4 * m * n,
        flops=2 * m * k * n,
        bound="bf16",
    )


def backward_case(m, c, o) -> Case:
    scale, du_scale = c**-0.5, 32.0

    def fused(dy, w2, derivative):
        return mosaic.gelu_backward(dy, w2, derivative, scale, du_scale)

    def xla(dy, w2, derivative):
        dh = fp8.scaled_matmul(dy, w2, scale, implementation="xla").astype(F32)
        du = dh * derivative.astype(F32)
        return *quantised_twice(du, du_scale, E5M2), du.sum(0)

    return Case(
        kernel="fp8.linear_gelu",
        name=f"gelu_backward {m}×{c}×{o}",
        make=lambda key: normal(key, ((m, c), E5M2), ((o, c), E4M3), ((m, o), BF16)),
        run={"mosaic": fused, "xla": xla},
        bytes=m * c + o * c + 4 * m * o,
        flops=2 * m * c * o,
        bound="bf16",
    )


def cases() -> list[Case]:
    """Return the cases: all matmuls of a training step, and the two fused kernels."""
    return [
        *(matmul_case(*matmul) for matmul in MATMULS),
        gelu_case(TOKENS, 768, 3072),
        backward_case(TOKENS, 768, 3072),
    ]
