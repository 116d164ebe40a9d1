"""Chapter 4: the loss and its gradient.

Shapes: N = B·T tokens, V vocabulary, B batch, T time.
"""

import jax
import jax.numpy as jnp
from ch02_attention.solution import causal_attention, softmax
from ch03_block.solution import gpt


def log_sum_exp(x_NV):
    """Return log Σ exp(x) of each row, without overflow."""
    max_N = x_NV.max(axis=-1)
    return max_N + jnp.log(jnp.exp(x_NV - max_N[:, None]).sum(axis=-1))


def cross_entropy(logits_NV, targets_N):
    """Return −log softmax(logits)[target] of each row in nats, fp32."""
    logits_NV = logits_NV.astype(jnp.float32)
    target_logits_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=1)[:, 0]
    return log_sum_exp(logits_NV) - target_logits_N


def cross_entropy_gradient(logits_NV, targets_N):
    """Return the gradient of each row's loss: softmax(logits) − onehot(target), fp32."""
    logits_NV = logits_NV.astype(jnp.float32)
    return softmax(logits_NV) - jax.nn.one_hot(targets_N, logits_NV.shape[1], dtype=jnp.float32)


def loss_fn(params, windows_BT1, heads, attend=causal_attention):
    """Return the mean loss of windows of T + 1 tokens: each token predicts the next one."""
    tokens_BT, targets_BT = windows_BT1[:, :-1], windows_BT1[:, 1:]
    logits_BTV = gpt(params, tokens_BT, heads, attend)
    logits_NV = logits_BTV.reshape(-1, logits_BTV.shape[-1])
    return cross_entropy(logits_NV, targets_BT.reshape(-1)).mean()
