"""The command `python -m gptjax.doctor`."""

import json
import os
import platform
import signal
import sys
from collections.abc import Iterator

# The kernels need little memory, and other processes may use the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import tyro

from gptjax.doctor import checks, machine
from gptjax.doctor.checks import Result
from gptjax.terminal import hint, print_line


def run(kernels: bool = True) -> Iterator[Result]:
    """Run the checks in order. Skip checks that cannot run after a failure."""
    yield checks.packages()
    yield checks.driver()
    yield (result := checks.gpus())
    if kernels and result.status == "ok":
        from gptjax.doctor.kernels import check_all

        yield from check_all()


def report(results: list[Result]) -> str:
    """Return the machine and the results of its checks as a JSON document."""
    facts = {
        "system": platform.platform(),
        "versions": machine.versions(),
        "cuda_of_driver": machine.cuda_version(),
        "gpus": machine.cards(),
        "jax_devices": machine.jax_devices(),
        "checks": [result._asdict() for result in results],
    }
    return json.dumps(facts, indent=2)


def main(kernels: bool = True, json: bool = False) -> int:
    """Check the installation, the GPUs and the kernels of this machine.

    The exit code is 0 if no check failed, else 1. Warnings, such as a machine without a GPU, do not
    change the exit code.

    Args:
        kernels: Run the kernels: about a minute on an H200, mostly compilation.
        json: Print one JSON document, for the report of a bug.
    """
    show = (lambda text: None) if json else print_line
    for name, version in machine.versions().items():
        show(f"{name:<18} {version or '–'}")
    results = []
    for result in run(kernels):
        remedy = f"\n         → {result.remedy}" if result.remedy else ""
        show(f"{result.status:<7}  {result.name}: {result.found}{remedy}")
        results.append(result)
    failed = [result.name for result in results if result.status == "failed"]
    show(f"failed: {'; '.join(failed)}" if failed else "nothing failed")
    if json:
        print(report(results))
    elif not failed:
        hint("gptjax train --config gpt2_tiny")
    return 1 if failed else 0


if __name__ == "__main__":
    # End without a traceback if the reader, such as head, ends early.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(tyro.cli(main, prog="gptjax doctor"))
