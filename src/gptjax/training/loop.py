"""The loop over micro-batches, with code motion that XLA does not do.

Casts and FP8 copies of the weights are computed before the loop, not for every micro-batch. A
gradient that is split into those of several parameters is summed before the split: the matmul then
adds to the sum in place.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxpr_as_fun
from jaxtyping import PyTree

from gptjax.training.liveness import bytes_of

_MOVES = frozenset("reshape slice squeeze split transpose".split())


def sum_over(f: Callable[..., Any], params: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
    """Return the sum of the first results of f(params, x) over x in xs, and the second results.

    What depends on `params` alone is computed before the loop, if it needs less memory than the
    parameters from which it is computed. Others, such as transposes and broadcasts, are not stored.

    Args:
        xs: each array has an axis of the loop in front, and the second results have this axis, too.
    """
    first = jax.tree.map(lambda x: x[0], xs)
    jaxpr, out = jax.make_jaxpr(f, return_shape=True)(params, first)
    leaves, ends = jax.tree.leaves(params), len(jax.tree.leaves(out[0]))
    own, arguments = jaxpr.invars[: len(leaves)], jaxpr.invars[len(leaves) :]
    sums, others = jaxpr.outvars[:ends], jaxpr.outvars[ends:]

    body, after, raw = _without_moves(jaxpr.eqns, sums, others)
    before, body, same = _without_invariants(body, own, [*raw, *others])
    stored = [*same]
    known = [*dict.fromkeys(same.values())]

    def evaluate(eqns, variables, outs, values):
        part = jaxpr.replace(invars=variables, outvars=outs, eqns=eqns)
        return jaxpr_as_fun(part)(*values)

    values = dict(zip(known, evaluate(before, own, known, leaves), strict=True))
    values = [*leaves, *(values[same[var]] for var in stored)]

    def add(total, x):
        variables = [*own, *stored, *arguments]
        results = evaluate(body, variables, [*raw, *others], [*values, *jax.tree.leaves(x)])
        return [a + b for a, b in zip(total, results, strict=False)], results[len(raw) :]

    zero = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in raw]
    total, rest = jax.lax.scan(add, zero, xs)
    results = [*evaluate(after, raw, sums, total), *rest]
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _without_moves(eqns: list, sums: list, others: list) -> tuple[list, list, list]:
    """Return the operations without the last ones, which only move numbers of the sums; the last
    ones; and the variables to sum in place of `sums`."""
    uses = collections.Counter(var for eqn in eqns for var in _variables(eqn.invars))
    uses.update(_variables(others))
    body, after, raw = [], [], dict.fromkeys(sums)
    for eqn in reversed(eqns):
        moves = eqn.primitive.name in _MOVES and raw.keys() >= {*eqn.outvars}
        if moves and not any(uses[var] for var in eqn.outvars):
            after.append(eqn)
            uses[eqn.invars[0]] -= 1
            raw = {var: None for var in [*raw, eqn.invars[0]] if var not in eqn.outvars}
        else:
            body.append(eqn)
    return body[::-1], after[::-1], [*raw]


def _without_invariants(eqns: list, own: list, outs: list) -> tuple[list, list, dict]:
    """Return the operations that depend on the parameters `own` alone; the others, and those whose
    results are not stored; and the stored results: each with the first equal one."""
    sources = {var: frozenset([var]) for var in own}
    # Equal operations of both passes, such as the cast of a weight, are computed once.
    first, same = {}, {}
    early, late = [], []
    for eqn in eqns:
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

    needed = {*_variables(outs), *(var for eqn in late for var in _variables(eqn.invars))}
    stored, again = {}, []
    for eqn in reversed(early):
        used = [var for var in eqn.outvars if var in needed]
        if all(map(is_smaller, used)):
            stored |= {var: same[var] for var in used}
        else:
            again.append(eqn)
            needed.update(_variables(eqn.invars))
    needed, before = {*stored.values()}, []
    for eqn in reversed(early):
        if not needed.isdisjoint(eqn.outvars):
            before.append(eqn)
            needed.update(_variables(eqn.invars))
    return before[::-1], again[::-1] + late, stored


def _variables(atoms: list[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
