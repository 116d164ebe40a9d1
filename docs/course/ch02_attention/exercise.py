"""Chapter 2: attention by hand.

Shapes: B batch, T queries, S keys (as many as queries), C channels, H heads, D head dimension.
"""

# ruff: noqa: F401 (the TODOs use the imports)

import jax.numpy as jnp
from ch01_embedding.solution import linear


def softmax(x):
    """Return exp(x) / Σ exp(x) over the last axis, without overflow."""
    raise NotImplementedError("TODO: subtract the maximum of each row before exp")


def split_heads(qkv_BTF, heads):
    """Split the output of one projection, q|k|v, into q, k and v, each of shape (B, T, H, D)."""
    raise NotImplementedError("TODO: reshape to (B, T, 3, H, D)")


def causal_attention(q_BTHD, k_BSHD, v_BSHD):
    """Return softmax(q kᵀ / √D) v of each head, where query t sees the keys 0…t.

    Scores and softmax are fp32; the result has the dtype of v.
    """
    raise NotImplementedError("TODO: scores, mask, softmax, weighted sum of the values")


def attention(x_BTC, params, heads, attend=causal_attention):
    """Return the attention layer: c_attn projects to q, k and v; c_proj mixes the heads.

    `attend` maps q, k and v of shape (B, T, H, D) to the output of each head. Chapter 9 passes
    another function.
    """
    raise NotImplementedError("TODO: linear, split_heads, attend, reshape, linear")
