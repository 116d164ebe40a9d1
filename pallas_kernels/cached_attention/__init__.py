"""Attention of a few queries to the keys and values of a cache.

For query t of T of a sequence with L valid keys, at position p = L − T + t:

    S_ts = scale · Q_t · K_s      Z = softcap · tanh(S / softcap), or S
    P_ts = exp(Z_ts) / (exp(sink) + Σ_s exp(Z_ts)) where p − window < s ≤ p, else 0      O = P V

The last T of the L keys are those of the queries. A query without a key, at a negative position,
has the output 0.

Shapes: B batch, T queries, S positions of the cache, H query heads, K key and value heads, D head
dimension, G = H/K. Query head h uses key head h // G.

Library: the KV caches of generation (`gptjax.models.layers.KVCache`).

Back ends:
    triton: flash decoding. Several programs share the valid keys of a sequence, and read no other
        keys. True fp32 in fp32. NVIDIA GPUs from Ampere on; at most 16 queries of a sequence.
    xla: plain JAX that reads the entire cache and stores S; any device. The keys and values after
        the valid ones must be finite.
    reference: the definition, in fp32; any device.
triton is not differentiable. xla and reference are, also in forward mode and to any order.
"""

import dataclasses
import functools
from typing import Literal, SupportsIndex

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, TRITON, XLA
from pallas_kernels._partition import Rule
from pallas_kernels._types import Array, Float, Integer
from pallas_kernels.attention import flash_attention
from pallas_kernels.attention import reference as attention_reference
from pallas_kernels.attention.arguments import check, with_hints
from pallas_kernels.attention.masks import Masks, Options

Implementation = Literal["auto", "triton", "xla", "reference"]
NO_DERIVATIVE = "this back end has no derivative; pass implementation='xla'"


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a call on which the choice of a back end depends."""

    queries: int
    head_dim: int


def _why_not_triton(facts: Facts) -> str | None:
    if facts.queries > 16:
        return f"supports at most 16 queries of a sequence, not {facts.queries}"
    if facts.head_dim > 256:
        return f"supports a head dimension of at most 256, not {facts.head_dim}"
    return TRITON.why_not(facts)


_dispatch.register(
    "cached_attention",
    back_ends=[dataclasses.replace(TRITON, why_not=_why_not_triton, rule=True), XLA, REFERENCE],
    facts=Facts,
)


@with_hints
def cached_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKD: Float[Array, "B S K D"],
    lengths_B: Integer[Array, " B"],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Float[Array, " H"] | None = None,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B T H D"]:
    """Causal attention of the last T tokens of each sequence to a cache of keys and values.

    Args:
        q_BTHD, k_BSKD, v_BSKD: queries and caches of one dtype: fp32, bf16 or fp16. H is a multiple
            of K.
        lengths_B: number of valid keys of each sequence, at most S, those of the T queries
            included.
        scale: multiplies Q·K; 1/√D when None.
        window: a query sees only the last `window` keys up to its own. None: all.
        softcap: upper bound of the absolute scores; None: no bound.
        sinks_H: a logit of each head, the score of a key with the value 0; None: no sinks.
        implementation: "auto", or a back end: "triton", "xla", "reference". Derivatives need "xla"
            or "reference".
        precision: precision of fp32 matmuls in "xla", as in `jax.lax.dot`.

    Returns:
        O, with the shape and dtype of `q_BTHD`.

    Raises:
        ValueError: wrong shapes, dtypes or options, or the named back end cannot run this call.
        TypeError: an option that is passed by position, or that another library has.

    Examples:
        >>> k_BSKD = jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(
        ...     k_BSKD, new_k_BTKD, lengths_B)  # and v_BSKD
        >>> caches = k_BSKD, v_BSKD, lengths_B + q_BTHD.shape[1]
        >>> o_BTHD = cached_attention(q_BTHD, *caches)
        >>> cached_attention(q_BTHD, *caches, scale=1.0, softcap=50.0)  # Gemma 2
        >>> cached_attention(q_BTHD, *caches, window=128, sinks_H=sinks)  # gpt-oss
        >>> cached_attention(q_BTHD, *caches, precision="highest", implementation="xla")
    """
    _check(q_BTHD, k_BSKD, v_BSKD, lengths_B, window, softcap, sinks_H)
    (t, h, d), k = q_BTHD.shape[1:], k_BSKD.shape[2]
    arrays = (q_BTHD, k_BSKD, v_BSKD, lengths_B, sinks_H)
    facts = {"queries": t, "head_dim": d}
    backend = _dispatch.select("cached_attention", implementation, arrays=arrays, **facts)
    lengths_B = lengths_B.astype(jnp.int32)
    how = {"scale": d**-0.5 if scale is None else float(scale), "softcap": softcap}
    if backend == "triton":
        from pallas_kernels.cached_attention import triton

        window = k_BSKD.shape[1] if window is None else min(window, k_BSKD.shape[1])
        f = functools.partial(triton.cached_attention, window=window, **how)
        rule = Rule("b* t k g d, b* s k d, b* s k d, b*, k g -> b* t k g d", over="b* k")
        launch = _calls.batched("cached_attention", f, rule=rule)
        q_BTKGD = q_BTHD.reshape(*q_BTHD.shape[:2], k, h // k, d)
        sinks_KG = None if sinks_H is None else sinks_H.reshape(k, h // k)
        args = (q_BTKGD, k_BSKD, v_BSKD, lengths_B, sinks_KG)
        args = _calls.once("cached_attention", args, NO_DERIVATIVE)
        return launch(*args).reshape(q_BTHD.shape)
    q_k_v, how = (q_BTHD, k_BSKD, v_BSKD), how | {"window": window, "sinks_H": sinks_H}
    if backend == "reference":
        return reference(*q_k_v, lengths_B, **how).astype(q_BTHD.dtype)
    f = functools.partial(flash_attention, precision=precision, implementation="xla")
    return _in_jax(f, *q_k_v, lengths_B, **how)


def reference(q_BTHD, k_BSKD, v_BSKD, lengths_B, **options):
    """Compute the definition in fp32 for every dtype. Return fp32."""
    return _in_jax(attention_reference, q_BTHD, k_BSKD, v_BSKD, lengths_B, **options)


# ------------------------------------------------------------------------------------ in plain JAX


def _in_jax(f, q_BTHD, k_BSKD, v_BSKD, lengths_B, *, window=None, **options):
    """Call `flash_attention` with the range of keys that each query sees."""
    t = q_BTHD.shape[1]
    last_BT = lengths_B[:, None] - t + jnp.arange(t, dtype=jnp.int32)[None]
    first_BT = jnp.zeros_like(last_BT) if window is None else last_BT - (window - 1)
    key_range = first_BT, last_BT
    return f(q_BTHD, k_BSKD, v_BSKD, causal=False, key_range=key_range, **options)


# ------------------------------------------------------------------------------------------ checks


def _check(q_BTHD, k_BSKD, v_BSKD, lengths_B, window, softcap, sinks_H):
    arrays = q_BTHD, k_BSKD, v_BSKD
    check("cached_attention", *arrays, Options(softcap=softcap), Masks(None), sinks_H)
    integers = jnp.issubdtype(lengths_B.dtype, jnp.integer)
    if not (k_BSKD.shape == v_BSKD.shape and lengths_B.shape == q_BTHD.shape[:1] and integers):
        raise ValueError(
            "cached_attention: expected k and v of one shape and lengths (batch,) in integers, got "
            f"{k_BSKD.shape}, {v_BSKD.shape}, and {lengths_B.shape} in {lengths_B.dtype}"
        )
    if window is not None and not (isinstance(window, SupportsIndex) and window >= 1):
        raise ValueError(f"cached_attention: expected a window of at least 1, got {window}")


# ----------------------------------------------------------------------------------------- examples


def _example(rows, dtype, queries, head_dim, **options):
    """Return a call for 8 sequences of any lengths in a cache of `rows` positions in total."""
    b = max(1, min(8, rows // 16))
    s = max(rows // b, queries)

    def of(f):
        def call(q_BTHD, k_BSKD, v_BSKD, x_B, sinks_H, **how):
            lengths_B = queries + x_B * 997 % (s - queries + 1)
            return f(q_BTHD, k_BSKD, v_BSKD, lengths_B, sinks_H=sinks_H, **options, **how)

        return call

    caches = [jax.ShapeDtypeStruct((b, s, 2, head_dim), dtype)] * 2
    arrays = (
        jax.ShapeDtypeStruct((b, queries, 8, head_dim), dtype),
        *caches,
        jax.ShapeDtypeStruct((b,), jnp.int32),
        jax.ShapeDtypeStruct((8,), jnp.float32),
    )
    return _dispatch.Example(of(cached_attention), of(reference), arrays, differentiable=False)


@_dispatch.example("cached_attention")
def _one_query_example(rows, dtype):
    """One query of each sequence, with sinks."""
    return _example(rows, dtype, 1, 128)


@_dispatch.example("cached_attention")
def _several_queries_example(rows, dtype):
    """Five queries, a window and a soft cap: the rows of several queries share a tile."""
    return _example(rows, dtype, 5, 64, window=100, softcap=20.0)


@_dispatch.example("cached_attention")
def _head_dim_256_example(rows, dtype):
    """Sixteen queries in the largest heads: they need the most registers."""
    return _example(rows, dtype, 16, 256)
