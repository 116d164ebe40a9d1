"""Where in the model each instruction of a compiled executable comes from.

The text of an executable gives each instruction an `op_name`: the `jax.named_scope`s of the source
(the model's own file names its parts) and the transformations around them, such as
`jit(train_step)/transpose(jvp(attention))/dot_general`. A fusion belongs to the part of its last
instruction that has a scope.
"""

import collections
import re
from typing import NamedTuple

# Scope in the source → name in the table, in the table's order.
PARTS = {
    "embedding": "embedding",
    "norm": "norm, residual",
    "attention": "attention",
    "mlp": "MLP",
    "head": "head, loss",
}
# Without a scope: outside the differentiated function, moves and casts only, and the rest.
OPTIMIZER, COPIES, OTHER = "optimizer, clip", "copies, casts", "other"
# Between devices, whatever the scope.
COMMUNICATION = "communication"
ORDER = (*PARTS.values(), OPTIMIZER, COPIES, COMMUNICATION, OTHER)
PASSES = ("forward", "recomputed", "backward", "update")


class Place(NamedTuple):
    """Where an instruction comes from."""

    part: str
    """One of `ORDER`."""
    pass_: str
    """One of `PASSES`."""
    op: str
    """Operation in the source, the last component of the op_name; without one the HLO opcode."""
    encloses: bool = False
    """Whether the instruction only runs other instructions, which the trace lists separately."""


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")
# Bodies of reductions, arguments and results have names that are not paths from the root.
_OP_NAME = re.compile(r'op_name="(jit\((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(r"(?:calls|to_apply)=\{?%?([\w.\-]+)")
# A fusion of these alone computes nothing. A broadcast alone fills memory with one value.
_MOVING = {
    *("parameter", "constant", "bitcast", "bitcast-convert", "copy", "copy-start", "copy-done"),
    *("transpose", "reshape", "convert", "slice", "dynamic-slice", "dynamic-update-slice"),
    *("concatenate", "pad", "broadcast", "tuple", "get-tuple-element"),
}


def places(text: str) -> dict[str, Place]:
    """Return the place of every instruction of an executable, by the instruction's name.

    Args:
        text: `compiled.as_text()`.
    """
    bodies: dict[str, dict[str, str]] = collections.defaultdict(dict)
    body: dict[str, str] = {}
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            body = bodies[match[1]]
        elif match := _INSTRUCTION.match(line):
            body[match[1]] = match[2]
    differentiated = "jvp(" in text
    return {
        name: _place(definition, bodies, differentiated)
        for body in bodies.values()
        for name, definition in body.items()
    }


def source(op_name: str, differentiated: bool = False) -> Place:
    """Return the place that an op_name names.

    Args:
        differentiated: whether what is outside of the differentiated function is the optimizer's.
    """
    path = op_name.split(";")[0]
    scopes = [word for word in re.split(r"[/(),]", path) if word in PARTS]
    pass_ = "backward" if "transpose(" in path else "forward"
    if "rematted_computation" in path:
        pass_ = "recomputed"
    part = PARTS[scopes[-1]] if scopes else OTHER
    if not scopes and differentiated and "jvp(" not in path:
        part, pass_ = OPTIMIZER, "update"
    return Place(part, pass_, path.split("/")[-1])


def _place(definition: str, bodies: dict, differentiated: bool) -> Place:
    opcode, inside = _opcode(definition), []
    if opcode in ("fusion", "call", "async-start"):
        for called in _CALLED.findall(definition):
            inside += bodies.get(called, {}).values()
    texts = [definition, *reversed(inside)]
    names = [match[1] for text in texts if (match := _OP_NAME.search(text))]
    found = [source(name, differentiated) for name in names]
    first = found[0] if found else Place(OTHER, "forward", opcode)
    part, pass_, _, _ = next((place for place in found if place.part != OTHER), first)
    opcodes = {_opcode(text) for text in texts} - {"fusion", "call"}
    if opcodes and opcodes <= _MOVING:
        part = COPIES
    return Place(part, pass_, first.op, encloses=opcode in ("while", "call", "conditional"))


def _opcode(definition: str) -> str:
    match = _OPCODE.search(definition)
    return match[1] if match else ""
