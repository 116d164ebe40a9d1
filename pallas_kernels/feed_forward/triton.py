"""Triton kernels of the linear layer with activation: portable (Ampere and later), any shape.

bf16 and fp16: `linear_forward` computes matmul, bias and activation; `scale` multiplies the
gradient by the derivative. fp32: `activate_forward` and `activate_backward` are passes over a
matmul of XLA.

Shapes: N rows, I inputs, O outputs. A program computes a tile of M rows and P columns; `tl.dot`
contracts K inputs at a time.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _triton
from pallas_kernels.feed_forward.activations import GELU_1, GELU_3, LOG2_E

LINEAR, CUBIC, LOG2_E = tl.constexpr(GELU_1), tl.constexpr(GELU_3), tl.constexpr(LOG2_E)


@triton.jit
def activate(u, ACTIVATION: tl.constexpr):
    """Return the activation and its derivative, both fp32."""
    if ACTIVATION == "gelu":
        u2 = u * u
        e = tl.exp2(u * -LOG2_E * (u2 * CUBIC + LINEAR))
        s = 1.0 / (1.0 + e)
        y = u * s
        # Compute 1 − s as e·s: the difference loses digits if s is near 1. If s is 0, e may be
        # infinite.
        return y, (y * (u2 * (3 * CUBIC) + LINEAR) * tl.minimum(e, 2.0**126) + 1.0) * s
    r = tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return r * r, 2.0 * r


@triton.jit
def tile_of(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Return row and column of a tile.

    The order is downwards in groups of GROUP rows of tiles, so that neighbours share operands in
    the L2 cache.
    """
    group = program // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = program % (GROUP * column_tiles)
    return group * GROUP + within % height, within // height


# n, i and o are constants: jax-triton does not tell the compiler that a run-time size is a multiple
# of 16, and the kernel would read single elements.
@triton.jit
def linear_forward(
    x_ptr, w_ptr, b_ptr, y_ptr, derivative_ptr, n: tl.constexpr, i: tl.constexpr, o: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, SAVE: tl.constexpr, EVEN: tl.constexpr,
    M: tl.constexpr, P: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column = tile_of(tl.program_id(0), (n + M - 1) // M, (o + P - 1) // P, GROUP)
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
        columns = column * P + half * (P // 2) + tl.arange(0, P // 2)
        u = right if half else left
        if BIAS:
            u += tl.load(b_ptr + columns % o)[None, :]
        y, derivative = activate(u, ACTIVATION)
        # The offset of the tile needs 64 bits, offsets inside the tile 32.
        corner = (row * M).to(tl.int64) * o + column * P + half * (P // 2)
        offsets = tl.arange(0, M)[:, None] * o + tl.arange(0, P // 2)[None, :]
        mask = (rows < n)[:, None] & (columns < o)[None, :]
        tl.store(y_ptr + corner + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
        if SAVE:
            tl.store(
                derivative_ptr + corner + offsets, derivative.to(y_ptr.dtype.element_ty), mask=mask
            )


@triton.jit
def scale(
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
    rows, columns = row * M + tl.arange(0, M), column * P + tl.arange(0, P)
    # The offset of the tile needs 64 bits, offsets inside the tile 32.
    corner = (row * M).to(tl.int64) * o + column * P
    offsets = tl.arange(0, M)[:, None] * o + tl.arange(0, P)[None, :]
    mask = (rows < n)[:, None] & (columns < o)[None, :]
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
    row, column = tile_of(tl.program_id(0), (n + M - 1) // M, (o + P - 1) // P, GROUP)
    rows, columns = row * M + tl.arange(0, M), column * P + tl.arange(0, P)
    corner = (row * M).to(tl.int64) * o + column * P
    offsets = tl.arange(0, M)[:, None] * o + tl.arange(0, P)[None, :]
    mask = (rows < n)[:, None] & (columns < o)[None, :]
    dy = tl.load(dy_ptr + corner + offsets, mask=mask, other=0.0)
    u = tl.load(xw_ptr + corner + offsets, mask=mask, other=0.0)
    if BIAS:
        u += tl.load(b_ptr + columns, mask=columns < o, other=0.0)[None, :]
    y, derivative = activate(u, ACTIVATION)
    du = dy * derivative
    tl.store(du_ptr + corner + offsets, du, mask=mask)
    if BIAS:
        tl.store(db_ptr + row.to(tl.int64) * o + columns, tl.sum(du, axis=0), mask=columns < o)
    transposed_corner = (column * P).to(tl.int64) * n + row * M
    transposed_offsets = tl.arange(0, P)[:, None] * n + tl.arange(0, M)[None, :]
    transposed_mask = (columns < o)[:, None] & (rows < n)[None, :]
    if DU_TRANSPOSED:
        tl.store(
            du_transposed_ptr + transposed_corner + transposed_offsets,
            tl.trans(du),
            mask=transposed_mask,
        )
    if Y_TRANSPOSED:
        tl.store(
            y_transposed_ptr + transposed_corner + transposed_offsets,
            tl.trans(y),
            mask=transposed_mask,
        )


def forward(x_NI, w_IO, b_O, activation: str, *, save: bool):
    """Return (y, derivative), or (y,); b_O is fp32 or None."""
    (n, i), o = x_NI.shape, w_IO.shape[1]
    tiles = tuning(n, o)
    like_y = jax.ShapeDtypeStruct((n, o), x_NI.dtype)
    out = _triton.call(
        linear_forward,
        x_NI,
        w_IO,
        x_NI if b_O is None else b_O,
        out=[like_y, like_y if save else jax.ShapeDtypeStruct((1,), x_NI.dtype)],
        grid=(triton.cdiv(n, tiles["M"]) * triton.cdiv(o, tiles["P"]),),
        n=n,
        i=i,
        o=o,
        ACTIVATION=activation,
        BIAS=b_O is not None,
        SAVE=save,
        EVEN=i % tiles["K"] == 0,
        **tiles,
    )
    return out[: 1 + save]


def scaled(dy_NO, derivative_NO, *, bias: bool):
    """Return (du, db): du = dy · derivative; db = Σ_N du in fp32, or None."""
    n, o = dy_NO.shape
    m, p, times = 32, 256, 8
    parts = triton.cdiv(n, m * times)
    du_NO, db_TO = _triton.call(
        scale,
        dy_NO,
        derivative_NO,
        out=[
            jax.ShapeDtypeStruct((n, o), dy_NO.dtype),
            jax.ShapeDtypeStruct((parts, o) if bias else (1, 1), jnp.float32),
        ],
        grid=(parts * triton.cdiv(o, p),),
        n=n,
        o=o,
        BIAS=bias,
        M=m,
        P=p,
        TIMES=times,
        num_warps=8,
    )
    return du_NO, db_TO.sum(0) if bias else None


def activated(xw_NO, b_O, *, activation: str):
    """Return y = activation(x w + b) in fp32; b_O is fp32 or None."""
    n, o = xw_NO.shape
    m, p = 8, 512
    (y_NO,) = _triton.call(
        activate_forward,
        xw_NO,
        xw_NO if b_O is None else b_O,
        out=[jax.ShapeDtypeStruct((n, o), jnp.float32)],
        grid=(triton.cdiv(n, m) * triton.cdiv(o, p),),
        n=n,
        o=o,
        ACTIVATION=activation,
        BIAS=b_O is not None,
        M=m,
        P=p,
        num_warps=4,
    )
    return y_NO


def activation_backward(
    dy_NO, xw_NO, b_O, *, activation: str, du_transposed: bool, y_transposed: bool
):
    """Return (du, duᵀ, yᵀ, db), each fp32, or None if not requested; db only with a bias.

    Args:
        dy_NO, xw_NO: fp32, with y = activation(xw_NO + b).
        b_O: fp32 or None.
    """
    n, o = dy_NO.shape
    # The tiles of transpose_copy for 4-byte types. 16 tiles down a column, then the next column:
    # concurrent programs access long runs of rows in both orders.
    m, p = 64, 64
    parts = triton.cdiv(n, m)
    wanted = (True, du_transposed, y_transposed, b_O is not None)
    shapes = ((n, o), (o, n), (o, n), (parts, o))
    out = _triton.call(
        activate_backward,
        dy_NO,
        xw_NO,
        xw_NO if b_O is None else b_O,
        out=[
            jax.ShapeDtypeStruct(s if want else (1,), jnp.float32)
            for s, want in zip(shapes, wanted, strict=True)
        ],
        grid=(parts * triton.cdiv(o, p),),
        n=n,
        o=o,
        ACTIVATION=activation,
        BIAS=b_O is not None,
        DU_TRANSPOSED=du_transposed,
        Y_TRANSPOSED=y_transposed,
        M=m,
        P=p,
        GROUP=16,
        num_warps=8,
    )
    du_NO, du_ON, y_ON, db_SO = (
        array if want else None for array, want in zip(out, wanted, strict=True)
    )
    return du_NO, du_ON, y_ON, None if db_SO is None else db_SO.sum(0)


def tuning(rows: int, columns: int) -> dict[str, int]:
    """Return tile sizes for a result of rows × columns.

    On an H200 128×128 took 0.78 ms for 65536×768×3072, 128×256 0.94.
    """
    if min(rows, columns) < 128:
        return {"M": 64, "P": 64, "K": 32, "GROUP": 8, "num_warps": 4, "num_stages": 2}
    return {"M": 128, "P": 128, "K": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}
