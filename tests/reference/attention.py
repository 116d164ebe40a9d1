"""Attention by its textbook equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def defined(q, k, v, seen_BTS, *, scale=None, softcap=None, sinks_H=None):
    """O, L and P in fp64, from the equations, one query and one head at a time. A query that sees
    no key has O = 0."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (b, t, h, d), s = q.shape, k.shape[1]
    out, lse, pattern = np.zeros((b, t, h, v.shape[3])), np.zeros((b, h, t)), np.zeros((b, h, t, s))
    for i, j, head in np.ndindex(b, t, h):
        g, keys = head // (h // k.shape[2]), np.broadcast_to(seen_BTS, (b, t, s))[i, j]
        z = k[i, keys, g] @ q[i, j, head] * (d**-0.5 if scale is None else scale)
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        total = np.exp(z).sum() + (0 if sinks_H is None else np.exp(np.float64(sinks_H[head])))
        if total:
            lse[i, head, j] = np.log(total)
            pattern[i, head, j, keys] = np.exp(z) / total
            out[i, j, head] = pattern[i, head, j, keys] @ v[i, keys, g]
    return out, lse, pattern


def at_once(f):
    """Compile a reference into one executable that rounds each result to its dtype.

    The results have the bits of the operations run one by one, which are 150 executables.
    """
    return jax.jit(f, compiler_options={"xla_allow_excess_precision": False})


def textbook(q, k, v, *, causal=True, scale=None, window=None):
    """O and L in the inputs' own dtype; the softmax alone is fp32. Shapes as of
    `pallas_kernels.flash_attention`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = (jnp.einsum("bthd,bshd->bhts", q, k) * jnp.asarray(scale, q.dtype)).astype(jnp.float32)
    t, s = jnp.arange(q.shape[1])[:, None], jnp.arange(q.shape[1])[None, :]
    seen = (s <= t) & (s > t - (window or q.shape[1])) if causal else (s >= 0)
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, v), jax.nn.logsumexp(scores, axis=-1)


def textbook_of_options(
    q,
    k,
    v,
    seen_BTS,
    *,
    scale=None,
    softcap=None,
    bias=None,
    sinks=None,
    multiply=None,
    flash=False,
):
    """O and L of any mask, in the inputs' own dtype; the softmax alone is fp32.

    Args:
        bias: (B, H, T, S), axes of batch and heads may be 1.
        sinks: a logit of each head.
        multiply: function of (B, H, M, K) and (B, H, K, N) instead of a matmul.
        flash: the gradient of the scores is P ∘ (dP − Σ dO · O), of the rounded O.
    """
    multiply = multiply or functools.partial(jnp.matmul, precision="highest")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = multiply(q, k.swapaxes(2, 3)).astype(jnp.float32) * scale
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias.astype(jnp.float32)
    scores = jnp.where(seen_BTS[:, None], scores, -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks.astype(jnp.float32)[None, :, None, None] - top)
    none = total == 0
    total = jnp.where(none, 1, total)
    constant = jax.lax.stop_gradient(total) if flash else total
    weights = (weights / constant).astype(q.dtype)
    lse = jnp.where(none, -jnp.inf, jnp.log(total) + top)[..., 0]
    out = multiply(weights, v)
    if flash:  # 1 − total / constant is 0, and its gradient that of −L
        share = 1 - total / constant
        out += (jax.lax.stop_gradient(out).astype(jnp.float32) * share).astype(q.dtype)
    return out.swapaxes(1, 2), lse
