"""Damaged datasets are refused or read correctly (benchmarks/experiments/attacks/shards.py)."""

import importlib
import json
from pathlib import Path

import pytest

ATTACKS = Path(__file__).parents[1] / "benchmarks" / "experiments" / "attacks"


def test_damaged_datasets_are_refused(tmp_path, monkeypatch):
    # As when it is run: the modules that it imports are in the same folder.
    monkeypatch.syspath_prepend(ATTACKS)
    module = importlib.import_module("shards")
    with pytest.raises(SystemExit) as stop:
        module.main(module.Options(trials=80, concurrent=1, out=tmp_path / "shards.json"))
    result = json.loads((tmp_path / "shards.json").read_text())
    assert stop.value.code is False and result["failures"] == []
    assert set(result["counts"]) == {"refused", "same tokens"} and result["counts"]["refused"] > 60
