"""Forward pass of flash attention on Hopper (Pallas Mosaic GPU): TMA, wgmma, a persistent grid with
one thread block (CTA) per SM.

This module orders the work items and launches the kernel of `mosaic_forward_kernel`, whose
docstring describes the algorithm and the barriers.

Shapes: B batch, T queries, S keys, H query heads, K key and value heads, D head dimension.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import compiler_params, plgpu, schedule
from pallas_kernels.attention import documents
from pallas_kernels.attention.mosaic_forward_kernel import ROWS, Block, Sizes, scratch_types


def padded(x_BT: jax.Array) -> jax.Array:
    """Pad time with zeros to a multiple of 8: TMA reads swizzled tiles of 8 rows."""
    pad = -x_BT.shape[1] % 8
    return jnp.pad(x_BT, [(0, 0), (0, pad), *[(0, 0)] * (x_BT.ndim - 2)]) if pad else x_BT


def _table(sizes: Sizes, heads: int, blocks: int):
    """Return the table of work items: sorted by the key blocks that a tile's rows see, plus one for
    the start and the end of each row block."""

    def cost(tile):
        first = sizes.first_row_block(tile)
        row_blocks = range(max(first, 0), first + sizes.warpgroups)
        seen = [sizes.key_blocks(r * ROWS) for r in row_blocks]
        return sum(stop - start + 1.0 for start, _, _, stop in seen)

    return jnp.asarray(schedule(heads, [cost(tile) for tile in range(sizes.row_tiles)], blocks))


def _table_of_documents(sizes: Sizes, bounds, blocks: int):
    """Return `_table` for costs that depend on the documents."""

    def cost(first, top, bottom):
        start, _, _, stop = sizes.key_blocks(first, (top, bottom))
        return stop - start + 1

    row_blocks = sizes.row_blocks
    firsts = jnp.arange(row_blocks, dtype=jnp.int32) * ROWS
    ends = (tuple(x[:, at : row_blocks * ROWS : ROWS] for x in bounds) for at in (0, ROWS - 1))
    costs_BR = jax.vmap(jax.vmap(cost), (None, 0, 0))(firsts, *ends)
    # Tile 0 contains the last rows.
    costs_BR = jnp.pad(costs_BR[:, ::-1], [(0, 0), (0, -row_blocks % sizes.warpgroups)])
    costs_BI = costs_BR.reshape(costs_BR.shape[0], -1, sizes.warpgroups).sum(-1)
    return documents.schedule_by_cost(costs_BI, sizes.heads, blocks)


# jit: trace and lower `forward` once for all layers. Tracing and lowering for each layer took 28 s
# of a step's compilation, and no cache of JAX covers this time.
@functools.partial(jax.jit, static_argnames="options")
def forward(operands, bounds, *, options):
    """Return (out, lse): out = softmax(scale · q kᵀ) v in the operands' dtype, B·T·H·D, and the
    log-sum-exp of the scores in fp32, B·H·T.

    Args:
        operands: (q, k, v), or (qkv,) as B·T·3·H·D: bf16 or fp16, D of 64 or 128.
        bounds: `Documents`, or None.
        options: `Options`. Results are always reproducible.
    """
    batch, length, *_, heads, head_dim = operands[0].shape
    keys, key_heads, dtype = operands[-1].shape[1], operands[-1].shape[-2], operands[0].dtype
    shape = (length, keys, heads, heads // key_heads, head_dim)
    sizes = Sizes(options, *shape, dtype, bounds is not None)
    blocks = min(_mosaic.num_sms(), batch * heads * sizes.row_tiles)
    if bounds is None:
        table = _table(sizes, batch * heads, blocks)
    else:
        bounds = documents.padded(bounds)
        table = _table_of_documents(sizes, bounds, blocks)

    def kernel(inputs, table, bounds, out, lse, scratch):
        me, this = lax.axis_index("warpgroup"), lax.axis_index("block")
        items = table[this, 0]
        Block(sizes, inputs, bounds, table, out, lse, scratch, me, this, items).run()

    run = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((batch, length + -length % 8, heads, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, heads, sizes.row_blocks * ROWS), jnp.float32),
        ],
        scratch_types=[scratch_types(sizes)],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=sizes.warpgroups + 1,
        thread_name="warpgroup",
        # Sums and maxima are over the keys only. A row is within a warp, so the reductions need no
        # scratch memory.
        compiler_params=compiler_params(approx_math=True, reduction_scratch_bytes=0),
    )
    out_BTHD, lse_BHT = run(tuple(map(padded, operands)), table, bounds)
    return out_BTHD[:, :length], lse_BHT[:, :, :length]
