"""Chapter 7: mixed precision.

Shapes: M, K, N sizes of a matmul, B batch, T time.
"""

# ruff: noqa: F401 (the TODOs use the imports)

import jax
import jax.numpy as jnp
from ch02_attention.solution import causal_attention
from ch04_loss.solution import loss_fn
from ch05_adamw.solution import adamw, clip


def round_to_bf16(x):
    """Return finite fp32 numbers rounded to the nearest bf16 number, as fp32; ties to even.

    bf16 is the upper half of fp32's 32 bits. Adding 0x7FFF, or 0x8000 if the upper half is odd,
    carries into the upper half exactly where the lower half must be rounded up.
    """
    raise NotImplementedError("TODO: jax.lax.bitcast_convert_type to uint32, add, mask, and back")


def matmul_bf16(x_MK, w_KN):
    """Return x w of fp32 arrays: inputs rounded to bf16, products summed and returned in fp32."""
    raise NotImplementedError("TODO: jnp.matmul with preferred_element_type")


def cast(params, dtype):
    """Return the tree with every array in another dtype."""
    raise NotImplementedError("TODO: jax.tree.map")


def loss_bf16(params, windows_BT1, heads, attend=causal_attention):
    """Return the loss of fp32 parameters, with the model computed in bf16.

    The gradient goes back through the cast, so it is fp32, as the parameters are.
    """
    raise NotImplementedError("TODO: cast, then the loss of chapter 4")


def train_step_bf16(params, state, windows_BT1, heads, lr):
    """Return what `train_step` of chapter 5 returns: fp32 parameters, state and loss."""
    loss, grads = jax.value_and_grad(loss_bf16)(params, windows_BT1, heads)
    params, state = adamw(clip(grads), state, params, lr)
    return params, state, loss
