"""Digests of arrays: the same on any device and sharding, different after any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gptjax import parallel
from gptjax.weights.digests import compile_digests, digests

DTYPES = [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint32, jnp.uint16, jnp.uint8, jnp.bool_]


def digest(x) -> str:
    return digests({"x": x})[0]["x"]


def array(dtype):
    return jnp.asarray(np.random.default_rng(0).integers(0, 2, (6, 5)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_changed_bit_changes_both_sums(dtype):
    x = np.array(array(dtype))
    before = digest(jnp.asarray(x))
    width = x.dtype.itemsize
    for byte in range(x.nbytes if dtype != jnp.bool_ else 0):
        for bit in (0, 3, 7):
            changed = np.frombuffer(bytearray(x.tobytes()), np.uint8).copy()
            changed[byte] ^= 1 << bit
            after = digest(jnp.asarray(changed.view(x.dtype).reshape(x.shape)))
            assert after[-16:-8] != before[-16:-8] and after[-8:] != before[-8:], (
                byte // width,
                bit,
            )
    if dtype == jnp.bool_:
        assert digest(jnp.asarray(~x)) != before


def test_order_shape_and_type_count():
    x = jnp.arange(6, dtype=jnp.float32)
    different = [
        x,
        x[::-1],
        x.reshape(2, 3),
        x.reshape(3, 2),
        x.astype(jnp.int32),
        x.at[0].set(-0.0),
        x.at[1].set(2.0),
    ]
    assert len({digest(y) for y in different}) == len(different)
    assert digest(x) == digest(jnp.arange(6, dtype=jnp.float32))


def test_equal_under_any_sharding():
    mesh = parallel.data_mesh(jax.devices("cpu")[:2])
    x = jax.random.normal(jax.random.key(0), (8, 6))
    expected = digest(x)
    for spec in (PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, "data")):
        assert digest(jax.device_put(x, NamedSharding(mesh, spec))) == expected


def test_names_arrays_that_are_not_finite():
    tree = {
        "a": jnp.ones(3),
        "b": [jnp.float32(jnp.nan), jnp.bfloat16(jnp.inf)],
        "c": jnp.zeros((0, 2)),
    }
    assert digests(tree)[1] == ["b.0", "b.1"]


def test_nothing_is_compiled_after_compile_digests():
    device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    tree = jax.device_put(
        {"a": jnp.ones((5, 3)), "b": jnp.zeros(7, jnp.int32), "c": jnp.ones((5, 3))}, device
    )
    compile_digests(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    )
    compiled = []
    listener = lambda event, seconds, **_: (
        compiled.append(event) if "backend_compile" in event else None
    )
    jax.monitoring.register_event_duration_secs_listener(listener)
    digests(tree)
    assert not compiled
    digests({"a": jnp.ones((5, 4))})
    assert compiled  # or the listener heard nothing
    jax.monitoring.unregister_event_duration_listener(listener)
