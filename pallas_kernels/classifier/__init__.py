"""Fused classifier of a language model: cross-entropy of each row and its gradient in one pass.

    z = cap(x)      loss_n = logsumexp(z_n) − z_n[target_n]
    dx_nv = (softmax(z_n)_v − [v = target_n]) · dz/dx

Shapes: N rows (tokens), V columns (padding included). Softmax and loss cover the first `vocab_size`
columns; the others may hold any value, NaN included, and get a gradient of exactly zero. cap is the
identity, c·tanh(x/c), or a `SigmoidCap`: scale·σ((x + shift)/width).

The gradient is that of each row's own loss, and overwrites the logits. For a mean over N rows the
caller divides by N.

Back ends:
    triton: one program per row, which loads the row from HBM once, reads it again from the cache,
        and overwrites it. NVIDIA GPUs from Ampere on.
    xla: plain JAX with fp32 statistics; any device.
    reference: the definition, in fp32, its gradients by JAX: forward mode and higher derivatives
        work, through both results. Any device.
triton and xla are differentiable once, in reverse mode, and in the losses alone.
"""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, TRITON, XLA

Number = float | int
Implementation = Literal["auto", "triton", "xla", "reference"]

_dispatch.register("fused_classifier", back_ends=[TRITON, XLA, REFERENCE])


class SigmoidCap(NamedTuple):
    """Soft cap z = scale · σ((x + shift) / width): logits between 0 and `scale`.

    The defaults are the values of the modded-nanogpt speedrun.
    """

    scale: Number = 23.0
    shift: Number = 5.0
    width: Number = 7.5


def fused_classifier(
    logits_NV: Float[Array, "N V"],
    targets_N: Integer[Array, " N"],
    *,
    vocab_size: int | None = None,
    softcap: Number | SigmoidCap | None = None,
    ignore_index: int | None = None,
    implementation: Implementation | str = "auto",
) -> tuple[Float[Array, " N"], Float[Array, "N V"]]:
    """Cross-entropy of each row in nats, and its gradient with respect to that row's logits.

    The gradient overwrites the logits' buffer where the buffer is free (an intermediate of a jitted
    function, or a donated argument); elsewhere XLA copies the logits first. The losses are
    differentiable once. The gradient is differentiable only with implementation "reference".

    Args:
        logits_NV: fp32, bf16 or fp16.
        targets_N: target column of each row, in [0, vocab_size), in any integer type. Out of this
            range the loss and the gradient of the row are NaN.
        vocab_size: real columns; V when None.
        softcap: None, the c of c·tanh(x/c), or a `SigmoidCap`.
        ignore_index: rows with this target have a loss and a gradient of exactly 0.
        implementation: "auto", or a back end: "triton", "xla", "reference".

    Returns:
        losses_N in fp32, and dlogits_NV in the logits' dtype.

    Raises:
        ValueError: wrong shapes or dtypes, or the named back end cannot run this call.
        NotImplementedError: differentiation through dlogits_NV.
    """
    v = logits_NV.shape[1]
    vocab_size = v if vocab_size is None else vocab_size
    _check(logits_NV, targets_N, vocab_size, softcap)
    if softcap is not None and not isinstance(softcap, SigmoidCap):
        softcap = float(softcap)
    backend = _dispatch.select("fused_classifier", implementation, arrays=(logits_NV, targets_N))
    options = Options(backend, vocab_size, softcap, ignore_index)
    if backend == "reference":
        losses_N, dlogits_NV = reference(logits_NV, targets_N, **options.loss_options)
        return losses_N, dlogits_NV.astype(logits_NV.dtype)
    return _calls.differentiable(
        "fused_classifier", _classify, options, logits_NV, to_int32(targets_N)
    )


def to_int32(ids):
    """Convert integer ids to int32. Ids out of int32's range are clipped, and stay out of the
    vocabulary."""
    held, wanted = jnp.iinfo(ids.dtype), jnp.iinfo(jnp.int32)
    if held.max > wanted.max:
        ids = ids.clip(max(held.min, wanted.min), wanted.max)
    return ids.astype(jnp.int32)


def reference(
    logits_NV,
    targets_N,
    *,
    vocab_size: int | None = None,
    softcap: Number | SigmoidCap | None = None,
    ignore_index: int | None = None,
):
    """Compute the definition in fp32 for every dtype. Return fp32 losses_N and dlogits_NV."""
    v = logits_NV.shape[1]
    vocab_size = v if vocab_size is None else vocab_size
    targets_N = to_int32(targets_N)
    known_N = (targets_N >= 0) & (targets_N < vocab_size)
    ignored_N = jnp.zeros_like(known_N) if ignore_index is None else targets_N == ignore_index

    def losses(logits_NV):
        real_NV = logits_NV[:, :vocab_size].astype(jnp.float32)
        log_probs_NV = jax.nn.log_softmax(apply_softcap(real_NV, softcap), axis=-1)
        columns_N = jnp.where(known_N, targets_N, 0)
        losses_N = -jnp.take_along_axis(log_probs_NV, columns_N[:, None], axis=-1)[:, 0]
        # A factor of NaN: with `where` the gradient of a row with an invalid target would be 0.
        losses_N = losses_N * jnp.where(known_N | ignored_N, 1.0, jnp.nan)
        return jnp.where(ignored_N, 0.0, losses_N)

    losses_N, pull = jax.vjp(losses, logits_NV.astype(jnp.float32))
    return losses_N, pull(jnp.ones_like(losses_N))[0]


def apply_softcap(x, softcap: Number | SigmoidCap | None):
    """Return z = cap(x), elementwise, in x's dtype."""
    match softcap:
        case None:
            return x
        case SigmoidCap(scale, shift, width):
            return scale * jax.nn.sigmoid((x + shift) / width)
        case c:
            return c * jnp.tanh(x / c)


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call."""

    backend: str
    vocab_size: int
    softcap: Number | SigmoidCap | None
    ignore_index: int | None

    @property
    def loss_options(self) -> dict:
        return {
            "vocab_size": self.vocab_size,
            "softcap": self.softcap,
            "ignore_index": self.ignore_index,
        }


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _classify(options, logits_NV, targets_N):
    return _run(options, logits_NV, targets_N)


def _run(options, logits_NV, targets_N):
    if options.backend == "triton":
        return _in_triton(options, logits_NV, targets_N)
    losses_N, dlogits_NV = _in_xla(logits_NV, targets_N, **options.loss_options)
    return losses_N, dlogits_NV.astype(logits_NV.dtype)


def _classify_forward(options, logits_NV, targets_N):
    losses_N, dlogits_NV = _run(options, logits_NV.value, targets_N.value)
    return (losses_N, dlogits_NV), dlogits_NV


def _classify_backward(options, dlogits_NV, cotangents):
    g_N, g_dlogits_NV = cotangents
    if not isinstance(g_dlogits_NV, jax.custom_derivatives.SymbolicZero):
        raise NotImplementedError(
            "fused_classifier: the gradient that it returns cannot itself be differentiated; "
            "differentiate only the losses, or use stop_gradient(dlogits), or "
            "implementation='reference'"
        )
    if isinstance(g_N, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros_like(dlogits_NV), None
    return (g_N[:, None] * dlogits_NV.astype(jnp.float32)).astype(dlogits_NV.dtype), None


_classify.defvjp(_classify_forward, _classify_backward, symbolic_zeros=True)


def _in_triton(options, logits_NV, targets_N):
    from pallas_kernels.classifier import triton

    classify = functools.partial(triton.classify, **options.loss_options)
    return _calls.batched("fused_classifier", classify, overwrites=True)(logits_NV, targets_N)


def _in_xla(logits_NV, targets_N, *, vocab_size, softcap, ignore_index):
    x_NV = logits_NV.astype(jnp.float32)
    z_NV = apply_softcap(x_NV, softcap)
    column_1V = jnp.arange(logits_NV.shape[1], dtype=jnp.int32)[None, :]
    if vocab_size < logits_NV.shape[1]:
        z_NV = jnp.where(column_1V < vocab_size, z_NV, -jnp.inf)
    hit_NV = column_1V == targets_N[:, None]
    z_NV = z_NV - z_NV.max(-1, keepdims=True)
    exp_NV = jnp.exp(z_NV)
    sum_N1 = exp_NV.sum(-1, keepdims=True)
    known_N = (targets_N >= 0) & (targets_N < vocab_size)
    losses_N = jnp.where(
        known_N, jnp.log(sum_N1[:, 0]) - jnp.where(hit_NV, z_NV, 0.0).sum(-1), jnp.nan
    )
    d_NV = exp_NV / jnp.where(known_N[:, None], sum_N1, jnp.nan) - hit_NV.astype(jnp.float32)
    if softcap is not None:
        d_NV = d_NV * _slope(x_NV, softcap)
    d_NV = jnp.where(column_1V < vocab_size, d_NV, 0.0)
    if ignore_index is not None:
        losses_N = jnp.where(targets_N == ignore_index, 0.0, losses_N)
        d_NV = jnp.where((targets_N == ignore_index)[:, None], 0.0, d_NV)
    return losses_N, d_NV


def _slope(x, softcap):
    """Return dz/dx of `apply_softcap`."""
    match softcap:
        case SigmoidCap(scale, shift, width):
            sigma = jax.nn.sigmoid((x + shift) / width)
            return scale / width * sigma * (1 - sigma)
        case c:
            return 1 - jnp.tanh(x / c) ** 2


def _check(logits_NV, targets_N, vocab_size, softcap):
    n, v = logits_NV.shape
    if targets_N.shape != (n,) or not 0 < vocab_size <= v:
        raise ValueError(
            "fused_classifier: expected logits (N, V), targets (N,) and 0 < vocab_size ≤ V, "
            f"got {logits_NV.shape}, {targets_N.shape}, {vocab_size}"
        )
    if logits_NV.dtype not in _dispatch.DTYPES:
        raise ValueError(
            f"fused_classifier: expected float32, bfloat16 or float16 logits, got {logits_NV.dtype}"
        )
    if not jnp.issubdtype(targets_N.dtype, jnp.integer):
        raise ValueError(f"fused_classifier: expected integer targets, got {targets_N.dtype}")
    widths = (
        [1.0]
        if softcap is None
        else [softcap.scale, softcap.width]
        if isinstance(softcap, SigmoidCap)
        else [softcap]
    )
    if not all(math.isfinite(width) and width > 0 for width in widths):
        raise ValueError(
            f"fused_classifier: a softcap's scale and width are positive, got {softcap}"
        )


# ----------------------------------------------------------------------------------------- examples


def _example(rows, dtype, softcap):
    targets_N = jnp.arange(rows, dtype=jnp.int32) * 7

    def losses(f):
        # The gradient of the losses is the second result.
        return lambda logits_NV, **how: f(
            logits_NV, targets_N % 50257, vocab_size=50257, softcap=softcap, **how
        )[0]

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
