"""Chapter 3: the block, and the model.

Shapes: B batch, T time, C channels, V vocabulary.
"""

# ruff: noqa: F401 (the TODOs use the imports)

import jax
import jax.numpy as jnp
from ch01_embedding.solution import embed, linear, unembed
from ch02_attention.solution import attention, causal_attention


def layer_norm(x_BTC, params, eps=1e-5):
    """Return (x − mean) / √(variance + eps) · scale + bias over the channels.

    The arithmetic is fp32; the result has the dtype of x.
    """
    raise NotImplementedError("TODO: mean, variance, scale and bias, in fp32")


def gelu(x):
    """Return the tanh form of GELU: x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))."""
    raise NotImplementedError("TODO: the equation above")


def mlp(x_BTC, params):
    """Return c_proj(gelu(c_fc(x))); c_fc has four times as many outputs as inputs."""
    raise NotImplementedError("TODO: linear, gelu, linear")


def block(x_BTC, params, heads, attend=causal_attention):
    """Add attention(ln_1(x)) to x, then add mlp(ln_2(x)) to the sum."""
    raise NotImplementedError("TODO: two residual additions")


def gpt(params, tokens_BT, heads, attend=causal_attention):
    """Return the logits of GPT-2, of shape (B, T, V)."""
    raise NotImplementedError("TODO: embed, every block, ln_f, unembed")


def init_linear(key, inputs, outputs, std=0.02):
    """Return the parameters of a linear layer: a kernel from N(0, std²) and a bias of zeros."""
    kernel_IO = std * jax.random.normal(key, (inputs, outputs))
    return {"kernel": kernel_IO, "bias": jnp.zeros(outputs)}


def init_norm(config):
    """Return the parameters of a LayerNorm that changes nothing: scale 1 and bias 0."""
    return {"scale": jnp.ones(config.n_embd), "bias": jnp.zeros(config.n_embd)}


def init_block(key, config):
    """Return the parameters of a block.

    The std is 0.02. The two projections into the residual stream have a std of 0.02/√(2·layers):
    the sum of all their outputs then does not grow with the number of layers.
    """
    width, residual_std = config.n_embd, 0.02 / (2 * config.n_layer) ** 0.5
    keys = jax.random.split(key, 4)
    attn = {
        "c_attn": init_linear(keys[0], width, 3 * width),
        "c_proj": init_linear(keys[1], width, width, residual_std),
    }
    mlp = {
        "c_fc": init_linear(keys[2], width, 4 * width),
        "c_proj": init_linear(keys[3], 4 * width, width, residual_std),
    }
    return {"ln_1": init_norm(config), "attn": attn, "ln_2": init_norm(config), "mlp": mlp}


def init(key, config):
    """Return the parameters of GPT-2 for a `gptjax.GPT2Config`, as a nested dict.

    wte (V, C) and wpe (block_size, C) are from N(0, 0.02²); "blocks" is a list; ln_f is the last
    LayerNorm.
    """
    raise NotImplementedError("TODO: split the key: each array needs a key of its own")
