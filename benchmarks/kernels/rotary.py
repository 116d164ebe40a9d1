"""rotary_qkv: the norm and rotation of queries and keys, at the widths of the models that use it.

python -m gptjax.bench kernels benchmarks/kernels/rotary.py
"""

import functools

import jax
import jax.numpy as jnp

from gptjax.bench.harness import Case, normal
from pallas_kernels import rotary_qkv

BACKENDS = ("triton", "xla")
# Name, T, H, G, D, E, options
SHAPES = [
    ("speedrun", 49_152, 6, 6, 128, 32, {"eps": 1e-6}),
    ("speedrun, paired heads", 49_152, 6, 6, 128, 32, {"eps": 1e-6, "pair_heads": True}),
    ("Llama 1B", 16_384, 32, 8, 64, 32, {"pairs": "halves"}),
]


def cases() -> list[Case]:
    return [case(*shape, backward) for shape in SHAPES for backward in (False, True)]


def case(name, t, h, g, d, e, options, backward) -> Case:
    """Return the case of the forward pass, or of the backward pass alone."""
    o, split = (h + 2 * g) * d, 2 if options.get("pair_heads") else 1
    outputs = [(1, split * t, heads // split, d) for heads in (h, g, g)] if backward else []

    def make(key):
        angle = 1.0 * jnp.arange(split * t)[:, None] * 1024 ** -jnp.linspace(0, 1, e)[None]
        return *normal(key, *outputs, (1, t, o)), jnp.cos(angle)[None], jnp.sin(angle)[None]

    def run(backend, *arrays):
        *gradients, qkv, cos, sin = arrays
        how = {"heads": h, "key_heads": g, "implementation": backend} | options
        if not backward:
            return rotary_qkv(qkv, cos, sin, **how)
        _, pull = jax.vjp(lambda qkv: rotary_qkv(qkv, cos, sin, **how), qkv)
        return pull(tuple(gradients))

    read_again = (h + g) * d if backward and "eps" in options else 0
    return Case(
        kernel="rotary_qkv",
        name=f"{name}{', backward' if backward else ''} {t}×{o} bf16",
        make=make,
        run={backend: functools.partial(run, backend) for backend in BACKENDS},
        bytes=2 * t * (2 * o + read_again),
        bar="≥ 85 % of the copy rate",
    )
