"""Triton kernels of `rotary_qkv`.

A program computes ROWS consecutive rows of D channels of the packed projection: queries, keys and
values of one token or of neighbouring tokens. Rows of values have the angle 0 and no norm.

Shapes: N tokens, H heads of queries, G of keys and of values, D channels, E angles, TABLE rows of
cos and sin: the rows of one sequence, which all sequences share, or the rows of the batch.
"""

import jax
import triton
import triton.language as tl

from pallas_kernels import _triton

# Elements of a program's tile: 16 for each thread, i.e. two vectors of 16 bytes in a 16-bit dtype.
# Not tuned.
ELEMENTS, WARPS = 2048, 4


def forward(qkv_BTO, cos_BTE, sin_BTE, *, options):
    """Return q, k, v."""
    b, t, o = qkv_BTO.shape
    split, d = 1 + options.pair_heads, o // options.packed_heads
    out = [
        jax.ShapeDtypeStruct((b, t * split, heads // split, d), qkv_BTO.dtype)
        for heads in (options.heads, options.key_heads, options.key_heads)
    ]
    arrays = (qkv_BTO, cos_BTE, sin_BTE)
    return _launch(rotary_forward_kernel, *arrays, out=out, n=b * t, cos=cos_BTE, options=options)


def backward(dq, dk, dv, cos_BTE, sin_BTE, qkv_BTO, *, options):
    """Return (dqkv,), the gradient of the packed projection `qkv_BTO`, None without a norm."""
    b, t, d = dq.shape[0], dq.shape[1] // (1 + options.pair_heads), dq.shape[-1]
    out = [jax.ShapeDtypeStruct((b, t, options.packed_heads * d), dq.dtype)]
    arrays = (dq, dk, dv, cos_BTE, sin_BTE, qkv_BTO)
    return _launch(rotary_backward_kernel, *arrays, out=out, n=b * t, cos=cos_BTE, options=options)


def _launch(kernel, *arrays, out, n, cos, options):
    d = sum(x.size for x in out) // (n * options.packed_heads)
    rows = max(ELEMENTS // d, 1)
    return _triton.call(
        kernel,
        *arrays,
        out=out,
        grid=(triton.cdiv(n * options.packed_heads, rows),),
        N=n,
        TABLE=cos.shape[0] * cos.shape[1],
        D=d,
        E=cos.shape[2],
        ROWS=rows,
        OPTIONS=options,
        num_warps=WARPS,
    )


@triton.jit
def load_row(ptr, row, mask, D: tl.constexpr, E: tl.constexpr, OPTIONS: tl.constexpr):
    """Load rows as fp32: the two channels of each pair, (ROWS, E), and the other channels.

    Without other channels, the third result repeats the second.
    """
    start, mask = ptr + (row * D)[:, None], mask[:, None]
    if OPTIONS.pairs == "adjacent":
        pairs = tl.load(start + tl.arange(0, 2 * E)[None, :], mask=mask, other=0.0)
        a, b = tl.split(tl.reshape(pairs.to(tl.float32), (row.shape[0], E, 2)))
    else:
        a = tl.load(start + tl.arange(0, E)[None, :], mask=mask, other=0.0)
        b = tl.load(start + E + tl.arange(0, E)[None, :], mask=mask, other=0.0)
        a, b = a.to(tl.float32), b.to(tl.float32)
    rest = b
    if D > 2 * E:
        columns = 2 * E + tl.arange(0, D - 2 * E)[None, :]
        rest = tl.load(start + columns, mask=mask, other=0.0).to(tl.float32)
    return a, b, rest


@triton.jit
def store_row(ptr, row, mask, a, b, rest, D: tl.constexpr, E: tl.constexpr, OPTIONS: tl.constexpr):
    """Store the parts of `load_row`."""
    start, mask = ptr + (row * D)[:, None], mask[:, None]
    dtype: tl.constexpr = ptr.dtype.element_ty
    if OPTIONS.pairs == "adjacent":
        pairs = tl.reshape(tl.join(a.to(dtype), b.to(dtype)), (row.shape[0], 2 * E))
        tl.store(start + tl.arange(0, 2 * E)[None, :], pairs, mask=mask)
    else:
        tl.store(start + tl.arange(0, E)[None, :], a.to(dtype), mask=mask)
        tl.store(start + E + tl.arange(0, E)[None, :], b.to(dtype), mask=mask)
    if D > 2 * E:
        columns = 2 * E + tl.arange(0, D - 2 * E)[None, :]
        tl.store(start + columns, rest.to(dtype), mask=mask)


@triton.jit
def row_sum(a, b, rest, D: tl.constexpr, E: tl.constexpr):
    """Sum the parts of each row."""
    total = tl.sum(a, 1) + tl.sum(b, 1)
    if D > 2 * E:
        total += tl.sum(rest, 1)
    return total


@triton.jit
def rows_of(N: tl.constexpr, ROWS: tl.constexpr, OPTIONS: tl.constexpr):
    """Return this program's rows in the packed projection with a mask of the rows in bounds; the
    rows' tokens and heads with a mask of the rows that are rotated; and the rows in q, in k and in
    v, each with the mask of the rows that are there."""
    H: tl.constexpr = OPTIONS.heads
    G: tl.constexpr = OPTIONS.key_heads
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // (H + 2 * G)
    head, inside = (row - token * (H + 2 * G)).to(tl.int32), token < N
    turns = inside & (head < H + G)
    q = token * H + head, inside & (head < H)
    k = token * G + head - H, turns & (head >= H)
    v = token * G + head - H - G, inside & (head >= H + G)
    return (row, inside), (token, head, turns), q, k, v


@triton.jit
def load_angle(
    cos_ptr, sin_ptr, token, head, mask, TABLE: tl.constexpr, E: tl.constexpr, PAIR: tl.constexpr
):
    """Load cos and sin, (ROWS, E), with 1 and 0 (the angle 0) where the mask is false."""
    time = token * 2 + head % 2 if PAIR else token
    at = (time % TABLE)[:, None] * E + tl.arange(0, E)[None, :]
    cos = tl.load(cos_ptr + at, mask=mask[:, None], other=1.0)
    return cos, tl.load(sin_ptr + at, mask=mask[:, None], other=0.0)


@triton.jit
def rotary_forward_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, N: tl.constexpr, TABLE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    rows, turning, in_q, in_k, in_v = rows_of(N, ROWS, OPTIONS)
    a, b, rest = load_row(qkv_ptr, *rows, D, E, OPTIONS)
    cos, sin = load_angle(cos_ptr, sin_ptr, *turning, TABLE, E, OPTIONS.pair_heads)
    if OPTIONS.eps is not None:
        rstd = tl.rsqrt(row_sum(a * a, b * b, rest * rest, D, E) / D + OPTIONS.eps)
        rstd = tl.where(turning[2], rstd, 1.0)[:, None]
        a, b, rest = a * rstd, b * rstd, rest * rstd
    a, b = a * cos - b * sin, b * cos + a * sin
    store_row(q_ptr, *in_q, a, b, rest, D, E, OPTIONS)
    store_row(k_ptr, *in_k, a, b, rest, D, E, OPTIONS)
    store_row(v_ptr, *in_v, a, b, rest, D, E, OPTIONS)


@triton.jit
def rotary_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, qkv_ptr, dqkv_ptr, N: tl.constexpr,
    TABLE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    rows, turning, in_q, in_k, in_v = rows_of(N, ROWS, OPTIONS)
    # A row is in one of the three arrays. Masked loads from the other two arrays return zeros.
    a, b, rest = load_row(dq_ptr, *in_q, D, E, OPTIONS)
    ka, kb, kr = load_row(dk_ptr, *in_k, D, E, OPTIONS)
    va, vb, vr = load_row(dv_ptr, *in_v, D, E, OPTIONS)
    a, b, rest = a + ka + va, b + kb + vb, rest + kr + vr
    cos, sin = load_angle(cos_ptr, sin_ptr, *turning, TABLE, E, OPTIONS.pair_heads)
    a, b = a * cos + b * sin, b * cos - a * sin
    if OPTIONS.eps is not None:
        xa, xb, xr = load_row(qkv_ptr, rows[0], turning[2], D, E, OPTIONS)
        rstd = tl.rsqrt(row_sum(xa * xa, xb * xb, xr * xr, D, E) / D + OPTIONS.eps)
        # 0 for values: x of values is loaded as zeros.
        along = (row_sum(a * xa, b * xb, rest * xr, D, E) / D * rstd * rstd)[:, None]
        rstd = tl.where(turning[2], rstd, 1.0)[:, None]
        a, b, rest = rstd * (a - xa * along), rstd * (b - xb * along), rstd * (rest - xr * along)
    store_row(dqkv_ptr, *rows, a, b, rest, D, E, OPTIONS)
