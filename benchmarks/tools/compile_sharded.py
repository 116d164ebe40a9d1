"""Compile the sharded calls of tests/test_sharded_arrays.py for 8 H200s, without a GPU.

    export JAX_PLATFORMS=cpu
    python benchmarks/tools/compile_sharded.py --plugin plugin \\
        --out benchmarks/results/compiled/sharded_8.json

`compile_for_h200.py --help` tells how to get the folder `plugin`. Each call is compiled with its
gradients, on automatic and explicit axes of a mesh of 4×2, and with `in_shardings` on arrays whose
types name no mesh. The command fails if an executable has no kernel, a kernel that returns a whole
array, or other collectives than the test expects.
"""

import collections
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from compile_for_h200 import Plugin
from jax.sharding import AxisType, Mesh

from gptjax.bench import BenchError, results
from gptjax.bench.results import Row, print_table, say

sys.path.append(str(Path(__file__).parents[2] / "tests"))

WAYS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit, "in_shardings": AxisType.Auto}
COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\("
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Compile the sharded calls of tests/test_sharded_arrays.py for 8 H200s, without a GPU."""

    plugin: Path
    """Folder in which the wheels of jax-cuda13-plugin and jax-cuda13-pjrt were unpacked."""
    cases: tuple[str, ...] = ()
    """Only these cases of the tests; all if none is named."""
    out: Path | None = None
    """JSON file for the table."""


def launches_and_collectives(text: str) -> tuple[dict[str, int], list[tuple[str, int]], list[str]]:
    """Return the number of launches by name, the kind and size of each collective in order, and
    the shapes of the results of the launches."""
    names: collections.Counter = collections.Counter()
    shapes: list[str] = []
    for result, name in re.findall(r" = (.*?) custom-call\(.*custom_call_target=\"(.*?)\"", text):
        if not name.startswith("__"):  # a library of XLA
            names[name] += 1
            shapes += re.findall(r"\[([\d,]*)\]", result)
    found = []
    for result, kind, start in COLLECTIVE.findall(text):
        sizes = [
            _size(shape) for shape in re.findall(r"\[([\d,]*)\]", re.sub(r"\{.*?\}", "", result))
        ]
        # The result of a start has the operands, too.
        found.append((kind, sum(sizes) // (2 if start else 1)))
    return dict(names), sorted(found), shapes


def _size(shape: str) -> int:
    return int(np.prod([int(n) for n in shape.split(",") if n]))


def row_of(name: str, case: Any, dtype: Any, way: str, devices: list[Any]) -> dict[str, Any]:
    """Compile a case, and return its row, in which "error" is the difference to the test."""
    mesh = Mesh(np.array(devices).reshape(4, 2), ("devices", "time"), axis_types=(WAYS[way],) * 2)
    compiled = case.lowered(mesh, dtype, typed=way != "in_shardings").compile()
    names, collectives, shapes = launches_and_collectives(compiled.as_text())
    row = {"case": name, "way": way, "launches": names, "collectives": collectives}
    error = None
    if not names:
        error = "no kernel"
    elif ",".join(map(str, case.arrays[0][0])) in shapes:
        error = "a kernel returns a whole array"
    # XLA may add the sums over both axes of the mesh at once.
    elif {kind for kind, _ in collectives} - {"all-reduce"} or (
        sum(size for _, size in collectives) - sum(case.sums) not in (0, sum(case.second))
    ):
        error = f"expected sums of {case.sums} and {case.second} numbers"
    return row | {"error": error}


def show(result: dict) -> None:
    """Print the table."""
    table = []
    for row in result["rows"]:
        collectives = ", ".join(f"{kind} {size}" for kind, size in row["collectives"]) or "none"
        note = row["error"] or ", ".join(row["launches"])
        figures = str(sum(row["launches"].values())), collectives
        table.append(Row(f"{row['case']}, {row['way']}", figures, note))
    print_table(result["device"], ("launches", "collectives"), table)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if an executable is not as the test expects."""
    options = tyro.cli(Options, args=arguments, description=__doc__)
    try:
        plugin = Plugin(options.plugin)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    jax.config.update("jax_num_cpu_devices", 2)  # launches have no rule with one device
    plugin.replace_launches()
    from test_sharded_arrays import ON_GPUS

    known = [name for name, *_ in ON_GPUS]
    if unknown := sorted({*options.cases} - {*known}):
        print(f"error: expected some of {known}, got {unknown}", file=sys.stderr)
        return 1
    rows = []
    for name, case, dtype in ON_GPUS:
        for way in WAYS if name in (options.cases or known) else ():
            say(f"{name}, {way}")
            rows.append(row_of(name, case, dtype, way, plugin.devices(8)))
    command = results.command("benchmarks/tools/compile_sharded.py", arguments)
    device = "8 NVIDIA H200, compiled for without a GPU"
    results.report(results.new(command, rows, device=device), options.out, show)
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
