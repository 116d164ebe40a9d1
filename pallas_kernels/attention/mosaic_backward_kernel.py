"""Backward kernel of flash attention on Hopper (Pallas Mosaic GPU): five matmuls in one kernel.

A work item is a block of keys of one head, and a loop over all blocks of queries that see the keys.
dK and dV stay in registers during the loop. One warpgroup loads. Two warpgroups multiply, half of
the keys each, in tiles of 64 keys × 64 queries. For each tile:

    QK and dP:  Sᵀ = K Qᵀ, dPᵀ = V dOᵀ                                         `start_scores`
    softmax:    Pᵀ = exp2(scale·log₂e·Sᵀ − log₂e·L), dSᵀ = Pᵀ ∘ (dPᵀ − D)      `softmax`
                with a soft cap c: X = tanh(scale/c·S), Pᵀ = exp2(c·log₂e·Xᵀ − log₂e·L),
                dSᵀ = Pᵀ ∘ (1 − X²)ᵀ ∘ (dPᵀ − D)
    gradients:  dV += Pᵀ dO                                                    `scores_and_dv`
                dK += dSᵀ Q, and for each block dQ += dS K

Pᵀ and dSᵀ are left operands in registers. dSᵀ is also stored in shared memory, since dQ is a sum
over the keys of both warpgroups. A head dimension has one of two steps:
    D = 64, `step_of_tiles`: 2×2 tiles for each warpgroup, then dQ. The warpgroups wait for dS of
        each other once in four tiles, and dQ is added to global memory once for 256 keys.
    D = 128, `late_step`: one tile, and dQ of the block of queries before. Then no warpgroup waits
        for dS of the other, and the matmul for dK hides the store of dQ. The first step discards
        its dQ, and the last block's dQ is computed after the loop.

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
| `k_full` | 1 | 2 | the copies of k and v | each multiplying warpgroup |
| `k_empty` | 1 | 2 | each multiplying warpgroup | loading warpgroup |
| `ds_full` | score_stages | 2 | multiplying warpgroups, after dS, and late dQ | both, before dQ |
| `ds_empty` | 1 | 2 | multiplying warpgroups, after dQ | both warpgroups, before dS |
| `sums_full` | 2 | 1 | the copy of the sums of dQ | the warpgroup that started the copy |

`sums_full` exists with whole heads only, `ds_empty` only with one block of dS. Of two, the block to
be stored is free: after its matmul ended, each warpgroup has arrived on the other's `ds_full`.

The instructions are ordered so that the compiled code keeps the tensor cores busy: ptxas reports
waits for matmuls, and spills.

Shapes: B batch, T queries, S keys, H query heads, K key heads, D head dimension; R = 2, the
statistics log₂e·L and −D of a query.
"""

import collections
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic import LOG2_E, Ring, pl, plgpu, scratch, store_transposed, swizzled
from pallas_kernels.attention.mosaic_forward_kernel import divmod_int32, operand
from pallas_kernels.attention.mosaic_masks import COLUMNS, HALF, Mask, fill_columns

MULTIPLIERS = 2
# By head dimension, the fastest of those measured that fit into registers and shared memory.
KEYS = {64: 256, 128: 128}
"""Keys of a work item. dK and dV are in registers."""
QUERIES = {64: 128, 128: 64}
"""Queries of a step. Each multiplying warpgroup adds a HALF×HALF part to dQ."""
STAGES = {64: 3, 128: 2}
"""Slots of HALF queries in shared memory."""
SCORE_STAGES = {64: 1, 128: 2}
"""Blocks of dS in shared memory. With two, dQ is late."""
SLOTS = {64: 1, 128: 2}
"""64×64 parts of results in shared memory for each warpgroup, in addition to the parts in the
blocks of dS."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes and options of a call.

    Attributes:
        options: `Options`. With documents the window is None: the bounds include the window.
        length, keys: number of queries and of keys.
        key_heads, group: number of key heads, and of query heads of each key head.
        whole_heads: whether dQ is summed by whole heads, else by split heads.
        blocks: number of thread blocks of the grid.
    """

    options: Any
    length: int
    keys: int
    key_heads: int
    group: int
    head_dim: int
    dtype: Any
    whole_heads: bool
    blocks: int

    @property
    def queries(self) -> int:
        """Number of queries in a block."""
        return QUERIES[self.head_dim]

    @property
    def tiles(self) -> int:
        """Number of tiles of HALF queries in a block, and of HALF keys of a warpgroup."""
        return self.queries // HALF

    @property
    def block_keys(self) -> int:
        """Number of keys in a block."""
        return KEYS[self.head_dim]

    @property
    def key_blocks(self) -> int:
        """Number of blocks of keys of a head."""
        return pl.cdiv(self.keys, self.block_keys)

    def queries_of(self, j, first_query=None, last_query=None):
        """Return (first, stop): the blocks first … stop − 1 of queries see keys of key block j.

        With unequal lengths, the nearest block of queries if none sees a key: its gradients are 0.

        Args:
            first_query, last_query: with documents, the first and the last query that see such a
                key.
        """
        window, queries, keys = self.options.window, self.queries, self.block_keys
        least, most, div = jnp.minimum, jnp.maximum, lambda a: lax.div(a, jnp.int32(queries))
        if isinstance(j, int):
            least, most, div = min, max, lambda a: a // queries
        first, stop = 0, pl.cdiv(self.length, queries)
        if self.options.causal and self.keys != self.length:
            first = least(div(most(j * keys - self.options.start, 0)), stop - 1)
        elif self.options.causal:
            first = j * (keys // queries)
        elif first_query is not None:
            first = lax.div(first_query, jnp.int32(queries))
        if last_query is not None:
            stop = lax.div(last_query, jnp.int32(queries)) + 1
        if window is not None:
            behind = j * keys + (keys + window - 2)
            if self.options.start:
                behind = most(behind - self.options.start, 0)
            stop = least(stop, div(behind) + 1)
        return first, stop


def scratch_types(sizes: Sizes, fp8: bool) -> Any:
    """Return the types of the shared memory and the barriers; `fp8` as in `Block`."""
    head_dim, dtype = sizes.head_dim, sizes.dtype
    stages, score_stages, keys = STAGES[head_dim], SCORE_STAGES[head_dim], sizes.block_keys
    part = (2, HALF, HALF) if fp8 else (HALF, HALF)
    return scratch(
        q=swizzled((stages, HALF, head_dim), dtype),
        dout=swizzled((stages, HALF, head_dim), dtype),
        rows=plgpu.SMEM((stages + (head_dim == HALF), 2, HALF), jnp.float32),  # and `columns`
        k=swizzled((1, keys, head_dim), dtype),
        v=swizzled((1, keys, head_dim), dtype),
        ds=swizzled((score_stages, sizes.tiles, keys, HALF), dtype),
        sums=swizzled((MULTIPLIERS, HALF, HALF), jnp.float32),
        out=swizzled((MULTIPLIERS, SLOTS[head_dim], *part), jnp.float8_e5m2 if fp8 else dtype),
        columns=None if head_dim == HALF else plgpu.SMEM((MULTIPLIERS, HALF), jnp.int32),
        q_full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        q_empty=plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=stages),
        k_full=plgpu.Barrier(num_arrivals=2, num_barriers=1),
        k_empty=plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=1),
        ds_full=plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=score_stages),
        ds_empty=None
        if score_stages > 1
        else plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=1),
        sums_full=plgpu.Barrier(num_barriers=MULTIPLIERS),
    )


class Item(collections.namedtuple("Item", "b head j first stop steps key fills mine seen_by")):
    """A work item of one multiplying warpgroup.

    Attributes:
        head, j: key head and block of keys.
        first, stop: the blocks of queries that see the keys.
        steps: number of blocks of queries over all heads of the group.
        key: the warpgroup's first key.
        fills: number of steps before this item.
        mine: the warpgroup's slice of a block of dQ. Of a tile (`Block.tile`), its slice of keys.
        seen_by: with documents, which queries see the keys of each tile (`Mask.seen_by`).
    """


class Step(collections.namedtuple("Step", "number fill slot k_slot h query sums starts ends")):
    """One block of queries of a work item.

    Attributes:
        number, fill: index of the step in the work item, and in the thread block.
        slot, k_slot: slots of the tile's queries, and of the keys: 0, unknown to the compiler.
        h, query: query head, and first query of the block or tile.
        sums: this warpgroup's part of the sums of dQ in global memory.
        starts, ends: whether this block of keys is the sums' first, last; None with split heads.
    """


class Place(collections.namedtuple("Place", "which b tokens head columns")):
    """Position of 64×64 results in the gradients of q, k or v (which = 0, 1, 2)."""


class Fp8(collections.namedtuple("Fp8", "scale transposed")):
    """How the gradients of packed operands are stored in e5m2, both ways round.

    Attributes:
        scale: ref of a factor of the gradients, fp32 of shape (1,).
        transposed: ref of the transposed gradients, 3×H×D×B×T.
    """


@dataclasses.dataclass(frozen=True)
class Block:
    """The kernel of one thread block: sizes, refs, and the two roles of a warpgroup.

    Attributes:
        bounds: the padded bounds of documents, or None.
        fp8: None: the gradients are stored in `sizes.dtype`.
        gradients: refs of the operands' gradients; None for dQ if this kernel does not store dQ.
        sums_gmem: the sums of dQ.
        me, block: index of the warpgroup and of the thread block.
        items: number of work items of this thread block.
    """

    sizes: Sizes
    inputs: Any
    dout: Any
    rows: Any
    bounds: Any
    table: Any
    fp8: Fp8 | None
    gradients: Any
    sums_gmem: Any
    scratch: Any
    me: jax.Array
    block: jax.Array
    items: jax.Array

    @property
    def q_ring(self) -> Ring:
        return Ring(STAGES[self.sizes.head_dim], self.scratch.q_full, self.scratch.q_empty)

    @property
    def k_ring(self) -> Ring:
        return Ring(1, self.scratch.k_full, self.scratch.k_empty)

    @property
    def ds_ring(self) -> Ring:
        return Ring(SCORE_STAGES[self.sizes.head_dim], self.scratch.ds_full, self.scratch.ds_empty)

    @property
    def late(self) -> bool:
        """Whether a step computes dQ of the block of queries before."""
        return self.ds_ring.slots == 2

    @property
    def columns(self):
        """This warpgroup's numbers 0, 1, …, one for each column of a tile. For D = 64 they are in
        the last slot of `rows`: shared memory has no room for another allocation."""
        scratch, last = self.scratch, STAGES[self.sizes.head_dim]
        return (scratch.rows.at[last] if scratch.columns is None else scratch.columns).at[self.me]

    @property
    def mask(self) -> Mask:
        return Mask(self.sizes.options, self.sizes.keys, self.bounds)

    def run(self) -> None:
        """Run the role of this warpgroup."""
        pl.when(self.me == MULTIPLIERS)(self.load)
        pl.when(self.me < MULTIPLIERS)(self.multiply)

    def item(self, x):
        """Return work item x of this thread block: batch, key head, block of keys, and the blocks
        of queries first … stop − 1."""
        if self.sizes.whole_heads:
            n, j = divmod_int32(x, self.sizes.key_blocks)
            index = n * self.sizes.blocks + self.block
            if self.bounds is not None:
                index = self.table[self.block, n + 1]
        else:
            index, j = divmod_int32(self.table[self.block, x + 1], self.sizes.key_blocks)
        b, head = divmod_int32(index, self.sizes.key_heads)
        if self.bounds is None:
            first, stop = self.sizes.queries_of(j)
        else:
            first_BT, last_BT = self.bounds
            keys = self.sizes.block_keys
            first, stop = self.sizes.queries_of(
                j, first_BT[b, j * keys], last_BT[b, j * keys + keys - 1]
            )
        return b, head, j, jnp.int32(first), jnp.int32(stop)

    def query_block(self, step, first, stop):
        """Return the head of the group, and the block of queries.

        The last blocks come first. Thread blocks that work on the same heads then read the same
        queries at the same time, and the sums of dQ that they add to are in the L2 cache. Whole
        heads finish tiles of dQ as late as possible after the last additions to these tiles.
        """
        group = jnp.int32(self.sizes.group)
        return lax.rem(step, group), stop - 1 - lax.div(step, group)

    # ------------------------------------------------------------------------ loading warpgroup

    def load(self) -> None:
        """Load the operands of all work items."""
        plgpu.set_max_registers(24, action="decrease")
        scratch, q_ring, k_ring = self.scratch, self.q_ring, self.k_ring

        def one_item(x, fills):
            b, head, j, first, stop = self.item(x)
            k_ring.wait_empty(x)
            rows = pl.ds(j * self.sizes.block_keys, self.sizes.block_keys)
            for which, smem in ((1, scratch.k), (2, scratch.v)):
                plgpu.copy_gmem_to_smem(
                    operand(self.inputs, which, b, rows, head), smem.at[0], k_ring.full.at[0]
                )

            def load_queries(step, fills):
                g, i = self.query_block(step, first, stop)
                for part in range(self.sizes.tiles):
                    slot = q_ring.slot(fills)
                    q_ring.wait_empty(fills)
                    h, full = head * self.sizes.group + g, q_ring.full.at[slot]
                    rows = pl.ds(i * self.sizes.queries + part * HALF, HALF)
                    queries, lse = operand(self.inputs, 0, b, rows, h), self.rows.at[b, h, :, rows]
                    plgpu.copy_gmem_to_smem(queries, scratch.q.at[slot], full)
                    plgpu.copy_gmem_to_smem(lse, scratch.rows.at[slot], full)
                    plgpu.copy_gmem_to_smem(self.dout.at[b, rows, h], scratch.dout.at[slot], full)
                    fills += 1
                return fills

            return lax.fori_loop(0, (stop - first) * self.sizes.group, load_queries, fills)

        fills = lax.fori_loop(0, self.items, one_item, jnp.int32(0))
        q_ring.drain_unrolled(fills)
        k_ring.drain_unrolled(self.items)

    # -------------------------------------------------------------------- multiplying warpgroups

    def multiply(self) -> None:
        """Compute the gradients of all work items."""
        plgpu.set_max_registers(240, action="increase")
        mine = pl.ds(self.me * HALF, HALF)
        fill_columns(self.columns)
        lax.fori_loop(0, self.items, functools.partial(self.one_item, mine=mine), jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def one_item(self, x, fills, mine):
        """Compute the gradients of work item x. Return the fills of the query slots so far."""
        b, head, j, first, stop = self.item(x)
        steps = (stop - first) * self.sizes.group
        tiles = self.sizes.tiles
        key = j * self.sizes.block_keys + self.me * (tiles * HALF)
        seen_by = [self.mask.seen_by(b, key + n * HALF) for n in range(tiles)]
        item = Item(b, head, j, first, stop, steps, key, fills, mine, seen_by)
        self.k_ring.wait_full(0)

        def over_queries(*accs):
            one_step = self.late_step if self.late else self.step_of_tiles
            pl.loop(0, steps)(lambda number: one_step(item, number, *accs))
            if self.late:
                self.last_dq(item)
            return tuple(acc[...] for acc in accs)

        shape = plgpu.ACC((HALF, self.sizes.head_dim), jnp.float32)
        results = pl.run_scoped(over_queries, *[shape] * (2 * tiles))
        self.k_ring.release(0)
        self.store_dk_and_dv(item, results)
        return fills + steps

    def tile(self, item, n):
        """Return the item of the n-th of this warpgroup's tiles of keys."""
        if self.sizes.tiles == 1:
            return item._replace(seen_by=item.seen_by[0])
        # The barrier: see `step`.
        mine = pl.ds(lax.optimization_barrier(self.me) * (self.sizes.tiles * HALF) + n * HALF, HALF)
        return item._replace(key=item.key + n * HALF, mine=mine, seen_by=item.seen_by[n])

    def step_of_tiles(self, item, number, *accs) -> None:
        """Add the contributions of one block of queries to dK and dV, tile by tile, and to dQ."""
        step = self.step(item, number)
        ds_slot = self.ds_ring.slot(step.fill)
        self.fetch_sums(step, True)

        @pl.loop(0, self.sizes.tiles)
        def _(part):
            fill = self.sizes.tiles * step.fill + part
            slot = self.q_ring.slot(fill)
            self.q_ring.wait_full(slot)
            queries = step._replace(slot=slot, query=step.query + part * HALF)
            for n in range(self.sizes.tiles):
                self.one_tile(self.tile(item, n), queries, n, part, *accs[2 * n : 2 * n + 2])
            plgpu.commit_smem()  # dS is stored, and L and D are read before TMA overwrites them
            self.q_ring.release(slot)

        plgpu.barrier_arrive(self.ds_ring.full.at[ds_slot])
        self.ds_ring.wait_full(ds_slot)
        dq = self.dq(item, step)
        self.ds_ring.release(ds_slot)
        self.add_dq(item, step, dq, True)

    def one_tile(self, item, step, n, part, dk_acc, dv_acc) -> None:
        """Add the contributions of a tile to dK and dV, and store dS."""
        shape = plgpu.ACC((HALF, HALF), jnp.float32)
        ds_smem = self.scratch.ds.at[self.ds_ring.slot(step.fill), part, item.mine]

        def wait_for_ds():
            """Wait until the results of the last work item, or the matmuls of the step before,
            release the block of dS."""
            if n == 0:
                pl.when((part == 0) & (step.number == 0))(self.wait_for_last_item)
                pl.when((part == 0) & (step.number > 0))(lambda: self.ds_ring.wait_empty(step.fill))

        query = self.sizes.options.position(step.query)
        hidden = self.mask.hides_all(item.key, query, item.seen_by)

        @pl.when(~hidden)
        def _():
            run = functools.partial(self.scores_and_dv, item, step, None, True, dv_acc)
            ds = pl.run_scoped(run, shape, shape)
            wait_for_ds()
            plgpu.wgmma(dk_acc, ds, self.scratch.q.at[step.slot])
            ds_smem[...] = ds
            plgpu.wgmma_wait(0)

        @pl.when(hidden)
        def _():  # dQ is a sum over all keys
            wait_for_ds()
            zeros = jnp.zeros((HALF, HALF), self.sizes.dtype)
            ds_smem[...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)

    def late_step(self, item, number, dk_acc, dv_acc) -> None:
        """Add the contributions of one block of queries to dK and dV, and those of the block before
        to dQ."""
        step = self.step(item, number)
        self.q_ring.wait_full(step.slot)
        of_dq, counts = self.step(item, jnp.maximum(number - 1, 0)), number > 0
        pl.when(counts)(lambda: self.ds_ring.wait_full(self.ds_ring.slot(step.fill + 1)))
        shape = plgpu.ACC((HALF, HALF), jnp.float32)
        run = functools.partial(self.scores_and_dv, self.tile(item, 0), step, of_dq, counts, dv_acc)
        ds = pl.run_scoped(run, shape, shape)
        dq = pl.run_scoped(
            lambda dq_acc: self.late_dq_and_dk(item, step, ds, dq_acc, dk_acc),
            plgpu.ACC((HALF, HALF), jnp.float32),
        )
        self.add_dq(item, of_dq, dq, counts)
        plgpu.wgmma_wait(0)
        self.q_ring.release(step.slot)

    def last_dq(self, item) -> None:
        """Add the contribution of the last block of queries to dQ."""
        step = self.step(item, item.steps - 1)
        self.ds_ring.wait_full(self.ds_ring.slot(step.fill))
        self.fetch_sums(step, True)
        self.add_dq(item, step, self.dq(item, step), True)

    def dq(self, item, step):
        """Return dQ of a block of queries, 64×64."""

        def run(dq_acc):
            self.start_dq(item, step, self.ds_ring.slot(step.fill), dq_acc)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # for `add_to_sums`
            return plgpu.wgmma_accumulator_load(dq_acc)

        return pl.run_scoped(run, plgpu.ACC((HALF, HALF), jnp.float32))

    def step(self, item, number) -> Step:
        g, i = self.query_block(number, item.first, item.stop)
        fill = item.fills + number
        slot = self.q_ring.slot(fill)
        # Without the barrier, the compiler keeps every loop-invariant address in a register, and
        # spills registers.
        k_slot = lax.optimization_barrier(jnp.int32(0))
        h, query = item.head * self.sizes.group + g, i * self.sizes.queries
        starts = ends = None
        rows = pl.ds(query, self.sizes.queries)
        if self.sizes.whole_heads:
            sums = self.part_of_dq(item, self.sums_gmem.at[self.block * self.sizes.group + g, rows])
            first, last = self.key_blocks_of(item.b, query)
            starts, ends = item.j == first, item.j == last
        else:
            sums = self.part_of_dq(item, self.sums_gmem.at[item.b, rows, h])
        return Step(number, fill, slot, k_slot, h, query, sums, starts, ends)

    def key_blocks_of(self, b, query):
        """Return the first and the last block of keys that a block of queries sees."""
        options, keys = self.sizes.options, jnp.int32(self.sizes.block_keys)
        if self.bounds is not None:
            first = lax.div(self.bounds.first_BT[b, query], keys)
        elif options.window is not None:
            first = lax.div(jnp.maximum(options.position(query) - (options.window - 1), 0), keys)
        else:
            first = 0
        if options.causal and options.start:  # queries that are out of bounds see no further key
            last = options.position(query) + (self.sizes.queries - 1)
            last = lax.div(jnp.minimum(last, self.sizes.keys - 1), keys)
        elif options.causal:
            last = lax.div(query, keys)
        elif self.bounds is not None:
            end = self.bounds.last_BT[b, query + (self.sizes.queries - 1)]
            last = lax.div(end, keys)
        else:
            last = self.sizes.key_blocks - 1
        return first, last

    def part_of_dq(self, item, ref):
        """Return this warpgroup's 64×64 part of a tile of dQ, queries×D."""
        return ref.at[item.mine] if self.sizes.head_dim == HALF else ref.at[:, item.mine]

    def scores_and_dv(self, item, step, of_dq, counts, dv_acc, s_acc, dp_acc):
        """Compute S, dP, P and dS, and issue the matmul for dV. Return dS."""
        lse = self.start_scores(item, step, s_acc, dp_acc)
        if of_dq is not None:
            self.fetch_sums(of_dq, counts)
        p, slope = self.softmax(item, step, plgpu.wgmma_accumulator_load(s_acc, wait_n=1), lse)
        plgpu.wgmma(dv_acc, p, self.scratch.dout.at[step.slot])
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
        return (slope * dp).astype(self.sizes.dtype)

    def fetch_sums(self, step, counts) -> None:
        """Start to load the sums to which `finish_dq` adds the last part of dQ."""
        if not self.sizes.whole_heads:
            return

        @pl.when(counts & step.ends & ~step.starts)
        def _():
            # `scratch.sums` is free, and the additions of other work items have arrived.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(step.number == 0)(lambda: plgpu.wait_smem_to_gmem(0))
            plgpu.copy_gmem_to_smem(
                step.sums, self.scratch.sums.at[self.me], self.scratch.sums_full.at[self.me]
            )

    def start_scores(self, item, step, s_acc, dp_acc):
        """Issue the matmuls Sᵀ = K Qᵀ and (dP − D)ᵀ = V dOᵀ − D. Return log₂e·L."""
        scratch = self.scratch
        # The accumulator of dP − D begins with −D. Set it before S is issued: set afterwards, the
        # compiler waits for S.
        dp_acc[...] = self.along_columns(step, 1)
        # During the matmuls, which read shared memory, this load takes 500 cycles (H100).
        lse = self.along_columns(step, 0)
        keys, values = scratch.k.at[step.k_slot, item.mine], scratch.v.at[step.k_slot, item.mine]
        plgpu.wgmma(s_acc, keys, scratch.q.at[step.slot].transpose((1, 0)))
        plgpu.wgmma(dp_acc, values, scratch.dout.at[step.slot].transpose((1, 0)))
        return lse

    def softmax(self, item, step, s, lse):
        """Return P rounded, and the factor P, or P ∘ (1 − X²), of dS.

        Since dV needs P, the compiler keeps the exponentials before the wait for dP. The
        optimization barrier prevents rounding of the numbers one by one.
        """
        softcap, scale, hidden = self.sizes.options.softcap, self.sizes.options.scale, -jnp.inf
        if softcap is None:
            logits = s * jnp.float32(scale * LOG2_E) - lse
        else:  # The square of the replacement is finite, so that 0 · (1 − X²) is 0.
            logits, hidden = jnp.tanh(s * jnp.float32(scale / softcap)), -1e18
        query = self.sizes.options.position(step.query)
        logits = lax.cond(
            self.mask.on_an_edge(item.key, query, item.seen_by),
            lambda a: self.mask.hide_transposed(a, item.b, item.key, query, self.columns, hidden),
            lambda a: a,
            logits,
        )
        if softcap is None:
            p = slope = jnp.exp2(logits)
        else:
            p = jnp.exp2(logits * jnp.float32(softcap * LOG2_E) - lse)
            slope = p * (1 - logits * logits)
        return lax.optimization_barrier((p.astype(self.sizes.dtype), slope))

    def along_columns(self, step, which):
        """Return log₂e·L (which = 0) or −D (which = 1) of the queries, broadcast over the keys."""
        row = plgpu.load(self.scratch.rows.at[step.slot, which], layout=COLUMNS, optimized=False)
        return lax.broadcast_in_dim(row, (HALF, HALF), [1])

    def wait_for_last_item(self) -> None:
        """Wait until the results of the last work item have left shared memory. A work item adds to
        a tile of dQ once: with whole heads, the wait for all copies keeps the additions in order.
        """
        plgpu.wait_smem_to_gmem(0, wait_read_only=not self.sizes.whole_heads)

    def late_dq_and_dk(self, item, step, ds, dq_acc, dk_acc):
        """Issue the matmuls dQ = dS K and dK += dSᵀ Q, and store dS during these. Return dQ."""
        self.start_dq(item, step, self.ds_ring.slot(step.fill + 1), dq_acc)
        plgpu.wgmma(dk_acc, ds, self.scratch.q.at[step.slot])
        # Until `scratch.sums` is free for `add_to_sums`, before the wait for dQ.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.sizes.whole_heads:
            pl.when(step.number == 0)(self.wait_for_last_item)
        self.scratch.ds[self.ds_ring.slot(step.fill), 0, item.mine] = ds
        plgpu.commit_smem()
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
        plgpu.barrier_arrive(self.ds_ring.full.at[self.ds_ring.slot(step.fill)])
        return dq

    def start_dq(self, item, step, ds_slot, dq_acc) -> None:
        """Issue the matmul dQ = dS K."""
        ds_smem, k_smem = self.scratch.ds, self.scratch.k
        if self.sizes.head_dim == HALF:
            me = lax.optimization_barrier(self.me)  # See `step`.
            left, right = ds_smem.at[ds_slot, me], k_smem.at[step.k_slot]
        else:
            left, right = ds_smem.at[ds_slot, 0], k_smem.at[step.k_slot, :, item.mine]
        plgpu.wgmma(dq_acc, left.transpose((1, 0)), right)

    def add_dq(self, item, step, dq, counts) -> None:
        """Add dQ to its sums, or store it if this is the last part; nothing unless `counts`."""
        if self.sizes.whole_heads:
            pl.when(counts & ~step.ends)(lambda: self.add_to_sums(step, dq, True))
            pl.when(counts & step.ends)(lambda: self.finish_dq(item, step, dq))
        else:
            self.add_to_sums(step, dq, counts)

    def add_to_sums(self, step, dq, counts) -> None:
        """Add dQ to the sums in global memory, or store dQ if dQ is the first part."""
        sums_smem = self.scratch.sums
        sums_smem[self.me] = dq
        plgpu.commit_smem()
        to_sums = functools.partial(plgpu.copy_smem_to_gmem, sums_smem.at[self.me], step.sums)
        if self.sizes.whole_heads:
            pl.when(step.starts)(to_sums)
            pl.when(~step.starts)(lambda: to_sums(reduction_op="add"))
        else:  # Only the copy depends: around the store too, ptxas would serialise the matmuls.
            pl.when(counts)(lambda: to_sums(reduction_op="add"))

    def finish_dq(self, item, step, dq) -> None:
        """Add the sums of dQ to the last part of dQ, and store the result."""
        scratch, me = self.scratch, self.me

        def with_sums():
            plgpu.barrier_wait(scratch.sums_full.at[me])
            return dq + plgpu.load(scratch.sums.at[me], layout=plgpu.Layout.WGMMA)

        total = lax.cond(step.starts, lambda: dq, with_sums)
        tokens, columns = pl.ds(step.query + me * HALF, HALF), slice(None)
        if self.sizes.head_dim > HALF:
            tokens, columns = pl.ds(step.query, self.sizes.queries), item.mine
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        place = Place(0, item.b, tokens, step.h, columns)
        self.store(total * jnp.float32(self.sizes.options.scale), scratch.out.at[me, 0], place)

    def store_dk_and_dv(self, item, results) -> None:
        """Store the gradients of this warpgroup's keys and values: dK, dV of each tile of keys.

        The staging memory is this warpgroup's rows of the next block of dS, as soon as no matmul
        reads the block, and the slots of `scratch.out`; for FP8, the slots only. The wait before a
        slot is reused leaves only newer copies in progress.
        """
        ds_ring, fill = self.ds_ring, item.fills + item.steps
        if self.scratch.ds_empty is not None:
            ds_ring.wait_empty(fill)
        tiles, slots, free = range(self.sizes.tiles), SLOTS[self.sizes.head_dim], []
        if self.fp8 is None:
            ds_smem = self.scratch.ds.at[ds_ring.slot(fill)]
            free = [ds_smem.at[part, self.tile(item, n).mine] for n in tiles for part in tiles]
        parts = itertools.product(tiles, (1, 2), range(0, self.sizes.head_dim, HALF))
        for part, (n, which, column) in enumerate(parts):
            tokens, columns = pl.ds(item.key + n * HALF, HALF), slice(column, column + HALF)
            result = results[2 * n + which - 1]
            if which == 1:
                result *= jnp.float32(self.sizes.options.scale)
            if part < len(free):
                smem = free[part]
            else:
                plgpu.wait_smem_to_gmem(min(part, slots - 1), wait_read_only=True)
                smem = self.scratch.out.at[self.me, part % slots]
            place = Place(which, item.b, tokens, item.head, columns)
            self.store(result[:, columns], smem, place)

    def store(self, result, smem, place: Place) -> None:
        """Start the copy of 64×64 results to global memory, through shared memory that is free."""
        which, b, tokens, head, columns = place
        target = operand(self.gradients, which, b, tokens, head).at[:, columns]
        if self.fp8 is None:
            smem[...] = result.astype(self.sizes.dtype)
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
