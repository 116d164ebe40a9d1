"""Polar Express of all matrices of GPT-2 124M.

    python -m gptjax.bench kernels benchmarks/experiments/polar_express.py

TFLOP/s count complete matmuls, though half of a symmetric result is enough. optimizer.py has the
complete update.
"""

import functools

import jax

from gptjax import optim
from gptjax.bench.harness import Case
from gptjax.optim.polar_express import POLAR_EXPRESS

# q, k, v and the attention's output; into and out of the MLP.
BATCHES = ((48, 768, 768), (12, 768, 3072), (12, 3072, 768))


def cases() -> list[Case]:
    found = [
        _orthogonalization(BATCHES, "124M: 48×768², 12×768×3072, 12×3072×768", bar="≤ 3.0 ms"),
        *(_orthogonalization((shape,), "×".join(map(str, shape))) for shape in BATCHES),
    ]
    return found


def _orthogonalization(shapes, name, bar=""):
    def make(key):
        return tuple(
            jax.random.normal(k, s)
            for k, s in zip(jax.random.split(key, len(shapes)), shapes, strict=True)
        )

    def run(f):
        return lambda *batches: [f(x) for x in batches]

    flops = 0
    for batch, rows, columns in shapes:
        small, large = min(rows, columns), max(rows, columns)
        flops += 5 * 2 * batch * small * small * (2 * large + small)
    return Case(
        kernel="polar_express",
        name=f"{name}, fp32 in and out",
        make=make,
        run={
            "auto": run(optim.polar_express),
            "xla": run(functools.partial(optim.polar_express, implementation="xla")),
            "newton_schulz": run(optim.newton_schulz),
        },
        torch={
            "torch": lambda torch: run(functools.partial(_in_torch, torch)),
            "torch.compile": lambda torch: torch.compile(run(functools.partial(_in_torch, torch))),
        },
        flops=flops,
        bound="bf16",
        bar=bar,
    )


def _in_torch(torch, x):
    """As modded-nanogpt has it without its kernels."""
    tall = x.shape[-2] > x.shape[-1]
    y = x.bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = torch.bmm(y.mT, y) if tall else torch.bmm(y, y.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        left, right = (y, polynomial) if tall else (polynomial, y)
        y = torch.baddbmm(y, left, right, beta=a)
    return y.float()
