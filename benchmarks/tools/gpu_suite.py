"""Run all GPU tests, `pytest -m gpu`, and store how many passed and how long they took.

python benchmarks/tools/gpu_suite.py --out benchmarks/results/gpu_suite.json
"""

import dataclasses
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

import jax
import tyro

from gptjax.bench import results

COMMAND = ["-m", "gpu"]
SLOWEST = 10


@dataclasses.dataclass(frozen=True)
class Options:
    """Run the GPU tests on this machine."""

    out: Path | None = None
    """JSON file for the result."""
    limit_s: float = 600.0
    """Seconds after which the tests are stopped; the result is then `"finished": false`."""


def run(options: Options) -> dict:
    """Run pytest and return the row of the result."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # The timeout prints where a test hangs.
        more = [f"--junitxml={report}", "-o", "faulthandler_timeout=120"]
        started = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "pytest", *COMMAND, *more])
        try:
            process.wait(options.limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest prints its summary
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        code, seconds = process.wait(), time.perf_counter() - started
        if not report.exists():
            sys.exit(f"gpu_suite: pytest wrote no report, exit code {code}; its message is above")
        return row_of(ElementTree.parse(report), code) | {"seconds": round(seconds, 1)}


def row_of(report: ElementTree.ElementTree, code: int) -> dict:
    """Return counts, failed tests and slowest tests of pytest's JUnit report."""
    names: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    seconds = {}
    for case in report.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        seconds[name] = float(case.get("time", 0))
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "passed"
        names["skipped" if "skipped" in tags else outcome].append(name)
    slowest = sorted(seconds, key=lambda name: -seconds[name])[:SLOWEST]
    return {
        "suite": "pytest -m gpu",
        **{outcome: len(tests) for outcome, tests in names.items()},
        "finished": code in (0, 1),
        "failures": names["failed"],
        "slowest": {name: round(seconds[name], 1) for name in slowest},
    }


def main(options: Options) -> None:
    row = run(options)
    print(results.compact_json(row))
    if options.out:
        command = results.command("benchmarks/tools/gpu_suite.py")
        device = jax.devices()[0].device_kind
        packages = ("jax-triton", "triton", "torch", "pytest", "pytest-xdist")
        results.write(options.out, results.new(command, [row], device=device, packages=packages))
    if row["failed"] or not row["finished"]:
        sys.exit("gpu_suite: not all tests passed")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
