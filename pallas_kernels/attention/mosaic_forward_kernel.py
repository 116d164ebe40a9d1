"""Forward kernel of flash attention on Hopper (Pallas Mosaic GPU).

A work item is a tile of queries of one head: 64 rows for each of the computing warpgroups.
One more warpgroup loads tiles of queries, keys and values into rings. The loading warpgroup runs
ahead into the next work item. The table of work items is computed before the launch.

A warpgroup visits its blocks of keys from the last to the first. The diagonal comes first, and the
loop over all other blocks has no masks. For each block:

    QK:       S = Q Kᵀ                                           `start_qk`, `finish_qk`
    softmax:  m' = max(m, factor · max S), P = exp2(factor · S − m')       `softmax`
    PV:       O = O · exp2(m − m') + P V, and the same for l, the row sums of P    `start_pv`

factor is log₂e·scale: the softmax is computed in base 2.

| barrier | number | arrivals | who arrives | who waits |
| --- | --- | --- | --- | --- |
| `q_full` | warpgroups × 2 | 1 | the copy of queries | the warpgroup of the queries |
| `q_empty` | warpgroups × 2 | 1 | the warpgroup of the queries | loading warpgroup |
| `k_full`, `v_full` | 2 | 1 | the copy of keys, of values | each computing warpgroup |
| `k_empty`, `v_empty` | 2 | warpgroups | each computing warpgroup | loading warpgroup |
| `ping_pong` | warpgroups | 1 | the warpgroup before | a warpgroup, before it starts matmuls |

The barrier `ping_pong` exists with D = 64 only. A computing warpgroup waits for and
releases each fill of the key and value slots, also fills that only other warpgroups need.

Shapes: B batch, T queries, S keys, H query heads, K key and value heads, D head dimension; in a
tile, M queries and N keys.
"""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic import LOG2_E, Ring, pl, plgpu, scratch, swizzled
from pallas_kernels.attention.mosaic_masks import Mask, fill_columns

# The fastest of those measured on an H200.
ROWS = 64
"""Queries in the tile of one computing warpgroup."""
KEYS = 128
"""Keys in a block."""
STAGES = 2
"""Blocks of keys, and of values, in shared memory."""
Q_SLOTS = 2
"""Tiles of queries in shared memory for each warpgroup."""
WARPGROUPS = {64: 3, 128: 2}
"""Computing warpgroups, by head dimension. One more warpgroup loads."""
REGISTERS = {64: (160, 32), 128: (232, 40)}
"""Registers per thread of a computing warpgroup and of the loading warpgroup, by head dimension."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes and options of a call.

    Attributes:
        options: `Options`. With documents the window is None: the bounds include the window.
        length, keys: number of queries and of keys.
        group: number of query heads of a key head.
        documents: whether there are bounds of documents.
    """

    options: Any
    length: int
    keys: int
    heads: int
    group: int
    head_dim: int
    dtype: Any
    documents: bool

    @property
    def warpgroups(self) -> int:
        return WARPGROUPS[self.head_dim]

    @property
    def ping_pong(self) -> bool:
        """Whether the warpgroups start their matmuls one after the other: the softmax of one
        warpgroup then overlaps the matmuls of another."""
        return self.head_dim == 64

    @property
    def row_blocks(self) -> int:
        """Number of blocks of rows of one warpgroup in a head."""
        return pl.cdiv(self.length, ROWS)

    @property
    def row_tiles(self) -> int:
        """Number of blocks of rows of all warpgroups in a head."""
        return pl.cdiv(self.row_blocks, self.warpgroups)

    def first_row_block(self, tile):
        """Return the first block of rows of a tile, which may be negative: tile 0 contains the last
        rows, and the first rows cost the least."""
        return self.row_blocks - (tile + 1) * self.warpgroups

    def key_blocks(self, first, ends=None):
        """Return the range of key blocks that the queries first, …, first + ROWS − 1 see.

        Args:
            first: first query, below `length`; a Python or a traced int32.
            ends: with documents, the bounds (first key, last key) of the first and of the last
                query. The last key counts only without `causal`.

        Returns:
            (start, full_start, full_stop, stop), in non-decreasing order. Blocks full_start …
            full_stop − 1 need no mask: each query sees all keys. Blocks start … full_start − 1 and
            full_stop … stop − 1 need a mask.
        """
        least, most, div = jnp.minimum, jnp.maximum, lambda a: lax.div(a, jnp.int32(KEYS))
        if isinstance(first, int):
            least, most, div = min, max, lambda a: a // KEYS
        window, position = self.options.window, self.options.position
        if self.options.causal:
            stop = div(position(least(first + ROWS, self.length)) + (KEYS - 1))
            first = position(first)
            full_stop = div(first + 1)
        elif ends is None:
            full_stop, stop = self.keys // KEYS, pl.cdiv(self.keys, KEYS)
        else:
            full_stop, stop = div(ends[0][1] + 1), div(ends[1][1]) + 1
        if ends is not None:
            start, full_start = div(ends[0][0]), div(ends[1][0] + (KEYS - 1))
        elif window is not None:
            start = div(most(first - window + 1, 0))
            full_start = div(most(first + ROWS - window, 0) + (KEYS - 1))
        else:
            return 0, 0, full_stop, stop
        full_start = least(full_start, stop)
        return start, full_start, most(full_start, full_stop), stop


def scratch_types(sizes: Sizes) -> Any:
    """Return the types of the shared memory and the barriers."""
    groups, head_dim, dtype = sizes.warpgroups, sizes.head_dim, sizes.dtype
    return scratch(
        q=swizzled((groups, Q_SLOTS, ROWS, head_dim), dtype),
        k=swizzled((STAGES, KEYS, head_dim), dtype),
        v=swizzled((STAGES, KEYS, head_dim), dtype),
        out=swizzled((groups, ROWS, head_dim), dtype),
        lse=plgpu.SMEM((groups, ROWS), jnp.float32),
        columns=plgpu.SMEM((groups, KEYS), jnp.int32) if sizes.documents else None,
        q_full=plgpu.Barrier(num_barriers=(groups, Q_SLOTS)),
        q_empty=plgpu.Barrier(num_barriers=(groups, Q_SLOTS)),
        k_full=plgpu.Barrier(num_barriers=STAGES),
        k_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=STAGES),
        v_full=plgpu.Barrier(num_barriers=STAGES),
        v_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=STAGES),
        ping_pong=plgpu.Barrier(num_barriers=groups) if sizes.ping_pong else None,
    )


def operand(refs, which: int, b, rows, head):
    """Return a rows×D slice of q, k or v (which = 0, 1, 2) of one head, from the refs of q, k and v
    or from the ref of the packed qkv."""
    return refs[0].at[b, rows, which, head] if len(refs) == 1 else refs[which].at[b, rows, head]


class Item(
    collections.namedtuple("Item", "index b stop fills first my_start full_start full_stop my_stop")
):
    """The rows of one warpgroup in a work item.

    Attributes:
        index: number of the work item in its thread block.
        stop: end of the key blocks that any of the warpgroups sees. These blocks are loaded.
        first: first query of the warpgroup's block of rows.
        fills: number of fills of the key slots before this work item.
        my_start, full_start, full_stop, my_stop: the key blocks that this warpgroup sees, as
            `key_blocks` returns them.
    """

    def fill(self, j):
        """Return the number of the fill that loads block j of the keys, and of the values."""
        return self.fills + (self.stop - 1 - j)


@dataclasses.dataclass(frozen=True)
class Block:
    """The kernel of one thread block (CTA): sizes, refs, and the two roles of a warpgroup.

    Attributes:
        bounds: the padded bounds of documents, or None.
        me, this: index of the warpgroup and of the thread block.
        items: number of work items of this thread block.
    """

    sizes: Sizes
    inputs: Any
    bounds: Any
    table: Any
    out: Any
    lse: Any
    scratch: Any
    me: jax.Array
    this: jax.Array
    items: jax.Array

    @property
    def q_ring(self) -> Ring:
        return Ring(Q_SLOTS, self.scratch.q_full, self.scratch.q_empty)

    @property
    def k_ring(self) -> Ring:
        return Ring(STAGES, self.scratch.k_full, self.scratch.k_empty)

    @property
    def v_ring(self) -> Ring:
        return Ring(STAGES, self.scratch.v_full, self.scratch.v_empty)

    @property
    def factors(self) -> tuple[float, float | None]:
        """Return (factor, rescale): the base-2 softmax has the argument scores · factor.

        The largest score has the largest product with factor only if factor > 0. Otherwise, scores
        are first multiplied by rescale, and factor is 1. With a soft cap c, scores are
        tanh(QKᵀ · rescale), and factor is log₂e·c.
        """
        scale, softcap = self.sizes.options.scale, self.sizes.options.softcap
        if softcap is not None:
            return softcap * LOG2_E, scale / softcap
        return (scale * LOG2_E, None) if scale > 0 else (1.0, scale * LOG2_E)

    def run(self) -> None:
        """Run the role of this warpgroup."""
        pl.when(self.me == self.sizes.warpgroups)(self.load)
        pl.when(self.me < self.sizes.warpgroups)(self.compute)

    def unpack(self, entry):
        """Return batch, head, the key blocks [start, stop) that some row sees, and the first block
        of rows, which may be negative."""
        head, tile = divmod_int32(entry, self.sizes.row_tiles)
        first = self.sizes.first_row_block(tile)
        b, h = divmod_int32(head, self.sizes.heads)
        start, *_ = self.key_blocks(b, jnp.maximum(first, 0) * ROWS)
        *_, stop = self.key_blocks(b, (first + self.sizes.warpgroups - 1) * ROWS)
        return b, h, start, stop, first

    def key_blocks(self, b, first):
        """Return the key blocks that the rows from `first` on see."""
        if self.bounds is None:
            return self.sizes.key_blocks(first)
        ends = [tuple(x[b, t] for x in self.bounds) for t in (first, first + (ROWS - 1))]
        return self.sizes.key_blocks(first, ends)

    def over_items(self, one_item):
        """Run one_item(index, entry, fills) → (next entry, fills) on all work items. Return the
        number of fills of the key slots."""
        _, fills = lax.fori_loop(
            0,
            self.items,
            lambda i, carry: one_item(i, *carry),
            (self.table[self.this, 1], jnp.int32(0)),
        )
        return fills

    # ------------------------------------------------------------------------ loading warpgroup

    def load(self) -> None:
        """Load the queries, keys and values of all work items."""
        q_ring, groups = self.q_ring, self.sizes.warpgroups
        plgpu.set_max_registers(REGISTERS[self.sizes.head_dim][1], action="decrease")

        def one_item(i, entry, fills):
            following = self.table[self.this, i + 2]
            b, head, start, stop, first = self.unpack(entry)
            self.load_block(1, b, head, stop - 1, fills)
            for w in range(groups):
                self.load_queries(w, i, b, head, first + w)
            self.load_block(2, b, head, stop - 1, fills)

            @pl.loop(1, stop - start)
            def _(n):
                self.load_block(1, b, head, stop - 1 - n, fills + n)
                self.load_block(2, b, head, stop - 1 - n, fills + n)

            return following, fills + stop - start

        fills = self.over_items(one_item)

        # The thread block must not end before all arrivals on its barriers.
        @pl.loop(jnp.maximum(fills - STAGES, 0), fills)
        def _(n):
            for ring in (self.k_ring, self.v_ring):
                ring.wait_released(ring.slot(n))

        @pl.loop(jnp.maximum(self.items - Q_SLOTS, 0), self.items)
        def _(i):
            for w in range(groups):
                q_ring.wait_released(q_ring.slot(i), w)

    def load_block(self, which, b, head, j, n) -> None:
        """Load block j of the keys (which = 1) or values (2) as fill n."""
        smem, ring = (self.scratch.k, self.k_ring) if which == 1 else (self.scratch.v, self.v_ring)
        ring.wait_empty(n)
        rows = _slice(j, KEYS)
        source = operand(self.inputs, which, b, rows, lax.div(head, jnp.int32(self.sizes.group)))
        plgpu.copy_gmem_to_smem(source, smem.at[ring.slot(n)], ring.full.at[ring.slot(n)])

    def load_queries(self, w, i, b, head, row_block) -> None:
        """Load the queries of warpgroup w for work item i, unless the rows do not exist."""
        ring = self.q_ring
        ring.wait_empty(i, w)

        @pl.when(row_block >= 0)
        def _():
            source = operand(self.inputs, 0, b, _slice(row_block, ROWS), head)
            plgpu.copy_gmem_to_smem(
                source, self.scratch.q.at[w, ring.slot(i)], ring.full.at[w, ring.slot(i)]
            )

    # --------------------------------------------------------------------- computing warpgroups

    def compute(self) -> None:
        """Compute and store this warpgroup's rows of all work items."""
        q_ring = self.q_ring
        plgpu.set_max_registers(REGISTERS[self.sizes.head_dim][0], action="increase")
        pl.when(self.me == self.sizes.warpgroups - 1)(self.arrive_ping_pong)
        if self.bounds is not None:
            fill_columns(self.scratch.columns.at[self.me])

        def one_item(i, entry, fills):
            b, head, start, stop, first = self.unpack(entry)
            following = self.table[self.this, i + 2]
            pl.when(first + self.me >= 0)(
                lambda: self.attend(i, b, head, start, stop, first + self.me, fills)
            )

            @pl.when(first + self.me < 0)
            def _():
                self.skip(fills)
                pl.loop(1, stop - start)(lambda n: self.skip_in_order(fills + n))
                # The loading warpgroup has passed the wait for this slot's last release: the
                # loading warpgroup has loaded values since that wait.
                q_ring.release(q_ring.slot(i), self.me)

            return following, fills + stop - start

        self.over_items(one_item)
        pl.when(self.me == 0)(self.wait_ping_pong)
        plgpu.wait_smem_to_gmem(0)

    # In each work item, a warpgroup waits once per block of keys, except for the first block.
    def wait_ping_pong(self) -> None:
        """Wait until the previous warpgroup has issued the previous warpgroup's matmuls."""
        if self.sizes.ping_pong:
            plgpu.barrier_wait(self.scratch.ping_pong.at[self.me])

    def arrive_ping_pong(self) -> None:
        """Arrive on the next warpgroup's barrier: the next warpgroup may issue matmuls."""
        if self.sizes.ping_pong:
            next_one = lax.rem(self.me + 1, jnp.int32(self.sizes.warpgroups))
            plgpu.barrier_arrive(self.scratch.ping_pong.at[next_one])

    def skip(self, n) -> None:
        """Release fill n, which only other warpgroups use."""
        for ring in (self.k_ring, self.v_ring):
            ring.wait_full(ring.slot(n))
            ring.release(ring.slot(n))

    def skip_in_order(self, n) -> None:
        self.wait_ping_pong()
        self.arrive_ping_pong()
        self.skip(n)

    def attend(self, i, b, head, start, stop, row_block, fills) -> None:
        """Compute and store the output and log-sum-exp of one block of rows."""
        out_smem, lse_smem, me = self.scratch.out, self.scratch.lse, self.me
        first = row_block * ROWS
        seen = self.key_blocks(b, first)
        item = Item(i, b, stop, fills, first, *seen)
        pl.loop(0, stop - item.my_stop)(lambda n: self.skip_in_order(fills + n))
        o_MD, m_M, l_M = pl.run_scoped(
            lambda o_acc: self.over_keys(item, o_acc),
            plgpu.ACC((ROWS, self.sizes.head_dim), jnp.float32),
        )
        pl.loop(0, item.my_start - start)(
            lambda n: self.skip_in_order(item.fill(item.my_start - 1 - n))
        )
        inverse_M = 1.0 / l_M
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_smem[me] = (o_MD * lax.broadcast_in_dim(inverse_M, o_MD.shape, [0])).astype(
            self.sizes.dtype
        )
        lse_smem[me] = (m_M + jnp.log2(l_M)) * (1 / LOG2_E)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            out_smem.at[me], self.out.at[b, _slice(row_block, ROWS), head], commit_group=False
        )
        plgpu.copy_smem_to_gmem(lse_smem.at[me], self.lse.at[b, head, _slice(row_block, ROWS)])

    def over_keys(self, item, o_acc):
        """Return the sums over all key blocks: O (not yet divided by l), m and l."""
        causal, q_slot = self.sizes.options.causal, self.q_ring.slot
        self.q_ring.wait_full(q_slot(item.index), self.me)
        last = item.my_stop - 1
        self.k_ring.wait_full(self.k_ring.slot(item.fill(last)))
        if causal:
            seen = self.sizes.options.position(item.first) + ROWS - last * KEYS
            carry = lax.cond(
                seen <= KEYS // 2,
                lambda: self.first_block(item, last, KEYS // 2),
                lambda: self.first_block(item, last, KEYS),
            )
        else:
            carry = self.first_block(item, last, KEYS)
        self.await_keys(item, last - 1)

        def steps(above, down_to, carry, masked):
            """Process blocks above − 1, …, down_to."""
            return lax.fori_loop(
                0,
                above - down_to,
                lambda n, c: self.step(item, o_acc, above - 1 - n, c, masked),
                carry,
            )

        # The rows' documents, or their positions, may end in different blocks.
        if (self.sizes.options.start or 0) % ROWS if causal else self.bounds is not None:
            carry = steps(last, item.full_stop, carry, masked=True)
        full_from = jnp.minimum(last, item.full_stop)
        carry = steps(full_from, item.full_start, carry, masked=False)
        if self.sizes.options.window is not None or self.bounds is not None:
            carry = steps(jnp.minimum(last, item.full_start), item.my_start, carry, masked=True)
        m_M, l_M, p_MN = carry
        self.q_ring.release(q_slot(item.index), self.me)
        self.start_pv(item, o_acc, p_MN, item.my_start)
        o_MD = o_acc[...]
        self.release_values(item, item.my_start)
        return o_MD, m_M, l_M

    def first_block(self, item, last, columns):
        """Return m, l and P of the last key block. The rows see only the block's first `columns`
        keys."""

        def qk(s_acc):
            self.start_qk(item, s_acc, last)
            return self.finish_qk(item, s_acc, last, 0)

        s_MN = pl.run_scoped(qk, plgpu.ACC((ROWS, columns), jnp.float32))
        sizes = self.sizes
        masked = sizes.options.causal or sizes.documents or sizes.keys % KEYS != 0
        m_M, p_MN = self.softmax(item, s_MN, last, masked, None)
        l_M, p_MN = p_MN.sum(axis=1), p_MN.astype(sizes.dtype)
        if columns < KEYS:
            none_MN = jnp.zeros((ROWS, KEYS - columns), sizes.dtype)
            none_MN = plgpu.layout_cast(none_MN, plgpu.Layout.WGMMA)
            p_MN = lax.concatenate((p_MN, none_MN), 1)
        return m_M, l_M, p_MN

    def step(self, item, o_acc, j, carry, masked):
        """Compute QK and softmax of block j, PV of block j + 1. Return m, l and P of block j."""
        m_M, l_M, p_MN = carry

        def qk_and_pv(s_acc):
            self.wait_ping_pong()
            self.start_qk(item, s_acc, j)
            self.start_pv(item, o_acc, p_MN, j + 1)
            self.arrive_ping_pong()
            return self.finish_qk(item, s_acc, j, 1)

        s_MN = pl.run_scoped(qk_and_pv, plgpu.ACC((ROWS, KEYS), jnp.float32))
        new_m_M, weight_MN = self.softmax(item, s_MN, j, masked, m_M)
        decay_M = jnp.exp2(m_M - new_m_M)
        l_M = l_M * decay_M + weight_MN.sum(axis=1)
        # The softmax comes before the wait for PV. The weights are rounded after the wait, since
        # the matmul in progress reads the weights of the previous block.
        new_m_M, l_M, weight_MN, decay_M = lax.optimization_barrier(
            (new_m_M, l_M, weight_MN, decay_M)
        )
        self.await_keys(item, j - 1)
        o_MD = o_acc[...]
        self.release_values(item, j + 1)
        o_acc[...] = o_MD * lax.broadcast_in_dim(decay_M, o_MD.shape, [0])
        return new_m_M, l_M, weight_MN.astype(self.sizes.dtype)

    def start_qk(self, item, s_acc, j) -> None:
        """Issue S = Q Kᵀ for the first keys of block j: one key per column of `s_acc`."""
        slot, q_slot = self.k_ring.slot(item.fill(j)), self.q_ring.slot
        keys = self.scratch.k.at[slot, pl.ds(0, s_acc.shape[1])]
        queries = self.scratch.q.at[self.me, q_slot(item.index)]
        plgpu.wgmma(s_acc, queries, keys.transpose((1, 0)))

    def finish_qk(self, item, s_acc, j, in_progress):
        """Wait for S except for the newest `in_progress` matmuls, release the keys, return S."""
        s_MN = plgpu.wgmma_accumulator_load(s_acc, wait_n=in_progress)
        self.k_ring.release(self.k_ring.slot(item.fill(j)))
        return s_MN

    def softmax(self, item, s_MN, j, masked, m_M):
        """Return the new maxima, and the weights exp2(scores · factor − maxima)."""
        factor, rescale = self.factors
        if rescale is not None:
            s_MN = s_MN * rescale
        if self.sizes.options.softcap is not None:
            s_MN = jnp.tanh(s_MN)  # tanh.approx: a relative error of 2⁻¹¹
        if masked:
            s_MN = self.hide(item, s_MN, j)
        top_M = s_MN.max(axis=1) * factor
        m_M = top_M if m_M is None else jnp.maximum(m_M, top_M)
        return m_M, jnp.exp2(s_MN * factor - lax.broadcast_in_dim(m_M, s_MN.shape, [0]))

    def hide(self, item, s_MN, j):
        """Return the scores, with a finite replacement for the scores of hidden keys.

        The replacement is finite, since all keys of a row's first block can be hidden. Such a row
        begins with weights of 1. These weights are multiplied by 0 when the row sees a key. As a
        power of two, the replacement times the factor has no rounding error, which a fused
        multiply-add would return as an exponent.
        """
        hidden = -(2.0 ** min(math.floor(math.log2(1e30 / self.factors[0])), 127))
        key = j * KEYS
        mask = Mask(self.sizes.options, self.sizes.keys, self.bounds)
        first = self.sizes.options.position(item.first)
        columns = None if self.bounds is None else self.scratch.columns.at[self.me]
        return mask.hide(s_MN, item.b, first, key, hidden, columns)

    def start_pv(self, item, o_acc, p_MN, j) -> None:
        """Wait for the values of block j, and issue O += P V."""
        self.v_ring.wait_full(self.v_ring.slot(item.fill(j)))
        plgpu.wgmma(o_acc, p_MN, self.scratch.v.at[self.v_ring.slot(item.fill(j))])

    def release_values(self, item, j) -> None:
        self.v_ring.release(self.v_ring.slot(item.fill(j)))

    def await_keys(self, item, j) -> None:
        """Wait for the keys of block j if there is such a block. The branch prevents the compiler
        from moving the softmax before the wait to after it."""

        @pl.when(j >= item.my_start)
        def _():
            self.k_ring.wait_full(self.k_ring.slot(item.fill(j)))


def divmod_int32(a, b):
    """Return a // b and a % b of non-negative numbers."""
    return lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b))


def _slice(j, size):
    """Return slice j of `size` elements. The index is an array even if j is a Python int: JAX
    refuses a static slice that is out of bounds."""
    return pl.ds(jnp.int32(j) * size, size)
