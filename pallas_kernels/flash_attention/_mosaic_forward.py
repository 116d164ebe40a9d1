"""The forward pass of flash attention on Hopper (Pallas Mosaic GPU): TMA, wgmma, persistent blocks."""

import functools
import importlib.resources
import json

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic import plgpu


@functools.cache
def _choices() -> dict:
    return json.loads(importlib.resources.files(__package__).joinpath("mosaic_tiles.json").read_text())


def tiles(pass_: str, head_dim: int, length: int, causal: bool) -> dict:
    """How a pass is cut: the parameters of the first entry of mosaic_tiles.json that fits.

    Args:
        pass_: "forward" or "backward".
        length: T; an entry holds for sequences of at most its `up_to`, or of any length where that is null.
    """
    for entry in _choices()[pass_]:
        fits = entry["up_to"] is None or length <= entry["up_to"]
        if fits and (entry["head_dim"], entry["causal"]) == (head_dim, causal):
            return entry["tiles"]
    raise ValueError(f"mosaic_tiles.json has no {pass_} tiles for {head_dim=} {causal=} {length=}")


def swizzled(shape: tuple[int, ...], dtype):
    """Shared memory in the order that wgmma and TMA want."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def operand(refs, which: int, b, rows, head):
    """The rows×D of q, k or v (which = 0, 1, 2) of one head where it lies: in q, k, v (three refs) or in packed qkv (one)."""
    return refs[0].at[b, rows, which, head] if len(refs) == 1 else refs[which].at[b, rows, head]


def key_blocks(first, rows: int, length: int, block: int, *, causal: bool, window: int | None):
    """Which blocks of keys the queries first, …, first + rows − 1 see, the masks of their edges apart.

    Args:
        first: of the queries, below `length`; a Python or a traced int32.

    Returns:
        (start, full_start, full_stop, stop): each of the queries sees all of blocks full_start … full_stop − 1 and some of them
        see some of start … full_start − 1 and full_stop … stop − 1; start ≤ full_start ≤ full_stop ≤ stop.
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
