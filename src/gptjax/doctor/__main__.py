"""Check the installation, the GPUs and the kernels of this machine.

The exit code is 0 if no check failed, else 1. Warnings, such as a machine without a GPU,
do not change the exit code; with --need-gpu, no GPU is a failure.
"""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator

# The kernels need little memory, and other processes may use the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from gptjax.doctor import checks, machine
from gptjax.doctor.checks import Result
from gptjax.terminal import command_line, printable


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command."""

    json: bool = False
    """Print one JSON object with versions, GPUs and checks."""
    need_gpu: bool = False
    """Fail if JAX has no NVIDIA GPU."""
    kernels: bool = True
    """Run the kernels: about a minute on an H200, mostly compilation."""


def run(options: Options) -> Iterator[Result]:
    """Run the checks in order. Skip checks that cannot run after a failure."""
    for check in (checks.packages, checks.plugin, checks.driver, checks.disk):
        yield check()
    # Query memory before JAX allocates memory.
    yield from checks.memory()
    found = yield from checks.gpus(options.need_gpu)
    if found and options.kernels:
        from gptjax.doctor import kernels

        yield from kernels.check_all()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = command_line(
        Options, prog="python -m gptjax.doctor", description=__doc__, args=arguments
    )
    versions = checks.versions()
    if not options.json:
        for name, version in versions.items():
            print(f"{name:<18} {version or '–'}")
    results = []
    for result in run(options):
        results.append(result)
        if not options.json:
            print(printable(_line(result)), flush=True)
    failed = [result.name for result in results if result.status == "failed"]
    if options.json:
        gpus = [dataclasses.asdict(gpu) for gpu in machine.gpus()]
        lines = [dataclasses.asdict(result) for result in results]
        report = {"ok": not failed, "versions": versions, "gpus": gpus, "checks": lines}
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        print(f"failed: {'; '.join(failed)}" if failed else "nothing failed")
    return 1 if failed else 0


def _line(result: Result) -> str:
    line = f"{result.status:<7}  {result.name}: {result.found}"
    return f"{line}\n         → {result.remedy}" if result.remedy else line


if __name__ == "__main__":
    # End without a traceback if the reader, such as head, ends early.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
