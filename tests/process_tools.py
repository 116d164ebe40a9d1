"""Run Python in a process of its own."""

import os
import subprocess
import sys


def python(*arguments: str, cwd=None, given=None, **environment: str) -> str:
    """Run Python on a CPU; return what it prints, or fail with its errors."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        input=given,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
