"""Loss and gradient of the logits in one pass, in place.

python -m gptjax.bench kernels benchmarks/kernels/classifier.py
"""

import functools

import jax
import jax.numpy as jnp

from gptjax.bench.harness import Case
from pallas_kernels.classifier import SigmoidCap, fused_classifier

COLUMNS, VOCAB_SIZE = 50304, 50257


def cases() -> list[Case]:
    return [
        _case(65536, None, bar="≤ 3.6 ms"),
        _case(65536, SigmoidCap()),
        _case(16384, None),
        _case(16384, 30.0),
        _case(16384, SigmoidCap()),
        _case(16384, SigmoidCap(), target_weights=(1.0, 0.5, 0.25)),
        _case(16384, None, columns=VOCAB_SIZE),  # unaligned rows
    ]


def _case(rows, softcap, columns=COLUMNS, bar="", target_weights=None):
    shape = (rows,) if target_weights is None else (rows, len(target_weights))

    def make(key):
        keys = jax.random.split(key)
        logits_NV = jax.random.normal(keys[0], (rows, columns), jnp.bfloat16)
        return logits_NV, jax.random.randint(keys[1], shape, 0, VOCAB_SIZE, jnp.int32)

    how = {"vocab_size": VOCAB_SIZE, "softcap": softcap, "target_weights": target_weights}

    def run(implementation, *arrays):
        losses_N, dlogits_NV = fused_classifier(*arrays, implementation=implementation, **how)
        return dlogits_NV, losses_N

    def in_torch(torch, wrap):
        """Compute the loss in fp32 and differentiate with autograd, as in a training step. 65,536
        rows in fp32 need most of the memory of an H200."""

        def loss(x, targets):
            z = x[:, :VOCAB_SIZE].float()
            return torch.nn.functional.cross_entropy(z, targets.long(), reduction="none")

        loss = wrap(loss)

        def f(x, targets):
            x = x.detach().requires_grad_()
            losses = loss(x, targets)
            return torch.autograd.grad(losses.sum(), x)[0], losses.detach()

        return f

    name = f"{rows}×{columns} bf16"
    if softcap is not None:
        name += " sigmoid cap" if isinstance(softcap, SigmoidCap) else " tanh cap"
    if target_weights is not None:
        name += f", {len(target_weights)} targets"
    return Case(
        kernel="fused_classifier",
        name=name,
        make=make,
        run={name: functools.partial(run, name) for name in ("triton", "xla")},
        torch={
            "torch": lambda torch: in_torch(torch, lambda f: f),
            "torch.compile": lambda torch: in_torch(torch, torch.compile),
        }
        if bar
        else {},
        bytes=2 * 2 * rows * columns,
        in_place=True,
        bar=bar,
    )
