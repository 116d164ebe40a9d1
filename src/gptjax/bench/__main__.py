"""Measure kernels and training steps on this machine."""

import os
import signal
import sys

# Both JAX and PyTorch may run here: neither may preallocate the whole GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# As in train.py: a step that fits there fits here.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import tyro

from gptjax.bench.compare import Compare
from gptjax.bench.kernels import Kernels
from gptjax.bench.ladder import Ladder
from gptjax.bench.profile import Profile
from gptjax.bench.step import Step
from gptjax.terminal import exit_code, interrupt


def main(
    args: list[str] | None = None,
    commands=Step | Ladder | Compare | Profile | Kernels,
    prog: str = "gptjax bench",
) -> int:
    """Run the command line and return the exit code.

    Args:
        commands: dataclasses with a method `run`.
    """
    return exit_code(lambda: tyro.cli(commands, prog=prog, description=__doc__, args=args).run())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main())
