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

from gptjax.bench import BenchError, results
from gptjax.bench.results import Row, print_table
from gptjax.plan import GPUS, tracing_on
from gptjax.terminal import exit_code

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


def programs() -> dict[str, tuple[Callable, tuple]]:
    """Name → a function and the shapes of its arguments, those of GPT-2 124M and of Llama 1B's MLP.
    Gradients have the forward kernel first, then the backward one."""
    import pallas_kernels as pk
    from pallas_kernels.feed_forward import activated_mlp

    def gradient(f, *shapes, **options):
        f = functools.partial(f, implementation="mosaic", **options)
        arrays = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
        argnums = (*range(len(shapes)),)
        return jax.grad(lambda *args: f(*args).astype(jnp.float32).sum(), argnums), arrays

    def symmetric(f, *shape, **options):
        arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16),)
        return functools.partial(f, implementation="mosaic", **options), arrays

    def with_documents(x, **options):
        ids = jnp.zeros(x.shape[:2], jnp.int32)
        return pk.flash_attention_qkv(x, segment_ids=ids, **options)

    def relu_squared(x, w, w2, **options):
        return activated_mlp(x, w, None, w2, activation="relu_squared", **options)

    packed = {
        "D=64": (64, 1024, 3, 12, 64),
        "D=128": (64, 1024, 3, 6, 128),
        "T=4096": (4, 4096, 3, 12, 64),
    }
    x, w, b, w2 = (65536, 768), (768, 3072), (3072,), (3072, 768)
    gated = (16384, 2048), (2048, 8192), (2048, 8192), (8192, 2048)
    projection = (64, 1024, 768), (768, 2304), (2304,)
    return {
        **{
            f"flash_attention {name}": gradient(pk.flash_attention_qkv, x)
            for name, x in packed.items()
        },
        **{
            f"flash_attention {name}, documents": gradient(with_documents, x)
            for name, x in packed.items()
        },
        "flash_attention window 256": gradient(
            pk.flash_attention_qkv, packed["T=4096"], window=256
        ),
        "linear_gelu": gradient(pk.linear_gelu, x, w, b),
        "mlp": gradient(pk.mlp, x, w, b, w2),
        "swiglu": gradient(pk.swiglu, *gated),
        "xxt": symmetric(pk.xxt, 48, 768, 768),
        "xtx": symmetric(pk.xtx, 24, 3072, 768),
        "ba_plus_caa": symmetric(pk.ba_plus_caa, 48, 768, 768, b=2.0, c=0.5),
        "ba_plus_caa, d": symmetric(pk.ba_plus_caa, 48, 768, 768, b=2.0, c=0.5, d=1.0),
        "mlp, fp8": gradient(pk.mlp, x, w, b, w2, numerics="fp8"),
        "relu_squared, fp8": gradient(relu_squared, x, w, w2, numerics="fp8"),
        "swiglu, fp8": gradient(pk.swiglu, *gated, numerics="fp8"),
        "projected_attention, fp8": gradient(
            pk.projected_attention, *projection, heads=12, numerics="fp8"
        ),
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
            raise BenchError(
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
        raise BenchError(f"{folder.name} does not compile:\n{done.stderr[-2000:]}")
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


def run(options: Options, args: list[str] | None) -> None:
    """Compile the kernels, and print and store the table."""
    found, rows = programs(), []
    if unknown := set(options.kernels) - set(found):
        raise BenchError(f"unknown kernels {sorted(unknown)}; choose from {list(found)}")
    with tempfile.TemporaryDirectory() as temporary:
        plugin, runtime = libraries(options.plugin)
        source, driver = Path(temporary) / "driver.c", Path(temporary) / "libcuda.so.1"
        source.write_text(DRIVER)
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", driver, source], check=True)
        for name in options.kernels or found:
            for i, module in enumerate(modules(*found[name])):
                file = f"{name}_{i}".replace(" ", "_").replace(",", "")
                folder = (options.keep or Path(temporary)) / file
                folder.mkdir(parents=True, exist_ok=False)
                figures = compile_module(module, folder, plugin, runtime, driver)
                rows.append({"kernel": f"{name}, {i + 1}"} | figures)
                print(rows[-1], file=sys.stderr, flush=True)
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


def main(args: list[str] | None = None) -> int:
    options = tyro.cli(Options, description=__doc__, args=args)
    return exit_code(lambda: run(options, args), (BenchError, FileExistsError, FileNotFoundError))


if __name__ == "__main__":
    sys.exit(main())
