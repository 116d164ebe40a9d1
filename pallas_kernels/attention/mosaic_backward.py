"""Backward pass of flash attention on Hopper (Pallas Mosaic GPU): TMA, wgmma, a persistent grid
with one thread block (CTA) per SM.

This module selects tile sizes, the order of the work items and the method of summing dQ. It
computes D, and launches the kernel of `mosaic_backward_kernel`. The docstring of
`mosaic_backward_kernel` describes the algorithm and the barriers.

Shapes: B batch, T time, H query heads, K key heads, D head dimension; R = 2, the statistics
log₂e·L and −D of a query.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _dispatch, _mosaic
from pallas_kernels._mosaic import LOG2_E, pl, plgpu, schedule
from pallas_kernels.attention import documents, mosaic_forward
from pallas_kernels.attention.mosaic_backward_kernel import Block, Fp8
from pallas_kernels.attention.mosaic_backward_tiles import (
    KEYS,
    MULTIPLIERS,
    Tiles,
    queries_in_a_block,
    scratch_types,
    why_not_tiles,
)
from pallas_kernels.attention.mosaic_forward import padded


def stores_fp8(batch: int, length: int, heads: int) -> bool:
    """Return whether `backward` can store the gradients of packed operands in FP8."""
    return length % KEYS == 0 and whole_heads_are_faster(batch * heads, length, _mosaic.num_sms())


def whole_heads_are_faster(heads: int, length: int, blocks: int) -> bool:
    """Return whether the idle thread blocks of the last round cost less than the two passes over dQ
    of split heads. The passes are estimated at 128/T of the kernel's time."""
    rounds = pl.cdiv(heads, blocks)
    return rounds * blocks <= heads * (1 + KEYS / length)


# jit: trace and lower `backward` once for all layers. Tracing and lowering for each layer took 28 s
# of a step's compilation, and no cache of JAX covers this time.
@functools.partial(
    jax.jit,
    static_argnames=("causal", "scale", "window", "deterministic", "true_fp32", "bias", "tiles"),
)
def backward(
    operands,
    bounds,
    lse_BHT,
    dout_BTHD,
    out_BTHD,
    dlse_BHT,
    *,
    causal: bool,
    scale: float,
    window: int | None,
    deterministic: bool,
    true_fp32: bool,
    bias: bool = False,
    fp8_scale: jax.Array | None = None,
    tiles: Tiles | None = None,
):
    """Return the gradients, a tuple like `operands`. With `bias` return (gradients, Σ dQ, Σ dO):
    the sums over all queries have shape H·D and dtype fp32. With `fp8_scale` the gradients are
    (dqkv_BT3HD, dqkv_3HDBT): dqkv times the factor in e5m2, and a transposed copy.

    Args:
        operands: (q_BTHD, k_BTKD, v_BTKD) or (qkv_BT3HD,) in bf16 or fp16, D of 64 or 128.
        bounds: `Documents`, or None. With documents `window` is None: the bounds include the
            window.
        out_BTHD, lse_BHT: the output, and L in fp32.
        dout_BTHD, dlse_BHT: gradients of the output and of L; dlse_BHT may be None.
        deterministic: use whole heads only: the same five matmuls, but at most B·K thread blocks
            have work.
        true_fp32: ignored: no matmul is fp32.
        bias: for packed operands only. Σ dQ is the sum of the rounded dQ, or of the fp32 sums if a
            Triton kernel converts the fp32 sums to dQ.
        fp8_scale: for calls where `stores_fp8` is True; fp32 scalar, or None.
        tiles: None for the tiles of mosaic_tiles.json.

    Raises:
        ValueError: the tiles cannot be compiled.
    """
    del true_fp32
    batch, length, _, head_dim = dout_BTHD.shape
    key_heads = operands[-1].shape[-2]
    tiles = tiles or Tiles(**mosaic_forward.tiles("backward", head_dim, causal))
    if (why := why_not_tiles(tiles, head_dim)) is not None:
        raise ValueError(f"flash_attention: {tiles} cannot be used with {head_dim=}: {why}")
    whole_heads = tiles.whole_heads
    if whole_heads is None:
        whole_heads = whole_heads_are_faster(batch * key_heads, length, _mosaic.num_sms())
    whole_heads = whole_heads or deterministic

    assert fp8_scale is None or (whole_heads and length % KEYS == 0 and len(operands) == 1)
    rows_BHRT, zeros_BTHD, dout_HD = _lse_and_delta(
        lse_BHT, dout_BTHD, out_BTHD, dlse_BHT, sums=not whole_heads, bias=bias
    )
    *operands, dout_BTHD = map(padded, (*operands, dout_BTHD))
    gradients, dq_HD = _gradients(
        tuple(operands),
        bounds,
        rows_BHRT,
        dout_BTHD,
        zeros_BTHD,
        length,
        causal=causal,
        scale=scale,
        window=window,
        whole_heads=whole_heads,
        bias=bias,
        fp8_scale=fp8_scale,
        tiles=tiles,
    )
    if fp8_scale is None:
        gradients = tuple(x[:, :length] for x in gradients)
    return (gradients, dq_HD, dout_HD) if bias else gradients


def _lse_and_delta(lse_BHT, dout_BTHD, out_BTHD, dlse_BHT, *, sums, bias):
    """Return (log₂e·L, −D), zeros for dQ or None, and Σ dO or None.

    `sums` requests the zeros, `bias` requests Σ dO. L, D and dO are 0 for queries that are out of
    bounds, so the contributions of these queries are 0.
    """
    batch, length, heads, head_dim = dout_BTHD.shape
    rows = length + -length % queries_in_a_block(head_dim)
    zeros = length + -length % 8
    if _dispatch.why_not_triton() is None:
        from pallas_kernels.attention import triton_passes

        # One pass. XLA computes D and L with one thread per row (0.4 ms for 64×1024×12×64 on an
        # H200), and computes one array of zeros that is copied for each layer.
        rows_BHRT, zeros_BTHD, dout_HD = triton_passes.delta(
            out_BTHD, dout_BTHD, lse_BHT, rows=rows, zeros=zeros if sums else 0, sums=bias
        )
    else:
        delta_BHT = jnp.einsum(
            "bthd,bthd->bht", dout_BTHD.astype(jnp.float32), out_BTHD.astype(jnp.float32)
        )
        rows_BHRT = jnp.stack(
            [lse_BHT * jnp.float32(LOG2_E), -lax.optimization_barrier(delta_BHT)], axis=2
        )
        rows_BHRT = jnp.pad(rows_BHRT, [(0, 0), (0, 0), (0, 0), (0, rows - length)])
        zeros_BTHD = jnp.zeros((batch, zeros, heads, head_dim), jnp.float32) if sums else None
        dout_HD = _over_queries(dout_BTHD) if bias else None
    if dlse_BHT is not None:
        rows_BHRT = rows_BHRT.at[:, :, 1, :length].add(dlse_BHT)
    return rows_BHRT, zeros_BTHD, dout_HD


def _over_queries(x_BTHD):
    return x_BTHD.astype(jnp.float32).sum((0, 1))


def blocks_of_queries(j, first_query=None, last_query=None, *, length, queries, causal, window):
    """Return (first, stop): the blocks first … stop − 1 of queries see keys of key block j.

    Args:
        first_query, last_query: with documents, the first and the last query that see such a key.
    """
    first, stop = 0, pl.cdiv(length, queries)
    if causal:
        first = j * (KEYS // queries)
    elif first_query is not None:
        first = lax.div(first_query, jnp.int32(queries))
    if last_query is not None:
        stop = lax.div(last_query, jnp.int32(queries)) + 1
    if window is not None:
        behind = j * KEYS + (KEYS + window - 2)
        if isinstance(j, int):
            stop = min(stop, behind // queries + 1)
        else:
            stop = jnp.minimum(stop, lax.div(behind, jnp.int32(queries)) + 1)
    return first, stop


def _steps_of_documents(bounds, queries_of, key_blocks):
    """Return, for each block of keys, the number of blocks of queries that see the block: an array
    of B×key blocks."""

    def steps(j, first_query, last_query):
        first, stop = queries_of(j, first_query, last_query)
        return stop - first

    blocks = jnp.arange(key_blocks, dtype=jnp.int32)
    ends = bounds.first_BT[:, ::KEYS], bounds.last_BT[:, KEYS - 1 :: KEYS]
    return jax.vmap(jax.vmap(steps), (None, 0, 0))(blocks, *ends)


def _gradients(
    operands,
    bounds,
    rows_BHRT,
    dout_BTHD,
    zeros_BTHD,
    length,
    *,
    causal,
    scale,
    window,
    whole_heads,
    bias,
    fp8_scale,
    tiles,
):
    """Return the gradients of the padded operands, and Σ dQ with `bias`, else None."""
    batch, padded_length, query_heads, head_dim = dout_BTHD.shape
    packed = len(operands) == 1
    key_heads = operands[-1].shape[-2]
    group = query_heads // key_heads
    dtype = dout_BTHD.dtype
    queries = queries_in_a_block(head_dim)
    key_blocks = pl.cdiv(length, KEYS)
    heads = batch * key_heads
    blocks = min(_mosaic.num_sms(), heads if whole_heads else heads * key_blocks)

    queries_of = functools.partial(
        blocks_of_queries, length=length, queries=queries, causal=causal, window=window
    )
    # Plus one for the start and end of each work item.
    table, arrays = None, [dout_BTHD, rows_BHRT]
    if bounds is not None:
        bounds = documents.padded(bounds)
        costs_BI = group * _steps_of_documents(bounds, queries_of, key_blocks) + 1
        costs_BI = costs_BI.sum(1, keepdims=True) if whole_heads else costs_BI
        table = documents.schedule_by_cost(costs_BI, key_heads, blocks)
        arrays += [table, *bounds]
    elif not whole_heads:
        spans = map(queries_of, range(key_blocks))
        costs = [group * (stop - first) + 1.0 for first, stop in spans]
        table = jnp.asarray(schedule(heads, costs, blocks))
        arrays += [table]
    if fp8_scale is not None:
        arrays += [fp8_scale.reshape(1)]

    def kernel(*refs):
        inputs, (dout_gmem, rows_gmem, *refs, scratch) = (
            refs[: len(operands)],
            refs[len(operands) :],
        )
        me, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        table_gmem = bounds_gmem = None
        if table is not None:
            table_gmem, *refs = refs
        if bounds is not None:
            bounds_gmem, refs = documents.Documents(*refs[:2]), refs[2:]
        fp8 = None
        if fp8_scale is not None:
            scale_gmem, gradient_gmem, transposed_gmem, *refs = refs
            fp8, refs = Fp8(scale_gmem, transposed_gmem), [gradient_gmem, *refs]
        if whole_heads:
            *gradients, sums_gmem = refs
            items = lax.div(heads - block + blocks - 1, jnp.int32(blocks))
            items = (items if table is None else table_gmem[block, 0]) * key_blocks
        else:
            sums_gmem, *gradients = refs
            gradients = gradients if packed else (None, *gradients)
            items = table_gmem[block, 0]
        Block(
            tiles=tiles,
            whole_heads=whole_heads,
            causal=causal,
            scale=scale,
            window=window,
            length=length,
            head_dim=head_dim,
            queries=queries,
            queries_of=queries_of,
            key_blocks=key_blocks,
            key_heads=key_heads,
            group=group,
            blocks=blocks,
            dtype=dtype,
            fp8=fp8,
            inputs=inputs,
            dout=dout_gmem,
            rows=rows_gmem,
            bounds=bounds_gmem,
            table=table_gmem,
            gradients=gradients,
            sums_gmem=sums_gmem,
            scratch=scratch,
            me=me,
            block=block,
            items=items,
        ).run()

    gradient_types = [jax.ShapeDtypeStruct(x.shape, dtype) for x in operands]
    if fp8_scale is not None:
        shapes = [
            (batch, length, 3, query_heads, head_dim),
            (3, query_heads, head_dim, batch, length),
        ]
        gradient_types = [jax.ShapeDtypeStruct(shape, jnp.float8_e5m2) for shape in shapes]
    sums_type = jax.ShapeDtypeStruct((blocks * group, padded_length, head_dim), jnp.float32)
    f = plgpu.kernel(
        kernel,
        out_type=[*gradient_types, sums_type] if whole_heads else gradient_types[-2:],
        scratch_types=[scratch_types(tiles, head_dim, dtype, fp8_scale is not None)],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Safe: each warpgroup waits for a copy, or commits, between a read and a write of the
            # same shared memory.
            unsafe_no_auto_barriers=not tiles.more_barriers,
        ),
    )
    if whole_heads:
        gradients = tuple(f(*operands, *arrays)[:-1])
        dq_HD = None
        if bias and fp8_scale is not None:
            dq_HD = gradients[1][0].astype(jnp.float32).sum((2, 3)) / fp8_scale
        elif bias:
            dq_HD = _over_queries(gradients[0][:, :, 0])
        return gradients, dq_HD
    sums = jax.new_ref(zeros_BTHD)
    gradients = f(*operands, *arrays, sums)
    if bias and _dispatch.why_not_triton() is None:
        from pallas_kernels.attention import triton_passes

        dqkv_BT3HD, dq_HD = triton_passes.into_packed(jax.freeze(sums), gradients[0], scale=scale)
        return (dqkv_BT3HD,), dq_HD
    dq_BTHD = (jax.freeze(sums) * jnp.float32(scale)).astype(dtype)
    dq_HD = _over_queries(dq_BTHD) if bias else None
    if packed:
        return (
            lax.dynamic_update_slice(gradients[0], dq_BTHD[:, :, None], (0, 0, 0, 0, 0)),
        ), dq_HD
    return (dq_BTHD, *gradients), dq_HD
