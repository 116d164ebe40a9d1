"""Stochastic rounding of fp32 to e5m2 in Triton kernels: `to_e5m2`, and `block_to_e5m2` in PTX.

Both clip x to the largest e5m2 number and compute the bits of `stochastic_e5m2`
(pallas_kernels/gemm/operands.py), `block_to_e5m2` only where no x is NaN. e5m2 is the first byte
of fp16: the noise is added to the second byte, and a carry rounds the magnitude up.
"""

import triton
import triton.language as tl

from pallas_kernels.gemm.triton import clipped

# The multiplier of `stochastic_e5m2`.
HASH = tl.constexpr(0x9E3779B1)
LARGEST = tl.constexpr(57344.0)
# Convert $1 … $4 to the four bytes of $0. $5 is the mask of the noise. All instructions except the
# multiplications process two numbers or more. Clipping after the conversion to fp16 computes the
# same bits: 57,344 is an fp16 number, and the noise of a clipped number has no effect.
ROUND = tl.constexpr("""{
.reg .b32 low, high, noise, hash, largest;
mov.b32 largest, 0x7B007B00;
mul.lo.u32 noise, $1, 0x9E3779B1;
mul.lo.u32 hash, $2, 0x9E3779B1;
prmt.b32 noise, noise, hash, 0x7733;
and.b32 noise, noise, $5;
cvt.rn.f16x2.f32 low, $2, $1;
min.NaN.xorsign.abs.f16x2 low, low, largest;
add.u32 low, low, noise;
mul.lo.u32 noise, $3, 0x9E3779B1;
mul.lo.u32 hash, $4, 0x9E3779B1;
prmt.b32 noise, noise, hash, 0x7733;
and.b32 noise, noise, $5;
cvt.rn.f16x2.f32 high, $4, $3;
min.NaN.xorsign.abs.f16x2 high, high, largest;
add.u32 high, high, noise;
prmt.b32 $0, low, high, 0x7531;
}""")


@triton.jit
def to_e5m2(x):
    """Clip x and round it to e5m2, stochastically. NaN remains NaN."""
    x = clipped(x, LARGEST)
    noise = (x.to(tl.uint32, bitcast=True) * HASH) >> 24
    half = x.to(tl.float16).to(tl.uint16, bitcast=True) + tl.where(x == x, noise, 0)
    return (half >> 8).to(tl.uint8).to(tl.float8e5, bitcast=True)


@triton.jit
def noise_mask(scale):
    """Return the mask of `block_to_e5m2`: 0 if scale is not finite.

    The values may be NaN only if scale is not finite.
    """
    return tl.where(scale - scale == 0, 0x00FF00FF, 0).to(tl.uint32)


@triton.jit
def block_to_e5m2(x, mask):
    """Clip and round x to e5m2, as `to_e5m2` or towards zero, with half the instructions.

    Each thread must own a multiple of four values of x. Compute capability 8.6 or later.

    Args:
        mask: scalar. 0x00FF00FF: as `to_e5m2`, but no x may be NaN, since the noise would change
            the sign bit of NaN and clear the other bits. 0: towards zero, and NaN remains NaN.
    """
    bits = x.to(tl.uint32, bitcast=True)
    rounded = tl.inline_asm_elementwise(
        ROUND, "=r,r,r,r,r,r,r,r,r", [bits, mask], tl.uint8, True, 4
    )
    return rounded.to(tl.float8e5, bitcast=True)
