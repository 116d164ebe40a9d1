"""Matmuls in every precision: operands, numerics, and the matmul of FP8 operands.

    quantize:       q = round(clip(x · scale, ±largest)), to the nearest FP8 number, ties to even
                    amax = max |x|
    scaled_matmul:  y = scale · a bᵀ

e4m3 (float8_e4m3fn) has 4 bits of exponent and 3 bits of mantissa: 2⁻⁹ … 448. e5m2 (float8_e5m2)
has 5 bits of exponent and 2 bits of mantissa: 2⁻¹⁶ … 57,344. At most one operand of a matmul is
e5m2.

Scales are powers of two (`scale_for`). Multiplication by a power of two is exact in every dtype, so
the result of `scaled_matmul` is rounded once. FP8 numbers have an exponent: a scale moves the
range, and does not change the relative error of numbers inside the range.

Hopper's tensor cores read FP8 operands K-major only (contiguous along the axis of the sum).
A linear layer sums along three different axes in y, dx and dw, so each of its arrays is needed row
by row and transposed. One pass of `quantize` stores both.

Shapes: a (M, K), b (N, K), y (M, N); x (R, C).

`numerics.py` has the precisions, `mosaic.py` the matmul with an epilogue on Hopper, which
pallas_kernels/feed_forward uses. XLA (cuBLAS, cuBLASLt) computes the other matmuls.

Back ends of scaled_matmul: xla (cuBLASLt's FP8 matmul on a GPU; any device), and reference, the
definition in fp32. Back ends of quantize: see operands.py. Neither function has a derivative.
"""

from pallas_kernels.gemm.numerics import HEAD, Fp8, Numerics, Plain
from pallas_kernels.gemm.operands import (
    E4M3,
    E5M2,
    Operand,
    Quantized,
    largest,
    quantize,
    scale_for,
    stochastic_e5m2,
    transposed,
    why_not_fp8,
)
from pallas_kernels.gemm.xla import reference, scaled_matmul

__all__ = [
    "E4M3",
    "E5M2",
    "HEAD",
    "Fp8",
    "Numerics",
    "Operand",
    "Plain",
    "Quantized",
    "largest",
    "quantize",
    "reference",
    "scale_for",
    "scaled_matmul",
    "stochastic_e5m2",
    "transposed",
    "why_not_fp8",
]
