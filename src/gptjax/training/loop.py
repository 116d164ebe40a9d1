"""The loop over micro-batches, with code motion that XLA does not do.

Casts and FP8 copies of the weights are computed before the loop, not for every micro-batch. A
gradient that is split into those of several parameters is summed before the split: the matmul then
adds to the sum in place.
"""

import collections
from collections.abc import Callable, Container, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var, jaxpr_as_fun
from jaxtyping import PyTree

from gptjax.training.liveness import bytes_of

_MOVES = frozenset("reshape slice squeeze split transpose".split())
_REPEATED = _MOVES | {"concatenate", "convert_element_type", "stack"}


def sum_over(f: Callable[..., Any], params: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
    """Return the sum of the first results of f(params, x) over x in xs, and the second results.

    Arrays that depend on `params` alone are computed before the loop, if they need less memory than
    the parameters from which they are computed. Others, such as transposes and broadcasts, are not
    stored.

    Args:
        xs: each array has an axis of the loop in front, and the second results have this axis, too.
    """
    leaves, length = jax.tree.leaves(params), len(jax.tree.leaves(xs)[0])
    x = jax.tree.map(lambda x: x[0], xs)
    jaxpr, out = jax.make_jaxpr(f, return_shape=True)(params, x)
    own, arguments = jaxpr.invars[: len(leaves)], jaxpr.invars[len(leaves) :]
    ends = len(jax.tree.leaves(out[0]))
    sums, others = jaxpr.outvars[:ends], jaxpr.outvars[ends:]

    eqns, after, raw = _without_moves(jaxpr.eqns, sums, others)
    first = _smaller_than_parameters(eqns, own)
    body = _needed(eqns, [*raw, *others], first)
    read = [*raw, *others, *(var for eqn in body for var in eqn.invars)]
    stored = [var for var in dict.fromkeys(_variables(read)) if var in first]
    known = [*dict.fromkeys(first[var] for var in stored)]
    before = _needed([eqn for eqn in eqns if not eqn.effects], known)

    def evaluate(eqns, variables, outs, values):
        part = jaxpr.replace(invars=variables, outvars=outs, eqns=eqns)
        return jaxpr_as_fun(part)(*values)

    values = dict(zip(known, evaluate(before, own, known, leaves), strict=True))
    values = [*leaves, *(values[first[var]] for var in stored)]

    def add(total, x):
        variables = [*own, *stored, *arguments]
        results = evaluate(body, variables, [*raw, *others], [*values, *jax.tree.leaves(x)])
        return [a + b for a, b in zip(total, results, strict=False)], results[len(raw) :]

    zero = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in raw]
    total, rest = jax.lax.scan(add, zero, xs)
    totals = zip(sums, evaluate(after, raw, sums, total), strict=True)
    totals = [length * x if isinstance(var, Literal) else x for var, x in totals]
    return jax.tree.unflatten(jax.tree.structure(out), [*totals, *rest])


def _without_moves(eqns: list, sums: list, others: list) -> tuple[list, list, list]:
    """Return the operations without the last ones, which only move numbers of the sums; the last
    ones; and the variables to sum in place of `sums`."""
    uses = collections.Counter(var for eqn in eqns for var in _variables(eqn.invars))
    uses.update(_variables(others))
    body, after, raw = [], [], dict.fromkeys(_variables(sums))
    for eqn in reversed(eqns):
        moves = eqn.primitive.name in _MOVES and raw.keys() >= {*eqn.outvars}
        if moves and _variables(eqn.invars) and not any(uses[var] for var in eqn.outvars):
            after.append(eqn)
            uses[eqn.invars[0]] -= 1
            raw = {var: None for var in [*raw, eqn.invars[0]] if var not in eqn.outvars}
        else:
            body.append(eqn)
    return body[::-1], after[::-1], [*raw]


def _smaller_than_parameters(eqns: list[JaxprEqn], own: list[Var]) -> dict[Var, Var]:
    """Return the variables that depend on the parameters `own` alone and need less memory, each
    with the first equal variable."""
    sources, first, results = {var: frozenset([var]) for var in own}, {}, {}
    for eqn in eqns:
        read = _variables(eqn.invars)
        if not read or eqn.effects or not sources.keys() >= {*read}:
            continue
        sources |= dict.fromkeys(eqn.outvars, frozenset().union(*(sources[var] for var in read)))
        equal = eqn.outvars
        # Both passes cast a weight. Not `jit`: its text does not show constants.
        if eqn.primitive.name in _REPEATED and len(read) == len(eqn.invars):
            key = eqn.primitive, *(first.get(var, var) for var in read), *eqn.params.items()
            equal = results.setdefault(key, equal)
        first |= zip(eqn.outvars, equal, strict=True)

    def is_smaller(var):
        return bytes_of(var.aval) < sum(bytes_of(param.aval) for param in sources[var])

    return {var: equal for var, equal in first.items() if is_smaller(var)}


def _needed(eqns: list, outs: list, known: Container[Var] = ()) -> list[JaxprEqn]:
    """Return the operations that compute `outs` from `known` variables, and those with effects."""
    needed, found = {*_variables(outs)}, []
    for eqn in reversed(eqns):
        if eqn.effects or any(var in needed and var not in known for var in eqn.outvars):
            found.append(eqn)
            needed.update(_variables(eqn.invars))
    return found[::-1]


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
