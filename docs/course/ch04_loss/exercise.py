"""Chapter 4: the loss and its gradient.

Shapes: N = B·T tokens, V vocabulary, B batch, T time.
"""

# ruff: noqa: F401 (the TODOs use the imports)

import jax
import jax.numpy as jnp
from ch02_attention.solution import causal_attention, softmax
from ch03_block.solution import gpt


def log_sum_exp(x_NV):
    """Return log Σ exp(x) of each row, without overflow."""
    raise NotImplementedError("TODO: subtract the maximum before exp, and add it after log")


def cross_entropy(logits_NV, targets_N):
    """Return −log softmax(logits)[target] of each row in nats, fp32."""
    raise NotImplementedError("TODO: log-sum-exp minus the logit of the target")


def cross_entropy_gradient(logits_NV, targets_N):
    """Return the gradient of each row's loss: softmax(logits) − onehot(target), fp32."""
    raise NotImplementedError("TODO: softmax minus one-hot")


def loss_fn(params, windows_BT1, heads, attend=causal_attention):
    """Return the mean loss of windows of T + 1 tokens: each token predicts the next one."""
    raise NotImplementedError("TODO: split the windows into inputs and targets")
