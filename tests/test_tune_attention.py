"""benchmarks/tools/tune_attention.py finds the fastest correct tiles, and writes them to the file
that the kernels read."""

import importlib
import json
import shutil

import pytest

from pallas_kernels import _dispatch, extend
from pallas_kernels.attention import triton

SHAPE = ["--shape", "1", "64", "1", "16", "--dtype", "fp16"]


@pytest.fixture
def tune(tmp_path, monkeypatch):
    module = importlib.import_module("tune_attention")
    for file in module.FOLDER.glob("*_tiles.json"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module.harness, "MOST_BYTES", module.harness.MOST_BYTES)
    for owner in (_dispatch, extend):
        monkeypatch.setattr(owner, "capability", lambda: (9, 0))
    monkeypatch.setattr(_dispatch, "platform", lambda: "gpu")
    return module


def test_the_fastest_right_tiles_are_found_and_written(tune, tmp_path, monkeypatch, triton_on_cpu):
    tried = []

    def seconds(case, names):
        tile = tried[-1]
        far = abs(tile["M"] - 32) + abs(tile["N"] - 64) + abs(tile["num_stages"] - 2)
        return dict.fromkeys(names, 1e-3 * (1 + far))

    run = tune.Space.run
    monkeypatch.setattr(tune, "seconds", seconds)
    monkeypatch.setattr(tune.Space, "run", lambda self, tile: tried.append(tile) or run(self, tile))
    # 32 keys at a time come out wrong, whatever they cost.
    error = tune.error
    monkeypatch.setattr(tune, "error", lambda o, f: 1.0 if tried[-1]["N"] == 32 else error(o, f))
    few = {"M": (16, 32), "N": (32, 64), "num_stages": (1, 2)}
    monkeypatch.setattr(tune.Space, "values", few)
    out = tmp_path / "trials.json"
    how = ["--kernel", "forward", *SHAPE, "--write", "--out", str(out)]
    assert tune.main(how) == 0
    found = json.loads((tmp_path / "triton_tiles.json").read_text())
    ours = triton._tiles()
    padded = min((p for p in ours["9.0"]["16"] if int(p) >= 16), key=int)
    best = found["9.0"]["16"][padded]["forward"]
    assert (best["M"], best["N"], best["num_stages"]) == (32, 64, 2)
    trials = json.loads(out.read_text())
    assert trials["best"]["tiles"] == best
    assert any("off by" in t.get("why_not", "") for t in trials["rows"])
    # Nothing else has changed.
    found["9.0"]["16"][padded]["forward"] = ours["9.0"]["16"][padded]["forward"]
    assert found == ours


@pytest.mark.parametrize(
    "kernel, option, how",
    [
        ("forward", "value_dim", ["--value-dim", "32"]),
        ("dkv", "slopes", ["--bias", "slopes"]),
        ("dq", "bias", ["--bias", "scores"]),
    ],
)
def test_tiles_of_an_option(kernel, option, how, tune, tmp_path, monkeypatch, triton_on_cpu):
    """They are written beside the entry's own tiles, and read for calls with the option only."""
    monkeypatch.setattr(tune, "seconds", lambda case, names: dict.fromkeys(names, 1e-3))
    monkeypatch.setattr(tune.Space, "values", {})
    before = triton.tuning((9, 0), "16", 16, option)
    assert tune.main(["--kernel", kernel, *SHAPE, *how, "--write"]) == 0
    found = json.loads((tmp_path / "triton_tiles.json").read_text())
    written = found["9.0"]["16"]["64"].pop(option)
    assert written == {kernel: before[kernel]} and found == triton._tiles()
    written[kernel] = before[kernel] | {"num_stages": 1}
    found["9.0"]["16"]["64"][option] = written
    monkeypatch.setattr(triton, "_tiles", lambda: found)
    after = triton.tuning((9, 0), "16", 16, option)
    assert {name: after[name] for name in before} == before | written
    assert triton.tuning((9, 0), "16", 16) == found["9.0"]["16"]["64"]


def test_errors(tune, monkeypatch, capsys):
    monkeypatch.setattr(_dispatch, "capability", lambda: (7, 5))
    assert tune.main(["--kernel", "forward"]) == 1
    assert "'triton' needs" in capsys.readouterr().err
