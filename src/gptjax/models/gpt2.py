"""GPT-2 as a Flax nnx module (Radford et al., "Language Models are Unsupervised Multitask
Learners", 2019).

The `jax.named_scope`s are what `python -m gptjax.bench profile` calls the parts by.

Shapes: B batch, T time, C channels (n_embd), H heads, D = C/H, F = 4·C, V real vocabulary, P padded
vocabulary, N = B·T.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Integer

from gptjax.optim import Group, Matrices
from gptjax.precision import Precision
from pallas_kernels import (
    layer_norm,
    linear,
    linear_cross_entropy,
    mlp,
    projected_attention,
    select,
)
from pallas_kernels.classifier import to_int32

INIT_STD = 0.02
# Rows of padding: to a multiple of 1,024, at most.
MAX_PADDING = 1023


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """The shape of a GPT-2, and how it is computed.

    Raises:
        ValueError: a field of a wrong type or out of range, a width that the heads do not divide, a
            padded vocabulary below the real one or more than 1,023 rows above it.
    """

    vocab_size: int = 50257
    """Real tokens; logits and the loss cover these alone."""
    padded_vocab_size: int | None = None
    """Rows of the embedding. None: the next multiple of 128, which makes the head's matmuls faster,
    stored here as a number. Padding is invisible outside. Another vocab_size needs another
    padded_vocab_size."""
    block_size: int = 1024
    """Longest sequence, in tokens."""
    n_layer: int = 12
    """Blocks."""
    n_head: int = 12
    """Attention heads; must divide n_embd."""
    n_embd: int = 768
    """Width of the residual stream."""
    precision: Precision = Precision("fp32")
    """Types of storage, products and residual stream."""
    attention: str = "auto"
    """Back end of attention: auto, or one of pallas_kernels.flash_attention's: mosaic, triton,
    cudnn, xla, reference."""
    norm: str = "auto"
    """Back end of LayerNorm and the addition before it: auto, triton, xla or reference."""
    mlp: str = "auto"
    """Back end of the MLP's product, bias and GELU: auto, mosaic, triton (in fp32 after XLA's
    product), xla or reference."""
    loss: str = "auto"
    """Back end of the head and its loss: auto, fused, xla or reference."""
    loss_chunk: int | None = None
    """Tokens whose logits are alive at once; must divide a micro-batch's. None: about 16,384 where
    loss is fused, all where xla."""
    recompute: Literal["none", "block", "sublayer"] = "none"
    """Activations recomputed in the backward pass: none; all but each block's input; all but each
    attention's and MLP's input."""

    def __post_init__(self):
        if self.padded_vocab_size is None:
            _check_size("vocab_size", self.vocab_size)
            object.__setattr__(self, "padded_vocab_size", -(-self.vocab_size // 128) * 128)
        for name in (
            "vocab_size",
            "padded_vocab_size",
            "block_size",
            "n_layer",
            "n_head",
            "n_embd",
        ):
            _check_size(name, getattr(self, name))
        if self.loss_chunk is not None:
            _check_size("loss_chunk", self.loss_chunk)
        if self.n_embd % self.n_head:
            raise ValueError(
                f"GPT2Config: n_embd={self.n_embd} is not a multiple of n_head={self.n_head}"
            )
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"GPT2Config: padded_vocab_size={self.padded_vocab_size} is below "
                f"vocab_size={self.vocab_size}"
            )
        if self.padded_vocab_size - self.vocab_size > MAX_PADDING:
            least = -(-self.vocab_size // 128) * 128
            raise ValueError(
                f"GPT2Config: expected at most {MAX_PADDING} rows of padding, got "
                f"padded_vocab_size={self.padded_vocab_size} "
                f"for vocab_size={self.vocab_size}; give padded_vocab_size={least} "
                f"(--model.padded-vocab-size {least}) too"
            )
        if not isinstance(self.precision, Precision):
            raise ValueError(
                "GPT2Config: precision must be a gptjax.Precision, such as Precision('bf16'), got "
                f"{self.precision!r}"
            )
        if self.recompute not in ("none", "block", "sublayer"):
            raise ValueError(
                f"GPT2Config: recompute must be none, block or sublayer, got {self.recompute!r}"
            )

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def num_params(self) -> int:
        """Trainable parameters, without the padding: 124,439,808 for GPT-2 124M. FLOPs and
        published figures count these."""
        c = self.n_embd
        return (
            (self.vocab_size + self.block_size) * c + self.n_layer * (12 * c * c + 13 * c) + 2 * c
        )

    @property
    def num_allocated_params(self) -> int:
        """Parameters in memory, the padded rows of the embedding included: 124,475,904 for GPT-2
        124M."""
        return self.num_params + (self.padded_vocab_size - self.vocab_size) * self.n_embd

    def kernels(self, sequence_length: int, batch: int = 1) -> dict[str, str]:
        """The back ends that this model uses on the default device: {"attention": "cudnn", "norm":
        "triton", …}.

        Where the compiler will split arrays over a mesh, call this under
        `jax.sharding.use_abstract_mesh(mesh.abstract_mesh)`.

        Args:
            batch: sequences at a time; the kernels of the MLP depend on it.

        Raises:
            ValueError: a named one does not exist or cannot run here.
        """
        dtype, c = self.precision.compute_dtype, self.n_embd
        return {
            "attention": select(
                "flash_attention",
                self.attention,
                dtype=dtype,
                length=sequence_length,
                head_dim=self.head_dim,
                precision=self.precision.matmul,
            ),
            "norm": select("layer_norm", self.norm, channels=c),
            "mlp": select(
                "mlp",
                self.mlp,
                dtype=dtype,
                rows=batch * sequence_length,
                inputs=c,
                outputs=4 * c,
            ),
            "loss": select("linear_cross_entropy", self.loss),
        }

    def flops_per_token(self, sequence_length: int) -> int:
        """Operations of forward and backward for a token: 6·N + 6·L·C·T.

        N leaves out the position embedding. Attention is counted at half its square, since half of
        it is masked.
        """
        n = self.num_params - self.block_size * self.n_embd
        return 6 * n + 6 * self.n_layer * self.n_embd * sequence_length


def _check_size(name, value):
    # bool is an int. NumPy's integers are not: a checkpoint stores the config as JSON.
    if type(value) is not int or value < 1:
        raise ValueError(
            f"GPT2Config: {name} must be an int of at least 1, got {value!r} of type "
            f"{type(value).__name__}"
        )


PRESETS: dict[str, GPT2Config] = {
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
}


# Which of NorMuon and AdamW takes which parameters, and what decays, for optimizers that tell them
# apart.
PARAMETER_GROUPS = (
    Group(r"blocks\.\d+\.attn\.c_attn\.kernel", Matrices(packed=3)),
    Group(r"blocks\.\d+\.(attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.kernel", Matrices()),
    Group(r"wte|wpe"),
    Group(r".*\.(bias|scale)", weight_decay=0.0),
)


def normal(std: float) -> nnx.initializers.Initializer:
    """Samples of N(0, std²): std times N(0, 1)'s, rounded after each of the two products.

    Without the barrier a compiled program would multiply std with a constant of the sampler's
    first, and a run would start from other last bits than one whose weights were made operation by
    operation.
    """

    def init(key, shape, dtype):
        return jax.lax.optimization_barrier(jax.random.normal(key, shape, dtype)) * jnp.array(
            std, dtype
        )

    return init


class Delta(NamedTuple):
    """What is still to be added to the residual stream: a projection's product and its bias.

    They are apart so that LayerNorm can add both. Its backward pass then has the bias's gradient
    without reading a thing for it.
    """

    product_BTC: Float[Array, "B T C"]
    bias_C: Float[Array, " C"]

    def added_to(self, x_BTC: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """x + product + bias, added in fp32 and rounded once to x's dtype."""
        sum_BTC = x_BTC.astype(jnp.float32) + self.product_BTC.astype(jnp.float32)
        return (sum_BTC + self.bias_C.astype(jnp.float32)[None, None]).astype(x_BTC.dtype)


class LayerNorm(nnx.Module):
    """y = (x − mean)/√(var + eps) · scale + bias over the last axis; biased variance, statistics in
    fp32, y in the compute dtype."""

    def __init__(self, config: GPT2Config, *, eps: float = 1e-5):
        self.scale = nnx.Param(jnp.ones((config.n_embd,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((config.n_embd,), jnp.float32))
        self.eps, self.out_dtype, self.implementation = (
            eps,
            config.precision.compute_dtype,
            config.norm,
        )

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        return self._norm(x)

    def of_sum(
        self, x_BTC: Float[Array, "B T C"], delta: Delta | None
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B T C"]]:
        """The normalised sum of x and delta, and the sum, from one pass; a delta of None adds
        nothing."""
        if delta is None:
            return self(x_BTC), x_BTC
        return self._norm(
            x_BTC, residual=delta.product_BTC.astype(x_BTC.dtype), residual_bias=delta.bias_C
        )

    @jax.named_scope("norm")
    def _norm(self, x, **added):
        return layer_norm(
            x,
            # Indexing by `...` reads a parameter's array.
            self.scale[...],
            self.bias[...],
            eps=self.eps,
            out_dtype=self.out_dtype,
            implementation=self.implementation,
            **added,
        )


class Linear(nnx.Module):
    """x W + b in x's dtype; kernel (in, out) and bias (out,) are stored in fp32, and so are their
    gradients."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        std: float,
        precision: Precision,
        rngs: nnx.Rngs,
        implementation: str = "auto",
    ):
        self.kernel = nnx.Param(
            normal(std)(rngs.params(), (in_dim, out_dim), precision.param_dtype)
        )
        self.bias = nnx.Param(jnp.zeros((out_dim,), precision.param_dtype))
        self.precision, self.implementation = precision, implementation

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        return self._apply(x, self.bias[...])

    def delta(self, x_BTI: Float[Array, "B T I"]) -> Delta:
        """x W in x's dtype, and b beside it."""
        return Delta(self._apply(x_BTI, None), self.bias[...])

    def _apply(self, x, bias_O):
        return linear(
            x,
            self.kernel[...],
            bias_O,
            implementation=self.implementation,
            precision=self.precision.matmul,
        )


class Attention(nnx.Module):
    """Causal multi-head self-attention; q, k, v come packed in that order from one projection.

    Gives what is to be added to the stream.
    """

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        how = {
            "precision": config.precision,
            "implementation": "reference" if config.attention == "reference" else "auto",
        }
        c, linear = config.n_embd, functools.partial(Linear, rngs=rngs, **how)
        self.c_attn = linear(c, 3 * c, std=INIT_STD)
        self.c_proj = linear(c, c, std=INIT_STD / (2 * config.n_layer) ** 0.5)
        self.config = config

    def qkv(self, x_BTC: Float[Array, "B T C"]) -> Float[Array, "B T 3 H D"]:
        """Queries, keys and values of every head, packed."""
        return self.c_attn(x_BTC).reshape(
            *x_BTC.shape[:2], 3, self.config.n_head, self.config.head_dim
        )

    @jax.named_scope("attention")
    def __call__(self, x_BTC: Float[Array, "B T C"]) -> Delta:
        y_BTHD = projected_attention(
            x_BTC,
            self.c_attn.kernel[...],
            self.c_attn.bias[...],
            heads=self.config.n_head,
            implementation=self.config.attention,
            precision=self.config.precision.matmul,
        )
        return self.c_proj.delta(y_BTHD.reshape(x_BTC.shape))


class MLP(nnx.Module):
    """C → 4C → C with the tanh form of GELU. Gives what is to be added to the stream."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        c, linear = config.n_embd, functools.partial(Linear, precision=config.precision, rngs=rngs)
        self.c_fc = linear(c, 4 * c, std=INIT_STD)
        self.c_proj = linear(4 * c, c, std=INIT_STD / (2 * config.n_layer) ** 0.5)
        self.implementation, self.precision = config.mlp, config.precision

    @jax.named_scope("mlp")
    def __call__(self, x_BTC: Float[Array, "B T C"]) -> Delta:
        y_BTC = mlp(
            x_BTC,
            self.c_fc.kernel[...],
            self.c_fc.bias[...],
            self.c_proj.kernel[...],
            implementation=self.implementation,
            precision=self.precision.matmul,
        )
        return Delta(y_BTC, self.c_proj.bias[...])


class Block(nnx.Module):
    """Pre-LN block: x + attention(ln_1(x)), then x + mlp(ln_2(x)).

    Its halves carry the residual stream as a pair (x, delta), where delta is still to be added to
    x, or None: the LayerNorm that reads the sum makes it, in the same pass.
    """

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.ln_1 = LayerNorm(config)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = LayerNorm(config)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_BTC: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        x_BTC, delta = self.add_mlp(*self.add_attention(x_BTC))
        return delta.added_to(x_BTC)

    def add_attention(
        self, x_BTC: Float[Array, "B T C"], delta: Delta | None = None
    ) -> tuple[Float[Array, "B T C"], Delta]:
        """The first half."""
        y_BTC, x_BTC = self.ln_1.of_sum(x_BTC, delta)
        return x_BTC, self.attn(y_BTC)

    def add_mlp(
        self, x_BTC: Float[Array, "B T C"], delta: Delta | None = None
    ) -> tuple[Float[Array, "B T C"], Delta]:
        """The second half."""
        y_BTC, x_BTC = self.ln_2.of_sum(x_BTC, delta)
        return x_BTC, self.mlp(y_BTC)


class GPT2(nnx.Module):
    """GPT-2. Parameters follow Hugging Face's names: wte, wpe, blocks.i.{ln_1, attn, ln_2, mlp},
    ln_f; the head is wteᵀ.

    Linear, wte and wpe start from N(0, 0.02), the two projections into the residual stream from
    N(0, 0.02/√(2·n_layer)), biases from 0, LayerNorm from 1 and 0. One seed gives one model
    whatever the padding: padded rows of wte start at 0.

    Args:
        config: shape and precision.
        rngs: `nnx.Rngs(seed)`; its `params` stream is used.

    Raises:
        TypeError: config is not a GPT2Config, or rngs is not an nnx.Rngs.
    """

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        if not isinstance(config, GPT2Config):
            raise TypeError(f"GPT2: expected a gptjax.GPT2Config, got a {type(config).__name__}")
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(f"GPT2: expected rngs=flax.nnx.Rngs(seed), got a {type(rngs).__name__}")
        embedding, dtype = normal(INIT_STD), config.precision.param_dtype
        wte_VC = embedding(rngs.params(), (config.vocab_size, config.n_embd), dtype)
        self.wte = nnx.Param(
            jnp.pad(wte_VC, ((0, config.padded_vocab_size - config.vocab_size), (0, 0)))
        )
        self.wpe = nnx.Param(embedding(rngs.params(), (config.block_size, config.n_embd), dtype))
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.n_layer)])
        self.ln_f = LayerNorm(config)
        self.config = config

    @jax.named_scope("embedding")
    def embed(
        self, tokens_BT: Integer[Array, "B T"], start: int | Int[Array, ""] = 0
    ) -> Float[Array, "B T C"]:
        """wte[token] + wpe[start + position], in the residual stream's dtype. An id outside the
        vocabulary gives NaN."""
        # A narrower type would not hold padded_vocab_size.
        tokens_BT = to_int32(tokens_BT)
        # Past the table's end `take` gives NaN; a negative id would wrap, and one in the padding
        # read zeros, without a word.
        known_BT = (tokens_BT >= 0) & (tokens_BT < self.config.vocab_size)
        tokens_BT = jnp.where(known_BT, tokens_BT, self.config.padded_vocab_size)
        # The gather reads the fp32 table, so that its gradient, a scatter-add, accumulates in fp32.
        wpe_TC = jax.lax.dynamic_slice_in_dim(self.wpe[...], start, tokens_BT.shape[1])
        return (jnp.take(self.wte[...], tokens_BT, axis=0) + wpe_TC[None]).astype(
            self.config.precision.residual_dtype
        )

    def hidden(self, tokens_BT: Integer[Array, "B T"]) -> Float[Array, "B T C"]:
        """The final LayerNorm's output, in the compute dtype.

        Raises:
            ValueError: tokens that are no two-dimensional array of integers, or more of them than
                block_size.
        """
        _check_ids("GPT2", tokens_BT)
        if tokens_BT.shape[1] > self.config.block_size:
            raise ValueError(
                f"a sequence of {tokens_BT.shape[1]} tokens is longer than "
                f"block_size={self.config.block_size}"
            )
        x_BTC, delta = self.embed(tokens_BT), None
        for block in self.blocks:
            # What is recomputed starts from the sum alone: the pair would be two arrays to keep.
            match self.config.recompute:
                case "block":
                    x_BTC = nnx.remat(Block.__call__)(block, x_BTC)
                case "sublayer":
                    for half in (Block.add_attention, Block.add_mlp):
                        x_BTC, half_delta = nnx.remat(half)(block, x_BTC)
                        x_BTC = half_delta.added_to(x_BTC)
                case _:
                    x_BTC, delta = block.add_mlp(*block.add_attention(x_BTC, delta))
        return self.ln_f.of_sum(x_BTC, delta)[0]

    def logits(self, x_BTC: Float[Array, "B T C"]) -> Float[Array, "B T V"]:
        """The tied head over the real vocabulary, in the compute dtype."""
        wte_VC = self.wte[: self.config.vocab_size].astype(x_BTC.dtype)
        return jnp.einsum("btc,vc->btv", x_BTC, wte_VC, precision=self.config.precision.matmul)

    def __call__(self, tokens_BT: Integer[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits over the real vocabulary for every position, in the compute dtype.

        Args:
            tokens_BT: ids in [0, vocab_size), in any integer type. Another id gives NaN.

        Raises:
            ValueError: tokens that are no two-dimensional array of integers, or more of them than
                block_size.
        """
        return self.logits(self.hidden(tokens_BT))


def init_params(config: GPT2Config, seed: int | Integer[Array, ""]) -> dict:
    """The parameters of GPT2(config, rngs=nnx.Rngs(seed)), bit for bit, as a dict of arrays; made
    for `jax.jit`.

    A loop makes the blocks, so that XLA compiles one: GPT-2 XL's 194 random matrices, side by side
    in a program, took it 131 s on an H200. Until they are taken apart they exist twice, which is no
    more than the parameters and gradients of a step.
    """

    def params_of(module: nnx.Module) -> dict:
        return nnx.to_pure_dict(nnx.split(module, nnx.Param)[1])

    def block(keys_drawn) -> dict:
        rngs = nnx.Rngs(key)
        rngs.default.count[...] = keys_drawn
        return params_of(Block(config, rngs=rngs))

    key = jax.random.key(seed)
    # wte and wpe draw two keys, then each block four.
    keys_drawn_L = 2 + 4 * jnp.arange(config.n_layer, dtype=jnp.uint32)
    stacked = jax.lax.map(block, keys_drawn_L)
    blocks = {i: jax.tree.map(lambda x: x[i], stacked) for i in range(config.n_layer)}
    return params_of(GPT2(dataclasses.replace(config, n_layer=1), rngs=nnx.Rngs(key))) | {
        "blocks": blocks
    }


def loss_fn(
    model: GPT2, tokens_BT: Integer[Array, "B T"], targets_BT: Integer[Array, "B T"]
) -> Float[Array, ""]:
    """Mean cross-entropy over B·T tokens in nats, fp32.

    Differentiable once, in reverse mode; with `config.attention`, `norm`, `mlp` and `loss`
    "reference" also in forward mode and to any order.

    Args:
        tokens_BT: inputs, ids in [0, vocab_size), in any integer type.
        targets_BT: the token that follows each input; of the same shape.

    Raises:
        ValueError: tokens or targets that are no two-dimensional arrays of integers, or differ in
            shape, more tokens than block_size, or B·T not a multiple of `config.loss_chunk`.
    """
    _check_ids("loss_fn", tokens_BT)
    _check_ids("loss_fn", targets_BT)
    if tokens_BT.shape != targets_BT.shape:
        raise ValueError(
            f"loss_fn: expected a target for each token, got tokens {tokens_BT.shape} and targets "
            f"{targets_BT.shape}"
        )
    config = model.config
    x_BTC = model.hidden(tokens_BT)
    with jax.named_scope("head"):
        losses_N = linear_cross_entropy(
            x_BTC.reshape(-1, config.n_embd),
            model.wte[...],
            targets_BT.reshape(-1),
            vocab_size=config.vocab_size,
            chunk=config.loss_chunk,
            implementation=config.loss,
            precision=config.precision.matmul,
        )
    return losses_N.mean()


def _check_ids(name, ids):
    if getattr(ids, "ndim", None) != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        got = f"{ids.shape} in {ids.dtype}" if hasattr(ids, "shape") else f"a {type(ids).__name__}"
        raise ValueError(
            f"{name}: expected an array of integer ids of shape (batch, time), such as "
            f"jnp.array([[1, 2]]), got {got}"
        )
