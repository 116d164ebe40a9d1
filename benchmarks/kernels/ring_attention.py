"""ring_attention on four GPUs, compared with XLA on the sharded arrays and with one GPU.

    python -m gptjax.bench kernels benchmarks/kernels/ring_attention.py

"ring" is `ring_attention` in `jax.shard_map`; "xla" is `flash_attention` with implementation="xla"
on the same sharded arrays, which XLA partitions. "one GPU" is `flash_attention` on a quarter of the
sequence. TFLOP/s count the matmuls of visible scores, divided by the number of GPUs. With causal
masks a ring has at most 4/7 of the TFLOP/s of one GPU: the last GPU computes the most.
"""

import functools
import itertools

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gptjax.bench.harness import Case, normal, passes
from pallas_kernels import flash_attention, ring_attention

GPUS = 4
SHAPE = (1, 16384, 16, 4, 128)  # B, T of all GPUs, H query heads, K key heads, D


def cases() -> list[Case]:
    if len(jax.devices()) < GPUS:
        return []
    mesh = jax.make_mesh(
        (GPUS,), ("seq",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:GPUS]
    )
    return [_case(*how) for how in itertools.product((mesh, None), (True, False), (False, True))]


def _case(mesh, causal, both):
    b, t, h, k, d = SHAPE
    spec, how = PartitionSpec(None, "seq"), {"causal": causal}
    if mesh is None:
        t //= GPUS
        run = {"one GPU": functools.partial(flash_attention, **how)}
    else:
        ring = functools.partial(ring_attention, axis_name="seq", **how)
        run = {
            "ring": jax.shard_map(ring, mesh=mesh, in_specs=spec, out_specs=spec),
            "xla": functools.partial(flash_attention, implementation="xla", **how),
        }

    def make(key):
        return normal(key, *((b, t, heads, d) for heads in (h, h, k, k)))  # dy, q, k, v

    scores = t * (t + 1) / 2 if causal else t * t
    return Case(
        kernel="ring_attention",
        name=f"{'causal' if causal else 'all keys'}, "
        f"{'forward and backward' if both else 'forward'} B={b} T={t} H={h}/{k} D={d} bf16",
        make=jax.jit(make, out_shardings=mesh and NamedSharding(mesh, spec)),
        run={name: passes(f, both) for name, f in run.items()},
        flops=(3.5 if both else 1) * 4 * b * h * d * scores / (GPUS if mesh else 1),
        bound="bf16",
        bar="≥ 1.0× XLA" if mesh else "",
    )
