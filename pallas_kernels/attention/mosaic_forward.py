"""The forward pass on Hopper (Pallas Mosaic GPU): TMA, wgmma, one persistent block of threads per
multiprocessor.

A piece of work is a tile of queries of one head: 64 or 128 rows for each of the warpgroups that
compute. One more warpgroup loads:
it runs ahead of them into the next piece, through rings of tiles of keys and of values. Which block
takes which pieces, and in which order, is decided before the kernel is launched (`schedule`).

A warpgroup goes through its blocks of keys from the last to the first: the diagonal comes first,
and the loop over all the others has no masks. The maxima and the exponents are those of base 2,
log₂e·scale folded into the multiply-add that subtracts the maximum.

Shapes: B batch, T time, H query heads, K key and value heads, D head dimension; in a tile, M
queries and N keys.
"""

import dataclasses
import functools
import heapq
import importlib.resources
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import pl, plgpu, swizzled

SHARED_BYTES = 227 * 1024
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    Attributes:
        block_q: queries of one warpgroup at a time: 64 or 128.
        warpgroups: that compute; one more loads.
        block_kv: keys at a time.
        stages: blocks of keys, and of values, that shared memory holds.
        q_slots: tiles of queries that shared memory holds for each warpgroup.
        overlap: the next block's scores are under way while this one's softmax runs.
        ping_pong: the warpgroups take turns to start products, so that one's softmax falls under
            another's products.
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
    """Shared memory of one block of threads, barriers included. Arrays begin at multiples of 1024
    bytes."""
    rows = tiles.warpgroups * tiles.block_q
    queries = (tiles.q_slots + 1) * rows * head_dim * 2  # and a tile of results
    keys = 2 * tiles.stages * tiles.block_kv * head_dim * 2
    barriers = tiles.warpgroups * (2 * tiles.q_slots + tiles.ping_pong) + 4 * tiles.stages
    return queries + keys + -(-4 * rows // 1024) * 1024 + 8 * barriers


def registers(tiles: Tiles) -> tuple[int, int]:
    """Registers for each thread of a warpgroup that computes, and of the one that loads."""
    loading = 40 if tiles.warpgroups < 3 else 32
    return min(240, (512 - loading) // tiles.warpgroups // 8 * 8), loading


def why_not_tiles(tiles: Tiles, head_dim: int) -> str | None:
    """None where the tiles can be compiled, else the reason."""
    if tiles.block_q not in (64, 128):
        return f"block_q is 64 or 128, not {tiles.block_q}"
    if tiles.block_kv % 64 or not 64 <= tiles.block_kv <= 256:
        return f"block_kv is a multiple of 64 and at most 256, not {tiles.block_kv}"
    if not 1 <= tiles.warpgroups <= 3:
        return f"1 to 3 warpgroups can compute, not {tiles.warpgroups}"
    if tiles.ping_pong and tiles.warpgroups == 1:
        return "one warpgroup has none to take turns with"
    if tiles.stages < 2 or tiles.q_slots < 1:
        return (
            "the rings need two stages of keys and a tile of queries, not "
            f"{tiles.stages} and {tiles.q_slots}"
        )
    if (size := shared_bytes(tiles, head_dim)) > SHARED_BYTES:
        return f"shared memory of {size} bytes is needed, and a block has at most {SHARED_BYTES}"
    # Scores in fp32, the weights made of them in 16 bits, results in fp32; row statistics and
    # addresses take the rest.
    scores, results = tiles.block_q * tiles.block_kv // 128, tiles.block_q * head_dim // 128
    needed = scores + results + (scores // 2 if tiles.overlap else 0) + 24
    if needed > (available := registers(tiles)[0]):
        return (
            f"about {needed} registers a thread are needed, and {tiles.warpgroups} warpgroups have "
            f"{available} each"
        )
    return None


def operand(refs, which: int, b, rows, head):
    """The rows×D of q, k or v (which = 0, 1, 2) of one head where it lies: in q, k, v (three refs)
    or in packed qkv (one)."""
    return refs[0].at[b, rows, which, head] if len(refs) == 1 else refs[which].at[b, rows, head]


def padded(x: jax.Array, axis: int = 1) -> jax.Array:
    """The array with zeros up to a multiple of 8 along time: TMA reads swizzled tiles of 8 rows."""
    pad = -x.shape[axis] % 8
    return jnp.pad(x, [(0, pad if i == axis else 0) for i in range(x.ndim)]) if pad else x


def key_blocks(first, rows: int, length: int, block: int, *, causal: bool, window: int | None):
    """Which blocks of keys the queries first, …, first + rows − 1 see, the masks of their edges
    apart.

    Args:
        first: of the queries, below `length`; a Python or a traced int32.

    Returns:
        (start, full_start, full_stop, stop): each of the queries sees all of blocks full_start …
        full_stop − 1 and some of them see some of start … full_start − 1 and full_stop … stop − 1;
        start ≤ full_start ≤ full_stop ≤ stop.
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


def schedule(heads: int, costs: list[float], blocks: int) -> np.ndarray:
    """Who does what, int32: for each block of threads how many pieces of work, then these, each
    head · tiles + tile.

    Pieces go, one after the other, to the block that has the least to do. Those of one head are
    near each other, so that its keys and values stay in the L2 cache; among the heads that are
    under way together, the longest go first.

    Args:
        costs: of the tiles of one head.
    """
    rounds = max(1, heads * len(costs) // (2 * blocks))
    by_cost = sorted(range(len(costs)), key=lambda tile: -costs[tile])
    lists = [[] for _ in range(blocks)]
    load = [(0.0, block) for block in range(blocks)]
    for round in range(rounds):
        for tile in by_cost:
            for head in range(heads * round // rounds, heads * (round + 1) // rounds):
                busy, block = load[0]
                lists[block].append(head * len(costs) + tile)
                heapq.heapreplace(load, (busy + costs[tile], block))
    # One more column than the longest list: a piece is read while the one before it is done.
    table = np.zeros((blocks, 2 + max(map(len, lists))), np.int32)
    for block, pieces in enumerate(lists):
        table[block, 0] = len(pieces)
        table[block, 1 : 1 + len(pieces)] = pieces
    return table


# One trace and one lowering however many layers call it: these took 28 s of a step's compilation,
# and no cache spares them.
@functools.partial(
    jax.jit, static_argnames=("causal", "scale", "window", "deterministic", "true_fp32", "tiles")
)
def forward(
    operands,
    segments_BT,
    *,
    causal,
    scale,
    window,
    deterministic,
    true_fp32,
    tiles: Tiles | None = None,
):
    """(out, lse): softmax(scale · q kᵀ) v in the operands' dtype, B·T·H·D, and its log-sum-exp in
    fp32, B·H·T.

    Args:
        operands: (q, k, v), or (qkv,) as B·T·3·H·D: bf16 or fp16, D of 64 or 128.
        segments_BT: None; this back end takes no segments.
        causal, scale, window: as in `flash_attention`; scale is a float.
        deterministic, true_fp32: every result is equal in each run, and no fp32 products are there.
        tiles: those of mosaic_tiles.json when None.

    Raises:
        ValueError: the tiles cannot be compiled.
    """
    del segments_BT, deterministic, true_fp32
    batch, length, *_, heads, head_dim = operands[0].shape
    group = heads // (heads if len(operands) == 1 else operands[1].shape[2])
    dtype = operands[0].dtype
    tiles = tiles or default_tiles(head_dim, causal)
    if (why := why_not_tiles(tiles, head_dim)) is not None:
        raise ValueError(f"flash_attention: {tiles} cannot be used with {head_dim=}: {why}")
    rows, block, groups = tiles.block_q, tiles.block_kv, tiles.warpgroups
    row_blocks = pl.cdiv(length, rows)
    # Tile 0 has the last rows. The one with the first rows can have fewer: there they cost the
    # least.
    row_tiles = pl.cdiv(row_blocks, groups)
    see = functools.partial(key_blocks, length=length, block=block, causal=causal, window=window)

    def cost(tile):
        """Blocks of keys, and one more for the beginning and the end of each block of rows."""
        first = row_blocks - (tile + 1) * groups
        seen = [see(r * rows, rows) for r in range(max(first, 0), first + groups)]
        return sum(stop - start + 1.0 for start, _, _, stop in seen)

    costs = [cost(tile) for tile in range(row_tiles)]
    blocks = min(_mosaic.num_sms(), batch * heads * row_tiles)
    table = schedule(batch * heads, costs, blocks)
    # The softmax is that of scores · factor in base 2. A maximum of scores is one of those only
    # where factor > 0.
    factor, rescale = (scale * LOG2_E, None) if scale > 0 else (1.0, scale * LOG2_E)
    # A hidden score. It is finite, since all of a row's first block can be hidden: that row then
    # begins with weights of 1, which come to nothing as soon as it sees a key.
    hidden = max(-1e30 / factor, -3e38)
    most_right_edges = 1 if block % rows == 0 else pl.cdiv(rows, block) + 1

    def kernel(*refs):
        inputs, (table_ref, out_ref, lse_ref, *refs) = refs[: len(operands)], refs[len(operands) :]
        (
            q_smem,
            k_smem,
            v_smem,
            o_smem,
            lse_smem,
            q_full,
            q_free,
            k_full,
            k_free,
            v_full,
            v_free,
            *turn,
        ) = refs
        me, this = lax.axis_index("warpgroup"), lax.axis_index("block")
        mine = table_ref[this, 0]

        def piece(entry):
            """Batch, head, the keys' blocks [start, stop) that some row sees, and the first block
            of rows: maybe a negative one."""
            head, tile = lax.div(entry, jnp.int32(row_tiles)), lax.rem(entry, jnp.int32(row_tiles))
            first = row_blocks - (tile + 1) * groups
            start, *_ = see(jnp.maximum(first, 0) * rows, rows)
            *_, stop = see((first + groups - 1) * rows, rows)
            return (
                lax.div(head, jnp.int32(heads)),
                lax.rem(head, jnp.int32(heads)),
                start,
                stop,
                first,
            )

        def slot(n):
            return lax.rem(n, jnp.int32(tiles.stages))

        def q_slot(i):
            return lax.rem(i, jnp.int32(tiles.q_slots))

        def at(j, size):
            # As an array, also where j is known: JAX refuses a slice that it knows to go past the
            # end.
            return pl.ds(jnp.int32(j) * size, size)

        @pl.when(me == groups)
        def _load():
            if groups > 1:  # else there are enough
                plgpu.set_max_registers(registers(tiles)[1], action="decrease")

            def load(which, smem, full, free, b, head, j, n):
                @pl.when(n >= tiles.stages)
                def _():
                    plgpu.barrier_wait(free.at[slot(n)])

                source = operand(inputs, which, b, at(j, block), lax.div(head, jnp.int32(group)))
                plgpu.copy_gmem_to_smem(source, smem.at[slot(n)], full.at[slot(n)])

            def load_queries(w, i, b, head, row_block):
                @pl.when(i >= tiles.q_slots)
                def _():
                    plgpu.barrier_wait(q_free.at[w, q_slot(i)])

                @pl.when(row_block >= 0)
                def _():
                    source = operand(inputs, 0, b, at(row_block, rows), head)
                    plgpu.copy_gmem_to_smem(
                        source, q_smem.at[w, q_slot(i)], q_full.at[w, q_slot(i)]
                    )

            def one_piece(i, carry):
                entry, done = carry
                following = table_ref[this, i + 2]
                b, head, start, stop, first = piece(entry)
                load(1, k_smem, k_full, k_free, b, head, stop - 1, done)
                for w in range(groups):
                    load_queries(w, i, b, head, first + w)
                load(2, v_smem, v_full, v_free, b, head, stop - 1, done)

                @pl.loop(1, stop - start)
                def _(n):
                    load(1, k_smem, k_full, k_free, b, head, stop - 1 - n, done + n)
                    load(2, v_smem, v_full, v_free, b, head, stop - 1 - n, done + n)

                return following, done + stop - start

            _, done = lax.fori_loop(0, mine, one_piece, (table_ref[this, 1], jnp.int32(0)))

            # Every arrival is waited for before the block ends.
            @pl.loop(jnp.maximum(done - tiles.stages, 0), done)
            def _(n):
                plgpu.barrier_wait(k_free.at[slot(n)])
                plgpu.barrier_wait(v_free.at[slot(n)])

            @pl.loop(jnp.maximum(mine - tiles.q_slots, 0), mine)
            def _(i):
                for w in range(groups):
                    plgpu.barrier_wait(q_free.at[w, q_slot(i)])

        @pl.when(me < groups)
        def _compute():
            if groups > 1:
                plgpu.set_max_registers(registers(tiles)[0], action="increase")

            # For each piece of work, a warpgroup has as many turns as there are blocks of keys, but
            # for its first.
            def take_turn():
                if tiles.ping_pong:
                    plgpu.barrier_wait(turn[0].at[me])

            def pass_turn():
                if tiles.ping_pong:
                    plgpu.barrier_arrive(turn[0].at[lax.rem(me + 1, jnp.int32(groups))])

            pl.when(me == groups - 1)(pass_turn)

            def skip(n):
                """Gives back a block that other warpgroups use. Each fill of a slot is waited for,
                whoever needs it."""
                plgpu.barrier_wait(k_full.at[slot(n)])
                plgpu.barrier_arrive(k_free.at[slot(n)])
                plgpu.barrier_wait(v_full.at[slot(n)])
                plgpu.barrier_arrive(v_free.at[slot(n)])

            def skip_in_turn(n):
                take_turn()
                pass_turn()
                skip(n)

            def attend(i, b, head, start, stop, row_block, done):
                first = row_block * rows
                my_start, full_start, full_stop, my_stop = see(first, rows)
                pl.loop(0, stop - my_stop)(lambda n: skip_in_turn(done + n))

                def at_block(j):
                    return done + (stop - 1 - j)

                def hide(s_MN, j):
                    query_MN = (
                        plgpu.broadcasted_iota(jnp.int32, s_MN.shape, 0, layout=plgpu.Layout.WGMMA)
                        + first
                    )
                    key_MN = (
                        plgpu.broadcasted_iota(jnp.int32, s_MN.shape, 1, layout=plgpu.Layout.WGMMA)
                        + j * block
                    )
                    seen_MN = key_MN <= query_MN if causal else key_MN < length
                    if window is not None:
                        seen_MN &= key_MN > query_MN - window
                    return jnp.where(seen_MN, s_MN, hidden)

                def weights(s_MN, j, masked, m_M):
                    """New maxima and weights exp2(scores − maxima)."""
                    if rescale is not None:
                        s_MN = s_MN * rescale
                    if masked:
                        s_MN = hide(s_MN, j)
                    top_M = s_MN.max(axis=1) * factor
                    m_M = top_M if m_M is None else jnp.maximum(m_M, top_M)
                    return m_M, jnp.exp2(s_MN * factor - lax.broadcast_in_dim(m_M, s_MN.shape, [0]))

                def await_keys(j):
                    """If there is such a block. The branch keeps the compiler from moving the
                    softmax before it to behind it."""

                    @pl.when(j >= my_start)
                    def _():
                        plgpu.barrier_wait(k_full.at[slot(at_block(j))])

                def start_scores(s_acc, j):
                    keys = k_smem.at[slot(at_block(j)), pl.ds(0, s_acc.shape[1])]
                    plgpu.wgmma(s_acc, q_smem.at[me, q_slot(i)], keys.transpose((1, 0)))

                def finish_scores(s_acc, j, under_way):
                    s_MN = plgpu.wgmma_accumulator_load(s_acc, wait_n=under_way)
                    plgpu.barrier_arrive(k_free.at[slot(at_block(j))])
                    return s_MN

                def start_results(o_acc, p_MN, j):
                    plgpu.barrier_wait(v_full.at[slot(at_block(j))])
                    plgpu.wgmma(o_acc, p_MN, v_smem.at[slot(at_block(j))])

                def give_back_values(j):
                    plgpu.barrier_arrive(v_free.at[slot(at_block(j))])

                score_type = plgpu.ACC((rows, block), jnp.float32)

                def results(o_acc):
                    plgpu.barrier_wait(q_full.at[me, q_slot(i)])
                    last = my_stop - 1
                    plgpu.barrier_wait(k_full.at[slot(at_block(last))])

                    def first_block(columns):
                        """The last block, of which only this many keys are seen."""

                        def scores(s_acc):
                            start_scores(s_acc, last)
                            return finish_scores(s_acc, last, 0)

                        s_MN = pl.run_scoped(scores, plgpu.ACC((rows, columns), jnp.float32))
                        m_M, p_MN = weights(s_MN, last, causal or length % block != 0, None)
                        l_M, p_MN = p_MN.sum(axis=1), p_MN.astype(dtype)
                        if columns < block:
                            none_MN = plgpu.layout_cast(
                                jnp.zeros((rows, block - columns), dtype), plgpu.Layout.WGMMA
                            )
                            p_MN = lax.concatenate((p_MN, none_MN), 1)
                        return m_M, l_M, p_MN

                    part = block // 128 * 64
                    if causal and rows <= part:
                        seen = first + rows - last * block
                        carry = lax.cond(
                            seen <= part, lambda: first_block(part), lambda: first_block(block)
                        )
                    else:
                        carry = first_block(block)
                    await_keys(last - 1)

                    def step(j, carry, masked):
                        m_M, l_M, p_MN = carry

                        def products(s_acc):
                            take_turn()
                            if tiles.overlap:
                                start_scores(s_acc, j)
                                start_results(o_acc, p_MN, j + 1)
                                pass_turn()
                                return finish_scores(s_acc, j, 1)
                            start_results(o_acc, p_MN, j + 1)
                            start_scores(s_acc, j)
                            pass_turn()
                            s_MN = finish_scores(s_acc, j, 0)
                            give_back_values(j + 1)
                            return s_MN

                        s_MN = pl.run_scoped(products, score_type)
                        new_m_M, weight_MN = weights(s_MN, j, masked, m_M)
                        decay_M = jnp.exp2(m_M - new_m_M)
                        l_M = l_M * decay_M + weight_MN.sum(axis=1)
                        if tiles.overlap:
                            # The softmax comes before the results are waited for; the weights are
                            # rounded after that, since the product under way reads those of the
                            # block before.
                            new_m_M, l_M, weight_MN, decay_M = lax.optimization_barrier(
                                (new_m_M, l_M, weight_MN, decay_M)
                            )
                        await_keys(j - 1)
                        o_MD = o_acc[...]
                        if tiles.overlap:
                            give_back_values(j + 1)
                        o_acc[...] = o_MD * lax.broadcast_in_dim(decay_M, o_MD.shape, [0])
                        return new_m_M, l_M, weight_MN.astype(dtype)

                    def steps(above, down_to, carry, masked):
                        """Blocks above − 1, …, down_to."""
                        return lax.fori_loop(
                            0, above - down_to, lambda n, c: step(above - 1 - n, c, masked), carry
                        )

                    if causal and most_right_edges > 1:
                        carry = steps(last, full_stop, carry, masked=True)
                    carry = steps(jnp.minimum(last, full_stop), full_start, carry, masked=False)
                    if window is not None:
                        carry = steps(jnp.minimum(last, full_start), my_start, carry, masked=True)
                    m_M, l_M, p_MN = carry
                    plgpu.barrier_arrive(q_free.at[me, q_slot(i)])
                    start_results(o_acc, p_MN, my_start)
                    o_MD = o_acc[...]
                    give_back_values(my_start)
                    return o_MD, m_M, l_M

                o_MD, m_M, l_M = pl.run_scoped(results, plgpu.ACC((rows, head_dim), jnp.float32))
                pl.loop(0, my_start - start)(lambda n: skip_in_turn(at_block(my_start - 1 - n)))
                inverse_M = 1.0 / l_M
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_smem[me] = (o_MD * lax.broadcast_in_dim(inverse_M, o_MD.shape, [0])).astype(dtype)
                lse_smem[me] = (m_M + jnp.log2(l_M)) * (1 / LOG2_E)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    o_smem.at[me], out_ref.at[b, at(row_block, rows), head], commit_group=False
                )
                plgpu.copy_smem_to_gmem(lse_smem.at[me], lse_ref.at[b, head, at(row_block, rows)])

            def one_piece(i, carry):
                entry, done = carry
                b, head, start, stop, first = piece(entry)
                following = table_ref[this, i + 2]
                pl.when(first + me >= 0)(lambda: attend(i, b, head, start, stop, first + me, done))

                @pl.when(first + me < 0)
                def _():
                    skip(done)
                    pl.loop(1, stop - start)(lambda n: skip_in_turn(done + n))
                    # Now the loading warpgroup is past the wait for this slot's last release: it
                    # has loaded values since.
                    plgpu.barrier_arrive(q_free.at[me, q_slot(i)])

                return following, done + stop - start

            lax.fori_loop(0, mine, one_piece, (table_ref[this, 1], jnp.int32(0)))
            pl.when(me == 0)(take_turn)
            plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((batch, length + -length % 8, heads, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, heads, row_blocks * rows), jnp.float32),
        ],
        scratch_types=[
            swizzled((groups, tiles.q_slots, rows, head_dim), dtype),
            swizzled((tiles.stages, block, head_dim), dtype),
            swizzled((tiles.stages, block, head_dim), dtype),
            swizzled((groups, rows, head_dim), dtype),
            plgpu.SMEM((groups, rows), jnp.float32),
            plgpu.Barrier(num_barriers=(groups, tiles.q_slots)),
            plgpu.Barrier(num_barriers=(groups, tiles.q_slots)),
            plgpu.Barrier(num_barriers=tiles.stages),
            plgpu.Barrier(num_arrivals=groups, num_barriers=tiles.stages),
            plgpu.Barrier(num_barriers=tiles.stages),
            plgpu.Barrier(num_arrivals=groups, num_barriers=tiles.stages),
            *([plgpu.Barrier(num_barriers=groups)] if tiles.ping_pong else []),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=groups + 1,
        thread_name="warpgroup",
        # Sums and maxima are over the keys alone: a row is within a warp, and needs no scratch
        # memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    out_BTHD, lse_BHT = run(*map(padded, operands), jnp.asarray(table))
    return out_BTHD[:, :length], lse_BHT[:, :, :length]
