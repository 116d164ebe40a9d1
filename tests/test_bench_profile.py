"""gptjax.bench profile: the part of each kernel, the sums of a trace, and a real trace of a small
program on the CPU."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from gptjax.bench import profile
from gptjax.bench.__main__ import main
from gptjax.bench.errors import BenchError
from gptjax.bench.hlo import Place, places
from gptjax.bench.jax_step import JaxStep
from gptjax.bench.trace import (
    Kernel,
    exposed_ns,
    kernels,
    newest_xplane,
    summary,
)

# As XLA writes a scheduled module for a GPU, cut to one instruction of each kind.
HLO = (Path(__file__).parent / "data/scheduled_module.hlo").read_text()


def test_where_an_instruction_comes_from():
    found = places(HLO)
    expected = {
        "gather.1": Place("embedding", "forward", "gather", matmul=False),
        "fusion.2": Place("copies, casts", "forward", "transpose", matmul=False),
        "cublas-gemm.1": Place("attention", "forward", "dot_general", matmul=True),
        "custom-call.7": Place("attention", "backward", "mosaic_gpu_p", matmul=False),
        "gemm_fusion_dot.3": Place("MLP", "recomputed", "dot_general", matmul=True),
        # Of its instructions two are the norm's, one the MLP's, and the last one nobody's.
        "fusion.5": Place("norm, residual", "backward", "add_any", matmul=False),
        "copy.11": Place("copies, casts", "backward", "dot_general", matmul=False),
        # The innermost scope of the first of two op_names.
        "reduce.4": Place("norm, residual", "forward", "reduce_sum", matmul=False),
        "fusion.9": Place("optimizer, clip", "update", "div", matmul=False),
    }
    assert {name: found[name] for name in expected} == expected


def test_a_forward_pass_has_no_optimizer():
    root = 'ROOT %sine = f32[] sine(%x), metadata={op_name="jit(eval_step)/sin"}'
    text = f"ENTRY %main (x: f32[]) -> f32[] {{\n  {root}\n}}"
    assert places(text) == {"sine": Place("other", "forward", "sin", matmul=False)}


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
    assert [k.name for k in found] == [
        *(
            "loop_gather_fusion_1",
            "nvjet_hsh_128x256",
            "nvjet_hsh_128x256",
            "kernel_mosaic_gpu",
            "MemcpyD2D",
            "MemcpyH2D",
        ),
        *("loop_adam_fusion.3_2", "loop_adam_fusion_7"),
    ]
    assert found[0] == Kernel(
        "loop_gather_fusion_1", "gather.1", "jvp(embedding)/gather", 1000, 500
    )
    assert found[5].hlo_op == found[5].op_name == ""


def test_a_trace_adds_up():
    found = summary(kernels(gpu_planes(), "jit_train_step"), places(HLO))
    # From 1000 to 14000 ns; nothing ran for 500 + 1000 + 1500; MemcpyD2D began 1000 before the
    # kernel beside it ended.
    assert found["span_ms"] == pytest.approx(0.013)
    assert found["idle_ms"] == pytest.approx(0.003)
    assert found["busy_ms"] == pytest.approx(0.010)
    assert found["kernel_ms"] == pytest.approx(0.011)
    assert [tuple(row.values()) for row in found["parts"]] == [
        ("embedding", "forward", pytest.approx(0.0005), 0, 1),
        ("attention", "forward", pytest.approx(0.003), pytest.approx(0.003), 2),
        ("attention", "backward", pytest.approx(0.003), 0, 1),
        ("optimizer, clip", "update", pytest.approx(0.002), 0, 2),
        ("copies, casts", "backward", pytest.approx(0.002), 0, 1),
        ("other", "forward", pytest.approx(0.0005), 0, 1),
    ]
    longest = found["kernels"][0]
    assert (longest["name"], longest["calls"], longest["matmul"]) == ("nvjet_hsh_128x256", 2, True)
    adam = [row for row in found["kernels"] if row["part"] == "optimizer, clip"]
    assert [(row["name"], row["calls"]) for row in adam] == [("loop_adam_fusion", 2)]
    assert found["gaps"][0] == {"us": 1.5, "after": "MemcpyH2D", "before": "loop_adam_fusion"}
    assert [gap["us"] for gap in found["gaps"]] == [1.5, 1.0, 0.5]


def test_a_loop_does_not_count_what_is_inside_it_again():
    inside = [Kernel("while", "while.1", "", 0, 100), Kernel("loop_fusion", "fusion.9", "", 10, 50)]
    found = summary(inside, places(HLO))
    assert found["kernel_ms"] == pytest.approx(50e-6)


def test_an_instruction_that_the_text_does_not_have_is_where_the_trace_says():
    found = summary([Kernel("late", "fusion.99", "transpose(jvp(mlp))/mul", 0, 1000)], places(HLO))
    assert [(row["part"], row["pass"]) for row in found["parts"]] == [("MLP", "backward")]


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
    assert exposed_ns(launched) == (120 - 100) + (230 - 150) + 20
    assert exposed_ns([k for k in launched if not k.communicates]) == 0
    found = summary(launched, places(HLO))
    assert found["exposed_ms"] == pytest.approx(120e-6)
    rows = [row for row in found["parts"] if row["part"] == "communication"]
    assert sum(row["ms"] for row in rows) == pytest.approx(210e-6)
    assert sum(row["calls"] for row in rows) == 3
    assert "MLP" not in {row["part"] for row in found["parts"]}


def test_a_trace_of_another_form_is_an_error():
    planes = [
        SimpleNamespace(name="/device:GPU:0", lines=[line("Queue 1", ("k", 0, 1, of("gather.1")))])
    ]
    with pytest.raises(BenchError, match=r"expected lines named Stream.*found \['Queue 1'\]"):
        kernels(planes, "jit_train_step")


def test_an_empty_trace_is_an_error(tmp_path):
    with pytest.raises(BenchError, match="no kernels of the step"):
        summary(kernels(gpu_planes(), "jit_eval_step")[1:], {})
    with pytest.raises(BenchError, match="wrote no trace in"):
        newest_xplane(tmp_path)


class SmallStep(JaxStep):
    """A product, an activation and an update, in place of the model's."""

    def __init__(self):
        self.runs = []

    def compile(self):
        def train_step(w_CC, x_NC):
            def loss(w_CC):
                with jax.named_scope("mlp"):
                    h_NC = jnp.tanh(x_NC @ w_CC)
                with jax.named_scope("norm"):
                    return jnp.square(h_NC - h_NC.mean(-1, keepdims=True)).sum()

            return w_CC - 0.1 * jnp.sign(jax.grad(loss)(w_CC))

        self.args = jnp.ones((256, 256)), jnp.ones((512, 256))
        self.compiled = jax.jit(train_step).lower(*self.args).compile()

    def check_memory(self):
        pass

    def run(self, steps):
        self.runs.append(steps)
        for _ in range(steps):
            jax.block_until_ready(self.compiled(*self.args))
        return 0.5 * steps


def test_a_real_trace(tmp_path):
    small = SmallStep()
    found = profile.trace(small, tmp_path)
    assert small.runs == [profile.WARM_UP, profile.TIMED, 1, 1] and found["untraced_ms"] == 500
    parts = {(row["part"], row["pass"]): row for row in found["parts"]}
    assert parts["MLP", "forward"]["matmul_ms"] > 0 and parts["MLP", "backward"]["matmul_ms"] > 0
    assert ("norm, residual", "forward") in parts and ("optimizer, clip", "update") in parts
    assert found["kernel_ms"] == pytest.approx(sum(row["ms"] for row in found["kernels"]))
    # Whose a kernel is, is known of all but a few.
    assert (
        sum(row["ms"] for row in found["parts"] if row["part"] == "other")
        < 0.2 * found["kernel_ms"]
    )
    assert (
        found["trace"].endswith(".trace.json.gz")
        and len(list(tmp_path.glob("plugins/profile/*/*.trace.json.gz"))) == 1
    )


@pytest.fixture
def cache_settings():
    """JAX's own settings again afterwards."""
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


@pytest.mark.usefixtures("optax_promotion", "cache_settings")
def test_the_command(tmp_path, monkeypatch, capsys):
    """On the model itself: every part is found, and what was asked for is what runs."""
    monkeypatch.setattr(profile, "TIMED", 1)
    card = tmp_path / "card.py"
    card.write_text(
        "from gptjax.config import Config\nfrom gptjax.models.gpt2 import GPT2Config\n"
        "model = GPT2Config(vocab_size=250, padded_vocab_size=256, block_size=64, n_layer=1, "
        "n_head=2, n_embd=64)\n"
        "config = Config(model=model, sequence_length=64, batch_tokens=256, micro_batch=4)\n"
    )
    out = tmp_path / "profile"
    assert (
        main(
            [
                "profile",
                "--out",
                str(out),
                "--config",
                str(card),
                "--batch",
                "2",
                "--recompute",
                "block",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert (
        "card · fp32 · 2 × 64 · block" in shown and "idle" in shown and "ui.perfetto.dev" in shown
    )
    (row,) = json.loads((out / "profile.json").read_text())["rows"]
    passes = {(r["part"], r["pass"]) for r in row["parts"]}
    for part in ("norm, residual", "attention", "MLP"):
        assert {(part, "forward"), (part, "recomputed"), (part, "backward")} <= passes
    assert {
        ("embedding", "forward"),
        ("embedding", "backward"),
        ("optimizer, clip", "update"),
    } <= passes
    assert {("head, loss", "forward"), ("head, loss", "backward")} <= passes
    known = sum(r["ms"] for r in row["parts"] if r["part"] != "other")
    assert known > 0.9 * row["kernel_ms"]
    assert (out / "profile.png").stat().st_size > 10_000


@pytest.mark.usefixtures("optax_promotion", "cache_settings")
def test_two_devices(tmp_path, monkeypatch, capsys):
    """On a CPU XLA replaces a reduce-scatter by an all-reduce and a slice."""
    monkeypatch.setattr(profile, "TIMED", 1)
    card = tmp_path / "card.py"
    card.write_text(
        "from gptjax.config import Config\nfrom gptjax.models.gpt2 import GPT2Config\n"
        "model = GPT2Config(vocab_size=250, padded_vocab_size=256, block_size=64, n_layer=1, "
        "n_head=2, n_embd=64)\n"
        "config = Config(model=model, sequence_length=64, batch_tokens=128, micro_batch=2)\n"
    )
    command = ["profile", "--out", str(tmp_path / "profile"), "--config", str(card)]
    assert main([*command, "--devices", "2", "--parallel", "fsdp"]) == 0
    shown = capsys.readouterr().out
    assert "2 devices · fsdp" in shown and "communication" in shown
    (row,) = json.loads((tmp_path / "profile/profile.json").read_text())["rows"]
    collectives = {r["name"] for r in row["kernels"] if r["part"] == "communication"}
    assert {"all-gather", "all-reduce"} <= collectives
    assert main([*command, "--devices", "3"]) == 1
    assert "--devices 3: expected 1 to 2" in capsys.readouterr().err
