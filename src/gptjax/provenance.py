"""What produced a run or a measurement: command, time, Git commit and versions."""

import datetime
import importlib.metadata
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import gptjax


def versions() -> dict[str, str]:
    """Return the versions of packages that affect the numbers of a run."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    return {"gptjax": gptjax.__version__} | {
        name: importlib.metadata.version(name) for name in packages
    }


def commit() -> str | None:
    """Return the Git commit of gptjax's sources, or None if Git does not track them.

    "-dirty" is appended if a tracked file differs from the commit.
    """
    folder = Path(gptjax.__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
            )
        except OSError:  # no git
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed wheel may lie in somebody else's repository.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def of_process() -> dict[str, Any]:
    """Return the command line, the local time with its UTC offset, the commit and the versions."""
    program, *arguments = sys.argv
    program = program.split() if program == "gptjax train" else ["python", program]
    return {
        "command": shlex.join([*program, *arguments]),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
    }
