"""Triton without a GPU: run a kernel in Triton's interpreter, and compile one for an H100.

The interpreter executes the statements of a kernel with NumPy, one program after the other. It
shows whether the numbers are right, and nothing about speed.
"""

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
import triton
import triton.experimental.gluon  # the interpreter imports it, and could not while `tl` is replaced
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter

GUARD = 4096  # elements: the largest block of a kernel
POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "int32": "*i32"}


def interpret(kernel, arrays, grid, **constexprs) -> list[np.ndarray]:
    """Return the arrays after a launch of the kernel, which may overwrite each of them.

    Args:
        kernel: a `@triton.jit` function with a pointer for each array, then constexprs.
        arrays: fp32 or int32.
        grid: number of programs along each axis.

    Raises:
        AssertionError: the kernel stored something behind the end of an array.
    """
    import torch  # the interpreter reads the memory of PyTorch's tensors

    # Zeros behind each array: a store out of bounds lands there, not in other objects' memory.
    padded = [np.pad(np.ravel(array), (0, GUARD)) for array in arrays]
    tensors = [torch.from_numpy(flat) for flat in padded]
    with interpreted_language():
        interpreter.InterpretedFunction(kernel.fn)[grid](*tensors, **constexprs)
    outside = [i for i, flat in enumerate(padded) if flat[-GUARD:].any()]
    assert not outside, f"the kernel stored behind the end of the arrays {outside}: add a mask"
    return [flat[:-GUARD].reshape(array.shape) for flat, array in zip(padded, arrays, strict=True)]


@contextmanager
def interpreted_language() -> Iterator[None]:
    """Replace the functions of `triton.language` by interpreted ones, and restore them.

    Triton itself does this if TRITON_INTERPRET=1 is set before the import, and cannot compile
    afterwards.
    """
    modules = {"tl": triton.language, "core": triton.language.core}

    def call(function, *args, **kwargs):
        return function.rewrite()(*args, **kwargs)

    with ExitStack() as patches:
        # `tl.max` and `tl.sum` are `@triton.jit` functions themselves.
        for module in (triton.language, triton.language.standard):
            for name, member in list(vars(module).items()):
                if isinstance(member, triton.JITFunction):
                    interpreted = interpreter.InterpretedFunction(member.fn)
                    patches.enter_context(mock.patch.object(module, name, interpreted))
        patches.enter_context(mock.patch.object(interpreter.InterpretedFunction, "__call__", call))
        patched = interpreter._patch_lang(types.SimpleNamespace(__globals__=modules))
        patches.callback(patched.restore)
        yield


def compile_to_ptx(kernel, dtypes, **constexprs) -> str:
    """Return the PTX of a kernel compiled for an H100: the assembly language of NVIDIA GPUs.

    Args:
        dtypes: name of the dtype of each array, such as "float32".
    """
    pointers = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    signature = {name: POINTERS[dtype] for name, dtype in zip(pointers, dtypes, strict=True)}
    signature |= dict.fromkeys(constexprs, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    # a·b + c is one instruction: Triton 3.10 changes the default.
    options = {"enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
