"""Times of steps that run without a pause.

An H200 that runs matmuls without a pause reaches its 700 W and slows down, so a step first warms up
for `WARM_UP_SECONDS` and is then measured in `ROUNDS` rounds that follow immediately. The result is
the median round.
"""

from collections.abc import Callable

import jax

from gptjax.bench.errors import BenchError

ROUNDS = 5
WARM_UP_SECONDS = 1.0


def one_device() -> jax.Device:
    """Return JAX's first device, which all measurements of one device use."""
    return jax.config.jax_default_device or jax.devices()[0]


def first_devices(count: int) -> list[jax.Device]:
    """Return the first `count` devices; one device is `one_device`.

    Raises:
        BenchError: there are fewer.
    """
    available = len(jax.devices())
    if not 1 <= count <= available:
        raise BenchError(f"--devices {count}: expected 1 to {available}")
    return jax.devices()[:count] if count > 1 else [one_device()]


def sustained(run: Callable[[int], float], *, seconds: float) -> list[float]:
    """Return the seconds of a step in each of several consecutive rounds, after a warm-up.

    Args:
        run: number of steps → their seconds.
        seconds: of all rounds together.
    """
    run(1)  # the first step may compile or allocate
    once = run(1)
    warm_up = max(1, round(WARM_UP_SECONDS / once))
    once = run(warm_up) / warm_up
    rounds = max(1, min(ROUNDS, round(seconds / once)))
    steps = max(1, round(seconds / once / rounds))
    return [run(steps) / steps for _ in range(rounds)]
