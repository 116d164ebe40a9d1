"""Chapter 1: embedding and the first matmul.

Shapes: B batch, T time, C channels, V vocabulary, I inputs, O outputs, S positions.
"""

# ruff: noqa: F401 (the TODOs use the imports)

import jax
import jax.numpy as jnp


def linear(x_BTI, kernel_IO, bias_O):
    """Return x W + b, of shape (B, T, O)."""
    raise NotImplementedError("TODO: one matmul and one addition")


def embed_by_matmul(tokens_BT, wte_VC):
    """Return the embedding of each token as a matmul: onehot(token) W, of shape (B, T, C)."""
    raise NotImplementedError("TODO: jax.nn.one_hot, then a matmul")


def embed(tokens_BT, wte_VC, wpe_SC):
    """Return wte[token] + wpe[position], of shape (B, T, C). Position t is the t-th of a row."""
    raise NotImplementedError("TODO: index wte with the tokens, and slice wpe")


def unembed(x_BTC, wte_VC):
    """Return the logits: the dot product of x with the embedding of each token, (B, T, V)."""
    raise NotImplementedError("TODO: a matmul with the transposed wte")
