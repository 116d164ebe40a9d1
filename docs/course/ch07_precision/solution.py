"""Chapter 7: mixed precision.

Shapes: M, K, N sizes of a matmul, B batch, T time.
"""

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
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    upper_is_odd = (bits >> 16) & 1
    bits = (bits + 0x7FFF + upper_is_odd) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def matmul_bf16(x_MK, w_KN):
    """Return x w of fp32 arrays: inputs rounded to bf16, products summed and returned in fp32."""
    return jnp.matmul(
        x_MK.astype(jnp.bfloat16), w_KN.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    )


def cast(params, dtype):
    """Return the tree with every array in another dtype."""
    return jax.tree.map(lambda p: p.astype(dtype), params)


def loss_bf16(params, windows_BT1, heads, attend=causal_attention):
    """Return the loss of fp32 parameters, with the model computed in bf16.

    The gradient goes back through the cast, so it is fp32, as the parameters are.
    """
    return loss_fn(cast(params, jnp.bfloat16), windows_BT1, heads, attend)


def train_step_bf16(params, state, windows_BT1, heads, lr):
    """Return what `train_step` of chapter 5 returns: fp32 parameters, state and loss."""
    loss, grads = jax.value_and_grad(loss_bf16)(params, windows_BT1, heads)
    params, state = adamw(clip(grads), state, params, lr)
    return params, state, loss
