"""`ring_attention` on four devices of a CPU, compared with attention of the whole sequence."""

import jax.numpy as jnp
import pytest
from process_tools import python
from rule_tools import refused

from pallas_kernels import ring_attention

SCRIPT = """
import functools, itertools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from pallas_kernels import flash_attention, ring_attention

keys = jax.random.split(jax.random.key(0), 5)
draw = lambda key, *shape: jax.random.normal(key, shape)
directions = draw(keys[3], 2, 24, 2, 8), draw(keys[4], 2, 2, 24)
axes = (jax.sharding.AxisType.Auto,)
mesh, spec = jax.make_mesh((4,), ("seq",), axis_types=axes), P(None, "seq")

def run(f, ring=False, **more):
    f = functools.partial(f, return_lse=True, **more)
    if ring:
        f = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=(spec, P(None, None, "seq")))
    def both(args):
        out, pull = jax.vjp(f, *args)
        return out, pull(directions)
    return jax.jit(both)

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
for causal, key_heads in itertools.product((True, False), (1, 2)):
    how = {"causal": causal, "precision": "highest", "softcap": 2.0 if key_heads == 1 else None}
    qkv = [draw(key, 2, 24, h, 8) for key, h in zip(keys, (2, key_heads, key_heads))]
    ring, whole = run(ring_attention, True, axis_name="seq", **how), run(flash_attention, **how)
    jax.tree.map(close, ring(qkv), whole(qkv))
    text = ring.lower(qkv).compile().as_text()
    assert "collective-permute" in text and "all-gather" not in text
print("equal")
"""


def test_ring_is_the_whole():
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    assert python("-c", SCRIPT, XLA_FLAGS=flags) == "equal\n"


def test_errors():
    x = jnp.zeros((1, 4, 2, 8))
    message = "as many queries as keys on each device"
    refused(ring_attention, x[:, :2], x, x, axis_name="seq", match=message)
    with pytest.raises(TypeError, match="option window: it has no windows, flash_attention"):
        ring_attention(x, x, x, axis_name="seq", window=3)
