"""Attention of one or several queries to a KV cache with sequences of different lengths.

    python -m gptjax.bench kernels benchmarks/kernels/cached_attention.py

"cudnn" is `jax.nn.dot_product_attention` of one query, where cuDNN needs no alignment of the
causal mask to the last keys. Bytes are those of the valid keys and values, queries and outputs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gptjax.bench.harness import Case, normal
from pallas_kernels import cached_attention

# B, T, S, H query heads, K key heads, D, window
SHAPES = (
    (8, 1, 4096, 16, 4, 128, None),
    (8, 5, 4096, 16, 4, 128, None),
    (8, 1, 4096, 16, 4, 128, 1024),
    (1, 1, 32768, 16, 4, 128, None),
    (64, 1, 1024, 12, 12, 64, None),
    (8, 1, 4096, 8, 4, 256, None),
)


def cases() -> list[Case]:
    return [_case(*shape) for shape in SHAPES]


def _case(b, t, s, h, k, d, window):
    lengths_B = np.linspace(s, s // 2, b).astype(np.int32)
    run = {
        name: functools.partial(cached_attention, window=window, implementation=name)
        for name in ("triton", "xla")
    }
    if t == 1 and window is None and d <= 128:
        run["cudnn"] = _in_cudnn
    keys = np.minimum(lengths_B, (window or s) + t - 1).sum(dtype=float)
    return Case(
        kernel="cached_attention",
        name=f"B={b} T={t} S={s} H={h}/{k} D={d} bf16" + (f", window {window}" if window else ""),
        make=lambda key: (
            *normal(key, (b, t, h, d), *2 * [(b, s, k, d)]),
            jnp.asarray(lengths_B),
        ),
        run=run,
        bytes=2 * (2 * keys * k * d + 2 * b * t * h * d),
        bar="≥ 1.0× cuDNN and XLA",
        alternate=True,
    )


def _in_cudnn(q, k, v, lengths_B):
    return jax.nn.dot_product_attention(
        q, k, v, key_value_seq_lengths=lengths_B, implementation="cudnn"
    )
