"""Softmax, forward and backward.

python -m gptjax.bench kernels benchmarks/kernels/row_softmax.py
"""

import functools
import math

from gptjax.bench.harness import Case, eager_and_compiled, normal
from pallas_kernels.row_softmax import Options, backward, softmax


def cases() -> list[Case]:
    found = []
    for shape in ((65536, 1024), (16384, 50304)):
        found += [
            _forward(shape, bar="≥ 85 % of the copy rate"),
            _backward(shape, bar="≥ 80 % of the copy rate"),
        ]
    # Very long rows, and unaligned rows.
    for shape in ((4096, 131072), (16384, 50257)):
        found += [_forward(shape), _backward(shape)]
    # The scores of 64 sequences of 1024 tokens in 12 heads. Implementations may skip the columns
    # above the diagonal.
    return [
        *found,
        _forward((768, 1024, 1024), causal=True),
        _backward((768, 1024, 1024), causal=True),
    ]


def _name(direction, shape, causal):
    return f"{direction} {'×'.join(map(str, shape))} bf16{' causal' if causal else ''}"


def _bytes(shape, *, read, written, causal):
    return (
        2
        * math.prod(shape)
        * (written + (read * (shape[-1] + 1) / (2 * shape[-1]) if causal else read))
    )


def _forward(shape, causal=False, bar=""):
    def in_jax(implementation):
        return functools.partial(softmax, causal=causal, implementation=implementation)

    def in_torch(torch):
        return lambda x: torch.softmax(x, -1)

    return Case(
        kernel="softmax",
        name=_name("forward", shape, causal),
        make=lambda key: normal(key, shape),
        run={name: in_jax(name) for name in ("triton", "xla")},
        torch=eager_and_compiled(in_torch) if bar else {},
        bytes=_bytes(shape, read=1, written=1, causal=causal),
        bar=bar,
    )


def _backward(shape, causal=False, bar=""):
    def make(key):
        x, dy = normal(key, shape, shape)
        return softmax(x, causal=causal, implementation="xla"), dy

    def in_jax(implementation):
        return lambda y, dy: backward(Options(implementation, 1.0, causal), y, dy)[0]

    def in_torch(torch):
        return lambda y, dy: torch._softmax_backward_data(dy, y, -1, y.dtype)

    def compiled(torch):
        def f(y, dy):
            y32, dy32 = y.float(), dy.float()
            return (y32 * (dy32 - (dy32 * y32).sum(-1, keepdim=True))).to(y.dtype)

        return torch.compile(f)

    return Case(
        kernel="softmax",
        name=_name("backward", shape, causal),
        make=make,
        run={name: in_jax(name) for name in ("triton", "xla")},
        torch={"torch": in_torch, "torch.compile": compiled} if bar else {},
        bytes=_bytes(shape, read=2, written=1, causal=causal),
        bar=bar,
    )
