"""Data parallelism: parameters on every device, the batch split over them."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def data_mesh(devices: list[jax.Device]) -> Mesh:
    """A mesh with the one axis `data` over all devices."""
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def over_batch(mesh: Mesh, axis: int) -> NamedSharding:
    """The given axis split over the devices."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))


def put(sharding: NamedSharding, local: np.ndarray) -> jax.Array:
    """This process's part of a global array, on its devices."""
    return jax.make_array_from_process_local_data(sharding, local)
