"""linear_gelu, linear_relu_squared and mlp: forward and backward at GPT-2's widths.

    python -m gptjax.bench kernels benchmarks/kernels/feed_forward.py

The forward pass stores y and the derivative that the backward pass reads, except in "nothing
saved". The backward pass computes dx, dw and db from dy, the saved array, x and w. "matmul" and
"two matmuls" are XLA's bare matmuls (cuBLASLt). PyTorch saves the pre-activation: the benchmark of
PyTorch's backward pass uses the saved array as the pre-activation.
"""

import functools

import jax.numpy as jnp

from gptjax.bench.harness import Case, eager_and_compiled, normal, passes
from pallas_kernels.feed_forward import Options, hidden, hidden_gradient, mlp
from pallas_kernels.gemm import Operand, Plain

# N, I, O
SHAPES = [(65536, 768, 3072), (16384, 1280, 5120), (16384, 1600, 6400), (4096, 768, 3072)]
BACKENDS = ("mosaic", "triton", "xla")
TF32 = (32768, 768, 3072)
NAMES = {"bf16": "bf16", "tf32": "fp32 as TF32", "fp8": "FP8"}


def forward_inputs(key, *, n, i, o):
    x, w, b = normal(key, (n, i), (i, o), (o,))
    return x, w * jnp.bfloat16(i**-0.5), b


def forward_case(n, i, o, activation) -> Case:
    def run(backend, x, w, b, *, save=True):
        b = b if activation == "gelu" else None
        options = Options(activation, backend, Plain())
        y, saved = hidden(options, Operand(x), Operand(w), b, x.dtype, save)
        return y.rows, saved

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
            "matmul": lambda x, w, b: x @ w,
        },
        torch=eager_and_compiled(torch_forward),
        bytes=2 * (n * i + i * o + o + 2 * n * o),
        flops=2 * n * i * o,
        bound="bf16",
        bar="≤ 0.56 ms" if (n, i) == (65536, 768) else "",
    )


def backward_case(n, i, o, activation) -> Case:
    def run(backend, dy, derivative, x, w):
        b = jnp.zeros(o, jnp.bfloat16) if activation == "gelu" else None
        du, db, _ = hidden_gradient(Options(activation, backend, Plain()), dy, derivative, b)
        dx = Plain().input_gradient(du, Operand(w), dy.dtype)
        return dx, Plain().weight_gradient(Operand(x), du), db

    def two_matmuls(dy, derivative, x, w):
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
        make=lambda key: normal(key, (n, o), (n, o), (n, i), (i, o)),
        run={
            **{backend: functools.partial(run, backend) for backend in BACKENDS},
            "two matmuls": two_matmuls,
        },
        torch=eager_and_compiled(torch_backward),
        bytes=2 * (2 * n * o + 2 * n * i + 2 * i * o),
        flops=4 * n * i * o,
        bound="bf16",
        bar="≤ 1.05× the two matmuls" if (n, i) == (65536, 768) else "",
    )


def mlp_inputs(key, *, n, i, o, dtype):
    """Return (dy, x, w, b, w2)."""
    dy, x, w, b, w2 = normal(key, (n, i), (n, i), (i, o), (o,), (o, i), dtype=dtype)
    return dy, x, w * dtype(i**-0.5), b, w2 * dtype(o**-0.5)


def mlp_case(n, i, o, *, numerics="bf16") -> Case:
    """Return the case of forward and backward pass of `mlp`."""
    tf32 = numerics == "tf32"
    dtype, backends = (jnp.float32, BACKENDS[1:]) if tf32 else (jnp.bfloat16, BACKENDS)

    def run(backend):
        return passes(functools.partial(mlp, implementation=backend, numerics=numerics))

    def six_matmuls(dy, x, w, b, w2):
        h = x @ w
        dh = dy @ w2.T
        return h @ w2, dh @ w.T, x.T @ dh, h.T @ dy

    return Case(
        kernel="linear_gelu",
        name=f"mlp forward and backward {n}×{i}×{o}×{i} {NAMES[numerics]}",
        make=functools.partial(mlp_inputs, n=n, i=i, o=o, dtype=dtype),
        run={backend: run(backend) for backend in backends}
        | ({} if tf32 else {"six matmuls": six_matmuls}),
        bytes=dtype.dtype.itemsize * 2 * (2 * n * i + 2 * i * o + o),
        flops=12 * n * i * o,
        bound="bf16",
    )


def cases() -> list[Case]:
    """Return the cases: all widths for GELU and the MLP, GPT-2 124M's widths for squared ReLU, and
    for the MLP in FP8 and fp32."""
    made = [case(*shape, "gelu") for case in (forward_case, backward_case) for shape in SHAPES]
    made += [case(*SHAPES[0], "relu_squared") for case in (forward_case, backward_case)]
    made += [mlp_case(*shape) for shape in SHAPES]
    return [*made, mlp_case(*SHAPES[0], numerics="fp8"), mlp_case(*TF32, numerics="tf32")]
