"""A mixture of experts with sliding-window attention and learned sinks, in one file.

    python train.py --config examples/mixture_of_experts.py
    python -m gptjax.sample runs/moe --config examples/mixture_of_experts.py

The router selects experts for each token (Shazeer et al., 2017). Every expert computes every token:
clear, and slower than a grouped matmul. There is no position embedding.

Shapes: B batch, T time, C channels, H heads, D head dimension, E experts, F channels of an expert.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gptjax.config import Config, OptimizerConfig
from gptjax.models.base import Model, ModelConfig
from gptjax.models.layers import Block, Linear, attention_pattern, lookup, normal
from gptjax.models.record import Metric, record, recording
from gptjax.optim import Group, Matrices
from gptjax.parallel import apply_block
from pallas_kernels import flash_attention, rms_norm


@dataclasses.dataclass(frozen=True)
class MixtureConfig(ModelConfig):
    """Shape, precision and kernel choices."""

    experts: int = 4
    """Experts of a block."""
    active: int = 2
    """Experts that compute a token."""
    window: int = 32
    """Tokens that a query sees, itself included."""

    def build(self, rngs):
        return Mixture(self, rngs=rngs)

    def parameter_groups(self):
        return (
            Group(r"blocks\.\d+\.qkv\.kernel", Matrices(packed=3)),
            Group(r"blocks\.\d+\.out\.kernel", Matrices()),
            Group(r"blocks\.\d+\.(up|down)", Matrices(inputs=(1,), outputs=(2,))),
            Group(r"blocks\.\d+\.router\.kernel"),
            Group("wte"),
            Group(r"blocks\.\d+\.sinks", weight_decay=0.0),
        )


class MixtureBlock(Block):
    """x + attention(norm(x)), then x + Σ_e gate_e · expert_e(norm(x))."""

    def __init__(self, config, *, rngs):
        linear = functools.partial(Linear, precision=config.precision, bias=False, rngs=rngs)
        c, e, f = config.n_embd, config.experts, 2 * config.n_embd
        std, out_std = 0.02, 0.02 / (2 * config.n_layer) ** 0.5
        self.qkv, self.out = linear(c, 3 * c, std=std), linear(c, c, std=out_std)
        self.sinks, self.router = nnx.Param(jnp.zeros(config.n_head)), linear(c, e, std=std)
        up_ECF = normal(rngs.params(), (e, c, f), std=std, dtype=jnp.float32)
        down_EFC = normal(rngs.params(), (e, f, c), std=out_std, dtype=jnp.float32)
        read = {"read_dtype": config.precision.compute_dtype}
        self.up, self.down = nnx.Param(up_ECF, **read), nnx.Param(down_EFC, **read)
        self.config = config

    def __call__(self, x_BTC, cache=None):
        norm = functools.partial(rms_norm, out_dtype=self.config.precision.compute_dtype)
        x_BTC += self.attention(norm(x_BTC), cache).astype(x_BTC.dtype)
        x_BTC += self.mixture(norm(x_BTC)).astype(x_BTC.dtype)
        record(self, "residual", x_BTC)
        return x_BTC

    @jax.named_scope("attention")
    def attention(self, x_BTC, cache):
        c, (b, t, _) = self.config, x_BTC.shape
        qkv_BT3HD = self.qkv(x_BTC).reshape(b, t, 3, c.n_head, c.head_dim)
        q_BTHD, k_BTHD, v_BTHD = jnp.unstack(qkv_BT3HD, axis=2)
        how = {"window": c.window, "sinks_H": self.sinks[...]}
        if recording(self):  # the kernels do not store the pattern
            record(self, "pattern", attention_pattern(q_BTHD, k_BTHD, **how))
        attend = flash_attention if cache is None else cache.attend
        how["precision"] = c.precision.matmul
        return self.out(attend(q_BTHD, k_BTHD, v_BTHD, **how).reshape(x_BTC.shape))

    @jax.named_scope("mlp")
    def mixture(self, x_BTC):
        logits_BTE = self.router(x_BTC).astype(jnp.float32)
        least_BT1 = jax.lax.top_k(logits_BTE, self.config.active)[0][..., -1:]
        gate_BTE = jax.nn.softmax(jnp.where(logits_BTE < least_BT1, -jnp.inf, logits_BTE))
        record(self, "load", (gate_BTE > 0).mean((0, 1)), Metric)
        record(self, "gate", gate_BTE)
        up_ECF, down_EFC = (w[...].astype(x_BTC.dtype) for w in (self.up, self.down))
        einsum = functools.partial(jnp.einsum, precision=self.config.precision.matmul)
        y_BTEF = jax.nn.relu(einsum("btc,ecf->btef", x_BTC, up_ECF)) ** 2
        y_BTEF = y_BTEF * gate_BTE[..., None].astype(y_BTEF.dtype)
        return einsum("btef,efc->btc", y_BTEF, down_EFC)


class Mixture(Model):
    """Decoder-only mixture of experts."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        shape, dtype = (config.padded_vocab_size, config.n_embd), config.precision.param_dtype
        self.wte = nnx.Param(normal(rngs.params(), shape, std=0.02, dtype=dtype))
        self.blocks = nnx.List([MixtureBlock(config, rngs=rngs) for _ in range(config.n_layer)])

    def hidden(self, tokens_BT, cache=None):
        self.check_tokens(tokens_BT)
        x_BTC = lookup(self.wte[...], tokens_BT, vocab_size=self.config.vocab_size)
        x_BTC = x_BTC.astype(self.config.precision.residual_dtype)
        for i, block in enumerate(self.blocks):
            x_BTC = apply_block(MixtureBlock.__call__, block, x_BTC, cache[i] if cache else None)
        return rms_norm(x_BTC, out_dtype=self.config.precision.compute_dtype)

    def head(self):
        return self.wte[...]


def export_activations(model: Model, tokens_BT, file: str) -> None:
    """Write the attention pattern, gates and residual stream of each block to an .npz file."""
    _, seen = nnx.capture(model, nnx.Intermediate)(tokens_BT)
    arrays = {".".join(map(str, path)): x.get_value()[0] for path, x in nnx.to_flat_state(seen)}
    np.savez(file, **{name: np.asarray(x, np.float32) for name, x in arrays.items()})


config = Config(
    name="moe",
    device="auto",
    model=MixtureConfig(vocab_size=257, block_size=128, n_layer=4, n_head=4, n_embd=64),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50),
    dataset="stdlib_byte",
    sequence_length=128,
    batch_tokens=1024,
    micro_batch=8,
    max_steps=500,
    val_tokens=65_536,
)
