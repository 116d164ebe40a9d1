"""Arrays sharded over all GPUs under plain `jax.jit`, compared with the share of one GPU on one.

python -m gptjax.bench kernels benchmarks/kernels/sharded.py

FLOPs are those of one GPU. With gradients, linear_cross_entropy adds an all-reduce of the gradient
of the head.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gptjax.bench.harness import Case, normal
from pallas_kernels import flash_attention, linear_cross_entropy

N, C, V = 32768, 768, 50304  # two chunks of the head on each GPU
B, T, H, D = 8, 4096, 12, 64  # long enough that the harness needs no loop


def cases() -> list[Case]:
    return [
        of_kernel(gpus, both)
        for both in (False, True)
        for of_kernel in (_head, _attention)
        for gpus in sorted({1, jax.device_count()})
    ]


def _sharded(gpus: int, *arrays: tuple[jax.Array, bool]) -> tuple[jax.Array, ...]:
    """Shard the flagged arrays over their first axis, and copy the others to all GPUs."""
    if gpus == 1:
        return tuple(x for x, _ in arrays)
    mesh = jax.make_mesh((gpus,), ("gpus",), axis_types=(AxisType.Auto,))
    specs = [PartitionSpec("gpus") if flag else PartitionSpec() for _, flag in arrays]
    put = [
        jax.device_put(x, NamedSharding(mesh, s)) for (x, _), s in zip(arrays, specs, strict=True)
    ]
    return tuple(put)


def _head(gpus, both):
    def make(key):
        x_NC = jax.random.normal(key, (gpus * N, C), jnp.bfloat16)
        w_VC = jax.random.normal(key, (V, C), jnp.bfloat16) * jnp.bfloat16(0.05)
        targets_N = jax.random.randint(key, (gpus * N,), 0, V)
        return _sharded(gpus, (x_NC, True), (w_VC, False), (targets_N, True))

    def of(implementation):
        losses = functools.partial(linear_cross_entropy, implementation=implementation)
        gradients = jax.value_and_grad(lambda *arrays: losses(*arrays).mean(), (0, 1))
        return gradients if both else losses

    flops = 2 * N * C * V * (3 if both else 1)
    return _case("linear_cross_entropy", f"{N}×{C}×{V}", gpus, both, make, of, flops)


def _attention(gpus, both):
    def make(key):
        return _sharded(gpus, *((x, True) for x in normal(key, *3 * [(gpus * B, T, H, D)])))

    def of(implementation):
        f = functools.partial(flash_attention, implementation=implementation)
        return (lambda q, k, v: jax.vjp(f, q, k, v)[1](q)) if both else f

    flops = 2 * B * H * T * T * D * (3.5 if both else 1)
    return _case("flash_attention", f"{B}×{T}×{H}×{D}", gpus, both, make, of, flops)


def _case(kernel, shape, gpus, both, make, of, flops):
    where = "one GPU" if gpus == 1 else f"on each of {gpus} GPUs"
    return Case(
        kernel=kernel,
        name=f"{'forward and backward' if both else 'forward'} {shape} bfloat16, {where}",
        make=make,
        run={name: of(name) for name in ("auto", "xla")},
        flops=flops,
        bound="bf16",
        bar="" if gpus == 1 else "the time of one GPU, 1 %; with the head's gradient, and its sum",
    )
