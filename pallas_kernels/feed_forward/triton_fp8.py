"""Triton kernels between the FP8 matmuls of an MLP: the activation and its gradient, which store
FP8 results both ways round.

Shapes: N rows, O columns (C in kernels). A program computes one tile, and transposes it in shared
memory.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _triton
from pallas_kernels.feed_forward.triton import activate
from pallas_kernels.gemm.numerics import HiddenFormat
from pallas_kernels.gemm.triton import COLS, ROWS, WARPS

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@triton.jit
def clipped(x, LARGEST: tl.constexpr):
    nan: tl.constexpr = tl.PropagateNan.ALL
    return tl.minimum(tl.maximum(x, -LARGEST, propagate_nan=nan), LARGEST, propagate_nan=nan)


@triton.jit
def tile_of(
    N: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, INDEX: tl.constexpr
):
    """Return columns, offsets and masks of this program's tile and of its transposed copy.

    Consecutive programs have the tiles of a column: together they write complete rows of the
    transposed copy.
    """
    row_tiles: tl.constexpr = (N + ROWS - 1) // ROWS
    r = (tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)).to(INDEX)
    c = (tl.program_id(0) // row_tiles * COLS + tl.arange(0, COLS)).to(INDEX)
    inside, turned = (r < N)[:, None] & (c < C)[None, :], (c < C)[:, None] & (r < N)[None, :]
    return c, r[:, None] * C + c[None, :], inside, c[:, None] * N + r[None, :], turned


@triton.jit
def activated_kernel(
    u_ptr, b_ptr, y_ptr, transposed_ptr, derivative_ptr, N: tl.constexpr, C: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, STORED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    c, offset, inside, across, turned = tile_of(N, C, ROWS, COLS, INDEX)
    u = tl.load(u_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        u += tl.load(b_ptr + c, mask=c < C, other=0.0)[None, :]
    y, derivative = activate(u, ACTIVATION)
    y = clipped(y * SCALE, 448.0).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offset, y, mask=inside)
    tl.store(transposed_ptr + across, tl.trans(y), mask=turned)
    if STORED is not None:
        derivative = (derivative * STORED).to(derivative_ptr.dtype.element_ty)
        tl.store(derivative_ptr + offset, derivative, mask=inside)


@triton.jit
def activated_backward_kernel(
    dh_ptr, saved_ptr, scale_ptr, du_ptr, transposed_ptr, db_ptr, N: tl.constexpr, C: tl.constexpr,
    ROOT: tl.constexpr, FACTOR: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Compute du = dh · FACTOR · saved, or with ROOT the square root of saved."""
    c, offset, inside, across, turned = tile_of(N, C, ROWS, COLS, INDEX)
    dh = tl.load(dh_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    saved = tl.load(saved_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    du = dh * FACTOR * (tl.sqrt(saved) if ROOT else saved)
    q = clipped(du * tl.load(scale_ptr), 57344.0).to(du_ptr.dtype.element_ty)
    tl.store(du_ptr + offset, q, mask=inside)
    tl.store(transposed_ptr + across, tl.trans(q), mask=turned)
    if BIAS:
        row_tile = tl.program_id(0) % ((N + ROWS - 1) // ROWS)
        tl.store(db_ptr + row_tile * C + c, tl.sum(du, 0), mask=c < C)


def activated(u_NO, b_O, *, activation: str, stored: HiddenFormat):
    """Return y and its transposed copy in e4m3, and the derivative, or None if it is not stored.

    Args:
        b_O: added to u; fp32, or None.
    """
    n, o = u_NO.shape
    dtype = stored.saved_dtype
    y_NO, y_ON, derivative_NO = _launch(
        activated_kernel,
        u_NO,
        u_NO if b_O is None else b_O,  # the kernel does not read u in place of a bias
        out=[
            jax.ShapeDtypeStruct((n, o), E4M3),
            jax.ShapeDtypeStruct((o, n), E4M3),
            # Without a derivative, an array of one element.
            jax.ShapeDtypeStruct((1, 1) if dtype is None else (n, o), dtype or E4M3),
        ],
        ACTIVATION=activation,
        BIAS=b_O is not None,
        SCALE=stored.scale,
        STORED=None if dtype is None else stored.saved_scale,
    )
    return y_NO, y_ON, None if dtype is None else derivative_NO


def activated_backward(dh_NO, saved_NO, du_scale, *, stored: HiddenFormat, bias: bool):
    """Return du and its transposed copy times `du_scale` in e5m2, and db in fp32, or None."""
    n, o = dh_NO.shape
    du_NO, du_ON, db_RO = _launch(
        activated_backward_kernel,
        dh_NO,
        saved_NO,
        du_scale.reshape(1),
        out=[
            jax.ShapeDtypeStruct((n, o), E5M2),
            jax.ShapeDtypeStruct((o, n), E5M2),
            jax.ShapeDtypeStruct((triton.cdiv(n, ROWS), o) if bias else (1, 1), jnp.float32),
        ],
        ROOT=stored.saved_dtype is None,
        FACTOR=1 / stored.derivative_scale,
        BIAS=bias,
    )
    return du_NO, du_ON, db_RO.sum(0) if bias else None


def _launch(kernel, x_NO, *arrays, out, **constexprs):
    n, o = x_NO.shape
    return _triton.call(
        kernel,
        x_NO,
        *arrays,
        out=out,
        grid=(triton.cdiv(n, ROWS) * triton.cdiv(o, COLS),),
        num_warps=WARPS,
        N=n,
        C=o,
        ROWS=ROWS,
        COLS=COLS,
        INDEX=tl.int64 if n * o > 2**31 - 1 else tl.int32,
        **constexprs,
    )
