"""Backward pass of flash attention on Hopper (Pallas Mosaic GPU): TMA, wgmma, a persistent grid
with one thread block (CTA) per SM.

This module selects the order of the work items and the method of summing dQ. It computes D, and
launches the kernel of `mosaic_backward_kernel`, whose docstring describes the algorithm and the
barriers.

Shapes: B batch, T queries, S keys, H query heads, K key heads, D head dimension; R = 2, the
statistics log₂e·L and −D of a query.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _dispatch, _mosaic
from pallas_kernels._mosaic import LOG2_E, compiler_params, pl, plgpu, schedule
from pallas_kernels._partition import overwriting
from pallas_kernels.attention import documents
from pallas_kernels.attention.mosaic_backward_kernel import (
    KEYS,
    MULTIPLIERS,
    QUERIES,
    Block,
    Fp8,
    Sizes,
    scratch_types,
)
from pallas_kernels.attention.mosaic_forward import padded

L2_BYTES = 40 * 2**20
"""Bytes of q, dO and dQ in the L2 cache: 80 % of an H100's 50 MB, which an H200 (60 MB) has too."""

FP8_LENGTH = 128
"""The gradients of packed operands are stored in FP8 for lengths that are multiples of this."""


def stores_fp8(batch: int, length: int, heads: int) -> bool:
    """Return whether `backward` can store the gradients of packed operands in FP8, and is estimated
    to be faster so. Split heads need two passes over dQ and one that converts the gradients."""
    fits = length % FP8_LENGTH == 0
    return fits and whole_heads_are_faster(batch * heads, length, _mosaic.num_sms(), passes=384)


def whole_heads_are_faster(heads: int, keys: int, blocks: int, passes: int = 128) -> bool:
    """Return whether the idle thread blocks of the last round cost less than the passes of split
    heads, which are estimated at passes/S of the kernel's time: 128 for two passes over dQ."""
    rounds = pl.cdiv(heads, blocks)
    return rounds * blocks <= heads * (1 + passes / keys)


# jit: trace and lower `backward` once for all layers. Tracing and lowering for each layer took 28 s
# of a step's compilation, and no cache of JAX covers this time.
@functools.partial(jax.jit, static_argnames=("options", "bias", "whole_heads"))
def backward(
    operands,
    bounds,
    lse_BHT,
    dout_BTHD,
    out_BTHD,
    dlse_BHT,
    *,
    options,
    bias: bool = False,
    fp8_scale: jax.Array | None = None,
    whole_heads: bool | None = None,
):
    """Return the gradients, a tuple like `operands`. With `bias` return (gradients, Σ dQ, Σ dO):
    the sums over all queries have shape H·D and dtype fp32. With `fp8_scale` the gradients are
    (dqkv_BT3HD, dqkv_3HDBT): dqkv times the factor in e5m2, and a transposed copy.

    Args:
        operands: (q_BTHD, k_BSKD, v_BSKD) or (qkv_BT3HD,) in bf16 or fp16, D of 64 or 128.
        bounds: `Documents`, or None.
        out_BTHD, lse_BHT: the output, and L in fp32.
        dout_BTHD, dlse_BHT: gradients of the output and of L; dlse_BHT may be None.
        options: `Options`; `deterministic` means whole heads.
        bias: for packed operands only. Σ dQ is the sum of the rounded dQ, or of the fp32 sums if a
            Triton kernel converts the fp32 sums to dQ.
        fp8_scale: for calls where `stores_fp8` is True; fp32 scalar, or None.
        whole_heads: sum dQ by whole heads: the same five matmuls, but at most B·K thread blocks
            have work. False: by split heads. None: as an estimate says.
    """
    batch, length, heads, head_dim = dout_BTHD.shape
    keys, key_heads = operands[-1].shape[1], operands[-1].shape[-2]
    total, sms = batch * key_heads, _mosaic.num_sms()
    if whole_heads is None:
        whole_heads = options.deterministic or whole_heads_are_faster(total, keys, sms)
        whole_heads |= fp8_scale is not None  # a shard may have too few heads for the estimate
    assert fp8_scale is None or (whole_heads and length % FP8_LENGTH == 0 and len(operands) == 1)
    blocks = min(sms, total if whole_heads else total * pl.cdiv(keys, KEYS[head_dim]))
    shape = (length, keys, key_heads, heads // key_heads, head_dim)
    sizes = Sizes(options, *shape, dout_BTHD.dtype, whole_heads, blocks)
    rows_BHRT, zeros_BTHD, dout_HD = _lse_and_delta(
        lse_BHT, dout_BTHD, out_BTHD, dlse_BHT, sums=not whole_heads, bias=bias
    )
    lengths = [x.shape[1] for x in operands]
    *operands, dout_BTHD = map(padded, (*operands, dout_BTHD))
    launch = functools.partial(_launch, sizes, tuple(operands), dout_BTHD, rows_BHRT, bounds)
    if whole_heads:
        *gradients, _ = launch(fp8_scale, None)
        dq_HD = None
        if bias and fp8_scale is not None:
            dq_HD = gradients[1][0].astype(jnp.float32).sum((2, 3)) / fp8_scale
        elif bias:
            dq_HD = _over_queries(gradients[0][:, :, 0])
    else:
        (sums_BTHD,), gradients = overwriting(functools.partial(launch, None), [zeros_BTHD])
        gradients, dq_HD = _with_dq(sums_BTHD, gradients, options.scale, bias)
    if fp8_scale is None:
        gradients = [x[:, :t] for x, t in zip(gradients, lengths, strict=True)]
    gradients = tuple(gradients)
    return (gradients, dq_HD, dout_HD) if bias else gradients


def _lse_and_delta(lse_BHT, dout_BTHD, out_BTHD, dlse_BHT, *, sums, bias):
    """Return (log₂e·L, −D), zeros for dQ or None, and Σ dO or None.

    `sums` requests the zeros, `bias` requests Σ dO. L, D and dO are 0 for queries that are out of
    bounds, so the contributions of these queries are 0.
    """
    batch, length, heads, head_dim = dout_BTHD.shape
    rows = length + -length % QUERIES[head_dim]
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


def _table(sizes: Sizes, heads: int, bounds):
    """Return the table of work items of `heads` heads, or None if none is needed. The cost of an
    item is the number of blocks of queries, plus one for the start and the end."""

    def steps(j, *ends):
        first, stop = sizes.queries_of(j, *ends)
        return stop - first

    if bounds is not None:
        j = jnp.arange(sizes.key_blocks, dtype=jnp.int32)
        keys = sizes.block_keys
        end = sizes.key_blocks * keys  # the bounds may be padded beyond the last block of keys
        ends = bounds.first_BT[:, :end:keys], bounds.last_BT[:, keys - 1 : end : keys]
        costs_BI = sizes.group * jax.vmap(jax.vmap(steps), (None, 0, 0))(j, *ends) + 1
        costs_BI = costs_BI.sum(1, keepdims=True) if sizes.whole_heads else costs_BI
        return documents.schedule_by_cost(costs_BI, sizes.key_heads, sizes.blocks)
    if sizes.whole_heads:
        return None
    costs = [sizes.group * steps(j) + 1.0 for j in range(sizes.key_blocks)]
    # q and dO in 2 bytes per number, the sums of dQ in 4; one query head of a group at a time
    at_once = max(1, L2_BYTES // (8 * sizes.length * sizes.head_dim))
    return jnp.asarray(schedule(heads, costs, sizes.blocks, at_once))


def _launch(sizes: Sizes, operands, dout_BTHD, rows_BHRT, bounds, fp8_scale, sums):
    """Launch the kernel. Return the gradients of the padded operands, without dQ if heads are
    split; with whole heads also the sums of dQ.

    Args:
        sums: Ref of the zeroed sums of dQ if heads are split, else None.
    """
    batch, padded_length, query_heads, head_dim = dout_BTHD.shape
    heads, blocks = batch * sizes.key_heads, sizes.blocks
    bounds = None if bounds is None else documents.padded(bounds)
    table = _table(sizes, heads, bounds)

    def kernel(inputs, dout, rows, table, bounds, fp8_scale, sums, *outputs):
        *gradients, scratch = outputs
        me, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        if sizes.whole_heads:
            *gradients, sums = gradients
        elif len(inputs) == 3:
            gradients = (None, *gradients)
        fp8 = None if fp8_scale is None else Fp8(fp8_scale, gradients.pop())
        if table is None:
            items = lax.div(heads - block + blocks - 1, jnp.int32(blocks))
        else:
            items = table[block, 0]
        if sizes.whole_heads:
            items *= sizes.key_blocks
        refs = (inputs, dout, rows, bounds, table, fp8, gradients, sums, scratch)
        Block(sizes, *refs, me, block, items).run()

    out_type = [jax.ShapeDtypeStruct(x.shape, sizes.dtype) for x in operands]
    if fp8_scale is not None:
        fp8_scale, places = fp8_scale.reshape(1), (query_heads, head_dim)
        shapes = (batch, sizes.length, 3, *places), (3, *places, batch, sizes.length)
        out_type = [jax.ShapeDtypeStruct(shape, jnp.float8_e5m2) for shape in shapes]
    if sizes.whole_heads:
        shape = (blocks * sizes.group, padded_length, head_dim)
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    run = plgpu.kernel(
        kernel,
        out_type=out_type if sizes.whole_heads else out_type[-2:],
        scratch_types=[scratch_types(sizes, fp8_scale is not None)],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        # Memory that a warpgroup stores is guarded by the kernel's barriers and `commit_smem`.
        compiler_params=compiler_params(approx_math=True, unsafe_no_auto_barriers=True),
    )
    return run(operands, dout_BTHD, rows_BHRT, table, bounds, fp8_scale, sums)


def _with_dq(sums_BTHD, gradients, scale: float, bias: bool):
    """Return the gradients with dQ of the sums, and Σ dQ with `bias`, else None."""
    packed, dtype = len(gradients) == 1, gradients[0].dtype
    if bias and _dispatch.why_not_triton() is None:
        from pallas_kernels.attention import triton_passes

        dqkv_BT3HD, dq_HD = triton_passes.into_packed(sums_BTHD, gradients[0], scale=scale)
        return (dqkv_BT3HD,), dq_HD
    dq_BTHD = (sums_BTHD * jnp.float32(scale)).astype(dtype)
    dq_HD = _over_queries(dq_BTHD) if bias else None
    if packed:
        start = (0, 0, 0, 0, 0)
        return (lax.dynamic_update_slice(gradients[0], dq_BTHD[:, :, None], start),), dq_HD
    return (dq_BTHD, *gradients), dq_HD
