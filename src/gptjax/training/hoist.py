"""Loop-invariant code motion for the loop over micro-batches.

XLA leaves the casts and the FP8 copies of the weights in the body of the loop, where every
micro-batch repeats them.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Literal, jaxpr_as_fun
from jaxtyping import PyTree

from gptjax.training.liveness import bytes_of


def hoisted(f: Callable[..., Any], params: PyTree, x: PyTree) -> Callable[[PyTree], Any]:
    """Return the function x → f(params, x), with what depends on `params` alone computed here.

    Results are stored that need less memory than the parameters from which they are computed. The
    function computes other results, such as transposes and broadcasts, at each call.

    Args:
        x: an argument, for its structure, shapes and dtypes.
    """
    jaxpr, out = jax.make_jaxpr(f, return_shape=True)(params, x)
    leaves = jax.tree.leaves(params)
    own, others = jaxpr.invars[: len(leaves)], jaxpr.invars[len(leaves) :]
    # Each variable that depends on parameters alone: these parameters.
    sources = {var: frozenset([var]) for var in own}
    # Equal operations of both passes, such as the cast of a weight, are computed once.
    first, same = {}, {}
    early, late = [], []
    for eqn in jaxpr.eqns:
        read = _variables(eqn.invars)
        if not read or eqn.effects or not sources.keys() >= {*read}:
            late.append(eqn)
            continue
        early.append(eqn)
        sources |= dict.fromkeys(eqn.outvars, frozenset().union(*(sources[var] for var in read)))
        ids = tuple(str(v) if isinstance(v, Literal) else same.get(v, v) for v in eqn.invars)
        equal = first.setdefault((eqn.primitive, ids, str(eqn.params)), eqn)
        same |= zip(eqn.outvars, equal.outvars, strict=True)

    def is_smaller(var):
        return bytes_of(var.aval) < sum(bytes_of(param.aval) for param in sources[var])

    needed = {*_variables(jaxpr.outvars), *(v for eqn in late for v in _variables(eqn.invars))}
    stored = []
    for eqn in reversed(early):
        used = [var for var in eqn.outvars if var in needed]
        if all(map(is_smaller, used)):
            stored += used
        else:
            late.insert(0, eqn)
            needed.update(_variables(eqn.invars))
    results = [*dict.fromkeys(same[var] for var in stored)]
    needed, before = {*results}, []
    for eqn in reversed(early):
        if not needed.isdisjoint(eqn.outvars):
            before.insert(0, eqn)
            needed.update(_variables(eqn.invars))

    before = jaxpr.replace(constvars=[], invars=own, outvars=results, eqns=before)
    values = dict(zip(results, jaxpr_as_fun(before)(*leaves), strict=True))
    rest = jaxpr_as_fun(jaxpr.replace(invars=[*own, *stored, *others], eqns=late))
    known = [*leaves, *(values[same[var]] for var in stored)]

    def call(x: PyTree) -> Any:
        results = rest(*known, *jax.tree.leaves(x))
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return call


def _variables(atoms: list[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
