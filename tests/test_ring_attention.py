"""`ring_attention` on four devices of a CPU, compared with attention of the whole sequence."""

import os
import subprocess
import sys

import jax.numpy as jnp
import pytest
from rule_tools import refused

from pallas_kernels import ring_attention

SCRIPT = """
import functools, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from pallas_kernels import flash_attention, ring_attention

causal, key_heads = sys.argv[1] == "True", int(sys.argv[2])
how = {"causal": causal, "precision": "highest", "softcap": 2.0 if key_heads == 1 else None}
keys = jax.random.split(jax.random.key(0), 5)
draw = lambda key, *shape: jax.random.normal(key, shape)
q, k, v = (draw(key, 2, 24, h, 8) for key, h in zip(keys, (2, key_heads, key_heads)))
directions = draw(keys[3], 2, 24, 2, 8), draw(keys[4], 2, 2, 24)
axes = (jax.sharding.AxisType.Auto,)
mesh, spec = jax.make_mesh((4,), ("seq",), axis_types=axes), P(None, "seq")

def run(f, ring=False, **more):
    f = functools.partial(f, return_lse=True, **how, **more)
    if ring:
        f = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=(spec, P(None, None, "seq")))
    def both(args):
        out, pull = jax.vjp(f, *args)
        return out, pull(directions)
    return jax.jit(both)

ring, whole = run(ring_attention, True, axis_name="seq"), run(flash_attention)
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
jax.tree.map(close, ring((q, k, v)), whole((q, k, v)))
text = ring.lower((q, k, v)).compile().as_text()
assert "collective-permute" in text and "all-gather" not in text
print("equal")
"""


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_ring_is_the_whole(causal, key_heads):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SCRIPT, str(causal), str(key_heads)]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr[-2000:]


def test_errors():
    x = jnp.zeros((1, 4, 2, 8))
    message = "as many queries as keys on each device"
    refused(ring_attention, x[:, :2], x, x, axis_name="seq", match=message)
    with pytest.raises(TypeError, match="option window: it has no windows, flash_attention"):
        ring_attention(x, x, x, axis_name="seq", window=3)
