"""Chapter 12: several devices, and the whole step in one executable.

Shapes: B batch over all devices, T time.
"""

import jax
from ch04_loss.solution import loss_fn
from ch11_normuon.solution import normuon_and_adamw
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# One axis of devices, named "data": each device has its share of the batch.
REPLICATED = PartitionSpec()
SHARDED = PartitionSpec("data")


def make_mesh(devices):
    """Return a mesh of the devices with one axis, "data"."""
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def replicate(tree, mesh):
    """Return the tree with a copy of each array on every device."""
    return jax.device_put(tree, NamedSharding(mesh, REPLICATED))


def shard(windows_BT1, mesh):
    """Return the batch with B/devices rows on each device."""
    return jax.device_put(windows_BT1, NamedSharding(mesh, SHARDED))


def loss_and_gradient(params, windows_BT1, heads, mesh):
    """Return the loss and the gradient of the whole batch, computed by all devices.

    Each device computes both for its rows. `jax.lax.pmean` then averages over the devices. All
    devices have the same number of rows, so the mean of the means is the mean.
    """

    def on_one_device(params, windows_BT1):
        loss, grads = jax.value_and_grad(loss_fn)(params, windows_BT1, heads)
        return jax.lax.pmean((loss, grads), "data")

    run = jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(REPLICATED, SHARDED),
        out_specs=REPLICATED,
        # Otherwise JAX would sum the gradient over the devices a first time inside of jax.grad.
        check_vma=False,
    )
    return run(params, windows_BT1)


def make_step(mesh, heads, lr, matrix_lr):
    """Return the training step (params, state, windows) → (params, state, loss), compiled.

    One executable holds the forward and the backward pass, the all-reduce and the optimizer. The
    new parameters and the new state overwrite the old ones, which are donated.
    """

    def step(params, state, windows_BT1):
        loss, grads = loss_and_gradient(params, windows_BT1, heads, mesh)
        params, state = normuon_and_adamw(grads, state, params, lr, matrix_lr)
        return params, state, loss

    return jax.jit(step, donate_argnums=(0, 1))
