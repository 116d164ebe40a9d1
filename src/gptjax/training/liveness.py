"""Memory of a traced function on a GPU, from shapes: the largest sum of arrays alive at a time.

The model of XLA's compiler: equations run in order. A matmul, a kernel, a loop or a collective
reads and writes arrays in memory. Elementwise operations are fused into these, unless one of these
reads the result. Equal elementwise operations are computed once, and a matmul adds in place.
"""

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

_ALIASES = frozenset(
    "reshape squeeze expand_dims name optimization_barrier bitcast_convert_type copy".split()
)
_FUSED = frozenset(
    "add sub mul div rem neg sign abs max min exp exp2 log log2 log1p expm1 tanh logistic sin cos "
    "sqrt rsqrt cbrt square pow integer_pow erf select_n convert_element_type broadcast_in_dim "
    "iota lt le gt ge eq ne and or not xor is_finite add_any clamp transpose slice rev pad "
    "concatenate round floor ceil reduce_precision stack split dynamic_slice gather "
    "axis_index reduce_sum reduce_max reduce_min reduce_and reduce_or".split()
)
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")


@dataclasses.dataclass(eq=False)
class _Array:
    bytes: int
    platform: int | None = None
    """Index of the branch for a GPU."""


@dataclasses.dataclass
class _Operation:
    name: str
    operands: list[_Array]
    results: list[_Array]
    temporary: int = 0
    aliases: dict[int, int] = dataclasses.field(default_factory=dict)


def bytes_of(x: Any) -> int:
    """Return the bytes of an array or its shape; 0 for anything else."""
    return math.prod(x.shape) * x.dtype.itemsize if hasattr(x, "dtype") else 0


def peak(closed: ClosedJaxpr, size: Callable[[Any], int] = bytes_of) -> int:
    """Return the bytes on one device of a step whose arguments are donated.

    Args:
        closed: from `jax.make_jaxpr`.
        size: bytes on a device of an array outside of `shard_map`.
    """
    program = _Program(size)
    arguments = [_Array(size(var.aval)) for var in closed.jaxpr.invars]
    results = program.inline(closed, arguments)
    # XLA does not reuse an argument's memory, except for a result.
    return sum(x.bytes for x in arguments) + program.temporaries(set(arguments), results)


class _Program:
    """Operations of a jaxpr, calls inlined."""

    def __init__(self, size: Callable[[Any], int]):
        self._size, self._operations, self._computed = size, [], {}

    def inline(self, closed: Any, arguments: list[_Array]) -> list[_Array]:
        jaxpr = getattr(closed, "jaxpr", closed)
        known = {var: _Array(self._size(var.aval)) for var in jaxpr.constvars}
        known |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(var):
            return _Array(0) if isinstance(var, Literal) else known[var]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(var) for var in eqn.invars])
            known |= dict(zip(eqn.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[_Array]) -> list[_Array]:
        name, params = eqn.primitive.name, eqn.params
        if name == "shard_map":
            outside, self._size = self._size, bytes_of
            results = self.inline(params["jaxpr"], operands)
            self._size = outside
            return results
        if name == "cond":
            # Besides choices by platform, the one branch of a step is in the head's gradient: XLA
            # proves that all cotangents are equal, and removes the branch with a matmul.
            platform, branches = operands[0].platform, params["branches"]
            smallest = min(branches, key=lambda branch: len(str(branch)))
            chosen = smallest if platform is None else branches[platform]
            return self.inline(chosen, operands[1:])
        if name == "platform_index":
            names = params["platforms"]
            return [_Array(0, next(i for i, x in enumerate(names) if x is None or "cuda" in x))]
        inner = next((params[key] for key in _CALLS if key in params), None)
        if name in ("scan", "while"):
            return self._add(eqn, operands, self._of_loop(inner or params["body_jaxpr"]))
        if inner is not None and name not in ("pallas_call", "mpmd_map", "run_state"):
            return self.inline(inner, operands)
        if name in _ALIASES:
            results = [_Array(x.bytes) for x in operands]
            for x, y in zip(operands, results, strict=True):
                self._operations.append(_Operation("alias", [x], [y]))
            return results
        if name not in _FUSED:
            return self._add(eqn, operands)
        ids = tuple(
            str(var) if isinstance(var, Literal) else id(x)
            for var, x in zip(eqn.invars, operands, strict=True)
        )
        key = name, ids, str(params)
        if key not in self._computed:
            # The operands are kept, so that no other array gets their ids.
            self._computed[key] = self._add(eqn, operands), operands
        return self._computed[key][0]

    def _add(self, eqn: Any, operands: list[_Array], temporary: int = 0) -> list[_Array]:
        results = [_Array(self._size(var.aval)) for var in eqn.outvars]
        aliases = dict(eqn.params.get("input_output_aliases") or ())
        operation = _Operation(eqn.primitive.name, operands, results, temporary, aliases)
        self._operations.append(operation)
        return results

    def _of_loop(self, body: Any) -> int:
        program = _Program(self._size)
        arguments = [_Array(0) for _ in body.jaxpr.invars]
        results = program.inline(body, arguments)
        return program.temporaries(set(arguments), results)

    def temporaries(self, arguments: set[_Array], results: list[_Array]) -> int:
        """Return the largest number of bytes alive, without arguments and results: results are
        written to arguments."""
        launches, memory = self._launches(arguments, results)
        outputs = {x for result in results for x in memory.get(result, ())}
        last = {
            x: i
            for i, (operation, read) in enumerate(launches)
            for x in (*operation.results, *read)
        }
        now = most = 0
        ends = collections.defaultdict(set)
        for x, i in last.items():
            if x not in arguments and x not in outputs:
                ends[i].add(x)
        for i, (operation, _) in enumerate(launches):
            dead = ends[i] - {*operation.results}
            given = {
                x
                for k, j in operation.aliases.items()
                for x in memory.get(operation.operands[k], ())
                if x.bytes == operation.results[j].bytes
            }
            early = dead if operation.name in _FUSED else dead & given
            now -= sum(x.bytes for x in early)
            now += sum(x.bytes for x in operation.results if x not in outputs)
            most = max(most, now + operation.temporary)
            now -= sum(x.bytes for x in ends[i] - early)
        return most

    def _launches(self, arguments, results):
        """Return the operations that write to memory with the arrays that each reads, and the
        arrays in memory from which each array is computed."""
        used, live = {*results}, []
        for operation in reversed(self._operations):
            if not used.isdisjoint(operation.results):
                live.append(operation)
                used.update(operation.operands)
        needed, by_matmul = {*results}, set()
        for operation in live:
            if operation.name == "alias":
                needed.update(operation.operands if operation.results[0] in needed else ())
            elif operation.name not in _FUSED:
                needed.update(operation.operands)
        readers = collections.Counter(x for operation in live for x in {*operation.operands})
        memory: dict[_Array, set[_Array]] = {x: {x} for x in arguments}
        launches = []
        for operation in reversed(live):
            read = {y for x in operation.operands for y in memory.get(x, ())}
            if operation.name == "alias":
                memory[operation.results[0]] = read
                continue
            if operation.name == "dot_general":
                by_matmul.update(operation.results)
            if operation.name in _FUSED and not operation.name.startswith("reduce_"):
                own = sum(x.bytes for x in operation.results)
                times = max(readers[x] for x in operation.results)
                traffic = sum(x.bytes for x in read)
                adds = operation.name.startswith("add") and any(
                    x in by_matmul and readers[x] == 1 for x in operation.operands
                )
                # A second read of the operands may cost more than the result's memory.
                costly = len(read) > 1 and traffic * times > traffic + own * (1 + times)
                if not (adds or costly or not needed.isdisjoint(operation.results)):
                    memory |= dict.fromkeys(operation.results, read)
                    continue
            memory |= {x: {x} for x in operation.results}
            launches.append((operation, read))
        return launches, memory
