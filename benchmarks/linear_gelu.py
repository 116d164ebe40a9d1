"""linear_gelu and linear_relu_squared: forward and backward at GPT-2's widths.

    python -m gptjax.bench kernels linear_gelu

Forward writes y and the derivative that the backward pass reads, but for the column "nothing saved". Backward makes dx, dw and db
from dy, the saved derivative, x and w. "product" and "two products" are XLA's bare matrix products (cuBLASLt). PyTorch saves the
pre-activation instead; its backward takes the same array for that.
"""

import functools

import jax
import jax.numpy as jnp

from gptjax.bench.harness import Case
from pallas_kernels.linear_gelu import How, backward, forward

# N, I, O
SHAPES = [(65536, 768, 3072), (16384, 1280, 5120), (16384, 1600, 6400), (4096, 768, 3072)]
BACKENDS = ("mosaic", "triton", "xla")


def normal(key, *shapes):
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True)]


def forward_inputs(key, *, n, i, o):
    x, w, b = normal(key, (n, i), (i, o), (o,))
    return x, w * jnp.bfloat16(i**-0.5), b


def backward_inputs(key, *, n, i, o):
    dy, derivative, x, w = normal(key, (n, o), (n, o), (n, i), (i, o))
    return dy, derivative, x, w


def forward_case(n, i, o, activation) -> Case:
    def run(backend, x, w, b, *, save=True):
        return forward(x, w, b if activation == "gelu" else None, How(activation, backend, None), save=save)

    def torch_forward(torch):
        f = torch.nn.functional

        def eager(x, w, b):
            u = torch.addmm(b, x, w) if activation == "gelu" else x @ w
            return u, f.gelu(u, approximate="tanh") if activation == "gelu" else f.relu(u).square()

        return eager

    return Case(
        kernel="linear_gelu",
        name=f"linear_{activation} forward {n}×{i}×{o} bf16",
        make=functools.partial(forward_inputs, n=n, i=i, o=o),
        run={
            **{backend: functools.partial(run, backend) for backend in BACKENDS},
            "xla, nothing saved": functools.partial(run, "xla", save=False),
            "mosaic, nothing saved": functools.partial(run, "mosaic", save=False),
            "product": lambda x, w, b: x @ w,
        },
        torch={"torch": torch_forward, "torch.compile": lambda torch: torch.compile(torch_forward(torch))},
        bytes=2 * (n * i + i * o + o + 2 * n * o),
        flops=2 * n * i * o,
        bound="bf16",
        bar="≤ 0.56 ms" if (n, i) == (65536, 768) else "",
    )


def backward_case(n, i, o, activation) -> Case:
    def run(backend, dy, derivative, x, w):
        b = jnp.zeros(o, jnp.bfloat16) if activation == "gelu" else None
        return backward(How(activation, backend, None), (x, w, b, derivative), dy)

    def two_products(dy, derivative, x, w):
        return dy @ w.T, x.T @ dy

    def torch_backward(torch):
        def eager(dy, u, x, w):
            if activation == "gelu":
                du = torch.ops.aten.gelu_backward(dy, u, approximate="tanh")
                return du @ w.T, x.T @ du, du.sum(0)
            du = dy * 2 * torch.nn.functional.relu(u)
            return du @ w.T, x.T @ du

        return eager

    return Case(
        kernel="linear_gelu",
        name=f"linear_{activation} backward {n}×{i}×{o} bf16",
        make=functools.partial(backward_inputs, n=n, i=i, o=o),
        run={**{backend: functools.partial(run, backend) for backend in BACKENDS}, "two products": two_products},
        torch={"torch": torch_backward, "torch.compile": lambda torch: torch.compile(torch_backward(torch))},
        bytes=2 * (2 * n * o + 2 * n * i + 2 * i * o),
        flops=4 * n * i * o,
        bound="bf16",
        bar="≤ 1.05× the two products" if (n, i) == (65536, 768) else "",
    )


def cases() -> list[Case]:
    """Every width for GELU, GPT-2 124M's for the squared ReLU."""
    made = [case(*shape, "gelu") for case in (forward_case, backward_case) for shape in SHAPES]
    return made + [case(*SHAPES[0], "relu_squared") for case in (forward_case, backward_case)]
