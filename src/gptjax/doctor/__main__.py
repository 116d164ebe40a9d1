"""Check the installation, the GPUs and the kernels of this machine.

The exit code is 0 if no check failed, else 1. Warnings, such as a machine without a GPU,
do not change the exit code.
"""

import dataclasses
import os
import platform
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

    kernels: bool = True
    """Run the kernels: about a minute on an H200, mostly compilation."""


def run(options: Options) -> Iterator[Result]:
    """Run the checks in order. Skip checks that cannot run after a failure."""
    yield checks.packages()
    yield checks.driver()
    yield (result := checks.gpus())
    if options.kernels and result.status == "ok":
        from gptjax.doctor import kernels

        yield from kernels.check_all()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = command_line(
        Options, prog="python -m gptjax.doctor", description=__doc__, args=arguments
    )
    print(f"{'python':<18} {platform.python_version()}")
    for name in checks.PACKAGES:
        print(f"{name:<18} {machine.installed(name) or '–'}")
    failed = []
    for result in run(options):
        remedy = f"\n         → {result.remedy}" if result.remedy else ""
        line = f"{result.status:<7}  {result.name}: {result.found}{remedy}"
        print(printable(line), flush=True)
        failed += [result.name] if result.status == "failed" else []
    print(f"failed: {'; '.join(failed)}" if failed else "nothing failed")
    return 1 if failed else 0


if __name__ == "__main__":
    # End without a traceback if the reader, such as head, ends early.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
