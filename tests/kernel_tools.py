"""Tools for the tests of `pallas_kernels`: Triton and Mosaic kernels on a CPU, and compiled
code."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ptx_tools
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import _dispatch
from pallas_kernels.extend import tracing_for

# ---------------------------------------------------------------------------------- Triton on a CPU


E5M2 = jnp.float8_e5m2
_EXTENSIONS = [np.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, E5M2)]
# Triton's interpreter patches the module triton.language while it runs, and XLA calls back from
# several threads at once.
_INTERPRETER = threading.Lock()


@functools.cache
def interpreted(module: str) -> Any:
    """A copy of a module in which every `@triton.jit` function runs in Triton's interpreter, on
    NumPy."""
    import triton

    importlib.import_module(module)
    package = module.partition(".")[0]
    names = [name for name in sys.modules if _holds_triton_source(name, package)]
    ours = {name: sys.modules.pop(name) for name in names}
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        copy = importlib.import_module(module)
    for name, original in ours.items():
        sys.modules[name] = original
        package, _, stem = name.rpartition(".")
        setattr(sys.modules[package], stem, original)
    return copy


def _holds_triton_source(module: str, package: str) -> bool:
    return module.startswith(f"{package}.") and module.split(".")[-1].startswith("triton")


@contextlib.contextmanager
def _interpreter() -> Iterator[None]:
    """While a kernel runs: `tl.max` and the like, compiled when Triton was imported, are
    interpreted too; bf16 is rounded.

    Of assembly there are the instructions of ptx_tools.
    """
    import triton
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction

    truncating, tl = interpreter._convert_float, triton.language
    narrow = {tl.bfloat16: jnp.bfloat16, tl.float8e4nv: jnp.float8_e4m3fn, tl.float8e5: E5M2}

    def to_nearest(data, source, target, mode):
        # Triton's own cuts the low bits off, which a GPU does not.
        if source == tl.float32 and target in narrow:
            rounded = np.ascontiguousarray(data).view(np.float32).astype(narrow[target])
            return rounded.view(f"u{rounded.itemsize}")
        return truncating(data, source, target, mode)

    def inline_asm(self, asm, constraints, values, result_types, is_pure, pack):
        (dtype,) = [result_type.scalar for result_type in result_types]
        numbers = np.dtype(interpreter._get_np_dtype(dtype))
        data = ptx_tools.run(asm, [value.data for value in values], numbers, pack)
        return types.SimpleNamespace(get_result=lambda i: interpreter.TensorHandle(data, dtype))

    # Triton's own patches the language again at each call of a device function: a quarter of the
    # time of a kernel. The kernels see `tl`, and Triton's own functions see `core`.
    language = types.SimpleNamespace(
        __globals__={"tl": triton.language, "core": triton.language.core}
    )

    def device_call(self, *args, **kwargs):
        return self.rewrite()(*args, **kwargs)

    # masked lanes hold anything
    with _INTERPRETER, pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        for module in (triton.language, triton.language.standard):
            for name, member in list(vars(module).items()):
                if isinstance(member, triton.JITFunction):
                    patch.setattr(module, name, InterpretedFunction(member.fn))
        patch.setattr(interpreter, "_convert_float", to_nearest)
        patch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", inline_asm)
        patch.setattr(InterpretedFunction, "__call__", device_call)
        patches = interpreter._patch_lang(language)
        try:
            yield
        finally:
            patches.restore()


def _to_torch(array: np.ndarray):
    import torch

    # Extensions of NumPy, which torch does not read.
    if array.dtype in _EXTENSIONS:
        copy = torch.from_numpy(array.view(f"i{array.itemsize}").copy())
        return copy.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array.copy())


def _to_numpy(tensor, dtype) -> np.ndarray:
    import torch

    if (dtype := np.dtype(dtype)) not in _EXTENSIONS:
        return tensor.numpy()
    return tensor.view(getattr(torch, f"int{8 * dtype.itemsize}")).numpy().view(dtype)


def _poison(shape: jax.ShapeDtypeStruct):
    """What an output holds before a kernel has written it: NaN, or the largest integer."""
    value = np.nan if jnp.issubdtype(shape.dtype, jnp.floating) else np.iinfo(shape.dtype).max
    return _to_torch(np.full(shape.shape, value, shape.dtype))


def interpret_call(kernel, *args, out, grid, in_place=(), max_registers=None, **options):
    """`pallas_kernels._triton.call`, run by Triton's interpreter."""
    function = getattr(interpreted(kernel.fn.__module__), kernel.__name__)
    leaves, tree = jax.tree.flatten(args)  # an argument may be a tuple or None
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
    shapes = [jax.ShapeDtypeStruct(args[i].shape, args[i].dtype) for i in in_place] + list(out)

    def run(*values):
        tensors = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            tensors[i] = _to_torch(np.asarray(value))
        tensors = jax.tree.unflatten(tree, tensors)
        made = [_poison(shape) for shape in out]
        with _interpreter():
            function[grid](*tensors, *made, **options)
        results = [tensors[i] for i in in_place] + made
        return tuple(_to_numpy(t, shape.dtype) for t, shape in zip(results, shapes, strict=True))

    return tuple(
        jax.pure_callback(
            run, tuple(shapes), *[leaves[i] for i in arrays], vmap_method="sequential"
        )
    )


@pytest.fixture
def triton_on_cpu(monkeypatch):
    """Back end "triton" runs on the CPU, in Triton's own interpreter. Outputs hold NaN until they
    are written."""
    from pallas_kernels import _triton

    monkeypatch.setattr(_triton, "call", interpret_call)
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)


def on_gpu(*cases: tuple) -> list:
    """Return parameters of a test that need a GPU."""
    return [pytest.param(*case, marks=pytest.mark.gpu) for case in cases]


@pytest.fixture
def interpreter(request):
    """The interpreter of the test's parameter `back_end`, unless the case needs a GPU."""
    name = request.getfixturevalue("back_end")
    if name in ("triton", "mosaic") and "gpu" not in request.keywords:
        request.getfixturevalue(f"{name}_on_cpu")


@pytest.fixture(params=["xla", "triton"])
def backend(request):
    """Each of both back ends on the CPU."""
    if request.param == "triton":
        request.getfixturevalue("triton_on_cpu")
    return request.param


# ---------------------------------------------------------------------------------- Mosaic on a CPU


# What the interpreter has found of races, for every kernel since the fixture began.
_RACES: list[Any] = []


def forget_races() -> None:
    """Of kernels in which blocks of threads add to the same memory, in any order, by design."""
    _RACES.clear()


@pytest.fixture
def mosaic_on_cpu(monkeypatch):
    """Back end "mosaic" runs on the CPU, in JAX's interpreter for Mosaic GPU; a race between
    threads fails the test.

    The interpreter is given what it lacks: left operands of wgmma in registers, stores to an
    accumulator, and TMA that adds.
    """
    from pallas_kernels._mosaic import plgpu

    monkeypatch.setattr(_dispatch, "why_not_mosaic", lambda: None)
    monkeypatch.setattr("pallas_kernels._mosaic.num_sms", lambda: 2)
    # A launch with a sharding rule cannot contain the ordered callbacks of the interpreter.
    monkeypatch.setattr("pallas_kernels._partition.may_shard", lambda: False)
    _complete_mosaics_interpreter(monkeypatch)
    _RACES.clear()
    # Since 0.12 it raises at a race by default, in a thread for which others then wait.
    parameters = inspect.signature(plgpu.InterpretGPUParams).parameters
    told = {"on_race": "warn"} if "on_race" in parameters else {}
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True, **told)):
        yield
    assert not any(state.races_found for state in _RACES), (
        "the interpreter has found a race, described in the output"
    )


def _complete_mosaics_interpreter(monkeypatch):
    from jax._src.pallas.mosaic_gpu import core as mosaic_core
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
    from jax._src.state.types import AbstractRef

    class Recorded(gpu_callbacks.GPURaceDetectionState):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            _RACES.append(self)

        def check_write(self, thread, clock, buffer_key, *args, **kwargs):
            # No one else has this thread's registers, though those of another block go by their
            # name.
            if buffer_key.memory_space_id != registers:
                super().check_write(thread, clock, buffer_key, *args, **kwargs)

    registers = shared_memory.get_memory_space_idx(mosaic_core.MemorySpace.REGS)
    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", Recorded)
    # An ordinary store, which it knows.
    monkeypatch.setattr(mosaic_core.WGMMAAbstractAccumulatorRef, "_setitem", AbstractRef._setitem)

    def content(how, which):
        """Whose memory an argument is, and which part of it."""
        key = gpu_callbacks.HostAllocationKey.from_array(how[f"{which}_allocation_key_as_array"])
        transforms = gpu_callbacks._remove_noop_transforms(how[f"{which}_transforms"])
        return key, gpu_callbacks._get_shared_memory().access(key, jax.tree.map(int, transforms))

    their_copy = gpu_callbacks.copy_smem_to_gmem

    @gpu_callbacks.fail_on_exception
    def wgmma(**how):
        memory, left = gpu_callbacks._get_shared_memory(), how["a_allocation_key_as_array"]
        log = gpu_callbacks.memory.GPULoggingInfo(
            how["mesh_location"], how["thread"], how["source_info"]
        )
        load = lambda which: memory.get_buffer_content(
            *content(how, which), how["thread"], logging_info=log
        )[0]
        left, right, sums = load("a") if left.ndim == 1 else left, load("b"), load("acc")
        # In fp64: the order of BLAS's sums depends on the CPU, and may make a·aᵀ asymmetric.
        product = np.matmul(np.asarray(left), right, dtype=np.float64)
        memory.store_buffer_content(
            *content(how, "acc"), sums + product.astype(sums.dtype), how["thread"], logging_info=log
        )
        return how["token"]

    class Add(gpu_callbacks.AsyncCopySmemToGmemTask):
        """A store of what is there already plus the source. Its write counts for races as any
        other's."""

        def __call__(self, tma_thread_id):
            memory, logged = gpu_callbacks._get_shared_memory(), {"logging_info": self.logging_info}
            self.pre_read(tma_thread_id, memory)
            ours, _, _ = memory.get_buffer_content(
                self.src_allocation_key, self.src_access, self.thread, **logged
            )
            self.post_read(tma_thread_id, memory)
            shape = memory.buffer_shape_and_dtype(self.dst_allocation_key).shape
            if (
                clipped := gpu_callbacks._clip_store_to_shape(self.dst_access, ours, tuple(shape))
            ) is not None:
                there, _, _ = memory.get_buffer_content(
                    self.dst_allocation_key, clipped[0], self.thread, **logged
                )
                store = (self.dst_allocation_key, clipped[0], there + clipped[1], self.thread)
                memory.store_buffer_content(*store, **logged)
            self.post_write(tma_thread_id, memory)

    @gpu_callbacks.fail_on_exception
    def copy_smem_to_gmem(*, reduction_op, **how):
        if reduction_op is None:
            return their_copy(reduction_op=None, **how)
        assert reduction_op == "add"
        memory = gpu_callbacks._get_shared_memory()
        shared = {name: how[name] for name in ("mesh_location", "thread", "source_info")}
        for side in ("src", "dst"):
            key, access = content(how, side)
            shared |= {f"{side}_allocation_key": key, f"{side}_access": access}
        memory.execute_async_task(Add(**shared, clock=memory.incr_clock(how["thread"])))
        return how["token"]

    monkeypatch.setattr(gpu_callbacks, "wgmma", wgmma)
    monkeypatch.setattr(gpu_callbacks, "copy_smem_to_gmem", copy_smem_to_gmem)


def unchecked(function: Callable) -> Callable:
    """The function under jaxtyping's and beartype's wrappers, which under pytest refuse wrong
    shapes before it can."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


# ------------------------------------------------------------------------------------ compiled code


# `compiler_options` of what is compared with PyTorch, or to a few roundings: XLA's default, which
# tests/conftest.py lowers.
OPTIMIZED = {"xla_backend_optimization_level": 3}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A Triton kernel compiled for a GPU that need not be there."""

    name: str
    ptx: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    serialized: bool
    """ptxas waits for each `wgmma` before it issues the next."""


def triton_kernels(f: Callable, *args: Any, capability: int = 90) -> list[Compiled]:
    """The Triton kernels that `f(*args)` launches, compiled for sm_`capability`. Nothing runs.

    Args:
        args: arrays or `jax.ShapeDtypeStruct`s.
    """
    from pallas_kernels import _triton

    found = []

    def record(kernel, *args, out, grid, in_place=(), max_registers=None, **constexprs):
        options = {k: constexprs.pop(k, n) for k, n in (("num_warps", 4), ("num_stages", 3))}
        options |= _triton.options(max_registers)
        found.append(_compile(kernel, [*args, *out], options, constexprs, capability))
        return tuple(jnp.zeros(a.shape, a.dtype) for a in [*(args[i] for i in in_place), *out])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_triton, "call", record)
        patch.setattr(_dispatch, "why_not_triton", lambda: None)
        patch.setattr(_dispatch, "capability", lambda: divmod(capability, 10))
        jax.eval_shape(lambda *args: f(*args), *args)
    assert found, "no Triton kernel was launched"
    return found


def _compile(kernel, args, options, constexprs, capability) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {
        "bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32",
        "int64": "*i64", "uint32": "*u32", "int8": "*i8", "uint8": "*u8", "uint16": "*u16",
        "bool": "*i1", "float8_e4m3fn": "*fp8e4nv", "float8_e5m2": "*fp8e5",
    }  # fmt: skip
    signature, constants, attributes = {}, {}, {}
    names = [p.name for p in kernel.params if not p.is_constexpr]
    for name, arg in zip(names, args, strict=True):
        index = kernel.arg_names.index(name)
        if isinstance(arg, tuple):
            signature[name] = tuple(pointers[jnp.dtype(each.dtype).name] for each in arg)
            attributes |= {(index, i): [["tt.divisibility", 16]] for i in range(len(arg))}
        elif hasattr(arg, "dtype") and hasattr(arg, "shape"):
            signature[name] = pointers[jnp.dtype(arg.dtype).name]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif arg is None or (isinstance(arg, int) and arg == 1):
            signature[name], constants[name] = "constexpr", arg
        elif isinstance(arg, int):
            signature[name] = "i32" if -(2**31) <= arg < 2**31 else "i64"
            if arg % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    for parameter in kernel.params:
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = constexprs.get(parameter.name, parameter.default)
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    with _INTERPRETER, triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = _report_as_cubin
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    report = built.asm["cubin"].decode()
    return Compiled(
        name=kernel.__name__,
        ptx=built.asm["ptx"],
        registers=int(re.search(r"Used (\d+) registers", report)[1]),
        spill_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill", report)),
        shared_bytes=built.metadata.shared,
        serialized="are serialized" in report,
    )


def _report_as_cubin(backend=None, stages=None, *_):
    """Triton's hook into its stages: keep the report of ptxas instead of the machine code.

    Called with no arguments, the hook returns its part of the key and of the hash under which
    Triton caches the kernel.
    """
    if stages is not None:
        stages["cubin"] = lambda ptx, metadata: _ptxas(ptx).encode()
    return "report of ptxas", "report of ptxas"


def _ptxas(ptx: str) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    architecture = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        tool = get_ptxas(int(architecture[2])).path
        command = [tool, "-v", f"--gpu-name={architecture[1]}", source, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


def collectives(text: str) -> list[int]:
    """Return the sizes of an executable's collectives; that of another kind than all-reduce is
    negative."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    sizes = []
    for results, kind in re.findall(rf" = ([^=]*?) ({kinds})(?:-start)?\(", text):
        for shape in re.findall(r"\w\d*\[([\d,]*)\]", results):
            size = int(np.prod([int(n) for n in shape.split(",") if n]))
            sizes.append(size if kind == "all-reduce" else -size)
    return sorted(sizes)


@contextlib.contextmanager
def h200() -> Iterator[None]:
    """Traces and lowers as on a machine whose device is an H200. Triton's kernels, which need a
    GPU's plugin, become calls by name."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    mesh = AbstractMesh((), (), abstract_device=device)
    with tracing_for((9, 0)), jax.sharding.use_abstract_mesh(mesh):
        yield


def lower_for_h200(f: Callable, *args: Any) -> str:
    """StableHLO of `f(*args)` lowered for an H200, Mosaic kernels included, Triton's by name.

    Args:
        args: arrays or `jax.ShapeDtypeStruct`s.
    """
    with h200():
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
