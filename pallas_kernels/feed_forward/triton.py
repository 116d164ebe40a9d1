"""Triton kernels of the linear layer with activation: portable (Ampere and later), any shape.

| stored | forward pass | backward pass |
| --- | --- | --- |
| 16 bits | `linear_forward`: matmul, bias and activation | `scale_kernel`, by the derivative |
| fp32 | `activate_forward`, of a matmul of XLA | `activate_backward`, of the same matmul |
| FP8, both layouts | `activated_kernel`, of a matmul of XLA | `activated_backward_kernel` |

Shapes: N rows, I inputs, O outputs. A program computes a tile of M rows and P columns; `tl.dot`
contracts K inputs at a time. The FP8 kernels transpose their tile in shared memory.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _triton
from pallas_kernels.feed_forward.activations import GELU_1, GELU_3
from pallas_kernels.gemm.numerics import HiddenFormat
from pallas_kernels.gemm.operands import largest
from pallas_kernels.gemm.triton import ROWS, clipped, launch, store_transposed, tile_of
from pallas_kernels.row_softmax.triton import LOG2E

LINEAR, CUBIC = tl.constexpr(GELU_1), tl.constexpr(GELU_3)


@triton.jit
def activate(u, ACTIVATION: tl.constexpr):
    """Return the activation and its derivative, both fp32."""
    if ACTIVATION == "gelu":
        u2 = u * u
        e = tl.exp2(u * -LOG2E * (u2 * CUBIC + LINEAR))
        s = 1.0 / (1.0 + e)
        y = u * s
        # Compute 1 − s as e·s: the difference loses digits if s is near 1. If s is 0, e may be
        # infinite.
        return y, (y * (u2 * (3 * CUBIC) + LINEAR) * tl.minimum(e, 2.0**126) + 1.0) * s
    r = tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return r * r, 2.0 * r


@triton.jit
def tile_in_group(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Return row and column of a tile.

    The order is downwards in groups of GROUP rows of tiles, so that neighbours share operands in
    the L2 cache.
    """
    group = program // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = program % (GROUP * column_tiles)
    return group * GROUP + within % height, within // height


@triton.jit
def offsets_of(row, column, n: tl.constexpr, o: tl.constexpr, M: tl.constexpr, P: tl.constexpr):
    """Return columns, corner, offsets from the corner, and mask of a tile."""
    rows, columns = row * M + tl.arange(0, M), column * P + tl.arange(0, P)
    # The offset of the tile needs 64 bits, offsets inside the tile 32.
    corner = (row * M).to(tl.int64) * o + column * P
    offsets = tl.arange(0, M)[:, None] * o + tl.arange(0, P)[None, :]
    return columns, corner, offsets, (rows < n)[:, None] & (columns < o)[None, :]


# n, i and o are constants: jax-triton does not tell the compiler that a run-time size is a multiple
# of 16, and the kernel would read single elements.
@triton.jit
def linear_forward(
    x_ptr, w_ptr, b_ptr, y_ptr, derivative_ptr, n: tl.constexpr, i: tl.constexpr, o: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, SAVE: tl.constexpr, EVEN: tl.constexpr,
    M: tl.constexpr, P: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column = tile_in_group(tl.program_id(0), (n + M - 1) // M, (o + P - 1) // P, GROUP)
    rows, columns, ks = row * M + tl.arange(0, M), column * P + tl.arange(0, P), tl.arange(0, K)
    # Instead of rows and columns out of bounds, load valid rows and columns again, which is cheaper
    # than a mask. The results out of bounds are not stored.
    x_ptrs = x_ptr + (rows % n).to(tl.int64)[:, None] * i + ks[None, :]
    w_ptrs = w_ptr + ks[:, None] * o + (columns % o)[None, :]
    accumulator = tl.full((M, P), 0.0, tl.float32)
    for k in range(0, i, K):
        if EVEN:
            x, w = tl.load(x_ptrs), tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=ks[None, :] < i - k, other=0.0)
            w = tl.load(w_ptrs, mask=ks[:, None] < i - k, other=0.0)
        accumulator = tl.dot(x, w, accumulator)
        x_ptrs += K
        w_ptrs += K * o
    # Half of the columns at a time: all columns with the derivatives would spill registers.
    left, right = tl.split(tl.permute(tl.reshape(accumulator, (M, 2, P // 2)), (0, 2, 1)))
    for half in tl.static_range(2):
        columns, corner, offsets, mask = offsets_of(row, 2 * column + half, n, o, M, P // 2)
        u = right if half else left
        if BIAS:
            u += tl.load(b_ptr + columns % o)[None, :]
        y, derivative = activate(u, ACTIVATION)
        tl.store(y_ptr + corner + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
        if SAVE:
            tl.store(
                derivative_ptr + corner + offsets, derivative.to(y_ptr.dtype.element_ty), mask=mask
            )


@triton.jit
def scale_kernel(
    dy_ptr, derivative_ptr, du_ptr, db_ptr, n: tl.constexpr, o: tl.constexpr,
    BIAS: tl.constexpr, M: tl.constexpr, P: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """Compute du = dy · derivative and its sums over TIMES·M rows, in one pass."""
    row, column = tl.program_id(0) // ((o + P - 1) // P), tl.program_id(0) % ((o + P - 1) // P)
    columns = column * P + tl.arange(0, P)
    sums = tl.full((M, P), 0.0, tl.float32)
    for time in range(TIMES):
        rows = (row * TIMES + time) * M + tl.arange(0, M)
        offsets = rows.to(tl.int64)[:, None] * o + columns[None, :]
        mask = (rows < n)[:, None] & (columns < o)[None, :]
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0)
        du = dy.to(tl.float32) * tl.load(derivative_ptr + offsets, mask=mask, other=0.0).to(
            tl.float32
        )
        tl.store(du_ptr + offsets, du.to(dy.dtype), mask=mask)
        sums += du
    if BIAS:
        tl.store(db_ptr + row.to(tl.int64) * o + columns, tl.sum(sums, axis=0), mask=columns < o)


@triton.jit
def activate_forward(
    xw_ptr, b_ptr, y_ptr, n: tl.constexpr, o: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) // ((o + P - 1) // P), tl.program_id(0) % ((o + P - 1) // P)
    columns, corner, offsets, mask = offsets_of(row, column, n, o, M, P)
    u = tl.load(xw_ptr + corner + offsets, mask=mask, other=0.0)
    if BIAS:
        u += tl.load(b_ptr + columns, mask=columns < o, other=0.0)[None, :]
    y, _ = activate(u, ACTIVATION)
    tl.store(y_ptr + corner + offsets, y, mask=mask)


@triton.jit
def activate_backward(
    dy_ptr, xw_ptr, b_ptr, du_ptr, du_transposed_ptr, y_transposed_ptr, db_ptr, n: tl.constexpr,
    o: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, DU_TRANSPOSED: tl.constexpr,
    Y_TRANSPOSED: tl.constexpr, M: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute du = dy · y'(matmul + b), its sums over M rows, and optionally duᵀ and yᵀ.

    One pass over memory.
    """
    row, column = tile_in_group(tl.program_id(0), (n + M - 1) // M, (o + P - 1) // P, GROUP)
    columns, corner, offsets, mask = offsets_of(row, column, n, o, M, P)
    dy = tl.load(dy_ptr + corner + offsets, mask=mask, other=0.0)
    u = tl.load(xw_ptr + corner + offsets, mask=mask, other=0.0)
    if BIAS:
        u += tl.load(b_ptr + columns, mask=columns < o, other=0.0)[None, :]
    y, derivative = activate(u, ACTIVATION)
    du = dy * derivative
    tl.store(du_ptr + corner + offsets, du, mask=mask)
    if BIAS:
        tl.store(db_ptr + row.to(tl.int64) * o + columns, tl.sum(du, axis=0), mask=columns < o)
    _, corner, offsets, mask = offsets_of(column, row, o, n, P, M)
    if DU_TRANSPOSED:
        tl.store(du_transposed_ptr + corner + offsets, tl.trans(du), mask=mask)
    if Y_TRANSPOSED:
        tl.store(y_transposed_ptr + corner + offsets, tl.trans(y), mask=mask)


@triton.jit
def activated_kernel(
    u_ptr, b_ptr, y_ptr, transposed_ptr, derivative_ptr, R: tl.constexpr, C: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr,
    SAVED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Compute y · SCALE, and the derivative · SAVED unless SAVED is None."""
    r, c, offset, inside = tile_of(R, C, ROWS, COLS, INDEX)
    u = tl.load(u_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        u += tl.load(b_ptr + c, mask=c < C, other=0.0)[None, :]
    y, derivative = activate(u, ACTIVATION)
    y = clipped(y * SCALE, LARGEST).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offset, y, mask=inside)
    store_transposed(transposed_ptr, y, r, c, R, C, INDEX)
    if SAVED is not None:
        derivative = (derivative * SAVED).to(derivative_ptr.dtype.element_ty)
        tl.store(derivative_ptr + offset, derivative, mask=inside)


@triton.jit
def activated_backward_kernel(
    dh_ptr, saved_ptr, scale_ptr, du_ptr, transposed_ptr, db_ptr, R: tl.constexpr, C: tl.constexpr,
    ROOT: tl.constexpr, FACTOR: tl.constexpr, LARGEST: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Compute du = dh · FACTOR · saved, or with ROOT the square root of saved."""
    r, c, offset, inside = tile_of(R, C, ROWS, COLS, INDEX)
    dh = tl.load(dh_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    saved = tl.load(saved_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    du = dh * FACTOR * (tl.sqrt(saved) if ROOT else saved)
    q = clipped(du * tl.load(scale_ptr), LARGEST).to(du_ptr.dtype.element_ty)
    tl.store(du_ptr + offset, q, mask=inside)
    store_transposed(transposed_ptr, q, r, c, R, C, INDEX)
    if BIAS:
        row_tile = tl.program_id(0) % ((R + ROWS - 1) // ROWS)
        tl.store(db_ptr + row_tile * C + c, tl.sum(du, 0), mask=c < C)


def activated(x_NI, w_IO, b_O, scale=(), *, activation: str, stored: HiddenFormat, save: bool):
    """Return (y, None, derivative or None) of the activation of u = x w + b, in 16 bits.

    Args:
        b_O: fp32, or None.
        save: whether to return the derivative.
    """
    (n, i), o = x_NI.shape, w_IO.shape[1]
    tiles = tuning(n, o)
    y_NO, derivative_NO = _launch(
        linear_forward,
        (n, o),
        x_NI,
        w_IO,
        x_NI if b_O is None else b_O,
        out=[_array(stored.dtype, n, o), _array(stored.dtype, n, o, stored=save)],
        i=i,
        ACTIVATION=activation,
        BIAS=b_O is not None,
        SAVE=save,
        EVEN=i % tiles["K"] == 0,
        **tiles,
    )
    return y_NO, None, derivative_NO if save else None


def activated_pass(u_NO, b_O, *, activation: str, stored: HiddenFormat):
    """Return y = a(u + b), its transposed copy or None, and the array that `gradient` reads, in
    fp32 or FP8. b_O is fp32 or None."""
    shape = n, o = u_NO.shape
    arrays = u_NO, u_NO if b_O is None else b_O  # no kernel reads u in place of a bias
    how = {"ACTIVATION": activation, "BIAS": b_O is not None}
    if not stored.k_major:
        how |= {"out": [_array(stored.dtype, n, o)], "M": 8, "P": 512, "num_warps": 4}
        return *_launch(activate_forward, shape, *arrays, **how), None, u_NO
    save = stored.saved_dtype is not None
    y_NO, y_ON, derivative_NO = launch(
        activated_kernel,
        shape,
        *arrays,
        out=[
            _array(stored.dtype, n, o),
            _array(stored.dtype, o, n),
            _array(stored.saved_dtype or stored.dtype, n, o, stored=save),
        ],
        SCALE=stored.scale,
        LARGEST=largest(stored.dtype),
        SAVED=stored.saved_scale if save else None,
        **how,
    )
    return y_NO, y_ON, derivative_NO if save else y_NO


def gradient(dh_NO, saved_NO, b_O, scale, *, activation, stored: HiddenFormat, again: bool):
    """Return du, its transposed copy or None, db in fp32 or None, and yᵀ or None.

    Args:
        saved_NO: what the forward pass stored for the backward pass.
        b_O: fp32, or None.
        scale: factor of du in FP8, or None.
        again: whether to return yᵀ, in fp32.
    """
    shape = n, o = dh_NO.shape
    bias, dtype = b_O is not None, stored.gradient_dtype
    transposed = y_ON = None
    if stored.k_major:
        du_NO, transposed, db_SO = launch(
            activated_backward_kernel,
            shape,
            dh_NO,
            saved_NO,
            scale.reshape(1),
            out=[_array(dtype, n, o), _array(dtype, o, n), _sums(n, o, ROWS, bias)],
            ROOT=stored.saved_dtype is None,
            FACTOR=1 / stored.derivative_scale,
            LARGEST=largest(dtype),
            BIAS=bias,
        )
    elif dtype == jnp.float32:
        # The tiles of transpose_copy for 4-byte types. 16 tiles down a column, then the next
        # column: concurrent programs access long runs of rows in both orders.
        m, p, both = 64, 64, stored.transposes
        du_NO, transposed, y_ON, db_SO = _launch(
            activate_backward,
            shape,
            dh_NO,
            saved_NO,
            b_O if bias else saved_NO,
            out=[
                _array(dtype, n, o),
                _array(dtype, o, n, stored=both),
                _array(dtype, o, n, stored=again),
                _sums(n, o, m, bias),
            ],
            ACTIVATION=activation,
            BIAS=bias,
            DU_TRANSPOSED=both,
            Y_TRANSPOSED=again,
            M=m,
            P=p,
            GROUP=16,
            num_warps=8,
        )
        transposed, y_ON = transposed if both else None, y_ON if again else None
    else:
        m, times = 32, 8
        du_NO, db_SO = _launch(
            scale_kernel,
            shape,
            dh_NO,
            saved_NO,
            out=[_array(dtype, n, o), _sums(n, o, m * times, bias)],
            BIAS=bias,
            M=m,
            P=256,
            TIMES=times,
            num_warps=8,
        )
    return du_NO, transposed, db_SO.sum(0) if bias else None, y_ON


def _launch(kernel, shape, *arrays, M, P, TIMES=1, **how):
    """Launch a kernel with a program for each M·TIMES rows and P columns of a matrix."""
    n, o = shape
    grid = (triton.cdiv(n, M * TIMES) * triton.cdiv(o, P),)
    how |= {"TIMES": TIMES} if TIMES > 1 else {}
    return _triton.call(kernel, *arrays, grid=grid, n=n, o=o, M=M, P=P, **how)


def _array(dtype, *shape, stored: bool = True):
    """Return the type of an output; of one element if it is not stored."""
    return jax.ShapeDtypeStruct(shape if stored else (1,), dtype)


def _sums(n: int, o: int, rows: int, stored: bool):
    """Return the type of the sums of each `rows` rows."""
    return _array(jnp.float32, triton.cdiv(n, rows), o, stored=stored)


def tuning(rows: int, columns: int) -> dict[str, int]:
    """Return tile sizes for a result of rows × columns.

    On an H200 128×128 took 0.78 ms for 65536×768×3072, 128×256 0.94.
    """
    if min(rows, columns) < 128:
        return {"M": 64, "P": 64, "K": 32, "GROUP": 8, "num_warps": 4, "num_stages": 2}
    return {"M": 128, "P": 128, "K": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}
