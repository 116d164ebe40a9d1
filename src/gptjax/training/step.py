"""Training state, and the pure, jittable training and evaluation steps.

The model is split once into a static graph and a plain dict of arrays. The step maps (state,
tokens) to (state, metrics) and has no side effects.

A window is a sequence of T+1 tokens: the first T are inputs, the last T their targets. In windows
with a mask (`masked=True`), a token t without a loss is stored as −1 − t: as an input, the token is
t; as a target, it is ignored. Without a mask, the compiled step does not test for ignored targets.

With the id of the end-of-text token (`eot`), attention does not cross documents. A document begins
with EOT, and positions count from its EOT. Tokens before the first EOT of a window are the rest of
a document. The last token of a document predicts the EOT of the next document.

Shapes: A micro-batches per step, B sequences per micro-batch over all devices, T time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Integer, PyTree

from gptjax.models.base import (
    IGNORED,
    Model,
    ModelConfig,
    count_targets,
    init_params,
    loss_fn,
    read_dtypes,
)
from gptjax.optim import low_precision
from gptjax.optim.adamw import global_norm
from gptjax.parallel import AXIS, Parallel
from gptjax.training.outliers import OutlierWindow, observe
from gptjax.training.tying import tie, tie_gradients
from pallas_kernels.fp8 import clipping


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Complete training state except the data loader's position.

    Leaves are arrays, or only their shapes and shardings.
    """

    step: PyTree
    """Number of updates, including skipped ones; an int32 scalar."""
    params: PyTree
    opt_state: PyTree
    rng: PyTree
    """Key data of the run's random key, uint32 of shape (2,). Sampling folds in the step."""
    loss_window: OutlierWindow
    grad_norm_window: OutlierWindow


def init_state(
    config: ModelConfig,
    tx: optax.GradientTransformation,
    seed: int | Integer[Array, ""],
    parallel: Parallel | None = None,
    params: PyTree | None = None,
) -> TrainState:
    """Return the state before the first step.

    A seed determines the state, inside and outside `jax.jit`, on any number of devices.

    Args:
        parallel: devices and shardings of the state; None for JAX's default device.
        params: initial parameters, which become part of the state; None for random parameters.
    """
    if parallel is None:
        return _init_state(config, tx, seed, params)
    with parallel.sharding_initial_arrays():
        state = _init_state(config, tx, seed, params)
    return jax.device_put(state, parallel.shardings(state))


def _init_state(config, tx, seed, params) -> TrainState:
    params = init_params(config, seed) if params is None else params
    opt_state = tx.init(params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=low_precision.stored(params, opt_state),
        opt_state=opt_state,
        rng=jax.random.key_data(jax.random.key(seed)),
        loss_window=OutlierWindow.empty(),
        grad_norm_window=OutlierWindow.empty(),
    )


def loss_and_grads(
    graphdef: nnx.GraphDef,
    params: PyTree,
    windows_ABT1: Int[Array, "A B T1"],
    parallel: Parallel | None = None,
    masked: bool = False,
    eot: int | None = None,
    step: Int[Array, ""] | None = None,
) -> tuple[Float[Array, ""], PyTree]:
    """Compute the mean loss over all targets and its gradient, one micro-batch at a time.

    The mean does not depend on the split of the targets over micro-batches and devices.

    Args:
        graphdef: from `gptjax.models.base.graph`.
        windows_ABT1: sequences of T+1 tokens: the first T are inputs, the last T their targets.
        parallel: the devices that share the computation; None for one device.
        masked: whether the windows have a mask. The mean is then over the targets that are not
            ignored, and 0 if all targets are ignored.
        eot: id that begins each document, to separate documents; None not to.
        step: index of the training step, for a loss that depends on it; None for the loss of
            evaluation.

    Returns:
        The loss (fp32) and a gradient like `params`, in fp32.
    """
    if parallel is None or parallel.devices == 1:
        share = _inverse(_count(windows_ABT1)) if masked else None
        how = {"masked": masked, "eot": eot, "step": step}
        return _accumulate(graphdef, params, windows_ABT1, share, **how)
    placements = parallel.placements(read_dtypes(nnx.merge(graphdef, params).config))
    annotated = parallel.annotate(graphdef, placements)

    def on_one_device(params_and_step, windows_ABT1):
        params, step = params_and_step
        whole, reduce = jax.vjp(lambda p: parallel.gather(p, placements), _in_fp32(params))
        whole = jax.tree.map(lambda x, p: x.astype(p.dtype), whole, params)
        share = 1 / parallel.devices
        if masked:
            share = _inverse(jax.lax.psum(_count(windows_ABT1), AXIS))
        loss, grads = _accumulate(
            annotated, whole, windows_ABT1, share, parallel.gathers_blocks, masked, eot, step
        )
        if not parallel.overlap_reduce:
            loss, grads = jax.lax.optimization_barrier((loss, grads))
        return jax.lax.psum(loss, AXIS), reduce(grads)[0]

    both = params, step
    run = parallel.on_each_device(on_one_device, both, batch_axis=1, out=(None, params))
    return run(both, windows_ABT1)


def _accumulate(
    graphdef: nnx.GraphDef,
    params: PyTree,
    windows_ABT1: Int[Array, "A B T1"],
    share: float | Float[Array, ""] | None = None,
    gathers: bool = False,
    masked: bool = False,
    eot: int | None = None,
    step: Int[Array, ""] | None = None,
) -> tuple[Float[Array, ""], PyTree]:
    """Return the mean of the loss and of the gradient over the micro-batches of one device.

    With `masked`, return the sums of the losses of all tokens and of their gradients.

    Args:
        gathers: whether the model gathers its blocks' parameters.
        share: factor of loss and gradient. Scaling the loss adds no pass to the backward pass;
            scaling the gradients of GPT-2 124M would be a pass over 0.5 GB.
    """

    def micro_batch(params, windows_BT1):
        model = nnx.merge(graphdef, params)
        loss = (_masked_sum if masked else _mean)(model, windows_BT1, eot, step)
        return loss if share is None else loss * share

    def value_and_grad(params, windows_BT1):
        return jax.value_and_grad(micro_batch)(_in_fp32(params), windows_BT1)

    micro_batches = windows_ABT1.shape[0]
    if micro_batches == 1:
        return value_and_grad(params, windows_ABT1[0])

    def add(total, windows_BT1):
        inputs = params, windows_BT1
        if gathers:
            # Otherwise, XLA moves the all-gathers out of the loop and stores all gathered
            # parameters.
            inputs = jax.lax.optimization_barrier(inputs)
        return jax.tree.map(jnp.add, total, value_and_grad(*inputs)), None

    zero = (
        jnp.zeros((), jnp.float32),
        jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
    )
    total, _ = jax.lax.scan(add, zero, windows_ABT1)
    return total if masked else jax.tree.map(lambda x: x / micro_batches, total)


def _in_fp32(params: PyTree) -> PyTree:
    """Return the parameters in fp32, so that the gradients of bf16 parameters are fp32, too.

    The model converts a bf16 parameter back. XLA removes both conversions.
    """
    return jax.tree.map(lambda p: p.astype(jnp.float32), params)


def _mean(
    model: Model,
    windows_BT1: Int[Array, "B T1"],
    eot: int | None,
    step: Int[Array, ""] | None = None,
) -> Float[Array, ""]:
    tokens_BT, targets_BT = windows_BT1[:, :-1], windows_BT1[:, 1:]
    ids_BT = _document_ids(tokens_BT, eot)
    if options := _loss_options(model, step):
        return model.losses(tokens_BT, targets_BT, None, ids_BT, **options).mean()
    return loss_fn(model, tokens_BT, targets_BT, None, ids_BT)


def _masked_sum(
    model: Model,
    windows_BT1: Int[Array, "B T1"],
    eot: int | None,
    step: Int[Array, ""] | None = None,
) -> Float[Array, ""]:
    """Return the sum of the losses of the targets that are not ignored."""
    tokens_BT = jnp.maximum(windows_BT1, ~windows_BT1)[:, :-1]  # ~t = −1 − t
    ids_BT, options = _document_ids(tokens_BT, eot), _loss_options(model, step)
    return model.losses(tokens_BT, _targets(windows_BT1), IGNORED, ids_BT, **options).sum()


def _loss_options(model: Model, step: Int[Array, ""] | None) -> dict[str, Array]:
    return {} if step is None else model.config.loss_options(step)


def _document_ids(tokens_BT: Int[Array, "B T"], eot: int | None) -> Int[Array, "B T"] | None:
    """Return the number of EOTs up to each token; an EOT belongs to the following document."""
    return None if eot is None else jnp.cumsum(tokens_BT == eot, axis=1, dtype=jnp.int32)


def _targets(windows: Int[Array, "*batch T1"]) -> Int[Array, "*batch T"]:
    return jnp.maximum(windows[..., 1:], IGNORED)


def _count(windows: Int[Array, "*batch T1"]) -> Float[Array, ""]:
    return count_targets(_targets(windows))


def _inverse(count: Float[Array, ""]) -> Float[Array, ""]:
    return 1 / jnp.maximum(count, 1)


def make_train_step(
    graphdef: nnx.GraphDef,
    tx: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    *,
    parallel: Parallel | None = None,
    skip_loss_z: float | None = None,
    skip_grad_norm_z: float | None = None,
    masked: bool = False,
    eot: int | None = None,
    loss_reduction: Literal["mean", "sequence_sum"] = "mean",
) -> Callable[[TrainState, Any], tuple[TrainState, dict]]:
    """Return the training step: (state, windows_ABT1) → (state, metrics).

    Args:
        graphdef: from `gptjax.models.base.graph`.
        tx: the optimizer, including its learning rate.
        learning_rate: the learning-rate schedule of `tx`, for the metrics.
        parallel: the devices that share the computation; None for one device.
        skip_loss_z, skip_grad_norm_z: skip an update whose loss or gradient norm exceeds the mean
            of its last 128 values by more than this number of standard deviations. If either is
            set, also skip an update whose loss or gradient norm is not finite. With None for both,
            skip no update.
        masked: whether the windows have a mask.
        eot: id that begins each document, to separate documents; None not to.
        loss_reduction: "mean": the gradient is that of the mean loss. "sequence_sum": the gradient
            is multiplied by T, as that of the sum over the tokens of a sequence, averaged over the
            sequences. The metric `loss` is the mean in both.

    Returns:
        A pure function. Metrics are scalars: loss (nats), grad_norm (before clipping), lr, loss_z,
        grad_norm_z, skipped (0 or 1).
    """

    def train_step(
        state: TrainState, windows_ABT1: Int[Array, "A B T1"]
    ) -> tuple[TrainState, dict]:
        _check_windows("train_step", "(A, B, T + 1), A micro-batches of", windows_ABT1, 3)
        tied = nnx.merge(graphdef, state.params).config.tied_parameters()
        loss, grads = loss_and_grads(
            graphdef, state.params, windows_ABT1, parallel, masked, eot, state.step
        )
        if loss_reduction == "sequence_sum":
            length = windows_ABT1.shape[-1] - 1
            grads = jax.tree.map(lambda g: g * length, grads)
        grads = tie_gradients(grads, tied)
        grad_norm = global_norm(grads)
        loss_window, loss_z = observe(state.loss_window, loss)
        grad_norm_window, grad_norm_z = observe(state.grad_norm_window, grad_norm)

        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = low_precision.apply_updates(state.params, updates)
        params, opt_state = tie(params, tied), tie(opt_state, tied)

        skipped = jnp.zeros((), bool)
        if skip_loss_z is not None:
            skipped |= loss_z > skip_loss_z
        if skip_grad_norm_z is not None:
            skipped |= grad_norm_z > skip_grad_norm_z
        if skip_loss_z is not None or skip_grad_norm_z is not None:
            skipped |= ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm))

            # Counters advance even if the update is skipped, so the learning rate follows the step.
            def keep(old, new):
                counter = new.ndim == 0 and jnp.issubdtype(new.dtype, jnp.integer)
                return new if counter else jnp.where(skipped, old, new)

            params, opt_state = jax.tree.map(
                keep, (state.params, state.opt_state), (params, opt_state)
            )

        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": learning_rate(state.step),
            "loss_z": loss_z,
            "grad_norm_z": grad_norm_z,
            "skipped": skipped.astype(jnp.int32),
        }
        state = TrainState(
            state.step + 1, params, opt_state, state.rng, loss_window, grad_norm_window
        )
        return state, metrics

    return train_step


def _check_windows(step: str, expected: str, windows: Array, axes: int) -> None:
    if (
        windows.ndim != axes
        or 0 in windows.shape
        or windows.shape[-1] < 2
        or (not jnp.issubdtype(windows.dtype, jnp.integer))
    ):
        raise ValueError(
            f"{step}: expected integer windows of shape {expected} B sequences of T + 1 tokens "
            f"each, got {windows.shape} in {windows.dtype}"
        )


def make_eval_step(
    graphdef: nnx.GraphDef,
    parallel: Parallel | None = None,
    *,
    masked: bool = False,
    eot: int | None = None,
) -> Callable[[PyTree, Any], Any]:
    """Return the evaluation step: (params, windows_BT1) → mean loss in nats, fp32.

    Args:
        graphdef, parallel, masked, eot: see `make_train_step`.
    """

    def mean_loss(params: PyTree, windows_BT1: Int[Array, "B T1"], reduce) -> Float[Array, ""]:
        model = nnx.merge(graphdef, params)
        if not masked:
            return reduce(jax.lax.pmean, _mean(model, windows_BT1, eot))
        sums = _masked_sum(model, windows_BT1, eot), _count(windows_BT1)
        total, count = reduce(jax.lax.psum, sums)
        return total * _inverse(count)

    def eval_step(params: PyTree, windows_BT1: Int[Array, "B T1"]) -> Float[Array, ""]:
        _check_windows("eval_step", "(B, T + 1),", windows_BT1, 2)
        if parallel is None or parallel.devices == 1:
            return mean_loss(params, windows_BT1, lambda _, x: x)
        gathering, placements = _gathering(graphdef, params, parallel)

        def on_one_device(params, windows_BT1):
            whole = gathering.gather(params, placements)
            return mean_loss(whole, windows_BT1, lambda collective, x: collective(x, AXIS))

        return gathering.on_each_device(on_one_device, params, batch_axis=0, out=None)(
            params, windows_BT1
        )

    return eval_step


def make_clipping_step(
    graphdef: nnx.GraphDef,
    parallel: Parallel | None = None,
    *,
    masked: bool = False,
    eot: int | None = None,
) -> Callable[[PyTree, Any, Any], Any]:
    """Return the function (params, windows_ABT1, step) → share of the clipped numbers of each FP8
    operand, in the forward and backward pass of the first micro-batch.

    Args:
        graphdef, parallel, masked, eot: see `make_train_step`.
    """

    def shares(params: PyTree, windows_BT1: Int[Array, "B T1"], step) -> dict[str, Array]:
        def loss():
            model = nnx.merge(graphdef, params)
            return (_masked_sum if masked else _mean)(model, windows_BT1, eot, step)

        return clipping.shares(loss)

    def clipping_step(params: PyTree, windows_ABT1: Int[Array, "A B T1"], step) -> dict[str, Array]:
        if parallel is None or parallel.devices == 1:
            return shares(params, windows_ABT1[0], step)
        gathering, placements = _gathering(graphdef, params, parallel)

        def on_one_device(params_and_step, windows_ABT1):
            params, step = params_and_step
            whole = gathering.gather(params, placements)
            return jax.lax.pmean(shares(whole, windows_ABT1[0], step), AXIS)

        both = params, step
        return gathering.on_each_device(on_one_device, both, batch_axis=1, out=None)(
            both, windows_ABT1
        )

    return clipping_step


def _gathering(
    graphdef: nnx.GraphDef, params: PyTree, parallel: Parallel
) -> tuple[Parallel, PyTree]:
    """Return the strategy that gathers all parameters at once, and their placements.

    Without gradients of the parameters, nothing else is stored.
    """
    strategy = "data" if parallel.strategy == "data" else "zero1"
    gathering = dataclasses.replace(parallel, strategy=strategy)
    return gathering, gathering.placements(read_dtypes(nnx.merge(graphdef, params).config))
