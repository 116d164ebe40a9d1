"""Compile training steps for H200s, without a GPU: memory, launches, and XLA's optimized program.

    pip download --no-deps -d wheels "jax-cuda13-plugin==JAX_VERSION" "jax-cuda13-pjrt==JAX_VERSION"
    for wheel in wheels/*.whl; do unzip -qo $wheel -d plugin; done
    export JAX_PLATFORMS=cpu
    python benchmarks/tools/compile_for_h200.py --plugin plugin --precision fp8 --keep texts
    python benchmarks/tools/compile_for_h200.py --plugin plugin --preset gpt2-xl --batch 32 \\
        --devices 8 --parallel fsdp

XLA compiles for a topology of H200s. Mosaic's kernels are lowered as on a GPU. Triton's kernels are
calls by name with the same operands and results: jax-triton compiles only beside a GPU. XLA selects
no algorithms of cuBLAS. On an H200, the numbers of fusions and calls are the same, and a step needs
0.1 GiB more for its code.

The bytes of a launch are those of its operands and results: an operand that is read twice, or only
in part, counts once.
"""

import atexit
import collections
import dataclasses
import importlib.util
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import tyro
from jax._src import xla_bridge
from jax._src.lib import xla_client

from gptjax.bench import BenchError, configs, results
from gptjax.bench.configs import StepOptions
from gptjax.bench.hlo import ORDER, places
from gptjax.bench.jax_step import JaxStep
from gptjax.bench.results import Row, label, print_table, say
from gptjax.bench.step import describe
from gptjax.config import Config
from gptjax.terminal import exit_code
from gptjax.training.memory import GIB, needed_bytes
from pallas_kernels import _mosaic, _triton, extend

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.19.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 19 }
device_description_str: "NVIDIA H200"
"""
"""XLA's description of the GPU. Without the versions of CUDA, XLA uses no FP8 matmuls."""
LIBRARY = "jax_plugins/xla_cuda13/xla_cuda_plugin.so"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(StepOptions):
    """Compile training steps for H200s, without a GPU."""

    plugin: Path
    """Folder in which the wheels of jax-cuda13-plugin and jax-cuda13-pjrt were unpacked."""
    top: int = 0
    """Number of launches in the second table: those with the most bytes."""
    keep: Path | None = None
    """Folder for the text of each optimized program."""
    out: Path | None = None
    """JSON file for the table."""


class Plugin:
    """JAX's CUDA plugin, without a GPU.

    Raises:
        BenchError: the folder does not have the files of the wheels.
    """

    def __init__(self, folder: Path):
        if not (folder / LIBRARY).is_file():
            raise BenchError(f"{folder / LIBRARY} is not there; --help tells how to get it")
        # Mosaic compiles its kernels while XLA compiles.
        runtime = folder / "jax_cuda13_plugin" / "libmosaic_gpu_runtime.so"
        os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime.absolute())
        self._api = xla_client.load_pjrt_plugin_dynamically("cuda", str(folder / LIBRARY))
        xla_client.initialize_pjrt_plugin("cuda")
        # As JAX does for a plugin that it finds: the rules of sharded launches.
        for register in xla_bridge._plugin_callbacks:
            register(c_api=self._api)
        self._extension = _module(folder, "cuda_plugin_extension")
        # XLA refuses a call of an unknown name. This handler takes any operands when compiled.
        (self._handler,) = _module(folder, "_prng").registrations().values()
        self._names: set[str] = set()

    def devices(self, count: int) -> list[Any]:
        """Return so many H200s of one host, for which XLA only compiles."""
        topology = xla_client.make_c_api_device_topology(
            self._api, "h200", target_config=H200, topology=f"1x1x{count}"
        )
        return topology._make_compile_only_devices()

    def replace_launches(self) -> None:
        """Let pallas_kernels select and lower as on an H200, Triton's kernels as calls by name."""
        tracing = extend.tracing_for((9, 0))
        tracing.__enter__()
        atexit.register(tracing.__exit__, None, None, None)
        _mosaic.num_sms, _triton.call = lambda: 132, self.call

    def call(self, kernel, *args, **options):
        """Replace `pallas_kernels._triton.call`: a call of the kernel's name, which XLA knows."""
        name = kernel.__name__
        if name not in self._names:
            self._names.add(name)
            self._extension.register_custom_call_target(
                self._api, name, self._handler, "CUDA", 1, 0
            )
        return extend._named_call(kernel, *args, **options)


def _module(folder: Path, name: str) -> Any:
    """Import a module of the wheel. On sys.path, JAX would find the plugin and ask for a GPU."""
    path = folder / "jax_cuda13_plugin" / f"{name}.so"
    spec = importlib.util.spec_from_file_location(f"jax_cuda13_plugin.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)(?= [a-z])|\S+) ([\w\-]+)\((.*)$")
NO_LAUNCH = "parameter constant get-tuple-element tuple bitcast opt-barrier after-all".split()


def launch_bytes(text: str) -> list[dict[str, Any]]:
    """Return the launches of an executable, those with the most bytes first.

    Equal launches of a part are one row: "launch", "opcode", "part", "pass", "result", "calls",
    "bytes".
    """
    sizes: dict[str, int] = {}
    found = places(text)
    rows: collections.Counter = collections.Counter()
    calls: collections.Counter = collections.Counter()
    for line in text[text.index("\nENTRY ") :].splitlines():
        if not (match := INSTRUCTION.match(line)):
            continue
        name, shape, opcode, rest = match.groups()
        sizes[name] = size = _bytes(shape)
        if opcode in NO_LAUNCH:
            continue
        operands = {*re.findall(r"%([\w.\-]+)", rest.partition("), ")[0])}
        target = re.search(r'custom_call_target="([^"]+)"', rest)
        launch = target[1] if target else re.sub(r"[.\d]+$", "", name)
        shape = re.sub(r"\{[\d,]*\}|, s8\[\d+\]", "", shape)
        key = launch, opcode, found[name].part, found[name].pass_, shape
        rows[key] += size + sum(sizes.get(operand, 0) for operand in operands)
        calls[key] += 1
    names = ("launch", "opcode", "part", "pass", "result")
    return [
        dict(zip(names, key, strict=True)) | {"calls": calls[key], "bytes": size}
        for key, size in rows.most_common()
    ]


def _bytes(shape: str) -> int:
    """Return the bytes of a shape such as (bf16[64,1024]{1,0}, f32[])."""
    total = 0
    for dtype, sizes in re.findall(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", shape):
        bits = int(re.search(r"\d+", dtype)[0]) if dtype != "pred" else 8
        total += bits // 8 * math.prod(map(int, filter(None, sizes.split(","))))
    return total


def row_of(options: Options, config: Config, count: int, plugin: Plugin) -> dict[str, Any]:
    """Compile a step, and return its row."""
    devices = plugin.devices(count)
    step = JaxStep(
        config, devices[0], parallel=config.parallel_on(devices), forward=options.forward
    )
    row = describe(options.name, config, forward=options.forward, devices=count)
    say(f"{label(row)}: compiling")
    step.compile(xla_gpu_enable_triton_gemm=False)
    text = step.compiled.as_text() or ""
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        name = f"{options.name}_{config.model.precision.name}_{config.micro_batch}_{count}.txt"
        (options.keep / name).write_text(text)
    row |= {"needed_gib": needed_bytes(step.compiled) / GIB}
    bytes_of, counts = collections.Counter(), collections.Counter()
    for launch in (launches := launch_bytes(text)):
        bytes_of[launch["part"]] += launch["bytes"]
        counts[launch["opcode"]] += launch["calls"]
    row |= {"fusions": counts["fusion"], "custom_calls": counts["custom-call"]}
    row |= {"bytes": {part: bytes_of[part] for part in ORDER if bytes_of[part]}}
    row |= {"launches": launches[: options.top]}
    return row | {"compile_s": step.compile_s, "kernels": config.kernels()}


def show(result: dict) -> None:
    """Print the tables."""
    table, launch_table = [], []
    for row in result["rows"]:
        sizes = row["bytes"]
        names = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in sizes.items())
        counts = str(row["fusions"]), str(row["custom_calls"])
        texts = f"{row['needed_gib']:.2f}", *counts, f"{sum(sizes.values()) / 1e9:.1f}"
        table.append(Row(label(row), texts, names))
        for launch in row["launches"]:
            note = f"{launch['part']}, {launch['pass']}: {launch['result'][:70]}"
            figures = str(launch["calls"]), f"{launch['bytes'] / 1e9:.2f}"
            launch_table.append(Row(launch["launch"][:40], figures, note))
    columns = ("needs GiB", "fusions", "calls", "GB moved")
    print_table(result["device"], columns, table)
    if launch_table:
        print_table("launches with the most bytes", ("calls", "GB"), launch_table)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 after a user's error."""
    options = tyro.cli(Options, args=arguments, description=__doc__)

    def run() -> None:
        plugin = Plugin(options.plugin)
        plugin.replace_launches()
        # This machine may have fewer devices than the compiled step.
        configs.first_devices = plugin.devices
        rows = [row_of(options, *each, plugin) for each in options.configs()]
        command = results.command("benchmarks/tools/compile_for_h200.py", arguments)
        device = "NVIDIA H200, compiled for without a GPU"
        results.report(results.new(command, rows, device=device), options.out, show)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
