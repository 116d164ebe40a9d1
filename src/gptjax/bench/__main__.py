"""Measure kernels, training steps, generation and starts on this machine."""

import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import tyro

# Both JAX and PyTorch run here: neither may preallocate the whole GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# As in train.py: a step that fits there fits here.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

from gptjax.bench import results
from gptjax.bench.compare import Compare
from gptjax.bench.errors import BenchError
from gptjax.bench.generate import Generate
from gptjax.bench.kernels import Kernels
from gptjax.bench.ladder import Ladder
from gptjax.bench.picture import draw_kernels
from gptjax.bench.profile import Profile
from gptjax.bench.startup import Startup
from gptjax.bench.step import Step
from gptjax.config import ConfigError
from gptjax.fields import check_ranges
from gptjax.terminal import command_line, exit_code, interrupt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """Draw results of `kernels --out`, one picture for each file. A bar is the speed of an
    implementation, as a share of the GPU's ceiling: the rate of a device copy or of a large matmul.
    Cases without a target are left out."""

    results: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RESULTS")]]
    """Folder of the JSON files."""
    pictures: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="PICTURES")]]
    """Folder of the pictures: NAME.png for each file NAME.json."""

    def run(self) -> None:
        files = sorted(self.results.glob("*.json"))
        if not files:
            raise BenchError(
                f"no JSON files in {self.results}: python -m gptjax.bench kernels FILE --out "
                f"{self.results}"
            )
        fields = ("kernel", "case", "implementation", "bound", "bar")
        measured = {file.stem: results.read_times(file, *fields) for file in files}
        limits = {"bytes_per_s", "flops_per_s"}
        if any(set(result.get("ceilings", ())) != limits for result in measured.values()):
            raise BenchError(f"{self.results}: expected results of bench kernels, with ceilings")
        for name, result in measured.items():
            draw_kernels(result, self.pictures / f"{name}.png")
            print(f"wrote {self.pictures / name}.png")


_COMMANDS = (
    Annotated[Step, tyro.conf.subcommand("step")]
    | Annotated[Ladder, tyro.conf.subcommand("ladder")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Profile, tyro.conf.subcommand("profile")]
    | Annotated[Startup, tyro.conf.subcommand("startup")]
    | Annotated[Kernels, tyro.conf.subcommand("kernels")]
    | Annotated[Draw, tyro.conf.subcommand("draw")]
)


def main(args: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""

    def command() -> None:
        prog = "python -m gptjax.bench"
        options = command_line(_COMMANDS, prog=prog, description=__doc__, args=args)
        try:
            check_ranges(options)
        except ValueError as error:
            raise BenchError(str(error)) from error
        options.run()

    return exit_code(command, (BenchError, ConfigError, OSError))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main())
