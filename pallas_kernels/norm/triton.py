"""Triton kernels of layer_norm (CENTRED: with mean, scale and bias) and rms_norm (without mean and
bias).

A row is read once and stays in registers. Forward: one program per tile of rows. Backward:
persistent programs loop over all tiles and sum dscale, dbias and dresidual_bias in registers, while
the next tiles are copied to shared memory.

Shapes: N rows, C channels, P programs. A tile is a tuple of CHUNKS arrays of (ROWS, LANES). If a
row of C channels is short enough, one warp has a tile, and the sum over a row needs no barrier.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _dispatch, _triton
from pallas_kernels.gemm.triton import clipped

# Measured on an H200 (docs/kernels/norm.md). Channels per thread. The backward pass also has warps
# per SM and pipeline stages, by the item size of total: four-byte rows need no copies ahead.
FORWARD_ELEMENTS = 24
BACKWARD = {2: (32, 8, 3), 4: (24, 12, 1)}
# For one more sum in registers, without spills at GPT-2's widths. Derived from the number of
# registers, not measured.
BACKWARD_WITH_BIAS = {2: (24, 8, 3), 4: (24, 10, 1)}
# For compute capability 10 (B200), where 24 channels of four bytes spill. Compiled, not measured.
BACKWARD_WITH_BIAS_10 = BACKWARD_WITH_BIAS | {4: (16, 10, 1)}
# For 16-bit rows of four warps, such as 1,600 channels: three programs per SM. Times of 36864×1600:
# two programs 132 µs, three 115, four 151; a copy takes 112.
FOUR_WARPS_A_ROW = 12
# Up to FEW_ROWS rows, for any dtype. Times of the kernel on an H100 with (24, 4, 2) and with
# (16, 16, 1): 512×4096 7.4 and 5.7 µs, 2048×4096 29.9 and 20.6 µs, 8192×768 18.5 and 13.7 µs.
# Rows of one warp: two stages, not measured again.
FEW_ROWS, BACKWARD_OF_FEW, BACKWARD_OF_FEW_SHORT = 8192, (16, 16, 1), (24, 4, 2)
ONE_WARP = 512  # channels
# Shared memory per program that every GPU from Ampere on has, minus the scratch of reductions.
MAX_SHARED_BYTES = 90_000


@triton.jit
def load_chunk(ptr, first, k, N, C, ROWS, LANES):
    """Load chunk k of the rows from `first` on, with 0 out of bounds.

    The load has no mask if no chunk of this shape can be out of bounds.
    """
    i, c = tl.arange(0, ROWS)[:, None], k * LANES + tl.arange(0, LANES)[None, :]
    ptr += tl.cast(first, tl.int64) * C + (i * C + c)
    if N % ROWS == 0 and (k + 1) * LANES <= C:
        chunk = tl.load(ptr)
    else:
        chunk = tl.load(ptr, mask=(first + i < N) & (c < C), other=0.0)
    return chunk


@triton.jit
def load_tile(ptr, first, N, C, ROWS, CHUNKS: tl.constexpr, LANES):
    tile = ()
    for k in tl.static_range(CHUNKS):
        tile += (load_chunk(ptr, first, k, N, C, ROWS, LANES),)
    return tile


@triton.jit
def store_chunk(ptr, chunk, first, k, N, C, ROWS, LANES):
    i, c = tl.arange(0, ROWS)[:, None], k * LANES + tl.arange(0, LANES)[None, :]
    ptr += tl.cast(first, tl.int64) * C + (i * C + c)
    if N % ROWS == 0 and (k + 1) * LANES <= C:
        tl.store(ptr, chunk.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr, chunk.to(ptr.dtype.element_ty), mask=(first + i < N) & (c < C))


@triton.jit
def store_sum(partial_ptr, chunk, vector, k, C, LANES):
    """Store the sum of chunk k over the program's rows as partial sum of a vector: 0, 1 or 2."""
    partial_ptr += vector * tl.num_programs(0) * C
    store_chunk(partial_ptr, tl.sum(chunk, 0, keep_dims=True), 0, k, 1, C, 1, LANES)


@triton.jit
def norm_forward(
    x_ptr,
    residual_ptr,
    scale_ptr,
    bias_ptr,
    residual_bias_ptr,
    y_ptr,
    total_ptr,
    stats_ptr,
    N: tl.constexpr,
    C: tl.constexpr,
    EPS: tl.constexpr,
    Y_SCALE: tl.constexpr,
    Y_LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
):
    CENTRED: tl.constexpr = bias_ptr is not None
    i, first = tl.arange(0, ROWS), tl.program_id(0) * ROWS
    if scale_ptr is not None:
        scale = load_tile(scale_ptr, 0, 1, C, 1, CHUNKS, LANES)
    if CENTRED:
        bias = load_tile(bias_ptr, 0, 1, C, 1, CHUNKS, LANES)
    x = load_tile(x_ptr, first, N, C, ROWS, CHUNKS, LANES)
    if residual_ptr is not None:
        residual = load_tile(residual_ptr, first, N, C, ROWS, CHUNKS, LANES)
        if residual_bias_ptr is not None:
            residual_bias = load_tile(residual_bias_ptr, 0, 1, C, 1, CHUNKS, LANES)
        total = ()
        for k in tl.static_range(CHUNKS):
            chunk = x[k].to(tl.float32) + residual[k].to(tl.float32)
            if residual_bias_ptr is not None:
                chunk += residual_bias[k].to(tl.float32)
            total += (chunk.to(total_ptr.dtype.element_ty),)
        for k in tl.static_range(CHUNKS):
            store_chunk(total_ptr, total[k], first, k, N, C, ROWS, LANES)
        x = total
    mean = 0.0
    if CENTRED:
        row_sum = tl.zeros((ROWS, LANES), tl.float32)
        for k in tl.static_range(CHUNKS):
            row_sum += x[k].to(tl.float32)
        mean = tl.sum(row_sum, 1) / C
        tl.store(stats_ptr + first + i, mean, mask=first + i < N)
        mean = mean[:, None]
    squares = tl.zeros((ROWS, LANES), tl.float32)
    for k in tl.static_range(CHUNKS):
        centred = x[k].to(tl.float32) - mean
        if (k + 1) * LANES > C:
            centred = tl.where(k * LANES + tl.arange(0, LANES)[None, :] < C, centred, 0.0)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares, 1) / C + EPS)
    tl.store(stats_ptr + (N if CENTRED else 0) + first + i, rstd, mask=first + i < N)
    rstd = rstd[:, None]
    for k in tl.static_range(CHUNKS):
        y = (x[k].to(tl.float32) - mean) * rstd
        if scale_ptr is not None:
            y *= scale[k].to(tl.float32)
        if CENTRED:
            y += bias[k].to(tl.float32)
        if Y_SCALE is not None:
            y = clipped(y * Y_SCALE, Y_LARGEST)
        store_chunk(y_ptr, y, first, k, N, C, ROWS, LANES)


@triton.jit
def norm_backward(
    dy_ptr,
    dtotal_ptr,
    total_ptr,
    stats_ptr,
    scale_ptr,
    dx_ptr,
    partial_ptr,
    N: tl.constexpr,
    C: tl.constexpr,
    CENTRED: tl.constexpr,
    RESIDUAL_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    i = tl.arange(0, ROWS)
    if scale_ptr is not None:
        scale = load_tile(scale_ptr, 0, 1, C, 1, CHUNKS, LANES)
    dscale, dbias, dresidual_bias = (), (), ()
    for k in tl.static_range(CHUNKS):  # noqa: B007
        if scale_ptr is not None:
            dscale += (tl.zeros((ROWS, LANES), tl.float32),)
        if CENTRED:
            dbias += (tl.zeros((ROWS, LANES), tl.float32),)
        if RESIDUAL_BIAS:
            dresidual_bias += (tl.zeros((ROWS, LANES), tl.float32),)
    for first in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        dy = load_tile(dy_ptr, first, N, C, ROWS, CHUNKS, LANES)
        total = load_tile(total_ptr, first, N, C, ROWS, CHUNKS, LANES)
        if dtotal_ptr is not None:
            dtotal = load_tile(dtotal_ptr, first, N, C, ROWS, CHUNKS, LANES)
        rstd = tl.load(
            stats_ptr + (N if CENTRED else 0) + first + i, mask=first + i < N, other=0.0
        )[:, None]
        mean = 0.0
        if CENTRED:
            mean = tl.load(stats_ptr + first + i, mask=first + i < N, other=0.0)[:, None]
        sum_g, sum_gx = tl.zeros((ROWS, LANES), tl.float32), tl.zeros((ROWS, LANES), tl.float32)
        old_dscale, old_dbias, old_dresidual_bias = dscale, dbias, dresidual_bias
        dscale, dbias, dresidual_bias = (), (), ()
        for k in tl.static_range(CHUNKS):
            # dy is 0 out of bounds, so all terms of the sums are 0.
            g = dy[k].to(tl.float32)
            g_centred = g * (total[k].to(tl.float32) - mean)
            if CENTRED:
                dbias += (old_dbias[k] + g,)
            if scale_ptr is not None:
                dscale += (old_dscale[k] + g_centred * rstd,)
                g *= scale[k].to(tl.float32)
                g_centred *= scale[k].to(tl.float32)
            sum_g += g
            sum_gx += g_centred
        # dx = rstd · g + slope · (total − mean) + shift
        slope = tl.sum(sum_gx, 1)[:, None] / C * (-rstd * rstd * rstd)
        if CENTRED:
            shift = tl.sum(sum_g, 1)[:, None] / C * -rstd
        for k in tl.static_range(CHUNKS):
            g = dy[k].to(tl.float32)
            if scale_ptr is not None:
                g *= scale[k].to(tl.float32)
            dx = (total[k].to(tl.float32) - mean) * slope
            if CENTRED:
                dx += shift
            dx += g * rstd
            if dtotal_ptr is not None:
                dx += dtotal[k].to(tl.float32)
            if RESIDUAL_BIAS:
                dresidual_bias += (old_dresidual_bias[k] + dx,)
            store_chunk(dx_ptr, dx, first, k, N, C, ROWS, LANES)
    partial_ptr += tl.program_id(0) * C
    for k in tl.static_range(CHUNKS):
        if scale_ptr is not None:
            store_sum(partial_ptr, dscale[k], 0, k, C, LANES)
        if CENTRED:
            store_sum(partial_ptr, dbias[k], 1, k, C, LANES)
        if RESIDUAL_BIAS:
            store_sum(partial_ptr, dresidual_bias[k], 2, k, C, LANES)


@triton.jit
def sum_partials(
    partial_ptr,
    dscale_ptr,
    dbias_ptr,
    dresidual_bias_ptr,
    P: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Add the partial sums of the programs in a fixed order.

    The grid is (C / LANES, number of vectors among dscale, dbias, dresidual_bias).
    """
    c = (tl.program_id(0) * LANES + tl.arange(0, LANES))[None, :]
    partial_ptr += tl.program_id(1) * P * C
    total = tl.zeros((ROWS, LANES), tl.float32)
    for first in range(0, P, ROWS):
        p = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(partial_ptr + p * C + c, mask=(p < P) & (c < C), other=0.0)
    total = tl.sum(total, 0, keep_dims=True)
    if tl.program_id(1) == 0:
        tl.store(dscale_ptr + c, total.to(dscale_ptr.dtype.element_ty), mask=c < C)
    elif tl.program_id(1) == 1:
        tl.store(dbias_ptr + c, total.to(dbias_ptr.dtype.element_ty), mask=c < C)
    else:
        tl.store(dresidual_bias_ptr + c, total.to(dresidual_bias_ptr.dtype.element_ty), mask=c < C)


def forward(options, x, residual, scale_C, bias_C, residual_bias_C):
    """`run("forward", …)` of the package."""
    n, c = x.shape
    dtype, y_scale = options.stored
    tile = _tile(n, c, FORWARD_ELEMENTS, x.dtype, options.out_dtype)
    y_NC, total_NC, stats_SN = _triton.call(
        norm_forward,
        *(x, residual, scale_C, bias_C, residual_bias_C),
        out=[
            jax.ShapeDtypeStruct((n, c), dtype),
            jax.ShapeDtypeStruct((1, 1) if residual is None else (n, c), x.dtype),
            jax.ShapeDtypeStruct((1 + options.centred, n), jnp.float32),
        ],
        grid=(triton.cdiv(n, tile["ROWS"]),),
        EPS=options.eps,
        Y_SCALE=y_scale,
        Y_LARGEST=float(jnp.finfo(dtype).max),
        **tile,
    )
    return y_NC, None if residual is None else total_NC, stats_SN


def backward(options, dy, dtotal, total, stats, scale_C):
    """`run("backward", …)` of the package."""
    n, c = total.shape
    itemsize, residual_bias = total.dtype.itemsize, options.residual_bias
    table = BACKWARD
    if residual_bias:
        on_10 = (_dispatch.capability() or (9, 0))[0] == 10
        table = BACKWARD_WITH_BIAS_10 if on_10 else BACKWARD_WITH_BIAS
    few = BACKWARD_OF_FEW if c > ONE_WARP else BACKWARD_OF_FEW_SHORT
    elements, warps_per_sm, stages = few if n <= FEW_ROWS else table[itemsize]
    tile = _tile(n, c, elements, dy.dtype, total.dtype)
    if residual_bias and n > FEW_ROWS and itemsize == 2 and tile["num_warps"] == 4:
        warps_per_sm = FOUR_WARPS_A_ROW
    # A CPU device, on which the interpreter runs, has no attribute core_count.
    sms = getattr(jax.devices()[0], "core_count", 1)
    tiles, most = triton.cdiv(n, tile["ROWS"]), max(1, warps_per_sm // tile["num_warps"]) * sms
    # The smallest number of programs with the same number of iterations: 512 for 4,096 rows. The
    # partial sums of 528 programs would need a second iteration of `sum_partials`.
    programs = triton.cdiv(tiles, triton.cdiv(tiles, most))
    bytes_per_channel = dy.dtype.itemsize + itemsize * (1 if dtotal is None else 2)
    copied_ahead = (stages - 1) * tile["ROWS"] * tile["CHUNKS"] * tile["LANES"] * bytes_per_channel
    sums = 0 if scale_C is None else 1 + options.centred + residual_bias
    dx_NC, partial_SPC = _triton.call(
        norm_backward,
        *(dy, dtotal, total, stats, scale_C),
        out=[
            jax.ShapeDtypeStruct((n, c), total.dtype),
            jax.ShapeDtypeStruct((sums, programs, c) if sums else (1, 1, 1), jnp.float32),
        ],
        grid=(programs,),
        CENTRED=options.centred,
        RESIDUAL_BIAS=residual_bias,
        STAGES=stages if copied_ahead <= MAX_SHARED_BYTES else 1,
        **tile,
    )
    if scale_C is None:
        return dx_NC, None, None, None
    sums_C = _triton.call(
        sum_partials,
        partial_SPC,
        out=[jax.ShapeDtypeStruct((c if row < sums else 1,), scale_C.dtype) for row in range(3)],
        grid=(triton.cdiv(c, 16), sums),
        num_warps=16,
        P=programs,
        C=c,
        ROWS=512,
        LANES=16,
    )
    return dx_NC, *(row_C if row < sums else None for row, row_C in enumerate(sums_C))


def _tile(n: int, c: int, elements: int, *dtypes: jnp.dtype) -> dict:
    """Return the tile for rows of these dtypes, with at most `elements` elements per thread.

    Long rows use more warps.
    """
    # 16-byte accesses, or the largest that the alignment of a row allows.
    vector = math.gcd(c, 16 // min(dtype.itemsize for dtype in dtypes))
    warps = min(triton.next_power_of_2(triton.cdiv(c, 32 * max(elements, vector))), 32)
    lanes = min(32 * vector * warps, triton.next_power_of_2(c))
    chunks = triton.cdiv(c, lanes)
    # Short rows share a warp.
    rows = 2 ** int(math.log2(max(1, 32 * elements * warps // (chunks * lanes))))
    rows = min(rows, 16, triton.next_power_of_2(n))
    return {"num_warps": warps, "N": n, "C": c, "ROWS": rows, "CHUNKS": chunks, "LANES": lanes}
