"""AdamW (Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019) as GPT-2 is trained
with it."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from gptjax.optim._ranges import check_range


def global_norm(tree: optax.Updates) -> jax.Array:
    """‖g‖ of all tensors together, fp32.

    A kernel for each matrix sums its rows, and the rows' sums and the vectors are then laid end to
    end for one sum over all: on a GPU 53 kernels for the 148 tensors of GPT-2 124M. A sum of one
    matrix at once takes two, and each vector's by itself one more.
    """
    squares = [jnp.square(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(tree)]
    rows = [jnp.sum(s, -1).ravel() if s.ndim >= 2 else s.ravel() for s in squares]
    # XLA would take the sum of what is laid end to end apart again, into a sum of each.
    return (
        jnp.sqrt(jnp.sum(jax.lax.optimization_barrier(jnp.concatenate(rows))))
        if rows
        else jnp.zeros(())
    )


def clip_by_global_norm(largest: ArrayLike) -> optax.GradientTransformation:
    """g ← g · min(1, largest/‖g‖), ‖g‖ the norm of all tensors together.

    optax's divides every element by the norm. One factor leaves a multiplication, which compilers
    repeat in each of the two moments rather than write a clipped gradient down and read it again;
    and the norm is the same expression as the metric's, so that one program computes it once.
    """

    def update(updates, state, params=None):
        del params
        factor = jnp.minimum(1.0, largest / global_norm(updates))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def clip_or_identity(clip_norm: ArrayLike | None) -> optax.GradientTransformation:
    """`clip_by_global_norm`, or no clipping for None.

    Raises:
        ValueError: a norm that is not positive.
    """
    if clip_norm is None:
        return optax.identity()
    if isinstance(clip_norm, (int, float)) and not clip_norm > 0:
        raise ValueError(f"clip_norm must be above 0, or None for no clipping, got {clip_norm}")
    return clip_by_global_norm(clip_norm)


def decay_mask(params: optax.Params) -> optax.Params:
    """True for tensors of two or more dimensions (matrices and embeddings), False for biases and
    LayerNorm's vectors."""
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def scale_by_adam(b1: ArrayLike, b2: ArrayLike, eps: ArrayLike) -> optax.GradientTransformation:
    """Adam's direction: m̂/(√v̂ + eps), m̂ = m/(1 − b1ᵗ), v̂ = v/(1 − b2ᵗ), from t = 1 on.

    The state is `optax.ScaleByAdamState`. optax.scale_by_adam computes 1 − bᵗ by a subtraction in
    fp32: with b2 = 0.999 the first updates are off by 1e-5. Here b is rounded to fp32 once. Then
    b − 1 is exact, and −expm1(t·log1p(b − 1)) is off by 1e-7.
    """

    def init(params):
        return optax.ScaleByAdamState(
            jnp.zeros((), jnp.int32), optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        )

    def moment(b, old, new):
        def mean(m, x):
            return b.astype(m.dtype) * m + (1 - b).astype(x.dtype) * x

        return jax.tree.map(mean, old, new)

    def update(updates, state, params=None):
        del params
        betas = [jnp.asarray(b, jnp.float32) for b in (b1, b2)]
        mu = moment(betas[0], state.mu, updates)
        nu = moment(betas[1], state.nu, jax.tree.map(jnp.square, updates))
        count = optax.safe_increment(state.count)
        mu_part, nu_part = (-jnp.expm1(count.astype(jnp.float32) * jnp.log1p(b - 1)) for b in betas)

        def direction(m, v):
            return m / mu_part.astype(m.dtype) / (jnp.sqrt(v / nu_part.astype(v.dtype)) + eps)

        return jax.tree.map(direction, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def adam_with_decay(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: ArrayLike,
    b2: ArrayLike,
    eps: ArrayLike,
    weight_decay: ArrayLike,
    mask=None,
) -> optax.GradientTransformation:
    """`adamw` without the clip.

    Args:
        mask: function of the parameters, True for those that decay; None for all.
    """
    check_range("adamw", learning_rate=learning_rate, eps=eps, weight_decay=weight_decay)
    # From here on fp32 rounds to 1.
    check_range("adamw", below=1 - 2**-25, b1=b1, b2=b2)
    return optax.chain(
        scale_by_adam(b1, b2, eps),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike = 0.1,
    clip_norm: ArrayLike | None = 1.0,
) -> optax.GradientTransformation:
    """Clip by global norm, bias-corrected Adam, decoupled decay of the tensors in `decay_mask`.

        g ← g · min(1, clip_norm/‖g‖)
        m ← b1·m + (1−b1)·g,   v ← b2·v + (1−b2)·g²
        p ← p − lr · (m̂/(√v̂ + eps) + weight_decay·p)

    Args:
        learning_rate: a number, or a schedule of the update's index (0 for the first).
        clip_norm: None for no clipping.

    Raises:
        ValueError: a number outside its range.

    Example:
        >>> tx = gptjax.optim.adamw(6e-4)
        >>> opt_state = tx.init(params)
        >>> updates, opt_state = tx.update(grads, opt_state, params)
        >>> params = optax.apply_updates(params, updates)
    """
    betas = {"b1": b1, "b2": b2}
    adam = adam_with_decay(
        learning_rate, **betas, eps=eps, weight_decay=weight_decay, mask=decay_mask
    )
    return optax.chain(clip_or_identity(clip_norm), adam)
