"""Inline PTX on NumPy arrays: the few instructions of `pallas_kernels` that tests run on a CPU.
An unknown instruction is an error.

Sources: the PTX ISA, 9.7.1 (mul), 9.7.4 (min.f16x2), 9.7.8 (and), 9.7.9 (mov, prmt, cvt).
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

WORD = np.uint32
_STATEMENT = re.compile(r"(?P<name>[.a-z]\S*)\s+(?P<operands>[^;]+);")


def run(asm: str, values: Sequence[np.ndarray], dtype: np.dtype, pack: int) -> np.ndarray:
    """Return the result of `tl.inline_asm_elementwise` with one result.

    Args:
        values: 32-bit arrays of one shape. `pack` consecutive elements of each value, and of the
            result, are the operands of one execution.
        dtype: dtype of the result, 8 or 32 bits.
    """
    shape = values[0].shape
    groups = [np.ascontiguousarray(value).view(WORD).reshape(-1, pack) for value in values]
    words = pack * np.dtype(dtype).itemsize // 4
    inputs = [group[:, i] for group in groups for i in range(pack)]
    registers = {f"${words + i}": value for i, value in enumerate(inputs)}
    for statement in _STATEMENT.finditer(asm):
        target, *sources = [name.strip() for name in statement["operands"].split(",")]
        if statement["name"] != ".reg":
            operands = [_operand(registers, source) for source in sources]
            registers[target] = INSTRUCTIONS[statement["name"]](*operands)
    result = np.stack([registers[f"${i}"] for i in range(words)], axis=-1)
    return np.ascontiguousarray(result, WORD).view(dtype).reshape(shape)


def to_tf32(x: np.ndarray) -> np.ndarray:
    """`cvt.rna.tf32.f32`: fp32 to the nearest of 10 bits of mantissa, ties away from zero."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), (bits + 0x1000) & 0xFFFFE000).view(
        np.float32
    )


def _operand(registers: dict[str, np.ndarray], source: str) -> np.ndarray:
    return WORD(int(source, 0)) if source[0].isdigit() else registers[source]


def _bytes(word: np.ndarray) -> list[np.ndarray]:
    return [(word >> WORD(8 * i)) & WORD(0xFF) for i in range(4)]


def _prmt(a, b, selector):
    """Each nibble of the selector is the index of a byte of the 8 bytes of a, then b."""
    source = [*_bytes(a), *_bytes(b)]
    nibbles = [int(selector) >> (4 * i) & 0xF for i in range(4)]
    assert max(nibbles) < 8, "replication of a sign is not implemented"
    return sum(source[nibble] << WORD(8 * i) for i, nibble in enumerate(nibbles))


def _cvt_f16x2(a, b):
    """a is the upper half of the result, and b the lower half. NaN is 0x7FFF."""
    with np.errstate(over="ignore"):
        high, low = (_canonical(x.view(np.float32).astype(np.float16)) for x in (a, b))
    return (high << WORD(16)) | low


def _min_xorsign_abs(a, b):
    """Smaller magnitude of each half, with the exclusive or of the signs; NaN if one is NaN."""
    return _half_min(a >> WORD(16), b >> WORD(16)) << WORD(16) | _half_min(a, b)


def _half_min(a, b):
    a, b = (np.asarray(x & WORD(0xFFFF), np.uint16) for x in (a, b))
    magnitude = np.minimum(*(np.abs(x.view(np.float16)) for x in (a, b)))  # propagates NaN
    sign = np.where(np.isnan(magnitude), 0, (a ^ b) & np.uint16(0x8000)).astype(WORD)
    return _canonical(magnitude) | sign


def _canonical(half):
    return np.where(np.isnan(half), WORD(0x7FFF), half.view(np.uint16).astype(WORD)).astype(WORD)


INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.b32": lambda a: a,
    "add.u32": lambda a, b: a + b,
    "and.b32": lambda a, b: a & b,
    "mul.lo.u32": lambda a, b: a * b,
    "prmt.b32": _prmt,
    "cvt.rn.f16x2.f32": _cvt_f16x2,
    "min.NaN.xorsign.abs.f16x2": _min_xorsign_abs,
    "cvt.rna.tf32.f32": lambda a: to_tf32(a.view(np.float32)).view(WORD),
}
