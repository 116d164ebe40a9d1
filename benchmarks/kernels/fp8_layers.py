"""Layers of GPT-2 124M at 65,536 tokens, FP8 compared with bf16, and the conversion to FP8.

    python -m gptjax.bench kernels benchmarks/kernels/fp8_layers.py

Times are of forward and backward pass, including the conversions of weights and gradients. The
bound is the rate of a bf16 matmul, which FP8 may exceed.
"""

import functools

import jax
import jax.numpy as jnp

from gptjax.bench.harness import Case
from pallas_kernels import fp8, linear, linear_cross_entropy, mlp, quantize
from pallas_kernels.classifier import SigmoidCap, classify_to_fp8
from pallas_kernels.fp8 import layers
from pallas_kernels.lm_head.fp8 import HeadScales

N, C, F, V, VOCAB, CHUNK = 65536, 768, 3072, 50304, 50257, 16384
BF16, F32 = jnp.bfloat16, jnp.float32


def normal(key, *arrays):
    """Return normally distributed arrays of the given shapes, standard deviations and dtypes."""
    keys = jax.random.split(key, len(arrays))
    return tuple(
        (jax.random.normal(k, shape, F32) * std).astype(dtype)
        for k, (shape, std, dtype) in zip(keys, arrays, strict=True)
    )


def quantize_case(rows: int, columns: int) -> Case:
    def run(x, scale, **how):
        return [a for a in quantize(x, scale, **how) if a is not None]

    def gradient(x, scale):
        q, scale = layers.quantized_gradient(x)
        return q.rows, q.transposed, scale

    both = functools.partial(run, transposed=True)
    return Case(
        kernel="quantize",
        name=f"quantize {rows}×{columns} bf16, rows and transposed",
        make=lambda key: (*normal(key, ((rows, columns), 1.0, BF16)), jnp.float32(4.0)),
        run={
            "triton": functools.partial(both, implementation="triton"),
            "xla": functools.partial(both, implementation="xla"),
            "triton, rows alone": functools.partial(run, implementation="triton"),
            "triton, with the scale of a gradient": gradient,
        },
        bytes=4 * rows * columns,
    )


def transposed_case() -> Case:
    return Case(
        kernel="quantize",
        name=f"transposed copy {CHUNK}×{V} e5m2",
        make=lambda key: normal(key, ((CHUNK, V), 1.0, fp8.E5M2)),
        run={
            "triton": fp8.transposed,
            "xla": lambda q: jax.lax.optimization_barrier(q.T),
        },
        bytes=2 * CHUNK * V,
    )


def with_gradients(f):
    def run(dy, *args):
        y, pull = jax.vjp(f, *args)
        return y, pull(dy)

    return run


def linear_case() -> Case:
    arrays = (
        ((N, 3 * C), 1e-5, BF16),
        ((N, C), 1, BF16),
        ((C, 3 * C), 0.02, F32),
        ((3 * C,), 1, F32),
    )
    return Case(
        kernel="linear",
        name=f"linear {N}×{C}×{3 * C} with gradients",
        make=lambda key: normal(key, *arrays),
        run={
            "fp8": with_gradients(functools.partial(linear, fp8=True)),
            "bf16": with_gradients(linear),
        },
        flops=3 * 2 * N * C * 3 * C,
        bound="bf16",
    )


def mlp_case() -> Case:
    arrays = (
        *(((N, C), 1e-5, BF16), ((N, C), 1, BF16), ((C, F), 0.02, F32)),
        *(((F,), 0.02, F32), ((F, C), 0.02, F32)),
    )
    return Case(
        kernel="mlp",
        name=f"mlp {N}×{C}×{F} with gradients",
        make=lambda key: normal(key, *arrays),
        run={
            "fp8, mosaic": with_gradients(
                functools.partial(mlp, fp8=True, implementation="mosaic")
            ),
            "fp8, xla": with_gradients(functools.partial(mlp, fp8=True, implementation="xla")),
            "bf16": with_gradients(mlp),
        },
        flops=6 * 2 * N * C * F,
        bound="bf16",
    )


def head_case(softcap: SigmoidCap | None) -> Case:
    def make(key):
        targets = jax.random.randint(key, (N,), 0, VOCAB)
        return *normal(key, ((N, C), 1, BF16), ((V, C), 0.05, F32)), targets

    def head(scales):
        def mean(x, w, targets):
            how = {"vocab_size": VOCAB, "softcap": softcap, "fp8": scales}
            return linear_cross_entropy(x, w, targets, **how, implementation="fused").mean()

        return jax.value_and_grad(mean, (0, 1))

    return Case(
        kernel="linear_cross_entropy",
        name=f"head {N}×{C}×{V}{', capped' if softcap else ''}, with gradients",
        make=make,
        run={
            "fp8": head(HeadScales()),
            "fp8, constant scale of w": head(HeadScales(w=256.0)),
            "bf16": head(None),
        },
        flops=3 * 2 * N * C * V,
        bound="bf16",
    )


def classifier_case(softcap: SigmoidCap | None) -> Case:
    def make(key):
        targets = jax.random.randint(key, (CHUNK,), 0, VOCAB)
        return *normal(key, ((CHUNK, V), 1.0, BF16)), targets

    def run(logits, targets):
        how = {"vocab_size": VOCAB, "softcap": softcap}
        return classify_to_fp8(logits, targets, None, scale=HeadScales().gradient, **how)

    return Case(
        kernel="fused_classifier",
        name=f"gradient in e5m2 {CHUNK}×{V} bf16{', capped' if softcap else ''}",
        make=make,
        run={"triton": run},
        bytes=3 * CHUNK * V,
    )


def cases() -> list[Case]:
    return [
        classifier_case(None),
        classifier_case(SigmoidCap()),
        head_case(None),
        head_case(SigmoidCap()),
        mlp_case(),
        linear_case(),
        *(quantize_case(N, columns) for columns in (C, 3 * C)),
        transposed_case(),
    ]
