"""Pre-norm transformer blocks, which GPT-2 and Llama 3 share.

The blocks represent the residual stream as a pair (x, pending), whose sum is the stream: the next
norm adds and normalizes in one pass.

Shapes: B batch, T time, C channels.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gptjax.models.base import TransformerConfig
from gptjax.models.layers import Block, KVCache
from gptjax.models.record import record, recording
from gptjax.parallel import apply_block
from pallas_kernels import layer_norm, rms_norm
from pallas_kernels.gemm import Numerics, Operand


class PendingResidual(NamedTuple):
    """Projection output x W and bias, not yet added to the residual stream.

    The next norm adds both in one pass (`Norm.add_norm`). The backward pass of this norm also
    computes the bias's gradient, without another read.
    """

    matmul_BTC: Float[Array, "B T C"]
    bias_C: Float[Array, " C"] | None = None

    def added_to(self, x_BTC: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """Return x + matmul + bias, added in fp32 and rounded once to x's dtype."""
        if self.bias_C is None:
            return x_BTC + self.matmul_BTC.astype(x_BTC.dtype)
        sum_BTC = x_BTC.astype(jnp.float32) + self.matmul_BTC.astype(jnp.float32)
        return (sum_BTC + self.bias_C.astype(jnp.float32)[None, None]).astype(x_BTC.dtype)


class Norm(nnx.Module):
    """LayerNorm over the last axis, or RMSNorm without `bias`, in the compute dtype.

        y = (x − mean)/√(var + eps) · scale + bias      y = x/√(mean(x²) + eps) · scale

    The variance is biased, statistics are fp32.

    Args:
        numerics: of the matmul that reads y; with FP8, y is its `Operand`. None: y is an array.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        numerics: str | Numerics | None = None,
    ):
        self.scale = nnx.Param(jnp.ones((config.n_embd,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((config.n_embd,), jnp.float32)) if bias else None
        self.eps, self.out_dtype = eps, config.precision.compute_dtype
        self.implementation = config.norm
        self.numerics = numerics

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"] | Operand:
        return self.norm(x)

    def add_norm(
        self, x_BTC: Float[Array, "B T C"], pending: PendingResidual | None
    ) -> tuple[Float[Array, "B T C"] | Operand, Float[Array, "B T C"]]:
        """Return the normalized sum of x and the pending residual, and the sum, from one pass."""
        if pending is None:
            return self(x_BTC), x_BTC
        bias = {} if pending.bias_C is None else {"residual_bias": pending.bias_C}
        return self.norm(x_BTC, residual=pending.matmul_BTC.astype(x_BTC.dtype), **bias)

    @jax.named_scope("norm")
    def norm(self, x, **residual):
        how = {"eps": self.eps, "out_dtype": self.out_dtype, "implementation": self.implementation}
        how["numerics"] = self.numerics
        # Indexing by `...` reads a parameter's array.
        if self.bias is None:
            return rms_norm(x, self.scale[...], **how, **residual)
        return layer_norm(x, self.scale[...], self.bias[...], **how, **residual)


class PreNormBlock(Block):
    """Transformer block: x + attn(norm_1(x), …), then x + mlp(norm_2(x)).

    A subclass defines the norms, `attn` and `mlp`, which return a `PendingResidual`.

    Attributes:
        norms: the names of the two norms.
    """

    norms: ClassVar[tuple[str, str]]

    def attention_sublayer(self, x_BTC, pending, cache=None, *args):
        """Return x + pending, and attn(norm_1(x + pending)) as the next pending residual."""
        y_BTC, x_BTC = getattr(self, self.norms[0]).add_norm(x_BTC, pending)
        return x_BTC, self.attn(y_BTC, cache, *args)

    def mlp_sublayer(self, x_BTC, pending, cache=None, *args):
        """Return x + pending, and mlp(norm_2(x + pending)) as the next pending residual."""
        y_BTC, x_BTC = getattr(self, self.norms[1]).add_norm(x_BTC, pending)
        return x_BTC, self.mlp(y_BTC, decoding=cache is not None)

    def sublayers(
        self, x_BTC: Float[Array, "B T C"], pending: PendingResidual | None, *args: Any
    ) -> tuple[Float[Array, "B T C"], PendingResidual]:
        """Return `mlp_sublayer` of `attention_sublayer` of (x, pending).

        Args:
            args: the block's cache or None, and further arguments of `attn`.
        """
        return self.mlp_sublayer(*self.attention_sublayer(x_BTC, pending, *args), *args)


def run_blocks(
    config: TransformerConfig,
    blocks: Sequence[PreNormBlock],
    x_BTC: Float[Array, "B T C"],
    caches: Sequence[KVCache] | None,
    *args: Any,
) -> tuple[Float[Array, "B T C"], PendingResidual | None]:
    """Return the residual stream after the blocks, as a pair.

    Record the stream after each block as `residual`.

    Args:
        args: arguments of each block's `attn` after the cache.
    """
    pending, recompute = None, config.recompute != "none" and not caches
    for i, block in enumerate(blocks):
        kind, cache = type(block), caches[i] if caches else None
        by_sublayer = recompute and config.recompute == "sublayer"
        parts = [kind.attention_sublayer, kind.mlp_sublayer] if by_sublayer else [kind.sublayers]
        for part in parts:
            how = {"recompute": recompute}
            x_BTC, pending = apply_block(part, block, x_BTC, pending, cache, *args, **how)
            if recompute:  # from the sum x + pending: storing the pair would take two arrays
                x_BTC, pending = pending.added_to(x_BTC), None
        if recording(block):
            record(block, "residual", x_BTC if pending is None else pending.added_to(x_BTC))
    return x_BTC, pending
