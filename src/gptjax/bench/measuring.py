"""Times of steps that run without a pause.

An H200 that runs matmuls without a pause reaches its 700 W and slows down, so each side first warms
up for `WARM_UP_SECONDS` and is then measured in `ROUNDS` rounds that follow immediately. Two sides
alternate, `TURNS` each. The result is the median round.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from gptjax.bench.errors import BenchError

TURNS = 2
ROUNDS = 5
WARM_UP_SECONDS = 1.0
REST_SECONDS = 0.3


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


def take_turns(
    sides: dict[str, Any], *, seconds: float, turns: int | None = None
) -> dict[str, list[float] | Exception]:
    """Return the seconds of a step in every round of each side, or the error that ended the side.

    JAX keeps the memory that it has allocated. If the other side's step has no room for a second
    turn, each side has one turn. If JAX's step has no room while PyTorch holds its memory, PyTorch
    frees its memory after its first turn.

    Args:
        sides: name → `JaxStep`, `TorchStep`, `TorchSeveral` or `LlmcStep`, in the order of their
            turns.
        seconds: measured in each turn.
        turns: turns of each side; if None, `TURNS`, or 1 if there is only one side.
    """
    times: dict[str, list[float] | Exception] = {name: [] for name in sides}
    turns = turns or (TURNS if len(sides) > 1 else 1)
    for turn in range(turns):
        for name, side in sides.items():
            measured = times[name]
            if isinstance(measured, Exception):
                continue
            if turn and name != "gptjax" and not side.has_room():
                return times
            print(f"{name}: measuring, turn {turn + 1} of {turns}", file=sys.stderr, flush=True)
            time.sleep(REST_SECONDS)
            try:
                if not turn and name == "gptjax" and "torch" in sides:
                    sides["torch"].make_room(side.room)
                if name == "llm.c":  # a turn is one process
                    measured += side.rounds(seconds)
                else:
                    measured += sustained(side.run, seconds=seconds)
                if name == "torch":
                    side.rest()
            except Exception as error:
                times[name] = error
    return times


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
