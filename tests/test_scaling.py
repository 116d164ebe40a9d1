"""benchmarks/experiments/scaling.py: the arithmetic of the prediction on cases computed by hand.

tests/test_result_tables.py compares its result with docs/scaling.md."""

import importlib
import itertools
from pathlib import Path

import pytest

from gptjax.bench import results
from gptjax.bench.errors import BenchError
from gptjax.models.gpt2 import PRESETS, GPT2Config
from gptjax.precision import Precision

ROOT = Path(__file__).parents[1]
STRATEGIES = ("data", "zero1", "fsdp")
# A block has four matrices of together 196,608 elements, in axes that two devices divide, and
# vectors of together 1,664. wte has 8,192 elements, wpe 2,048, ln_f 256: too small to be sharded.
TINY = GPT2Config(
    vocab_size=61, padded_vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=128,
    precision=Precision("bf16"),
)  # fmt: skip
MATRICES, VECTORS, REST, NORM = 196_608, 1_664, 8_192 + 2_048, 256
TOTAL = 2 * (MATRICES + VECTORS) + REST + NORM


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "experiments")
    return importlib.import_module("scaling")


def links(scaling, *, latency=0.0, nvlink=1e9, network=1e9):
    """The same constants for every collective."""
    kinds = itertools.product(("all_reduce", "reduce_scatter", "all_gather"), ("fp32", "bf16"))
    local = scaling.Constants(latency, nvlink)
    in_host = {(*kind, 2): local for kind in kinds}
    return scaling.Cluster(in_host, scaling.Constants(latency, network))


def test_a_collective_in_a_host(scaling):
    cluster = links(scaling, latency=1e-3)
    assert cluster.seconds("all_reduce", "fp32", 8e9, 1) == 0
    assert cluster.seconds("all_reduce", "fp32", 8e9, 2) == pytest.approx(1e-3 + 8)
    assert cluster.seconds("all_reduce", "fp32", 8e9, 8) == pytest.approx(1e-3 + 14)
    assert cluster.seconds("reduce_scatter", "fp32", 8e9, 8) == pytest.approx(1e-3 + 7)
    assert cluster.seconds("all_gather", "bf16", 8e9, 4) == pytest.approx(1e-3 + 6)


def test_a_collective_between_four_hosts_has_two_or_three_stages(scaling):
    """In the host 8 GB · 7/8 at 1 GB/s; between hosts 1 GB · 3/4, twice for all-reduce, at 0.1
    GB/s. The latency counts once in a host and log2(4) times, or twice as often, between hosts."""
    cluster = links(scaling, latency=1e-3, network=1e8)
    assert cluster.seconds("reduce_scatter", "fp32", 8e9, 32) == pytest.approx(7 + 7.5 + 3e-3)
    assert cluster.seconds("all_gather", "fp32", 8e9, 32) == pytest.approx(7 + 7.5 + 3e-3)
    assert cluster.seconds("all_reduce", "fp32", 8e9, 32) == pytest.approx(7 + 15 + 7 + 6e-3)


def step(scaling, cluster, **how):
    """The step of one GPU takes 1 s, of which the optimizer takes 0.1."""
    return scaling.predict(TINY, 1.0, 0.1, cluster, **({"devices": 2} | how))


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_data_by_hand(scaling, dtype, size):
    """Only the reductions of wte, wpe and the first block are exposed: 1 GB/s, factor 1."""
    found = step(scaling, links(scaling), strategy="data", reduce_dtype=dtype)
    end = size * (REST + MATRICES + VECTORS) / 1e9
    backward = size * (NORM + MATRICES + VECTORS) / 1e9
    assert found["compute_ms"] == 1000
    assert found["exposed_ms"] == pytest.approx(1e3 * end)
    assert found["may_overlap_ms"] == pytest.approx(1e3 * backward)
    assert found["step_ms"] == pytest.approx(1e3 * (1 + end))
    assert found["step_without_overlap_ms"] == pytest.approx(1e3 * (1 + end + backward))
    assert found["scaling"] == pytest.approx(1 / (1 + end))
    assert {row["bytes"] for row in found["collectives"]} == {
        size * (REST + MATRICES + VECTORS),
        size * (NORM + MATRICES + VECTORS),
    }


@pytest.mark.parametrize("devices", [2, 4])
def test_fsdp_by_hand(scaling, devices):
    """Each block's matrices are gathered twice in bf16 and their gradients reduced in fp32, at
    factor (n − 1)/n. The first block's first gather and its reduction are exposed."""
    found = step(scaling, links(scaling), strategy="fsdp", devices=devices)
    factor = {2: 1 / 2, 4: 3 / 4}[devices]
    gather, scatter = factor * 2 * MATRICES / 1e9, factor * 4 * MATRICES / 1e9
    exposed = gather + scatter + 2 * factor * 4 * (REST + VECTORS) / 1e9
    overlapped = gather + 2 * gather + scatter + 2 * factor * 4 * (VECTORS + NORM) / 1e9
    compute = 1 - 0.1 * (2 * MATRICES / TOTAL) * factor
    assert found["compute_ms"] == pytest.approx(1e3 * compute)
    assert found["exposed_ms"] == pytest.approx(1e3 * exposed)
    assert found["may_overlap_ms"] == pytest.approx(1e3 * overlapped)
    assert found["step_ms"] == pytest.approx(1e3 * (compute + exposed))


def test_zero1_gathers_each_matrix_once(scaling):
    by_strategy = {s: step(scaling, links(scaling), strategy=s) for s in ("zero1", "fsdp")}
    fsdp, zero1 = by_strategy["fsdp"], by_strategy["zero1"]
    second = 2 * 2 * MATRICES / 2e9
    assert fsdp["may_overlap_ms"] - zero1["may_overlap_ms"] == pytest.approx(1e3 * second)
    assert fsdp["exposed_ms"] == zero1["exposed_ms"]


def test_communication_that_exceeds_its_window_is_exposed(scaling):
    """The blocks' time without the first block, of which two thirds are the backward pass."""
    cluster = links(scaling, nvlink=1e6)
    found = step(scaling, cluster, strategy="data")
    head = 6 * 128 * 61 / TINY.flops_per_token(1024)
    window = 0.9 * (1 - head) / 2 * 2 / 3
    assert found["backward_window_ms"] == pytest.approx(1e3 * window)
    end = 4 * (REST + MATRICES + VECTORS) / 1e6
    backward = 4 * (NORM + MATRICES + VECTORS) / 1e6
    assert backward > window
    assert found["exposed_ms"] == pytest.approx(1e3 * (end + backward - window))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_gpu_predicts_the_compute_time_itself(scaling, strategy):
    found = step(scaling, links(scaling, latency=1.0), strategy=strategy, devices=1)
    assert found["step_ms"] == found["compute_ms"] == 1000
    assert found["scaling"] == 1 and found["collectives"] == []


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("devices", [2, 8, 64])
@pytest.mark.parametrize("wire", ["nvlink", "network"])
def test_more_bandwidth_never_predicts_a_longer_step(scaling, strategy, devices, wire):
    rates = [10.0**power for power in range(3, 13)]
    steps = [
        step(scaling, links(scaling, **{wire: rate}), strategy=strategy, devices=devices)["step_ms"]
        for rate in rates
    ]
    assert all(slower >= faster for slower, faster in itertools.pairwise(steps))
    if wire == "nvlink" or devices > 8:
        assert steps[0] > steps[-1]


def test_arrays_that_512_devices_do_not_divide_are_replicated(scaling):
    config = PRESETS["gpt2-xl"]
    shares = [
        scaling.predict(config, 1.0, 0.0, links(scaling), devices=n, strategy="fsdp")[
            "sharded_share"
        ]
        for n in (64, 512)
    ]
    assert shares[0] > 0.99 and shares[1] < 0.01


def test_a_batch_between_two_measured_ones_is_interpolated(scaling, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "STEPS", tmp_path)
    for batch, ms in ((24, 400.0), (36, 640.0)):
        rows = [{"system": "torch", "batch": batch, "ms": 1.0}]
        rows += [{"system": "gptjax", "batch": batch, "ms": ms}]
        rows += [{"system": "gptjax", "batch": batch, "error": "did not run"}]
        result = results.new("a command", rows, device="a GPU")
        results.write(tmp_path / f"{batch}.json", result)
    files = ("24.json", "36.json")
    for batch, ms in ((24, 400), (32, 560), (36, 640)):
        seconds = scaling.one_gpu_seconds(scaling.Case("gpt2-xl", batch, files))
        assert seconds == pytest.approx(1e-3 * ms)


def fitted(path, fits):
    row = {"collective": "all_reduce", "devices": 2, "dtype": "fp32", "bytes": 4096, "seconds": 1.0}
    results.write(path, results.new("a command", [row], device="a GPU", fits=fits))
    return path


def test_measured_constants_replace_the_assumptions(scaling, tmp_path):
    fits = [
        {
            "collective": kind,
            "dtype": dtype,
            "devices": devices,
            "latency_s": 1e-3 * devices,
            "bus_bytes_per_s": 1e9,
        }
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
        for dtype in ("fp32", "bf16")
        for devices in (2, 4)
    ]
    options = scaling.Options(collectives=fitted(tmp_path / "c.json", fits))
    cluster = scaling.cluster(options)
    assert cluster.seconds("all_reduce", "bf16", 1e9, 2) == pytest.approx(2e-3 + 1)
    assert cluster.seconds("all_reduce", "bf16", 1e9, 4) == pytest.approx(4e-3 + 1.5)
    # The latency of the largest number of devices, the factor of eight.
    assert cluster.seconds("all_reduce", "bf16", 1e9, 8) == pytest.approx(4e-3 + 1.75)
    assert scaling.assumptions(options).keys() == {"network_bytes_per_s", "network_latency_s"}
    fits[0]["bus_bytes_per_s"] = fits[1]["bus_bytes_per_s"] = None
    with pytest.raises(BenchError, match="no bandwidth of all_reduce in fp32"):
        scaling.cluster(scaling.Options(collectives=fitted(tmp_path / "c.json", fits)))


def test_the_command_writes_the_result_and_the_picture(scaling, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["scaling.py", "--given"])
    monkeypatch.setattr(scaling, "CASES", scaling.CASES[1:2])
    out, picture = tmp_path / "scaling.json", tmp_path / "scaling.png"
    scaling.main(scaling.Options(out=out, picture=picture))
    result = results.read(out)
    assert result["command"] == "python benchmarks/experiments/scaling.py --given"
    assert {(r["strategy"], r["devices"]) for r in result["rows"]} == {
        *itertools.product(STRATEGIES, (2, 4, 8, 64, 512))
    }
    assert result["compared"] and {row["batch"] for row in result["compared"]} == {4}
    assert picture.stat().st_size > 5000
    # tests/test_result_tables.py compares the tables of the page.
    tables = importlib.import_module("_scaling_report").TABLES
    assert all(table(result).count("| --- |") for table in tables.values())
