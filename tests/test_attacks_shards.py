"""benchmarks/experiments/attacks/shards.py: a few damaged datasets are refused
or read correctly."""

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "experiments" / "attacks" / "shards.py"


def test_damaged_datasets_are_refused(tmp_path):
    spec = importlib.util.spec_from_file_location("attack_shards", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit) as stop:
        module.main(module.Options(trials=80, concurrent=1, out=tmp_path / "shards.json"))
    result = json.loads((tmp_path / "shards.json").read_text())
    assert stop.value.code is False and result["failures"] == []
    assert set(result["counts"]) == {"refused", "same tokens"} and result["counts"]["refused"] > 60
