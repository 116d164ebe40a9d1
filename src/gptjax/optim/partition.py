"""Partition of a model's parameters into groups, by rules on their paths, and the layout of the
matrices in a parameter.

A path in the tree of parameters is a string such as "blocks.0.attn.c_attn.kernel". A rule is a
regular expression that matches the whole path. Each parameter must match exactly one rule.

A parameter of two axes holds one matrix of shape (inputs, outputs), like Flax's `kernel`, or
several matrices concatenated along the outputs. With more axes, `Matrices` must name the axes of
inputs and of outputs.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Layout of the matrices in a parameter.

    Attributes:
        packed: number of matrices concatenated along the outputs (3 for q|k|v).
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
        ValueError: packed below 1; only one of inputs and outputs; an axis named twice.
    """

    packed: int = 1
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    def __post_init__(self):
        for name in ("inputs", "outputs"):  # hashable, also if given as lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        named = (*self.inputs, *self.outputs)
        if self.packed < 1:
            raise ValueError(f"Matrices: packed must be at least 1, got {self.packed}")
        if bool(self.inputs) != bool(self.outputs) or len(set(named)) != len(named):
            raise ValueError(
                "Matrices: expected inputs and outputs to name different axes, such as "
                "inputs=(0,), outputs=(1, 2), "
                f"got inputs={self.inputs}, outputs={self.outputs}"
            )

    def shape(self, shape: tuple[int, ...], path: str = "") -> tuple[int, ...]:
        """Return the shape (…, packed, I, O) of the matrices in a parameter of this shape.

        Raises:
            ValueError: the shape has fewer than two axes; it has more axes and the layout does not
                name them; an axis is out of range; the number of outputs is not a multiple of
                `packed`.
        """
        batch, inputs, outputs = self._axes(shape, path)
        n_in, n_out = (math.prod(shape[axis] for axis in axes) for axes in (inputs, outputs))
        if n_out % self.packed:
            raise ValueError(
                f"{path or 'a parameter'} of shape {shape} does not hold {self.packed} matrices "
                f"side by side: {n_out} outputs are not a multiple of {self.packed}; assign "
                "the parameter to another optimizer"
            )
        return (*(shape[axis] for axis in batch), self.packed, n_in, n_out // self.packed)

    def unpacked(self, x: jax.Array, path: str = "") -> jax.Array:
        """Return the matrices, an array of `shape(x.shape)`."""
        *lead, packed, n_in, n_out = self.shape(x.shape, path)
        x = jnp.transpose(x, sum(self._axes(x.shape), ()))
        return jnp.moveaxis(x.reshape(*lead, n_in, packed, n_out), -2, -3)

    def together(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the parameter of this shape from its matrices: the inverse of `unpacked`."""
        order = sum(self._axes(shape), ())
        x = jnp.moveaxis(x, -3, -2).reshape(tuple(shape[axis] for axis in order))
        return jnp.transpose(x, tuple(order.index(axis) for axis in range(len(shape))))

    def row_sums(self, x: jax.Array, path: str = "") -> jax.Array:
        """Return the sum of each row, the weights of one output: a parameter with axes of one
        input."""
        return x.sum(self._axes(x.shape, path)[1], keepdims=True)

    def matrix_sums(self, rows: jax.Array) -> jax.Array:
        """Return the sum of each matrix, at each of its rows, from `row_sums`."""
        x = self.unpacked(rows)
        sums = jnp.broadcast_to(x.sum((-2, -1), keepdims=True), x.shape)
        return self.together(sums, rows.shape)

    def _axes(self, shape: tuple[int, ...], path: str = "") -> tuple[tuple[int, ...], ...]:
        """Return a parameter's remaining axes, its axes of inputs, and its axes of outputs."""
        n, name = len(shape), path or "a parameter"
        if n < 2:
            raise ValueError(
                f"{name} of shape {shape} does not hold a matrix; assign the parameter to another "
                "optimizer, such as normuon(…, rest=optax.adamw(…))"
            )
        if not self.inputs:
            if n > 2:
                raise ValueError(
                    f"{name} of shape {shape} is ambiguous: NorMuon must know which of its {n} "
                    "axes are inputs and which are outputs. Name the axes, such as "
                    "Matrices(inputs=(0,), outputs=(1, 2)) for one matrix, or "
                    "Matrices(inputs=(1,), outputs=(2,)) for matrices stacked along axis 0"
                )
            return (), (0,), (1,)
        named = tuple(axis + n if axis < 0 else axis for axis in (*self.inputs, *self.outputs))
        if not set(named) <= set(range(n)) or len(set(named)) != len(named):
            raise ValueError(
                f"{name} of shape {shape}: inputs={self.inputs} and outputs={self.outputs} do not "
                "name different axes of it"
            )
        batch, k = tuple(axis for axis in range(n) if axis not in named), len(self.inputs)
        return batch, named[:k], named[k:]


Layout = Callable[[str], Matrices]


def one_matrix(path: str) -> Matrices:
    """Return the layout of a parameter that is one Flax kernel of two axes."""
    return Matrices()


def flatten(tree) -> tuple[list[str], list, jax.tree_util.PyTreeDef]:
    """Return the leaves' paths, such as "blocks.0.attn.c_attn.kernel", the leaves, the structure.

    The last key of a leaf inside a Flax variable, `.value`, is left out. `nnx.Optimizer` calls
    `init` with variables and `update` with their arrays, and both must have the same path.
    """
    with_paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    value = jax.tree_util.GetAttrKey("value")
    paths = [path[:-1] if path[-1:] == (value,) else path for path, _ in with_paths]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    return names, [leaf for _, leaf in with_paths], structure


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters with the same optimizer and the same options.

    Attributes:
        paths: regular expression.
        matrices: layout of the matrices in each parameter, for the matrix optimizer (NorMuon,
            Muon); None for AdamW.
        learning_rate: multiplies the learning rate of the group's optimizer.
        weight_decay: multiplies the weight decay of the group's optimizer.
        b1, b2: decay rates of AdamW's moments; None: the values of the optimizer's config.
    """

    paths: str
    matrices: Matrices | None = None
    learning_rate: float = 1.0
    weight_decay: float = 1.0
    b1: float | None = None
    b2: float | None = None


class GroupError(ValueError):
    """A parameter that matches no rule or several, or a rule that matches no parameter."""


def assign(groups: Sequence[Group], paths: Sequence[str]) -> dict[str, Group]:
    """Return the group of each path.

    Raises:
        GroupError: a path matches no rule or several, or a rule matches no path.
    """
    matches = {
        path: [group for group in groups if re.fullmatch(group.paths, path)] for path in paths
    }
    wrong = []
    for path, matching in matches.items():
        if len(matching) != 1:
            rules = " and ".join(repr(group.paths) for group in matching)
            wrong.append(f"{path}: {f'the rules {rules}' if rules else 'no rule'}")
    wrong += [
        f"the rule {g.paths!r} matches nothing"
        for g in groups
        if not any(g in m for m in matches.values())
    ]
    if wrong:
        raise GroupError(
            "expected each parameter to match exactly one rule, found:\n  " + "\n  ".join(wrong)
        )
    return {path: matching[0] for path, matching in matches.items()}


@functools.cache
def group_of(groups: tuple[Group, ...], path: str) -> Group:
    """Return the group of a path, for groups and paths that `assign` has checked."""
    return next(group for group in groups if re.fullmatch(group.paths, path))
