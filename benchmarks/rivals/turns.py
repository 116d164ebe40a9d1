"""Times of two programs that alternate on the same devices."""

import sys
import time
from typing import Any

from gptjax.bench.harness import sustained
from gptjax.bench.jax_step import JaxStep
from gptjax.training.memory import needed_bytes

TURNS = 2
REST_SECONDS = 0.3


def take_turns(sides: dict[str, Any], *, seconds: float) -> dict[str, list[float] | Exception]:
    """Return the seconds of a step in every round of each side, or the error that ended the side.

    JAX keeps the memory that it has allocated. If the other side's step has no room for a second
    turn, each side has one turn. If JAX's step has no room while PyTorch holds its memory, PyTorch
    frees its memory after its first turn.

    Args:
        sides: name → `JaxStep`, `TorchStep`, `TorchSeveral` or `LlmcStep`, in the order of their
            turns.
        seconds: measured in each turn.
    """
    times: dict[str, list[float] | Exception] = {name: [] for name in sides}
    turns = TURNS if len(sides) > 1 else 1
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
                if not turn and name == "gptjax" and hasattr(sides.get("torch"), "make_room"):
                    sides["torch"].make_room(room(side))
                if hasattr(side, "rounds"):  # by processes, which hold no memory between two turns
                    measured += side.rounds(seconds)
                else:
                    measured += sustained(side.run, seconds=seconds)
                    if name == "torch":
                        side.rest()
            except Exception as error:
                times[name] = error
    return times


def room(step: JaxStep) -> int:
    """Return the bytes that the device must have free for the executable, beyond what JAX holds.

    JAX's allocator allocates memory in pieces, which leave gaps: an executable that needed 106.6
    GiB, 89 of them in one piece, did not fit into 119.
    """
    stats = step.device.memory_stats() or {}
    held = stats.get("pool_bytes", 0) - stats.get("bytes_in_use", 0)
    return round(1.15 * needed_bytes(step.compiled)) - max(held, 0)
