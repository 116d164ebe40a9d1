"""Memory of a traced function on a GPU, from shapes: the largest sum of arrays alive at a time.

The model of XLA's compiler: a matmul, a kernel, a loop or a collective reads and writes arrays in
memory. Elementwise operations are fused into these, unless one of these reads the result. Equal
elementwise operations are computed once, and a matmul adds in place. The order of the operations is
the one of three that needs the least memory: in TF32 it computes the weights' gradients last, and
keeps the transposed copies for them.
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

    def reads(self, used: set[_Array]) -> list[_Array]:
        """Return the operands of the used results."""
        if self.name != "alias":
            return self.operands
        pairs = zip(self.operands, self.results, strict=True)
        return [x for x, result in pairs if result in used]


@dataclasses.dataclass(eq=False)
class _Launch:
    operation: _Operation
    read: dict[_Array, None]
    """Arrays in memory, an ordered set."""
    after: dict[_Array, None]
    """Arrays computed earlier: those read, and those of a barrier."""
    reusable: set[_Array]
    """Arrays whose memory a result can have, if the operation is their last reader."""


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
            if params.get("differentiated") and params["prevent_cse"]:
                operands = self._alias(operands)  # a barrier: recompute in the backward pass
            return self.inline(inner, operands)
        if name in _ALIASES:
            return self._alias(operands)
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

    def _alias(self, operands: list[_Array]) -> list[_Array]:
        results = [_Array(x.bytes, x.platform) for x in operands]
        self._operations.append(_Operation("alias", operands, results))
        return results

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
        written to arguments. As XLA does, select the best of three orders of the launches."""
        launches, memory = self._launches(arguments, results)
        outputs = [y for x in results for y in memory.get(x, ())]
        kept = arguments | {*outputs}
        return min(_most(order, kept) for order in _orders(launches, outputs, kept))

    def _launches(self, arguments, results):
        """Return the operations that write to memory, and the arrays in memory from which each
        array is computed."""
        used, live = {*results}, []
        for operation in reversed(self._operations):
            if not used.isdisjoint(operation.results):
                live.append(operation)
                used.update(operation.reads(used))
        needed, by_matmul = {*results}, set()
        for operation in live:
            if operation.name == "alias" or operation.name not in _FUSED:
                needed.update(operation.reads(needed))
        readers = collections.Counter(x for operation in live for x in {*operation.operands})
        memory: dict[_Array, dict[_Array, None]] = {x: {x: None} for x in arguments}
        waits: dict[_Array, dict[_Array, None]] = {}  # for arrays, because of barriers
        launches = []
        for operation in reversed(live):
            read = {y: None for x in operation.operands for y in memory.get(x, ())}
            wait = {y: None for x in operation.operands for y in waits.get(x, ())}
            if operation.name == "alias":
                barrier = len(operation.operands) > 1  # every result waits for all operands
                for x, y in zip(operation.operands, operation.results, strict=True):
                    memory[y], waits[y] = memory.get(x, {}), read | wait if barrier else wait
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
                costly = len(read) > 1 and traffic * times > traffic + own * times
                if not (adds or costly or not needed.isdisjoint(operation.results)):
                    memory |= dict.fromkeys(operation.results, read)
                    waits |= dict.fromkeys(operation.results, wait)
                    continue
            reusable = {
                x
                for k, j in operation.aliases.items()
                for x in memory.get(operation.operands[k], ())
                if x.bytes == operation.results[j].bytes
            }
            if operation.name in _FUSED:
                reusable = {*read}
            memory |= {x: {x: None} for x in operation.results}
            launches.append(_Launch(operation, read, read | wait, reusable))
        return launches, memory


def _orders(launches: list[_Launch], outputs: list[_Array], kept: set[_Array]):
    """Yield the launches in the orders of XLA's memory schedulers."""
    producer = {x: launch for launch in launches for x in launch.operation.results}

    def producers(arrays):
        return [*dict.fromkeys(producer[x] for x in arrays if x in producer)]

    before = {launch: producers(launch.after) for launch in launches}

    def depth_first(key):
        done, stack = {}, sorted(producers(outputs), key=key)[::-1]
        while stack:
            missing = [x for x in before[stack[-1]] if x not in done]
            stack += sorted(missing, key=key)[::-1]
            if not missing:
                done[stack.pop()] = None
        return [*done]

    as_written = depth_first(lambda _: 0)
    yield as_written
    # Operands with the most bytes first. XLA limits the sum, which counts an array once for each
    # path from it.
    size, so_far = {}, 0
    for launch in as_written:
        own = sum(x.bytes for x in launch.operation.results)
        so_far += own
        size[launch] = min(own + sum(size[x] for x in before[launch]), so_far)
    yield depth_first(lambda x: -size[x])
    yield _greedy(launches, before, kept)


def _greedy(launches, before, kept):
    """Return the launches, of those possible always the one that frees the most bytes."""
    readers = collections.Counter(x for launch in launches for x in launch.read)
    missing = {launch: len(before[launch]) for launch in launches}
    after, number = collections.defaultdict(list), {x: i for i, x in enumerate(launches)}
    for launch in launches:
        for x in before[launch]:
            after[x].append(launch)

    def grows(launch):
        own = sum(x.bytes for x in launch.operation.results if x not in kept)
        free = sum(x.bytes for x in launch.read if x not in kept and readers[x] == 1)
        return own - free, number[launch]

    possible, done = {launch for launch in launches if not missing[launch]}, []
    while possible:
        launch = min(possible, key=grows)
        possible.remove(launch)
        done.append(launch)
        readers.subtract(launch.read.keys())
        for x in after[launch]:
            missing[x] -= 1
            if not missing[x]:
                possible.add(x)
    return done


def _most(launches, kept):
    """Return the largest number of bytes alive at a time, without the kept arrays."""
    last = {x: i for i, y in enumerate(launches) for x in (*y.operation.results, *y.read)}
    ends = collections.defaultdict(set)
    for x, i in last.items():
        if x not in kept:
            ends[i].add(x)
    now = most = 0
    for i, launch in enumerate(launches):
        early = ends[i] & launch.reusable
        now -= sum(x.bytes for x in early)
        now += sum(x.bytes for x in launch.operation.results if x not in kept)
        most = max(most, now + launch.operation.temporary)
        now -= sum(x.bytes for x in ends[i] - early)
    return most
