"""Placement of batches and parameters on the devices."""

import jax
import numpy as np
import pytest

from gptjax import parallel


@pytest.mark.parametrize("axis", [0, 1])
def test_a_batch_is_split_and_parameters_are_copied(axis):
    devices = jax.devices("cpu")[:2]
    mesh = parallel.data_mesh(devices)
    array = np.arange(24).reshape(4, 6)
    split = parallel.put(parallel.over_batch(mesh, axis=axis), array)
    copied = parallel.put(parallel.replicated(mesh), array)
    halves = [np.asarray(shard.data) for shard in split.addressable_shards]
    assert np.array_equal(np.concatenate(halves, axis=axis), array) and len(halves) == 2
    assert all(np.array_equal(shard.data, array) for shard in copied.addressable_shards)
