"""NorMuon: orthogonalized momentum with the update of each neuron normalized.

Let g be the gradient of a matrix with I inputs and O outputs, and β the momentum. Each line is one
transformation:

    m ← βm + (1−β)g,   u = (1−β)g + βm                                      scale_by_nesterov
    v = polar_express(u)                                                    orthogonalize
    r = mean of v² over the inputs, or over the outputs where they are fewer
    V ← β₂V + (1−β₂)r,   s = 1/√max(V, 1e-10)
    v ← v·s · ‖v‖/‖v·s‖                                                     scale_by_neuron_norm
    v ← v + wd·p where v·p ≥ 0, else v                                      add_cautious_decay
    v ← v·√max(1, O/I)                                                      scale_by_matrix_shape

Li et al., "NorMuon", 2025; Jordan et al., "Muon", 2024; Chen et al., "Cautious Weight Decay", 2025.
The constants are modded-nanogpt's. `scale_by_neuron_norm` keeps the Frobenius norm,
so that V needs no bias correction. Li et al.'s own algorithm, with V always of the outputs and with
plain decay, is an example of `scale_by_normuon`.

This module works with any optax code: it imports neither kernels nor configs. `polar_express`
imports the kernels of `pallas_kernels` when it is called.

`layout` maps a parameter's path, such as "blocks.0.attn.c_attn.kernel", to the layout of the
parameter's matrices, `gptjax.optim.Matrices`.

Shapes: N matrices of one shape, I inputs, O outputs.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers

from gptjax.optim.adamw import add_cautious_decay, matrices_and_adamw
from gptjax.optim.partition import Group, Layout, Matrices, flatten, group_of, one_matrix
from gptjax.optim.polar_express import polar_express

Neurons = Literal["longer", "outputs"]
REST = "rest"


def momentum_schedule(
    total_steps: int,
    *,
    low: float = 0.85,
    high: float = 0.95,
    warmup_steps: int = 300,
    cooldown_steps: int = 50,
) -> optax.Schedule:
    """Return a momentum that rises from `low` to `high`, and falls to `low` over the last steps.

    With no steps of warm-up, it begins with `high`; with no steps of cooldown, it ends with `high`.
    """

    def momentum(count):
        step = jnp.asarray(count, jnp.float32)
        up = jnp.clip(step / warmup_steps, 0.0, 1.0) if warmup_steps else 1.0
        down = 1.0
        if cooldown_steps:
            down = jnp.clip((total_steps - step) / cooldown_steps, 0.0, 1.0)
        return low + (high - low) * jnp.minimum(up, down)

    return momentum


class NesterovState(NamedTuple):
    count: jax.Array
    momentum: optax.Updates


def scale_by_nesterov(momentum: optax.ScalarOrSchedule = 0.95) -> optax.GradientTransformation:
    """Return u = (1−β)g + βm with m ← βm + (1−β)g, in fp32 and without bias correction.

    Args:
        momentum: β, a number or a schedule of the update's index.
    """

    def init(params):
        return NesterovState(
            jnp.zeros((), jnp.int32),
            jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
        )

    def update(updates, state, params=None):
        del params
        beta = jnp.asarray(momentum(state.count) if callable(momentum) else momentum, jnp.float32)
        updates = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        new = jax.tree.map(lambda g, m: beta * m + (1 - beta) * g, updates, state.momentum)
        updates = jax.tree.map(lambda g, m: (1 - beta) * g + beta * m, updates, new)
        return updates, NesterovState(optax.safe_increment(state.count), new)

    return optax.GradientTransformation(init, update)


def orthogonalize(
    method: Callable[[Float[Array, "N I O"]], Float[Array, "N I O"]] = polar_express,
    *,
    layout: Layout = one_matrix,
) -> optax.GradientTransformation:
    """Replace each matrix by its orthogonal factor.

    All matrices of one shape form one batch, across parameters.

    Args:
        method: function of a batch of matrices; `distributed` shards the batch over several
            devices.
    """

    def update(updates, state, params=None):
        del params
        paths, leaves, tree = flatten(updates)
        for indices, shapes, x_NIO in _batches(paths, leaves, layout):
            for i, factor in zip(indices, _split_batch(method(x_NIO), shapes), strict=True):
                leaves[i] = layout(paths[i]).together(factor, leaves[i].shape)
        return jax.tree.unflatten(tree, leaves), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def distributed(
    method: Callable,
    mesh: Mesh | AbstractMesh,
    axis: str = "data",
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> Callable:
    """Shard the replicated batch of an orthogonalization method over a mesh axis.

    Each device computes its share, and the results are gathered on all devices.

    Args:
        axis: axis of the mesh.
        dtype: dtype in which the results are gathered. The dtype of the method's matmuls represents
            every result exactly.

    Raises:
        ValueError: the mesh has no such axis.
    """
    if axis not in mesh.axis_names:
        raise ValueError(
            f"normuon: expected a mesh with the axis {axis!r}, got the axes {mesh.axis_names}"
        )

    def share_of(x_NIO):
        return method(x_NIO).astype(dtype)

    def run(x_NIO):
        devices, n = mesh.shape[axis], x_NIO.shape[0]
        if devices == 1:
            return method(x_NIO)
        padded_NIO = jnp.pad(x_NIO, ((0, -n % devices), (0, 0), (0, 0)))
        share = PartitionSpec(axis)
        sharded = jax.shard_map(
            share_of, mesh=mesh, in_specs=share, out_specs=share, check_vma=False
        )
        replicated = jax.sharding.NamedSharding(mesh, PartitionSpec())
        whole_NIO = jax.lax.with_sharding_constraint(sharded(padded_NIO), replicated)[:n]
        return whole_NIO.astype(x_NIO.dtype)

    return run


class NeuronNormState(NamedTuple):
    variance: optax.Updates
    """Mean squares over the inputs, or over the outputs if outputs are fewer; unpacked."""


def scale_by_neuron_norm(
    b2: float = 0.95, *, layout: Layout = one_matrix, neurons: Neurons = "longer"
) -> optax.GradientTransformation:
    """Divide each neuron's update by its running root mean square, keeping each matrix's norm.

    Args:
        neurons: "longer": the indices of the longer axis, which are the outputs of a square matrix;
            "outputs": always the outputs.
    """

    def of_outputs(i, o):
        return neurons == "outputs" or o >= i

    def init(params):
        paths, leaves, tree = flatten(params)
        moments = []
        for path, leaf in zip(paths, leaves, strict=True):
            *lead, i, o = layout(path).shape(leaf.shape, path)
            moments.append(
                jnp.zeros((*lead, *((1, o) if of_outputs(i, o) else (i, 1))), jnp.float32)
            )
        return NeuronNormState(jax.tree.unflatten(tree, moments))

    def update(updates, state, params=None):
        del params
        paths, leaves, tree = flatten(updates)
        leaves = [leaf.astype(jnp.float32) for leaf in leaves]
        moments = jax.tree.leaves(state.variance)
        # Use the batches of `orthogonalize`: a few kernels instead of several for each parameter.
        for indices, shapes, v_NIO in _batches(paths, leaves, layout):
            axis = -2 if of_outputs(*v_NIO.shape[-2:]) else -1
            # Without the barrier XLA computes the sums below from v, and reads v twice.
            squares = jax.lax.optimization_barrier(jnp.square(v_NIO).mean(axis, keepdims=True))
            old = jnp.concatenate([moments[i].reshape(-1, *moments[i].shape[-2:]) for i in indices])
            variance = b2 * old + (1 - b2) * squares
            scale = jax.lax.rsqrt(jnp.maximum(variance, 1e-10))
            norm = jnp.sqrt((squares * v_NIO.shape[axis]).sum((-2, -1), keepdims=True))
            scaled = jnp.sqrt(
                (squares * v_NIO.shape[axis] * jnp.square(scale)).sum((-2, -1), keepdims=True)
            )
            v_NIO = v_NIO * (scale * (norm / jnp.maximum(scaled, 1e-10)))
            parts = zip(
                indices, _split_batch(v_NIO, shapes), _split_batch(variance, shapes), strict=True
            )
            for i, v, moment in parts:
                leaves[i], moments[i] = layout(paths[i]).together(v, leaves[i].shape), moment
        return jax.tree.unflatten(tree, leaves), NeuronNormState(jax.tree.unflatten(tree, moments))

    return optax.GradientTransformation(init, update)


def scale_by_matrix_shape(
    *, layout: Layout = one_matrix, factor: Callable[[str], float] | None = None
) -> optax.GradientTransformation:
    """Multiply by √max(1, outputs/inputs) and by the factor of the parameter's path."""

    def update(updates, state, params=None):
        del params
        paths, leaves, tree = flatten(updates)
        for i, path in enumerate(paths):
            *_, inputs, outputs = layout(path).shape(leaves[i].shape, path)
            leaves[i] = leaves[i] * (
                math.sqrt(max(1.0, outputs / max(inputs, 1))) * (factor(path) if factor else 1.0)
            )
        return jax.tree.unflatten(tree, leaves), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_by_normuon(
    momentum: optax.ScalarOrSchedule = 0.95,
    b2: float = 0.95,
    *,
    method: Callable = polar_express,
    layout: Layout = one_matrix,
    neurons: Neurons = "longer",
) -> optax.GradientTransformation:
    """Return the directions v of NorMuon: `scale_by_nesterov`, `orthogonalize`, and
    `scale_by_neuron_norm`, whose arguments these are.

    References:
        Li et al., `NorMuon: Making Muon more efficient and scalable
        <https://arxiv.org/abs/2510.05491>`_, 2025

    Example:
        >>> tx = optax.chain(  # the authors' algorithm
        ...     scale_by_normuon(method=newton_schulz, neurons="outputs"),
        ...     scale_by_matrix_shape(),
        ...     optax.add_decayed_weights(0.1),
        ...     optax.scale_by_learning_rate(0.02),
        ... )
    """
    return optax.chain(
        scale_by_nesterov(momentum),
        orthogonalize(method, layout=layout),
        scale_by_neuron_norm(b2, layout=layout, neurons=neurons),
    )


def normuon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    momentum: optax.ScalarOrSchedule = 0.95,
    b2: float = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    method: Callable = polar_express,
    layout: Layout = one_matrix,
    factor: Callable[[str], float] | None = None,
    decay_factor: Callable[[str], float] | None = None,
    neurons: Neurons = "longer",
    rest: optax.GradientTransformation | None = None,
    weight_dimension_numbers: Any = None,
) -> optax.GradientTransformation:
    """Return NorMuon for matrices, and another optimizer for other parameters.

    Args:
        learning_rate: a number, or a schedule of the update's index.
        momentum, b2: β and β₂ in the module's equations.
        weight_decay: see `add_cautious_decay`.
        method: orthogonalization: `polar_express`, `newton_schulz`, or `distributed(…)`.
        layout: maps a parameter's path to the layout of its matrices. Not used with `rest`.
        factor, decay_factor: map a parameter's path to a factor of the learning rate and of the
            weight decay.
        neurons: see `scale_by_neuron_norm`.
        rest: optimizer of the other parameters. None: all parameters are matrices.
        weight_dimension_numbers: with `rest`, as in `optax.contrib.muon`: a tree, a prefix of the
            parameters' tree, or a function that maps the parameters to one. A leaf is an
            `optax.contrib.MuonDimensionNumbers` or a `Matrices`; None for a parameter of `rest`.
            By default, each parameter with two axes is a matrix of (inputs, outputs). That is wrong
            for embeddings, for Equinox's weights (outputs, inputs), and for layers stacked for
            `jax.lax.scan`, whose vectors have two axes and whose matrices have three.

    Raises:
        ValueError: `weight_dimension_numbers` without `rest`; at `init`, a parameter with fewer
            than two axes, or with more than two and a layout that does not name inputs and outputs.

    `optax.inject_hyperparams` regards functions as schedules: name `method`, `layout`, `factor`,
    `decay_factor` and `weight_dimension_numbers` in its `static_args`.

    Example:
        >>> tx = normuon(0.02, rest=optax.adamw(3e-4))
        >>> numbers = {"embedding": None, "blocks": MuonDimensionNumbers(0, 1), "norm": None}
        >>> tx = normuon(0.02, rest=optax.adamw(3e-4), weight_dimension_numbers=numbers)
    """

    def of_matrices(layout):
        return optax.chain(
            scale_by_normuon(momentum, b2, method=method, layout=layout, neurons=neurons),
            add_cautious_decay(weight_decay, factor=decay_factor),
            scale_by_matrix_shape(layout=layout, factor=factor),
            optax.scale_by_learning_rate(learning_rate),
        )

    if rest is None:
        if weight_dimension_numbers is not None:
            raise ValueError("normuon: weight_dimension_numbers needs rest, such as optax.adamw()")
        return of_matrices(layout)

    def parts(tree):
        paths, _, structure = flatten(tree)
        layouts = dict(zip(paths, _layouts(weight_dimension_numbers, tree), strict=True))
        labels = [REST if layouts[path] is None else "matrix" for path in paths]
        both = {"matrix": of_matrices(layouts.__getitem__), REST: rest}
        # A function: optax would call the labels of a module that has __call__, as in Equinox.
        return optax.partition(both, lambda _: jax.tree.unflatten(structure, labels))

    def update(updates, state, params=None, **extra):
        return parts(updates).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(lambda params: parts(params).init(params), update)


def _layouts(numbers: Any, params: optax.Params) -> list[Matrices | None]:
    """Return the layout of each leaf of the parameters from `weight_dimension_numbers`."""

    def is_leaf(x):
        return x is None or isinstance(x, MuonDimensionNumbers)

    def layout(x):
        if not isinstance(x, MuonDimensionNumbers):
            return REST if x is None else x
        axes = [(axis,) if isinstance(axis, int) else tuple(axis) for axis in x]
        return Matrices(inputs=axes[0], outputs=axes[1])

    if numbers is None:
        return [Matrices() if x.ndim == 2 else None for x in jax.tree.leaves(params)]
    # A tree like the parameters may have __call__: an Equinox module.
    is_function = callable(numbers) and type(numbers) is not type(params)
    tree = numbers(params) if is_function else numbers
    # A None of the parameters, such as a static field in Equinox, is no leaf: REST is not None.
    tree = jax.tree.broadcast(jax.tree.map(layout, tree, is_leaf=is_leaf), params)
    return [None if x == REST else x for x in jax.tree.leaves(tree)]


def normuon_and_adamw(
    groups: Sequence[Group],
    *,
    matrix_learning_rate: optax.ScalarOrSchedule,
    matrix_weight_decay: optax.ScalarOrSchedule = 0.0,
    momentum: optax.ScalarOrSchedule = 0.95,
    neuron_b2: float = 0.95,
    method: Callable = polar_express,
    **adamw: Any,
) -> optax.GradientTransformation:
    """Return clipping, then NorMuon for groups of matrices and AdamW for other groups.

    Args:
        groups: rules of `assign`, which `init` calls.
        matrix_learning_rate, matrix_weight_decay, momentum, neuron_b2, method: see `normuon`;
            neuron_b2 is its b2.
        adamw: see `matrices_and_adamw`, which needs the learning rate.

    Raises:
        GroupError: at `init`, as in `assign`.
    """
    of = functools.partial(group_of, tuple(groups))
    matrix = normuon(
        matrix_learning_rate,
        momentum=momentum,
        b2=neuron_b2,
        weight_decay=matrix_weight_decay,
        method=method,
        layout=lambda path: of(path).matrices,
        factor=lambda path: of(path).learning_rate,
        decay_factor=lambda path: of(path).weight_decay,
    )
    return matrices_and_adamw(groups, matrix, **adamw)


def _batches(
    paths: list[str], leaves: list[jax.Array], layout: Layout
) -> Iterator[tuple[list[int], list[tuple[int, ...]], jax.Array]]:
    """Yield a batch for each shape of matrices, except empty ones: the indices of the leaves, their
    unpacked shapes, and the matrices."""
    by_shape: dict[tuple, list[tuple[int, jax.Array]]] = {}
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        matrices = layout(path).unpacked(leaf, path)
        if matrices.size == 0:
            continue
        by_shape.setdefault(matrices.shape[-2:], []).append((i, matrices))
    for shape, members in by_shape.items():
        batch = jnp.concatenate([matrices.reshape(-1, *shape) for _, matrices in members])
        yield [i for i, _ in members], [matrices.shape for _, matrices in members], batch


def _split_batch(x_NIO: jax.Array, shapes: list[tuple[int, ...]]) -> list[jax.Array]:
    """Split a batch of `_batches` into its leaves; the last two axes may have other sizes."""
    counts = [math.prod(shape[:-2]) for shape in shapes]
    parts = jnp.split(x_NIO, list(itertools.accumulate(counts[:-1])))
    return [
        part.reshape(*shape[:-2], *part.shape[1:])
        for part, shape in zip(parts, shapes, strict=True)
    ]
