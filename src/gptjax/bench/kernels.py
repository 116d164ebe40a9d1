"""`python -m gptjax.bench kernels FILE`: every kernel against the ceiling and XLA.

A benchmark is a Python file with a function `cases()` that returns a list of `harness.Case`.
benchmarks/rivals/kernels.py adds PyTorch.
"""

import dataclasses
import functools
import gc
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar

import jax
import tyro

from gptjax.bench import BenchError, results
from gptjax.bench.harness import Case, Ceilings, ceilings, seconds, timed_result
from gptjax.bench.results import Row, label, print_table, raise_failures, say
from gptjax.terminal import first_line

# Name → a function that returns the seconds of one call.
Rivals = dict[str, Callable[[], float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Measure the device time of kernels, compared with XLA, and as a share of the GPU's ceiling:
    the rate of a device copy or of a large matmul."""

    files: tyro.conf.Positional[
        Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE [FILE ...]", help_behavior_hint="")]
    ]
    """Python files with a function cases(), such as benchmarks/kernels/attention.py, or folders of
    them."""
    case: str = ""
    """Only cases with this text in their name, such as TF32."""
    out: Path | None = None
    """Folder for the results, one JSON file for each FILE. Created if absent."""
    script: ClassVar[str] = "-m gptjax.bench"

    def run(self) -> None:
        cases = {
            file: [case for case in load(file) if self.case in case.name]
            for path in self.files
            for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])
        }
        if not any(cases.values()):
            raise BenchError(
                f"no case in {sorted(map(str, cases))} has {self.case!r} in its name; expected "
                "files with a function cases(), such as those of benchmarks/kernels"
            )
        if jax.default_backend() != "gpu":
            raise BenchError(
                "kernels are measured on an NVIDIA GPU, and JAX sees none here: pip install -e "
                "'.[cuda13]'"
            )
        rows = []
        for file, of_file in cases.items():
            if of_file:
                limits = self.ceilings()
                measured = measure(of_file, limits, self.rivals)
                facts = {"ceilings": dataclasses.asdict(limits)}
                result = timed_result(self.script, measured, **facts)
                rows += result["rows"]
                results.report(result, self.out and self.out / f"{file.stem}.json", show)
        raise_failures(rows)

    def ceilings(self) -> Ceilings:
        """Measure the rates of this GPU."""
        return ceilings()

    def rivals(self, case: Case) -> Rivals:
        """Return functions that measure implementations outside JAX, by their names."""
        return {}


def load(file: Path) -> list[Case]:
    """Import a benchmark and return its cases.

    Raises:
        BenchError: the file is not a Python file, or has no function cases().
    """
    spec = importlib.util.spec_from_file_location(f"benchmark_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise BenchError(f"{file}: expected a Python file with a function cases()")
    module = importlib.util.module_from_spec(spec)
    folder = str(file.parent.absolute())
    if folder not in sys.path:  # as for a script: the benchmark may import a kernel beside it
        sys.path.append(folder)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "cases", None)):
        raise BenchError(f"{file}: expected a function cases() that returns a list of Case")
    return module.cases()


def measure(
    cases: list[Case], limits: Ceilings, rivals: Callable[[Case], Rivals] = lambda case: {}
) -> list[dict]:
    """Return a row for each implementation of each case; a failure is a row with its error."""
    rows = []
    for case in cases:
        groups = [[*case.run]] if case.alternate else [[name] for name in case.run]
        jobs = [(names, functools.partial(seconds, case, names)) for names in groups]
        jobs += [([name], lambda n=name, f=f: {n: f()}) for name, f in rivals(case).items()]
        for names, job in jobs:
            try:
                taken = job()
            except Exception as error:  # a failure must not lose the other rows
                taken = dict.fromkeys(names, first_line(error))
            for name, found in taken.items():
                row = {"kernel": case.kernel, "case": case.name, "implementation": name}
                row |= {"error": found} if isinstance(found, str) else rates(case, limits, found)
                rows.append(row | {"bound": case.bound, "bar": case.bar})
                say(f"{label(row)}: {row.get('error') or f'{row["ms"]:.4f} ms'}")
            gc.collect()
    return rows


def rates(case: Case, limits: Ceilings, taken: float) -> dict:
    """Return the figures of a call that takes this number of seconds."""
    figures = {"ms": taken * 1e3, "ceiling": limits.seconds(case) / taken}
    figures |= {"GB/s": case.bytes / taken / 1e9} if case.bytes else {}
    return figures | ({"TFLOP/s": case.flops / taken / 1e12} if case.flops else {})


def show(result: dict) -> None:
    """Print a heading for each case, and under it a row for each implementation."""
    limits, table, last = Ceilings(**result["ceilings"]), [], None
    for row in result["rows"]:
        case = f"{row['kernel']}: {row['case']}"
        if case != last:
            table.append(Row(case, note=f"target {row['bar']}" if row["bar"] else ""))
        last, name = case, f"  {row['implementation']}"
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
    rates = f"copy {limits.bytes_per_s / 1e12:.2f} TB/s, bf16 matmul"
    title = f"{result['device']}: {rates} {limits.flops_per_s / 1e12:.0f} TFLOP/s"
    print_table(title, ("ms", "TB/s", "TFLOP/s", "of ceiling"), table)
