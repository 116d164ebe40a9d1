"""benchmarks/experiments/collectives.py: the timed collective is the one that the row names, and
the fit returns the constants of synthetic times."""

import importlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from gptjax.bench import results
from gptjax.bench.errors import BenchError
from gptjax.parallel import AXIS, data_mesh


@pytest.fixture
def collectives(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks" / "experiments")
    return importlib.import_module("collectives")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_reduce", [11, 22, 33, 44, 11, 22, 33, 44]),
        ("reduce_scatter", [11, 22, 33, 44]),
        ("all_gather", [1, 2, 3, 4, 10, 20, 30, 40, 1, 2, 3, 4, 10, 20, 30, 40]),
    ],
)
def test_the_collectives(collectives, kind, expected):
    """Outputs of both devices, one after the other."""
    spec = jax.sharding.PartitionSpec(AXIS)
    call = jax.shard_map(
        collectives.KINDS[kind],
        mesh=data_mesh(jax.devices("cpu")[:2]),
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    out = jax.jit(call)(np.float32([1, 2, 3, 4, 10, 20, 30, 40]))
    np.testing.assert_array_equal(out, np.float32(expected))


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_chain_runs_every_call_on_the_whole_array(collectives, kind):
    mesh = data_mesh(jax.devices("cpu")[:2])
    x = jax.ShapeDtypeStruct((2 * 64,), np.float32)
    text = jax.jit(collectives.chain(kind, mesh, 3)).lower(x).compile().as_text()
    assert collectives.launched(kind, text) == 3
    size = {"all_reduce": 64, "reduce_scatter": 32, "all_gather": 128}[kind]
    calls = [line for line in text.splitlines() if f" {kind.replace('_', '-')}(" in line]
    assert all(f"f32[{size}]" in line for line in calls), calls


def test_bus_bandwidth_is_that_of_nccl_tests(collectives):
    assert collectives.bus_factor("all_reduce", 4) == 1.5
    assert collectives.bus_factor("reduce_scatter", 4) == 0.75
    assert collectives.bus_factor("all_gather", 2) == 0.5


def test_the_fit_returns_the_constants(collectives):
    sizes = [4**n for n in range(6, 16)]
    line = collectives.fit(sizes, [2e-5 + size / 4e11 for size in sizes])
    assert line["latency_s"] == pytest.approx(2e-5, rel=1e-6)
    assert line["bytes_per_s"] == pytest.approx(4e11, rel=1e-6)
    assert line["largest_error"] < 1e-6


def test_the_fit_of_times_without_latency_or_without_bandwidth(collectives):
    line = collectives.fit([1000, 4000, 16000], [0.9e-6, 4e-6, 17e-6])
    assert line["latency_s"] == 0 and line["bytes_per_s"] == pytest.approx(1e9, rel=0.1)
    line = collectives.fit([1000, 4000], [2e-6, 1e-6])
    assert line["bytes_per_s"] is None and 1e-6 < line["latency_s"] < 2e-6


def test_a_run_writes_a_result(collectives, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out" / "collectives.json"
    monkeypatch.setattr("sys.argv", ["collectives.py", "--given"])
    options = collectives.Options(
        devices=(2,), smallest=4096, largest=16384, calls=2, rounds=1, seconds=1e-3, out=out
    )
    collectives.main(options)
    result = results.read(out)
    assert result["command"] == "python benchmarks/experiments/collectives.py --given"
    cases = {(r["collective"], r["dtype"], r["bytes"]) for r in result["rows"]}
    assert len(cases) == len(result["rows"]) == 3 * 2 * 2
    for row in result["rows"]:
        assert row["seconds"] > 0
        assert row["algorithm_bytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"])
        factor = {"all_reduce": 1.0}.get(row["collective"], 0.5)
        assert row["bus_bytes_per_s"] == pytest.approx(factor * row["algorithm_bytes_per_s"])
    assert len(result["fits"]) == 3 * 2
    printed = capsys.readouterr().out
    assert "12 of 12: all_gather, 2 devices, bf16, 16,384 bytes" in printed
    assert json.loads(out.read_text())["device"] == jax.devices()[0].device_kind


def test_a_failure_does_not_lose_the_other_rows(collectives, tmp_path, monkeypatch):
    out = tmp_path / "collectives.json"
    monkeypatch.setattr("sys.argv", ["collectives.py"])
    monkeypatch.setitem(collectives.KINDS, "all_gather", lambda x: 2 * x)
    options = collectives.Options(
        devices=(2,), dtypes=("fp32",), largest=4096, calls=1, rounds=1, seconds=1e-3, out=out
    )
    with pytest.raises(BenchError, match="all_gather, 2 .*: expected 1 in the executable, found 0"):
        collectives.main(options)
    kinds = [row["collective"] for row in results.read(out)["rows"]]
    assert kinds == ["all_reduce", "reduce_scatter"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": (1,)}, "--devices 1: expected 2 to"),
        ({"devices": (512,)}, "--devices 512: expected 2 to"),
        ({"devices": (2,), "dtypes": ("fp8",)}, "--dtypes fp8: expected one of"),
        ({"devices": (2,), "smallest": 6}, "--smallest 6: expected a multiple of 8"),
    ],
)
def test_errors(collectives, options, message):
    with pytest.raises(BenchError, match=message):
        collectives.main(collectives.Options(**options))
