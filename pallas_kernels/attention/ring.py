"""Attention over a sequence that is sharded over a mesh axis: context parallelism.

Each device holds a block of queries and the keys and values of the same tokens. The keys and values
travel around the ring of devices. With A and B two sets of keys, of which each device has

    O_A, L_A: output and log-sum-exp of the queries with A as the only keys

the merged results are L = log(exp L_A + exp L_B) and O = exp(L_A − L) O_A + exp(L_B − L) O_B.
Liu et al., "Ring Attention", 2023. Shapes as in `flash_attention`, of one device's arrays.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _calls
from pallas_kernels._types import Array, Float
from pallas_kernels.attention import Implementation, flash_attention
from pallas_kernels.attention.arguments import SWAP, with_hints
from pallas_kernels.gemm.numerics import Numerics


@with_hints
def ring_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BTKD: Float[Array, "B T K D"],
    v_BTKE: Float[Array, "B T K E"],
    *,
    axis_name: str,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    numerics: str | Numerics | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | str = "auto",
) -> Float[Array, "B T H E"] | tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """Compute `flash_attention` of a sequence whose blocks are in order along a mesh axis.

    Memory and time of a device are those of its queries. With `causal`, devices skip the blocks of
    later tokens: the last device computes the most. The gradient saves the keys and values of every
    block that the device reads.

    Args:
        q_BTHD, k_BTKD, v_BTKE: the device's block, of equally many tokens on every device.
        axis_name: mesh axis of `jax.shard_map`.

    The other arguments, the result and the errors are as in `flash_attention`.

    Examples:
        >>> attend = functools.partial(ring_attention, axis_name="seq")
        >>> jax.shard_map(attend, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))(
        ...     q, k, v
        ... )
        >>> attend(q, k, v, causal=False)  # inside of shard_map, as the following
        >>> attend(q, k, v, scale=1.0, softcap=50.0)
        >>> out, lse_BHT = attend(q, k, v, return_lse=True)
        >>> attend(q, k, v, deterministic=True)
        >>> attend(q, k, v, numerics="fp32", implementation="triton")
        >>> attend(q, k, v, precision="highest")  # fp32, as in jax.lax.dot
    """
    if q_BTHD.shape[1] != k_BTKD.shape[1]:
        raise ValueError(
            "ring_attention: expected as many queries as keys on each device, got "
            f"{q_BTHD.shape}, {k_BTKD.shape}. {SWAP}"
        )
    flash = functools.partial(
        flash_attention,
        scale=scale,
        softcap=softcap,
        return_lse=True,
        deterministic=deterministic,
        numerics=numerics,
        precision=precision,
        implementation=implementation,
    )
    size, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

    def attend(k_BTKD, v_BTKE, causal=False):
        out_BTHE, lse_BHT = flash(q_BTHD, k_BTKD, v_BTKE, causal=causal)
        return out_BTHE.astype(jnp.float32), lse_BHT

    def skip(k_BTKD, v_BTKE):
        out, lse = jax.eval_shape(attend, k_BTKD, v_BTKE)
        nothing = jnp.zeros(out.shape, out.dtype), jnp.full(lse.shape, -jnp.inf, lse.dtype)
        return _calls.vary_alike((q_BTHD, k_BTKD, v_BTKE), nothing)

    out_BTHE, lse_BHT = attend(k_BTKD, v_BTKE, causal)
    for step in range(1, size):
        ring = [(device, (device + 1) % size) for device in range(size)]
        k_BTKD, v_BTKE = (jax.lax.ppermute(x, axis_name, ring) for x in (k_BTKD, v_BTKE))
        if causal:  # devices before `step` have the block of a later token
            new = jax.lax.cond(me >= step, attend, skip, k_BTKD, v_BTKE)
        else:
            new = attend(k_BTKD, v_BTKE)
        total_BHT = jnp.logaddexp(lse_BHT, new[1])
        shares = (jnp.exp(x - total_BHT).swapaxes(1, 2)[..., None] for x in (lse_BHT, new[1]))
        out_BTHE = sum(share * x for share, x in zip(shares, (out_BTHE, new[0]), strict=True))
        lse_BHT = total_BHT
    out_BTHE = out_BTHE.astype(q_BTHD.dtype)
    return (out_BTHE, lse_BHT) if return_lse else out_BTHE
