"""`python -m gptjax.bench kernels FILE`: every kernel against the ceiling, XLA and PyTorch.

A benchmark is a Python file with a function `cases()` that returns a list of `harness.Case`.
"""

import dataclasses
import functools
import gc
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro

from gptjax.bench import results
from gptjax.bench.errors import BenchError
from gptjax.bench.harness import (
    Case,
    Ceilings,
    alternating_seconds,
    ceilings,
    seconds,
    torch_seconds,
)
from gptjax.bench.rows import first_line, say
from gptjax.bench.table import Row, print_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Measure the device time of kernels, compared with XLA and PyTorch, and as a share of the
    GPU's ceiling: the rate of a device copy or of a large matmul."""

    files: tyro.conf.Positional[
        Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE [FILE ...]", help_behavior_hint="")]
    ]
    """Python files with a function cases(), such as benchmarks/kernels/attention.py, or folders of
    them."""
    torch: bool = True
    """Measure PyTorch, eager and compiled, in the same run, in the cases with a target."""
    case: str = ""
    """Only cases with this text in their name, such as TF32. Not with --out."""
    out: Path | None = None
    """Folder for the results, one JSON file for each FILE. Created if absent."""

    def run(self) -> None:
        if not self.files:
            raise BenchError(
                "expected Python files with a function cases(), or folders of them, such as "
                "benchmarks/kernels in the repository"
            )
        if self.case and self.out:
            raise BenchError("--out holds all cases of a kernel: leave out --case")
        cases = {
            file: [case for case in load(file) if self.case in case.name]
            for file in benchmark_files(self.files)
        }
        if self.out:
            self._check_out(self.out, list(cases))
        if not any(cases.values()):
            raise BenchError(f"no case of {sorted(map(str, cases))} has {self.case!r} in its name")
        if jax.default_backend() != "gpu":
            raise BenchError(
                "kernels are measured on an NVIDIA GPU, and JAX sees none here: pip install -e "
                "'.[cuda13]'"
            )
        if self.torch and not results.is_installed("torch"):
            raise BenchError(
                "PyTorch is not installed: leave it out with --no-torch, or pip install torch"
            )
        failed = [
            line
            for file, of_file in cases.items()
            if of_file
            for line in self._measure(file, of_file)
        ]
        if failed:
            raise BenchError("\n".join(["did not run:", *failed]))

    def _check_out(self, folder: Path, files: list[Path]) -> None:
        """Raise BenchError if two files have the same result file, or one cannot be written."""
        first: dict[str, Path] = {}
        for file in files:
            if file.stem in first:
                raise BenchError(
                    f"expected one FILE for each result, and {first[file.stem]} and {file} both "
                    f"write {folder / file.stem}.json: measure them with different --out"
                )
            first[file.stem] = file
            results.check_file(folder / f"{file.stem}.json")

    def _measure(self, file: Path, cases: list[Case]) -> list[str]:
        """Measure, write and print the cases of one file; return a line for each failure."""
        limits = ceilings(torch=self.torch)
        rows = measure(cases, limits, torch=self.torch)
        try:
            if self.out:
                command = f"python -m gptjax.bench kernels {file}"
                result = results.new(
                    command + ("" if self.torch else " --no-torch"),
                    rows,
                    device=jax.devices()[0].device_kind,
                    packages=("jax-triton", "triton") + ("torch",) * self.torch,
                    ceilings=dataclasses.asdict(limits),
                )
                results.write(self.out / f"{file.stem}.json", result)
        finally:  # the table shows the measurement even if it cannot be written
            show(rows, limits)
        if self.out:
            print(f"wrote {self.out / file.stem}.json")
        return [_line(row) for row in rows if "error" in row]


def benchmark_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files, and the Python files of the folders among them.

    Raises:
        BenchError: a path does not exist, or a folder has no Python file.
    """
    files = []
    for path in paths:
        inside = sorted(path.glob("*.py")) if path.is_dir() else [path]
        if not inside or not path.exists():
            raise BenchError(
                f"{path}: expected a Python file with a function cases(), or a folder of them"
            )
        files += inside
    return files


def load(file: Path) -> list[Case]:
    """Import a benchmark and return its cases.

    Raises:
        BenchError: the file is not a Python file, or has no function cases().
    """
    spec = importlib.util.spec_from_file_location(f"benchmark_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise BenchError(f"{file}: expected a Python file with a function cases()")
    module = importlib.util.module_from_spec(spec)
    folder = str(file.parent.absolute())
    if folder not in sys.path:  # as for a script: the benchmark may import a kernel beside it
        sys.path.append(folder)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "cases", None)):
        raise BenchError(f"{file}: expected a function cases() that returns a list of Case")
    return module.cases()


def measure(cases: list[Case], limits: Ceilings, *, torch: bool) -> list[dict]:
    """Return a row for each implementation of each case; a failure is a row with its error."""
    rows = []
    for case in cases:
        if case.alternate:
            together = functools.cache(functools.partial(alternating_seconds, case))
            runs = [(name, lambda name=name, f=together: f()[name]) for name in case.run]
        else:
            runs = [
                (name, lambda name=name, f=f, case=case: seconds(f, case, case.prepare.get(name)))
                for name, f in case.run.items()
            ]
        if torch and case.bar:
            runs += [
                (name, lambda f=f, case=case: torch_seconds(f, case))
                for name, f in case.torch.items()
            ]
        for name, run in runs:
            row = {"kernel": case.kernel, "case": case.name, "implementation": name}
            try:
                taken = run()
            except Exception as error:  # a failure must not lose the other rows
                row["error"] = first_line(error)
            else:
                row |= {"ms": taken * 1e3, "ceiling": limits.seconds(case) / taken}
                row |= {"GB/s": case.bytes / taken / 1e9} if case.bytes else {}
                row |= {"TFLOP/s": case.flops / taken / 1e12} if case.flops else {}
            row |= {"bound": case.bound, "bar": case.bar}
            rows.append(row)
            say(_line(row))
            gc.collect()
    return rows


def _line(row: dict) -> str:
    outcome = (
        row["error"]
        if "error" in row
        else f"{row['ms']:.4f} ms, {row['ceiling']:.1%} of the ceiling"
    )
    return f"{row['kernel']} · {row['case']} · {row['implementation']}: {outcome}"


def show(rows: list[dict], limits: Ceilings) -> None:
    """Print a heading for each case, and under it a row for each implementation."""
    title = (
        f"{jax.devices()[0].device_kind}: copy {limits.bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 matmul {limits.flops_per_s / 1e12:.0f} TFLOP/s"
    )
    table, last = [], None
    for row in rows:
        case = f"{row['kernel']}: {row['case']}"
        if case != last:
            table.append(Row(case, note=f"target {row['bar']}" if row["bar"] else ""))
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
