"""Forward pass of flash attention on Hopper (Pallas Mosaic GPU): TMA, wgmma, a persistent grid with
one thread block (CTA) per SM.

This module selects tile sizes and the order of the work items, and launches the kernel of
`mosaic_forward_kernel`. The docstring of `mosaic_forward_kernel` describes the algorithm and the
barriers.

Shapes: B batch, T time, H query heads, K key and value heads, D head dimension.
"""

import dataclasses
import functools
import importlib.resources
import json

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import SHARED_BYTES, pl, plgpu, schedule, swizzled
from pallas_kernels.attention import documents
from pallas_kernels.attention.mosaic_forward_kernel import Block, Scratch


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes and options of the kernel.

    Attributes:
        block_q: queries in the tile of one warpgroup: 64 or 128.
        warpgroups: number of computing warpgroups. One more warpgroup loads.
        block_kv: keys in a block.
        stages: blocks of keys, and of values, in shared memory.
        q_slots: tiles of queries in shared memory for each warpgroup.
        overlap: overlap QK of the next block with the softmax of the current block.
        ping_pong: start the matmuls of the warpgroups one after the other, so that the softmax of
            one warpgroup overlaps the matmuls of another warpgroup.
    """

    block_q: int = 64
    warpgroups: int = 3
    block_kv: int = 128
    stages: int = 4
    q_slots: int = 2
    overlap: bool = True
    ping_pong: bool = True


@functools.cache
def _choices() -> dict:
    return json.loads(
        importlib.resources.files(__package__).joinpath("mosaic_tiles.json").read_text()
    )


def tiles(pass_: str, head_dim: int, causal: bool) -> dict:
    """Return the tile sizes of a pass from mosaic_tiles.json.

    Args:
        pass_: "forward" or "backward".
    """
    for entry in _choices()[pass_]:
        if (entry["head_dim"], entry["causal"]) == (head_dim, causal):
            return entry["tiles"]
    raise ValueError(f"mosaic_tiles.json has no {pass_} tiles for {head_dim=} {causal=}")


def default_tiles(head_dim: int, causal: bool) -> Tiles:
    return Tiles(**tiles("forward", head_dim, causal))


def shared_bytes(tiles: Tiles, head_dim: int) -> int:
    """Return the bytes of shared memory of one thread block with documents, including barriers.

    Arrays begin at multiples of 1024 bytes.
    """
    rows = tiles.warpgroups * tiles.block_q
    queries = (tiles.q_slots + 1) * rows * head_dim * 2  # one slot is a tile of the output
    keys = 2 * tiles.stages * tiles.block_kv * head_dim * 2
    barriers = tiles.warpgroups * (2 * tiles.q_slots + tiles.ping_pong) + 4 * tiles.stages
    numbers = sum(-(-4 * n // 1024) * 1024 for n in (rows, tiles.warpgroups * tiles.block_kv))
    return queries + keys + numbers + 8 * barriers


def registers(tiles: Tiles) -> tuple[int, int]:
    """Return the registers per thread of a computing warpgroup, and of the loading warpgroup."""
    loading = 40 if tiles.warpgroups < 3 else 32
    return min(240, (512 - loading) // tiles.warpgroups // 8 * 8), loading


def why_not_tiles(tiles: Tiles, head_dim: int) -> str | None:
    """Return None if the tiles can be compiled, else the reason."""
    if tiles.block_q not in (64, 128):
        return f"block_q is 64 or 128, not {tiles.block_q}"
    if tiles.block_kv % 64 or not 64 <= tiles.block_kv <= 256:
        return f"block_kv is a multiple of 64 and at most 256, not {tiles.block_kv}"
    if not 1 <= tiles.warpgroups <= 3:
        return f"1 to 3 warpgroups can compute, not {tiles.warpgroups}"
    if tiles.ping_pong and tiles.warpgroups == 1:
        return "ping_pong needs at least two warpgroups"
    if tiles.stages < 2 or tiles.q_slots < 1:
        return (
            "the rings need two stages of keys and a tile of queries, not "
            f"{tiles.stages} and {tiles.q_slots}"
        )
    if (size := shared_bytes(tiles, head_dim)) > SHARED_BYTES:
        return f"shared memory of {size} bytes is needed, and a block has at most {SHARED_BYTES}"
    # Scores in fp32, weights in 16 bits, output in fp32; row statistics and addresses need the
    # remaining registers.
    scores, results = tiles.block_q * tiles.block_kv // 128, tiles.block_q * head_dim // 128
    needed = scores + results + (scores // 2 if tiles.overlap else 0) + 24
    if needed > (available := registers(tiles)[0]):
        return (
            f"about {needed} registers a thread are needed, and {tiles.warpgroups} warpgroups have "
            f"{available} each"
        )
    return None


def padded(x: jax.Array, axis: int = 1) -> jax.Array:
    """Pad time with zeros to a multiple of 8: TMA reads swizzled tiles of 8 rows."""
    pad = -x.shape[axis] % 8
    return jnp.pad(x, [(0, pad if i == axis else 0) for i in range(x.ndim)]) if pad else x


def key_blocks(first, rows: int, length: int, block: int, *, causal: bool, window: int | None):
    """Return the range of key blocks that the queries first, …, first + rows − 1 see.

    Args:
        first: first query, below `length`; a Python or a traced int32.

    Returns:
        (start, full_start, full_stop, stop), in non-decreasing order. Blocks full_start …
        full_stop − 1 need no mask: each query sees all keys. Blocks start … full_start − 1 and
        full_stop … stop − 1 need a mask.
    """
    if not causal:
        return 0, 0, length // block, -(-length // block)
    if isinstance(first, int):
        low, high, div = max, min, lambda a: a // block
    else:
        low, high, div = jnp.maximum, jnp.minimum, lambda a: lax.div(a, jnp.int32(block))
    stop = div(high(first + rows, length) + (block - 1))
    full_stop = div(first + 1)
    if window is None:
        return 0, 0, full_stop, stop
    start = div(low(first - window + 1, 0))
    full_start = high(div(low(first + rows - window, 0) + (block - 1)), stop)
    return start, full_start, low(full_start, full_stop), stop


def key_blocks_of_documents(
    first, rows: int, length: int, block: int, *, causal: bool, top, bottom
):
    """Return the range of key blocks like `key_blocks`, where the queries see parts of documents.

    Args:
        top, bottom: bounds (first key, last key) of the first and of the last query. The last key
            counts only without `causal`.
    """

    def div(a):
        return lax.div(a, jnp.int32(block))

    if causal:
        _, _, full_stop, stop = key_blocks(first, rows, length, block, causal=True, window=None)
    else:
        full_stop, stop = div(top[1] + 1), div(bottom[1]) + 1
    start = div(top[0])
    full_start = jnp.minimum(div(bottom[0] + (block - 1)), stop)
    return start, full_start, jnp.maximum(full_start, full_stop), stop


def _cost(see, tile, rows, row_blocks, groups):
    """Return the cost of a tile: the key blocks of each row block, plus one for start and end."""
    first = row_blocks - (tile + 1) * groups
    seen = [see(r * rows, rows) for r in range(max(first, 0), first + groups)]
    return sum(stop - start + 1.0 for start, _, _, stop in seen)


def _table_of_documents(bounds, see, *, rows, row_blocks, groups, heads, blocks):
    """Return the table of work items, sorted by the number of visible key blocks of each item."""

    def seen(first, top, bottom):
        start, _, _, stop = see(first, rows, top=top, bottom=bottom)
        return stop - start + 1

    firsts = jnp.arange(row_blocks, dtype=jnp.int32) * rows
    tops, bottoms = (
        tuple(x[:, at : row_blocks * rows : rows] for x in bounds) for at in (0, rows - 1)
    )
    costs_BR = jax.vmap(jax.vmap(seen), (None, 0, 0))(firsts, tops, bottoms)
    # Tile 0 contains the last rows.
    costs_BR = jnp.pad(costs_BR[:, ::-1], [(0, 0), (0, -row_blocks % groups)])
    costs_BI = costs_BR.reshape(costs_BR.shape[0], -1, groups).sum(-1)
    return documents.schedule_by_cost(costs_BI, heads, blocks)


# jit: trace and lower `forward` once for all layers. Tracing and lowering for each layer took 28 s
# of a step's compilation, and no cache of JAX covers this time.
@functools.partial(
    jax.jit, static_argnames=("causal", "scale", "window", "deterministic", "true_fp32", "tiles")
)
def forward(
    operands,
    bounds,
    *,
    causal,
    scale,
    window,
    deterministic,
    true_fp32,
    tiles: Tiles | None = None,
):
    """Return (out, lse): out = softmax(scale · q kᵀ) v in the operands' dtype, B·T·H·D, and the
    log-sum-exp of the scores in fp32, B·H·T.

    Args:
        operands: (q, k, v), or (qkv,) as B·T·3·H·D: bf16 or fp16, D of 64 or 128.
        bounds: `Documents`, or None.
        causal, scale, window: as in `flash_attention`; scale is a float. With documents `window` is
            None: the bounds include the window.
        deterministic, true_fp32: ignored: results are always reproducible, and no matmul is fp32.
        tiles: None for the tiles of mosaic_tiles.json.

    Raises:
        ValueError: the tiles cannot be compiled.
    """
    del deterministic, true_fp32
    batch, length, *_, heads, head_dim = operands[0].shape
    group = heads // (heads if len(operands) == 1 else operands[1].shape[2])
    dtype = operands[0].dtype
    tiles = tiles or default_tiles(head_dim, causal)
    if (why := why_not_tiles(tiles, head_dim)) is not None:
        raise ValueError(f"flash_attention: {tiles} cannot be used with {head_dim=}: {why}")
    rows, block, groups = tiles.block_q, tiles.block_kv, tiles.warpgroups
    row_blocks = pl.cdiv(length, rows)
    # Tile 0 contains the last rows. The tile with the first rows may be partly empty: the first
    # rows cost the least.
    row_tiles = pl.cdiv(row_blocks, groups)
    blocks = min(_mosaic.num_sms(), batch * heads * row_tiles)
    if bounds is None:
        see = functools.partial(
            key_blocks, length=length, block=block, causal=causal, window=window
        )
        costs = [_cost(see, tile, rows, row_blocks, groups) for tile in range(row_tiles)]
        arrays = (jnp.asarray(schedule(batch * heads, costs, blocks)),)
    else:
        see = functools.partial(key_blocks_of_documents, length=length, block=block, causal=causal)
        bounds = documents.padded(bounds)
        sizes = {"rows": rows, "row_blocks": row_blocks, "groups": groups}
        table = _table_of_documents(bounds, see, **sizes, heads=heads, blocks=blocks)
        arrays = (table, *bounds)

    def kernel(*refs):
        inputs, (table_gmem, *bounds_gmem), (out_gmem, lse_gmem, scratch) = (
            refs[: len(operands)],
            refs[len(operands) : -3],
            refs[-3:],
        )
        me, this = lax.axis_index("warpgroup"), lax.axis_index("block")
        Block(
            tiles=tiles,
            registers=registers(tiles),
            see=see,
            length=length,
            heads=heads,
            group=group,
            head_dim=head_dim,
            row_blocks=row_blocks,
            row_tiles=row_tiles,
            causal=causal,
            scale=scale,
            window=window,
            dtype=dtype,
            inputs=inputs,
            bounds=documents.Documents(*bounds_gmem) if bounds_gmem else None,
            table=table_gmem,
            out=out_gmem,
            lse=lse_gmem,
            scratch=scratch,
            me=me,
            this=this,
            items=table_gmem[this, 0],
        ).run()

    run = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((batch, length + -length % 8, heads, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, heads, row_blocks * rows), jnp.float32),
        ],
        scratch_types=[
            Scratch(
                q=swizzled((groups, tiles.q_slots, rows, head_dim), dtype),
                k=swizzled((tiles.stages, block, head_dim), dtype),
                v=swizzled((tiles.stages, block, head_dim), dtype),
                out=swizzled((groups, rows, head_dim), dtype),
                lse=plgpu.SMEM((groups, rows), jnp.float32),
                columns=None if bounds is None else plgpu.SMEM((groups, block), jnp.int32),
                q_full=plgpu.Barrier(num_barriers=(groups, tiles.q_slots)),
                q_empty=plgpu.Barrier(num_barriers=(groups, tiles.q_slots)),
                k_full=plgpu.Barrier(num_barriers=tiles.stages),
                k_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=tiles.stages),
                v_full=plgpu.Barrier(num_barriers=tiles.stages),
                v_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=tiles.stages),
                ping_pong=plgpu.Barrier(num_barriers=groups) if tiles.ping_pong else None,
            )
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=groups + 1,
        thread_name="warpgroup",
        # Sums and maxima are over the keys only. A row is within a warp, so the reductions need no
        # scratch memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    out_BTHD, lse_BHT = run(*map(padded, operands), *arrays)
    return out_BTHD[:, :length], lse_BHT[:, :, :length]
