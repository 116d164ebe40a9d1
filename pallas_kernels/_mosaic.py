"""Common parts of the Mosaic GPU kernels for Hopper.

Only this module imports Mosaic GPU, whose interface still changes between JAX releases.

Each kernel is a persistent grid of thread blocks (CTAs). In each thread block one warpgroup loads
tiles with TMA, and the others compute with wgmma. The loading warpgroup runs ahead of the others
through a `Ring` of slots in shared memory. `schedule` assigns the work items to the thread blocks.
"""

import collections
import dataclasses
import functools
import heapq
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

LOG2_E = math.log2(math.e)
"""exp(x) = exp2(LOG2_E · x): the softmax of the attention kernels is computed in base 2."""


def num_sms() -> int:
    """Return the number of SMs of the target GPU: the device of the abstract mesh if one is set,
    else the default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return abstract.num_cores if abstract is not None else jax.devices()[0].core_count


def compiler_params(**options: Any) -> plgpu.CompilerParams:
    """Return options with which JAX lowers a kernel for threads, not for warpgroups, its default.

    The lowering is twice as fast, because JAX infers no layouts. The kernels name their layouts.
    """
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, **options)


def swizzled(shape: tuple[int, ...], dtype):
    """Return the type of shared memory in the swizzled layout of wgmma and TMA."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


@functools.cache
def _fields(*names: str) -> type:
    return collections.namedtuple("Scratch", names)


def scratch(**types: Any) -> Any:
    """Return the types of a kernel's shared memory and barriers as a named tuple, in the order of
    their allocation. None for one that the kernel does not have."""
    return _fields(*types)(**types)


def store_transposed(smem, x) -> None:
    """Store 8-bit floats in the WGMMA layout in the transposed order of `smem`.

    A thread holds pairs of neighbours in a row, and needs pairs of neighbours in a column. Mosaic
    exchanges only pairs of 16- and 32-bit numbers; fp16 represents every FP8 value.
    """
    pairs = plgpu.layout_cast(x.astype(jnp.float16), plgpu.Layout.WGMMA_TRANSPOSED)
    smem.transpose((1, 0))[...] = pairs.astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring of slots in shared memory with two barriers for each slot.

    Fill n (0, 1, …) uses slot n mod `slots`. The producer waits until the slot is empty, and starts
    copies that arrive on `full`. Each consumer waits for `full`, reads the slot, and arrives on
    `empty`. The first `slots` fills do not wait.

    The argument `prefix` of a method is the leading index of the barriers, such as the index of a
    warpgroup. Barriers without a leading index need no `prefix`.

    Attributes:
        full: barriers on which the copies of a fill arrive.
        empty: barriers on which the consumers of a fill arrive.
    """

    slots: int
    full: Any
    empty: Any

    def slot(self, n):
        """Return the slot of fill n."""
        return lax.rem(n, jnp.int32(self.slots))

    def wait_full(self, slot, *prefix) -> None:
        """Wait until the copies into the slot have arrived."""
        plgpu.barrier_wait(self.full.at[(*prefix, slot)])

    def release(self, slot, *prefix) -> None:
        """Arrive as one of the slot's consumers, after the last read of the slot."""
        plgpu.barrier_arrive(self.empty.at[(*prefix, slot)])

    def wait_empty(self, n, *prefix, slot=None) -> None:
        """Wait until the slot of fill n is free: until fill n − `slots` is released.

        Args:
            slot: slot of fill n, if the caller has computed the slot already.
        """

        @pl.when(n >= self.slots)
        def _():
            self.wait_released(self.slot(n) if slot is None else slot, *prefix)

    def wait_released(self, slot, *prefix) -> None:
        """Wait until all consumers have released the slot."""
        plgpu.barrier_wait(self.empty.at[(*prefix, slot)])

    def drain(self, fills) -> None:
        """Wait until all `fills` fills are released. A thread block must not end earlier."""

        @pl.loop(jnp.maximum(fills - self.slots, 0), fills)
        def _(n):
            self.wait_released(self.slot(n))

    def drain_unrolled(self, fills) -> None:
        """`drain` without a loop."""
        for extra in range(self.slots):
            self.wait_empty(fills + extra)


def schedule(heads: int, costs: list[float], blocks: int, at_once: int | None = None) -> np.ndarray:
    """Return the work items of each thread block of a persistent grid.

    Each item is assigned to the thread block with the least work so far. Items of one head run at
    nearly the same time, so that the head's keys and values stay in the L2 cache. Among the heads
    in progress at the same time, the longest items come first.

    Args:
        costs: costs of the tiles of one head.
        at_once: number of heads whose data fit into the L2 cache, or None.

    Returns:
        An int32 table with one row for each thread block: the number of items, then the items. An
        item is stored as head · tiles + tile.
    """
    rounds = max(1, heads * len(costs) // (2 * blocks), pl.cdiv(heads, at_once or heads))
    by_cost = sorted(range(len(costs)), key=lambda tile: -costs[tile])
    lists = [[] for _ in range(blocks)]
    load = [(0.0, block) for block in range(blocks)]
    for round in range(rounds):
        for tile in by_cost:
            for head in range(heads * round // rounds, heads * (round + 1) // rounds):
                busy, block = load[0]
                lists[block].append(head * len(costs) + tile)
                heapq.heapreplace(load, (busy + costs[tile], block))
    # One more column than the longest list: the next item is read during the current item.
    table = np.zeros((blocks, 2 + max(map(len, lists))), np.int32)
    for block, items in enumerate(lists):
        table[block, 0] = len(items)
        table[block, 1 : 1 + len(items)] = items
    return table
