"""layer_norm and rms_norm: with a residual at GPT-2's widths, and without at few rows.

python -m gptjax.bench kernels benchmarks/kernels/norm.py
"""

import jax
import jax.numpy as jnp

from gptjax.bench.harness import Case, eager_and_compiled, normal
from pallas_kernels import layer_norm, rms_norm
from pallas_kernels.norm import Options, run

N = 65536
EPS = 1e-5
FEW_ROWS = ((128, 4096), (512, 4096), (2048, 4096), (512, 1024), (8192, 1024))


def cases() -> list[Case]:
    bf16, fp32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    return [
        *_pair("layer_norm", 768, bf16, bf16, bar="≥ 85 % of the copy rate"),
        *_pair("layer_norm", 1600, bf16, bf16),
        *_pair("layer_norm", 768, fp32, bf16),
        *_pair("rms_norm", 768, bf16, bf16),
        *(
            _public(f, n, c, both)
            for f in (rms_norm, layer_norm)
            for n, c in FEW_ROWS
            for both in (False, True)
        ),
    ]


def _public(f, n, c, both):
    """The public function without a residual, and its gradients."""

    def make(key):
        x, dy = normal(key, (n, c), (n, c))
        return x, jnp.ones((c,), jnp.bfloat16), jnp.zeros((c,), jnp.bfloat16), dy

    def of(implementation):
        def forward(x, scale, bias):
            parameters = (scale,) if f is rms_norm else (scale, bias)
            return f(x, *parameters, implementation=implementation)

        def gradients(x, scale, bias, dy):
            return jax.vjp(forward, x, scale, bias)[1](dy)

        return gradients if both else lambda x, scale, bias, dy: forward(x, scale, bias)

    return Case(
        kernel=f.__name__,
        name=f"{'forward and backward' if both else 'forward'} {n}×{c} bfloat16, few rows",
        make=make,
        run={name: of(name) for name in ("auto", "xla", "reference")},
        bytes=(5 if both else 2) * n * c * 2,
        bar="≥ 1.0× XLA",
        alternate=True,
    )


def _pair(kernel, c, dtype, out_dtype, bar=""):
    centred = kernel == "layer_norm"
    name = f"{N}×{c} {dtype.name}" + (f" → {out_dtype.name}" if out_dtype != dtype else "")
    stream, out = N * c * dtype.itemsize, N * c * out_dtype.itemsize

    def parameters():
        return (jnp.ones((c,)), jnp.zeros((c,))) if centred else (None, None)

    def make_forward(key):
        return normal(key, (N, c), (N, c), dtype=dtype)

    def make_backward(key):
        dy, dtotal, *arrays = normal(key, *4 * [(N, c)], dtype=dtype)
        _, total, stats = jax.jit(forward("xla"))(*arrays)
        return dy.astype(out_dtype), dtotal, total, stats

    def forward(backend):
        options = Options(EPS, centred, out_dtype, backend)
        return lambda x, residual: run("forward", options, x, residual, *parameters(), None)

    def backward(backend):
        options = Options(EPS, centred, out_dtype, backend)
        return lambda *arrays: run("backward", options, *arrays, parameters()[0])

    def torch_forward(torch):
        scale, bias = (
            torch.full((c,), value, device="cuda", dtype=getattr(torch, out_dtype.name))
            for value in (1, 0)
        )

        def f(x, residual):
            total = x + residual
            return torch.nn.functional.layer_norm(total, (c,), scale, bias, EPS), total

        return f

    def torch_backward(torch):
        scale, bias = (torch.full((c,), value, device="cuda") for value in (1.0, 0.0))

        def f(dy, dtotal, total, stats):
            dx, dscale, dbias = torch.ops.aten.native_layer_norm_backward(
                dy,
                total,
                [c],
                stats[0][:, None],
                stats[1][:, None],
                scale.to(dy.dtype),
                bias.to(dy.dtype),
                [True] * 3,
            )
            return dx + dtotal, dscale, dbias

        return f

    return [
        Case(
            kernel=kernel,
            name=f"forward {name}",
            make=make_forward,
            run={name: forward(name) for name in ("triton", "xla")},
            torch=eager_and_compiled(torch_forward) if bar else {},
            bytes=3 * stream + out,
            bar=bar,
        ),
        Case(
            kernel=kernel,
            name=f"backward {name}",
            make=make_backward,
            run={name: backward(name) for name in ("triton", "xla")},
            torch=eager_and_compiled(torch_backward) if bar else {},
            bytes=3 * stream + out,
            bar=bar,
        ),
    ]
