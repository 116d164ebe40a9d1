"""Values that a module records during its forward pass: metrics of a step, and activations.

_, seen = nnx.capture(model, nnx.Intermediate)(tokens_BT)    # {"blocks": {0: {…: (x,)}, …}, …}
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Metric(nnx.Intermediate):
    """A number or an array that the training step adds to its metrics."""


def recording(module: nnx.Module, kind: type[nnx.Variable] = nnx.Intermediate) -> bool:
    """Return whether `nnx.capture` collects values of this kind: skip expensive ones otherwise."""
    return any(type(values) is kind for values in getattr(module, "__captures__", ()))


def record(
    module: nnx.Module, name: str, value: Array, kind: type[nnx.Variable] = nnx.Intermediate
) -> None:
    """Record a value under the module's path and a name. Outside `nnx.capture`, do nothing.

    Flax's `sow` would store the value in the module outside `nnx.capture`.

    Args:
        kind: `nnx.Intermediate` for an activation, `Metric` for a metric of the training step.
    """
    if recording(module, kind):
        module.sow(kind, name, value)


def with_metrics(f: Callable) -> Callable[..., tuple[Any, dict[str, Float[Array, "..."]]]]:
    """Return f, a function of a model, with the metrics that its modules record.

    The name of a metric is its path, such as "blocks.0.router_load"; a metric that is recorded
    several times in a call is averaged.
    """

    @functools.wraps(f)
    def run(model: nnx.Module, *args: Any):
        result, state = nnx.capture(f, Metric)(model, *args)
        metrics = {
            ".".join(map(str, path)): jnp.stack(variable.get_value()).mean(0, jnp.float32)
            for path, variable in nnx.to_flat_state(state)
        }
        return result, jax.lax.stop_gradient(metrics)

    return run
