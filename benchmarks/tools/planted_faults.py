"""Plant faults in copies of the tree, and run the tests that catch each fault.

python benchmarks/tools/planted_faults.py --jobs 2
python benchmarks/tools/planted_faults.py --only adamw-epsilon-inside-the-root

A fault of benchmarks/tools/planted_faults.toml replaces a text that occurs once in a file. Its
tests run on a CPU. The exit code is 1 if a fault is not caught, its text is not found, or a test
that catches a fault fails without the fault.
"""

import concurrent.futures
import dataclasses
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import tyro

ROOT, LIST = Path(__file__).resolve().parents[2], Path(__file__).with_suffix(".toml")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wrong text in a file, and the tests that catch it."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def planted(self, root: Path) -> str | None:
        """Return the file with the fault; None unless the old text occurs exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


def copy_tree(to: Path) -> Path:
    """Copy the files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)
    return to


def pytest(copy: Path, *args: str) -> tuple[int, list[str]]:
    """Run pytest on a copy; return the exit code, and the failed tests or the end of the output."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *args]
    env = os.environ | {"PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}"}
    how = {"capture_output": True, "text": True, "timeout": 600}
    try:
        run = subprocess.run(command, cwd=copy, env=env, **how)
    except subprocess.TimeoutExpired:
        return -1, ["no result in 600 s"]
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    failed = [line.split(" - ")[0].partition(" ")[2] for line in lines]
    return run.returncode, failed or [(run.stdout + run.stderr)[-200:].strip()]


def verdict(fault: Fault, copy: Path) -> tuple[str, str]:
    """Plant a fault in a copy, run its tests, and remove the fault."""
    path, text = copy / fault.file, fault.planted(copy)
    if text is None:
        return "NOT FOUND", f"expected the old text exactly once in {fault.file}"
    original = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    try:
        code, (found, *_) = pytest(copy, "-n", "0", "-x", *fault.tests)
    finally:
        path.write_text(original, encoding="utf-8")
    return ("caught" if code == 1 else "NOT CAUGHT"), found if code else " ".join(fault.tests)


def main(only: tuple[str, ...] = (), jobs: int = 1) -> int:
    """Plant faults, print a table, and return the exit code.

    Args:
        only: names of faults; all faults if none is named.
        jobs: number of processes, each with a copy of the tree.
    """
    started, listed = time.perf_counter(), tomllib.loads(LIST.read_text(encoding="utf-8"))["fault"]
    faults = [Fault(**fields) for fields in listed if fields["name"] in only or not only]
    if unknown := {*only} - {fault.name for fault in faults}:
        sys.exit(f"planted_faults: no faults {', '.join(sorted(unknown))}")
    copies: queue.Queue[Path] = queue.Queue()

    def check(fault: Fault) -> tuple[str, str]:
        result = verdict(fault, copy := copies.get())
        copies.put(copy)
        print(f"{fault.name}: {result[0]}", flush=True)
        return result

    with tempfile.TemporaryDirectory() as folder:
        for job in range(jobs):
            copies.put(copy_tree(Path(folder) / str(job)))
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(check, faults))
        caught = sorted({by for result, by in results if result == "caught"})
        code, failed = pytest(copies.get(), "-n", str(jobs), *caught) if caught else (0, [])
    for fault, (result, by) in zip(faults, results, strict=True):
        print(f"{fault.name:48} {result:10} {by}")
    if code:
        print("fail without a fault:", *failed, sep="\n  ")
    count = sum(result == "caught" for result, _ in results)
    print(f"{count} of {len(faults)} caught in {time.perf_counter() - started:.0f} s")
    return int(bool(code) or count < len(faults))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
