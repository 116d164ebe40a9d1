"""The mesh and its two placements."""

import jax
import numpy as np
import pytest

from gptjax import sharding


@pytest.mark.parametrize("axis", [0, 1])
def test_a_batch_is_split_and_parameters_are_copied(axis):
    devices = jax.devices("cpu")[:2]
    mesh = sharding.data_mesh(devices)
    array = np.arange(24).reshape(4, 6)
    split = sharding.put(sharding.over_batch(mesh, axis=axis), array)
    copied = sharding.put(sharding.replicated(mesh), array)
    halves = [np.asarray(shard.data) for shard in split.addressable_shards]
    assert np.array_equal(np.concatenate(halves, axis=axis), array) and len(halves) == 2
    assert all(np.array_equal(shard.data, array) for shard in copied.addressable_shards)
