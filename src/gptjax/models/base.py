"""Interface between an architecture and the rest of gptjax.

An architecture is one file with a frozen dataclass derived from `ModelConfig` and a module derived
from `Model`. The training step, checkpoints, generation, the optimizer's partition and
`gptjax.bench` use only this interface; `gptjax.models.registry` names the architectures.

Shapes: B batch, T time, C channels (n_embd), V real vocabulary, P padded vocabulary, N = B·T.
"""

import abc
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer, PyTree

from gptjax.data.loader import IGNORED, Batch
from gptjax.fields import PositiveInt, check_fields
from gptjax.models.layers import Block, KVCache
from gptjax.optim import Group
from gptjax.parallel import AXIS, Parallel, Placement
from gptjax.precision import Precision
from pallas_kernels import linear_cross_entropy
from pallas_kernels.classifier import to_int32
from pallas_kernels.extend import recorded

# Maximum number of padded rows: padding to a multiple of at most 1,024.
MAX_PADDING = 1023


def check_ids(name: str, ids) -> None:
    """Check that `ids` is a two-dimensional array of integers.

    Raises:
        ValueError: `ids` has another shape or dtype; the message begins with `name`.
    """
    if getattr(ids, "ndim", None) != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        got = f"{ids.shape} in {ids.dtype}" if hasattr(ids, "shape") else f"a {type(ids).__name__}"
        raise ValueError(
            f"{name}: expected an array of integer ids of shape (batch, time), such as "
            f"jnp.array([[1, 2]]), got {got}"
        )


@dataclasses.dataclass(frozen=True)
class ModelConfig(abc.ABC):
    """Shape, precision and kernel choices of a model.

    Raises:
        ValueError: a field of a wrong type or out of range, a width that is not a multiple of the
            number of heads, a padded vocabulary below the real vocabulary or more than 1,023 rows
            above.

    Attributes:
        operational: fields that do not change what the model learns. A resumed run may differ in
            these.
        of_run: fields that the run determines, not the model of `init_from`.
        supports_fp8: whether the blocks pass `precision.blocks` to their matmuls, which the
            precision fp8 needs.
    """

    operational: ClassVar[frozenset[str]] = frozenset(("loss", "loss_chunk", "recompute"))
    of_run: ClassVar[frozenset[str]] = frozenset(("precision",))
    supports_fp8: ClassVar[bool] = False

    vocab_size: PositiveInt = 50257
    """Number of real tokens; logits and loss cover only real tokens."""
    padded_vocab_size: PositiveInt | None = None
    """Rows of the embedding. None: the next multiple of 128, for faster matmuls of the head; this
    number is stored. A change of vocab_size needs a change of padded_vocab_size."""
    block_size: PositiveInt = 1024
    """Maximum sequence length in tokens."""
    n_layer: PositiveInt = 12
    """Blocks."""
    n_head: PositiveInt = 12
    """Attention heads; must divide n_embd."""
    n_embd: PositiveInt = 768
    """Width of the residual stream."""
    precision: Precision = Precision("fp32")
    """Dtypes of storage, matmuls and residual stream."""
    loss: str = "auto"
    """Back end of the head and its loss: auto, fused, xla or reference."""
    loss_chunk: PositiveInt | None = None
    """Number of tokens whose logits are in memory at a time; must divide a micro-batch's tokens.
    None: about 16,384 with fused, all tokens with xla."""
    recompute: Literal["none", "block", "sublayer"] = "none"
    """Activations recomputed in the backward pass. block: all except the input of each block.
    sublayer: all except the input of each attention and MLP."""

    @abc.abstractmethod
    def build(self, rngs: nnx.Rngs) -> "Model":
        """Return a model of this config with random parameters."""

    def tied_parameters(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of paths (source, copy): the training step keeps copy equal to sourceᵀ.

        Both parameters of a pair belong to one `Group` of `parameter_groups`.
        """
        return ()

    @abc.abstractmethod
    def parameter_groups(self) -> tuple[Group, ...]:
        """Return the optimizer's partition of the parameters: matrices, embeddings and vectors."""

    def with_few_layers(self) -> "ModelConfig":
        """Return a config of as few layers as have every kind of layer of this config, for
        `kernels`. By default, all layers."""
        return self

    @property
    def names_back_ends(self) -> bool:
        """Whether an option names a back end, which may not run with the options of a stage."""
        return True

    def kernels(
        self, sequence_length: int, batch: int = 1, segments: bool = False
    ) -> dict[str, str]:
        """Return the back ends of the operations of a training step on the default device.

        The loss and its gradient are traced on the shapes of one device, and the choices of the
        operations recorded: {"layer_norm": "triton", "mlp": "mosaic (fp8)", …}.

        If GSPMD may shard the arrays, call inside `jax.sharding.use_abstract_mesh(abstract_mesh)`.

        Args:
            batch: number of sequences on one device at a time.
            segments: whether there are segment ids.

        Raises:
            ValueError: a named back end does not exist or cannot run here.
        """
        # Recomputation would trace the operations once more, as in a call without a gradient.
        config = dataclasses.replace(self.with_few_layers(), recompute="none")
        ids = jax.ShapeDtypeStruct((batch, sequence_length), jnp.int32)

        def loss(params, step, *of_batch):
            return sum_of_losses(nnx.merge(graph(config), params), Batch(*of_batch), step)

        with recorded() as choices:
            arrays = abstract_params(config), jax.ShapeDtypeStruct((), jnp.int32), ids, ids
            jax.eval_shape(jax.grad(loss), *arrays, ids if segments else None)
        found: dict[str, set[str]] = {}
        for choice in choices:
            named = choice.numerics in self.precision.parts.in_training.values()
            name = f"{choice.back_end} ({choice.numerics})" if named else choice.back_end
            found.setdefault(choice.operation, set()).add(name)
        return {operation: " and ".join(sorted(names)) for operation, names in found.items()}

    def nondeterministic(self) -> str | None:
        """Return why a step on a GPU is nondeterministic, with the option to change; else None."""
        return None

    def for_evaluation(self) -> "ModelConfig":
        """Return the config for evaluation and generation with trained parameters."""
        return self

    def loss_options(self, step: Integer[Array, ""]) -> dict[str, Array]:
        """Return arguments of `Model.losses` that depend on the index of the training step."""
        return {}

    def lookup_params(self) -> int:
        """Return the number of parameters that are looked up only and not used in a matmul."""
        return 0

    def flops_per_token(self, sequence_length: int) -> int:
        """Return the forward and backward FLOPs of one token: 6·N + 6·L·C·T.

        N excludes `lookup_params`. Causal attention counts half of the T × T scores.
        """
        n = self.num_params - self.lookup_params()
        return 6 * n + 6 * self.n_layer * self.n_embd * sequence_length

    @property
    def kv_heads(self) -> int:
        """Key and value heads, in attention and its caches."""
        return self.n_head

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.n_embd // self.n_head

    @property
    def num_params(self) -> int:
        """Trainable parameters without padding: 124,439,808 for GPT-2 124M.

        FLOPs and published figures count the parameters without padding.
        """
        unpadded = dataclasses.replace(self, padded_vocab_size=self.vocab_size)
        return unpadded.num_allocated_params

    @property
    def num_allocated_params(self) -> int:
        """Parameters in memory, padding included: 124,475,904 for GPT-2 124M."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(self)))

    def __post_init__(self):
        name = type(self).__name__
        check_fields(self, "model.")
        if self.padded_vocab_size is None:
            object.__setattr__(self, "padded_vocab_size", _padded(self.vocab_size))
        if self.n_embd % self.n_head:
            raise ValueError(
                f"{name}: n_embd={self.n_embd} is not a multiple of n_head={self.n_head}"
            )
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"{name}: padded_vocab_size={self.padded_vocab_size} is below "
                f"vocab_size={self.vocab_size}; give padded_vocab_size={_padded(self.vocab_size)} "
                f"(--model.padded-vocab-size {_padded(self.vocab_size)}) too"
            )
        if self.padded_vocab_size - self.vocab_size > MAX_PADDING:
            least = _padded(self.vocab_size)
            raise ValueError(
                f"{name}: expected at most {MAX_PADDING} rows of padding, got "
                f"padded_vocab_size={self.padded_vocab_size} for vocab_size={self.vocab_size}; "
                f"give padded_vocab_size={least} (--model.padded-vocab-size {least}) too"
            )
        if self.precision.parts.blocks is not None and not self.supports_fp8:
            raise ValueError(
                f"{name}: expected another precision than {self.precision}: this model's blocks "
                "have no FP8 matmuls; fp8_head has those of the head"
            )


def _padded(vocab_size: int) -> int:
    return -(-vocab_size // 128) * 128


@dataclasses.dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """Config of a model whose attention, norms and MLPs are operations of pallas_kernels."""

    operational: ClassVar[frozenset[str]] = ModelConfig.operational | {"attention", "norm", "mlp"}
    supports_fp8: ClassVar[bool] = True

    attention: str = "auto"
    """Back end of attention: auto, or one of pallas_kernels.flash_attention: mosaic, triton, cudnn,
    xla, reference."""
    norm: str = "auto"
    """Back end of the norms and of the residual additions before them: auto, triton, xla or
    reference."""
    mlp: str = "auto"
    """Back end of the MLP: auto, triton, xla, reference, or for a GELU or ReLU² also mosaic."""

    @property
    def names_back_ends(self) -> bool:
        return {self.attention, self.norm, self.mlp} != {"auto"}

    def nondeterministic(self) -> str | None:
        if self.attention == "xla":
            return None
        return (
            f"needs --model.attention xla, got {self.attention}: the backward pass of cuDNN's "
            "attention adds in any order"
        )


class Model(nnx.Module):
    """A decoder-only language model.

    A subclass defines `__init__`, `hidden` and `head`.

    Args:
        config: shape, precision and kernel choices.
        rngs: `nnx.Rngs(seed)`; only the `params` stream is used.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        del rngs
        self.config = config

    def hidden(
        self,
        tokens_BT: Integer[Array, "B T"],
        cache: list[KVCache] | None = None,
        segment_ids_BT: Integer[Array, "B T"] | None = None,
    ) -> Float[Array, "B T C"]:
        """Return the final norm's output in the compute dtype.

        Args:
            tokens_BT: ids in [0, vocab_size), in any integer dtype. Another id results in NaN.
            cache: from `init_cache`. The tokens then continue the cached sequence, and their keys
                and values are appended to the cache.
            segment_ids_BT: a segment is a run of equal ids. A token attends to its own segment
                only. Positions count from the first token of the segment. None: each sequence is
                one segment. Segment ids need a model whose `hidden` and `losses` have this
                argument, and no cache.

        Raises:
            ValueError: tokens that are not a two-dimensional array of integers, more of them than
                block_size, or segment ids of another shape, not of integers, or with a cache.
        """
        raise NotImplementedError

    def head(self) -> Float[Array, "P C"]:
        """Return the weight of the output layer, padded rows included."""
        raise NotImplementedError

    def init_cache(self, batch: int, length: int) -> list[KVCache]:
        """Return an empty cache for each block, for sequences of at most `length` tokens."""
        c = self.config
        shape = (batch, length, c.kv_heads, c.head_dim)
        return [KVCache.empty(shape, c.precision.compute_dtype) for _ in range(c.n_layer)]

    def decode_kernel(self, batch: int, implementation: str = "auto") -> str:
        """Return the back end of `decode`: "xla" is a pass of `hidden` over the cache.

        Args:
            batch: sequences.
            implementation: "auto", or a back end.

        Raises:
            ValueError: no such back end, or it cannot run here.
        """
        if implementation not in ("auto", "xla"):
            raise ValueError(
                f"{type(self).__name__}: expected the back end auto or xla for generation, got "
                f"{implementation!r}"
            )
        return "xla"

    def decoding_weights(self, implementation: str) -> PyTree:
        """Return the weights of `decode` for a back end of `decode_kernel`, or None.

        Generation computes them once, and uses them until the model changes.
        With None, `decode` receives the weights that `start_decoding` computes in each call.
        """
        return None

    def start_decoding(
        self,
        tokens_BT: Integer[Array, "B T"],
        length_B: Integer[Array, " B"],
        positions: int,
        implementation: str = "auto",
    ) -> tuple[Float[Array, "B T C"], PyTree, PyTree]:
        """Compute the hidden states of prompts; return them with weights and cache for `decode`.

        Args:
            tokens_BT: prompts, padded to T with any tokens.
            length_B: lengths of the prompts.
            positions: size of the cache, at least T.
            implementation: as in `decode_kernel`.
        """
        self.decode_kernel(len(tokens_BT), implementation)
        caches = [KVCache.of_prompt() for _ in range(self.config.n_layer)]
        x_BTC = self.hidden(tokens_BT, caches)
        return x_BTC, None, [cache.extended(positions, length_B) for cache in caches]

    def decode(
        self,
        weights: PyTree,
        cache: PyTree,
        token_B: Integer[Array, " B"],
        length_B: Integer[Array, " B"],
    ) -> tuple[Float[Array, "B V"], PyTree]:
        """Return the logits after one more token of each sequence, and the new cache.

        Args:
            weights: from `decoding_weights`; if that is None, from `start_decoding`.
            cache: from `start_decoding` or the previous call.
            length_B: tokens in the cache.
        """
        cache = [dataclasses.replace(of_block, length_B=length_B) for of_block in cache]
        return self.logits(self.hidden(token_B[:, None], cache))[:, 0], cache

    def logits(
        self, x_BTC: Float[Array, "B T C"], head_VC: Float[Array, "V C"] | None = None
    ) -> Float[Array, "B T V"]:
        """Return the logits over the real vocabulary, in the compute dtype.

        Args:
            head_VC: real rows of `head` in x's dtype. None: compute them.
        """
        if head_VC is None:
            head_VC = self.head()[: self.config.vocab_size].astype(x_BTC.dtype)
        return jnp.einsum("btc,vc->btv", x_BTC, head_VC, precision=self.config.precision.matmul)

    def __call__(self, tokens_BT: Integer[Array, "B T"]) -> Float[Array, "B T V"]:
        """Return logits over the real vocabulary at every position, in the compute dtype.

        Args and errors: see `hidden`.
        """
        return self.logits(self.hidden(tokens_BT))

    def losses(
        self,
        tokens_BT: Integer[Array, "B T"],
        targets_BT: Integer[Array, "B T"],
        ignore_index: int | None = None,
        segment_ids_BT: Integer[Array, "B T"] | None = None,
    ) -> Float[Array, " N"]:
        """Return the cross-entropy of each of the N = B·T tokens in nats, fp32.

        Args:
            ignore_index: tokens with this target have loss 0 and no gradient. None: every target is
                an id.
            segment_ids_BT: see `hidden`. The last token of a segment also has a loss.
        """
        x_BTC = self.hidden(tokens_BT, **_segments(segment_ids_BT))
        return self.losses_of(x_BTC, targets_BT.reshape(-1), ignore_index=ignore_index)

    @jax.named_scope("head")
    def losses_of(
        self, x_BTC: Float[Array, "B T C"], targets: Integer[Array, "N *K"], **options: Any
    ) -> Float[Array, " N"]:
        """Return the `linear_cross_entropy` of hidden states."""
        c = self.config
        return linear_cross_entropy(
            x_BTC.reshape(-1, x_BTC.shape[-1]),
            self.head(),
            targets,
            vocab_size=c.vocab_size,
            chunk=c.loss_chunk,
            numerics=c.precision.head,
            implementation=c.loss,
            **options,
        )

    def check_tokens(
        self,
        tokens_BT: Integer[Array, "B T"],
        segment_ids_BT: Integer[Array, "B T"] | None = None,
        cache: list[KVCache] | None = None,
    ) -> None:
        """Raise the errors of `hidden`."""
        check_ids(type(self).__name__, tokens_BT)
        if segment_ids_BT is not None:
            check_ids(f"{type(self).__name__}: segment_ids_BT", segment_ids_BT)
            if segment_ids_BT.shape != tokens_BT.shape:
                raise ValueError(
                    f"expected a segment id for each token, got tokens {tokens_BT.shape} and "
                    f"segment ids {segment_ids_BT.shape}"
                )
            if cache:
                raise ValueError("expected segment ids or a cache, got both")
        if tokens_BT.shape[1] > self.config.block_size:
            raise ValueError(
                f"a sequence of {tokens_BT.shape[1]} tokens is longer than "
                f"block_size={self.config.block_size}"
            )


def loss_fn(
    model: Model,
    tokens_BT: Integer[Array, "B T"],
    targets_BT: Integer[Array, "B T"],
    ignore_index: int | None = IGNORED,
    segment_ids_BT: Integer[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Return the mean cross-entropy in nats, fp32, over the targets that are not `ignore_index`.

    The loss is 0 if all targets are ignored.

    The function is differentiable once, in reverse mode. If every back end is "reference", forward
    mode and higher derivatives also work.

    Args:
        tokens_BT: inputs, ids in [0, vocab_size), in any integer dtype.
        targets_BT: the token that follows each input; of the same shape. A target that is neither
            an id nor `ignore_index` results in NaN.
        ignore_index: target without a loss and without a gradient. None: every target is an id; the
            compiled function does not count the targets.
        segment_ids_BT: documents that are packed into a sequence, see `Model.hidden`. The target of
            a document's last token is the first token of the next document, and has a loss.

    Raises:
        ValueError: tokens or targets that are not two-dimensional arrays of integers, or differ in
            shape, more tokens than block_size, B·T not a multiple of `config.loss_chunk`, or wrong
            segment ids (see `Model.hidden`).
    """
    check_ids("loss_fn", tokens_BT)
    check_ids("loss_fn", targets_BT)
    if tokens_BT.shape != targets_BT.shape:
        raise ValueError(
            f"loss_fn: expected a target for each token, got tokens {tokens_BT.shape} and targets "
            f"{targets_BT.shape}"
        )
    losses_N = model.losses(tokens_BT, targets_BT, ignore_index, **_segments(segment_ids_BT))
    if ignore_index is None:
        return losses_N.mean()
    return losses_N.sum() / jnp.maximum(count_targets(targets_BT, ignore_index), 1)


def sum_of_losses(
    model: Model, batch_BT: Batch, step: Integer[Array, ""] | None = None
) -> Float[Array, ""]:
    """Return the sum of the losses of the targets that are not ignored.

    Args:
        step: index of the training step, for a loss that depends on it; None for the loss of
            evaluation.
    """
    options = {} if step is None else model.config.loss_options(step)
    segments = _segments(batch_BT.segments)
    return model.losses(batch_BT.inputs, batch_BT.targets, IGNORED, **options, **segments).sum()


def _segments(segment_ids_BT: Integer[Array, "B T"] | None) -> dict[str, Array]:
    """Return the keyword argument; {} without segment ids, because a model may lack the
    argument."""
    return {} if segment_ids_BT is None else {"segment_ids_BT": segment_ids_BT}


def count_targets(targets: Integer[Array, "..."], ignore_index: int = IGNORED) -> Float[Array, ""]:
    """Return the number of targets that are not `ignore_index`, fp32."""
    return (to_int32(targets) != ignore_index).sum().astype(jnp.float32)


def why_no_segments(config: ModelConfig) -> str | None:
    """Return why a model cannot separate documents; None if `segment_ids_BT` is supported."""
    kind = type(nnx.merge(graph(config), abstract_params(config)))
    for method in (kind.hidden, kind.losses):
        parameters = inspect.signature(method).parameters
        keywords = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())
        if "segment_ids_BT" not in parameters and not keywords:
            return f"{method.__qualname__} has no argument segment_ids_BT"
    return None


@functools.lru_cache(maxsize=32)
def _abstract(config: ModelConfig):
    return nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))), nnx.Param)


def graph(config: ModelConfig) -> nnx.GraphDef:
    """Return the static part of a model: `nnx.merge(graph(config), params)` is the model.

    No array is allocated.
    """
    return _abstract(config)[0]


def abstract_params(config: ModelConfig) -> dict:
    """Return the shapes and dtypes of the parameters as a nested dict of `jax.ShapeDtypeStruct`."""
    return nnx.to_pure_dict(_abstract(config)[1])


def placements(graphdef: nnx.GraphDef, params: PyTree, parallel: Parallel) -> dict:
    """Return the `gptjax.parallel.Placement` of each parameter, as a nested dict.

    A parameter is read in the `read_dtype` of its `nnx.Param`, or else in its own dtype. The
    parameters of a `gptjax.models.layers.Block` belong to this block.

    Args:
        params: parameters, or their shapes.
    """
    model = nnx.merge(graphdef, params)
    blocks = [path for path, module in nnx.iter_modules(model) if isinstance(module, Block)]

    def place(path, variable) -> Placement:
        x, in_block = variable.get_value(), any(path[: len(block)] == block for block in blocks)
        return parallel.placement(x, variable.get_metadata().get("read_dtype", x.dtype), in_block)

    return nnx.to_pure_dict(nnx.map_state(place, nnx.split(model, nnx.Param)[1]))


def on_devices(
    function: Callable[..., Any],
    graphdef: nnx.GraphDef,
    params: PyTree,
    step: Integer[Array, ""] | None,
    batch: PyTree,
    batch_axis: int,
    parallel: Parallel | None,
) -> Any:
    """Return function(params, step, batch, over_devices) on each device's shard of the batch.

    The result must be equal on all devices: `over_devices(reduce, x)` is reduce(x, AXIS), or x on
    one device. All parameters are gathered at once: without their gradients, nothing else is
    stored.
    """
    if parallel is None or parallel.devices == 1:
        return function(params, step, batch, lambda reduce, x: x)
    strategy = "data" if parallel.strategy == "data" else "zero1"
    gathering = dataclasses.replace(parallel, strategy=strategy)
    places = placements(graphdef, params, gathering)

    def on_one_device(params_and_step, batch):
        params, step = params_and_step
        whole = gathering.gather(params, places)
        return function(whole, step, batch, lambda reduce, x: reduce(x, AXIS))

    run = gathering.on_each_device(on_one_device, (params, step), batch_axis=batch_axis, out=None)
    return run((params, step), batch)


def init_params(config: ModelConfig, seed: int | Integer[Array, ""]) -> dict:
    """Return the parameters of `config.build(nnx.Rngs(seed))` as a nested dict of arrays.

    Call this function outside `jax.jit`, where one executable per distinct shape is compiled.
    Inside `jax.jit`, XLA compiles each random matrix separately: 131 s for GPT-2 XL on an H200.
    """
    return params_of(config.build(nnx.Rngs(jax.random.key(seed))))


def params_of(model: nnx.Module) -> dict:
    """Return the parameters of a module as a nested dict."""
    return nnx.to_pure_dict(nnx.split(model, nnx.Param)[1])
