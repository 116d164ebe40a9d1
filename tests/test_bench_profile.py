"""gptjax.bench profile: the part of each kernel, the sums of a trace, and real traces on the
CPU."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from gptjax import parallel
from gptjax.bench import BenchError, profile
from gptjax.bench.__main__ import main
from gptjax.bench.hlo import Place, places
from gptjax.bench.profile import Kernel, kernels, summary

# As XLA writes a scheduled module for a GPU, cut to one instruction of each kind.
HLO = (Path(__file__).parent / "data/scheduled_module.hlo").read_text()


def test_where_an_instruction_comes_from():
    found = places(HLO)
    expected = {
        "gather.1": Place("embedding", "forward", "gather"),
        "fusion.2": Place("copies, casts", "forward", "transpose"),
        "cublas-gemm.1": Place("attention", "forward", "dot_general"),
        "custom-call.7": Place("attention", "backward", "mosaic_gpu_p"),
        "gemm_fusion_dot.3": Place("MLP", "recomputed", "dot_general"),
        # The last of its instructions that has a scope is the MLP's.
        "fusion.5": Place("MLP", "backward", "add_any"),
        "copy.11": Place("copies, casts", "backward", "dot_general"),
        # The innermost scope of the first of two op_names.
        "reduce.4": Place("norm, residual", "forward", "reduce_sum"),
        "fusion.9": Place("optimizer, clip", "update", "div"),
    }
    assert {name: found[name] for name in expected} == expected


def test_a_forward_pass_has_no_optimizer():
    root = 'ROOT %sine = f32[] sine(%x), metadata={op_name="jit(eval_step)/sin"}'
    text = f"ENTRY %main (x: f32[]) -> f32[] {{\n  {root}\n}}"
    assert places(text) == {"sine": Place("other", "forward", "sin")}


def line(name, *events):
    made = [
        SimpleNamespace(name=n, start_ns=s, duration_ns=d, stats=list(stats.items()))
        for n, s, d, stats in events
    ]
    return SimpleNamespace(name=name, events=made)


def of(hlo_op, module="jit_train_step", **more):
    return {"hlo_op": hlo_op, "hlo_module": module, "correlation_id": 7} | more


def gpu_planes():
    """An H200's trace: two streams, sums over them, and the host."""
    first = line(
        "Stream #13(Compute)",
        ("loop_gather_fusion_1", 1000, 500, of("gather.1", name="jvp(embedding)/gather")),
        ("nvjet_hsh_128x256", 1500, 2000, of("cublas-gemm.1")),
        ("nvjet_hsh_128x256", 4000, 1000, of("cublas-gemm.1")),
        ("kernel_mosaic_gpu", 6000, 3000, of("custom-call.7")),
        ("other_program", 7000, 100, of("fusion.9", "jit_init")),
    )
    second = line(
        "Stream #14(MemcpyD2D)",
        ("MemcpyD2D", 8000, 2000, of("copy.11")),
        ("MemcpyH2D", 10000, 500, {"correlation_id": 8}),
        ("loop_adam_fusion.3_2", 12000, 1000, of("fusion.9")),
        ("loop_adam_fusion_7", 13000, 1000, of("fusion.9")),
    )
    ops = line("XLA Ops", ("fusion.9", 12000, 2000, of("fusion.9")))
    return [
        SimpleNamespace(name="/host:CPU", lines=[line("main", ("launch", 0, 99, of("gather.1")))]),
        SimpleNamespace(name="/device:GPU:0", lines=[first, second, ops]),
        SimpleNamespace(
            name="/device:GPU:1", lines=[line("Stream #1", ("elsewhere", 0, 10**6, of("gather.1")))]
        ),
    ]


def test_the_kernels_of_a_gpu_are_those_of_its_streams():
    found = kernels(gpu_planes(), "jit_train_step")
    names = ["loop_gather_fusion_1", "nvjet_hsh_128x256", "nvjet_hsh_128x256", "kernel_mosaic_gpu"]
    names += ["MemcpyD2D", "MemcpyH2D", "loop_adam_fusion.3_2", "loop_adam_fusion_7"]
    assert [k.name for k in found] == names
    assert found[0] == Kernel(names[0], "gather.1", "jvp(embedding)/gather", 1000, 500)
    assert found[5].hlo_op == found[5].op_name == ""


def test_a_trace_adds_up():
    found = summary(kernels(gpu_planes(), "jit_train_step"), places(HLO))
    # From 1000 to 14000 ns; nothing ran for 500 + 1000 + 1500; MemcpyD2D began 1000 before the
    # kernel beside it ended.
    assert found["span_ms"] == pytest.approx(0.013)
    assert found["idle_ms"] == pytest.approx(0.003)
    assert found["kernel_ms"] == pytest.approx(0.011)
    assert [tuple(row.values()) for row in found["parts"]] == [
        ("embedding", "forward", pytest.approx(0.0005), 1),
        ("attention", "forward", pytest.approx(0.003), 2),
        ("attention", "backward", pytest.approx(0.003), 1),
        ("optimizer, clip", "update", pytest.approx(0.002), 2),
        ("copies, casts", "backward", pytest.approx(0.002), 1),
        ("other", "forward", pytest.approx(0.0005), 1),
    ]
    longest = found["kernels"][0]
    assert (longest["name"], longest["calls"]) == ("nvjet_hsh_128x256", 2)
    adam = [row for row in found["kernels"] if row["part"] == "optimizer, clip"]
    assert [(row["name"], row["calls"]) for row in adam] == [("loop_adam_fusion", 2)]


def test_a_loop_is_not_counted_again_and_an_unknown_instruction_is_where_the_trace_says():
    inside = [Kernel("while", "while.1", "", 0, 100), Kernel("loop_fusion", "fusion.9", "", 10, 50)]
    assert summary(inside, places(HLO))["kernel_ms"] == pytest.approx(50e-6)
    found = summary([Kernel("late", "fusion.99", "transpose(jvp(mlp))/mul", 0, 1000)], places(HLO))
    assert [(row["part"], row["pass"]) for row in found["parts"]] == [("MLP", "backward")]
    with pytest.raises(BenchError, match="no kernels of the step"):
        summary(kernels(gpu_planes(), "jit_eval_step")[1:], {})


def test_communication_is_exposed_while_nothing_else_runs():
    """Two streams of one device; times in ns."""
    launched = [
        Kernel("nvjet", "cublas-gemm.1", "", 0, 100),
        Kernel("ncclDevKernel_AllGather_RING_LL(args)", "all-gather-start.1", "", 50, 150),
        Kernel("fusion", "fusion.9", "", 120, 30),  # inside: exposed before and after
        Kernel("ncclDevKernel_AllReduce", "custom.1", "", 190, 40),  # 10 at the same time
        Kernel("AllReduceKernelImpl", "all-reduce-start", "jvp(mlp)/psum", 300, 20),
        Kernel("late", "fusion.9", "", 320, 10),
    ]
    found = summary(launched, places(HLO))
    assert found["exposed_ms"] == pytest.approx(1e-6 * ((120 - 100) + (230 - 150) + 20))
    rows = [row for row in found["parts"] if row["part"] == "communication"]
    assert sum(row["ms"] for row in rows) == pytest.approx(210e-6)
    assert sum(row["calls"] for row in rows) == 3
    assert "MLP" not in {row["part"] for row in found["parts"]}


@pytest.fixture
def cache_settings():
    """JAX's own settings again afterwards."""
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(profile, "TIMED", 1)


@pytest.mark.usefixtures("optax_promotion", "cache_settings")
def test_the_command(card, tmp_path, capsys):
    """On the model itself: every part is found, and what was asked for is what runs."""
    out = tmp_path / "profile"
    assert main(["profile", "--out", str(out), "--config", card, "--recompute", "block"]) == 0
    shown = capsys.readouterr().out
    assert "tiny · fp32 · 2 × 8 · block" in shown and "idle" in shown
    (row,) = json.loads((out / "profile.json").read_text())["rows"]
    passes = {(r["part"], r["pass"]) for r in row["parts"]}
    for part in ("norm, residual", "attention", "MLP"):
        assert {(part, "forward"), (part, "recomputed"), (part, "backward")} <= passes
    for part in ("embedding", "head, loss"):
        assert {(part, "forward"), (part, "backward")} <= passes
    assert ("optimizer, clip", "update") in passes
    assert sum(r["ms"] for r in row["parts"]) == pytest.approx(row["kernel_ms"])
    # Launches, not their times: a busy machine may interrupt any of them.
    known = sum(r["calls"] for r in row["parts"] if r["part"] != "other")
    assert known > 0.9 * sum(r["calls"] for r in row["parts"])
    assert row["kernel_ms"] == pytest.approx(sum(each["ms"] for each in row["kernels"]))
    (trace,) = out.glob("plugins/profile/*/*.trace.json.gz")
    assert row["trace"] == str(trace)


@pytest.mark.usefixtures("optax_promotion", "cache_settings")
def test_two_devices(card, tmp_path, monkeypatch, capsys):
    """On a CPU XLA replaces a reduce-scatter by an all-reduce and a slice."""
    monkeypatch.setattr(parallel, "SMALLEST_SHARDED", 64)
    command = ["profile", "--out", str(tmp_path / "profile"), "--config", card]
    assert main([*command, "--devices", "2", "--parallel", "fsdp"]) == 0
    assert "2 devices · fsdp" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "profile/profile.json").read_text())["rows"]
    collectives = {r["name"] for r in row["kernels"] if r["part"] == "communication"}
    assert {"all-gather", "all-reduce"} <= collectives
    assert main([*command, "--devices", "3"]) == 1
    assert "--devices 3: expected 1 to 2" in capsys.readouterr().err
