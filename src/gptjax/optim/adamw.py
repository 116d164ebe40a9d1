"""AdamW (Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019) as GPT-2 is trained with it."""

import jax
import jax.numpy as jnp
import optax


def global_norm(tree: optax.Updates) -> jax.Array:
    """‖g‖ of all tensors together, fp32.

    A kernel for each matrix sums its rows, and the rows' sums and the vectors are then laid end to end for one sum over all: on a GPU
    53 kernels for the 148 tensors of GPT-2 124M. A sum of one matrix at once takes two, and each vector's by itself one more.
    """
    squares = [jnp.square(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(tree)]
    rows = [jnp.sum(s, -1).ravel() if s.ndim >= 2 else s.ravel() for s in squares]
    # XLA would take the sum of what is laid end to end apart again, into a sum of each.
    return jnp.sqrt(jnp.sum(jax.lax.optimization_barrier(jnp.concatenate(rows)))) if rows else jnp.zeros(())


def clip_by_global_norm(largest: float | int) -> optax.GradientTransformation:
    """g ← g · min(1, largest/‖g‖), ‖g‖ the norm of all tensors together.

    optax's divides every element by the norm. One factor leaves a multiplication, which compilers repeat in each of the two
    moments rather than write a clipped gradient down and read it again; and the norm is the same expression as the metric's, so that
    one program computes it once.
    """

    def update(updates, state, params=None):
        del params
        factor = jnp.minimum(1.0, largest / global_norm(updates))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def decay_mask(params: optax.Params) -> optax.Params:
    """True for tensors of two or more dimensions (matrices and embeddings), False for biases and LayerNorm's vectors."""
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    clip_norm: float | None = 1.0,
) -> optax.GradientTransformation:
    """Clip by global norm, bias-corrected Adam, decoupled decay of the tensors in `decay_mask`.

        g ← g · min(1, clip_norm/‖g‖)
        m ← b1·m + (1−b1)·g,   v ← b2·v + (1−b2)·g²
        p ← p − lr · (m̂/(√v̂ + eps) + weight_decay·p)

    Args:
        learning_rate: a number, or a schedule of the update's index (0 for the first).
        clip_norm: None for no clipping.

    Example:
        >>> tx = gptjax.optim.adamw(6e-4)
        >>> opt_state = tx.init(params)
        >>> updates, opt_state = tx.update(grads, opt_state, params)
        >>> params = optax.apply_updates(params, updates)
    """
    clip = optax.identity() if clip_norm is None else clip_by_global_norm(clip_norm)
    return optax.chain(
        clip, optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask)
    )
