"""The planted faults fit the code, and benchmarks/tools/planted_faults.py judges each fault."""

import re
import tomllib
from pathlib import Path

import planted_faults
import pytest

ROOT = Path(__file__).parents[1]
LIST = ROOT / "benchmarks" / "tools" / "planted_faults.toml"
LISTED = tomllib.loads(LIST.read_text(encoding="utf-8"))["fault"]
FAULTS = {fields["name"]: planted_faults.Fault(**fields) for fields in LISTED}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fits_the_code(name):
    fault = FAULTS[name]
    assert fault.planted(ROOT), f"expected the old text exactly once in {fault.file}"
    assert fault.old != fault.new and fault.tests
    for test in fault.tests:
        file, _, function = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not function or re.search(rf"def {function}\(", text), f"no test {test}"


def test_names_are_different():
    assert len(FAULTS) == len(LISTED)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("= 1", "= 2", ("caught", "test_one.py::test_one")),
        ("= 1", "= 1.0", ("NOT CAUGHT", "test_one.py")),
        ("= 3", "= 4", ("NOT FOUND", "expected the old text exactly once in one.py")),
        ("= 1", "= = 1", ("NOT CAUGHT", "test_one.py")),  # no test runs
    ],
)
def test_a_verdict(tmp_path, old, new, expected):
    (tmp_path / "one.py").write_text("ONE = 1\n")
    (tmp_path / "test_one.py").write_text(
        "import one\n\n\ndef test_one():\n    assert one.ONE == 1\n"
    )
    fault = planted_faults.Fault("one", "one.py", old, new, ["test_one.py"])
    assert planted_faults.verdict(fault, tmp_path) == expected
    assert (tmp_path / "one.py").read_text() == "ONE = 1\n"
