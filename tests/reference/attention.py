"""Attention by its textbook equations."""

import jax
import jax.numpy as jnp


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
