"""benchmarks/tools/gpu_suite.py counts the tests of pytest's report."""

import importlib
import json
import sys

import pytest

TESTS = """
import pytest
pytestmark = pytest.mark.gpu
def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip
def test_skipped(): pass
"""


@pytest.fixture
def suite(monkeypatch, tmp_path):
    module = importlib.import_module("gpu_suite")
    # Tests of a project of its own.
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py"])
    return module


def test_counts_and_failures(suite, tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    with pytest.raises(SystemExit, match="not all tests passed"):
        suite.main(suite.Options(out=tmp_path / "out.json"))
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["passed"], row["failed"], row["skipped"]) == (1, 1, 1) and row["finished"]
    assert row["failures"] == ["test_it::test_fails"]
    assert set(row["slowest"]) == {f"test_it::test_{x}" for x in ("passes", "fails", "skipped")}
