"""Fused classifier of a language model: cross-entropy of each row and its gradient in one pass.

    z = cap(x)      loss_n = logsumexp(z_n) − z_n[target_n]
    dx_nv = (softmax(z_n)_v − [v = target_n]) · dz/dx

With M targets per row and weights w (multi-token prediction)

    loss_n = Σ_m w_m (logsumexp(z_n) − z_n[target_nm])
    dx_nv = Σ_m w_m (softmax(z_n)_v − [v = target_nm]) · dz/dx

over the targets that are not ignored. With every option, with lse_n = logsumexp(z_n) over the V
real columns, label smoothing ε, z-loss ζ and a weight r_n of each row,

    loss_n = r_n Σ_m w_m (lse_n − (1 − ε) z_n[target_nm] − ε/V Σ_v z_nv + ζ lse_n²)
    dx_nv = r_n Σ_m w_m ((1 + 2 ζ lse_n) softmax(z_n)_v − (1 − ε) [v = target_nm] − ε/V) · dz/dx

The weights multiply the z-loss too, and lse itself depends on the logits only.

Shapes: N rows (tokens), V columns (padding included), M targets per row. Softmax and loss cover the
first `vocab_size` columns; the others may hold any value, NaN included, and get a gradient of
exactly zero. cap is the identity, c·tanh(x/c), or a `SigmoidCap`: scale·σ((x + shift)/width).

The gradient of a row is the gradient of that row's loss, and overwrites the logits. For a mean over
N rows the caller divides by N.

Back ends:
    triton: one program per row. The program loads the row from HBM, loads the row again from the L2
        cache, and overwrites the row.
        On logits that are sharded over the columns, each device runs plain JAX between two
        all-reduces of the rows: of the maxima, and of the sums of exp and the targets' logits.
    xla: plain JAX with fp32 statistics.
    reference: as in pallas_kernels/__init__.py, through all results.
triton and xla are differentiable with respect to the logits only: the losses and lse. The
derivative of lse reads the logits again, in plain JAX.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, XLA, BackEnd
from pallas_kernels._partition import Rule, shards_of
from pallas_kernels._types import Array, Float, Integer
from pallas_kernels.gemm.operands import E5M2, largest, stochastic_e5m2

Number = float | int
Implementation = Literal["auto", "triton", "xla", "reference"]


class SigmoidCap(NamedTuple):
    """Soft cap z = scale · σ((x + shift) / width): logits between 0 and `scale`.

    The defaults are the values of the modded-nanogpt speedrun.
    """

    scale: Number = 23.0
    shift: Number = 5.0
    width: Number = 7.5


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a call on which the choice of a back end depends."""

    softcap: Number | SigmoidCap | None = None


# The Triton kernel computes c·tanh(x/c) as a sigmoid, with an error of about 2c·2⁻²⁴.
LARGEST_TRITON_CAP = 128


def _why_not_triton(call: Facts) -> str | None:
    cap = call.softcap
    if isinstance(cap, float | int) and cap > LARGEST_TRITON_CAP:
        return f"supports c·tanh(x/c) with c of at most {LARGEST_TRITON_CAP}, not {cap}"
    return _dispatch.why_not_triton()


_dispatch.register(
    "fused_classifier",
    back_ends=[BackEnd("triton", _why_not_triton, custom=True, rule=True), XLA, REFERENCE],
    facts=Facts,
)


def fused_classifier(
    logits_NV: Float[Array, "N V"],
    targets_N: Integer[Array, " N"] | Integer[Array, "N M"],
    *,
    vocab_size: int | None = None,
    softcap: Number | SigmoidCap | None = None,
    target_weights: Float[Array, " M"] | Sequence[Number] | None = None,
    ignore_index: int | None = None,
    label_smoothing: Number = 0.0,
    z_loss: Number = 0.0,
    weights_N: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    implementation: Implementation | str = "auto",
) -> tuple[Float[Array, "..."], ...]:
    """Cross-entropy of each row in nats, and the gradient with respect to the row's logits.

    The gradient overwrites the logits' buffer where the buffer is free (an intermediate of a jitted
    function, or a donated argument); elsewhere XLA copies the logits first. The losses are
    differentiable, twice with implementation "xla" or "reference". The returned gradient is
    differentiable only with implementation "reference".

    Args:
        logits_NV: fp32, bf16 or fp16.
        targets_N: target column of each row, in [0, vocab_size), in any integer type; or M target
            columns of each row. Out of this range the loss and the gradient of the row are NaN.
        vocab_size: real columns; V when None.
        softcap: None, the c of c·tanh(x/c), or a `SigmoidCap`. "triton" needs c of at most 128.
        target_weights: weights of the M targets of every row; 1 when None. An array may be traced.
        ignore_index: int32; targets with this value do not contribute. A row whose targets are all
            ignored has a loss and a gradient of exactly 0.
        label_smoothing: ε in [0, 1], as in PyTorch: a target has the probability 1 − ε, and ε is
            shared by the real columns.
        z_loss: factor ζ ≥ 0 of lse_n², which is added to the loss of each target that is not
            ignored, before the weights.
        weights_N: weight of each row. Multiplies the row's loss and gradient.
        return_lse: whether to return lse_N too: the log-sum-exp of each row's capped logits over
            the real columns. No target or weight changes lse_N.
        implementation: "auto", or a back end: "triton", "xla", "reference".

    Returns:
        losses_N in fp32, dlogits_NV in the logits' dtype, and with `return_lse` lse_N in fp32.

    Raises:
        ValueError: wrong shapes or dtypes, or the named back end cannot run this call.
        NotImplementedError: differentiation through dlogits_NV, or with respect to target_weights
            or weights_N.
    """
    shape, vocab_size = logits_NV.shape, logits_NV.shape[-1] if vocab_size is None else vocab_size
    rows_match = len(shape) == 2 and targets_N.shape[:1] == shape[:1]
    if not (rows_match and 0 < vocab_size <= shape[1]):
        raise ValueError(
            "fused_classifier: expected logits (N, V), targets (N,) or (N, M), and "
            f"0 < vocab_size ≤ V, got {shape}, {targets_N.shape}, {vocab_size}"
        )
    if logits_NV.dtype not in _dispatch.DTYPES:
        raise ValueError(
            f"fused_classifier: expected float32, bfloat16 or float16 logits, got {logits_NV.dtype}"
        )
    loss = Loss(vocab_size, softcap, ignore_index, label_smoothing, z_loss, return_lse)
    weights = target_weights, weights_N
    loss, labels, weights_M = checked("fused_classifier", loss, targets_N, *weights)
    results = classify(loss, logits_NV, labels, weights_M, implementation=implementation)
    return results if return_lse else results[:2]


@dataclasses.dataclass(frozen=True)
class Loss:
    """Static options of a loss: arguments of `fused_classifier`."""

    vocab_size: int
    softcap: Number | SigmoidCap | None = None
    ignore_index: int | None = None
    label_smoothing: Number = 0.0
    z_loss: Number = 0.0
    return_lse: bool = False


def checked(operation: str, loss: Loss, targets, target_weights=None, weights_N=None) -> tuple:
    """Return the loss, the labels of `classify`, and the weights of the M targets of each row in
    fp32, or None for one target without a weight.

    Raises:
        ValueError: a cap that is not positive, an option out of its range, targets that are no
            integers, or another number of weights than targets of a row or than rows. The message
            names `operation`.
    """
    cap, ignore_index = loss.softcap, loss.ignore_index
    match cap:
        case None:
            widths = ()
        case SigmoidCap(scale, _, width):
            widths = scale, width
        case _:
            widths = (cap,)
            loss = dataclasses.replace(loss, softcap=float(cap))
    if not all(math.isfinite(width) and width > 0 for width in widths):
        raise ValueError(f"{operation}: a softcap's scale and width are positive, got {cap}")
    if ignore_index is not None and not -(2**31) <= ignore_index < 2**31:
        raise ValueError(
            f"{operation}: expected ignore_index in the range of int32, got {ignore_index}"
        )
    if not (0 <= loss.label_smoothing <= 1 and 0 <= loss.z_loss < math.inf):
        raise ValueError(
            f"{operation}: expected label_smoothing in [0, 1] and a finite z_loss ≥ 0, got "
            f"{loss.label_smoothing} and {loss.z_loss}"
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"{operation}: expected integer targets, got {targets.dtype}")
    if targets.ndim == 2 and targets.shape[1] == 1 and target_weights is None:
        targets = targets[:, 0]
    if weights_N is not None and jnp.shape(weights_N) != targets.shape[:1]:
        shapes = f"{jnp.shape(weights_N)} and targets of shape {targets.shape}"
        raise ValueError(f"{operation}: expected weights_N of shape (N,), got {shapes}")
    weights_N = None if weights_N is None else jnp.asarray(weights_N, jnp.float32)
    labels = to_int32(targets), weights_N
    if targets.ndim == 1 and target_weights is None:
        return loss, labels, None
    m = targets.shape[-1]
    weights_M = jnp.ones(m) if target_weights is None else target_weights
    weights_M = jnp.asarray(weights_M, jnp.float32)
    if targets.ndim != 2 or m == 0 or weights_M.shape != (m,):
        raise ValueError(
            f"{operation}: expected targets (N, M) with M ≥ 1 and target_weights (M,), "
            f"got {targets.shape} and {weights_M.shape}"
        )
    return loss, labels, weights_M


def constant(operation: str, weights):
    """Return the weights, with a derivative that raises NotImplementedError."""
    remedy = (
        "expected constant target_weights and weights_N; implementation='reference' "
        "differentiates them"
    )
    return _calls.once(operation, weights, remedy)


def to_int32(ids):
    """Convert integer ids to int32. Ids out of the range of int32 are clipped: clipped ids are out
    of the vocabulary too."""
    held, wanted = jnp.iinfo(ids.dtype), jnp.iinfo(jnp.int32)
    if held.max > wanted.max:
        ids = ids.clip(max(held.min, wanted.min), wanted.max)
    return ids.astype(jnp.int32)


def reference(logits_NV, targets_N, *, vocab_size=None, target_weights=None, weights_N=None, **how):
    """Compute the definition in fp32 for every dtype. Return fp32 losses_N, dlogits_NV, and with
    `return_lse` lse_N.

    Args:
        vocab_size, target_weights, weights_N, how: as in `fused_classifier`.
    """
    loss = Loss(logits_NV.shape[1] if vocab_size is None else vocab_size, **how)
    weights = target_weights, weights_N
    loss, labels, weights_M = checked("fused_classifier", loss, targets_N, *weights)
    targets, weights_N = labels
    targets_NM, known_NM, ignored_NM = _targets(targets, loss.vocab_size, loss.ignore_index)

    def losses(logits_NV):
        real_NV = apply_softcap(logits_NV[:, : loss.vocab_size], loss.softcap)
        log_probs_NV = jax.nn.log_softmax(real_NV, axis=-1)
        columns_NM = jnp.where(known_NM, targets_NM, 0)
        losses_NM = -jnp.take_along_axis(log_probs_NV, columns_NM, axis=-1)
        if loss.label_smoothing:
            losses_NM = (1 - loss.label_smoothing) * losses_NM
            losses_NM -= loss.label_smoothing * log_probs_NV.mean(-1, keepdims=True)
        if loss.z_loss:
            losses_NM += loss.z_loss * log_sum_exp(loss, logits_NV)[:, None] ** 2
        # Multiply by NaN: `where` instead would make the gradient of an invalid row 0.
        losses_NM = losses_NM * jnp.where(known_NM | ignored_NM, 1.0, jnp.nan)
        losses_NM = jnp.where(ignored_NM, 0.0, losses_NM)
        losses_N = (losses_NM if weights_M is None else losses_NM * weights_M[None]).sum(-1)
        return losses_N if weights_N is None else losses_N * weights_N

    logits_NV = logits_NV.astype(jnp.float32)
    losses_N, pull = jax.vjp(losses, logits_NV)
    results = losses_N, pull(jnp.ones_like(losses_N))[0]
    return (*results, log_sum_exp(loss, logits_NV)) if loss.return_lse else results


def log_sum_exp(loss: Loss, logits_NV):
    """Return lse_N in fp32. On a shard of the columns, the gradient is that of its columns."""
    shards = shards_of("v")
    if not (shards.axes or _dispatch.partitioned(logits_NV)):
        real_NV = logits_NV[:, : loss.vocab_size].astype(jnp.float32)
        return jax.nn.logsumexp(apply_softcap(real_NV, loss.softcap), axis=-1)
    # A slice would move columns between devices.
    real_1V = (shards.places(logits_NV.shape[1]) < loss.vocab_size)[None]
    z_NV = jnp.where(real_1V, logits_NV, 0).astype(jnp.float32)
    z_NV = jnp.where(real_1V, apply_softcap(z_NV, loss.softcap), -jnp.inf)
    if not shards.axes:
        return jax.nn.logsumexp(z_NV, axis=-1)
    constant_NV = jax.lax.stop_gradient(z_NV)
    largest_N = shards.max(constant_NV.max(-1))
    sum_N = shards.sum(jnp.exp(constant_NV - largest_N[:, None]).sum(-1))
    lse_N = largest_N + jnp.log(sum_N)
    share_N = jnp.exp(z_NV - lse_N[:, None]).sum(-1)
    return lse_N + (share_N - jax.lax.stop_gradient(share_N))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def known(gradients: Callable, value: Any, *args: Any) -> Any:
    """Return `value`, which a kernel has computed from `args`. Its cotangents are
    `gradients(*args, g)`."""
    return value


known.defvjp(
    lambda _, value, *args: (value, args),
    lambda gradients, args, g: (None, *gradients(*args, g)),
)


def _targets(targets, vocab_size, ignore_index):
    """Return the targets as (N, M), the mask of valid targets, and the mask of ignored targets."""
    targets_NM = targets if targets.ndim == 2 else targets[:, None]
    known_NM = (targets_NM >= 0) & (targets_NM < vocab_size)
    ignored_NM = jnp.zeros_like(known_NM) if ignore_index is None else targets_NM == ignore_index
    return targets_NM, known_NM, ignored_NM


def apply_softcap(x, softcap: Number | SigmoidCap | None):
    """Return z = cap(x), elementwise, in x's dtype."""
    match softcap:
        case None:
            return x
        case SigmoidCap(scale, shift, width):
            return scale * jax.nn.sigmoid((x + shift) / width)
        case c:
            return c * jnp.tanh(x / c)


def classify(
    loss: Loss,
    logits_NV: Float[Array, "N V"],
    labels: tuple[Integer[Array, "..."], Float[Array, " N"] | None],
    weights_M: Float[Array, " M"] | None,
    *,
    scale: float | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, " N"], Float[Array, "N V"], Float[Array, " N"] | None]:
    """Return losses_N, dlogits_NV and lse_N as `fused_classifier`, for arguments from `checked`.
    lse_N is None without `return_lse`.

    `labels` are the arrays with a value of each row: the targets, and weights_N or None.

    With a scale, the second result is dlogits · scale in float8_e5m2, clipped to the largest e5m2
    number and rounded stochastically (`gemm.stochastic_e5m2`). The probability of a vocabulary
    entry varies little between rows, so errors of rounding to the nearest number would add up in
    sums over rows. The Triton kernel reads each row once from memory and converts in registers.
    These results have no derivative.
    """
    arrays = (logits_NV, labels)
    backend = _dispatch.select(
        "fused_classifier", implementation, arrays=arrays, softcap=loss.softcap
    )
    if backend == "reference":
        how = {"weights_N": labels[1], "target_weights": weights_M, **vars(loss)}
        losses_N, dlogits_NV, *lse = reference(logits_NV, labels[0], **how)
        return losses_N, dlogits_NV.astype(logits_NV.dtype), *(lse or (None,))
    options = Options(backend, loss, scale)
    if scale is not None:
        return _run(options, *arrays, weights_M)
    weights_N, weights_M = constant("fused_classifier", (labels[1], weights_M))
    arrays = logits_NV, (labels[0], weights_N), weights_M
    run = functools.partial(_calls.differentiable, "fused_classifier")
    losses_N, dlogits_NV, lse_N = run(_classify, options, *arrays)
    if loss.return_lse:
        lse = functools.partial(log_sum_exp, loss)
        lse_N = run(known, lambda x_NV, g_N: jax.vjp(lse, x_NV)[1](g_N), lse_N, logits_NV)
    return losses_N, dlogits_NV, lse_N


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call."""

    backend: str
    loss: Loss
    scale: float | None


def _run(options, logits_NV, labels, weights_M):
    if options.backend == "triton":
        from pallas_kernels.classifier import triton

        scale = options.scale

        def f(*args):
            if shards_of("v").axes:
                return _in_xla(options, *args)
            return triton.classify(*args, scale=scale, **vars(options.loss))

        columns = "n* m" if labels[0].ndim == 2 else "n*"
        axes = f"n* v, {columns}, n*, m -> n*, n* v, n*"
        rule = Rule(axes, over="n* v", reduced="v")
        batched = {"rule": rule, "overwrites": scale is None}
        launch = _calls.batched("fused_classifier", f, **batched)
        return launch(logits_NV, *labels, weights_M)
    return _in_xla(options, logits_NV, *labels, weights_M)


_classify = jax.custom_vjp(_run, nondiff_argnums=(0,))


def _classify_forward(options, *primals):
    results = _run(options, *jax.tree.map(lambda primal: primal.value, primals))
    return results, results[1]


def _classify_backward(options, dlogits_NV, cotangents):
    g_N, g_dlogits_NV, _ = cotangents  # `known` differentiates lse
    if not isinstance(g_dlogits_NV, jax.custom_derivatives.SymbolicZero):
        raise NotImplementedError(
            "fused_classifier: the gradient that it returns cannot itself be differentiated; "
            "differentiate only the losses, or use stop_gradient(dlogits), or "
            "implementation='reference'"
        )
    if isinstance(g_N, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros_like(dlogits_NV), None, None
    return (g_N[:, None] * dlogits_NV.astype(jnp.float32)).astype(dlogits_NV.dtype), None, None


_classify.defvjp(_classify_forward, _classify_backward, symbolic_zeros=True)


def _in_xla(options, logits_NV, targets, weights_N, weights_M):
    loss = options.loss
    vocab_size, label_smoothing, z_loss = loss.vocab_size, loss.label_smoothing, loss.z_loss
    targets_NM, known_NM, ignored_NM = _targets(targets, vocab_size, loss.ignore_index)
    weights_NM = jnp.where(ignored_NM, 0.0, 1.0 if weights_M is None else weights_M[None])
    if weights_N is not None:
        weights_NM = weights_NM * weights_N[:, None]
    x_NV = logits_NV.astype(jnp.float32)
    z_NV = apply_softcap(x_NV, loss.softcap)
    shards = shards_of("v")
    column_1V = shards.places(logits_NV.shape[1])[None, :]
    if vocab_size < logits_NV.shape[1] or shards.axes:
        z_NV = jnp.where(column_1V < vocab_size, z_NV, -jnp.inf)
    largest_N1 = shards.max(z_NV.max(-1, keepdims=True))
    z_NV = z_NV - largest_N1
    exp_NV = jnp.exp(z_NV)
    sum_N1 = shards.sum(exp_NV.sum(-1, keepdims=True))
    lse_N = (largest_N1 + jnp.log(sum_N1))[:, 0]
    sum_N1 = jnp.where((known_NM | ignored_NM).all(-1, keepdims=True), sum_N1, jnp.nan)
    d_NV = exp_NV / sum_N1
    if z_loss:
        d_NV = d_NV * (1 + 2 * z_loss * lse_N[:, None])
    if label_smoothing:
        d_NV = d_NV - label_smoothing / vocab_size
        mean_N = shards.sum(jnp.where(column_1V < vocab_size, z_NV, 0.0).sum(-1)) / vocab_size
    if not (weights_M is None and weights_N is None):
        d_NV = d_NV * weights_NM.sum(-1, keepdims=True)
    losses_NM = []
    for m in range(targets_NM.shape[1]):
        hit_NV = column_1V == targets_NM[:, m, None]
        z_N = shards.sum(jnp.where(hit_NV, z_NV, 0.0).sum(-1))
        share = weights_NM[:, m, None]
        if label_smoothing:
            z_N = (1 - label_smoothing) * z_N + label_smoothing * mean_N
            share = (1 - label_smoothing) * share
        losses_NM.append(jnp.log(sum_N1[:, 0]) - z_N)
        d_NV = d_NV - jnp.where(hit_NV, share, 0.0)
    if loss.softcap is not None:
        d_NV = d_NV * _slope(x_NV, loss.softcap)
    d_NV = jnp.where(column_1V < vocab_size, d_NV, 0.0)
    losses_NM = jnp.stack(losses_NM, -1)
    if z_loss:
        losses_NM = losses_NM + z_loss * lse_N[:, None] ** 2
    losses_NM = weights_NM * losses_NM
    if loss.ignore_index is not None:
        losses_NM = jnp.where(ignored_NM, 0.0, losses_NM)
        d_NV = jnp.where(ignored_NM.all(-1, keepdims=True), 0.0, d_NV)
    losses_N = losses_NM.sum(-1)
    if options.scale is None:
        d_NV = d_NV.astype(logits_NV.dtype)
    else:
        d_NV = stochastic_e5m2((d_NV * options.scale).clip(-largest(E5M2), largest(E5M2)))
    return losses_N, d_NV, lse_N if loss.return_lse else None


def _slope(x, softcap):
    """Return dz/dx of `apply_softcap`."""
    match softcap:
        case SigmoidCap(scale, shift, width):
            sigma = jax.nn.sigmoid((x + shift) / width)
            return scale / width * sigma * (1 - sigma)
        case c:
            return 1 - jnp.tanh(x / c) ** 2


# ----------------------------------------------------------------------------------------- examples


def _example(rows, dtype, softcap, target_weights=None, **options):
    targets = jnp.arange(rows, dtype=jnp.int32) * 7 % 50257
    if target_weights is not None:
        targets = jnp.stack([targets, targets // 2, targets // 3], axis=1)
    options |= {"vocab_size": 50257, "softcap": softcap, "target_weights": target_weights}

    def losses(f):
        def call(logits_NV, **how):
            losses_N, _, *lse = f(logits_NV, targets, **options, **how)
            return sum(lse, losses_N)

        return call

    arrays = (jax.ShapeDtypeStruct((rows, 50304), dtype),)
    return _dispatch.Example(losses(fused_classifier), losses(reference), arrays)


@_dispatch.example("fused_classifier")
def _plain_example(rows, dtype):
    """GPT-2's padded vocabulary."""
    return _example(rows, dtype, None)


@_dispatch.example("fused_classifier")
def _capped_example(rows, dtype):
    """GPT-2's padded vocabulary with a soft cap, which needs the most registers."""
    return _example(rows, dtype, SigmoidCap())


@_dispatch.example("fused_classifier")
def _several_targets_example(rows, dtype):
    """GPT-2's padded vocabulary with a soft cap and three targets per row."""
    return _example(rows, dtype, SigmoidCap(), (1.0, 0.5, 0.25))


@_dispatch.example("fused_classifier")
def _capped_with_options_example(rows, dtype):
    """GPT-2's padded vocabulary with a soft cap and every option of the loss."""
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "return_lse": True}
    options["weights_N"] = 1 / (1 + jnp.arange(rows, dtype=jnp.float32))
    return _example(rows, dtype, SigmoidCap(), (1.0, 0.5, 0.25), **options)
