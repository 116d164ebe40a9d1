"""fp32 as TF32 in Triton's flash attention: rounded copies of q, k, v and dO, and their operands.

Tensor cores truncate fp32 operands to TF32. Hopper's tensor cores need both operands K-major
(contiguous along the contracted axis). Small kernels first store copies rounded to nearest:
"straight" (B·T·H·D) for sums over D, and "transposed" (B·H·D·T′) for sums over T. The
attention kernels pass these copies to the tensor cores unchanged. One kernel copies q, k and v.
Another copies dO and computes delta. Each array is read once.

Shapes as in triton.py: M rows of a block; P the head dimension padded to a power of two; R rows of
a block of queries or keys; T′ the length padded to a multiple of the block of the kernel that
reads the copy.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _triton
from pallas_kernels.attention.triton_rows import place


def tf32_copies(q, k, v, shape, *, straight, transposed):
    """Copy q, k and v, rounded to TF32, in one launch.

    Args:
        q, k, v: arrays that contain q, k and v, or the packed projection.
        shape: the constants of every kernel.
        straight: names of the arrays with a straight copy, such as "qk".
        transposed: for each array with a transposed copy, the rows of a block of the kernel that
            reads the copy.

    Returns:
        (q, k, v) straight and (q, k, v) transposed; a copy that was not requested is an unused
        array of one number.
    """
    b, lengths = shape["BATCH"], {"q": shape["T"], "k": shape["S"], "v": shape["S"]}
    dims = {"q": shape["D"], "k": shape["D"], "v": shape["E"]}
    heads = {
        "q": shape["H"] if "q" in straight or "q" in transposed else 0,
        "k": shape["K"],
        "v": shape["K"],
    }
    columns = {
        name: _columns(lengths[name], transposed[name]) if name in transposed else 0
        for name in heads
    }
    rows = _rows(dims.values())
    blocks = triton.cdiv(max(*lengths.values(), *columns.values()), rows)
    straight_shapes = [
        (b, lengths[name], heads[name], dims[name]) if name in straight else (1,) for name in heads
    ]
    transposed_shapes = [
        (b, heads[name], dims[name], columns[name]) if name in transposed else (1,)
        for name in heads
    ]
    copies = _triton.call(
        tf32_kernel,
        *(q, k, v),
        out=[jax.ShapeDtypeStruct(s, jnp.float32) for s in straight_shapes + transposed_shapes],
        grid=(blocks * b * sum(heads.values()),),
        **{name: shape[name] for name in ("T", "S", "K", "D", "E", "P", "PE")},
        **{name: shape[name] for name in ("Q_ROW", "K_ROW", "V_ROW", "K_AT", "V_AT")},
        H=heads["q"],
        **{f"{name.upper()}_STRAIGHT": name in straight for name in heads},
        **{f"{name.upper()}_COLUMNS": columns[name] for name in heads},
        BLOCKS=blocks,
        M=rows,
    )
    return copies[:3], copies[3:]


def tf32_copies_of_dout(dout_BTHD, out_BTHD, shape, *, transposed):
    """Return dO straight, dO transposed for blocks of `transposed` rows, and Σ_d dO·O.

    Both copies are rounded to TF32. The sum uses dO before the rounding; its shape is B·H·T.
    """
    b, t, h, e = dout_BTHD.shape
    columns = _columns(t, transposed)
    rows = _rows([e])
    blocks = triton.cdiv(columns, rows)
    return _triton.call(
        tf32_dout_kernel,
        *(dout_BTHD, out_BTHD),
        out=[
            jax.ShapeDtypeStruct(s, jnp.float32)
            for s in ((b, t, h, e), (b, h, e, columns), (b, h, t))
        ],
        grid=(blocks * b * h,),
        T=t,
        H=h,
        D=e,
        P=shape["PE"],
        COLUMNS=columns,
        BLOCKS=blocks,
        M=rows,
    )


def _rows(dims) -> int:
    """Return the rows of a program, so few that a wide head does not spill registers."""
    return 64 if max(dims) <= 128 else 16


def _columns(t, rows):
    return triton.cdiv(t, rows) * rows


# ------------------------------------------------------------------------------------------- copies


@triton.jit
def load_head(
    ptr, b, t0, h, ROW: tl.constexpr, T: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    M: tl.constexpr
):  # fmt: skip
    row_M1, column_1P = tl.arange(0, M)[:, None], tl.arange(0, P)[None, :]
    at_MP = ptr + (b * T + t0) * ROW + h * D + (row_M1 * ROW + column_1P)
    return tl.load(at_MP, mask=(t0 + row_M1 < T) & (column_1P < D), other=0.0)


@triton.jit
def store_copies(
    x_MP, straight_ptr, transposed_ptr, b, t0, h,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    STRAIGHT: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Store rows of a head, rounded.

    If COLUMNS is not 0, also store the transposed rows, with zeros from T on.
    """
    x_MP = rounded(x_MP, "tf32")
    if STRAIGHT:
        row_M1, column_1P = tl.arange(0, M)[:, None], tl.arange(0, P)[None, :]
        at_MP = straight_ptr + ((b * T + t0) * H + h) * D + (row_M1 * (H * D) + column_1P)
        tl.store(at_MP, x_MP, mask=(t0 + row_M1 < T) & (column_1P < D))
    if COLUMNS:
        column_P1, row_1M = tl.arange(0, P)[:, None], tl.arange(0, M)[None, :]
        at_PM = transposed_ptr + (b * H + h) * D * COLUMNS + t0 + (column_P1 * COLUMNS + row_1M)
        tl.store(
            at_PM,
            evens_first(tl.trans(x_MP), "tf32", P, M),
            mask=(column_P1 < D) & (t0 + row_1M < COLUMNS),
        )


@triton.jit
def tf32_kernel(
    q_ptr, k_ptr, v_ptr,
    q_straight_ptr, k_straight_ptr, v_straight_ptr,
    q_transposed_ptr, k_transposed_ptr, v_transposed_ptr,
    T: tl.constexpr, S: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, P: tl.constexpr, PE: tl.constexpr,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    Q_STRAIGHT: tl.constexpr, K_STRAIGHT: tl.constexpr, V_STRAIGHT: tl.constexpr,
    Q_COLUMNS: tl.constexpr, K_COLUMNS: tl.constexpr, V_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Copy M rows of a head of q, k or v. H is 0 for an array that is not copied."""
    h, t0, b = place(H + 2 * K, BLOCKS, M)
    if h < H:
        x_MP = load_head(q_ptr, b, t0, h, Q_ROW, T, D, P, M)
        store_copies(
            x_MP, q_straight_ptr, q_transposed_ptr, b, t0, h, T, H, D, P, Q_STRAIGHT, Q_COLUMNS, M
        )
    elif h < H + K:
        k = h - H
        k_MP = load_head(k_ptr + K_AT, b, t0, k, K_ROW, S, D, P, M)
        store_copies(
            k_MP, k_straight_ptr, k_transposed_ptr, b, t0, k, S, K, D, P, K_STRAIGHT, K_COLUMNS, M
        )
    else:
        v = h - H - K
        v_MP = load_head(v_ptr + V_AT, b, t0, v, V_ROW, S, E, PE, M)
        store_copies(
            v_MP, v_straight_ptr, v_transposed_ptr, b, t0, v, S, K, E, PE, V_STRAIGHT, V_COLUMNS, M
        )


@triton.jit
def tf32_dout_kernel(
    dout_ptr, out_ptr, straight_ptr, transposed_ptr, delta_ptr,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Copy M rows of a head of dO, and compute delta like `delta_kernel`."""
    h, t0, b = place(H, BLOCKS, M)
    dout_MP = load_head(dout_ptr, b, t0, h, H * D, T, D, P, M)
    out_MP = load_head(out_ptr, b, t0, h, H * D, T, D, P, M)
    store_copies(dout_MP, straight_ptr, transposed_ptr, b, t0, h, T, H, D, P, True, COLUMNS, M)
    rows_M = t0 + tl.arange(0, M)
    tl.store(delta_ptr + (b * H + h) * T + rows_M, tl.sum(dout_MP * out_MP, 1), mask=rows_M < T)


# --------------------------------------------------------------------------------- parts of kernels


@triton.jit
def transposed_offset(head, T: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """Return the offset of a head in a transposed copy for blocks of R rows."""
    return tl.cast(head, tl.int64) * (D * ((T + R - 1) // R * R))


@triton.jit
def load_transposed(ptr, start, T: tl.constexpr, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """Load the values of `load_rows` from a transposed copy, in the order of `evens_first`."""
    COLUMNS: tl.constexpr = (T + R - 1) // R * R
    at_PR = ptr + start + (tl.arange(0, P)[:, None] * COLUMNS + tl.arange(0, R)[None, :])
    return tl.trans(
        tl.load(at_PR, mask=tl.arange(0, P)[:, None] < D, other=0.0) if D < P else tl.load(at_PR)
    )


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """Round to TF32 if PRECISION is "tf32"."""
    if PRECISION == "tf32":
        return tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1
        )
    else:
        return x


@triton.jit
def operand(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Round a computed value to nearest, as a matmul operand of the given dtype."""
    if PRECISION == "tf32":
        # Fewer instructions than `rounded`: the tensor cores truncate the bits below TF32. The only
        # NaN that arithmetic produces is 0x7FFFFFFF, which must not become −0.
        return (tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFFEFFF) + 0x1000).to(
            tl.float32, bitcast=True
        )
    else:
        return x.to(DTYPE)


@triton.jit
def evens_first(x_RC, PRECISION: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Permute each group of 8 columns to even columns, then odd columns, if PRECISION is "tf32".

    In the result of a matmul, a thread holds two neighbouring columns. In a left operand, a thread
    holds two columns that are 4 apart. The contracted axis may have any order if both operands have
    the same order.
    """
    if PRECISION == "tf32":
        return tl.reshape(tl.permute(tl.reshape(x_RC, (R, C // 8, 4, 2)), (0, 1, 3, 2)), (R, C))
    else:
        return x_RC
