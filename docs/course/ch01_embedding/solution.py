"""Chapter 1: embedding and the first matmul.

Shapes: B batch, T time, C channels, V vocabulary, I inputs, O outputs, S positions.
"""

import jax
import jax.numpy as jnp


def linear(x_BTI, kernel_IO, bias_O):
    """Return x W + b, of shape (B, T, O)."""
    return x_BTI @ kernel_IO + bias_O[None, None, :]


def embed_by_matmul(tokens_BT, wte_VC):
    """Return the embedding of each token as a matmul: onehot(token) W, of shape (B, T, C)."""
    onehot_BTV = jax.nn.one_hot(tokens_BT, wte_VC.shape[0], dtype=wte_VC.dtype)
    return onehot_BTV @ wte_VC


def embed(tokens_BT, wte_VC, wpe_SC):
    """Return wte[token] + wpe[position], of shape (B, T, C). Position t is the t-th of a row."""
    time = tokens_BT.shape[1]
    return wte_VC[tokens_BT] + wpe_SC[None, :time]


def unembed(x_BTC, wte_VC):
    """Return the logits: the dot product of x with the embedding of each token, (B, T, V)."""
    return jnp.einsum("btc,vc->btv", x_BTC, wte_VC)
