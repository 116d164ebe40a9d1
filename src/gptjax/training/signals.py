"""Request to save and stop, by SIGTERM or Ctrl-C, shared by all processes of a run."""

import functools
import os
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from gptjax.parallel import over_batch, put, replicated


class StopRequest:
    """Context in which SIGTERM or Ctrl-C requests that the training loop saves and stops.

    A second signal ends the process at once. Earlier checkpoints stay complete.

    Each of several processes adds the number of its signal to the metrics of a step as a maximum
    over all processes, so that all stop after the same step.

    Args:
        mesh: the devices of all processes.

    Attributes:
        number: number of the signal that stops the run; 0 before the signal.
    """

    def __init__(self, mesh: Mesh):
        self.number, self._own, self._alone = 0, 0, jax.process_count() == 1
        sharding, count = over_batch(mesh, axis=0), jax.local_device_count()
        self._put = functools.cache(lambda n: put(sharding, np.full(count, n, np.int32)))
        # The unused argument `after` delays the maximum until the step has computed `after`, so
        # that all processes run their collectives in one order.
        self._maximum = jax.jit(
            lambda numbers, after: jnp.max(numbers),
            keep_unused=True,
            out_shardings=replicated(mesh),
        )

    def __enter__(self) -> "StopRequest":
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def _ask(self, number, frame):
        if self._own:
            os._exit(128 + number)
        self._own = number
        if self._alone:
            self.number = number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def metrics(self, after: jax.Array) -> dict[str, jax.Array]:
        """Return the metric "stop" of a step; `after` is another metric of this step."""
        return {} if self._alone else {"stop": self._maximum(self._put(self._own), after)}

    def read(self, values: dict[str, Any]) -> None:
        """Remove "stop" from the values of a step's metrics, and store the value."""
        self.number = values.pop("stop", 0) or self.number
