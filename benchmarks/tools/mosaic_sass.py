"""Compile the Mosaic GPU kernels for an H200 with ptxas: registers, spills, serialized matmuls. No
GPU is needed.

    pip download --no-deps -d wheels "jax-cuda13-plugin==JAX_VERSION" "jax-cuda13-pjrt==JAX_VERSION"
    for wheel in wheels/*.whl; do unzip -qo $wheel -d plugin; done
    python benchmarks/tools/mosaic_sass.py --plugin plugin --keep sass

With JAX's CUDA plugin installed, `--plugin` is not needed. Mosaic compiles a kernel at its first
run and asks the CUDA driver for the GPU: a stub of the driver, compiled here with cc, reports an
H200. ptxas, nvdisasm and libdevice are Triton's.
"""

import collections
import dataclasses
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro

from gptjax.bench import results
from gptjax.bench.results import Row, print_table
from gptjax.plan import GPUS, tracing_on

DRIVER = """
#include <string.h>
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = 0; return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)1; return 0; }
int cuCtxSetCurrent(void *c) { return 0; }
int cuDeviceGetName(char *name, int n, int d) { strncpy(name, "NVIDIA H200", n); return 0; }
/* 75, 76: compute capability; 16: multiprocessors; 97: shared memory of a block */
int cuDeviceGetAttribute(int *v, int a, int d) {
  *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 132 : a == 97 ? 232448 : 1024;
  return 0;
}
int cuModuleLoadData(void **m, const void *p) { *m = (void *)1; return 0; }
int cuModuleLoadDataEx(void **m, const void *p, unsigned n, void *o, void *v) {
  *m = (void *)1;
  return 0;
}
int cuModuleUnload(void *m) { return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { *f = (void *)1; return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { return 0; }
int cuGetErrorString(int e, const char **s) { *s = "no such call"; return 0; }
int cuGetErrorName(int e, const char **s) { *s = "no such call"; return 0; }
"""
# In a separate process: a kernel that cannot be compiled ends it.
COMPILE = """
import ctypes, sys
driver, library, module = sys.argv[1:]
ctypes.CDLL(driver, mode=ctypes.RTLD_GLOBAL)
compile = ctypes.CDLL(library).MosaicGpuCompile
compile.argtypes, compile.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
code = open(module, "rb").read()
sys.exit(not compile(code, len(code)))
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """Compile the Mosaic GPU kernels for an H200 with ptxas, without a GPU."""

    plugin: Path | None = None
    """Folder in which the wheels of jax-cuda13-plugin and jax-cuda13-pjrt were unpacked; the
    installed ones when None."""
    kernels: tuple[str, ...] = ()
    """Only these kernels; all if none is named."""
    keep: Path | None = None
    """Folder for each kernel's PTX, SASS (with the cycles that instructions wait) and ptxas
    report."""
    out: Path | None = None
    """JSON file for the table."""


class CompileError(RuntimeError):
    """A tool or plugin is missing, or a kernel does not compile."""


def programs() -> dict[str, tuple[Callable, tuple]]:
    """Name → a function and the shapes of its arguments, GPT-2 124M's. Gradients have the forward
    kernel first, then the backward one."""
    import pallas_kernels as pk
    from pallas_kernels.feed_forward import mlp

    def bf16(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def gradient(f, argnums):
        return jax.grad(
            lambda *args: f(*args, implementation="mosaic").astype(jnp.float32).sum(), argnums
        )

    packed = {
        "D=64": bf16(64, 1024, 3, 12, 64),
        "D=128": bf16(64, 1024, 3, 6, 128),
        "T=4096": bf16(4, 4096, 3, 12, 64),
    }
    layer = (bf16(65536, 768), bf16(768, 3072), bf16(3072))
    found = {
        f"flash_attention {name}": (gradient(pk.flash_attention_qkv, 0), (x,))
        for name, x in packed.items()
    }
    windowed = functools.partial(pk.flash_attention_qkv, window=256)

    def with_documents(x, ids, **options):
        return pk.flash_attention_qkv(x, segment_ids=ids, **options)

    for name, x in packed.items():
        arguments = (x, jax.ShapeDtypeStruct(x.shape[:2], jnp.int32))
        found[f"flash_attention {name}, documents"] = (gradient(with_documents, 0), arguments)
    return found | {
        "flash_attention window 256": (gradient(windowed, 0), (packed["T=4096"],)),
        "linear_gelu": (gradient(pk.linear_gelu, (0, 1, 2)), layer),
        "mlp": (gradient(mlp, (0, 1, 2, 3)), (*layer, bf16(3072, 768))),
        "swiglu": (
            gradient(pk.swiglu, (0, 1, 2, 3)),
            (bf16(16384, 2048), bf16(2048, 8192), bf16(2048, 8192), bf16(8192, 2048)),
        ),
        "xxt": (functools.partial(pk.xxt, implementation="mosaic"), (bf16(48, 768, 768),)),
        "xtx": (functools.partial(pk.xtx, implementation="mosaic"), (bf16(24, 3072, 768),)),
        "ba_plus_caa": (
            functools.partial(pk.ba_plus_caa, b=2.0, c=0.5, implementation="mosaic"),
            (bf16(48, 768, 768),),
        ),
        "ba_plus_caa, d": (
            functools.partial(pk.ba_plus_caa, b=2.0, c=0.5, d=1.0, implementation="mosaic"),
            (bf16(48, 768, 768),),
        ),
        **_fp8_programs(),
    }


def _fp8_programs() -> dict[str, tuple[Callable, tuple]]:
    from pallas_kernels.attention import Options, mosaic_backward
    from pallas_kernels.feed_forward import mosaic
    from pallas_kernels.gated_mlp import mosaic as gated_mlp
    from pallas_kernels.gemm import E4M3, E5M2, Fp8

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    x, w, scale = array(E4M3, 65536, 768), array(E4M3, 3072, 768), array(jnp.float32)
    dy, bias, saved = array(E5M2, 65536, 768), array(jnp.float32, 3072), array(E4M3, 65536, 3072)
    fp8 = {name: Fp8().hidden_format(name, jnp.bfloat16) for name in ("gelu", "relu_squared")}
    silu = Fp8().hidden_format("silu", jnp.bfloat16)
    rows, w_gate_up = array(E4M3, 16384, 2048), array(E4M3, 16384, 2048)
    dh, w_down = (array(E5M2, 16384, 2048), array(E4M3, 8192, 2048))
    heads = array(jnp.bfloat16, 64, 1024, 12, 64)
    tensors = (array(jnp.bfloat16, 64, 1024, 3, 12, 64), array(jnp.float32, 64, 12, 1024))

    def attention(qkv, lse, dout, out, fp8_scale):
        how = {"options": Options(scale=0.125), "bias": True, "fp8_scale": fp8_scale}
        return mosaic_backward.backward((qkv,), None, lse, dout, out, None, **how)

    return {
        **{
            f"fp8.{name}": (
                functools.partial(mosaic.activated, activation=name, stored=stored),
                (x, w, bias if name == "gelu" else None, (scale,)),
            )
            for name, stored in fp8.items()
        },
        **{
            f"fp8.{name}_backward": (
                functools.partial(mosaic.du, stored=stored, bias=name == "gelu"),
                (dy, w, saved, (scale, scale), scale),
            )
            for name, stored in fp8.items()
        },
        "fp8.swiglu": (
            functools.partial(gated_mlp.gated, dtype=jnp.bfloat16, stored=silu),
            (rows, w_gate_up, (scale,)),
        ),
        "fp8.swiglu_backward": (
            functools.partial(gated_mlp.gated_gradient, stored=silu),
            (dh, w_down, array(jnp.bfloat16, 16384, 16384), (scale, scale), scale),
        ),
        "fp8.attention_backward": (attention, (*tensors, heads, heads, scale)),
    }


def modules(f: Callable, shapes: tuple) -> list[bytes]:
    """The Mosaic modules of a program lowered for an H200, in order."""
    with tracing_on(GPUS["h200"]):
        text = jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    return [_unescaped(found) for found in re.findall(r'module = "((?:[^"\\]|\\.)*)"', text)]


def _unescaped(text: str) -> bytes:
    """MLIR writes bytes as they are, or as \\n, \\t, \\", \\\\ and \\ with two hexadecimal
    digits."""
    named = {"n": b"\n", "t": b"\t", '"': b'"', "\\": b"\\"}

    def byte(match):
        code = match[1]
        return (named[code] if code in named else bytes([int(code, 16)])).decode("latin-1")

    # The digits first: \0A is one byte, and so is \n.
    return re.sub(r"\\([0-9A-Fa-f]{2}|[nt\"\\])", byte, text).encode("latin-1")


def libraries(plugin: Path | None) -> tuple[Path, Path]:
    """The plugin that compiles, and Mosaic's runtime beside it."""
    if plugin is None:
        spec = importlib.util.find_spec("jax_plugins.xla_cuda13")
        plugin = Path(spec.submodule_search_locations[0]).parents[1] if spec else Path()
    found = (
        plugin / "jax_plugins/xla_cuda13/xla_cuda_plugin.so",
        plugin / "jax_cuda13_plugin/libmosaic_gpu_runtime.so",
    )
    for path in found:
        if not path.is_file():
            raise CompileError(
                f"{path} is not there; the head of {Path(__file__).name} says how to get it "
                "(--plugin)"
            )
    return found


def compile_module(module: bytes, folder: Path, plugin: Path, runtime: Path, driver: Path) -> dict:
    """Registers, spilled bytes, instructions and ptxas's remarks of one kernel; its code goes to
    `folder`."""
    import triton.backends.nvidia

    nvidia, root = Path(triton.backends.nvidia.__file__).parent, folder / "cuda"
    (root / "nvvm/libdevice").mkdir(parents=True)
    (root / "bin").symlink_to(nvidia / "bin")
    (root / "nvvm/libdevice/libdevice.10.bc").symlink_to(nvidia / "lib/libdevice.10.bc")
    (folder / "module.mlirbc").write_bytes(module)
    dumps = dict.fromkeys(
        ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_SASS"), "1"
    )
    environment = os.environ | dumps | {
        "LD_LIBRARY_PATH": str(driver.parent), "MOSAIC_GPU_CUDA_ROOT": str(root),
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "MOSAIC_GPU_RUNTIME_LIB_PATH": str(runtime), "MOSAIC_GPU_NVSHMEM_BC_PATH": "absent",
    }  # fmt: skip
    command = [sys.executable, "-c", COMPILE, driver, plugin, folder / "module.mlirbc"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for passes in folder.glob("*.mlir-passes.log"):  # tens of megabytes
        passes.unlink()
    if done.returncode:
        raise CompileError(f"{folder.name} does not compile:\n{done.stderr[-2000:]}")
    report, sass = (
        next(folder.glob(f"*.{ending}")).read_text() for ending in ("ptxas", "sass_ctrl")
    )
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", sass)
    counts = collections.Counter(lines)
    return {
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spilled bytes": int(re.search(r"stack frame, (\d+) bytes spill stores", report)[1]),
        "wgmma": counts["HGMMA"] + counts["QGMMA"],
        "instructions": sum(counts.values()),
        # C7510 and its like: the compiler waits for each product before the next.
        "remarks": sorted(set(re.findall(r"\((C75\d\d)\)", report)) - {"C7519"}),
    }


def main(args: list[str] | None = None) -> int:
    options = tyro.cli(Options, description=__doc__, args=args)
    found = programs()
    if unknown := set(options.kernels) - set(found):
        print(
            f"error: unknown kernels {sorted(unknown)}; choose from {list(found)}", file=sys.stderr
        )
        return 1
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        try:
            plugin, runtime = libraries(options.plugin)
            source, driver = Path(temporary) / "driver.c", Path(temporary) / "libcuda.so.1"
            source.write_text(DRIVER)
            subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", driver, source], check=True)
            for name in options.kernels or found:
                for i, module in enumerate(modules(*found[name])):
                    folder = (options.keep or Path(temporary)) / f"{name}_{i}".replace(
                        " ", "_"
                    ).replace(",", "")
                    folder.mkdir(parents=True, exist_ok=False)
                    rows.append(
                        {"kernel": f"{name}, {i + 1}"}
                        | compile_module(module, folder, plugin, runtime, driver)
                    )
                    print(rows[-1], file=sys.stderr, flush=True)
        except (CompileError, FileExistsError, FileNotFoundError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    columns = [name for name in rows[0] if name not in ("kernel", "remarks")]
    table = [
        Row(row["kernel"], [str(row[name]) for name in columns], ", ".join(row["remarks"]))
        for row in rows
    ]
    title = "sm_90a; registers are those of the launch, which warpgroups trade among themselves"
    print_table(title, columns, table)
    if options.out:
        command = results.command("benchmarks/tools/mosaic_sass.py", args)
        device = "NVIDIA H200, compiled for without a GPU"
        results.write(options.out, results.new(command, rows, device=device, packages=("triton",)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
