"""Chapter 12: several devices, and the whole step in one executable.

Shapes: B batch over all devices, T time.
"""

# ruff: noqa: F401 (the TODOs use the imports)

import jax
from ch04_loss.solution import loss_fn
from ch11_normuon.solution import normuon_and_adamw
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# One axis of devices, named "data": each device has its share of the batch.
REPLICATED = PartitionSpec()
SHARDED = PartitionSpec("data")


def make_mesh(devices):
    """Return a mesh of the devices with one axis, "data"."""
    raise NotImplementedError("TODO: jax.make_mesh with AxisType.Auto")


def replicate(tree, mesh):
    """Return the tree with a copy of each array on every device."""
    raise NotImplementedError("TODO: jax.device_put with a NamedSharding")


def shard(windows_BT1, mesh):
    """Return the batch with B/devices rows on each device."""
    raise NotImplementedError("TODO: jax.device_put with a NamedSharding")


def loss_and_gradient(params, windows_BT1, heads, mesh):
    """Return the loss and the gradient of the whole batch, computed by all devices.

    Each device computes both for its rows. `jax.lax.pmean` then averages over the devices. All
    devices have the same number of rows, so the mean of the means is the mean.
    """
    raise NotImplementedError("TODO: jax.shard_map of value_and_grad and pmean")


def make_step(mesh, heads, lr, matrix_lr):
    """Return the training step (params, state, windows) → (params, state, loss), compiled.

    One executable holds the forward and the backward pass, the all-reduce and the optimizer. The
    new parameters and the new state overwrite the old ones, which are donated.
    """
    raise NotImplementedError("TODO: jax.jit with donate_argnums")
