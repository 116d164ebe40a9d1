"""Backward kernel of flash attention on Hopper (Pallas Mosaic GPU): five matmuls in one kernel.

A work item is a block of 128 keys of one head, and a loop over all blocks of queries that see the
keys. dK and dV stay in registers during the loop. One warpgroup loads. Two warpgroups multiply, 64
of the keys each. For each block of queries:

    QK and dP:  Sᵀ = K Qᵀ, dPᵀ = V dOᵀ                                         `start_scores`
    softmax:    Pᵀ = exp2(scale·log₂e·Sᵀ − log₂e·L), dSᵀ = Pᵀ ∘ (dPᵀ − D)      `softmax`
    gradients:  dV += Pᵀ dO                                                    `scores_and_dv`
                dQ += dS K, dK += dSᵀ Q                                        `dq_and_dk`

Pᵀ and dSᵀ are left operands in registers. dSᵀ is also stored in shared memory, since dQ is a sum
over the keys of both warpgroups.

dQ is summed over blocks of keys in fp32 in global memory, in one of two ways:
    whole heads: a thread block (CTA) processes all key blocks of a head, and is the only writer of
        the head's dQ. The first part of a tile of dQ is stored, and TMA adds the next parts. The
        last part is added in registers, and the result is stored. The buffer of sums has one head
        for each SM and stays in the L2 cache. The order of the additions is fixed.
    split heads: any thread block processes any block of keys, by a table computed before the
        launch. All thread blocks add to one zeroed fp32 dQ in any order. Converting dQ costs two
        more passes over 4 bytes per element, but few heads suffice to occupy all SMs. Few heads run
        at a time, so that the sums stay in L2 (H200, 16×4096×6×128: 2.13 ms; 2.70 via HBM).

| barrier | number | arrivals | who arrives | who waits |
| --- | --- | --- | --- | --- |
| `q_full` | stages | 3 | the copies of q, dO, and L and D | each multiplying warpgroup |
| `q_empty` | stages | 2 | each multiplying warpgroup | loading warpgroup |
| `k_full` | key_stages | 2 | the copies of k and v | each multiplying warpgroup |
| `k_empty` | key_stages | 2 | each multiplying warpgroup | loading warpgroup |
| `ds_full` | score_stages | 2 | multiplying warpgroups, after dS | both warpgroups, before dQ |
| `ds_empty` | score_stages | 2 | multiplying warpgroups, after dQ | both warpgroups, before dS |
| `sums_full` | 2 | 1 | the copy of the sums of dQ | the warpgroup that started the copy |

`sums_full` is used with whole heads only.

The instructions are ordered so that the compiled code keeps the tensor cores busy: ptxas reports
waits for matmuls, and spills.

Shapes: B batch, T time, H query heads, K key heads, D head dimension; R = 2, the statistics
log₂e·L and −D of a query.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic import LOG2_E, Ring, pl, plgpu, store_transposed
from pallas_kernels.attention.mosaic_backward_items import Item, Place, Step
from pallas_kernels.attention.mosaic_backward_tiles import KEYS, MULTIPLIERS, Scratch
from pallas_kernels.attention.mosaic_forward_kernel import operand
from pallas_kernels.attention.mosaic_masks import COLUMNS, HALF, Mask, fill_columns


class Fp8(NamedTuple):
    """How the gradients of packed operands are stored in e5m2, both ways round.

    Attributes:
        scale: ref of a factor of the gradients, fp32 of shape (1,).
        transposed: ref of the transposed gradients, 3×H×D×B×T.
    """

    scale: Any
    transposed: Any


@dataclasses.dataclass(frozen=True)
class Block:
    """The kernel of one thread block: sizes, refs, and the two roles of a warpgroup.

    Attributes:
        whole_heads: whether the schedule is whole heads, else split heads.
        queries: number of queries in a block.
        queries_of: function that maps a block of keys to (first, last + 1) of the blocks of queries
            that see the keys; with documents also a function of the bounds of the block.
        bounds: the padded bounds of documents, or None.
        key_blocks: number of blocks of keys of a head.
        key_heads, group: number of key heads, and of query heads of each key head.
        blocks: number of thread blocks of the grid.
        fp8: None: the gradients are stored in `dtype`.
        gradients: refs of the operands' gradients; None for dQ if this kernel does not store dQ.
        sums_gmem: the sums of dQ.
        me, block: index of the warpgroup and of the thread block.
        items: number of work items of this thread block.
    """

    tiles: Any
    whole_heads: bool
    causal: bool
    scale: float
    window: int | None
    length: int
    head_dim: int
    queries: int
    queries_of: Any
    key_blocks: int
    key_heads: int
    group: int
    blocks: int
    dtype: Any
    fp8: Fp8 | None
    inputs: Any
    dout: Any
    rows: Any
    bounds: Any
    table: Any
    gradients: Any
    sums_gmem: Any
    scratch: Scratch
    me: jax.Array
    block: jax.Array
    items: jax.Array

    @property
    def q_ring(self) -> Ring:
        return Ring(self.tiles.stages, self.scratch.q_full, self.scratch.q_empty)

    @property
    def k_ring(self) -> Ring:
        return Ring(self.tiles.key_stages, self.scratch.k_full, self.scratch.k_empty)

    @property
    def ds_ring(self) -> Ring:
        return Ring(self.tiles.score_stages, self.scratch.ds_full, self.scratch.ds_empty)

    @property
    def mask(self) -> Mask:
        return Mask(self.causal, self.window, self.length, self.bounds)

    def run(self) -> None:
        """Run the role of this warpgroup."""
        pl.when(self.me == MULTIPLIERS)(self.load)
        pl.when(self.me < MULTIPLIERS)(self.multiply)

    def item(self, x):
        """Return work item x of this thread block: batch, key head, block of keys, and the blocks
        of queries first … stop − 1."""
        if self.whole_heads:
            n, j = _divmod(x, self.key_blocks)
            index = n * self.blocks + self.block
            if self.bounds is not None:
                index = self.table[self.block, n + 1]
        else:
            index, j = _divmod(self.table[self.block, x + 1], self.key_blocks)
        b, head = _divmod(index, self.key_heads)
        if self.bounds is None:
            first, stop = self.queries_of(j)
        else:
            first_BT, last_BT = self.bounds
            first, stop = self.queries_of(j, first_BT[b, j * KEYS], last_BT[b, j * KEYS + KEYS - 1])
        return b, head, j, jnp.int32(first), jnp.int32(stop)

    def query_block(self, step, first, stop):
        """Return the head of the group, and the block of queries.

        Whole heads end on the diagonal: tiles of dQ are finished as late as possible after the last
        additions to these tiles. Split heads begin on the diagonal, so that thread blocks that work
        on the same head add to different tiles.
        """
        g, i = (
            (jnp.int32(0), step)
            if self.group == 1
            else (lax.div(step, stop - first), lax.rem(step, stop - first))
        )
        return g, stop - 1 - i if self.whole_heads else first + i

    # ------------------------------------------------------------------------ loading warpgroup

    def load(self) -> None:
        """Load the operands of all work items."""
        plgpu.set_max_registers(24, action="decrease")
        scratch, q_ring, k_ring = self.scratch, self.q_ring, self.k_ring

        def one_item(x, fills):
            b, head, j, first, stop = self.item(x)
            slot = k_ring.slot(x)
            k_ring.wait_empty(x)
            rows = pl.ds(j * KEYS, KEYS)
            for which, smem in ((1, scratch.k), (2, scratch.v)):
                plgpu.copy_gmem_to_smem(
                    operand(self.inputs, which, b, rows, head), smem.at[slot], k_ring.full.at[slot]
                )

            def load_queries(step, fills):
                g, i = self.query_block(step, first, stop)
                slot = q_ring.slot(fills)
                q_ring.wait_empty(fills)
                h, rows, full = (
                    head * self.group + g,
                    pl.ds(i * self.queries, self.queries),
                    q_ring.full.at[slot],
                )
                plgpu.copy_gmem_to_smem(
                    operand(self.inputs, 0, b, rows, h), scratch.q.at[slot], full
                )
                plgpu.copy_gmem_to_smem(self.rows.at[b, h, :, rows], scratch.rows.at[slot], full)
                plgpu.copy_gmem_to_smem(self.dout.at[b, rows, h], scratch.dout.at[slot], full)
                return fills + 1

            return lax.fori_loop(0, (stop - first) * self.group, load_queries, fills)

        fills = lax.fori_loop(0, self.items, one_item, jnp.int32(0))
        q_ring.drain_unrolled(fills)
        k_ring.drain_unrolled(self.items)

    # -------------------------------------------------------------------- multiplying warpgroups

    def multiply(self) -> None:
        """Compute the gradients of all work items."""
        plgpu.set_max_registers(240, action="increase")
        mine = pl.ds(self.me * HALF, HALF)
        fill_columns(self.scratch.columns.at[self.me])
        fills = lax.fori_loop(
            0, self.items, functools.partial(self.one_item, mine=mine), jnp.int32(0)
        )
        self.ds_ring.drain_unrolled(fills, begun=1)
        plgpu.wait_smem_to_gmem(0)

    def one_item(self, x, fills, mine):
        """Compute the gradients of work item x. Return the fills of the query slots so far."""
        b, head, j, first, stop = self.item(x)
        k_slot = self.k_ring.slot(x)
        steps = (stop - first) * self.group
        key = j * KEYS + self.me * HALF
        seen_by = self.mask.seen_by(b, key)
        item = Item(b, head, j, first, stop, k_slot, steps, key, fills, mine, seen_by)
        self.k_ring.wait_full(k_slot)

        def over_queries(dk_acc, dv_acc):
            pl.loop(0, steps)(lambda number: self.one_step(item, number, dk_acc, dv_acc))
            return dk_acc[...], dv_acc[...]

        shape = plgpu.ACC((HALF, self.head_dim), jnp.float32)
        dk, dv = pl.run_scoped(over_queries, shape, shape)
        self.k_ring.release(k_slot)
        self.store_dk_and_dv(item, dk, dv)
        return fills + steps

    def one_step(self, item, number, dk_acc, dv_acc) -> None:
        """Add the contributions of one block of queries to dK, dV and dQ."""
        step = self.step(item, number)
        self.q_ring.wait_full(step.slot)
        shape = plgpu.ACC((HALF, self.queries), jnp.float32)
        ds = pl.run_scoped(functools.partial(self.scores_and_dv, item, step, dv_acc), shape, shape)
        ds_slot = self.ds_ring.slot(step.fill)
        self.share_ds(item, step, ds_slot, ds)
        dq = pl.run_scoped(
            lambda dq_acc: self.dq_and_dk(item, step, ds_slot, ds, dq_acc, dk_acc),
            plgpu.ACC((HALF, HALF), jnp.float32),
        )
        self.ds_ring.release(ds_slot)
        if self.whole_heads:
            pl.when(~step.ends)(lambda: self.add_to_sums(step, dq))
            pl.when(step.ends)(lambda: self.finish_dq(item, step, dq))
        else:
            self.add_to_sums(step, dq)
        plgpu.wgmma_wait(0)
        self.q_ring.release(step.slot)

    def step(self, item, number) -> Step:
        g, i = self.query_block(number, item.first, item.stop)
        fill = item.fills + number
        slot = self.q_ring.slot(fill)
        # Without the barrier, the compiler keeps every loop-invariant address in a register, and
        # spills registers.
        k_slot = lax.optimization_barrier(item.k_slot)
        h, query = item.head * self.group + g, i * self.queries
        starts = ends = None
        rows = pl.ds(query, self.queries)
        if self.whole_heads:
            sums = self.part_of_dq(item, self.sums_gmem.at[self.block * self.group + g, rows])
            first, last = self.key_blocks_of(item.b, query)
            starts, ends = item.j == first, item.j == last
        else:
            sums = self.part_of_dq(item, self.sums_gmem.at[item.b, rows, h])
        return Step(number, fill, slot, k_slot, h, query, sums, starts, ends)

    def key_blocks_of(self, b, query):
        """Return the first and the last block of keys that a block of queries sees."""
        if self.bounds is not None:
            first = lax.div(self.bounds.first_BT[b, query], jnp.int32(KEYS))
        elif self.window is not None:
            first = lax.div(jnp.maximum(query - (self.window - 1), 0), jnp.int32(KEYS))
        else:
            first = 0
        if self.causal:
            last = lax.div(query, jnp.int32(KEYS))
        elif self.bounds is not None:
            end = self.bounds.last_BT[b, query + (self.queries - 1)]
            last = lax.div(end, jnp.int32(KEYS))
        else:
            last = self.key_blocks - 1
        return first, last

    def part_of_dq(self, item, ref):
        """Return this warpgroup's 64×64 part of a tile of dQ, queries×D."""
        return ref.at[item.mine] if self.head_dim == HALF else ref.at[:, item.mine]

    def scores_and_dv(self, item, step, dv_acc, s_acc, dp_acc):
        """Compute S, dP, P and dS, and issue the matmul for dV. Return dS."""
        self.start_scores(item, step, s_acc, dp_acc)
        if self.whole_heads:

            @pl.when(step.ends & ~step.starts)
            def _fetch():
                # `scratch.sums` is free, and the additions of other work items have arrived.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                pl.when(step.number == 0)(lambda: plgpu.wait_smem_to_gmem(0))
                plgpu.copy_gmem_to_smem(
                    step.sums, self.scratch.sums.at[self.me], self.scratch.sums_full.at[self.me]
                )

        p = self.softmax(item, step, plgpu.wgmma_accumulator_load(s_acc, wait_n=1))
        plgpu.wgmma(dv_acc, p, self.scratch.dout.at[step.slot])
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
        return (p.astype(jnp.float32) * dp).astype(self.dtype)

    def start_scores(self, item, step, s_acc, dp_acc) -> None:
        """Issue the matmuls Sᵀ = K Qᵀ and (dP − D)ᵀ = V dOᵀ − D."""
        scratch = self.scratch
        # The accumulator of dP − D begins with −D. Set it before S is issued: set afterwards, the
        # compiler waits for S.
        dp_acc[...] = self.along_columns(step, 1)
        keys, values = scratch.k.at[step.k_slot, item.mine], scratch.v.at[step.k_slot, item.mine]
        plgpu.wgmma(s_acc, keys, scratch.q.at[step.slot].transpose((1, 0)))
        plgpu.wgmma(dp_acc, values, scratch.dout.at[step.slot].transpose((1, 0)))

    def softmax(self, item, step, s):
        """Return P, rounded.

        dS uses the rounded P, which saves registers: the matmul for dV can be issued right after
        the softmax. Since dV needs P, the compiler keeps the exponentials before the wait for dP.
        The optimization barrier prevents rounding of the numbers one by one.
        """
        logits = s * jnp.float32(self.scale * LOG2_E) - self.along_columns(step, 0)
        logits = lax.cond(
            self.mask.on_an_edge(item.key, step.query, self.queries, item.seen_by),
            lambda a: self.mask.hide_transposed(
                a, item.b, item.key, step.query, self.scratch.columns.at[self.me]
            ),
            lambda a: a,
            logits,
        )
        return lax.optimization_barrier(jnp.exp2(logits).astype(self.dtype))

    def along_columns(self, step, which):
        """Return log₂e·L (which = 0) or −D (which = 1) of the queries, broadcast over the keys."""
        row = plgpu.load(self.scratch.rows.at[step.slot, which], layout=COLUMNS, optimized=False)
        return lax.broadcast_in_dim(row, (HALF, self.queries), [1])

    def share_ds(self, item, step, ds_slot, ds) -> None:
        """Store this warpgroup's rows of dS, and wait for the rows of the other warpgroup."""
        # Wait until the results of the last work item, and the matmuls of earlier steps, release
        # the tile of dS. A work item adds to a tile of dQ once: the wait for all copies of the
        # last item keeps the additions in order.
        pl.when(step.number == 0)(
            lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=not self.whole_heads)
        )
        pl.when(step.number > 0)(lambda: self.ds_ring.wait_empty(step.fill))
        for part in range(self.queries // HALF):
            columns = slice(part * HALF, (part + 1) * HALF)
            self.scratch.ds[ds_slot, part, item.mine] = ds[:, columns]
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.ds_ring.full.at[ds_slot])
        self.ds_ring.wait_full(ds_slot)

    def dq_and_dk(self, item, step, ds_slot, ds, dq_acc, dk_acc):
        """Issue the matmuls dQ = dS K and dK += dSᵀ Q. Return dQ, 64×64."""
        ds_smem, k_smem = self.scratch.ds, self.scratch.k
        if self.head_dim == HALF:
            left, right = ds_smem.at[ds_slot, self.me], k_smem.at[step.k_slot]
        else:
            left, right = ds_smem.at[ds_slot, 0], k_smem.at[step.k_slot, :, item.mine]
        plgpu.wgmma(dq_acc, left.transpose((1, 0)), right)
        plgpu.wgmma(dk_acc, ds, self.scratch.q.at[step.slot])
        return plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)

    def add_to_sums(self, step, dq) -> None:
        """Add dQ to the sums in global memory, or store dQ if dQ is the first part."""
        sums_smem = self.scratch.sums
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sums_smem[self.me] = dq
        plgpu.commit_smem()
        to_sums = functools.partial(plgpu.copy_smem_to_gmem, sums_smem.at[self.me], step.sums)
        if self.whole_heads:
            pl.when(step.starts)(to_sums)
            pl.when(~step.starts)(lambda: to_sums(reduction_op="add"))
        else:
            to_sums(reduction_op="add")

    def finish_dq(self, item, step, dq) -> None:
        """Add the sums of dQ to the last part of dQ, and store the result."""
        scratch, me = self.scratch, self.me

        def with_sums():
            plgpu.barrier_wait(scratch.sums_full.at[me])
            return dq + plgpu.load(scratch.sums.at[me], layout=plgpu.Layout.WGMMA)

        total = lax.cond(step.starts, lambda: dq, with_sums)
        tokens, columns = pl.ds(step.query + me * HALF, HALF), slice(None)
        if self.head_dim > HALF:
            tokens, columns = pl.ds(step.query, self.queries), item.mine
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        place = Place(0, item.b, tokens, step.h, columns)
        self.store(total * jnp.float32(self.scale), scratch.out.at[me, 0], place)

    def store_dk_and_dv(self, item, dk, dv) -> None:
        """Store the gradients of 64 keys and values.

        The staging memory is this warpgroup's rows of the next tile of dS, as soon as no matmul
        reads the tile, and the slots of `scratch.out`; for FP8, the slots only. The wait before a
        slot is reused leaves only newer copies in progress.
        """
        ds_ring, fill = self.ds_ring, item.fills + item.steps
        ds_slot = ds_ring.slot(fill)
        ds_ring.wait_empty(fill)
        part = 0
        for which, result in ((1, dk * jnp.float32(self.scale)), (2, dv)):
            for column in range(0, self.head_dim, HALF):
                columns = slice(column, column + HALF)
                place = Place(which, item.b, pl.ds(item.key, HALF), item.head, columns)
                if part * HALF < self.queries and self.fp8 is None:
                    smem = self.scratch.ds.at[ds_slot, part, item.mine]
                else:
                    slots = self.tiles.slots
                    plgpu.wait_smem_to_gmem(min(part, slots - 1), wait_read_only=True)
                    smem = self.scratch.out.at[self.me, part % slots]
                self.store(result[:, columns], smem, place)
                part += 1

    def store(self, result, smem, place: Place) -> None:
        """Start the copy of 64×64 results to global memory, through shared memory that is free."""
        which, b, tokens, head, columns = place
        target = operand(self.gradients, which, b, tokens, head).at[:, columns]
        if self.fp8 is None:
            smem[...] = result.astype(self.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, target)
            return
        rows, transposed = smem.at[0], smem.at[1]
        quantized = (result * self.fp8.scale[0]).astype(rows.dtype)
        rows[...] = quantized
        store_transposed(transposed, quantized)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(rows, target, commit_group=False)
        target = self.fp8.transposed.at[which, head, :, b, tokens].at[columns]
        plgpu.copy_smem_to_gmem(transposed, target)


def _divmod(a, b):
    return lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b))
