"""Attention with options that few libraries have, compared with XLA, and with cuDNN where it can.

    python -m gptjax.bench kernels benchmarks/kernels/attention_options.py

"auto" is `flash_attention` with its default back end, "xla" the same call with
implementation="xla", which stores the scores. TFLOP/s count the matmuls of visible scores.
"""

import functools

import jax
import jax.numpy as jnp

from gptjax.bench.harness import Case, normal, passes
from pallas_kernels import flash_attention

# Name, B, T, S, H query heads, K key heads, D, options, argument with a number for each head
CALLS = (
    ("256 channels", 4, 4096, 4096, 8, 4, 256, {}, None),
    ("soft cap", 4, 4096, 4096, 16, 4, 128, {"softcap": 50.0}, None),
    ("sinks", 4, 4096, 4096, 16, 4, 128, {}, "sinks_H"),
    ("an eighth of the queries", 4, 512, 4096, 16, 4, 128, {}, None),
    ("ALiBi", 4, 4096, 4096, 16, 16, 64, {}, "bias"),
)


def cases() -> list[Case]:
    return [_case(*call, both=both) for call in CALLS for both in (False, True)]


def _case(name, b, t, s, h, k, d, options, of_heads, *, both):
    attend = {
        how: functools.partial(flash_attention, implementation=how, **options)
        for how in ("auto", "xla")
    }
    if name == "256 channels":
        attend["cudnn"] = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
        )

    def make(key):
        arrays = normal(key, *2 * [(b, t, h, d)], *2 * [(b, s, k, d)])  # dy, q, k, v
        return 2.0 ** -jnp.linspace(1, 8, h), *arrays

    def run(f, heads_H, *arrays):
        f = functools.partial(f, **{of_heads: heads_H}) if of_heads else f
        return passes(f, both)(*arrays)

    return Case(
        kernel="flash_attention",
        name=f"{name}, {'forward and backward' if both else 'forward'} B={b} T={t} S={s} "
        f"H={h}/{k} D={d} bf16",
        make=make,
        run={how: functools.partial(run, f) for how, f in attend.items()},
        flops=(3.5 if both else 1) * 4 * b * h * d * t * (s - (t - 1) / 2),
        bound="bf16",
        bar="≥ 1.0× cuDNN and XLA",
        alternate=True,
    )
