"""Softmax, forward and backward.

python -m gptjax.bench kernels benchmarks/kernels/row_softmax.py
"""

import functools
import math

from gptjax.bench.harness import Case, eager_and_compiled, normal
from pallas_kernels.row_softmax import Options, backward, softmax


def cases() -> list[Case]:
    bars = {_forward: "≥ 85 % of the copy rate", _backward: "≥ 80 % of the copy rate"}
    shapes = (65536, 1024), (16384, 50304)
    found = [case(shape, bar=bar) for shape in shapes for case, bar in bars.items()]
    long, unaligned = (4096, 131072), (16384, 50257)
    found += [case(shape) for shape in (long, unaligned) for case in bars]
    # The scores of 64 sequences of 1024 tokens in 12 heads. Implementations may skip the columns
    # above the diagonal.
    return found + [case((768, 1024, 1024), causal=True) for case in bars]


def _name(direction, shape, causal):
    return f"{direction} {'×'.join(map(str, shape))} bf16{' causal' if causal else ''}"


def _bytes(shape, *, read, written, causal):
    share = (shape[-1] + 1) / (2 * shape[-1]) if causal else 1
    return 2 * math.prod(shape) * (written + read * share)


def _forward(shape, causal=False, bar=""):
    def in_jax(implementation):
        return functools.partial(softmax, causal=causal, implementation=implementation)

    return Case(
        kernel="softmax",
        name=_name("forward", shape, causal),
        make=lambda key: normal(key, shape),
        run={name: in_jax(name) for name in ("triton", "xla")},
        torch=eager_and_compiled(lambda torch: lambda x: torch.softmax(x, -1)) if bar else {},
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
