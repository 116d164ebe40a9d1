"""Llama 3 (Grattafiori et al., "The Llama 3 Herd of Models", 2024).

`python -m gptjax.bench profile` names the parts of a step by the `jax.named_scope`s.

Shapes: B batch, T time, C channels (n_embd), H query heads, K key and value heads, D = C/H,
E = D/2, F channels of the MLP (n_inner), P padded vocabulary.
"""

import dataclasses
import functools
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from gptjax.fields import NonNegativeFloat, PositiveInt, Range
from gptjax.models.base import Model, TransformerConfig
from gptjax.models.blocks import Norm, PendingResidual, PreNormBlock, run_blocks
from gptjax.models.layers import (
    KVCache,
    Linear,
    attention_pattern,
    lookup,
    normal,
    rotary_angles,
    segment_positions,
)
from gptjax.models.record import record, recording
from gptjax.optim import Group, Matrices
from pallas_kernels import flash_attention, linear, rotary_qkv, swiglu
from pallas_kernels.gemm import Operand

INIT_STD = 0.02
# Llama 3.1 divides frequencies of fewer than LOW turns within the original length by the factor.
# Frequencies of more than HIGH turns are unchanged; between LOW and HIGH, it interpolates.
LOW_TURNS, HIGH_TURNS = 1.0, 4.0
AtLeastOne = Annotated[float, Range("at least 1 and finite", 1.0, float(np.finfo(np.float32).max))]


@dataclasses.dataclass(frozen=True)
class Llama3Config(TransformerConfig):
    """Shape, precision and kernel choices of a Llama 3.

    Raises:
        ValueError: the errors of `ModelConfig`; a number of heads that is not a multiple of the
            number of key and value heads; an odd head dimension; a rope or norm option out of
            range.
    """

    n_kv_head: PositiveInt | None = None
    """Key and value heads; must divide n_head. None: n_head; this number is stored."""
    n_inner: PositiveInt | None = None
    """Channels of the MLP. None: 8/3 · n_embd, rounded up to a multiple of 128; this number is
    stored."""
    tie_embeddings: bool = False
    """Use the token embedding as the output layer."""
    norm_eps: NonNegativeFloat = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: AtLeastOne = 500_000.0
    """Base of the rotary embedding's wavelengths."""
    rope_scaling: AtLeastOne = 1.0
    """Llama 3.1's factor for a context longer than rope_original_length; 1 for none. Llama 3.1 has
    8, Llama 3.2 has 32."""
    rope_original_length: PositiveInt = 8192
    """Sequence length of the model before the extension by rope_scaling."""

    def build(self, rngs: nnx.Rngs) -> "Llama3":
        return Llama3(self, rngs=rngs)

    def parameter_groups(self) -> tuple[Group, ...]:
        return (
            Group(r"blocks\.\d+\.(attn\.(q|k|v|o)|mlp\.(gate|up|down))\.kernel", Matrices()),
            Group(r"wte|lm_head"),
            Group(r".*\.scale", weight_decay=0.0),
        )

    def with_few_layers(self) -> "Llama3Config":
        return dataclasses.replace(self, n_layer=1)

    def lookup_params(self) -> int:
        return 0 if self.tie_embeddings else self.vocab_size * self.n_embd

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.n_kv_head

    def __post_init__(self):
        super().__post_init__()
        if self.n_kv_head is None:
            object.__setattr__(self, "n_kv_head", self.n_head)
        if self.n_inner is None:
            object.__setattr__(self, "n_inner", -(-8 * self.n_embd // 384) * 128)
        if self.n_head % self.kv_heads:
            raise ValueError(
                f"Llama3Config: n_head={self.n_head} is not a multiple of "
                f"n_kv_head={self.n_kv_head}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"Llama3Config: n_embd/n_head = {self.head_dim} is odd: the rotary embedding "
                "rotates pairs of channels"
            )


PRESETS: dict[str, Llama3Config] = {
    # GPT-2 124M's depth, width, number of heads and, within 0.3 %, number of parameters.
    "llama3-124m": Llama3Config(n_kv_head=4, n_inner=2432, tie_embeddings=True),
    # Llama 3.2 1B with GPT-2's vocabulary.
    "llama3-1b": Llama3Config(
        n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, n_inner=8192, tie_embeddings=True
    ),
}


def frequencies(config: Llama3Config) -> np.ndarray:
    """Return the angle per position of each pair of channels, (E,) in fp64 (Su et al., 2021).

    The angles are theta^(−2i/D). With rope_scaling, Llama 3.1 interpolates between these angles and
    the angles divided by the factor.
    """
    f = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    turns = config.rope_original_length * f / (2 * np.pi)
    kept = np.clip((turns - LOW_TURNS) / (HIGH_TURNS - LOW_TURNS), 0, 1)
    return kept * f + (1 - kept) * f / config.rope_scaling


class Attention(nnx.Module):
    """Causal grouped-query self-attention with rotary embeddings (Ainslie et al., 2023)."""

    def __init__(self, config: Llama3Config, *, rngs: nnx.Rngs):
        self.implementation = "reference" if config.attention == "reference" else "auto"
        layer = functools.partial(
            Linear,
            precision=config.precision,
            bias=False,
            implementation=self.implementation,
            rngs=rngs,
        )
        c, d = config.n_embd, config.head_dim
        self.q = layer(c, config.n_head * d, std=INIT_STD)
        self.k = layer(c, config.kv_heads * d, std=INIT_STD)
        self.v = layer(c, config.kv_heads * d, std=INIT_STD)
        layer = functools.partial(layer, numerics=config.precision.output_projection(c))
        self.o = layer(config.n_head * d, c, std=INIT_STD / (2 * config.n_layer) ** 0.5)
        self.config = config

    @jax.named_scope("attention")
    def __call__(
        self,
        x_BTC: Float[Array, "B T C"] | Operand,
        cache: KVCache | None,
        segment_ids_BT: Integer[Array, "B T"] | None,
        angles: tuple[Float[Array, "#B T E"], Float[Array, "#B T E"]],
    ) -> PendingResidual:
        c, precision = self.config, self.config.precision.matmul
        qkv_BTO = linear(
            x_BTC,
            (self.q.kernel[...], self.k.kernel[...], self.v.kernel[...]),
            numerics=c.precision.blocks,
            implementation=self.implementation,
        )
        q_BTHD, k_BTKD, v_BTKD = rotary_qkv(
            qkv_BTO,
            *angles,
            heads=c.n_head,
            key_heads=c.kv_heads,
            pairs="halves",
            implementation=self.implementation,
        )
        if recording(self) and cache is None and segment_ids_BT is None:
            record(self, "pattern", attention_pattern(q_BTHD, k_BTKD))
        if cache is None:
            y_BTHD = flash_attention(
                q_BTHD,
                k_BTKD,
                v_BTKD,
                segment_ids=segment_ids_BT,
                implementation=c.attention,
                precision=precision,
            )
        else:
            how = {"precision": precision, "implementation": self.implementation}
            y_BTHD = cache.attend(q_BTHD, k_BTKD, v_BTKD, **how)
        return PendingResidual(self.o(y_BTHD.reshape(*y_BTHD.shape[:2], c.n_embd)))


class MLP(nnx.Module):
    """SwiGLU (Shazeer, 2020): (silu(x gate) · (x up)) down."""

    def __init__(self, config: Llama3Config, *, rngs: nnx.Rngs):
        layer = functools.partial(Linear, precision=config.precision, bias=False, rngs=rngs)
        c, f = config.n_embd, config.n_inner
        self.gate, self.up = layer(c, f, std=INIT_STD), layer(c, f, std=INIT_STD)
        self.down = layer(f, c, std=INIT_STD / (2 * config.n_layer) ** 0.5)
        self.implementation, self.precision = config.mlp, config.precision

    @jax.named_scope("mlp")
    def __call__(
        self, x_BTC: Float[Array, "B T C"] | Operand, decoding: bool = False
    ) -> PendingResidual:
        # `decoding` changes nothing: the back ends support any number of rows.
        y_BTC = swiglu(
            x_BTC,
            self.gate.kernel[...],
            self.up.kernel[...],
            self.down.kernel[...],
            numerics=self.precision.blocks,
            implementation=self.implementation,
        )
        return PendingResidual(y_BTC)


class Block(PreNormBlock):
    """Llama 3's block: x + attn(norm_1(x)), then x + mlp(norm_2(x))."""

    norms = ("norm_1", "norm_2")

    def __init__(self, config: Llama3Config, *, rngs: nnx.Rngs):
        norm = functools.partial(Norm, config, eps=config.norm_eps, bias=False)
        numerics = config.precision.blocks
        self.norm_1, self.attn = norm(numerics=numerics), Attention(config, rngs=rngs)
        self.norm_2, self.mlp = norm(numerics=numerics), MLP(config, rngs=rngs)


class Llama3(Model):
    """Llama 3: pre-norm blocks of grouped-query attention and SwiGLU, without biases.

    logits = norm(x) · lm_headᵀ, or norm(x) · wteᵀ with `tie_embeddings`. Parameters are wte,
    blocks.i.{norm_1, attn.{q, k, v, o}, norm_2, mlp.{gate, up, down}}, norm and lm_head. Matrices
    start from N(0, 0.02), the two projections into the residual stream (o, down) from
    N(0, 0.02/√(2·n_layer)), RMSNorm from 1. The parameters of a seed do not depend on the padding:
    padded rows of wte and lm_head start at 0.
    """

    Config = Llama3Config

    def __init__(self, config: Llama3Config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.wte = nnx.Param(_embedding(config, rngs))
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.n_layer)])
        self.norm = Norm(config, eps=config.norm_eps, bias=False)
        self.lm_head = None if config.tie_embeddings else nnx.Param(_embedding(config, rngs))

    @jax.named_scope("embedding")
    def embed(self, tokens_BT: Integer[Array, "B T"]) -> Float[Array, "B T C"]:
        """Return wte[token] in the residual stream's dtype. An id outside the vocabulary results in
        NaN."""
        wte_BTC = lookup(self.wte[...], tokens_BT, vocab_size=self.config.vocab_size)
        return wte_BTC.astype(self.config.precision.residual_dtype)

    def hidden(
        self,
        tokens_BT: Integer[Array, "B T"],
        cache: list[KVCache] | None = None,
        segment_ids_BT: Integer[Array, "B T"] | None = None,
    ) -> Float[Array, "B T C"]:
        self.check_tokens(tokens_BT, segment_ids_BT, cache)
        t = tokens_BT.shape[1]
        position_BT = cache[0].positions(t) if cache else jnp.arange(t)[None]
        if segment_ids_BT is not None:
            position_BT = segment_positions(segment_ids_BT)
        angles = rotary_angles(frequencies(self.config), position_BT)
        x_BTC = self.embed(tokens_BT)
        stream = run_blocks(self.config, self.blocks, x_BTC, cache, segment_ids_BT, angles)
        return self.norm.add_norm(*stream)[0]

    def head(self) -> Float[Array, "P C"]:
        return self.wte[...] if self.lm_head is None else self.lm_head[...]


def _embedding(config: Llama3Config, rngs: nnx.Rngs) -> Float[Array, "P C"]:
    dtype, c = config.precision.param_dtype, config.n_embd
    table_VC = normal(rngs.params(), (config.vocab_size, c), std=INIT_STD, dtype=dtype)
    return jnp.pad(table_VC, ((0, config.padded_vocab_size - config.vocab_size), (0, 0)))
