"""The largest batch that fits into memory."""

from collections.abc import Callable

from gptjax.bench.errors import BenchError
from gptjax.training.memory import GIB


def largest_batch(needs: Callable[[int], int], available: int) -> int:
    """Return the largest batch of 1, 2, 4, 8, 12, 16, … that fits.

    Memory grows almost in proportion to the batch: the next size to try is where the line through
    two sizes reaches the available memory.

    Args:
        needs: batch → bytes. Slow, since it compiles.
        available: bytes.

    Raises:
        BenchError: not even one sequence fits.
    """
    below, above = [(0, 0)], None  # sizes that fit, and the smallest that does not: (batch, bytes)
    batch = 16
    while True:
        size = needs(batch)
        if size <= available:
            below.append((batch, size))
        else:
            above = (batch, size)
        least = _up(below[-1][0])
        if above and above[0] <= least:
            break
        # Logits come in chunks: near sizes predict better than the first. Two batches may need the
        # same bytes.
        n1, size1 = above or below[-1]
        n0, size0 = [(n, size) for n, size in below if size < size1][-1]
        batch = n1 + int((available - size1) * (n1 - n0) / (size1 - size0))
        if above is None and len(below) == 2:
            batch = min(batch, 2 * n1)
        batch = max(least, _floor(min(batch, above[0] - 1) if above else batch))
    if not below[-1][0]:
        raise BenchError(
            f"not one sequence fits: it needs {size / GIB:.1f} GiB of {available / GIB:.1f}; "
            "--recompute block needs less"
        )
    return below[-1][0]


def _floor(n: int) -> int:
    return n // 4 * 4 if n >= 4 else min(n, 2)


def _up(n: int) -> int:
    return {0: 1, 1: 2, 2: 4}.get(n, n + 4)
