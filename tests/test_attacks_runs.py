"""Small runs of the attacks on checkpoints and disks; benchmarks/results/attacks has the full
ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ATTACKS = Path(__file__).parent.parent / "benchmarks" / "experiments" / "attacks"


def counts(tmp_path: Path, script: str, *options: str) -> dict[str, int]:
    out = tmp_path / "out.json"
    command = [sys.executable, ATTACKS / script, *options, "--out", out]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "ATTACK_STEPS": "60"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())["counts"]


def test_damaged_checkpoints_are_never_restored_without_a_word(tmp_path):
    found = counts(tmp_path, "checkpoints.py", "--flips", "40")
    assert set(found) <= {"fell back", "refused", "same"} and found["fell back"] > 20


def test_a_full_disk_ends_a_run_and_room_lets_it_resume(tmp_path):
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], check=False).returncode
    ):
        pytest.skip("needs root and the right to mount a tmpfs")
    subprocess.run(["umount", str(tmp_path)], check=True)
    assert counts(tmp_path, "disk_full.py", "--trials", "1", "--smallest-kib", "2600") == {
        "refused and resumed": 1
    }
