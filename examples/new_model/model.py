"""A model in one file: RMSNorm, rotary embeddings, ReLU² MLP, no biases, untied head.

`gptjax.models.base` defines what a model must provide. Train this one with

    python train.py --config examples/new_model/config.py

Shapes: B batch, T time, C channels, H heads, D head dimension, P padded vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Integer

from gptjax.models.base import Model, ModelConfig
from gptjax.models.layers import Block, KVCache, Linear, lookup, normal
from gptjax.optim import Group, Matrices
from gptjax.parallel import apply_block
from pallas_kernels import flash_attention, linear_relu_squared, rms_norm


@dataclasses.dataclass(frozen=True)
class RotaryConfig(ModelConfig):
    """Shape, precision and kernel choices."""

    rotary_base: float = 10_000.0
    """Base of the rotary embedding's wavelengths."""

    def build(self, rngs: nnx.Rngs) -> "RotaryLM":
        return RotaryLM(self, rngs=rngs)

    def parameter_groups(self) -> tuple[Group, ...]:
        return (
            Group(r"blocks\.\d+\.qkv\.kernel", Matrices(packed=3)),
            Group(r"blocks\.\d+\.(out|up|down)\.kernel", Matrices()),
            Group(r"wte|lm_head"),
            Group(r".*\.scale", weight_decay=0.0),
        )

    def lookup_params(self) -> int:
        return self.vocab_size * self.n_embd  # wte enters no matmul: the head is untied


class RMSNorm(nnx.Module):
    """y = x / √(mean(x²) + eps) · scale in the compute dtype."""

    def __init__(self, config: RotaryConfig):
        self.scale = nnx.Param(jnp.ones((config.n_embd,), jnp.float32))
        self.out_dtype = config.precision.compute_dtype

    def __call__(self, x_BTC: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        return rms_norm(x_BTC, self.scale[...], out_dtype=self.out_dtype)


def rotary(
    x_BTHD: Float[Array, "B T H D"], position_BT: Int[Array, "#B T"], base: float
) -> Float[Array, "B T H D"]:
    """Rotate pairs of channels by an angle proportional to the position (Su et al., 2021)."""
    half = x_BTHD.shape[-1] // 2
    frequency_D = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BTD = position_BT.astype(jnp.float32)[:, :, None] * frequency_D[None, None]
    cos, sin = jnp.cos(angle_BTD)[:, :, None], jnp.sin(angle_BTD)[:, :, None]
    a, b = jnp.split(x_BTHD.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x_BTHD.dtype)


class RotaryBlock(Block):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: RotaryConfig, *, rngs: nnx.Rngs):
        linear = functools.partial(Linear, precision=config.precision, bias=False, rngs=rngs)
        c, std, out_std = config.n_embd, 0.02, 0.02 / (2 * config.n_layer) ** 0.5
        self.norm_1, self.norm_2 = RMSNorm(config), RMSNorm(config)
        self.qkv, self.out = linear(c, 3 * c, std=std), linear(c, c, std=out_std)
        self.up, self.down = linear(c, 4 * c, std=std), linear(4 * c, c, std=out_std)
        self.config = config

    def __call__(
        self, x_BTC: Float[Array, "B T C"], cache: KVCache | None = None
    ) -> Float[Array, "B T C"]:
        x_BTC = x_BTC + self.attention(self.norm_1(x_BTC), cache).astype(x_BTC.dtype)
        return x_BTC + self.mlp(self.norm_2(x_BTC)).astype(x_BTC.dtype)

    @jax.named_scope("attention")
    def attention(self, x_BTC, cache):
        c = self.config
        qkv_BT3HD = self.qkv(x_BTC).reshape(*x_BTC.shape[:2], 3, c.n_head, c.head_dim)
        q_BTHD, k_BTHD, v_BTHD = jnp.unstack(qkv_BT3HD, axis=2)
        t = x_BTC.shape[1]
        position_BT = jnp.arange(t)[None] if cache is None else cache.positions(t)
        q_BTHD, k_BTHD = (rotary(x, position_BT, c.rotary_base) for x in (q_BTHD, k_BTHD))
        attend = flash_attention if cache is None else cache.attend
        y_BTHD = attend(q_BTHD, k_BTHD, v_BTHD, precision=c.precision.matmul)
        return self.out(y_BTHD.reshape(x_BTC.shape))

    @jax.named_scope("mlp")
    def mlp(self, x_BTC):
        precision = self.config.precision.matmul
        return self.down(linear_relu_squared(x_BTC, self.up.kernel[...], precision=precision))


class RotaryLM(Model):
    """Decoder-only language model."""

    def __init__(self, config: RotaryConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        shape = (config.padded_vocab_size, config.n_embd)
        embedding = functools.partial(normal, std=0.02, dtype=config.precision.param_dtype)
        self.wte = nnx.Param(embedding(rngs.params(), shape))
        self.blocks = nnx.List([RotaryBlock(config, rngs=rngs) for _ in range(config.n_layer)])
        self.norm = RMSNorm(config)
        self.lm_head = nnx.Param(embedding(rngs.params(), shape))

    def hidden(
        self, tokens_BT: Integer[Array, "B T"], cache: list[KVCache] | None = None
    ) -> Float[Array, "B T C"]:
        self.check_tokens(tokens_BT)
        x_BTC = lookup(self.wte[...], tokens_BT, vocab_size=self.config.vocab_size)
        x_BTC = x_BTC.astype(self.config.precision.residual_dtype)
        for i, block in enumerate(self.blocks):
            if cache:
                x_BTC = block(x_BTC, cache[i])
            else:  # Values of `recompute` other than none recompute all except the block's input.
                recompute = self.config.recompute != "none"
                x_BTC = apply_block(RotaryBlock.__call__, block, x_BTC, recompute=recompute)
        return self.norm(x_BTC)

    def head(self) -> Float[Array, "P C"]:
        return self.lm_head[...]
