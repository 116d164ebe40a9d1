"""swiglu: the passes between its matmuls, and the complete MLP, at the widths of the Llama presets.

    python -m gptjax.bench kernels benchmarks/kernels/gated_mlp.py

"six matmuls" are XLA's bare matmuls (cuBLASLt) of forward and backward pass.
"""

import functools

import jax.numpy as jnp

from gptjax.bench.harness import Case, normal, passes
from pallas_kernels import swiglu
from pallas_kernels.gated_mlp import hidden, hidden_gradient
from pallas_kernels.gemm import Operand, Plain

# N, I, F
SHAPES = [(65536, 768, 2432), (16384, 2048, 8192)]
# Of the passes between the matmuls; Mosaic has no such passes.
BACKENDS = ("triton", "xla")


def cases() -> list[Case]:
    passes = [case(n, f) for n, _, f in SHAPES for case in (forward_case, backward_case)]
    return [*passes, *(mlp_case(*shape, how) for shape in SHAPES for how in ("bf16", "fp8"))]


def forward_case(n, f) -> Case:
    def torch_forward(torch):
        def run(gu):
            gate, up = gu.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up

        return torch.compile(run)

    return Case(
        kernel="swiglu",
        name=f"h from gate and up {n}×{f} bf16",
        make=lambda key: normal(key, (n, 2 * f)),
        run={name: functools.partial(hidden, backend=name, numerics=Plain()) for name in BACKENDS},
        torch={"torch.compile": torch_forward},
        bytes=2 * 3 * n * f,  # gate, up; h
        bar="≥ 85 % of the copy rate",
    )


def backward(backend, gu, dh):
    return hidden_gradient(gu, dh, Operand(), backend, Plain())


def backward_case(n, f) -> Case:
    def torch_backward(torch):
        def run(gu, dh):
            gate, up = gu.float().chunk(2, dim=-1)
            sigma, dh = torch.sigmoid(gate), dh.float()
            silu = gate * sigma
            dgu = torch.cat([dh * up * (sigma + silu * (1 - sigma)), dh * silu], dim=-1)
            return dgu.bfloat16(), (silu * up).bfloat16()

        return torch.compile(run)

    return Case(
        kernel="swiglu",
        name=f"backward, with h again {n}×{f} bf16",
        make=lambda key: normal(key, (n, 2 * f), (n, f)),
        run={name: functools.partial(backward, name) for name in BACKENDS},
        torch={"torch.compile": torch_backward},
        bytes=2 * 6 * n * f,  # gate, up, dh; dgate, dup, h
        bar="≥ 85 % of the copy rate",
    )


def mlp_case(n, i, f, numerics) -> Case:
    def make(key):
        dy, x, w_gate, w_up, w_down = normal(key, (n, i), (n, i), (i, f), (i, f), (f, i))
        scale = jnp.bfloat16(i**-0.5)
        return dy, x, w_gate * scale, w_up * scale, w_down * jnp.bfloat16(f**-0.5)

    def six_matmuls(dy, x, w_gate, w_up, w_down):
        w = jnp.concatenate([w_gate, w_up], axis=1)
        gu = x @ w
        h, dh = gu[:, :f], dy @ w_down.T
        return h @ w_down, gu @ w.T, x.T @ gu, h.T @ dy, dh

    return Case(
        kernel="swiglu",
        name=f"swiglu forward and backward {n}×{i}×{f} {numerics.replace('fp8', 'FP8')}",
        make=make,
        run={
            **{
                name: passes(functools.partial(swiglu, implementation=name, numerics=numerics))
                for name in ("mosaic", *BACKENDS)
            },
            "six matmuls": six_matmuls,
        },
        bytes=2 * 2 * (2 * n * i + 3 * i * f),
        flops=3 * 2 * n * i * 3 * f,
        bound="bf16",
    )
