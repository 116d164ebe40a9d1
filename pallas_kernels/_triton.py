"""Launches of Triton kernels from JAX. This module imports Triton. Import this module only inside
functions that launch a Triton kernel."""

from typing import Any

import jax
import triton.backends.nvidia.driver
from jax.interpreters import partial_eval

# jax-triton 0.4 reads this constant of the driver module. Triton defines the constant from 3.7 on.
# Without the constant, jax-triton treats the NVIDIA back end as absent. Triton 3.6 (torch 2.11's)
# runs kernels if the constant is set (tested on an H200).
if not hasattr(triton.backends.nvidia.driver, "TMA_TF32"):
    triton.backends.nvidia.driver.TMA_TF32 = 11

import jax_triton

from pallas_kernels._partition import overwriting

# A launch reads all its operands. jax-triton 0.4.1's rule lacks the argument that JAX 0.12 added.
partial_eval.dce_rules[jax_triton.triton_lib.triton_kernel_call_p] = lambda *args: (
    [True] * len(args[-1].invars),
    args[-1],
)

# Contract a·b + c to one instruction, which rounds once. Set explicitly because the default changes
# with Triton 3.10.
OPTIONS = {"enable_fp_fusion": True}


def call(
    kernel: Any,
    *args: Any,
    out: list[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 3,
    in_place: tuple[int, ...] = (),
    max_registers: int | None = None,
    **constexprs: Any,
) -> tuple[jax.Array, ...]:
    """Launch a kernel as `pallas_kernels.extend.triton_call` does.

    Args:
        max_registers: limit of a thread's registers. A kernel that needs more registers spills.
    """
    # Without these barriers such launches returned wrong results on an H100 where an operand was a
    # slice, and in `jax.lax.scan`. Likely cause: XLA fuses the launch with the slice and ignores
    # that the kernel overwrites the operand.
    kept = jax.lax.optimization_barrier

    def launch(*refs):
        given = dict(zip(in_place, refs, strict=True))
        return jax_triton.triton_call(
            *(given.get(i, arg) for i, arg in enumerate(args)),
            kernel=kernel,
            out_type=tuple(out),
            grid=grid,
            name=kernel.__name__,
            num_warps=num_warps,
            num_stages=num_stages,
            backend_options=options(max_registers),
            **constexprs,
        )

    if not in_place:
        return tuple(launch())
    overwritten, new = overwriting(launch, [kept(args[i]) for i in in_place])
    return kept((*overwritten, *new))


def options(max_registers: int | None = None) -> dict[str, Any]:
    """Return the options of Triton's compiler."""
    return OPTIONS if max_registers is None else OPTIONS | {"maxnreg": max_registers}
