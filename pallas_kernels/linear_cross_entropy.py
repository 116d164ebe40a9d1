"""The language-model head and its loss: logits = x Wᵀ, loss_n = logsumexp(logits_n) − logits_n[target_n].

Shapes: N tokens, C channels, V rows of the head (padding included). The softmax covers the first `vocab_size` columns; padded
columns get a gradient of exactly zero, so padded rows of W never move.

Back ends:
    xla: plain JAX. All logits at once, or `chunk` tokens at a time, recomputed in the backward pass.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._choose import named


def linear_cross_entropy(
    x_NC: Float[Array, "N C"],
    w_VC: Float[Array, "V C"],
    targets_N: Int[Array, " N"],
    *,
    vocab_size: int | None = None,
    chunk: int | None = None,
    implementation: str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, " N"]:
    """Cross-entropy of each token in nats, in fp32 whatever the inputs are.

    Args:
        x_NC, w_VC: hidden states and head weights of one dtype; the logits have that dtype, the softmax is fp32.
        targets_N: the right column of each row, in [0, vocab_size); any other gives a loss of NaN.
        vocab_size: real columns; V when None.
        chunk: at most this many rows of logits are alive at once; N must be a multiple. None: all of them.
        implementation: "auto" or "xla".
        precision: of an fp32 matrix product (JAX's own default for fp32 on a GPU is TF32).

    Raises:
        ValueError: shapes disagree, N is not a multiple of `chunk`, or no such back end.
    """
    choose(implementation)
    n, v = x_NC.shape[0], w_VC.shape[0]
    vocab_size = v if vocab_size is None else vocab_size
    if x_NC.shape[1] != w_VC.shape[1] or targets_N.shape != (n,) or not 0 < vocab_size <= v:
        raise ValueError(
            "linear_cross_entropy: expected x (N, C), w (V, C), targets (N,) and vocab_size ≤ V, "
            f"got {x_NC.shape}, {w_VC.shape}, {targets_N.shape}, {vocab_size}"
        )
    if chunk is None or chunk == n:
        return _losses(x_NC, w_VC, targets_N, vocab_size=vocab_size, precision=precision)
    if n % chunk:
        raise ValueError(f"linear_cross_entropy: {n} tokens are not a multiple of chunk={chunk}")

    @jax.checkpoint
    def of_chunk(chunk_args):
        x_KC, targets_K = chunk_args
        return _losses(x_KC, w_VC, targets_K, vocab_size=vocab_size, precision=precision)

    chunks = (x_NC.reshape(n // chunk, chunk, -1), targets_N.reshape(n // chunk, chunk))
    return jax.lax.map(of_chunk, chunks).reshape(n)


def choose(implementation: str = "auto") -> str:
    """The back end that `linear_cross_entropy` uses.

    Raises:
        ValueError: no such back end.
    """
    return "xla" if implementation == "auto" else named("linear_cross_entropy", implementation, {"xla": None})


def reference(x_NC, w_VC, targets_N, *, vocab_size: int | None = None):
    """The definition, in fp32 with true fp32 products. Returns fp32 of shape (N,)."""
    logits_NV = jnp.matmul(x_NC.astype(jnp.float32), w_VC.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)[
        :, :vocab_size
    ]
    log_probs_NV = jax.nn.log_softmax(logits_NV, axis=-1)
    return -jnp.take_along_axis(log_probs_NV, targets_N[:, None], axis=-1)[:, 0]


def _losses(x_NC, w_VC, targets_N, *, vocab_size, precision):
    logits_NV = jnp.einsum("nc,vc->nv", x_NC, w_VC, precision=precision).astype(jnp.float32)
    column_1V = jnp.arange(w_VC.shape[0], dtype=targets_N.dtype)[None, :]
    if vocab_size < w_VC.shape[0]:
        logits_NV = jnp.where(column_1V < vocab_size, logits_NV, -jnp.inf)
    # A comparison instead of a gather: its gradient fuses into the softmax's, where a gather's is a scatter into N×V zeros.
    target_logit_N = jnp.where(column_1V == targets_N[:, None], logits_NV, 0.0).sum(-1)
    # No column equals a target outside the vocabulary, and the rest would pass for a loss.
    known_N = (targets_N >= 0) & (targets_N < vocab_size)
    return jnp.where(known_N, jax.nn.logsumexp(logits_NV, axis=-1) - target_logit_N, jnp.nan)
