"""Attention with options that few libraries have, compared with XLA, and with cuDNN where it can.

    python -m gptjax.bench kernels benchmarks/kernels/attention_options.py

"auto" is `flash_attention` with its default back end, "xla" the same call with
implementation="xla", which stores the scores. TFLOP/s count the matmuls of visible scores.
"""

import functools

import jax
import jax.numpy as jnp

from gptjax.bench.harness import Case
from pallas_kernels import flash_attention

# Name, B, T, S, H query heads, K key heads, D, options
CALLS = (
    ("256 channels", 4, 4096, 4096, 8, 4, 256, {}),
    ("soft cap", 4, 4096, 4096, 16, 4, 128, {"softcap": 50.0}),
    ("sinks", 4, 4096, 4096, 16, 4, 128, {"sinks": True}),
    ("an eighth of the queries", 4, 512, 4096, 16, 4, 128, {}),
    ("ALiBi", 4, 4096, 4096, 16, 16, 64, {"slopes": True}),
)


def cases() -> list[Case]:
    return [_case(*call, both=both) for call in CALLS for both in (False, True)]


def _case(name, b, t, s, h, k, d, options, *, both):
    run = {how: _call(both, options, implementation=how) for how in ("auto", "xla")}
    if name == "256 channels":
        cudnn = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
        )
        run["cudnn"] = _both(cudnn) if both else lambda q, k, v, heads, dout: cudnn(q, k, v)
    return Case(
        kernel="flash_attention",
        name=f"{name}, {'forward and backward' if both else 'forward'} B={b} T={t} S={s} "
        f"H={h}/{k} D={d} bf16",
        make=functools.partial(_make, ((b, t, h, d), (b, s, k, d))),
        run=run,
        flops=(3.5 if both else 1) * 4 * b * h * d * t * (s - (t - 1) / 2),
        bound="bf16",
        bar="≥ 1.0× cuDNN and XLA",
        alternate=True,
    )


def _make(shapes, key):
    queries, keys = shapes
    q, k, v, dout = (
        jax.random.normal(k, shape, jnp.bfloat16)
        for k, shape in zip(jax.random.split(key, 4), (queries, keys, keys, queries), strict=True)
    )
    heads_H = 2.0 ** -jnp.linspace(1, 8, queries[2])
    return q, k, v, heads_H, dout


def _call(both, options, **how):
    def attend(q, k, v, heads_H):
        more = {
            "softcap": options.get("softcap"),
            "sinks_H": heads_H if "sinks" in options else None,
            "bias": heads_H if "slopes" in options else None,
        }
        return flash_attention(q, k, v, **more, **how)

    if not both:
        return lambda q, k, v, heads_H, dout: attend(q, k, v, heads_H)

    def gradients(q, k, v, heads_H, dout):
        return _both(lambda q, k, v: attend(q, k, v, heads_H))(q, k, v, heads_H, dout)

    return gradients


def _both(attend):
    def both(q, k, v, heads_H, dout):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    return both
