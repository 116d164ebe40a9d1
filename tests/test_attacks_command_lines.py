"""Invalid command lines end in an error of one sentence: a small part of
benchmarks/experiments/attacks/command_lines.py."""

import json
import subprocess
import sys
from pathlib import Path

ATTACK = (
    Path(__file__).parent.parent / "benchmarks" / "experiments" / "attacks" / "command_lines.py"
)


def test_command_lines(tmp_path):
    out = tmp_path / "out.json"
    # In a process of its own: the tests' type checker would refuse wrong types in place of the
    # config.
    command = [
        sys.executable,
        ATTACK,
        "--in-process",
        "--trials",
        "40",
        "--seed",
        "1",
        "--out",
        out,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 40 and {row["outcome"] for row in rows} == {"refused", "accepted"}
    assert any("config file" in row["case"] for row in rows)
