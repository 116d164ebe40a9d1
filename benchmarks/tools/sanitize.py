"""Run every kernel once, forward and backward, under compute-sanitizer's memcheck (invalid
addresses) and racecheck (shared-memory races).

    python benchmarks/tools/sanitize.py --out benchmarks/results/sanitize.json

The calls are the registry's examples with few, ragged rows: the sanitizer slows down a kernel a
thousandfold, and invalid addresses occur at edges.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import tyro
from kernel_digests import Case, cases

from gptjax.bench import results

TOOLS = ("memcheck", "racecheck")
ROWS = 200


@dataclasses.dataclass(frozen=True)
class Options:
    """Run compute-sanitizer (CUDA toolkit) on all kernels of this GPU's back ends."""

    out: Path | None = None
    """JSON file for the results."""
    inside: bool = False
    """Run the kernels in this process; the script starts itself so under the sanitizer."""
    kernels: tuple[str, ...] = ()
    """Only these operations; all if none is named."""
    limit_s: float = 600.0
    """Seconds after which a tool is stopped; its report so far counts."""


def calls() -> list[Case]:
    """Return each example of the registry in each custom back end, with gradients."""
    made = cases(ROWS)
    return [c for c in made if c.back_end in ("mosaic", "triton") and "FP8" not in c.title]


def run_inside(operations: tuple[str, ...]) -> None:
    """Run the calls that this machine supports."""
    for case in calls():
        if (not operations or case.operation in operations) and (run := case.compiled()):
            jax.block_until_ready(run())
            print(f"ran: {case.name}", flush=True)


def run_tool(tool: str, sanitizer: str, options: Options) -> dict:
    """Run this script under one of compute-sanitizer's tools. Print its complaints; return its
    row."""
    # A separate buffer for each array: otherwise an address out of bounds is inside XLA's pool. No
    # autotuning of cuBLAS.
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0",
    }
    command = [sanitizer, "--tool", tool, "--error-exitcode", "1", sys.executable, __file__]
    command += ["--inside", *(["--kernels", *options.kernels] if options.kernels else [])]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": options.limit_s}
    try:
        done = subprocess.run(command, env=environment, check=False, **how)
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = f"none: stopped after {options.limit_s} s", error.stdout or b""
    text = output.decode(errors="replace")
    row = row_of(tool, code, text)
    complaints = [line for line in text.splitlines() if line.startswith("=========")]
    print(results.compact_json(row), *complaints[:40], sep="\n", flush=True)
    return row


def row_of(tool: str, code: int | str, text: str) -> dict:
    """Return the row of one tool from its exit code and output."""
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
    clean = re.compile(r"SUMMARY: 0 (errors|hazards)")
    return {
        "tool": tool,
        "summary": summary[-1] if summary else f"no summary; exit code {code}: {text[-1000:]}",
        "ran": re.findall(r"^ran: (.*)$", text, re.MULTILINE),
        "clean": code == 0 and bool(summary) and clean.search(summary[-1]) is not None,
    }


def main(options: Options) -> None:
    if options.inside:
        return run_inside(options.kernels)
    if (sanitizer := shutil.which("compute-sanitizer")) is None:
        sys.exit(
            "sanitize: compute-sanitizer is not on the PATH; it comes with NVIDIA's CUDA toolkit"
        )
    with ThreadPoolExecutor() as pool:
        rows = [*pool.map(lambda tool: run_tool(tool, sanitizer, options), TOOLS)]
    if options.out:
        command = results.command("benchmarks/tools/sanitize.py")
        device = jax.devices()[0].device_kind
        results.write(options.out, results.new(command, rows, device=device))
    if dirty := [row["tool"] for row in rows if not row["clean"]]:
        sys.exit(f"sanitize: not clean: {', '.join(dirty)}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
