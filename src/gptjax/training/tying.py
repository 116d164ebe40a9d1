"""Tied parameters: a copy that is the transpose of its source, for example an embedding of (V, C)
and a head of (C, V).

The copy is a separate parameter with separate moments, so that a later stage of the run can untie
copy and source. In a tied step, the source gets both gradients. The copy and its moments are
replaced by the transposed source and its transposed moments.

Pairs (source, copy) are paths of parameters, from `ModelConfig.tied_parameters`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from gptjax.optim.partition import flatten

Pairs = Sequence[tuple[str, str]]


def tie_gradients(grads: PyTree, pairs: Pairs) -> PyTree:
    """Add the transposed gradient of each copy to its source's gradient; zero the copy's
    gradient."""
    names, leaves, structure = flatten(grads)
    for source, copy in pairs:
        i, j = names.index(source), names.index(copy)
        leaves[i] = leaves[i] + leaves[j].T
        leaves[j] = jnp.zeros_like(leaves[j])
    return jax.tree.unflatten(structure, leaves)


def tie(tree: PyTree, pairs: Pairs) -> PyTree:
    """Replace each copy by its transposed source.

    Args:
        tree: parameters, or an optimizer's state: trees of moments at any depth have the paths of
            the parameters.

    Raises:
        ValueError: a copy has a moment that its source does not have.
    """
    names, leaves, structure = flatten(tree)
    at = {name: i for i, name in enumerate(names)}
    for source, copy in pairs:
        for i, name in enumerate(names):
            if name != copy and not name.endswith(f".{copy}"):
                continue
            if (of_source := name.removesuffix(copy) + source) not in at:
                raise ValueError(
                    f"expected one optimizer for the tied parameters {source} and {copy}: there is "
                    f"{name} and no {of_source}"
                )
            leaves[i] = leaves[at[of_source]].T
    return jax.tree.unflatten(structure, leaves)
