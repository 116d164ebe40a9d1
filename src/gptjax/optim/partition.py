"""Partition of a model's parameters into groups, by rules on their paths.

A path in the tree of parameters is a string such as "blocks.0.attn.c_attn.kernel". A rule is a
regular expression that matches the whole path. Each parameter must match exactly one rule.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import optax

from gptjax.optim.matrices import Matrices, flatten
from gptjax.ranges import check_range

Kind = Literal["embedding", "vector"]
KINDS: tuple[Kind, ...] = get_args(Kind)


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
        kind: "embedding" or "vector" selects the options of that name in an optimizer's config
            (embedding_b1, vector_b1, …); None selects none.
    """

    paths: str
    matrices: Matrices | None = None
    learning_rate: float = 1.0
    weight_decay: float = 1.0
    b1: float | None = None
    b2: float | None = None
    kind: Kind | None = None

    def __post_init__(self):
        where = f"Group({self.paths!r})"
        check_range(where, learning_rate=self.learning_rate, weight_decay=self.weight_decay)
        check_range(where, below=1, b1=self.b1, b2=self.b2)
        if self.kind not in (None, *KINDS):
            raise ValueError(f"{where}: unknown kind {self.kind!r}; choose one of {list(KINDS)}")


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


def describe(
    groups: Sequence[Group], params: optax.Params, optimizer: str
) -> list[tuple[str, str, str, Group]]:
    """Return a row for each kind of parameter.

    The columns are the path (with * for numbers) and the number of such parameters, the shape, the
    optimizer, and the group.

    Args:
        params: arrays, or `jax.ShapeDtypeStruct`s.
        optimizer: name of the matrix optimizer; other parameters use adamw.

    Raises:
        GroupError: as in `assign`.
    """
    assigned = assign(groups, paths := paths_of(params))
    kinds: dict[tuple, int] = {}
    for path, leaf in zip(paths, jax.tree.leaves(params), strict=True):
        key = (re.sub(r"(?<=\.)\d+(?=\.)", "*", path), leaf.shape, assigned[path])
        kinds[key] = kinds.get(key, 0) + 1
    rows = []
    for (path, shape, group), count in kinds.items():
        matrices = group.matrices
        kind = "adamw" if matrices is None else f"{optimizer}{_in_words(matrices, path, shape)}"
        size = " × ".join(map(str, shape))
        rows.append((path + (f" (of {count})" if count > 1 else ""), size, kind, group))
    return rows


def _in_words(matrices: Matrices, path: str, shape: tuple[int, ...]) -> str:
    """Describe the number of matrices if above 1, and the size if the layout names the axes."""
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    unpacked = jax.eval_shape(lambda x: matrices.unpacked(x, path), leaf).shape
    count = math.prod(unpacked[:-2])
    words = f"{count} matri{'x' if count == 1 else 'ces'}"
    if matrices.inputs:
        return f", {words} of {unpacked[-2]} × {unpacked[-1]}"
    return f", {words}" if count > 1 else ""


@functools.cache
def group_of(groups: tuple[Group, ...], path: str) -> Group:
    """Return the group of a path, for groups and paths that `assign` has checked."""
    return next(group for group in groups if re.fullmatch(group.paths, path))


def paths_of(params: optax.Params) -> list[str]:
    """Return the path of each leaf, without the `.value` of a Flax variable."""
    return flatten(params)[0]
