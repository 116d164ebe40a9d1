"""Training state, and the pure, jittable training and evaluation steps.

The model is split once into a static graph and a plain dict of arrays. The step maps (state,
batch) to (state, metrics) and has no side effects.

A batch is a `gptjax.Batch` of inputs, targets and segments, or an array of sequences of T+1 tokens:
the first T are inputs, the last T their targets.

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

from gptjax.data import Batch
from gptjax.models.base import (
    ModelConfig,
    count_targets,
    init_params,
    on_devices,
    placements,
    sum_of_losses,
)
from gptjax.models.record import with_metrics
from gptjax.optim import Scheduled, evaluation_params, low_precision
from gptjax.optim.adamw import global_norm
from gptjax.optim.transforms import metrics_of
from gptjax.parallel import AXIS, Parallel
from gptjax.training.loop import sum_over
from gptjax.training.outliers import OutlierWindow, observe
from gptjax.training.tying import tie, tie_gradients
from pallas_kernels.gemm import clipping


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

    def evaluation_params(self) -> PyTree:
        """Return the parameters to evaluate and to sample from."""
        return evaluation_params(self.params, self.opt_state)


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
    params = init_params(config, seed) if params is None else params
    if parallel is not None:  # the moments then have the shardings of the parameters
        params = jax.device_put(params, parallel.shardings(params))
    opt_state = tx.init(params)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=low_precision.stored(params, opt_state),
        opt_state=opt_state,
        rng=jax.random.key_data(jax.random.key(seed)),
        loss_window=OutlierWindow.empty(),
        grad_norm_window=OutlierWindow.empty(),
    )
    return state if parallel is None else jax.device_put(state, parallel.shardings(state))


def loss_and_grads(
    graphdef: nnx.GraphDef,
    params: PyTree,
    batch_ABT: Batch | Int[Array, "A B T1"],
    parallel: Parallel | None = None,
    step: Int[Array, ""] | None = None,
    has_metrics: bool = False,
) -> tuple[Any, PyTree]:
    """Compute the mean loss over all targets and its gradient, one micro-batch at a time.

    The mean is over the targets that are not ignored, and 0 if all are. The mean does not depend on
    the split of the targets over micro-batches and devices.

    Args:
        graphdef: from `gptjax.models.base.graph`.
        batch_ABT: the batch, or its sequences of T+1 tokens.
        parallel: the devices that share the computation; None for one device.
        step: index of the training step, for a loss that depends on it; None for the loss of
            evaluation.
        has_metrics: return (loss, metrics) in place of the loss. The metrics are those that the
            model records, averaged over micro-batches and devices.

    Returns:
        The loss (fp32) and a gradient like `params`, in fp32.
    """
    batch_ABT = _checked("loss_and_grads", batch_ABT, "ABT")
    micro_batches = batch_ABT.inputs.shape[0]

    def on_one_device(params_and_step, batch_ABT):
        params, step = params_and_step
        whole, reduce = jax.vjp(lambda p: parallel.gather(p, places), _in_fp32(params))
        whole = jax.tree.map(lambda p, x: _cast(x, p.dtype), params, whole)
        count = jax.lax.psum(count_targets(batch_ABT.targets), AXIS)
        share, gathers = micro_batches * _inverse(count), parallel.gathers_blocks
        (loss, metrics), grads = _accumulate(graphdef, whole, batch_ABT, share, gathers, step)
        means = jax.lax.psum(loss, AXIS), jax.lax.pmean(metrics, AXIS)
        return means, reduce(grads)[0]

    if parallel is None or parallel.devices == 1:
        share = micro_batches * _inverse(count_targets(batch_ABT.targets))
        (loss, metrics), grads = _accumulate(graphdef, params, batch_ABT, share, step=step)
    else:
        places, both = placements(graphdef, params, parallel), (params, step)
        run = parallel.on_each_device(on_one_device, both, batch_axis=1, out=(None, params))
        (loss, metrics), grads = run(both, batch_ABT)
    return ((loss, metrics) if has_metrics else loss), grads


def _accumulate(
    graphdef: nnx.GraphDef,
    params: PyTree,
    batch_ABT: Batch,
    share: Float[Array, ""],
    gathers: bool = False,
    step: Int[Array, ""] | None = None,
) -> tuple[tuple[Float[Array, ""], dict[str, Array]], PyTree]:
    """Return the mean over the micro-batches of one device of share · Σ losses, and its gradient.

    Metrics that the model records are averaged too.

    Args:
        share: factor of the losses. Scaling the losses adds no pass to the backward pass; scaling
            the gradients of GPT-2 124M would be a pass over 0.5 GB.
        gathers: whether the model gathers its blocks' parameters.
    """

    def micro_batch(params, batch_BT):
        model = nnx.merge(graphdef, params)
        total, metrics = with_metrics(sum_of_losses)(model, batch_BT, step)
        return share * total, metrics

    def value_and_grad(params, batch_BT):
        return jax.value_and_grad(micro_batch, has_aux=True)(_in_fp32(params), batch_BT)

    micro_batches = batch_ABT.inputs.shape[0]
    if micro_batches == 1:
        return value_and_grad(params, _first(batch_ABT))

    def sums(*inputs):
        # Otherwise, the all-gathers move out of the loop, and all gathered parameters are stored.
        inputs = jax.lax.optimization_barrier(inputs) if gathers else inputs
        (loss, metrics), grads = value_and_grad(*inputs)
        return (loss, grads), metrics

    total, metrics = sum_over(sums, params, batch_ABT)
    loss, grads = jax.tree.map(lambda x: x / micro_batches, total)
    return (loss, jax.tree.map(lambda x: x.mean(0), metrics)), grads


def _in_fp32(params: PyTree) -> PyTree:
    """Return the parameters in fp32, so that the gradients of bf16 parameters are fp32, too.

    The model converts a bf16 parameter back. XLA removes both conversions.
    """
    return _cast(params, jnp.float32)


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def _inverse(count: Float[Array, ""]) -> Float[Array, ""]:
    return 1 / jnp.maximum(count, 1)


def _first(batch_ABT: Batch) -> Batch:
    return jax.tree.map(lambda x: x[0], batch_ABT)


def make_train_step(
    graphdef: nnx.GraphDef,
    tx: optax.GradientTransformation,
    *,
    parallel: Parallel | None = None,
    skip_loss_z: float | None = None,
    skip_grad_norm_z: float | None = None,
    loss_reduction: Literal["mean", "sequence_sum"] = "mean",
) -> Callable[[TrainState, Any], tuple[TrainState, dict]]:
    """Return the training step: (state, batch) → (state, metrics).

    Args:
        graphdef: from `gptjax.models.base.graph`.
        tx: the optimizer, including its learning rate.
        parallel: the devices that share the computation; None for one device.
        skip_loss_z, skip_grad_norm_z: skip an update whose loss or gradient norm exceeds the mean
            of its last 128 values by more than this number of standard deviations. If either is
            set, also skip an update whose loss or gradient norm is not finite. With None for both,
            skip no update.
        loss_reduction: "mean": the gradient is that of the mean loss. "sequence_sum": the gradient
            is multiplied by T, as that of the sum over the tokens of a sequence, averaged over the
            sequences. The metric `loss` is the mean in both.

    Returns:
        A pure function. Its batch is a `Batch` of A micro-batches of B sequences, or an integer
        array of shape (A, B, T + 1). Metrics are loss (nats), grad_norm (before clipping), loss_z,
        grad_norm_z, skipped (0 or 1), lr if `tx` is `gptjax.optim.Scheduled`, and those that the
        model records (`gptjax.models.record`) and the optimizer keeps (`gptjax.optim.Metrics`).
    """

    def train_step(
        state: TrainState, batch_ABT: Batch | Int[Array, "A B T1"]
    ) -> tuple[TrainState, dict]:
        batch_ABT = _checked("train_step", batch_ABT, "ABT")
        tied = nnx.merge(graphdef, state.params).config.tied_parameters()
        (loss, recorded), grads = loss_and_grads(
            graphdef, state.params, batch_ABT, parallel, state.step, True
        )
        if loss_reduction == "sequence_sum":
            length = batch_ABT.inputs.shape[-1]
            grads = jax.tree.map(lambda g: g * length, grads)
        grads = tie_gradients(grads, tied)
        grad_norm = global_norm(grads)
        loss_window, loss_z = observe(state.loss_window, loss)
        grad_norm_window, grad_norm_z = observe(state.grad_norm_window, grad_norm)

        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        recorded = dict(**recorded, **metrics_of(opt_state))
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
            "loss_z": loss_z,
            "grad_norm_z": grad_norm_z,
            "skipped": skipped.astype(jnp.int32),
        }
        if isinstance(tx, Scheduled):
            metrics["lr"] = tx.learning_rate_at(state.step)
        state = TrainState(
            state.step + 1, params, opt_state, state.rng, loss_window, grad_norm_window
        )
        return state, dict(**metrics, **recorded)

    return train_step


def _checked(step: str, batch: Any, axes: str) -> Batch:
    """Return the batch, or the batch of sequences of T + 1 tokens."""
    if isinstance(batch, Batch):
        if (shape := batch.inputs.shape) != batch.targets.shape or len(shape) != len(axes):
            raise ValueError(
                f"{step}: expected a Batch with inputs and targets of one shape {axes}, got "
                f"{shape} and {batch.targets.shape}"
            )
        return batch
    integers = jnp.issubdtype(batch.dtype, jnp.integer)
    if batch.ndim != len(axes) or 0 in batch.shape or batch.shape[-1] < 2 or not integers:
        raise ValueError(
            f"{step}: expected a Batch, or integers of shape ({', '.join(axes)} + 1), got "
            f"{batch.shape} in {batch.dtype}"
        )
    return Batch.of(batch)


def make_eval_step(
    graphdef: nnx.GraphDef, parallel: Parallel | None = None
) -> Callable[[PyTree, Any], Any]:
    """Return the evaluation step: (params, batch of B sequences) → mean loss in nats, fp32.

    Args:
        graphdef, parallel: see `make_train_step`.
    """

    def eval_step(params: PyTree, batch_BT: Batch | Int[Array, "B T1"]) -> Float[Array, ""]:
        batch_BT = _checked("eval_step", batch_BT, "BT")

        def mean_loss(params, step, batch_BT, over_devices):
            total = sum_of_losses(nnx.merge(graphdef, params), batch_BT)
            count = count_targets(batch_BT.targets)
            total, count = over_devices(jax.lax.psum, (total, count))
            return total * _inverse(count)

        return on_devices(mean_loss, graphdef, params, None, batch_BT, 0, parallel)

    return eval_step


def make_fp8_clipping_step(
    graphdef: nnx.GraphDef, parallel: Parallel | None = None
) -> Callable[[PyTree, Any, Any], Any]:
    """Return the function (params, batch, step) → shares of the clipped numbers and of the zeros
    of each FP8 operand, in the forward and backward pass of the first micro-batch.

    Args:
        graphdef, parallel: see `make_train_step`.
    """

    def fp8_clipping_step(
        params: PyTree, batch_ABT: Batch | Int[Array, "A B T1"], step
    ) -> dict[str, Array]:
        batch_ABT = _checked("fp8_clipping_step", batch_ABT, "ABT")

        def shares(params, step, batch_ABT, over_devices):
            batch_BT = _first(batch_ABT)

            def loss():
                share = _inverse(count_targets(batch_BT.targets))
                return share * sum_of_losses(nnx.merge(graphdef, params), batch_BT, step)

            return over_devices(jax.lax.pmean, clipping.shares(loss))

        return on_devices(shares, graphdef, params, step, batch_ABT, 1, parallel)

    return fp8_clipping_step
