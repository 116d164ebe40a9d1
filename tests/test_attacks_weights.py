"""Damaged weight files are refused (a part of benchmarks/experiments/attacks/weights.py)."""

import json
import subprocess
import sys
from pathlib import Path

ATTACK = Path(__file__).parent.parent / "benchmarks" / "experiments" / "attacks" / "weights.py"


def test_damaged_weights(tmp_path):
    out = tmp_path / "out.json"
    # In a separate process: the attack uses SIGALRM and reads the process's peak memory.
    command = [sys.executable, ATTACK, "--trials", "120", "--seed", "1", "--out", out]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert sum(result["counts"].values()) == 120 and not result["failures"]
    assert set(result["counts"]) <= {
        "refused",
        "same model",
        "other values",
        "other sizes that fit the file",
    }
    assert result["counts"]["refused"] > 60
