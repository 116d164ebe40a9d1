"""Chapter 3: the block, and the model.

Shapes: B batch, T time, C channels, V vocabulary.
"""

import jax
import jax.numpy as jnp
from ch01_embedding.solution import embed, linear, unembed
from ch02_attention.solution import attention, causal_attention


def layer_norm(x_BTC, params, eps=1e-5):
    """Return (x − mean) / √(variance + eps) · scale + bias over the channels.

    The arithmetic is fp32; the result has the dtype of x.
    """
    x32_BTC = x_BTC.astype(jnp.float32)
    scale_C, bias_C = params["scale"].astype(jnp.float32), params["bias"].astype(jnp.float32)
    centered_BTC = x32_BTC - x32_BTC.mean(axis=-1, keepdims=True)
    variance_BT1 = jnp.square(centered_BTC).mean(axis=-1, keepdims=True)
    y_BTC = centered_BTC / jnp.sqrt(variance_BT1 + eps)
    return (y_BTC * scale_C[None, None] + bias_C[None, None]).astype(x_BTC.dtype)


def gelu(x):
    """Return the tanh form of GELU: x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))."""
    return 0.5 * x * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3)))


def mlp(x_BTC, params):
    """Return c_proj(gelu(c_fc(x))); c_fc has four times as many outputs as inputs."""
    h_BTF = gelu(linear(x_BTC, params["c_fc"]["kernel"], params["c_fc"]["bias"]))
    return linear(h_BTF, params["c_proj"]["kernel"], params["c_proj"]["bias"])


def block(x_BTC, params, heads, attend=causal_attention):
    """Add attention(ln_1(x)) to x, then add mlp(ln_2(x)) to the sum."""
    x_BTC = x_BTC + attention(layer_norm(x_BTC, params["ln_1"]), params["attn"], heads, attend)
    return x_BTC + mlp(layer_norm(x_BTC, params["ln_2"]), params["mlp"])


def gpt(params, tokens_BT, heads, attend=causal_attention):
    """Return the logits of GPT-2, of shape (B, T, V)."""
    x_BTC = embed(tokens_BT, params["wte"], params["wpe"])
    for block_params in params["blocks"]:
        x_BTC = block(x_BTC, block_params, heads, attend)
    return unembed(layer_norm(x_BTC, params["ln_f"]), params["wte"])


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
    wte_key, wpe_key, *block_keys = jax.random.split(key, 2 + config.n_layer)
    return {
        "wte": 0.02 * jax.random.normal(wte_key, (config.vocab_size, config.n_embd)),
        "wpe": 0.02 * jax.random.normal(wpe_key, (config.block_size, config.n_embd)),
        "blocks": [init_block(key, config) for key in block_keys],
        "ln_f": init_norm(config),
    }
