"""Tools for the tests of FP8 matmuls: what an executable multiplies."""

import re
from typing import NamedTuple

import jax
import numpy as np

from pallas_kernels.gemm import largest

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?[\w.\-]+ \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\S.*)$")
_TYPE = re.compile(r"^\(?([a-z]+\d\w*|pred)\[")
_CALL = re.compile(r"\s(dot|convolution|scaled-dot|custom-call)\((.*?)\)[,\s]?")
_TARGET = re.compile(r'custom_call_target="(__cublas[^"]*)"')


# XLA's default on a GPU, which tests/conftest.py changes.
XLAS_DEFAULT = {"xla_gpu_enable_triton_gemm": True}


def fake(x, scale, dtype):
    """Round x · scale to FP8, and return it over the scale, in fp64."""
    q = np.clip(np.asarray(x, np.float64) * scale, -largest(dtype), largest(dtype))
    return q.astype(np.float32).astype(dtype).astype(np.float64) / scale


def power_of_two(x, dtype) -> float:
    """Return the largest scale with which no number of x is clipped."""
    return float(2.0 ** np.floor(np.log2(largest(dtype) / np.abs(x).max())))


class Matmul(NamedTuple):
    """A matmul of an executable."""

    kernel: str
    """cuBLASLt FP8, cuBLAS, or dot: a matmul that XLA compiles, with Triton on a GPU."""
    types: str
    """Dtypes of both operands, as HLO writes them."""
    scaled: bool = False
    """Whether cuBLASLt multiplies the result by a scale."""

    def __repr__(self) -> str:
        return f"{'scaled ' * self.scaled}{self.kernel} of {self.types}"

    @property
    def fp8(self) -> bool:
        return all(name.startswith("f8") for name in self.types.split("×"))


def matmuls(compiled: jax.stages.Compiled | str) -> list[Matmul]:
    """Return the matmuls of an executable, or of its text."""
    found, types, constants = [], {}, set()
    for line in (compiled if isinstance(compiled, str) else compiled.as_text()).splitlines():
        if _COMPUTATION.match(line):
            types, constants = {}, set()
        elif match := _INSTRUCTION.match(line):
            name, definition = match.groups()
            if type_ := _TYPE.match(definition):
                types[name] = type_[1]
            if " constant(" in definition:
                constants.add(name)
            if call := _CALL.search(definition):
                target = _TARGET.search(definition)
                if call[1] == "custom-call" and not target:
                    continue
                names = re.findall(r"%?([\w.\-]+)(?:,|$)", re.sub(r"[\[{].*?[\]}]", "", call[2]))
                operands = "×".join(types.get(name, "?") for name in names[:2])
                if target and target[1] == "__cublas$lt$matmul$f8":
                    # After the operands come their scales. XLA's own are constants of 1.
                    scaled = not constants.issuperset(names[2:4])
                    found.append(Matmul("cuBLASLt FP8", operands, scaled))
                else:
                    found.append(Matmul("cuBLAS" if target else "dot", operands))
    return found


def assert_fp8(compiled: jax.stages.Compiled, count: int, *, cublaslt: bool = True) -> None:
    """Fail unless all matmuls of an executable have FP8 operands, `count` of them.

    XLA computes an FP8 dot that it cannot pass to cuBLASLt in fp16, and a scale that it cannot pass
    in another pass over the result, without a warning.

    Args:
        cublaslt: whether cuBLASLt has to compute and to scale them. With XLA's default options, a
            matmul may also be one of Triton.
    """
    found = matmuls(compiled)
    good = [matmul for matmul in found if matmul.fp8 and (matmul.scaled or not cublaslt)]
    expected = f"{count} {'scaled cuBLASLt' if cublaslt else 'cuBLASLt or Triton'} FP8"
    assert len(found) == len(good) == count, f"expected {expected}, got {found}"
