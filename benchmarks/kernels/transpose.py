"""transpose_copy and transpose_add at the size of GPT-2's LM head.

python -m gptjax.bench kernels benchmarks/kernels/transpose.py
"""

import functools

import jax.numpy as jnp

from gptjax.bench.harness import Case, eager_and_compiled, normal
from pallas_kernels import transpose_add, transpose_copy

R, C = 768, 50304


def cases() -> list[Case]:
    bf16, fp32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    return [
        _copy(bf16, bar="≤ 0.050 ms"),
        _add(bf16, bf16, bar="≤ 0.090 ms"),
        _copy(fp32),
        _add(fp32, fp32),
        _add(fp32, bf16),
    ]


def _copy(dtype, bar=""):
    return Case(
        kernel="transpose_copy",
        name=f"{R}×{C} {dtype.name}",
        make=lambda key: normal(key, (R, C), dtype=dtype),
        run={
            name: functools.partial(transpose_copy, implementation=name)
            for name in ("triton", "xla")
        },
        torch=eager_and_compiled(lambda torch: lambda src: src.t().contiguous()),
        bytes=2 * R * C * dtype.itemsize,
        bar=bar,
    )


def _add(dst_dtype, src_dtype, bar=""):
    def make(key):
        dst, src = normal(key, (C, R), (R, C), dtype=dst_dtype)
        return dst, src.astype(src_dtype)

    return Case(
        kernel="transpose_add",
        name=f"{C}×{R} {dst_dtype.name}"
        + (f" + {src_dtype.name}" if src_dtype != dst_dtype else ""),
        make=make,
        run={
            name: functools.partial(transpose_add, implementation=name)
            for name in ("triton", "xla")
        },
        torch=eager_and_compiled(lambda torch: lambda dst, src: dst.add_(src.t())),
        bytes=R * C * (2 * dst_dtype.itemsize + src_dtype.itemsize),
        in_place=True,
        bar=bar,
    )
