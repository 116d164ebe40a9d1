"""rotary_qkv: the norm and rotation of queries and keys, at the widths of the models that use it.

python -m gptjax.bench kernels benchmarks/kernels/rotary.py
"""

import functools

import jax
import jax.numpy as jnp

from gptjax.bench.harness import Case
from pallas_kernels import rotary_qkv

BACKENDS = ("triton", "xla")
# Name, T, H, G, D, E, options
SHAPES = [
    ("speedrun", 49_152, 6, 6, 128, 32, {"eps": 1e-6}),
    ("speedrun, paired heads", 49_152, 6, 6, 128, 32, {"eps": 1e-6, "pair_heads": True}),
    ("Llama 1B", 16_384, 32, 8, 64, 32, {"pairs": "halves"}),
]


def cases() -> list[Case]:
    return [case(*shape) for shape in SHAPES for case in (forward_case, backward_case)]


def arrays(key, *, t, o, e, times=1):
    angle = 1.0 * jnp.arange(t * times)[:, None] * 1024 ** -jnp.linspace(0, 1, e)[None]
    return (
        jax.random.normal(key, (1, t, o), jnp.bfloat16),
        jnp.cos(angle)[None],
        jnp.sin(angle)[None],
    )


def forward_case(name, t, h, g, d, e, options) -> Case:
    o = (h + 2 * g) * d

    def run(backend, qkv, cos, sin):
        how = {"heads": h, "key_heads": g, "implementation": backend}
        return rotary_qkv(qkv, cos, sin, **how, **options)

    return Case(
        kernel="rotary_qkv",
        name=f"{name} {t}×{o} bf16",
        make=functools.partial(arrays, t=t, o=o, e=e, times=1 + options.get("pair_heads", False)),
        run={backend: functools.partial(run, backend) for backend in BACKENDS},
        bytes=2 * 2 * t * o,
        bar="≥ 85 % of the copy rate",
    )


def backward_case(name, t, h, g, d, e, options) -> Case:
    o = (h + 2 * g) * d

    def make(key):
        split = 2 if options.get("pair_heads") else 1
        qkv, cos, sin = arrays(key, t=t, o=o, e=e, times=split)
        shapes = [(1, split * t, heads // split, d) for heads in (h, g, g)]
        return *(jax.random.normal(key, shape, jnp.bfloat16) for shape in shapes), qkv, cos, sin

    def run(backend, dq, dk, dv, qkv, cos, sin):
        how = {"heads": h, "key_heads": g, "implementation": backend}
        _, pull = jax.vjp(lambda qkv: rotary_qkv(qkv, cos, sin, **how, **options), qkv)
        return pull((dq, dk, dv))

    return Case(
        kernel="rotary_qkv",
        name=f"{name}, backward {t}×{o} bf16",
        make=make,
        run={backend: functools.partial(run, backend) for backend in BACKENDS},
        bytes=2 * t * (2 * o + ((h + g) * d if "eps" in options else 0)),
        bar="≥ 85 % of the copy rate",
    )
