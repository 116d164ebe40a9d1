"""The one place that launches Triton kernels from JAX. Imported only where such a kernel runs."""

from typing import Any

import jax
import triton.backends.nvidia.driver

# jax-triton 0.4 asks the driver module for this constant, which Triton has since 3.7; without it,
# jax-triton treats the NVIDIA back end as absent. With Triton 3.6 (torch 2.11's) and the constant
# set, kernels run (seen on an H200).
if not hasattr(triton.backends.nvidia.driver, "TMA_TF32"):
    triton.backends.nvidia.driver.TMA_TF32 = 11

import jax_triton

# Said, because the default changes with Triton 3.10: a·b + c is one instruction, rounded once.
OPTIONS = {"enable_fp_fusion": True}


def call(
    kernel: Any,
    *args: Any,
    out: list[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 3,
    in_place: tuple[int, ...] = (),
    **constexprs: Any,
) -> tuple[jax.Array, ...]:
    """Launches a `@triton.jit` function on arrays; no autodiff, no vmap.

    Args:
        kernel: its parameters are one for each of `args`, then a pointer for each of `out`, then
            constexprs.
        args: arrays become pointers; Python numbers are baked in.
        in_place: indices of those arrays in `args` that the kernel overwrites.

    Returns:
        The new values of the arrays in `in_place`, then the arrays in `out`.
    """
    args = [jax.new_ref(arg) if i in in_place else arg for i, arg in enumerate(args)]
    new = jax_triton.triton_call(
        *args,
        kernel=kernel,
        out_type=tuple(out),
        grid=grid,
        name=kernel.__name__,
        num_warps=num_warps,
        num_stages=num_stages,
        backend_options=OPTIONS,
        **constexprs,
    )
    return (*(jax.freeze(args[i]) for i in in_place), *new)
