"""python -m gptjax.bench: measure."""

import dataclasses
import json
import os
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
from gptjax.bench.step import Step
from gptjax.config import ConfigError

_NAMES = tyro.conf.arg(metavar="[NAME ...]", help_behavior_hint="(default: all)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Device time of the kernels, as a share of what the GPU can do, beside XLA and PyTorch. Needs a repository checkout."""

    names: tyro.conf.Positional[Annotated[tuple[str, ...], _NAMES]] = ()
    """Kernels, by the stem of their file in benchmarks/."""
    torch: bool = True
    """Measure PyTorch, eager and compiled, in the same run, in the cases that have a bar to reach."""
    case: str = ""
    """Only cases with this in their name, such as TF32; without --out."""
    out: Path | None = None
    """Folder for the results, a JSON file for each kernel; made if it is not there."""

    def run(self) -> None:
        kernels.run(list(self.names), out=self.out, torch=self.torch, part=self.case)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """Draws what `kernels --out` wrote: of every case that has a bar to reach, each implementation against the ceiling."""

    results: tyro.conf.Positional[Path]
    """The folder of JSON files."""
    picture: tyro.conf.Positional[Path]
    """The picture to write; its ending names the format (png, pdf, svg)."""

    def run(self) -> None:
        files = sorted(self.results.glob("*.json"))
        if not files:
            raise kernels.BenchError(
                f"no JSON files in {self.results}: python -m gptjax.bench kernels --out {self.results}"
            )
        draw([json.loads(file.read_text()) for file in files], self.picture)
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
    command = tyro.cli(_COMMANDS, prog="python -m gptjax.bench", description=__doc__, args=args)
    try:
        command.run()
    except (kernels.BenchError, ConfigError, OSError) as error:
        print(f"gptjax.bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
