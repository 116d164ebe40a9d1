"""`python -m gptjax.bench kernels`: every kernel against the ceiling, XLA and PyTorch."""

import dataclasses
import functools
import gc
import importlib.metadata
import importlib.util
import json
import sys
import time
from pathlib import Path

import jax

from gptjax.bench.harness import Case, Ceilings, ceilings, seconds, torch_seconds
from gptjax.bench.table import Row, print_table
from gptjax.training.checkpoint import versions

# benchmarks/ beside src/: they are part of the repository and not of the installed package.
FOLDER = Path(__file__).parents[3] / "benchmarks"


class BenchError(ValueError):
    """What was asked for cannot be measured here; the message says why."""


def available() -> list[str]:
    """The kernels that have a benchmark."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if "def cases()" in path.read_text())


def load(name: str) -> list[Case]:
    """The cases of benchmarks/NAME.py.

    Raises:
        BenchError: there is no such benchmark.
    """
    if name not in available():
        raise BenchError(
            f"no benchmark named {name!r}; choose from {available()} (they lie in the repository's "
            f"{FOLDER.name}/)"
        )
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.cases()


def measure(cases: list[Case], limits: Ceilings, *, torch: bool) -> list[dict]:
    """A row for each implementation of each case; one that fails is a row with its error."""
    rows = []
    for case in cases:
        runs = [
            (name, functools.partial(seconds, f, case, case.prepare.get(name)))
            for name, f in case.run.items()
        ]
        if torch and case.bar:
            runs += [
                (name, functools.partial(torch_seconds, f, case)) for name, f in case.torch.items()
            ]
        for name, run in runs:
            row = {"kernel": case.kernel, "case": case.name, "implementation": name}
            try:
                taken = run()
            # one rival that does not run must not cost the others their figures
            except Exception as error:
                row["error"] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[
                        :300
                    ]
                )
            else:
                row |= {"ms": taken * 1e3, "ceiling": limits.seconds(case) / taken}
                row |= {"GB/s": case.bytes / taken / 1e9} if case.bytes else {}
                row |= {"TFLOP/s": case.flops / taken / 1e12} if case.flops else {}
            row |= {"bound": case.bound, "bar": case.bar}
            rows.append(row)
            print(_line(row), file=sys.stderr, flush=True)
            gc.collect()
    return rows


def _line(row: dict) -> str:
    found = (
        row["error"]
        if "error" in row
        else f"{row['ms']:.4f} ms, {row['ceiling']:.1%} of the ceiling"
    )
    return f"{row['kernel']} · {row['case']} · {row['implementation']}: {found}"


def show(rows: list[dict], limits: Ceilings) -> None:
    """Print a heading for each case, and under it a row for each implementation."""
    title = (
        f"{jax.devices()[0].device_kind}: copy {limits.bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 product {limits.flops_per_s / 1e12:.0f} TFLOP/s"
    )
    table, last = [], None
    for row in rows:
        case = f"{row['kernel']}: {row['case']}"
        if case != last:
            table.append(Row(case, note=f"aim {row['bar']}" if row["bar"] else ""))
        last = case
        name = f"  {row['implementation']}"
        if "error" in row:
            table.append(Row(name, note=row["error"]))
            continue
        figures = (
            f"{row['ms']:.4f}",
            f"{row['GB/s'] / 1e3:.2f}" if "GB/s" in row else "",
            f"{row['TFLOP/s']:.0f}" if "TFLOP/s" in row else "",
            f"{row['ceiling']:.1%}",
        )
        table.append(Row(name, figures))
    print_table(title, ("ms", "TB/s", "TFLOP/s", "of ceiling"), table)


def run(names: list[str], *, out: Path | None, torch: bool, part: str = "") -> None:
    """Measures the named kernels (all where none is named), prints a table for each, and writes
    OUT/NAME.json for each.

    Args:
        part: of a case's name; others are left out.

    Raises:
        BenchError: no GPU, no such kernel or case, PyTorch asked for and absent, a part of the
            cases for a file of all; after all is written, an implementation did not run.
    """
    failed: list[str] = []
    cases = {
        name: [case for case in load(name) if part in case.name] for name in names or available()
    }
    if part and out:
        raise BenchError("--out holds all cases of a kernel: leave out --case")
    if not any(cases.values()):
        raise BenchError(f"no case of {sorted(cases)} has {part!r} in its name")
    if jax.default_backend() != "gpu":
        raise BenchError(
            "kernels are measured on an NVIDIA GPU, and JAX sees none here: pip install -e "
            "'.[cuda13]'"
        )
    if torch and importlib.util.find_spec("torch") is None:
        raise BenchError(
            "PyTorch is not installed: leave it out with --no-torch, or pip install torch"
        )
    found = versions() | {
        package: _version(package) for package in ("jax-triton", "triton") + ("torch",) * torch
    }
    for name, its_cases in cases.items():
        if not its_cases:
            continue
        limits = ceilings(torch=torch)
        rows = measure(its_cases, limits, torch=torch)
        failed += [_line(row) for row in rows if "error" in row]
        if out:
            result = {
                "command": f"python -m gptjax.bench kernels {name}"
                + ("" if torch else " --no-torch"),
                "date": time.strftime("%Y-%m-%d"),
                "device": jax.devices()[0].device_kind,
                "versions": found,
                "ceilings": dataclasses.asdict(limits),
                "rows": rows,
            }
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{name}.json").write_text(
                json.dumps(result, indent=1, ensure_ascii=False) + "\n"
            )
        show(rows, limits)
        if out:
            print(f"wrote {out / name}.json")
    if failed:
        raise BenchError("\n".join(["did not run:", *failed]))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
