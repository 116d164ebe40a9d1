"""Flash attention in plain JAX, and in cuDNN through JAX.

Shapes: B batch, T queries, S keys, K key heads, G query heads of a key head, D, E head dimensions.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attention.documents import Ranges
from pallas_kernels.attention.masks import visible


def in_cudnn(options, q_BTHD, k_BSKD, v_BSKE):
    return jax.nn.dot_product_attention(
        q_BTHD,
        k_BSKD,
        v_BSKE,
        scale=options.scale,
        is_causal=options.causal,
        local_window_size=None if options.window is None else (options.window - 1, 0),
        implementation="cudnn",
    )


def materialized(options, q_BTHD, k_BSKD, v_BSKE, bounds, bias):
    b, t, h, d = q_BTHD.shape
    _, s, groups, e = v_BSKE.shape
    q_BTKGD = q_BTHD.reshape(b, t, groups, h // groups, d)
    fp32_sums = {"precision": options.precision, "preferred_element_type": jnp.float32}
    scores_BKGTS = jnp.einsum("btkgd,bskd->bkgts", q_BTKGD, k_BSKD, **fp32_sums) * options.scale
    if options.softcap is not None:
        scores_BKGTS = options.softcap * jnp.tanh(scores_BKGTS / options.softcap)
    if bias is not None:
        bias_BKGTS = _bias(options, bias, t, s, groups, h // groups)
        scores_BKGTS = jnp.where(bias_BKGTS == -jnp.inf, -jnp.inf, scores_BKGTS + bias_BKGTS)
    visible_BTS = visible(options, t, s, bounds)
    if visible_BTS is not None:
        scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, -jnp.inf)
    if may_be_empty := isinstance(bounds, Ranges) or bias is not None:
        empty_BKGT1 = (scores_BKGTS == -jnp.inf).all(-1, keepdims=True)
        scores_BKGTS = jnp.where(empty_BKGT1, 0, scores_BKGTS)
    lse_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKE.dtype)
    if may_be_empty:
        lse_BKGT = jnp.where(empty_BKGT1[..., 0], -jnp.inf, lse_BKGT)
        weights_BKGTS = jnp.where(empty_BKGT1, 0, weights_BKGTS)
    out_BTKGE = jnp.einsum("bkgts,bskd->btkgd", weights_BKGTS, v_BSKE, precision=options.precision)
    return out_BTKGE.reshape(b, t, h, e), lse_BKGT.reshape(b, h, t)


def exact(options, q_BTHD, k_BSKD, v_BSKE, bounds, bias):
    """Compute `materialized` in fp32 with true fp32 matmuls. Return fp32."""
    options = dataclasses.replace(options, precision=jax.lax.Precision.HIGHEST)
    qkv = (x.astype(jnp.float32) for x in (q_BTHD, k_BSKD, v_BSKE))
    return materialized(options, *qkv, bounds, bias)


def _bias(options, bias, queries, keys, groups, members):
    """Return the bias of the scores in fp32: B·K·G·T·S, with axes of 1 for broadcast axes."""
    bias = bias.astype(jnp.float32)
    if bias.ndim == 1:
        distance_TS = jnp.arange(keys)[None] - jnp.arange(queries)[:, None] - options.start
        return (
            bias.reshape(1, groups, members, 1, 1)
            * distance_TS.astype(jnp.float32)[None, None, None]
        )
    batch, heads = bias.shape[:2]
    grouped = (1, 1) if heads == 1 else (groups, members)
    return bias.reshape(batch, *grouped, queries, keys)
