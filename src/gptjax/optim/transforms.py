"""Element-wise additions to any optimizer, from the records of modded-nanogpt's optimizer track.

Let w be the parameters and u an update:

    ema_nesterov  m ← γm + (1−γ)(u + βₜm);  w ← w + u + βₜ₊₁m
    tail_ema      e ← rate·w + (1−rate)·e, after each update
    row_floor     uᵢ ← uᵢ · max(1, floor·‖wᵢ‖/‖uᵢ‖), for each output i
    radial_pin    less growth of each matrix's norm, which follows its first-order change only

These transformations compute in fp32 and keep fp32 states in the shapes of the parameters, so that
a state shards as the parameters do. `evaluation_params` returns the parameters to evaluate, sample
from and export.

A row holds the weights of one output. `layout` maps a parameter's path to the layout of its
matrices, `gptjax.optim.Matrices`; Equinox's `weight` is Matrices(inputs=(1,), outputs=(0,)).
Parameters without a matrix need `optax.partition` or `optax.masked`.

All of them together, in the order of the records:

    >>> rate = schedule("powercool", peak=0.035, warmup_steps=0, total_steps=1000)
    >>> step = optax.chain(row_floor(0.3825), optax.scale_by_learning_rate(rate))
    >>> tx = optax.chain(
    ...     optax.scale_by_adam(),
    ...     radial_pin(step, decay=lambda n: 0.025 * rate(n)),
    ...     tail_ema(lambda n: jnp.where(n < 830, 1.0, 1 / 50)),
    ... )
    >>> tx = ema_nesterov(tx, beta=lambda n: jnp.where((n >= 160) & (n < 760), 0.3, 0.0))
    >>> params = {"kernel": jnp.ones((3, 5))}
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> evaluation_params(params, state)["kernel"].shape
    (3, 5)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from gptjax.optim import low_precision
from gptjax.optim.partition import Layout, flatten, one_matrix


class EmaNesterovState(NamedTuple):
    """State of `ema_nesterov`.

    Attributes:
        lookahead: β of the parameters.
        displacement: m, the average of the steps without look-ahead.
    """

    count: Int[Array, ""]
    lookahead: Float[Array, ""]
    displacement: optax.Params
    inner: optax.OptState = ()


def ema_nesterov(
    inner: optax.GradientTransformation,
    beta: optax.ScalarOrSchedule,
    gamma: float = 0.99,
) -> optax.GradientTransformationExtraArgs:
    """Train at a point ahead of the optimizer's own, in the direction of its average step.

    Let u be the optimizer's update, which is added to the parameters w:

        m ← γm + (1−γ)(u + βₜm)
        w ← w + u + βₜ₊₁m

    The parameters are look-ahead points: w − βm is the optimizer's own point, which
    `evaluation_params` returns. With β = 0, the updates are the optimizer's.

    "EMA-Nesterov", 2026, https://arxiv.org/abs/2605.25395. modded-nanogpt's records use γ = 0.99,
    and β = 0.6·lr/max lr in steps 500 to 2,400 of 3,150 with Muon, 0.3·lr/max lr in steps 300 to
    1,950 of 2,900 with a stronger optimizer.

    Args:
        inner: optimizer, including its learning rate.
        beta: β, a number or a schedule of the index of the update whose gradient is computed ahead.
        gamma: γ, the decay rate of the average step.

    Example:
        >>> tx = ema_nesterov(optax.adamw(3e-4), beta=0.3)
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        m = optax.tree.zeros_like(params, dtype=jnp.float32)
        return EmaNesterovState(
            jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), m, inner.init(params)
        )

    def update(updates, state, params=None, **extra):
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        count = optax.safe_increment(state.count)
        ahead = jnp.asarray(beta(count) if callable(beta) else beta, jnp.float32)

        def average(m, u):
            return gamma * m + (1 - gamma) * (u.astype(jnp.float32) + state.lookahead * m)

        m = jax.tree.map(average, state.displacement, updates)
        updates = jax.tree.map(lambda u, m: u + ahead * m, updates, m)
        return updates, EmaNesterovState(count, ahead, m, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


class TailEmaState(NamedTuple):
    """State of `tail_ema`.

    Attributes:
        tail_weight: weight of the average in `evaluation_params`.
        tail_average: e; `optax.MaskedNode` for a parameter without an average.
    """

    count: Int[Array, ""]
    tail_weight: Float[Array, ""]
    tail_average: optax.Params


def tail_ema(
    rate: optax.ScalarOrSchedule,
    weight: float = 0.6,
    *,
    select: Callable[[str], bool] = lambda path: True,
) -> optax.GradientTransformation:
    """Average the parameters w in the last steps, without a change of the updates.

        e ← rate·w + (1−rate)·e, where w is the result of the update

    It must be the last transformation that changes updates, in any chain around it too: it averages
    the parameters plus the updates that it receives. `ema_nesterov` may wrap the chain.

    `evaluation_params` returns (1−weight)·w + weight·e. While the rate is 1, e is w, up to its
    rounding. With weight 0, `evaluation_params` returns w.

    modded-nanogpt's records: rate 1/150 in the last sixth of 2,900 steps, weight 0.6, not for the
    token embedding.

    Args:
        rate: a number, or a schedule of the update's index.
        weight: weight of the average.
        select: function of a path such as "blocks.0.attn.c_attn.kernel": whether the parameter has
            an average.

    Example:
        >>> rate = lambda count: jnp.where(count < 2400, 1.0, 1 / 150)
        >>> tx = optax.chain(optax.adamw(3e-4), tail_ema(rate))
    """

    def init(params):
        paths, leaves, tree = flatten(params)
        # Copies: a donated state may not have one buffer twice.
        averages = [
            jnp.array(p, jnp.float32) if select(path) else optax.MaskedNode()
            for path, p in zip(paths, leaves, strict=True)
        ]
        return TailEmaState(
            jnp.zeros((), jnp.int32),
            jnp.asarray(weight, jnp.float32),
            jax.tree.unflatten(tree, averages),
        )

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("tail_ema needs the parameters: update(updates, state, params)")
        a = jnp.asarray(rate(state.count) if callable(rate) else rate, jnp.float32)

        def average(e, p, u):
            if _is_masked(e):
                return e
            return a * (p.astype(jnp.float32) + u.astype(jnp.float32)) + (1 - a) * e

        e = jax.tree.map(average, state.tail_average, params, updates, is_leaf=_is_masked)
        return updates, TailEmaState(optax.safe_increment(state.count), state.tail_weight, e)

    return optax.GradientTransformation(init, update)


class Metrics(NamedTuple):
    """State, or part of the state, of a transformation: metrics of the last update, by name, which
    the training step logs.

    Attributes:
        values: numbers or arrays, the same names in every update.
    """

    values: dict[str, Array]


def metrics_of(state: optax.OptState) -> dict[str, Array]:
    """Return the values of all `Metrics` in an optimizer's state."""
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Metrics))
    return {k: v for x in found if isinstance(x, Metrics) for k, v in x.values.items()}


def evaluation_params(params: optax.Params, state: optax.OptState) -> optax.Params:
    """Return the parameters to evaluate, sample from and export, in the dtypes of `params`.

    These are the optimizer's own point for `ema_nesterov`, then the blend of `tail_ema`; `params`
    themselves for other optimizers.

    Args:
        params: parameters of the training.
        state: the optimizer's state.

    Example:
        >>> params = {"kernel": jnp.ones((3, 5))}
        >>> tx = optax.chain(optax.sgd(0.1), tail_ema(0.5, weight=0.6))
        >>> updates, state = tx.update(params, tx.init(params), params)  # w = 0.9, e = 0.95
        >>> params = evaluation_params(optax.apply_updates(params, updates), state)
        >>> round(float(params["kernel"][0, 0]), 4)
        0.93
    """

    def moved(params, tree, factor, from_params):
        def one(x, p):
            if _is_masked(x):
                return p
            # The difference of equal numbers is 0: the result is then exactly p.
            return p + factor * (x - p if from_params else x)

        return jax.tree.map(one, tree, params, is_leaf=_is_masked)

    def corrected(params, state):
        for part in jax.tree.leaves(state, is_leaf=_corrects):
            if isinstance(part, EmaNesterovState):
                params = moved(params, part.displacement, -part.lookahead, False)
                params = corrected(params, part.inner)
            elif isinstance(part, TailEmaState):
                params = moved(params, part.tail_average, part.tail_weight, True)
        return params

    if not any(map(_corrects, jax.tree.leaves(state, is_leaf=_corrects))):
        return params
    halves = isinstance(state, low_precision.MantissaState)
    whole = low_precision.whole(params, state) if halves else params
    return jax.tree.map(lambda x, p: x.astype(p.dtype), corrected(whole, state), params)


def _corrects(x: object) -> bool:
    return isinstance(x, (EmaNesterovState, TailEmaState))


def _is_masked(x: object) -> bool:
    return isinstance(x, optax.MaskedNode)


def row_floor(floor: float, *, layout: Layout = one_matrix) -> optax.GradientTransformation:
    """Scale each row of an update up to a fraction of the norm of the parameter's row.

        uᵢ ← uᵢ · max(1, floor·‖wᵢ‖/‖uᵢ‖), for each output i

    This transformation precedes the scaling by the learning rate. A row of zeros stays zero. With
    floor 0, updates do not change.

    modded-nanogpt's records: floor 0.3825 with learning rate 0.0375, for orthogonalized updates, in
    place of weight decay.

    Args:
        floor: least ratio of the norms.
        layout: maps a parameter's path to the layout of its matrices.

    Example:
        >>> floored = optax.chain(row_floor(0.3825), optax.scale_by_learning_rate(0.0375))
        >>> tx = optax.chain(optax.scale_by_adam(), floored)
    """

    def update(updates, state, params=None):
        paths, leaves, tree = flatten(updates)
        for i, (path, w) in enumerate(zip(paths, _fp32("row_floor", params), strict=True)):
            u, rows = leaves[i].astype(jnp.float32), layout(path).row_sums
            norms = jnp.sqrt(rows(jnp.square(w), path)), jnp.sqrt(rows(jnp.square(u), path))
            leaves[i] = u * jnp.maximum(1, floor * norms[0] / jnp.maximum(norms[1], 1e-8))
        return jax.tree.unflatten(tree, leaves), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class RadialPinState(NamedTuple):
    """State of `radial_pin`: the number of updates, and the state of the wrapped transformation."""

    count: Int[Array, ""]
    inner: optax.OptState


def radial_pin(
    inner: optax.GradientTransformation,
    *,
    damping: float = 0.5,
    pin: float = 1.0,
    decay: optax.ScalarOrSchedule = 0.0,
    decay_factor: Callable[[str], float] | None = None,
    layout: Layout = one_matrix,
) -> optax.GradientTransformationExtraArgs:
    """Control the norm of each matrix: damp its growth, and keep the norm on its first-order path.

    Let u be the incoming update, which `inner` subtracts, and d the result of `inner`, which is
    added, such as d = −lr·u. For each matrix w:

        c = ⟨u, w⟩/⟨w, w⟩;  u ← u − damping·min(c, 0)·w     (c < 0: the update increases ‖w‖)
        d = inner(u);  r = ‖w‖ + ⟨d, w⟩/‖w‖
        w ← (w + d) · (1 + pin·(r/‖w + d‖ − 1))              (pin = 1: the norm is r)
        w ← w − decay·w where d·w < 0

    A matrix of zeros is not pinned. With damping, pin and decay 0, the updates are those of
    `inner`.

    modded-nanogpt's records: damping 0.5, pin 1, decay 0.025·lr; `inner` is `row_floor` and the
    learning rate.

    Args:
        inner: the rest of the optimizer, which ends with the scaling by the learning rate.
        damping: fraction by which the component of u that increases the norm is reduced.
        pin: 1 pins the norm to r; 0 does not pin.
        decay: decay in one step, a number or a schedule of the update's index.
        decay_factor: maps a parameter's path to a factor of the decay.
        layout: maps a parameter's path to the layout of its matrices.

    Example:
        >>> inner = optax.chain(row_floor(0.3825), optax.scale_by_learning_rate(0.0375))
        >>> tx = optax.chain(optax.scale_by_adam(), radial_pin(inner))
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        return RadialPinState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(updates, state, params=None, **extra):
        w, (paths, u, tree) = _fp32("radial_pin", params), flatten(updates)

        def dot(i, x, y):
            matrices = layout(paths[i])
            return matrices.matrix_sums(matrices.row_sums(x * y, paths[i]))

        squares = [dot(i, x, x) for i, x in enumerate(w)]
        for i, x in enumerate(w):
            u[i] = u[i].astype(jnp.float32)
            c = dot(i, u[i], x) / jnp.maximum(squares[i], 1e-12)
            u[i] = u[i] - damping * jnp.minimum(c, 0) * x
        steps, inner_state = inner.update(jax.tree.unflatten(tree, u), state.inner, params, **extra)
        steps = [d.astype(jnp.float32) for d in jax.tree.leaves(steps)]
        rate = jnp.asarray(decay(state.count) if callable(decay) else decay, jnp.float32)
        for i, (x, d) in enumerate(zip(w, steps, strict=True)):
            norm = jnp.maximum(jnp.sqrt(squares[i]), 1e-8)
            wanted = jnp.maximum(norm + dot(i, d, x) / norm, 1e-8)
            after = jnp.maximum(jnp.sqrt(dot(i, x + d, x + d)), 1e-8)
            scale = 1 + pin * jnp.where(squares[i] > 0, wanted / after - 1, 0)
            own = rate * decay_factor(paths[i]) if decay_factor else rate
            scale = scale * jnp.where(d * x < 0, 1 - own, 1)
            steps[i] = d * scale + x * (scale - 1)
        count = optax.safe_increment(state.count)
        return jax.tree.unflatten(tree, steps), RadialPinState(count, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _fp32(name: str, params: optax.Params | None) -> list[jax.Array]:
    """Return the leaves of the parameters in fp32."""
    if params is None:
        raise ValueError(f"{name} needs the parameters: update(updates, state, params)")
    return [p.astype(jnp.float32) for p in jax.tree.leaves(params)]
