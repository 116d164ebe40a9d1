"""Which optimizer each parameter gets: rules on paths, said in a table, with nothing left to guess.

A path is that of the parameter's tree, such as "blocks.0.attn.c_attn.kernel". A rule names paths by
a regular expression that matches all of the path; every parameter is matched by exactly one rule,
or it is an error.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from gptjax.optim._ranges import check_range
from gptjax.optim.adamw import adam_with_decay, clip_or_identity
from gptjax.optim.normuon import Matrices, flatten, normuon
from gptjax.optim.polar_express import polar_express


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that are treated alike.

    Attributes:
        paths: regular expression.
        matrices: how each of them holds matrices, which NorMuon takes; None for those that AdamW
            takes.
        learning_rate: multiplies the learning rate of its optimizer.
        weight_decay: multiplies the weight decay of its optimizer.
        b1, b2: AdamW's; None for those of the others.
    """

    paths: str
    matrices: Matrices | None = None
    learning_rate: float = 1.0
    weight_decay: float = 1.0
    b1: float | None = None
    b2: float | None = None

    def __post_init__(self):
        where = f"Group({self.paths!r})"
        check_range(where, learning_rate=self.learning_rate, weight_decay=self.weight_decay)
        check_range(where, below=1, b1=self.b1, b2=self.b2)


class GroupError(ValueError):
    """A parameter that no rule names, or more than one."""


def assign(groups: Sequence[Group], paths: Sequence[str]) -> dict[str, Group]:
    """The group of each path.

    Raises:
        GroupError: a path is matched by no rule, or by several; or a rule matches nothing.
    """
    found = {path: [group for group in groups if re.fullmatch(group.paths, path)] for path in paths}
    wrong = [
        f"{path}: "
        + (
            "no rule"
            if not matching
            else "the rules " + " and ".join(repr(g.paths) for g in matching)
        )
        for path, matching in found.items()
        if len(matching) != 1
    ]
    wrong += [
        f"the rule {g.paths!r} matches nothing"
        for g in groups
        if not any(g in m for m in found.values())
    ]
    if wrong:
        raise GroupError(
            "every parameter is matched by exactly one rule, but not these:\n  "
            + "\n  ".join(wrong)
        )
    return {path: matching[0] for path, matching in found.items()}


def normuon_and_adamw(
    groups: Sequence[Group],
    *,
    matrix_learning_rate: optax.ScalarOrSchedule,
    learning_rate: optax.ScalarOrSchedule,
    matrix_weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay: float = 0.1,
    momentum: optax.ScalarOrSchedule = 0.95,
    neuron_b2: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    clip_norm: float | None = 1.0,
    every: int = 1,
    method=polar_express,
) -> optax.GradientTransformation:
    """NorMuon for the groups that hold matrices, AdamW for the others, after a clip by the global
    norm of all.

    Args:
        groups: rules, as in `assign`, which is called at `init`.
        matrix_learning_rate, matrix_weight_decay, momentum, neuron_b2, method: as `normuon` has
            them (neuron_b2 is its b2).
        learning_rate, weight_decay, b1, b2, eps, clip_norm: as `adamw` has them.
        every: AdamW's parameters move at every so many updates, by the sum of their clipped
            gradients.

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
    return matrices_and_adamw(
        groups,
        matrix,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        b1=b1,
        b2=b2,
        eps=eps,
        clip_norm=clip_norm,
        every=every,
    )


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
) -> optax.GradientTransformation:
    """The given transformation, its learning rate included, for the groups that hold matrices,
    AdamW for the others.

    Args and errors as of `normuon_and_adamw`.
    """
    groups = tuple(groups)
    check_range("normuon_and_adamw", at_least=1, every=every)

    def scaled(by):
        # AdamW counts its own updates; the schedule is of all.
        return (
            (lambda n: by * learning_rate(every * n + every - 1))
            if callable(learning_rate)
            else by * learning_rate
        )

    def adam(group):
        own = {
            "b1": b1 if group.b1 is None else group.b1,
            "b2": b2 if group.b2 is None else group.b2,
        }
        decay = weight_decay * group.weight_decay
        tx = adam_with_decay(scaled(group.learning_rate), eps=eps, weight_decay=decay, **own)
        if every == 1:
            return tx
        return optax.MultiSteps(tx, every, use_grad_mean=False).gradient_transformation()

    rest = {str(i): adam(group) for i, group in enumerate(groups) if group.matrices is None}

    def labels(params):
        found = assign(groups, paths_of(params))
        names = [
            "matrix" if g.matrices is not None else str(groups.index(g)) for g in found.values()
        ]
        return jax.tree.unflatten(jax.tree.structure(params), names)

    parts = optax.partition({"matrix": matrix, **rest}, labels)
    return optax.chain(clip_or_identity(clip_norm), parts)


def describe(groups: Sequence[Group], params) -> list[tuple[str, str, str, float, float]]:
    """A row for each kind of parameter: path (numbers as *, how many of them), shape, optimizer,
    factors of learning rate and decay.

    Args:
        params: arrays, or `jax.ShapeDtypeStruct`s.

    Raises:
        GroupError: as in `assign`.
    """
    found = assign(groups, paths := paths_of(params))
    kinds: dict[tuple, int] = {}
    for path, leaf in zip(paths, jax.tree.leaves(params), strict=True):
        key = (re.sub(r"(?<=\.)\d+(?=\.)", "*", path), leaf.shape, found[path])
        kinds[key] = kinds.get(key, 0) + 1
    rows = []
    for (path, shape, group), count in kinds.items():
        matrices = group.matrices
        kind = "adamw" if matrices is None else f"normuon{_in_words(matrices, path, shape)}"
        size = " × ".join(map(str, shape))
        rows.append(
            (
                path + (f" (of {count})" if count > 1 else ""),
                size,
                kind,
                group.learning_rate,
                group.weight_decay,
            )
        )
    return rows


def _in_words(matrices: Matrices, path: str, shape: tuple[int, ...]) -> str:
    """The number of matrices if there are several, and their size if the layout names the axes."""
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    unpacked = jax.eval_shape(lambda x: matrices.unpacked(x, path), leaf).shape
    count = math.prod(unpacked[:-2])
    words = f"{count} matri{'x' if count == 1 else 'ces'}"
    if matrices.inputs:
        return f", {words} of {unpacked[-2]} × {unpacked[-1]}"
    return f", {words}" if count > 1 else ""


@functools.cache
def group_of(groups: tuple[Group, ...], path: str) -> Group:
    """The group of one path, of those that `assign` has found to be in order."""
    return next(group for group in groups if re.fullmatch(group.paths, path))


def paths_of(params) -> list[str]:
    """The path of each leaf, without the `.value` of a Flax variable."""
    return flatten(params)[0]
