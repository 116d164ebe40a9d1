"""Data parallelism: parameters replicated on every device, the batch sharded over the devices."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def data_mesh(devices: list[jax.Device]) -> Mesh:
    """Return a mesh with one axis, `data`, over all devices."""
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding with a copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def over_batch(mesh: Mesh, axis: int) -> NamedSharding:
    """Return the sharding that splits the given axis over the devices."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))


def put(sharding: NamedSharding, local: np.ndarray) -> jax.Array:
    """Return a global array; `local` is the part of this process, for its devices."""
    return jax.make_array_from_process_local_data(sharding, local)
