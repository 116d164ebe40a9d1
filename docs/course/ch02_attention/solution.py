"""Chapter 2: attention by hand.

Shapes: B batch, T queries, S keys (as many as queries), C channels, H heads, D head dimension.
"""

import jax.numpy as jnp
from ch01_embedding.solution import linear


def softmax(x):
    """Return exp(x) / Σ exp(x) over the last axis, without overflow."""
    exp = jnp.exp(x - x.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def split_heads(qkv_BTF, heads):
    """Split the output of one projection, q|k|v, into q, k and v, each of shape (B, T, H, D)."""
    batch, time, features = qkv_BTF.shape
    qkv_BT3HD = qkv_BTF.reshape(batch, time, 3, heads, features // (3 * heads))
    return qkv_BT3HD[:, :, 0], qkv_BT3HD[:, :, 1], qkv_BT3HD[:, :, 2]


def causal_attention(q_BTHD, k_BSHD, v_BSHD):
    """Return softmax(q kᵀ / √D) v of each head, where query t sees the keys 0…t.

    Scores and softmax are fp32; the result has the dtype of v.
    """
    time, head_dim = q_BTHD.shape[1], q_BTHD.shape[3]
    scores_BHTS = jnp.einsum("bthd,bshd->bhts", q_BTHD, k_BSHD, preferred_element_type=jnp.float32)
    visible_TS = jnp.arange(time)[:, None] >= jnp.arange(time)[None, :]
    scores_BHTS = jnp.where(visible_TS[None, None], scores_BHTS / head_dim**0.5, -jnp.inf)
    weights_BHTS = softmax(scores_BHTS).astype(v_BSHD.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights_BHTS, v_BSHD)


def attention(x_BTC, params, heads, attend=causal_attention):
    """Return the attention layer: c_attn projects to q, k and v; c_proj mixes the heads.

    `attend` maps q, k and v of shape (B, T, H, D) to the output of each head. Chapter 9 passes
    another function.
    """
    qkv_BTF = linear(x_BTC, params["c_attn"]["kernel"], params["c_attn"]["bias"])
    y_BTHD = attend(*split_heads(qkv_BTF, heads))
    y_BTC = y_BTHD.reshape(x_BTC.shape)
    return linear(y_BTC, params["c_proj"]["kernel"], params["c_proj"]["bias"])
