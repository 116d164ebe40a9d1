"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

`python -m gptjax.bench profile` names the parts of a step by the `jax.named_scope`s.

Shapes: B batch, T time, C channels (n_embd), H heads, D = C/H, F = 4·C, V real vocabulary, P padded
vocabulary, N = B·T.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from gptjax.models.base import Model, TransformerConfig
from gptjax.models.blocks import Norm, PendingResidual, PreNormBlock, run_blocks
from gptjax.models.layers import (
    KVCache,
    Linear,
    attention_pattern,
    lookup,
    normal,
    segment_positions,
)
from gptjax.models.record import record, recording
from gptjax.optim import Group, Matrices
from pallas_kernels import (
    DecoderCache,
    DecoderWeights,
    decode_step,
    flash_attention_qkv,
    mlp,
    projected_attention,
    select,
)
from pallas_kernels.gemm.operands import Operand, exact

INIT_STD = 0.02


@dataclasses.dataclass(frozen=True)
class GPT2Config(TransformerConfig):
    """Shape, precision and kernel choices of a GPT-2. Errors: see `ModelConfig`."""

    def build(self, rngs: nnx.Rngs) -> "GPT2":
        return GPT2(self, rngs=rngs)

    def parameter_groups(self) -> tuple[Group, ...]:
        return (
            Group(r"blocks\.\d+\.attn\.c_attn\.kernel", Matrices(packed=3)),
            Group(r"blocks\.\d+\.(attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.kernel", Matrices()),
            Group(r"wte|wpe"),
            Group(r".*\.(bias|scale)", weight_decay=0.0),
        )

    def with_few_layers(self) -> "GPT2Config":
        return dataclasses.replace(self, n_layer=1)

    def lookup_params(self) -> int:
        return self.block_size * self.n_embd


PRESETS: dict[str, GPT2Config] = {
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
}


class Attention(nnx.Module):
    """Causal multi-head self-attention; one projection packs q, k and v in that order."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        implementation = "reference" if config.attention == "reference" else "auto"
        linear = functools.partial(
            Linear, precision=config.precision, implementation=implementation, rngs=rngs
        )
        c = config.n_embd
        self.c_attn = linear(c, 3 * c, std=INIT_STD, numerics=config.precision.blocks)
        numerics = config.precision.output_projection(c)
        self.c_proj = linear(c, c, std=INIT_STD / (2 * config.n_layer) ** 0.5, numerics=numerics)
        self.config = config

    @jax.named_scope("attention")
    def __call__(
        self,
        x_BTC: Float[Array, "B T C"] | Operand,
        cache: KVCache | None = None,
        segment_ids_BT: Integer[Array, "B T"] | None = None,
    ) -> PendingResidual:
        c, b, t = self.config, *exact(x_BTC).shape[:2]
        plain, how = cache is None and segment_ids_BT is None, {"precision": c.precision.matmul}
        if recording(self) or not plain:
            qkv_BT3HD = self.c_attn(exact(x_BTC)).reshape(b, t, 3, c.n_head, c.head_dim)
            q_BTHD, k_BTHD, v_BTHD = jnp.unstack(qkv_BT3HD, axis=2)
        if plain:
            if recording(self):
                record(self, "pattern", attention_pattern(q_BTHD, k_BTHD))
            y_BTHD = projected_attention(
                x_BTC,
                self.c_attn.kernel[...],
                self.c_attn.bias[...],
                heads=c.n_head,
                numerics=c.precision.blocks,
                implementation=c.attention,
            )
        elif cache is None:
            how |= {"segment_ids": segment_ids_BT, "implementation": c.attention}
            y_BTHD = flash_attention_qkv(qkv_BT3HD, **how)
        else:
            how["implementation"] = self.c_attn.implementation
            y_BTHD = cache.attend(q_BTHD, k_BTHD, v_BTHD, **how)
        y_BTC = y_BTHD.reshape(b, t, c.n_embd)
        return PendingResidual(self.c_proj.matmul(y_BTC), self.c_proj.bias[...])


class MLP(nnx.Module):
    """C → 4·C → C with the tanh form of GELU."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        linear = functools.partial(Linear, precision=config.precision, rngs=rngs)
        c = config.n_embd
        self.c_fc = linear(c, 4 * c, std=INIT_STD)
        self.c_proj = linear(4 * c, c, std=INIT_STD / (2 * config.n_layer) ** 0.5)
        self.implementation, self.precision = config.mlp, config.precision

    @jax.named_scope("mlp")
    def __call__(
        self, x_BTC: Float[Array, "B T C"] | Operand, decoding: bool = False
    ) -> PendingResidual:
        # The training back end may not support the few rows of one token per sequence.
        implementation = "auto" if decoding else self.implementation
        y_BTC = mlp(
            x_BTC,
            self.c_fc.kernel[...],
            self.c_fc.bias[...],
            self.c_proj.kernel[...],
            numerics=self.precision.blocks,
            implementation=implementation,
        )
        return PendingResidual(y_BTC, self.c_proj.bias[...])


class Block(PreNormBlock):
    """GPT-2's block: x + attn(ln_1(x)), then x + mlp(ln_2(x))."""

    norms = ("ln_1", "ln_2")

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        numerics = config.precision.blocks
        self.ln_1 = Norm(config, numerics=numerics)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = Norm(config, numerics=numerics)
        self.mlp = MLP(config, rngs=rngs)


class GPT2(Model):
    """GPT-2 with a tied head: logits = ln_f(x) · wteᵀ.

    Parameters have Hugging Face's names: wte, wpe, blocks.i.{ln_1, attn, ln_2, mlp}, ln_f.
    wte, wpe and kernels start from N(0, 0.02), the two projections into the residual stream from
    N(0, 0.02/√(2·n_layer)), biases from 0, LayerNorm from 1 and 0. The parameters of a seed do not
    depend on the padding: padded rows of wte start at 0.
    """

    Config = GPT2Config

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        c, v = config.n_embd, config.vocab_size
        embedding = functools.partial(normal, std=INIT_STD, dtype=config.precision.param_dtype)
        wte_VC = embedding(rngs.params(), (v, c))
        self.wte = nnx.Param(jnp.pad(wte_VC, ((0, config.padded_vocab_size - v), (0, 0))))
        self.wpe = nnx.Param(embedding(rngs.params(), (config.block_size, c)))
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.n_layer)])
        self.ln_f = Norm(config)

    @jax.named_scope("embedding")
    def embed(
        self,
        tokens_BT: Integer[Array, "B T"],
        position_BT: Integer[Array, "#B T"] | None = None,
    ) -> Float[Array, "B T C"]:
        """Return wte[token] + wpe[position] in the residual stream's dtype.

        An id outside the vocabulary results in NaN.

        Args:
            position_BT: None: 0…T − 1.
        """
        wte_BTC = lookup(self.wte[...], tokens_BT, vocab_size=self.config.vocab_size)
        if position_BT is None:
            wpe_BTC = self.wpe[...][: tokens_BT.shape[1]][None]
        else:
            wpe_BTC = jnp.take(self.wpe[...], position_BT, axis=0, mode="clip")
        return (wte_BTC + wpe_BTC).astype(self.config.precision.residual_dtype)

    def hidden(
        self,
        tokens_BT: Integer[Array, "B T"],
        cache: list[KVCache] | None = None,
        segment_ids_BT: Integer[Array, "B T"] | None = None,
    ) -> Float[Array, "B T C"]:
        self.check_tokens(tokens_BT, segment_ids_BT, cache)
        position_BT = cache[0].positions(tokens_BT.shape[1]) if cache else None
        if segment_ids_BT is not None:
            position_BT = segment_positions(segment_ids_BT)
        x_BTC = self.embed(tokens_BT, position_BT)
        stream = run_blocks(self.config, self.blocks, x_BTC, cache, segment_ids_BT)
        return self.ln_f.add_norm(*stream)[0]

    def head(self) -> Float[Array, "P C"]:
        return self.wte[...]

    def decode_kernel(self, batch: int, implementation: str = "auto") -> str:
        if type(self) is not GPT2:  # the kernel would ignore changes of a subclass
            return super().decode_kernel(batch, implementation)
        c = self.config
        return select(
            "decode_step",
            implementation,
            arrays=self.wte[...],
            dtype=c.precision.compute_dtype,
            sequences=batch,
            channels=c.n_embd,
            head_dim=c.head_dim,
            precision=c.precision.matmul,
        )

    def start_decoding(self, tokens_BT, length_B, positions, implementation="auto"):
        x_BTC, _, caches = super().start_decoding(tokens_BT, length_B, positions, "xla")
        if self.decode_kernel(len(tokens_BT), implementation) != "triton":
            return x_BTC, None, caches
        t = tokens_BT.shape[1]

        def stacked(of_blocks):
            # XLA writes zeros faster than a stack of padded arrays.
            prompt_LBTHD = jnp.stack([of_block[:, :t] for of_block in of_blocks])
            zeros_LBSHD = jnp.zeros((len(of_blocks), *of_blocks[0].shape), prompt_LBTHD.dtype)
            return zeros_LBSHD.at[:, :, :t].set(prompt_LBTHD)

        k_LBSHD = stacked([cache.k_BSHD for cache in caches])
        v_LBSHD = stacked([cache.v_BSHD for cache in caches])
        return x_BTC, self.decoding_weights("triton"), DecoderCache.of(k_LBSHD, v_LBSHD)

    def decode(self, weights, cache, token_B, length_B, likeliest=False):
        """See `Model.decode`. With weights and `likeliest`, return the likeliest tokens instead."""
        if weights is None:
            return super().decode(weights, cache, token_B, length_B)
        c = self.config
        return decode_step(
            dataclasses.replace(weights, wte_VC=self.wte[...], wpe_SC=self.wpe[...]),
            cache,
            token_B,
            length_B,
            eps=self.ln_f.eps,
            residual_dtype=c.precision.residual_dtype,
            likeliest=likeliest,
            implementation="triton",
        )

    def decoding_weights(self, implementation):
        """See `Model.decoding_weights`: copies, except the embeddings, which `decode` adds."""
        if implementation != "triton":
            return None
        dtype = self.config.precision.compute_dtype

        def vectors(parameter):
            return jnp.stack([parameter(block)[...] for block in self.blocks])

        def matrices(layer):
            return jnp.stack([layer(block).kernel[...].astype(dtype).T for block in self.blocks])

        return DecoderWeights(
            wte_VC=None,
            wpe_SC=None,
            ln_1_scale_LC=vectors(lambda block: block.ln_1.scale),
            ln_1_bias_LC=vectors(lambda block: block.ln_1.bias),
            qkv_LNC=matrices(lambda block: block.attn.c_attn),
            qkv_bias_LN=vectors(lambda block: block.attn.c_attn.bias),
            proj_LCC=matrices(lambda block: block.attn.c_proj),
            proj_bias_LC=vectors(lambda block: block.attn.c_proj.bias),
            ln_2_scale_LC=vectors(lambda block: block.ln_2.scale),
            ln_2_bias_LC=vectors(lambda block: block.ln_2.bias),
            fc_LFC=matrices(lambda block: block.mlp.c_fc),
            fc_bias_LF=vectors(lambda block: block.mlp.c_fc.bias),
            out_LCF=matrices(lambda block: block.mlp.c_proj),
            out_bias_LC=vectors(lambda block: block.mlp.c_proj.bias),
            ln_f_scale_C=self.ln_f.scale[...],
            ln_f_bias_C=self.ln_f.bias[...],
            head_VC=self.head()[: self.config.vocab_size].astype(dtype),
        )
