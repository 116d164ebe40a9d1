"""AdamW with gradient clipping, for all parameters or beside an optimizer of matrices.

Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from gptjax.optim.low_precision import round_stochastically
from gptjax.optim.partition import Group, assign, flatten, group_of
from gptjax.optim.schedules import Scheduled


def global_norm(tree: optax.Updates) -> jax.Array:
    """Return the global norm ‖g‖ of all tensors, in fp32.

    One kernel per matrix sums the rows. The row sums and the vectors are concatenated and summed
    together: on a GPU, 53 kernels for the 148 tensors of GPT-2 124M. A full sum of a matrix would
    take two kernels, and each vector one more.
    """
    squares = [jnp.square(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(tree)]
    rows = [jnp.sum(s, -1).ravel() if s.ndim >= 2 else s.ravel() for s in squares]
    # Without the barrier XLA splits the sum of the concatenation into a sum of each part.
    return (
        jnp.sqrt(jnp.sum(jax.lax.optimization_barrier(jnp.concatenate(rows))))
        if rows
        else jnp.zeros(())
    )


def clip_by_global_norm(clip_norm: ArrayLike | None) -> optax.GradientTransformation:
    """Scale gradients: g ← g · min(1, clip_norm/‖g‖), where ‖g‖ is the global norm.

    optax's version divides every element by the norm. A multiplication by one factor is fused into
    the kernels of both moments, so that no clipped gradient is stored. The norm is the same
    expression as the metric, so that XLA computes the norm once.

    Args:
        clip_norm: above 0; None for no clipping.
    """

    def update(updates, state, params=None):
        del params
        if clip_norm is None:
            return updates, state
        factor = jnp.minimum(1.0, clip_norm / global_norm(updates))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def decay_mask(params: optax.Params) -> optax.Params:
    """Return True for tensors of two or more axes (matrices, embeddings), False for vectors."""
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def scale_by_adam(
    b1: ArrayLike,
    b2: ArrayLike,
    eps: ArrayLike,
    mu_dtype: jax.typing.DTypeLike | None = None,
    nu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Scale gradients to m̂/(√v̂ + eps), m̂ = m/(1 − b1ᵗ), v̂ = v/(1 − b2ᵗ), t = 1, 2, ….

    The state is `optax.ScaleByAdamState`. optax.scale_by_adam computes 1 − bᵗ by a subtraction in
    fp32: with b2 = 0.999 the first updates are off by 1e-5. Here b is rounded to fp32 once. Then
    b − 1 is exact, and −expm1(t·log1p(b − 1)) is off by 1e-7.

    An update computes in the gradient's dtype, and rounds m and v once, after their use.

    Args:
        mu_dtype: dtype in which m is stored between updates; None for the parameter's. optax also
            rounds b1·m.
        nu_dtype: bfloat16 stores v in bf16, with stochastic rounding; None for the parameter's
            dtype. bf16 numbers are up to 2⁻⁷ apart. A change of v by less than half of that, such
            as a decay with b2 = 0.999, would be lost by rounding to nearest.

    Raises:
        ValueError: another nu_dtype.
    """
    if nu_dtype is not None and jnp.dtype(nu_dtype) != jnp.bfloat16:
        raise ValueError(f"scale_by_adam: nu_dtype must be None or bfloat16, got {nu_dtype}")

    def init(params):
        mu, nu = (optax.tree.zeros_like(params, dtype=dtype) for dtype in (mu_dtype, nu_dtype))
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), mu, nu)

    def moment(b, old, new):
        def mean(m, x):
            m = m.astype(x.dtype)
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

        updates = jax.tree.map(direction, mu, nu)
        mu = jax.tree.map(lambda m, old: m.astype(old.dtype), mu, state.mu)
        nu = nu if nu_dtype is None else round_stochastically(nu, count)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def add_cautious_decay(
    weight_decay: optax.ScalarOrSchedule,
    *,
    factor: Callable[[str], float] | None = None,
    at_zero: bool = True,
) -> optax.GradientTransformation:
    """Add wd·p where the update u and the parameter p have the same sign.

    Chen et al., "Cautious Weight Decay", 2025.

    This transformation precedes the scaling by the learning rate. With a number, the decay is
    proportional to the learning rate, as in AdamW. With a schedule wd · lr(count), the decay is
    proportional to the square of the learning rate, as in modded-nanogpt's record.

    Args:
        weight_decay: a number, or a schedule of the update's index.
        factor: maps a parameter's path to a factor of the weight decay.
        at_zero: whether a parameter decays where its update is zero.
    """

    def update(updates, state, params=None):
        if params is None:
            raise ValueError(
                "add_cautious_decay needs the parameters: update(updates, state, params)"
            )
        decay = jnp.asarray(
            weight_decay(state.count) if callable(weight_decay) else weight_decay, jnp.float32
        )

        paths, leaves, tree = flatten(updates)
        for i, (path, p) in enumerate(zip(paths, jax.tree.leaves(params), strict=True)):
            p = p.astype(jnp.float32)
            scaled = decay * factor(path) if factor else decay
            same_sign = leaves[i] * p >= 0 if at_zero else leaves[i] * p > 0
            leaves[i] = leaves[i] + jnp.where(same_sign, scaled * p, 0.0)
        state = optax.ScaleByScheduleState(optax.safe_increment(state.count))
        return jax.tree.unflatten(tree, leaves), state

    return optax.GradientTransformation(
        lambda params: optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)), update
    )


def adam_with_decay(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: ArrayLike,
    b2: ArrayLike,
    eps: ArrayLike,
    weight_decay: ArrayLike,
    decay_form: str = "lr",
    cautious_decay: bool = False,
    mask=None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    nu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Return `adamw` without the clipping.

    Args:
        mask: function that maps the parameters to True if they decay; None: all decay.
        mu_dtype, nu_dtype: see `scale_by_adam`.
    """
    if decay_form not in ("lr", "lr_squared"):
        raise ValueError(f"unknown decay_form {decay_form!r}; choose one of ['lr', 'lr_squared']")
    decay, rate = weight_decay, learning_rate
    if decay_form == "lr_squared":
        decay = (lambda n: weight_decay * rate(n)) if callable(rate) else weight_decay * rate
    if cautious_decay:
        # An embedding whose token did not occur keeps its value.
        add_decay = add_cautious_decay(decay, at_zero=False)
        add_decay = add_decay if mask is None else optax.masked(add_decay, mask)
    else:
        add_decay = optax.add_decayed_weights(decay, mask)
    return optax.chain(
        scale_by_adam(b1, b2, eps, mu_dtype, nu_dtype),
        add_decay,
        optax.scale_by_learning_rate(learning_rate),
    )


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike = 0.1,
    decay_form: Literal["lr", "lr_squared"] = "lr",
    cautious_decay: bool = False,
    clip_norm: ArrayLike | None = 1.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
    nu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Return AdamW: clip by global norm, Adam, decoupled decay of the tensors in `decay_mask`.

        g ← g · min(1, clip_norm/‖g‖)
        m ← b1·m + (1−b1)·g,   v ← b2·v + (1−b2)·g²
        p ← p − lr · (m̂/(√v̂ + eps) + weight_decay·p)

    Args:
        learning_rate: a number, or a schedule of the update's index (0 for the first).
        decay_form: "lr_squared" for lr·weight_decay·p in place of weight_decay·p.
        cautious_decay: decay only elements whose m and p have the same sign.
        clip_norm: None for no clipping.
        mu_dtype, nu_dtype: see `scale_by_adam`.

    Example:
        >>> tx = gptjax.optim.adamw(6e-4)
        >>> opt_state = tx.init(params)
        >>> updates, opt_state = tx.update(grads, opt_state, params)
        >>> params = optax.apply_updates(params, updates)
    """
    adam = adam_with_decay(
        learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=weight_decay,
        decay_form=decay_form,
        cautious_decay=cautious_decay,
        mask=decay_mask,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
    )
    return Scheduled.of(optax.chain(clip_by_global_norm(clip_norm), adam), learning_rate)


def matrices_and_adamw(
    groups: Sequence[Group],
    matrix: optax.GradientTransformation,
    *,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    clip_norm: float | None = 1.0,
    every: int = 1,
    **adam: Any,
) -> optax.GradientTransformation:
    """Return clipping, then `matrix` for groups of matrices and AdamW for other groups.

    Args:
        groups: rules of `assign`, which `init` calls.
        matrix: transformation of the matrices, learning rate included.
        learning_rate, weight_decay, b1, b2, eps, clip_norm, adam: see `adamw`.
        every: period of AdamW in updates. AdamW steps at the end of a period with the sum of the
            period's clipped gradients. With a period of 2, AdamW steps in the updates with indices
            1, 3, ….

    Raises:
        GroupError: at `init`, as in `assign`.
    """
    groups = tuple(groups)

    def scaled(by):
        # AdamW counts its own updates; the schedule counts all updates.
        return (
            (lambda n: by * learning_rate(every * n + every - 1))
            if callable(learning_rate)
            else by * learning_rate
        )

    def adam_of(group):
        betas = (b1 if group.b1 is None else group.b1), (b2 if group.b2 is None else group.b2)
        decay = weight_decay * group.weight_decay
        rate = scaled(group.learning_rate)
        return adam_with_decay(rate, b1=betas[0], b2=betas[1], eps=eps, weight_decay=decay, **adam)

    def label(group):
        return "matrix" if group.matrices is not None else str(groups.index(group))

    def labels(params):
        names, _, structure = flatten(params)
        return jax.tree.unflatten(structure, [label(group_of(groups, name)) for name in names])

    def checked_labels(params):
        assign(groups, flatten(params)[0])
        if every == 1:
            return labels(params)
        return jax.tree.map(lambda x: x if x == "matrix" else "rest", labels(params))

    rest = {label(group): adam_of(group) for group in groups if group.matrices is None}
    if every > 1:
        # AdamW computes in each update; only every N-th result is used. XLA removes MultiSteps'
        # conditional, whose predicate is constant. For another, the host would wait on a GPU.
        summed = optax.MultiSteps(optax.partition(rest, labels), every, use_grad_mean=False)
        rest = {"rest": summed.gradient_transformation()}
    parts = optax.partition({"matrix": matrix, **rest}, checked_labels)
    return Scheduled.of(optax.chain(clip_by_global_norm(clip_norm), parts), learning_rate)
