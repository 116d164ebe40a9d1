"""The model of the modded-nanogpt speedrun as of its pull request #233 (February 2026).

Each idea is a function of this file; `Speedrun.hidden` applies them in order. From layer
`lanes_from` on there are two residual streams: attention reads lane 0, the MLP lane 1.

Banks. The matrices of all layers are one parameter, (layer, …, output, input), `mlp_out` (layer,
input, output). A bank is split once per pass, so the gradient of the split is one concatenation.

Stages. A stage of the schedule is `dataclasses.replace(config, stage=…)` with the same parameters.
Its windows and the rotary embedding, which is rescaled when the long window grows, are static. The
weights of multi-token prediction may change at every step: they are an argument of `losses`.

Tying. `embed` and `lm_head` are two parameters in every stage. `tied_parameters` lists the pairs
(source, copy) of a stage: the step adds the copy's transposed gradient to the source's, updates the
source, and writes sourceᵀ to the copy. When a run unties them, the copy's moments become the
transposed moments of the source.

Documents are the segments of `Model.hidden`. Attention does not cross them; the smear, the bigrams,
the key offset and the targets do. Positions do not restart: attention depends on their differences.

Shapes: B batch, T time, C channels, H heads, D = C/H, E = D/4, G channels of a gate, F channels of
the MLP, V real vocabulary, P padded vocabulary, L layers, K predicted tokens.
"""

import dataclasses
import functools
import itertools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from gptjax.fields import PositiveInt
from gptjax.models.base import Model, TransformerConfig
from gptjax.models.layers import (
    lookup,
    next_targets,
    normal,
    rotary_angles,
    rounded,
    scalars,
    split_bank,
    weighted_sum,
)
from gptjax.optim import Group, Matrices
from pallas_kernels import flash_attention, linear, rms_norm
from pallas_kernels.classifier import Loss, SigmoidCap, apply_softcap, checked, to_int32
from pallas_kernels.feed_forward import activated_mlp
from pallas_kernels.gemm import Numerics, Operand
from pallas_kernels.gemm.operands import exact
from pallas_kernels.rotary import rotary_qkv

BTC, BTHD = Float[Array, "B T C"], Float[Array, "B T H D"]
GATE = 12
"""Channels that a gate reads."""
SOFTCAP = SigmoidCap(scale=23.0, shift=5.0, width=7.5)
EPS = float(np.finfo(np.float32).eps)
"""Added to mean squares: PyTorch's default."""


class Stage(NamedTuple):
    """Static properties of the model that change during a run. Windows are in tokens."""

    short_window: int = 6 * 128
    """Number of earlier tokens to which a query attends."""
    long_window: int = 13 * 128
    """Number of earlier tokens to which a query in `long_layers` attends."""
    rotary_windows: tuple[int, ...] = (3 * 128, 7 * 128, 11 * 128, 13 * 128)
    """Long windows of the stages so far. The rotary embedding is rescaled at each change."""
    token_weights: tuple[float, ...] = (1.0,)
    """Weights of the next tokens in the loss, beginning with the next token."""
    tied: bool = False
    """Whether the embedding equals the transposed head."""
    final_token_weights: tuple[float, ...] | None = None
    """Final value of `token_weights`, reached linearly during `steps`. None: constant weights."""
    steps: tuple[int, int] = (0, 1)
    """Index of the stage's first training step, and of the next stage's first step."""
    evaluation_window: int | None = None
    """Long window of evaluation and generation. None: `long_window`."""


@dataclasses.dataclass(frozen=True)
class SpeedrunConfig(TransformerConfig):
    """Shape, precision and kernel choices of the speedrun's model.

    Raises:
        ValueError: the errors of `ModelConfig`; invalid sizes or layers; recompute is not none.
    """

    of_run: ClassVar = TransformerConfig.of_run | {"stage"}

    block_size: PositiveInt = 262_144
    n_layer: PositiveInt = 11
    n_head: PositiveInt = 6
    n_inner: PositiveInt = 3072
    """Channels of the MLP."""
    bigram_rows: PositiveInt = 251_520
    """Rows of the hashed bigram embedding."""
    paired_layers: tuple[int, ...] = (0, 2, 5, 9)
    """Layers in which two heads attend to the keys of both."""
    long_layers: tuple[int, ...] = (3, 10)
    """Layers with the long window and the partial key offset."""
    value_layers: tuple[int, ...] = (1, 2, 8, 9, 10)
    """Layers with value embeddings."""
    skip: tuple[int, int] = (3, 6)
    """Layer whose attention ends at the start of the skip connection, and layer that adds the skip
    connection in place of attention."""
    lanes_from: PositiveInt = 7
    """First layer with two lanes. The output subtracts lane 0 after this layer."""
    stage: Stage = Stage()
    """Windows, predicted tokens and tying."""

    def build(self, rngs: nnx.Rngs) -> "Speedrun":
        return Speedrun(self, rngs=rngs)

    def parameter_groups(self) -> tuple[Group, ...]:
        """Return the record's groups; its learning rates are 0.023 (NorMuon) and 0.008 (Adam)."""
        return (
            Group("attention_bank", Matrices(inputs=(3,), outputs=(2,))),
            Group("mlp_in", Matrices(inputs=(2,), outputs=(1,))),
            Group("mlp_out", Matrices(inputs=(1,), outputs=(2,)), learning_rate=4.0),
            # Arguments: paths, matrices (none), factors of learning rate and decay, b1, b2.
            Group("embed|lm_head", None, 1.0, 150.0, 0.5, 0.95),
            Group("values|bigram", None, 75.0, 5.0, 0.75, 0.95),
            Group("smear_gate", None, 0.01, 0.0, 0.9, 0.99),
            Group("skip_gate", None, 0.05, 0.0, 0.9, 0.99),
            Group("(attention|value)_gates", None, 1.0, 1.0, 0.9, 0.99),
            Group("(smear|skip|backout)_lambda|qkvo_lambdas", None, 5.0, 0.0, 0.9, 0.99),
            Group("residual_lambdas", None, 5.0, 0.0, 0.9, 0.95),
            Group("(x0|bigram|mlp|lane)_lambdas", None, 1.0, 0.0, 0.9, 0.95),
        )

    def tied_parameters(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of paths (source, copy); in this stage, copy equals sourceᵀ."""
        return (("lm_head", "embed"),) if self.stage.tied else ()

    def for_evaluation(self) -> "SpeedrunConfig":
        """Return the config that predicts one token, with the long window of evaluation."""
        long = self.stage.evaluation_window or self.stage.long_window
        own = self.stage._replace(token_weights=(1.0,), final_token_weights=None, long_window=long)
        return dataclasses.replace(self, stage=own)

    def loss_options(self, step):
        stage = self.stage
        if stage.final_token_weights is None:
            return {}
        begin, end = stage.steps
        progress = jnp.clip((step - begin) / (end - begin), 0, 1)
        first_K, last_K = map(jnp.float32, (stage.token_weights, stage.final_token_weights))
        return {"token_weights": first_K + progress * (last_K - first_K)}

    def with_few_layers(self) -> "SpeedrunConfig":
        """Return a config whose layers have paired heads (0), a long window (2) or neither (3)."""
        sizes = {"n_layer": 4, "skip": (0, 1), "lanes_from": 2, "value_layers": (3,)}
        of_kinds = {"paired_layers": self.paired_layers and (0,)}
        of_kinds |= {"long_layers": self.long_layers and (2,)}
        return dataclasses.replace(self, **sizes, **of_kinds)

    def lookup_params(self) -> int:
        tables = self.vocab_size * (1 + len(self.value_layers)) + self.bigram_rows
        return tables * self.n_embd

    def flops_per_token(self, sequence_length: int) -> int:
        """Return 6·N + 12·C·(keys of a query, summed over layers), without segments."""
        keys, stage = 0.0, self.stage
        for i in self.attention_layers:
            length = sequence_length * (2 if i in self.paired_layers else 1)
            window = stage.long_window if i in self.long_layers else stage.short_window
            most = min(window + 1, length)
            keys += most - most * (most - 1) / (2 * length)
        return 6 * (self.num_params - self.lookup_params()) + round(12 * self.n_embd * keys)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with attention."""
        return tuple(i for i in range(self.n_layer) if i != self.skip[1])

    def __post_init__(self):
        super().__post_init__()
        stage = self.stage
        windows = (*stage[:2], *stage.rotary_windows, stage.evaluation_window)
        special = {*self.paired_layers, *self.long_layers, *self.value_layers}
        order = [-1, *self.skip, self.lanes_from, self.n_layer]
        rules = {
            "an even n_head": self.n_head % 2 == 0,
            "n_embd/n_head that is a multiple of 4": self.head_dim % 4 == 0,
            f"n_embd ≥ {GATE} and bigram_rows ≥ 2": self.n_embd >= GATE and self.bigram_rows >= 2,
            "0 ≤ skip[0] < skip[1] < lanes_from < n_layer": order == sorted({*order}),
            "paired, long and value layers with attention": special <= {*self.attention_layers},
            "windows of at least 1": all(w is None or w >= 1 for w in windows),
            "recompute none": self.recompute == "none",
            "steps of the stage in order": 0 <= stage.steps[0] < stage.steps[1],
            "as many final weights of tokens as first ones": len(stage.token_weights)
            == len(stage.final_token_weights or stage.token_weights),
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise ValueError(f"SpeedrunConfig: expected {'; '.join(broken)}; got {self}")


PRESETS: dict[str, SpeedrunConfig] = {"speedrun": SpeedrunConfig()}


def gate(config: SpeedrunConfig, x_BTC: BTC, w_HG: Float[Array, "H G"]) -> Float[Array, "B T H"]:
    """Return σ(w · x), where w reads the first G channels of x, fp32."""
    fp32_sums = {"precision": config.precision.matmul, "preferred_element_type": jnp.float32}
    x_BTG = x_BTC[..., : w_HG.shape[1]]
    return jax.nn.sigmoid(jnp.einsum("btg,hg->bth", x_BTG, w_HG.astype(x_BTC.dtype), **fp32_sums))


def norm(
    config: SpeedrunConfig, x_BTC: BTC, numerics: str | Numerics | None = None
) -> BTC | Operand:
    """Return the RMSNorm without parameters, in the compute dtype; with FP8 as its `Operand`."""
    how = {"out_dtype": config.precision.compute_dtype, "implementation": config.norm}
    how["numerics"] = numerics
    return jax.named_scope("norm")(rms_norm)(x_BTC, eps=EPS, **how)


def smear(config: SpeedrunConfig, x_BTC: BTC, w_G: Float[Array, " G"], strength) -> BTC:
    """Add a gated fraction of the previous token: x_t + strength · σ(w · x_t) · x_{t−1}."""
    before_BTC = strength * gate(config, x_BTC[:, 1:], w_G[None]) * x_BTC[:, :-1]
    return jnp.concatenate([x_BTC[:, :1], x_BTC[:, 1:] + before_BTC], axis=1)


def bigram_index(tokens_BT: Int[Array, "B T"], rows: int) -> Int[Array, "B T"]:
    """Return (36313 · token XOR 27191 · predecessor) mod (rows − 1), in int32 that wraps.

    The index at time 0 is rows − 1, which the record writes over the first token before it hashes
    the others: rows − 1 is the predecessor at time 1.
    """
    before_BT = tokens_BT[:, :-1].at[:, :1].set(rows - 1)
    hashed = jnp.mod((36313 * tokens_BT[:, 1:]) ^ (27191 * before_BT), rows - 1)
    return jnp.pad(hashed, ((0, 0), (1, 0)), constant_values=rows - 1)


def rotary(config: SpeedrunConfig) -> tuple[np.ndarray, float]:
    """Return the frequency of each pair of channels, (E,) in fp64, and the score's factor.

    Frequencies start as (1/1024)^linspace(0, 1, E), the factor as 0.1. When the long window grows
    from w to w/s, frequencies of less than one turn in w tokens are multiplied by s, and those of
    more than 32 turns are kept; others are interpolated. The factor grows by 1 + 0.2·log(1/s).
    """
    f, scale = (1 / 1024) ** np.linspace(0, 1, config.head_dim // 4), 0.1
    for old, new in itertools.pairwise(config.stage.rotary_windows):
        kept = np.clip((old * f / (2 * np.pi) - 1) / (32 - 1), 0, 1)
        f = f * (kept + (1 - kept) * old / new)
        scale *= 1 + 0.2 * np.log(new / old)
    return f, scale


def partial_key_offset(k_BTHD: BTHD) -> BTHD:
    """Shift the key channels that are not rotated by one token: induction heads in one layer."""
    half = k_BTHD.shape[-1] // 2
    before = jnp.concatenate([k_BTHD[:, :1], k_BTHD[:, :-1]], axis=1)
    return jnp.concatenate([k_BTHD[..., :half], before[..., half:]], axis=-1)


class Layer(NamedTuple):
    """Slices of the banks for one layer; None where the layer has no such part."""

    qkvo: tuple[Float[Array, "C C"], ...] | None
    gate_HG: Float[Array, "H G"] | None
    value_PC: Float[Array, "P C"] | None
    value_gate_HG: Float[Array, "H G"] | None
    mlp_in_FC: Float[Array, "F C"]
    mlp_out_FC: Float[Array, "F C"]


@jax.named_scope("attention")
def attention(config: SpeedrunConfig, i: int, x_BTC: BTC, layer: Layer, tokens_BT, segments_BT):
    """Return layer i's attention of the normalized lane."""
    c, stage, numerics = config, config.stage, config.precision.blocks
    x_BTC = exact(given := norm(c, x_BTC, numerics))
    paired, long = i in c.paired_layers, i in c.long_layers
    precision = {"precision": c.precision.matmul}
    matmul = {"implementation": "reference" if c.attention == "reference" else "auto"}
    *qkv, o_CC = (w_CC.T for w_CC in layer.qkvo)
    (b, t), (frequency_E, scale) = tokens_BT.shape, rotary(c)
    # Rotation by −θ, with tables in the compute dtype: as the record.
    angles = rotary_angles(-frequency_E, jnp.arange(2 * t if paired else t)[None])
    angles = (rounded(x, c.precision.compute_dtype) for x in angles)
    how = {"eps": EPS, "pair_heads": paired, "implementation": matmul["implementation"]}
    qkv_BTO = linear(given, tuple(qkv), numerics=numerics, **matmul)
    q, k, v = rotary_qkv(qkv_BTO, *angles, heads=c.n_head, **how)
    if layer.value_PC is not None:
        value_BTC = lookup(layer.value_PC, tokens_BT, vocab_size=c.vocab_size).astype(x_BTC.dtype)
        halves = x_BTC[..., : GATE // 2], value_BTC[..., : GATE // 2]
        seen_BTC = x_BTC if paired else jnp.concatenate(halves, axis=-1)
        gate_BTH = 2 * gate(c, seen_BTC, layer.value_gate_HG)
        value_BTHD = value_BTC.reshape(b, t, c.n_head, c.head_dim)
        gated = weighted_sum(jnp.float32, (gate_BTH[..., None], value_BTHD))
        v = weighted_sum(v.dtype, (1, v), (1, gated.reshape(v.shape)))
    if paired:
        segments_BT = None if segments_BT is None else jnp.repeat(segments_BT, 2, axis=1)
    if long:
        k = partial_key_offset(k)
    window = stage.long_window if long else stage.short_window
    how = {"window": window + 1, "segment_ids": segments_BT, "implementation": c.attention}
    y = flash_attention(q, k, v, scale=scale, **how, **precision)
    y = y.reshape(b, t, c.n_head, c.head_dim)
    y = weighted_sum(y.dtype, (gate(c, x_BTC, layer.gate_HG)[..., None], y))
    return linear(y.reshape(x_BTC.shape), o_CC, **matmul, **precision)


@jax.named_scope("mlp")
def mlp(config: SpeedrunConfig, x_BTC: BTC, layer: Layer) -> BTC:
    """Return relu(x W_inᵀ)² W_out of the normalized lane."""
    numerics = config.precision.blocks
    how = {"activation": "relu_squared", "output_major": True, "implementation": config.mlp}
    x_BTC = norm(config, x_BTC, numerics)
    return activated_mlp(x_BTC, layer.mlp_in_FC, None, layer.mlp_out_FC, numerics=numerics, **how)


class Speedrun(Model):
    """The speedrun's model: logits = 23·σ((norm(x) · lm_head + 5)/7.5).

    Initial values: 0 for gates, bigram and mlp_out; a uniform distribution of standard deviation
    0.5/√C for attention_bank and mlp_in; N(0, 0.005) for lm_head, embed its transpose; N(0, 0.01)
    for values. The parameters of a seed do not depend on the padding. Unused: x0,
    bigram and attention's residual λ of layer skip[1], and x0 λ of layer 0.
    """

    config: SpeedrunConfig

    def __init__(self, config: SpeedrunConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        c, f, v, h = config.n_embd, config.n_inner, config.vocab_size, config.n_head
        layers, tables, lanes = config.n_layer, len(config.value_layers), config.lanes_from
        padding, fp32 = (0, config.padded_vocab_size - v), {"dtype": jnp.float32}
        matrices = {"read_dtype": config.precision.compute_dtype}

        def constant(value, *shape, **metadata):
            return nnx.Param(jnp.full(shape, value, jnp.float32), **metadata)

        def bank(*shape):
            how = {"std": 0.5 * c**-0.5, "uniform": True}
            return nnx.Param(normal(rngs.params(), shape, **how, **fp32), **matrices)

        lm_head_CV = normal(rngs.params(), (c, v), std=0.005, **fp32)
        self.lm_head = nnx.Param(jnp.pad(lm_head_CV, ((0, 0), padding)))
        self.embed = nnx.Param(jnp.pad(lm_head_CV.T, (padding, (0, 0))))
        values = normal(rngs.params(), (tables, v, c), std=0.01, **fp32)
        self.values = nnx.Param(jnp.pad(values, ((0, 0), padding, (0, 0))))
        self.attention_bank = bank(layers - 1, 4, c, c)
        self.mlp_in, self.mlp_out = bank(layers, f, c), constant(0, layers, f, c, **matrices)
        self.smear_gate, self.skip_gate = constant(0, GATE), constant(0, GATE)
        self.attention_gates = constant(0, layers - 1, h, GATE)
        self.value_gates = constant(0, tables, h, GATE)
        self.smear_lambda, self.skip_lambda, self.backout_lambda = map(constant, (0, -1.5, 0.5))
        self.qkvo_lambdas = constant(jnp.array([0.5, 1]), layers - 1, 2)
        self.residual_lambdas = constant(1.1**0.5, layers, 2)
        self.x0_lambdas, self.bigram_lambdas = constant(0, layers), constant(0.05, layers)
        self.bigram, self.mlp_lambdas = constant(0, config.bigram_rows, c), constant(1, lanes)
        self.lane_lambdas = constant(jnp.array([[1, 1.5], [1, 1]]), layers - lanes, 2, 2)

    def hidden(self, tokens_BT, cache=None, segment_ids_BT=None):
        self.check_tokens(tokens_BT, segment_ids_BT, cache)
        if cache is not None:
            raise ValueError("Speedrun: expected cache=None: the model has no KV cache")
        c, tokens_BT, layers = self.config, to_int32(tokens_BT), self.layers()
        add = functools.partial(weighted_sum, c.precision.residual_dtype)
        x0, bigram = self.inputs(tokens_BT)
        weights = functools.partial(scalars, dtype=c.precision.compute_dtype)  # as the record
        residual, to_lanes = weights(self.residual_lambdas, 2), weights(self.lane_lambdas, 4)
        x0_lambdas, bigram_lambdas = weights(self.x0_lambdas, 1), weights(self.bigram_lambdas, 1)
        (mlp_lambdas,) = weights(self.mlp_lambdas, c.lanes_from)

        def attend(i: int, lane: BTC) -> BTC:
            return attention(c, i, lane, layers[i], tokens_BT, segment_ids_BT)

        def injection(i: int) -> tuple:
            # Lane 0 begins with the bigram of layer 0.
            return ((*x0_lambdas[i], x0), *([(*bigram_lambdas[i], bigram)] if i else []))

        lane0, skip = add((1, x0), (*bigram_lambdas[0], bigram)), None
        for i in range(c.lanes_from):
            keep_attention, keep_mlp = residual[i]
            if i == c.skip[1]:
                lane0 = add((1, lane0), (1, skip))
            else:
                lane0 = add((keep_attention, lane0), (1, attend(i, lane0)), *injection(i))
            if i == c.skip[0]:
                weight = 2 * jax.nn.sigmoid(self.skip_lambda[...])
                skip = add((weight * gate(c, x0, self.skip_gate[...][None]), lane0))
            lane0 = add((keep_mlp, lane0), (mlp_lambdas[i], mlp(c, lane0, layers[i])))

        lane1 = lane0
        for i in range(c.lanes_from, c.n_layer):
            keep_attention, keep_mlp = residual[i]
            attention_0, attention_1, mlp_0, mlp_1 = to_lanes[i - c.lanes_from]
            y = attend(i, lane0)
            lane0 = add((keep_attention, lane0), (attention_0, y), *injection(i))
            lane1 = add((keep_attention, lane1), (attention_1, y))
            y = mlp(c, lane1, layers[i])
            lane0, lane1 = add((keep_mlp, lane0), (mlp_0, y)), add((keep_mlp, lane1), (mlp_1, y))
            if i == c.lanes_from:
                early = lane0
        return norm(c, add((0.5, lane0), (0.5, lane1), (-self.backout_lambda[...], early)))

    @jax.named_scope("embedding")
    def inputs(self, tokens_BT):
        """Return x0, the normalized smeared embedding, and the bigram embedding."""
        c, dtype = self.config, self.config.precision.residual_dtype
        x_BTC = lookup(self.embed[...], tokens_BT, vocab_size=c.vocab_size)
        x_BTC = smear(c, x_BTC, self.smear_gate[...], self.smear_lambda[...])
        x0_BTC = rms_norm(x_BTC, eps=EPS, out_dtype=dtype, implementation=c.norm)
        bigram_BTC = jnp.take(self.bigram[...], bigram_index(tokens_BT, c.bigram_rows), axis=0)
        return x0_BTC, bigram_BTC.astype(dtype)

    def layers(self) -> list[Layer]:
        """Split the banks into layers. One λ of a layer scales q, k and v, a second λ scales o."""
        c = self.config
        lambdas = jnp.repeat(self.qkvo_lambdas[...], np.array([3, 1]), axis=1)[..., None, None]
        bank = (self.attention_bank[...] * lambdas).reshape(-1, c.n_embd, c.n_embd)
        qkvo = itertools.batched(split_bank(bank), 4)
        attentions = zip(qkvo, split_bank(self.attention_gates[...]), strict=True)
        values = zip(split_bank(self.values[...]), split_bank(self.value_gates[...]), strict=True)
        mlps = zip(split_bank(self.mlp_in[...]), split_bank(self.mlp_out[...]), strict=True)
        of_attention = dict(zip(c.attention_layers, attentions, strict=True))
        of_value, none = dict(zip(c.value_layers, values, strict=True)), (None, None)
        return [
            Layer(*of_attention.get(i, none), *of_value.get(i, none), *of_mlp)
            for i, of_mlp in enumerate(mlps)
        ]

    def head(self):
        return self.lm_head[...].T

    def start_decoding(self, tokens_BT, length_B, positions, implementation="auto"):
        """See `Model.start_decoding`. The cache is the tokens: `decode` computes all positions."""
        self.decode_kernel(len(tokens_BT), implementation)
        tokens_BS = jnp.pad(tokens_BT, ((0, 0), (0, positions - tokens_BT.shape[1])))
        return self.hidden(tokens_BT), None, to_int32(tokens_BS)

    def decode(self, weights, cache, token_B, length_B):
        tokens_BS = cache.at[jnp.arange(len(cache)), length_B].set(to_int32(token_B))
        x_BSC = self.hidden(tokens_BS)
        x_B1C = jnp.take_along_axis(x_BSC, length_B[:, None, None], axis=1)
        return self.logits(x_B1C)[:, 0], tokens_BS

    def logits(self, x_BTC):
        """Return the soft-capped logits over the real vocabulary, in the compute dtype."""
        logits_BTP = linear(x_BTC, self.lm_head[...], precision=self.config.precision.matmul)
        logits_BTV = logits_BTP[..., : self.config.vocab_size].astype(jnp.float32)
        return apply_softcap(logits_BTV, SOFTCAP).astype(x_BTC.dtype)

    def losses(
        self, tokens_BT, targets_BT, ignore_index=None, segment_ids_BT=None, token_weights=None
    ) -> Float[Array, " N"]:
        """Return multi-token cross-entropy: Σ_k weight_k · (logsumexp(z_t) − z_t[target_{t+k}]).

        Targets that are `ignore_index` or after the sequence have no term. `token_weights` are the
        K weights, an array or a tuple; None for the stage's. See `Model.losses`.
        """
        loss = Loss(self.config.vocab_size, SOFTCAP, ignore_index)
        checked("Speedrun.losses", loss, targets_BT.reshape(-1))
        weights = self.config.stage.token_weights if token_weights is None else token_weights
        # The kernel for one target needs no weights. No target is the smallest int32.
        alone = isinstance(weights, tuple) and weights == (1.0,)
        end = jnp.iinfo(jnp.int32).min if ignore_index is None else ignore_index
        x_BTC = self.hidden(tokens_BT, segment_ids_BT=segment_ids_BT)
        targets_NK = next_targets(to_int32(targets_BT), len(weights), end)
        how = {"softcap": SOFTCAP, "target_weights": None if alone else weights}
        return self.losses_of(x_BTC, targets_NK, ignore_index=end, **how)
