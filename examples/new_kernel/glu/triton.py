"""Triton kernels of `silu_mul`. N elements; a program loads and stores BLOCK of them."""

import jax
import triton
import triton.language as tl

from pallas_kernels.extend import triton_call

# A thread's 8 elements are one 16-byte vector of a 16-bit dtype, two of fp32. Masks cut through no
# vector where N is a multiple of 8.
WARPS = 4
BLOCK = 8 * 32 * WARPS


def forward(gate, up):
    """Return (y,), of the shape (N,) of gate."""
    return _launch(forward_kernel, gate, up, outputs=1)


def backward(gate, up, dy):
    """Return (dgate, dup), of the shape (N,) of gate."""
    return _launch(backward_kernel, gate, up, dy, outputs=2)


def _launch(kernel, *arrays, outputs):
    n = arrays[0].size
    return triton_call(
        kernel,
        *arrays,
        out=[jax.ShapeDtypeStruct((n,), arrays[0].dtype)] * outputs,
        grid=(triton.cdiv(n, BLOCK),),
        num_warps=WARPS,
        N=n,
        BLOCK=BLOCK,
    )


@triton.jit
def forward_kernel(gate_ptr, up_ptr, y_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    offset, inside = block(N, BLOCK)
    gate = tl.load(gate_ptr + offset, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + offset, mask=inside).to(tl.float32)
    tl.store(y_ptr + offset, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def backward_kernel(
    gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, N: tl.constexpr, BLOCK: tl.constexpr
):
    offset, inside = block(N, BLOCK)
    gate = tl.load(gate_ptr + offset, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + offset, mask=inside).to(tl.float32)
    dy = tl.load(dy_ptr + offset, mask=inside).to(tl.float32)
    s = tl.sigmoid(gate)
    tl.store(dgate_ptr + offset, dy * up * s * (1 + gate * (1 - s)), mask=inside)
    tl.store(dup_ptr + offset, dy * gate * s, mask=inside)


@triton.jit
def block(N: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets of this program's elements, in 64 bits, and the mask of the first N."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return offset, offset < N
