"""LM head and loss of GPT-2 124M: losses and both gradients, and losses alone.

python -m gptjax.bench kernels benchmarks/kernels/lm_head.py
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gptjax.bench.harness import Case
from pallas_kernels import linear_cross_entropy

C, V, VOCAB = 768, 50304, 50257


def make(n: int, key: jax.Array) -> tuple:
    keys = jax.random.split(key, 3)
    x_NC = jax.random.normal(keys[0], (n, C), jnp.bfloat16)
    w_VC = jax.random.normal(keys[1], (V, C), jnp.bfloat16) * jnp.bfloat16(0.05)
    return x_NC, w_VC, jax.random.randint(keys[2], (n,), 0, VOCAB)


def mean_loss(**how):
    return lambda x, w, targets: linear_cross_entropy(x, w, targets, vocab_size=VOCAB, **how).mean()


def with_gradients(**how):
    return jax.value_and_grad(mean_loss(**how), (0, 1))


def bare_matmuls(x, w, targets):
    """Compute only the three matmuls of a head, in chunks of 16,384 rows: a lower bound of the time
    of loss and gradients."""
    dx, dw = [], jnp.zeros((V, C), jnp.float32)
    for i in range(0, x.shape[0], 16384):
        x_KC, dw = jax.lax.optimization_barrier((x[i : i + 16384], dw))
        logits = x_KC @ w.T
        logits = jax.lax.optimization_barrier(logits)
        dx.append(logits @ w)
        dw = dw + jnp.matmul(logits.T, x_KC, preferred_element_type=jnp.float32)
    return jnp.concatenate(dx), dw.astype(jnp.bfloat16)


def torch_with_gradients(torch, compiled: bool):
    def loss(x, w, targets):
        logits = torch.nn.functional.linear(x, w).float()
        return torch.nn.functional.cross_entropy(logits[:, :VOCAB], targets.long())

    loss = torch.compile(loss) if compiled else loss

    def run(x, w, targets):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        value = loss(x, w, targets)
        return value, *torch.autograd.grad(value, (x, w))

    return run


def cases() -> list[Case]:
    return [
        _case("loss and both gradients", 65536, with_gradients, 3, bar="≤ 26 ms"),
        _case("loss and both gradients", 4096, with_gradients, 3),
        _case("loss alone", 65536, mean_loss, 1),
    ]


def _case(what: str, n: int, f: Callable, matmuls: int, bar: str = "") -> Case:
    run = {name: f(implementation=name) for name in ("fused", "xla")}
    return Case(
        kernel="linear_cross_entropy",
        name=f"{what} {n}×{C}×{V} bf16",
        make=functools.partial(make, n),
        run=run | ({"three bare matmuls": bare_matmuls} if matmuls == 3 else {}),
        torch={
            "torch": functools.partial(torch_with_gradients, compiled=False),
            "torch.compile": functools.partial(torch_with_gradients, compiled=True),
        }
        if bar
        else {},
        flops=matmuls * 2 * n * C * V,
        bound="bf16",
        bar=bar,
    )
