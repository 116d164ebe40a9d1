"""Where in the model each instruction of a compiled executable comes from.

The text of an executable gives each instruction an `op_name`: the `jax.named_scope`s of the source
(the model's own file names its parts) and the transformations around them, such as
`jit(train_step)/transpose(jvp(attention))/dot_general`. A fusion without an op_name belongs to the
part of most of its instructions.
"""

import collections
import dataclasses
import re

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


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an instruction comes from."""

    part: str
    """One of `ORDER`."""
    pass_: str
    """One of `PASSES`."""
    op: str
    """Operation in the source, the last component of the op_name; without an op_name the HLO
    opcode."""
    matmul: bool
    """Whether the instruction is a matmul or contains one."""
    encloses: bool = False
    """Whether the instruction only runs other instructions, which the trace lists separately."""


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(r"(?:calls|to_apply)=\{?%?([\w.\-]+)")
_MATMUL_TARGETS = ("__cublas", "__triton_gemm", "__triton_nested_gemm")
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
    bodies: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    body = None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            body = bodies[match[1]]
        elif body is not None and (match := _INSTRUCTION.match(line)):
            body.append((match[1], match[2]))
    differentiated = "jvp(" in text
    return {
        name: _place(definition, bodies, differentiated)
        for body in bodies.values()
        for name, definition in body
    }


def place_of_op_name(op_name: str) -> Place:
    """Return the place of a kernel whose instruction is not in the executable's text."""
    part, pass_ = _source(op_name, differentiated=False)
    return Place(part, pass_, op_name.split("/")[-1], matmul=False)


def _place(definition: str, bodies: dict, differentiated: bool) -> Place:
    inside, opcode, own = _inside(definition, bodies), _opcode(definition), _op_name(definition)
    opcodes = {_opcode(inner) for inner in inside} | ({opcode} - {"fusion", "call"})
    op_names = [name for inner in (definition, *inside) if (name := _op_name(inner))]
    sources = [_source(name, differentiated) for name in ([own] if own else []) + op_names]
    # The instruction's own op_name, that of its last operation, if that names a part; otherwise the
    # most common of those inside that do.
    known = [source for source in sources if source[0] != OTHER] or sources or [(OTHER, "forward")]
    part, pass_ = (
        known[0]
        if own and known[0] == sources[0]
        else collections.Counter(known).most_common(1)[0][0]
    )
    if opcodes and opcodes <= _MOVING:
        part = COPIES
    op = (own or (op_names[0] if op_names else "") or opcode).split(";")[0].split("/")[-1]
    matmul = bool(opcodes & {"dot", "convolution"}) or any(
        target in definition for target in _MATMUL_TARGETS
    )
    return Place(part, pass_, op, matmul, encloses=opcode in ("while", "call", "conditional"))


def _inside(definition: str, bodies: dict) -> list[str]:
    """Return the instructions of a fusion, including those of inner fusions."""
    if _opcode(definition) not in ("fusion", "call", "async-start"):
        return []
    direct = [
        inner for called in _CALLED.findall(definition) for _, inner in bodies.get(called, [])
    ]
    return direct + [nested for inner in direct for nested in _inside(inner, bodies)]


def _opcode(definition: str) -> str:
    match = _OPCODE.search(definition)
    return match[1] if match else ""


def _op_name(definition: str) -> str:
    match = _OP_NAME.search(definition)
    # Bodies of reductions, arguments and results have names that are not paths from the root.
    return match[1] if match and match[1].startswith("jit(") else ""


def _source(op_name: str, differentiated: bool) -> tuple[str, str]:
    """Return part and pass of an op_name."""
    path = op_name.split(";")[0]
    if "rematted_computation" in path:
        pass_ = "recomputed"
    else:
        pass_ = "backward" if "transpose(" in path else "forward"
    scopes = [word for word in re.split(r"[/(),]", path) if word in PARTS]
    if scopes:
        return PARTS[scopes[-1]], pass_
    if differentiated and "jvp(" not in path:
        return OPTIMIZER, "update"
    return OTHER, pass_
