"""The backward pass of flash attention on Hopper (Pallas Mosaic GPU): TMA, wgmma, one kernel with
five products.

A piece of work is a block of 128 keys of one head, over all the blocks of queries that see it; the
keys' gradients stay in registers meanwhile. One warpgroup loads, two multiply, 64 of the keys each:

    Sᵀ = K Qᵀ     dPᵀ = V dOᵀ     Pᵀ = exp2(scale·log2(e)·Sᵀ − log2(e)·L)     dSᵀ = Pᵀ ∘ (dPᵀ − D)
    dV += Pᵀ dO     dK += dSᵀ Q     dQ += dS K

Pᵀ and dSᵀ are left operands in registers; dSᵀ also goes through shared memory, as dQ sums over the
keys of both warpgroups.

dQ is summed over blocks of keys in fp32 in global memory, in one of two ways:
    whole heads: a block of threads has all the keys of a head in turn, and so is alone with the
    head's dQ. The first part of a
        tile of dQ is stored, the next are added by TMA, the last is added in registers and leaves
        as the result. Its sums are a buffer of one head for each multiprocessor, which stays in the
        L2 cache, and are always in the same order.
    split heads: any block of threads has any block of keys, by a table made before the launch. All
    add to one zeroed fp32 dQ, in
        any order, which is converted afterwards: two more passes over 4 bytes an element, but work
        for all where heads are few. Few heads are under way at a time, so that their sums stay in
        the L2 cache: with all of them at once each addition went to HBM and back (H200,
        16×4096×6×128: 2.70 ms; now 2.13).

What keeps the tensor cores busy was read off the compiled code (ptxas says where it waits for
products, and what it spills).

Shapes: B batch, T time, H query heads, K key heads, D head dimension; R the two numbers of a query,
log2(e)·L and −D.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _dispatch, _mosaic
from pallas_kernels._mosaic import LOG2_E, SHARED_BYTES, pl, plgpu, schedule, swizzled
from pallas_kernels.attention import mosaic_forward
from pallas_kernels.attention.mosaic_forward import padded
from pallas_kernels.attention.mosaic_forward_kernel import operand

KEYS = 128  # of a piece of work
HALF = 64  # keys of one multiplying warpgroup, and the sides of what it adds to dQ at a time
MULTIPLIERS = 2


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    Attributes:
        stages: blocks of queries that shared memory holds.
        key_stages: blocks of keys that it holds.
        score_stages: tiles of dS that it holds.
        slots: parts of 64×64 results that wait to be written, for each warpgroup, beside those that
            fit in a tile of dS.
        more_barriers: Mosaic puts its own around each access to shared memory, beside those that
            the kernel has where it needs them.
        whole_heads: which way dQ is summed; None for the one that should be faster.
    """

    stages: int = 2
    key_stages: int = 1
    score_stages: int = 1
    slots: int = 1
    more_barriers: bool = True
    whole_heads: bool | None = None


def why_not_tiles(tiles: Tiles, head_dim: int) -> str | None:
    """None where the kernel can be built, else the reason."""
    if min(tiles.stages, tiles.key_stages, tiles.score_stages, tiles.slots) < 1:
        return "at least one of each stage and slot is needed"
    queries = queries_in_a_block(head_dim)
    if tiles.slots > (most := 1 + (2 * head_dim - queries) // HALF):
        return f"only {most} of the slots would be used"
    arrays = [
        *[tiles.stages * queries * head_dim * 2] * 2,
        tiles.stages * 2 * queries * 4,
        *[tiles.key_stages * KEYS * head_dim * 2] * 2,
        tiles.score_stages * KEYS * queries * 2,
        MULTIPLIERS * HALF * HALF * 4,
        MULTIPLIERS * tiles.slots * HALF * HALF * 2,
        MULTIPLIERS * queries * 4,
    ]
    barriers = 8 * (2 * (tiles.stages + tiles.key_stages + tiles.score_stages) + MULTIPLIERS)
    total = sum(-(-size // 1024) * 1024 for size in arrays) + barriers
    if total > SHARED_BYTES:
        return f"{total} bytes of shared memory are needed, and there are {SHARED_BYTES}"
    return None


def queries_in_a_block(head_dim: int) -> int:
    """As many as two warpgroups have registers for, beside dK and dV."""
    return 8192 // head_dim


def whole_heads_are_faster(heads: int, length: int, blocks: int) -> bool:
    """Whether idle blocks of threads in the last round cost less than the two passes over dQ
    (estimated at 128/T of the rest)."""
    rounds = pl.cdiv(heads, blocks)
    return rounds * blocks <= heads * (1 + KEYS / length)


# One trace and one lowering however many layers call it: these took 28 s of a step's compilation,
# and no cache spares them.
@functools.partial(
    jax.jit,
    static_argnames=("causal", "scale", "window", "deterministic", "true_fp32", "bias", "tiles"),
)
def backward(
    operands,
    segments_BT,
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
    tiles: Tiles | None = None,
):
    """Gradients, a tuple shaped like `operands`; with `bias` (gradients, Σ dQ), the sum over all
    queries, H·D in fp32, and Σ dO.

    Args:
        operands: (q_BTHD, k_BTKD, v_BTKD) or (qkv_BT3HD,) in bf16 or fp16, D of 64 or 128.
        segments_BT: None; this back end has no segments.
        out_BTHD, lse_BHT: the output, and L in fp32.
        dout_BTHD, dlse_BHT: their gradients; that of L is None where nothing asked for it.
        deterministic: whole heads only. The same five products, but no more than B·K blocks of
            threads have work.
        true_fp32: no matter here.
        bias: of packed operands alone. Σ dQ is of dQ as it is written, or, where sums of several
            blocks become dQ in Triton, of these.
        tiles: those of mosaic_tiles.json where None.

    Raises:
        ValueError: the tiles cannot be compiled.
    """
    del segments_BT, true_fp32
    batch, length, _, head_dim = dout_BTHD.shape
    key_heads = operands[-1].shape[-2]
    tiles = tiles or Tiles(**mosaic_forward.tiles("backward", head_dim, causal))
    if (why := why_not_tiles(tiles, head_dim)) is not None:
        raise ValueError(f"flash_attention: {tiles} cannot be used with {head_dim=}: {why}")
    whole = tiles.whole_heads
    if whole is None:
        whole = whole_heads_are_faster(batch * key_heads, length, _mosaic.num_sms())
    whole = whole or deterministic

    rows_BHRT, zeros_BTHD, dout_HD = _of_each_query(
        lse_BHT, dout_BTHD, out_BTHD, dlse_BHT, sums=not whole, bias=bias
    )
    *operands, dout_BTHD = map(padded, (*operands, dout_BTHD))
    gradients, dq_HD = _gradients(
        tuple(operands),
        rows_BHRT,
        dout_BTHD,
        zeros_BTHD,
        length,
        causal=causal,
        scale=scale,
        window=window,
        whole=whole,
        bias=bias,
        tiles=tiles,
    )
    gradients = tuple(x[:, :length] for x in gradients)
    return (gradients, dq_HD, dout_HD) if bias else gradients


def _of_each_query(lse_BHT, dout_BTHD, out_BTHD, dlse_BHT, *, sums, bias):
    """(log2(e)·L, −D), zero past the end, where dO is zero too, and so is all that comes of them;
    zeros for dQ where `sums`; and Σ dO where `bias`.
    """
    batch, length, heads, head_dim = dout_BTHD.shape
    rows = length + -length % queries_in_a_block(head_dim)
    zeros = length + -length % 8
    if _dispatch.why_not_triton() is None:
        from pallas_kernels.attention import triton_passes

        # One pass. XLA makes D beside L with one thread a row, 0.4 ms for 64×1024×12×64 on an H200,
        # and zeros once for all layers, of which each then has a copy.
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


def _gradients(
    operands, rows_BHRT, dout_BTHD, zeros_BTHD, length, *, causal, scale, window, whole, bias, tiles
):
    """Those of the padded operands, and Σ dQ where `bias`, else None."""
    batch, padded_length, query_heads, head_dim = dout_BTHD.shape
    packed = len(operands) == 1
    key_heads = operands[-1].shape[-2]
    group = query_heads // key_heads
    dtype = dout_BTHD.dtype
    queries = queries_in_a_block(head_dim)
    key_blocks, query_blocks = pl.cdiv(length, KEYS), pl.cdiv(length, queries)
    heads = batch * key_heads
    blocks = min(_mosaic.num_sms(), heads if whole else heads * key_blocks)

    def queries_of(j):
        """The blocks of queries that see a block of keys: first … stop − 1."""
        first, stop = 0, query_blocks
        if causal:
            first = j * (KEYS // queries)
        if window is not None:
            behind = j * KEYS + (KEYS + window - 2)
            if isinstance(j, int):
                stop = min(stop, behind // queries + 1)
            else:
                stop = jnp.minimum(stop, lax.div(behind, jnp.int32(queries)) + 1)
        return first, stop

    # One more for what each piece of work begins and ends with.
    costs = [group * (stop - first) + 1.0 for first, stop in map(queries_of, range(key_blocks))]
    table = None if whole else schedule(heads, costs, blocks)

    def kernel(*refs):
        inputs, refs = refs[: len(operands)], refs[len(operands) :]
        dout_gmem, rows_gmem, *refs = refs
        if whole:
            gradients, sums_gmem, refs = (
                refs[: len(operands)],
                refs[len(operands)],
                refs[len(operands) + 1 :],
            )
        else:
            table_gmem, sums_gmem, *refs = refs
            gradients, refs = (refs[:1], refs[1:]) if packed else ((None, *refs[:2]), refs[2:])
        (
            q_smem,
            dout_smem,
            rows_smem,
            k_smem,
            v_smem,
            ds_smem,
            sum_smem,
            out_smem,
            columns_smem,
            *barriers,
        ) = refs
        filled, consumed, keys_filled, keys_consumed, ds_filled, ds_consumed, sum_filled = barriers
        me, block = lax.axis_index("warpgroup"), lax.axis_index("block")

        if whole:
            items = lax.div(heads - block + blocks - 1, jnp.int32(blocks)) * key_blocks
        else:
            items = table_gmem[block, 0]

        def split(a, b):
            return lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b))

        def item(x):
            """The x-th piece of work of this block: batch, key head, block of keys, and the blocks
            of queries first … stop − 1."""
            if whole:
                turn, j = split(x, key_blocks)
                index = turn * blocks + block
            else:
                index, j = split(table_gmem[block, x + 1], key_blocks)
            b, head = split(index, key_heads)
            first, stop = queries_of(j)
            return b, head, j, jnp.int32(first), jnp.int32(stop)

        def query_block(step, first, stop):
            """Head of the group, and block of queries.

            Whole heads end on the diagonal, where tiles of dQ are finished, as far as can be from
            the last additions to them. Split heads begin there, so that blocks of threads at work
            on one head add to different tiles.
            """
            g, i = (
                (jnp.int32(0), step)
                if group == 1
                else (lax.div(step, stop - first), lax.rem(step, stop - first))
            )
            return g, stop - 1 - i if whole else first + i

        def wait_until_free(barrier, done, stages):
            """Until what the slot of the `done`-th was used for before has been consumed."""

            @pl.when(done >= stages)
            def _():
                plgpu.barrier_wait(barrier.at[lax.rem(done, jnp.int32(stages))])

        def drain(barrier, done, stages, begun=0):
            """Every arrival is waited for before the block ends."""
            for extra in range(begun, stages):
                wait_until_free(barrier, done + extra, stages)

        @pl.when(me == MULTIPLIERS)
        def _load():
            plgpu.set_max_registers(24, action="decrease")

            def load(x, done):
                b, head, j, first, stop = item(x)
                slot = lax.rem(x, jnp.int32(tiles.key_stages))
                wait_until_free(keys_consumed, x, tiles.key_stages)
                rows = pl.ds(j * KEYS, KEYS)
                for which, smem in ((1, k_smem), (2, v_smem)):
                    plgpu.copy_gmem_to_smem(
                        operand(inputs, which, b, rows, head), smem.at[slot], keys_filled.at[slot]
                    )

                def load_queries(step, done):
                    g, i = query_block(step, first, stop)
                    slot = lax.rem(done, jnp.int32(tiles.stages))
                    wait_until_free(consumed, done, tiles.stages)
                    h, rows, barrier = (
                        head * group + g,
                        pl.ds(i * queries, queries),
                        filled.at[slot],
                    )
                    plgpu.copy_gmem_to_smem(
                        operand(inputs, 0, b, rows, h), q_smem.at[slot], barrier
                    )
                    plgpu.copy_gmem_to_smem(
                        rows_gmem.at[b, h, :, rows], rows_smem.at[slot], barrier
                    )
                    plgpu.copy_gmem_to_smem(dout_gmem.at[b, rows, h], dout_smem.at[slot], barrier)
                    return done + 1

                return lax.fori_loop(0, (stop - first) * group, load_queries, done)

            done = lax.fori_loop(0, items, load, jnp.int32(0))
            drain(consumed, done, tiles.stages)
            drain(keys_consumed, items, tiles.key_stages)

        @pl.when(me < MULTIPLIERS)
        def _multiply():
            plgpu.set_max_registers(240, action="increase")
            mine = pl.ds(me * HALF, HALF)
            columns_smem[me] = plgpu.broadcasted_iota(
                jnp.int32, (queries,), 0, layout=plgpu.Layout.WGMMA.reduce(0)
            )
            plgpu.commit_smem()

            def write(result, smem, target):
                """Sends 64×64 results on their way, through memory that is free."""
                smem[...] = result.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(smem, target)

            def part_of_dq(ref):
                """The 64×64 of a tile of dQ, queries×D, that this warpgroup computes."""
                return ref.at[mine] if head_dim == HALF else ref.at[:, mine]

            def visible(x, key, query):
                """x, keys×queries from `key` and `query` on, and −∞ where the query does not see
                the key."""
                keys = key + plgpu.broadcasted_iota(
                    jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA
                )
                if not causal:
                    return jnp.where(keys < length, x, -jnp.inf)
                behind = plgpu.load(
                    columns_smem.at[me], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
                )
                columns = lax.broadcast_in_dim(behind, x.shape, [1])
                seen = columns >= keys - query
                if window is not None:
                    seen &= columns < keys - query + window
                return jnp.where(seen, x, -jnp.inf)

            def on_an_edge(key, query):
                """Whether some of 64 keys are not seen by some of a block of queries."""
                if not causal:
                    return key + HALF > length
                edge = query < key + HALF - 1
                if window is not None:
                    edge |= query + queries - 1 >= key + window
                return edge

            def one_item(x, done):
                b, head, j, first, stop = item(x)
                keys_at = lax.rem(x, jnp.int32(tiles.key_stages))
                steps = (stop - first) * group
                key = j * KEYS + me * HALF
                plgpu.barrier_wait(keys_filled.at[keys_at])

                def over_queries(dk_acc, dv_acc):
                    @pl.loop(0, steps)
                    def _step(step):
                        g, i = query_block(step, first, stop)
                        at = done + step
                        slot = lax.rem(at, jnp.int32(tiles.stages))
                        # Else the compiler keeps every address that does not change in a register,
                        # and spills them.
                        key_slot = lax.optimization_barrier(keys_at)
                        h, query = head * group + g, i * queries
                        if whole:
                            sums = part_of_dq(
                                sums_gmem.at[block * group + g, pl.ds(query, queries)]
                            )
                            starts = j == 0
                            if window is not None:
                                starts = j == lax.div(
                                    jnp.maximum(query - (window - 1), 0), jnp.int32(KEYS)
                                )
                            ends = j == (
                                lax.div(query, jnp.int32(KEYS)) if causal else key_blocks - 1
                            )
                        else:
                            sums = part_of_dq(sums_gmem.at[b, pl.ds(query, queries), h])
                        plgpu.barrier_wait(filled.at[slot])

                        def along_columns(which):
                            layout = plgpu.Layout.WGMMA.reduce(0)
                            row = plgpu.load(
                                rows_smem.at[slot, which], layout=layout, optimized=False
                            )
                            return lax.broadcast_in_dim(row, (HALF, queries), [1])

                        def scores(s_acc, dp_acc):
                            # dP − D: sums that begin with −D. Not after S is issued, or the
                            # compiler waits for S.
                            dp_acc[...] = along_columns(1)
                            plgpu.wgmma(
                                s_acc, k_smem.at[key_slot, mine], q_smem.at[slot].transpose((1, 0))
                            )
                            plgpu.wgmma(
                                dp_acc,
                                v_smem.at[key_slot, mine],
                                dout_smem.at[slot].transpose((1, 0)),
                            )
                            if whole:

                                @pl.when(ends & ~starts)
                                def _fetch():
                                    # `sum_smem` is free, and what was added in other pieces of work
                                    # has arrived.
                                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                                    pl.when(step == 0)(lambda: plgpu.wait_smem_to_gmem(0))
                                    plgpu.copy_gmem_to_smem(
                                        sums, sum_smem.at[me], sum_filled.at[me]
                                    )

                            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

                            logits = s * jnp.float32(scale * LOG2_E) - along_columns(0)
                            logits = lax.cond(
                                on_an_edge(key, query),
                                lambda a: visible(a, key, query),
                                lambda a: a,
                                logits,
                            )
                            # dS takes P as it is rounded for dV. That leaves registers to issue dV
                            # here, and dV needs P: otherwise the compiler moves the exponentials,
                            # which run while dP is multiplied, to after dP. The barrier keeps it
                            # from rounding the numbers one by one.
                            p = lax.optimization_barrier(jnp.exp2(logits).astype(dtype))
                            plgpu.wgmma(dv_acc, p, dout_smem.at[slot])
                            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                            return (p.astype(jnp.float32) * dp).astype(dtype)

                        scores_shape = plgpu.ACC((HALF, queries), jnp.float32)
                        ds = pl.run_scoped(scores, scores_shape, scores_shape)

                        ds_slot = lax.rem(at, jnp.int32(tiles.score_stages))

                        # Until the tile of dS is free: of the results of the last piece of work, or
                        # of the products of earlier steps. A piece of work adds to a tile of dQ
                        # once: waiting for all that the last one sent keeps additions in order.
                        pl.when(step == 0)(
                            lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=not whole)
                        )
                        pl.when(step > 0)(
                            lambda: wait_until_free(ds_consumed, at, tiles.score_stages)
                        )
                        for part in range(queries // HALF):
                            ds_smem[ds_slot, part, mine] = ds[:, part * HALF : (part + 1) * HALF]
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(ds_filled.at[ds_slot])
                        plgpu.barrier_wait(ds_filled.at[ds_slot])

                        def products(dq_acc):
                            if head_dim == HALF:
                                left, right = ds_smem.at[ds_slot, me], k_smem.at[key_slot]
                            else:
                                left, right = ds_smem.at[ds_slot, 0], k_smem.at[key_slot, :, mine]
                            plgpu.wgmma(dq_acc, left.transpose((1, 0)), right)
                            plgpu.wgmma(dk_acc, ds, q_smem.at[slot])
                            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)

                        dq = pl.run_scoped(products, plgpu.ACC((HALF, HALF), jnp.float32))
                        plgpu.barrier_arrive(ds_consumed.at[ds_slot])

                        def add():
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                            sum_smem[me] = dq
                            plgpu.commit_smem()
                            to_sums = functools.partial(
                                plgpu.copy_smem_to_gmem, sum_smem.at[me], sums
                            )
                            if whole:
                                pl.when(starts)(to_sums)
                                pl.when(~starts)(lambda: to_sums(reduction_op="add"))
                            else:
                                to_sums(reduction_op="add")

                        def finish():
                            def with_sums():
                                plgpu.barrier_wait(sum_filled.at[me])
                                return dq + plgpu.load(sum_smem.at[me], layout=plgpu.Layout.WGMMA)

                            total = lax.cond(starts, lambda: dq, with_sums)
                            target = part_of_dq(operand(gradients, 0, b, pl.ds(query, queries), h))
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                            write(total * jnp.float32(scale), out_smem.at[me, 0], target)

                        if whole:
                            pl.when(~ends)(add)
                            pl.when(ends)(finish)
                        else:
                            add()
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(consumed.at[slot])

                    return dk_acc[...], dv_acc[...]

                gradient_shape = plgpu.ACC((HALF, head_dim), jnp.float32)
                dk, dv = pl.run_scoped(over_queries, gradient_shape, gradient_shape)
                plgpu.barrier_arrive(keys_consumed.at[keys_at])
                # Results leave through this warpgroup's rows of the next tile of dS, as soon as no
                # one multiplies with them, and through the slots: all but the last copies have
                # left, and so has what the slot held.
                ds_slot = lax.rem(done + steps, jnp.int32(tiles.score_stages))
                wait_until_free(ds_consumed, done + steps, tiles.score_stages)
                part = 0
                for which, result in ((1, dk * jnp.float32(scale)), (2, dv)):
                    target = operand(gradients, which, b, pl.ds(key, HALF), head)
                    for column in range(0, head_dim, HALF):
                        columns = slice(column, column + HALF)
                        if part * HALF < queries:
                            smem = ds_smem.at[ds_slot, part, mine]
                        else:
                            plgpu.wait_smem_to_gmem(min(part, tiles.slots - 1), wait_read_only=True)
                            smem = out_smem.at[me, part % tiles.slots]
                        write(result[:, columns], smem, target.at[:, columns])
                        part += 1
                return done + steps

            done = lax.fori_loop(0, items, one_item, jnp.int32(0))
            drain(ds_consumed, done, tiles.score_stages, begun=1)
            plgpu.wait_smem_to_gmem(0)

    gradient_types = [jax.ShapeDtypeStruct(x.shape, dtype) for x in operands]
    sums_type = jax.ShapeDtypeStruct((blocks * group, padded_length, head_dim), jnp.float32)
    f = plgpu.kernel(
        kernel,
        out_type=[*gradient_types, sums_type] if whole else gradient_types[-2:],
        scratch_types=[
            swizzled((tiles.stages, queries, head_dim), dtype),
            swizzled((tiles.stages, queries, head_dim), dtype),
            plgpu.SMEM((tiles.stages, 2, queries), jnp.float32),
            swizzled((tiles.key_stages, KEYS, head_dim), dtype),
            swizzled((tiles.key_stages, KEYS, head_dim), dtype),
            swizzled((tiles.score_stages, queries // HALF, KEYS, HALF), dtype),
            swizzled((MULTIPLIERS, HALF, HALF), jnp.float32),
            swizzled((MULTIPLIERS, tiles.slots, HALF, HALF), dtype),
            plgpu.SMEM((MULTIPLIERS, queries), jnp.int32),
            plgpu.Barrier(num_arrivals=3, num_barriers=tiles.stages),
            plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=tiles.stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=tiles.key_stages),
            plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=tiles.key_stages),
            plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=tiles.score_stages),
            plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=tiles.score_stages),
            plgpu.Barrier(num_barriers=MULTIPLIERS),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Each piece of shared memory that a warpgroup reads and writes has a wait for a copy,
            # or a commit, in between.
            unsafe_no_auto_barriers=not tiles.more_barriers,
        ),
    )
    if whole:
        gradients = tuple(f(*operands, dout_BTHD, rows_BHRT)[:-1])
        return gradients, _over_queries(gradients[0][:, :, 0]) if bias else None
    sums = jax.new_ref(zeros_BTHD)
    gradients = f(*operands, dout_BTHD, rows_BHRT, jnp.asarray(table), sums)
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
