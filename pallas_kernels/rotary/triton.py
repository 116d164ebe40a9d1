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
    split, d = 2 if options.pair_heads else 1, o // options.packed_heads
    out = [
        jax.ShapeDtypeStruct((b, t * split, heads // split, d), qkv_BTO.dtype)
        for heads in (options.heads, options.key_heads, options.key_heads)
    ]
    return _launch(
        rotary_forward_kernel, qkv_BTO, cos_BTE, sin_BTE, out=out, cos=cos_BTE, how=options
    )


def backward(dq, dk, dv, cos_BTE, sin_BTE, *qkv_BTO, options):
    """Return (dqkv,), the gradient of the packed projection."""
    b, t, d = dq.shape[0], dq.shape[1] // (2 if options.pair_heads else 1), dq.shape[-1]
    out = [jax.ShapeDtypeStruct((b, t, options.packed_heads * d), dq.dtype)]
    # Without a norm the kernel does not read this pointer.
    arrays = (dq, dk, dv, cos_BTE, sin_BTE, *(qkv_BTO or (dq,)))
    return _launch(rotary_backward_kernel, *arrays, out=out, cos=cos_BTE, how=options)


def _launch(kernel, *arrays, out, cos, how):
    """Launch a kernel. The first and last axis of the first output are the batch and D."""
    d = out[0].shape[-1] // (how.packed_heads if len(out) == 1 else 1)
    times = cos.shape[1] // (2 if how.pair_heads else 1)
    n, rows = out[0].shape[0] * times, max(ELEMENTS // d, 1)
    return _triton.call(
        kernel,
        *arrays,
        out=out,
        grid=(triton.cdiv(n * how.packed_heads, rows),),
        N=n,
        TABLE=cos.shape[0] * cos.shape[1],
        H=how.heads,
        G=how.key_heads,
        D=d,
        E=cos.shape[2],
        ADJACENT=how.pairs == "adjacent",
        EPS=how.eps,
        PAIR=how.pair_heads,
        ROWS=rows,
        num_warps=WARPS,
    )


@triton.jit
def load_row(ptr, offset, mask, D: tl.constexpr, E: tl.constexpr, ADJACENT: tl.constexpr):
    """Load rows as fp32: the two channels of each pair, (ROWS, E), and the other channels.

    Without other channels, the third result repeats the second.
    """
    ROWS: tl.constexpr = offset.shape[0]
    start = ptr + offset[:, None]
    if ADJACENT:
        pairs = tl.load(start + tl.arange(0, 2 * E)[None, :], mask=mask[:, None], other=0.0)
        a, b = tl.split(tl.reshape(pairs.to(tl.float32), (ROWS, E, 2)))
    else:
        a = tl.load(start + tl.arange(0, E)[None, :], mask=mask[:, None], other=0.0)
        b = tl.load(start + E + tl.arange(0, E)[None, :], mask=mask[:, None], other=0.0)
        a, b = a.to(tl.float32), b.to(tl.float32)
    rest = b
    if D > 2 * E:
        columns = 2 * E + tl.arange(0, D - 2 * E)[None, :]
        rest = tl.load(start + columns, mask=mask[:, None], other=0.0).to(tl.float32)
    return a, b, rest


@triton.jit
def store_row(
    ptr, offset, mask, a, b, rest, D: tl.constexpr, E: tl.constexpr, ADJACENT: tl.constexpr
):
    """Store the parts of `load_row`."""
    ROWS: tl.constexpr = offset.shape[0]
    start = ptr + offset[:, None]
    dtype: tl.constexpr = ptr.dtype.element_ty
    if ADJACENT:
        pairs = tl.reshape(tl.join(a.to(dtype), b.to(dtype)), (ROWS, 2 * E))
        tl.store(start + tl.arange(0, 2 * E)[None, :], pairs, mask=mask[:, None])
    else:
        tl.store(start + tl.arange(0, E)[None, :], a.to(dtype), mask=mask[:, None])
        tl.store(start + E + tl.arange(0, E)[None, :], b.to(dtype), mask=mask[:, None])
    if D > 2 * E:
        columns = 2 * E + tl.arange(0, D - 2 * E)[None, :]
        tl.store(start + columns, rest.to(dtype), mask=mask[:, None])


@triton.jit
def row_sum(a, b, rest, D: tl.constexpr, E: tl.constexpr):
    """Sum the parts of each row."""
    total = tl.sum(a, 1) + tl.sum(b, 1)
    if D > 2 * E:
        total += tl.sum(rest, 1)
    return total


@triton.jit
def row_of(N: tl.constexpr, H: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr):
    """Return this program's rows in the packed projection, the rows' tokens and heads, and a mask
    of the rows in bounds."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // (H + 2 * G)
    return row, token, (row - token * (H + 2 * G)).to(tl.int32), token < N


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
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ADJACENT: tl.constexpr,
    EPS: tl.constexpr, PAIR: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row, token, head, inside = row_of(N, H, G, ROWS)
    turns = inside & (head < H + G)
    a, b, rest = load_row(qkv_ptr, row * D, inside, D, E, ADJACENT)
    cos, sin = load_angle(cos_ptr, sin_ptr, token, head, turns, TABLE, E, PAIR)
    if EPS is not None:
        rstd = tl.rsqrt(row_sum(a * a, b * b, rest * rest, D, E) / D + EPS)
        rstd = tl.where(turns, rstd, 1.0)[:, None]
        a, b, rest = a * rstd, b * rstd, rest * rstd
    a, b = a * cos - b * sin, b * cos + a * sin
    store_row(q_ptr, (token * H + head) * D, inside & (head < H), a, b, rest, D, E, ADJACENT)
    store_row(k_ptr, (token * G + head - H) * D, turns & (head >= H), a, b, rest, D, E, ADJACENT)
    store_row(
        v_ptr, (token * G + head - H - G) * D, inside & (head >= H + G), a, b, rest, D, E,
        ADJACENT,
    )  # fmt: skip


@triton.jit
def rotary_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, qkv_ptr, dqkv_ptr, N: tl.constexpr,
    TABLE: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ADJACENT: tl.constexpr, EPS: tl.constexpr, PAIR: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row, token, head, inside = row_of(N, H, G, ROWS)
    turns = inside & (head < H + G)
    # A row is in one of the three arrays. Masked loads from the other two arrays return zeros.
    a, b, rest = load_row(dq_ptr, (token * H + head) * D, inside & (head < H), D, E, ADJACENT)
    ka, kb, kr = load_row(dk_ptr, (token * G + head - H) * D, turns & (head >= H), D, E, ADJACENT)
    va, vb, vr = load_row(
        dv_ptr, (token * G + head - H - G) * D, inside & (head >= H + G), D, E, ADJACENT
    )
    a, b, rest = a + ka + va, b + kb + vb, rest + kr + vr
    cos, sin = load_angle(cos_ptr, sin_ptr, token, head, turns, TABLE, E, PAIR)
    a, b = a * cos + b * sin, b * cos - a * sin
    if EPS is not None:
        xa, xb, xr = load_row(qkv_ptr, row * D, turns, D, E, ADJACENT)
        rstd = tl.rsqrt(row_sum(xa * xa, xb * xb, xr * xr, D, E) / D + EPS)
        # 0 for values: x of values is loaded as zeros.
        along = (row_sum(a * xa, b * xb, rest * xr, D, E) / D * rstd * rstd)[:, None]
        rstd = tl.where(turns, rstd, 1.0)[:, None]
        a, b, rest = rstd * (a - xa * along), rstd * (b - xb * along), rstd * (rest - xr * along)
    store_row(dqkv_ptr, row * D, inside, a, b, rest, D, E, ADJACENT)
