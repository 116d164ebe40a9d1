"""silu_mul, forward and backward, at the width of an MLP of 8/3 · 768 channels.

python -m gptjax.bench kernels examples/new_kernel/benchmark.py
"""

import functools

import jax
import jax.numpy as jnp
from glu import silu_mul

from gptjax.bench.harness import Case

SHAPE = (65536, 2048)
BACKENDS = ("triton", "xla")
ARRAY_BYTES = 2 * SHAPE[0] * SHAPE[1]


def cases() -> list[Case]:
    forward = Case(
        kernel="silu_mul",
        name=f"forward {SHAPE[0]}×{SHAPE[1]} bf16",
        make=functools.partial(random_arrays, 2),
        run={name: functools.partial(silu_mul, implementation=name) for name in BACKENDS},
        torch={"torch": torch_forward, "torch.compile": compiled(torch_forward)},
        bytes=3 * ARRAY_BYTES,  # gate, up; y
        bar="≥ 85 % of the copy rate",
    )
    backward = Case(
        kernel="silu_mul",
        name=f"backward {SHAPE[0]}×{SHAPE[1]} bf16",
        make=functools.partial(random_arrays, 3),
        run={name: functools.partial(jax_backward, name) for name in BACKENDS},
        torch={"torch.compile": compiled(torch_backward)},
        bytes=5 * ARRAY_BYTES,  # gate, up, dy; dgate, dup
        bar="≥ 85 % of the copy rate",
    )
    return [forward, backward]


def random_arrays(number, key):
    return tuple(jax.random.normal(k, SHAPE, jnp.bfloat16) for k in jax.random.split(key, number))


def jax_backward(implementation, gate, up, dy):
    # The forward pass is not measured: the compiler removes y, which nothing uses.
    _, pull = jax.vjp(functools.partial(silu_mul, implementation=implementation), gate, up)
    return pull(dy)


def compiled(make):
    return lambda torch: torch.compile(make(torch))


def torch_forward(torch):
    return lambda gate, up: torch.nn.functional.silu(gate) * up


def torch_backward(torch):
    def f(gate, up, dy):
        gate, up, dy32 = gate.float(), up.float(), dy.float()
        s = torch.sigmoid(gate)
        return (dy32 * up * s * (1 + gate * (1 - s))).to(dy.dtype), (dy32 * gate * s).to(dy.dtype)

    return f
