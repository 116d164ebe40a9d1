"""Tools for the tests of FP8 matmuls: what an executable multiplies."""

import re
from typing import NamedTuple

import jax

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?[\w.\-]+ \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\S.*)$")
_TYPE = re.compile(r"^\(?([a-z]+\d\w*|pred)\[")
_CALL = re.compile(r"\s(dot|convolution|scaled-dot|custom-call)\((.*?)\)[,\s]?")
_TARGET = re.compile(r'custom_call_target="(__cublas[^"]*)"')


class Matmul(NamedTuple):
    """A matmul of an executable."""

    kernel: str
    """cuBLASLt FP8, cuBLAS, or dot: a matmul that XLA compiles, with Triton on a GPU."""
    types: str
    """Dtypes of both operands, as HLO writes them."""

    def __repr__(self) -> str:
        return f"{self.kernel} of {self.types}"

    @property
    def fp8(self) -> bool:
        return all(name.startswith("f8") for name in self.types.split("×"))


def matmuls(compiled: jax.stages.Compiled | str) -> list[Matmul]:
    """Return the matmuls of an executable, or of its text."""
    found, types = [], {}
    for line in (compiled if isinstance(compiled, str) else compiled.as_text()).splitlines():
        if _COMPUTATION.match(line):
            types = {}
        elif match := _INSTRUCTION.match(line):
            name, definition = match.groups()
            if type_ := _TYPE.match(definition):
                types[name] = type_[1]
            if call := _CALL.search(definition):
                target = _TARGET.search(definition)
                if call[1] == "custom-call" and not target:
                    continue
                names = re.findall(r"%?([\w.\-]+)(?:,|$)", re.sub(r"[\[{].*?[\]}]", "", call[2]))
                kernel = "dot" if not target else "cuBLAS"
                if target and target[1] == "__cublas$lt$matmul$f8":
                    kernel = "cuBLASLt FP8"
                found.append(Matmul(kernel, "×".join(types.get(n, "?") for n in names[:2])))
    return found


def assert_fp8(compiled: jax.stages.Compiled, count: int, *, cublaslt: bool = True) -> None:
    """Fail unless all matmuls of an executable have FP8 operands, `count` of them.

    XLA computes an FP8 dot that it cannot pass to cuBLASLt in fp16, without a warning.

    Args:
        cublaslt: whether cuBLASLt has to compute them. With XLA's default options, a matmul may
            also be one of Triton.
    """
    found = matmuls(compiled)
    kernels = ("cuBLASLt FP8",) if cublaslt else ("cuBLASLt FP8", "dot")
    good = [matmul for matmul in found if matmul.fp8 and matmul.kernel in kernels]
    assert len(found) == len(good) == count, f"expected {count} FP8 by {kernels}, got {found}"


def multiplications(compiled: jax.stages.Compiled) -> list[str]:
    """Return the instructions that multiply arrays: a scale that is not part of a matmul."""
    lines = (line.strip()[:90] for line in compiled.as_text().splitlines())
    return [line for line in lines if re.search(r"\[\d[\d,]*\]\S* multiply\(", line)]
