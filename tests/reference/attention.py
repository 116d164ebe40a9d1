"""Attention by its textbook equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def at_once(f):
    """Compile a reference into one executable that rounds each result to its dtype.

    The results have the bits of the operations run one by one, which are 150 executables.
    """
    return jax.jit(f, compiler_options={"xla_allow_excess_precision": False})


def textbook(
    q,
    k,
    v,
    seen_BTS,
    *,
    scale=None,
    softcap=None,
    bias=None,
    sinks=None,
    flash=False,
    multiply=None,
    shifted=True,
):
    """O and L in the inputs' own dtype; the softmax alone is fp32. Shapes as of
    `pallas_kernels.flash_attention`.

    Args:
        bias: (B, H, T, S), axes of batch and heads may be 1.
        sinks: a logit of each head.
        flash: the gradient of the scores is P ∘ (dP − Σ dO · O), of the rounded O.
        multiply: function of (B, H, M, K) and (B, H, K, N) instead of a matmul.
        shifted: whether the largest score of a row is subtracted before the exponential.
    """
    multiply = multiply or functools.partial(jnp.matmul, precision="highest")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = multiply(q, k.swapaxes(2, 3)).astype(jnp.float32) * scale
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias.astype(jnp.float32)
    seen = jnp.asarray(seen_BTS)[:, None]
    largest = jax.lax.stop_gradient(jnp.where(seen, scores, -jnp.inf).max(-1, keepdims=True))
    largest = jnp.where(jnp.isfinite(largest) & shifted, largest, 0)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - largest, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks.astype(jnp.float32)[None, :, None, None] - largest)
    none = total == 0
    total = jnp.where(none, 1, total)
    constant = jax.lax.stop_gradient(total) if flash else total
    weights = (weights / constant).astype(q.dtype)
    lse = jnp.where(none, -jnp.inf, jnp.log(total) + largest)[..., 0]
    out = multiply(weights, v).swapaxes(1, 2)
    if flash:  # 1 − total / constant is 0, and its gradient that of −L
        share_BTH1 = (1 - total / constant).swapaxes(1, 2)
        out += (jax.lax.stop_gradient(out).astype(jnp.float32) * share_BTH1).astype(q.dtype)
    return out, lse


def exact_weights(q, k, seen_BTS, *, scale=None, softcap=None, sinks_H=None):
    """Return P (B, H, T, S) and L (B, H, T) in fp64, from the equations, a row at a time."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    (b, t, h, d), group = q.shape, q.shape[2] // k.shape[2]
    weights, lse = np.zeros((b, h, t, k.shape[1])), np.full((b, h, t), -np.inf)
    for i, j, row in np.ndindex(b, h, t):
        keys = seen_BTS[i, row]
        scores = k[i, keys, j // group] @ q[i, row, j] * (d**-0.5 if scale is None else scale)
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        total = np.exp(scores).sum() + (0 if sinks_H is None else np.exp(np.float64(sinks_H[j])))
        if total:
            weights[i, j, row, keys], lse[i, j, row] = np.exp(scores) / total, np.log(total)
    return weights, lse


def exact_attention(q, k, v, seen_BTS, **options):
    """Return O and L in fp64; the options are those of `exact_weights`."""
    weights, lse = exact_weights(q, k, seen_BTS, **options)
    v = np.repeat(np.asarray(v, np.float64), q.shape[2] // v.shape[2], axis=2)
    return np.einsum("bhts,bshd->bthd", weights, v), lse
