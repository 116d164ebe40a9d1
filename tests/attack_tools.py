"""Run a file of attacks as a process, and judge the outcomes of its trials."""

import json
import os
import subprocess
import sys
from collections import Counter


def in_a_process(file: str, trials: int) -> list[dict]:
    """Run a file of attacks as a script; return the rows that it prints."""
    done = subprocess.run(
        [sys.executable, file, str(trials)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def counted(rows: list[dict], right: set[str]) -> Counter:
    """Return the number of rows with each outcome; fail if one is not among the right ones."""
    assert [row for row in rows if row["outcome"] not in right] == []
    return Counter(row["outcome"] for row in rows)
