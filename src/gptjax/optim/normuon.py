"""NorMuon: momentum, orthogonalised a matrix at a time, with every neuron's update brought to the
same size.

For a gradient g of a matrix with I inputs and O outputs, β the momentum, and each line a
transformation of its own here:

    m ← βm + (1−β)g,   u = (1−β)g + βm                                      scale_by_nesterov
    v = polar_express(u)                                                    orthogonalize
    r = mean of v² over the inputs, or over the outputs where they are fewer
    V ← β₂V + (1−β₂)r,   s = 1/√max(V, 1e-10)
    v ← v·s · ‖v‖/‖v·s‖                                                     scale_by_neuron_norm
    v ← v + wd·p where v·p ≥ 0, else v                                      add_cautious_decay
    v ← v·√max(1, O/I)                                                      scale_by_matrix_shape

Li et al., "NorMuon", 2025; Jordan et al., "Muon", 2024; Chen et al., "Cautious Weight Decay", 2025.
The constants are those of modded-nanogpt's record. The Frobenius norm stays as it is in the third,
so that nothing needs a correction for bias.

A parameter of two axes holds one matrix, inputs first, as Flax's `kernel` does, or several side by
side. With more axes, `Matrices` must name the inputs and the outputs. Every transformation here
calls a function that maps a parameter's path, such as "blocks.0.attn.c_attn.kernel", to its
`Matrices`. Nothing here knows gptjax's model.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from gptjax.optim._ranges import check_range
from gptjax.optim.polar_express import polar_express


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Layout of the matrices in a parameter.

    Attributes:
        packed: number of matrices that share the outputs, one after the other (3 for q|k|v).
        outputs_first: for two axes: outputs, inputs, as in PyTorch; else inputs, outputs, as in
            Flax.
        inputs, outputs: axes of inputs and of outputs, for a parameter of any number of axes.
            Several axes are merged in the given order. Each remaining axis holds separate matrices.

    Example:
        >>> # Flax's attention, query kernel (C, H, D): one C × H·D matrix
        >>> Matrices(inputs=(0,), outputs=(1, 2))
        >>> # Flax's attention, out kernel (H, D, C): one H·D × C matrix
        >>> Matrices(inputs=(0, 1), outputs=(2,))
        >>> # convolution (kh, kw, in, out): one kh·kw·in × out matrix
        >>> Matrices(inputs=(0, 1, 2), outputs=(3,))
        >>> # stacked layers (L, in, out): L matrices
        >>> Matrices(inputs=(1,), outputs=(2,))

    Raises:
        ValueError: packed below 1; only one of inputs and outputs; an axis named twice;
            outputs_first with named axes.
    """

    packed: int = 1
    outputs_first: bool = False
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    def __post_init__(self):
        named = (*self.inputs, *self.outputs)
        if self.packed < 1:
            raise ValueError(f"Matrices: packed must be at least 1, got {self.packed}")
        if bool(self.inputs) != bool(self.outputs) or len(set(named)) != len(named):
            raise ValueError(
                "Matrices: expected inputs and outputs to name different axes, such as "
                "inputs=(0,), outputs=(1, 2), "
                f"got inputs={self.inputs}, outputs={self.outputs}"
            )
        if self.outputs_first and named:
            raise ValueError("Matrices: leave out outputs_first where inputs and outputs are named")

    def unpacked(self, x: jax.Array, path: str = "") -> jax.Array:
        """Return each matrix by itself: (…, packed, I, O), or (…, packed, O, I) with outputs_first.

        Raises:
            ValueError: x has fewer than two axes; x has more and the layout does not name them; an
                axis is out of range; the number of outputs is not a multiple of `packed`.
        """
        batch, inputs, outputs = self._axes_of(x.shape, path)
        n_in, n_out = (math.prod(x.shape[axis] for axis in axes) for axes in (inputs, outputs))
        if n_out % self.packed:
            raise ValueError(
                f"{path or 'a parameter'} of shape {x.shape} does not hold {self.packed} matrices "
                f"side by side: {n_out} outputs are no multiple of {self.packed}; give it to "
                "another "
                "optimizer"
            )
        lead = tuple(x.shape[axis] for axis in batch)
        if self.outputs_first:
            return x.reshape(*lead, self.packed, n_out // self.packed, n_in)
        x = jnp.transpose(x, (*batch, *inputs, *outputs))
        return jnp.moveaxis(x.reshape(*lead, n_in, self.packed, n_out // self.packed), -2, -3)

    def together(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the parameter of this shape from its matrices: the inverse of `unpacked`."""
        if self.outputs_first:
            return x.reshape(shape)
        order = tuple(itertools.chain(*self._axes_of(shape)))
        x = jnp.moveaxis(x, -3, -2).reshape(tuple(shape[axis] for axis in order))
        return jnp.transpose(x, tuple(order.index(axis) for axis in range(len(shape))))

    @property
    def axes(self) -> tuple[int, int]:
        """The axes of inputs and outputs of an unpacked array."""
        return (-1, -2) if self.outputs_first else (-2, -1)

    def _axes_of(self, shape: tuple[int, ...], path: str = "") -> tuple[tuple[int, ...], ...]:
        """The remaining axes of a parameter, the axes of inputs, and the axes of outputs."""
        n, name = len(shape), path or "a parameter"
        if n < 2:
            raise ValueError(
                f"{name} of shape {shape} does not hold a matrix; give it to another optimizer"
            )
        if not self.inputs:
            if n > 2:
                raise ValueError(
                    f"{name} of shape {shape} is ambiguous: NorMuon must know which of its {n} "
                    "axes "
                    "are inputs and which are outputs. Name them in its layout, such as "
                    "Matrices(inputs=(0,), outputs=(1, 2)) for one matrix, or "
                    "Matrices(inputs=(1,), outputs=(2,)) for matrices stacked along axis 0"
                )
            return ((), (1,), (0,)) if self.outputs_first else ((), (0,), (1,))
        named = [axis + n if axis < 0 else axis for axis in (*self.inputs, *self.outputs)]
        if not set(named) <= set(range(n)) or len(set(named)) != len(named):
            raise ValueError(
                f"{name} of shape {shape}: inputs={self.inputs} and outputs={self.outputs} do not "
                "name different axes of it"
            )
        batch, k = tuple(axis for axis in range(n) if axis not in named), len(self.inputs)
        return batch, tuple(named[:k]), tuple(named[k:])


Layout = Callable[[str], Matrices]


def one_matrix(path: str) -> Matrices:
    """The layout of a parameter that is one Flax kernel of two axes."""
    return Matrices()


def momentum_schedule(
    total_steps: int,
    *,
    low: float = 0.85,
    high: float = 0.95,
    warmup_steps: int = 300,
    cooldown_steps: int = 50,
) -> optax.Schedule:
    """Momentum that rises from `low` to `high` over the first steps, and falls back over the last.

    Raises:
        ValueError: low or high outside [0, 1); a negative number of steps.
    """
    check_range("momentum_schedule", below=1, low=low, high=high)
    steps = {"warmup_steps": warmup_steps, "cooldown_steps": cooldown_steps}
    check_range("momentum_schedule", total_steps=total_steps, **steps)

    def momentum(count):
        step = jnp.asarray(count, jnp.float32)
        up = jnp.clip(step / max(warmup_steps, 1), 0.0, 1.0)
        down = jnp.clip((total_steps - step) / max(cooldown_steps, 1), 0.0, 1.0)
        return low + (high - low) * jnp.minimum(up, down)

    return momentum


class NesterovState(NamedTuple):
    count: jax.Array
    momentum: optax.Updates


def scale_by_nesterov(momentum: optax.ScalarOrSchedule = 0.95) -> optax.GradientTransformation:
    """m ← βm + (1−β)g;  u = (1−β)g + βm, in fp32 and without a correction for bias.

    Args:
        momentum: β, a number or a schedule of the update's index.
    """

    check_range("normuon", below=1, momentum=momentum)

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
    """Replaces every matrix by its orthogonal factor. Matrices of one shape, whatever parameters
    they are in, go through one call.

    Args:
        method: of a batch of matrices; `distributed` makes one that is done on several devices.
    """

    def update(updates, state, params=None):
        del params
        paths, leaves, tree = flatten(updates)
        for indices, shapes, x_NIO in _batches(paths, leaves, layout):
            for i, made in zip(indices, _apart(method(x_NIO), shapes), strict=True):
                leaves[i] = layout(paths[i]).together(made, leaves[i].shape)
        return jax.tree.unflatten(tree, leaves), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def distributed(method: Callable, mesh: Mesh, axis: str = "data") -> Callable:
    """The method, for a batch of matrices that every device has: each device does its share, and
    all get the results.

    Args:
        axis: of the mesh, over which the work is shared.
    """

    def run(x_NIO):
        devices, n = mesh.shape[axis], x_NIO.shape[0]
        if devices == 1:
            return method(x_NIO)
        x_NIO = jnp.pad(x_NIO, ((0, -n % devices), (0, 0), (0, 0)))
        share = PartitionSpec(axis)
        made = jax.shard_map(method, mesh=mesh, in_specs=share, out_specs=share, check_vma=False)(
            x_NIO
        )
        return jax.lax.with_sharding_constraint(
            made, jax.sharding.NamedSharding(mesh, PartitionSpec())
        )[:n]

    return run


class NeuronNormState(NamedTuple):
    variance: optax.Updates
    """Of the inputs of each output, or the other way round where the outputs are fewer;
    unpacked."""


def scale_by_neuron_norm(
    b2: float = 0.95, *, layout: Layout = one_matrix
) -> optax.GradientTransformation:
    """Divides each neuron's update by the running root mean square of it; the norm of each matrix
    stays as it is."""
    check_range("normuon", below=1, b2=b2)

    def reduced(path, x):
        inputs, outputs = layout(path).axes
        return inputs if x.shape[outputs] >= x.shape[inputs] else outputs

    def init(params):
        paths, leaves, tree = flatten(params)
        sums = []
        for path, leaf in zip(paths, leaves, strict=True):
            x = jax.eval_shape(lambda leaf, path=path: layout(path).unpacked(leaf, path), leaf)
            shape = list(x.shape)
            shape[reduced(path, x)] = 1
            sums.append(jnp.zeros(shape, jnp.float32))
        return NeuronNormState(jax.tree.unflatten(tree, sums))

    def update(updates, state, params=None):
        del params
        paths, leaves, tree = flatten(updates)
        leaves, kept = (
            [leaf.astype(jnp.float32) for leaf in leaves],
            jax.tree.leaves(state.variance),
        )
        # In batches, as they were orthogonalised: a few kernels, and not several for every
        # parameter.
        for indices, shapes, v_NIO in _batches(
            paths, leaves, layout, apart=lambda path: layout(path).axes
        ):
            axis = reduced(paths[indices[0]], v_NIO)
            # XLA would sum the sums below over all of v once more, and read it twice.
            squares = jax.lax.optimization_barrier(jnp.square(v_NIO).mean(axis, keepdims=True))
            before = jnp.concatenate([kept[i].reshape(-1, *kept[i].shape[-2:]) for i in indices])
            variance = b2 * before + (1 - b2) * squares
            scale = jax.lax.rsqrt(jnp.maximum(variance, 1e-10))
            norm = jnp.sqrt((squares * v_NIO.shape[axis]).sum((-2, -1), keepdims=True))
            scaled = jnp.sqrt(
                (squares * v_NIO.shape[axis] * jnp.square(scale)).sum((-2, -1), keepdims=True)
            )
            made = _apart(v_NIO * (scale * (norm / jnp.maximum(scaled, 1e-10))), shapes)
            for i, v, its_variance in zip(indices, made, _apart(variance, shapes), strict=True):
                leaves[i], kept[i] = layout(paths[i]).together(v, leaves[i].shape), its_variance
        return jax.tree.unflatten(tree, leaves), NeuronNormState(jax.tree.unflatten(tree, kept))

    return optax.GradientTransformation(init, update)


class CautiousDecayState(NamedTuple):
    count: jax.Array


def add_cautious_decay(
    weight_decay: optax.ScalarOrSchedule, *, factor: Callable[[str], float] | None = None
) -> optax.GradientTransformation:
    """u + wd·p where u and p have the same sign, or one of them is zero; u elsewhere. Stands before
    the learning rate.

    With a number the decay goes as the learning rate, as in AdamW; with the schedule wd·lr, `lambda
    count: wd * lr(count)`, it goes as its square, as in modded-nanogpt's record.

    Args:
        weight_decay: a number, or a schedule of the update's index.
        factor: multiplies it, by a parameter's path.
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
            its_decay = decay * factor(path) if factor else decay
            leaves[i] = leaves[i] + jnp.where(leaves[i] * p >= 0, its_decay * p, 0.0)
        return jax.tree.unflatten(tree, leaves), CautiousDecayState(
            optax.safe_increment(state.count)
        )

    return optax.GradientTransformation(
        lambda params: CautiousDecayState(jnp.zeros((), jnp.int32)), update
    )


def scale_by_matrix_shape(
    *, layout: Layout = one_matrix, factor: Callable[[str], float] | None = None
) -> optax.GradientTransformation:
    """Multiplies by √max(1, outputs/inputs) and, by path, by a factor of the learning rate."""

    def update(updates, state, params=None):
        del params
        paths, leaves, tree = flatten(updates)
        for i, path in enumerate(paths):
            x = jax.eval_shape(lambda leaf, path=path: layout(path).unpacked(leaf, path), leaves[i])
            inputs, outputs = (x.shape[axis] for axis in layout(path).axes)
            leaves[i] = leaves[i] * (
                math.sqrt(max(1.0, outputs / inputs)) * (factor(path) if factor else 1.0)
            )
        return jax.tree.unflatten(tree, leaves), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_by_normuon(
    momentum: optax.ScalarOrSchedule = 0.95,
    b2: float = 0.95,
    *,
    method: Callable = polar_express,
    layout: Layout = one_matrix,
) -> optax.GradientTransformation:
    """The direction of NorMuon: `scale_by_nesterov`, `orthogonalize`, `scale_by_neuron_norm`."""
    return optax.chain(
        scale_by_nesterov(momentum),
        orthogonalize(method, layout=layout),
        scale_by_neuron_norm(b2, layout=layout),
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
) -> optax.GradientTransformation:
    """NorMuon for parameters that are all matrices; `optax.partition` gives the others to another
    optimizer.

    Args:
        learning_rate: a number, or a schedule of the update's index.
        momentum, b2: β and β₂ of the module's equations.
        weight_decay: as of `add_cautious_decay`.
        method: of orthogonalisation: `polar_express`, `newton_schulz`, or `distributed(…)`.
        layout: which matrices a parameter holds, by its path.
        factor, decay_factor: multiply the learning rate and the weight decay, by a parameter's
            path.

    Raises:
        ValueError: a number outside its range; at `init`, a parameter that holds no matrix, or one
            of more than two axes whose layout does not name inputs and outputs.

    Example:
        >>> label = lambda p: "matrix" if p.ndim >= 2 else "rest"
        >>> parts = {"matrix": normuon(0.02), "rest": optax.adam(3e-4)}
        >>> tx = optax.partition(parts, lambda params: jax.tree.map(label, params))
    """
    check_range("normuon", learning_rate=learning_rate, weight_decay=weight_decay)
    return optax.chain(
        scale_by_normuon(momentum, b2, method=method, layout=layout),
        add_cautious_decay(weight_decay, factor=decay_factor),
        scale_by_matrix_shape(layout=layout, factor=factor),
        optax.scale_by_learning_rate(learning_rate),
    )


def flatten(tree) -> tuple[list[str], list, jax.tree_util.PyTreeDef]:
    """Return the leaves' paths, such as "blocks.0.attn.c_attn.kernel", the leaves, the structure.

    The last key of a leaf inside a Flax variable is `.value`, which is left out: `nnx.Optimizer`
    calls `init` with variables and `update` with their arrays, and both must have one path.
    """
    with_paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    value = jax.tree_util.GetAttrKey("value")
    paths = [path[:-1] if path[-1:] == (value,) else path for path, _ in with_paths]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    return names, [leaf for _, leaf in with_paths], structure


def _batches(
    paths: list[str],
    leaves: list[jax.Array],
    layout: Layout,
    *,
    apart: Callable[[str], Hashable] = lambda path: None,
) -> Iterator[tuple[list[int], list[tuple[int, ...]], jax.Array]]:
    """The matrices of one shape, whatever leaves they are in: those leaves' indices, their shapes
    unpacked, and the batch.

    Args:
        apart: leaves for which it differs are not in one batch.
    """
    found: dict[tuple, list[tuple[int, jax.Array]]] = {}
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        matrices = layout(path).unpacked(leaf, path)
        found.setdefault((matrices.shape[-2:], apart(path)), []).append((i, matrices))
    for (shape, _), members in found.items():
        batch = jnp.concatenate([matrices.reshape(-1, *shape) for _, matrices in members])
        yield [i for i, _ in members], [matrices.shape for _, matrices in members], batch


def _apart(x_NIO: jax.Array, shapes: list[tuple[int, ...]]) -> list[jax.Array]:
    """The parts of a batch that `_batches` put together; their last two axes may have changed."""
    counts = [math.prod(shape[:-2]) for shape in shapes]
    parts = jnp.split(x_NIO, list(itertools.accumulate(counts[:-1])))
    return [
        part.reshape(*shape[:-2], *part.shape[1:])
        for part, shape in zip(parts, shapes, strict=True)
    ]
