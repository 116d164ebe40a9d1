"""Measure kernels, training steps and starts on this machine."""

import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import tyro

# Both JAX and PyTorch run here, so neither may take the whole GPU at its start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# As in train.py: what fits there fits here.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

from gptjax.bench import kernels
from gptjax.bench.compare import Compare
from gptjax.bench.ladder import Ladder
from gptjax.bench.picture import draw
from gptjax.bench.profile import Profile
from gptjax.bench.startup import Startup
from gptjax.bench.step import Step, read
from gptjax.config import ConfigError
from gptjax.terminal import printable

_NAMES = tyro.conf.arg(metavar="[NAME ...]", help_behavior_hint="(default: all)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Device time of the kernels, as a share of what the GPU can do, beside XLA and PyTorch. Needs
    a repository checkout."""

    names: tyro.conf.Positional[Annotated[tuple[str, ...], _NAMES]] = ()
    """Kernels, by the stem of their file in benchmarks/."""
    torch: bool = True
    """Measure PyTorch, eager and compiled, in the same run, in the cases that have a bar to
    reach."""
    case: str = ""
    """Only cases with this in their name, such as TF32; without --out."""
    out: Path | None = None
    """Folder for the results, a JSON file for each kernel; made if it is not there."""

    def run(self) -> None:
        kernels.run(list(self.names), out=self.out, torch=self.torch, part=self.case)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """Draws what `kernels --out` wrote: of every case that has a bar to reach, each implementation
    against the ceiling."""

    results: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RESULTS")]]
    """The folder of JSON files."""
    picture: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="PICTURE")]]
    """The picture to write; its ending names the format (png, pdf, svg)."""

    def run(self) -> None:
        files = sorted(self.results.glob("*.json"))
        if not files:
            raise kernels.BenchError(
                f"no JSON files in {self.results}: python -m gptjax.bench kernels --out "
                f"{self.results}"
            )
        fields = ("kernel", "case", "implementation", "bound", "bar")
        results = [read(file, *fields) for file in files]
        limits = {"bytes_per_s", "flops_per_s"}
        if any(set(result.get("ceilings", ())) != limits for result in results):
            raise kernels.BenchError(
                f"{self.results}: expected results of bench kernels, with ceilings"
            )
        draw(results, self.picture)
        print(f"wrote {self.picture}")


_COMMANDS = (
    Annotated[Step, tyro.conf.subcommand("step")]
    | Annotated[Ladder, tyro.conf.subcommand("ladder")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Profile, tyro.conf.subcommand("profile")]
    | Annotated[Startup, tyro.conf.subcommand("startup")]
    | Annotated[Kernels, tyro.conf.subcommand("kernels")]
    | Annotated[Draw, tyro.conf.subcommand("draw")]
)


def main(args: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        try:
            return _run(args)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as head, has ended. At its own end the interpreter would flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(args: list[str] | None) -> int:
    command = tyro.cli(_COMMANDS, prog="python -m gptjax.bench", description=__doc__, args=args)
    try:
        command.run()
    except BrokenPipeError:
        raise
    except (kernels.BenchError, ConfigError, OSError) as error:
        print(printable(f"gptjax.bench: {error}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
