"""gptjax.bench step, ladder and compare on a tiny model: each row is the step that its name says,
failures are rows, and two files are compared."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from bench_tools import CARD, TINY
from reference.torch_gpt2 import TorchGPT2
from reference.torch_train import train

from gptjax import cli
from gptjax.bench import batch_size, configs, jax_step, ladder, measuring, step
from gptjax.bench.__main__ import main
from gptjax.bench.compare import compare
from gptjax.bench.errors import BenchError
from gptjax.bench.jax_step import JaxStep
from gptjax.bench.rows import first_line
from gptjax.bench.torch_gpt2 import How, TorchStep
from gptjax.models.gpt2 import PRESETS
from gptjax.precision import Precision
from gptjax.training.memory import GIB

# The fixture `card`.
pytest_plugins = ["bench_tools"]
# A model that is not GPT-2.
OTHER = Path(__file__).parents[1] / "examples" / "new_model" / "config.py"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(measuring, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(measuring, "REST_SECONDS", 0.0)
    monkeypatch.setattr(ladder, "SECONDS", 0.0)


# ----------------------------------------------------------------------------------- PyTorch's side


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_pytorchs_step_is_the_references(flash, fused):
    """Three steps from the same weights: loss, gradients (through the parameters), clip, decay and
    AdamW."""
    how = How(precision="fp32", compiled=False, flash=flash, padded=False, fused=fused)
    ours = TorchStep(TINY, how, batch=3, sequence_length=7, device="cpu")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in ours.model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    sizes = {
        name: getattr(TINY, name)
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
    }
    reference = TorchGPT2(**sizes)
    reference.load_state_dict(ours.model.state_dict())
    for model in (ours.loss, reference.loss):
        model(ours.tokens_BT, ours.targets_BT).backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in ours.model.named_parameters():
        np.testing.assert_allclose(parameter.grad, gradients[name], atol=2e-6, err_msg=name)
    ours.optimizer.zero_grad()
    expected = train(reference, [(ours.tokens_BT, ours.targets_BT)], [6e-4] * 3)
    found = [ours.step().item() for _ in range(3)]
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert found[0] - found[2] > 1e-3
    for (name, one), other in zip(
        ours.model.named_parameters(), reference.parameters(), strict=True
    ):
        # A bias of the keys changes no softmax: its gradient is rounding, which Adam makes as large
        # as any.
        parts = slice(None, TINY.n_embd) if name.endswith("c_attn.bias") else slice(None)
        np.testing.assert_allclose(
            one.detach()[parts], other.detach()[parts], atol=5e-6, err_msg=name
        )


def test_pytorchs_options():
    how = How(precision="bf16", compiled=False)
    ours = TorchStep(TINY, how, batch=1, sequence_length=4, device="cpu", forward=True)
    assert ours.model.wte.shape == (64, 16) and int(ours.tokens_BT.max()) < 61
    before = [p.detach().clone() for p in ours.model.parameters()]
    assert ours.run(2) > 0
    # forward alone
    assert all(torch.equal(a, b) for a, b in zip(before, ours.model.parameters(), strict=True))
    assert not ours.step().requires_grad
    trained = TorchStep(
        TINY,
        dataclasses.replace(how, fused=False),
        batch=1,
        sequence_length=4,
        device="cpu",
        like=ours,
    )
    assert trained.model is ours.model
    trained.run(1)
    assert not torch.equal(before[0], trained.model.wte)


def test_pytorch_gives_up_its_memory_where_it_must(monkeypatch):
    how = How(precision="fp32", compiled=False)
    theirs = TorchStep(TINY, how, batch=1, sequence_length=4, device="cpu")
    assert theirs.run(1) > 0
    theirs.device = "cuda"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 300)
    theirs.make_room(1000)
    theirs.peak = 1300
    assert theirs.model is not None and theirs.has_room()
    theirs.peak = 1301
    assert not theirs.has_room()
    theirs.peak = 1300
    theirs.make_room(1001)
    assert theirs.model is None and not theirs.has_room()


# ---------------------------------------------------------------------------------------- the rungs


def test_a_ladder_goes_from_plain_fp32_to_the_model_as_it_is():
    model = dataclasses.replace(PRESETS["gpt2"], recompute="block", precision=Precision("tf32"))
    found = list(ladder.rungs(model))
    assert [name for name, _, _ in found] == [
        *(
            "fp32, no jit",
            "jit",
            "TF32",
            "bf16",
            "flash attention",
            "padded vocabulary",
            "fused classifier",
        ),
        *("fused norms and MLP", "the rest", "FP8"),
    ]
    assert [jit for _, _, jit in found] == [False] + [True] * 9
    models = [model for _, model, _ in found]
    assert models[0] == models[1] and len(set(models[1:])) == 9
    assert models[0].padded_vocab_size == 50257 and models[0].attention == models[0].mlp == "xla"
    for last, name in zip(models[-2:], ("bf16", "fp8"), strict=True):
        assert last == dataclasses.replace(model, precision=Precision(name))
    # Without anything left for "the rest" there is none: no measurement comes twice.
    assert len(list(ladder.rungs(PRESETS["gpt2"]))) == 9


def test_another_architecture_has_the_rungs_that_change_it():
    names = [name for name, _, _ in ladder.rungs(cli.load(OTHER).model)]
    assert names == [
        *("fp32, no jit", "jit", "TF32", "bf16", "padded vocabulary", "fused classifier")
    ]


def test_pytorchs_ladder_goes_from_plain_fp32_to_all():
    hows = [how for _, how in ladder.torch_rungs(compiled=True, fp8=False)]
    assert len(set(hows)) == 7 and hows[-1] == How()
    assert not any(how.compiled for _, how in ladder.torch_rungs(compiled=False, fp8=True))


@pytest.mark.usefixtures("optax_promotion")
def test_every_rung_is_measured_and_one_that_fails_is_named(card, tmp_path, monkeypatch, capsys):
    rungs = ladder.rungs

    def with_one_that_fails(model):
        *others, last = rungs(model)
        yield from others
        yield "nowhere to run", dataclasses.replace(model, attention="triton"), True
        yield last

    monkeypatch.setattr(ladder, "rungs", with_one_that_fails)
    out, picture = tmp_path / "ladder.json", tmp_path / "ladder.png"
    command = [
        "ladder",
        "--config",
        card,
        "--batch",
        "2",
        "--no-torch",
        "--out",
        str(out),
        "--picture",
        str(picture),
    ]
    assert main(command) == 1
    said = capsys.readouterr()
    assert (
        "did not run:\ngptjax · nowhere to run · tiny" in said.err
        and "needs an NVIDIA GPU" in said.err
    )
    result = json.loads(out.read_text())
    rows = result["rows"]
    assert (
        result["command"].endswith("--batch 2 --no-torch")
        and result["device"] == jax.devices()[0].device_kind
    )
    assert [row["rung"] for row in rows if "error" in row] == ["nowhere to run"]
    measured = [row for row in rows if "ms" in row]
    assert len(measured) == 9 == len(rows) - 1
    for before, row in itertools.pairwise(measured):
        assert row["factor"] == pytest.approx(before["ms"] / row["ms"])
    assert measured[-1]["since_start"] == pytest.approx(measured[0]["ms"] / measured[-1]["ms"])
    assert all(row["tokens/s"] == pytest.approx(16 / row["ms"] * 1e3) for row in measured)
    assert picture.stat().st_size > 5000

    again = tmp_path / "again.png"
    assert main(["ladder", "--draw", str(out), "--picture", str(again)]) == 0
    assert again.stat().st_size == picture.stat().st_size
    assert main(["ladder", "--draw", str(out)]) == 1
    assert "--picture" in capsys.readouterr().err


def test_both_ladders_in_one_run(monkeypatch):
    """PyTorch's ladder on a CPU, where nothing is compiled; ours cut to nothing but a rung that
    fails."""
    nowhere = dataclasses.replace(TINY, attention="triton")
    monkeypatch.setattr(ladder, "rungs", lambda model: [("jit", nowhere, True)])
    base = configs.one_micro_batch(configs.base_config(None, None), 2, 8)
    climbed = list(
        ladder.climb(
            "tiny", dataclasses.replace(base, model=TINY), measuring.one_device(), torch=True
        )
    )
    assert [len(rows) for rows in climbed] == list(range(1, 9)), "after each rung all so far"
    rows = climbed[-1]
    assert [row["system"] for row in rows] == ["gptjax"] + ["torch"] * 7
    assert rows[-1]["precision"] == "fp8" and "FP8 matmuls" in rows[-1]["kernels"]
    assert "error" in rows[0] and all(row["ms"] > 0 for row in rows[1:])
    assert rows[-1]["since_start"] == pytest.approx(rows[1]["ms"] / rows[-1]["ms"])
    ladder.show(rows, measuring.one_device())


# ------------------------------------------------------------------------------------------- a step


@pytest.mark.usefixtures("optax_promotion")
def test_a_step_beside_pytorch(card, tmp_path, capsys):
    out = tmp_path / "step.json"
    command = [
        "step",
        "--config",
        card,
        "--batch",
        "1",
        "--norm",
        "xla",
        "--torch",
        "--seconds",
        "0.01",
    ]
    assert main([*command, "--out", str(out)]) == 0
    ours, theirs = json.loads(out.read_text())["rows"]
    assert (
        ours["asked"] == {"norm": "xla"}
        and ours["kernels"]["attention"] == "xla"
        and ours["batch"] == 1
    )
    assert ours["of_torch"] == pytest.approx(theirs["ms"] / ours["ms"])
    assert ours["needed_gib"] > 0 and ours["program"]["fusions"] > 10 and ours["compile_s"] > 0.05
    assert theirs["system"] == "torch" and "eager" in theirs["kernels"]
    assert "gptjax · tiny" in capsys.readouterr().out
    assert main(["compare", str(out), str(out), "--fail-above", "1.0"]) == 0


@pytest.mark.usefixtures("optax_promotion")
def test_a_step_with_moments_in_16_bits_needs_less_memory(card, tmp_path, capsys):
    out = tmp_path / "step.json"
    command = ["step", "--config", card, "--batch", "1", "--seconds", "0.01"]
    assert main([*command, "--moment-dtype", "fp32", "bf16", "--out", str(out)]) == 0
    plain, halved = json.loads(out.read_text())["rows"]
    assert "moments" not in plain and halved["moments"] == "bf16, bf16"
    assert plain["needed_gib"] > halved["needed_gib"]
    assert "moments bf16, bf16" in capsys.readouterr().out


def test_our_step_trains(card):
    """The program that is timed is the training step: it updates its state, from call to call."""
    config = configs.one_micro_batch(configs.base_config(None, None), 2, 8)
    config = dataclasses.replace(config, model=TINY)
    with jax.numpy_dtype_promotion("standard"):
        ours = JaxStep(config, measuring.one_device(), jit=False)
        ours.run(2)
    assert int(ours._state.step) == 2 and ours.compiled is None


def test_the_largest_forward_pass(card, tmp_path, monkeypatch, capsys):
    out, asked = tmp_path / "largest.json", []
    needed = {n: step.needed_bytes(_compiled(n)) for n in (20, 24)}
    for module in (step, jax_step):
        monkeypatch.setattr(
            module, "available_bytes", lambda device: asked.append(device) or needed[20] + 100
        )
    command = [
        "step",
        "--config",
        card,
        "--forward",
        "--largest",
        "--seconds",
        "0.01",
        "--out",
        str(out),
    ]
    assert main(command) == 0 and asked
    (row,) = json.loads(out.read_text())["rows"]
    assert needed[24] > needed[20] + 100
    assert row["batch"] == 20 and row["needed_gib"] * GIB == needed[20] and row["pass"] == "forward"
    monkeypatch.setattr(jax_step, "available_bytes", lambda device: 1000)
    assert main(["step", "--config", card, "--forward"]) == 1
    assert "nothing was allocated" in capsys.readouterr().err


def _compiled(batch):
    config = dataclasses.replace(
        configs.one_micro_batch(configs.base_config(None, None), batch, 8), model=TINY
    )
    ours = JaxStep(config, measuring.one_device(), forward=True)
    ours.compile()
    return ours.compiled


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 15, 16, 17, 40, 333])
@pytest.mark.parametrize("fixed", [0, 500, 20000])
def test_the_largest_batch_is_found_in_few_compilations(limit, fixed):
    asked = []

    def needs(batch):
        assert batch not in asked
        asked.append(batch)
        return fixed + 1000 * batch + 300 * min(batch, 16)  # logits grow up to a chunk

    available = fixed + 1000 * limit + 300 * min(limit, 16)
    assert batch_size.largest_batch(needs, available) == (
        limit if limit < 3 else 2 if limit == 3 else limit // 4 * 4
    )
    assert len(asked) <= 6


def test_the_largest_batch_is_found_if_two_batches_need_the_same_bytes():
    needs = lambda batch: 909 + 39 * (-(-batch // 16) * 16)
    assert batch_size.largest_batch(needs, 2618) == 32


def test_nothing_fits():
    with pytest.raises(BenchError, match="not one sequence fits"):
        batch_size.largest_batch(lambda batch: 10 * GIB * batch, GIB)


def test_rounds_follow_a_warm_up_and_fill_the_time(monkeypatch):
    monkeypatch.setattr(measuring, "WARM_UP_SECONDS", 1.0)
    calls = []
    found = measuring.sustained(lambda steps: calls.append(steps) or 0.1 * steps, seconds=3.0)
    assert calls == [1, 1, 10] + [6] * 5 and found == pytest.approx([0.1] * 5)


def test_turns_alternate_and_an_error_ends_its_own_side(monkeypatch):
    class Side:
        def __init__(self, name):
            self.name = name

        def run(self, steps):
            if self.name == "gptjax" and len(order) > 9:
                raise RuntimeError("out of memory\nand more")
            order.append(self.name)
            return 1.0 * steps

        def rest(self):
            order.append("rest")

        def has_room(self):
            return fits

        room = 7

        def make_room(self, needed):
            assert (self.name, needed) == ("torch", 7)
            order.append("makes room")

    order, fits = [], True
    sides = {"torch": Side("torch"), "gptjax": Side("gptjax")}
    found = measuring.take_turns(sides, seconds=1.0)
    assert [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name] == [
        "torch",
        "rest",
        "makes room",
        "gptjax",
        "torch",
        "rest",
    ]
    assert (
        found["torch"] == [1.0, 1.0]
        and first_line(found["gptjax"]) == "RuntimeError: out of memory"
    )
    # Nor does an error between two turns cost what was measured.
    order = []
    monkeypatch.setattr(Side, "make_room", lambda *_: 1 / 0)
    found = measuring.take_turns(sides, seconds=1.0)
    assert found["torch"] == [1.0, 1.0] and isinstance(found["gptjax"], ZeroDivisionError)
    monkeypatch.setattr(Side, "make_room", lambda *_: None)
    order, fits = [], False
    assert measuring.take_turns(sides, seconds=1.0) == {"torch": [1.0], "gptjax": [1.0]}


def test_launches_are_counted():
    text = """
  %fused_computation (p: f32[2]) -> f32[2] {
  }
ENTRY %main {
  %a = (f32[2], f32[3]) fusion(%p), kind=kLoop, calls=%fused_computation
  %b = f32[2] custom-call(%a), custom_call_target="__cublas$gemm", backend_config={}
  %c = f32[2] custom-call(%a), custom_call_target="__cublas$gemm"
  %d = f32[2] call(%b), to_apply=%command_buffer.1
}"""
    assert step.launches(text) == {
        "fusions": 1,
        "custom_calls": {"__cublas$gemm": 2},
        "command_buffers": 1,
    }


# ------------------------------------------------------------------------------------------ compare


def result(rows, **versions):
    rows = [{"system": "gptjax", "model": "gpt2", "batch": 4} | row for row in rows]
    return {
        "command": "c",
        "date": "d",
        "device": "a GPU",
        "versions": {"jax": "1"} | versions,
        "rows": rows,
    }


def test_two_results_beside_each_other(tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    rung = {"rung": "jit", "ms": 10.0}
    old = [
        rung | {"asked": {"attention": "xla"}},
        {"rung": "gone", "ms": 1.0},
        {"rung": "breaks", "ms": 1.0},
    ]
    new = [
        rung | {"ms": 10.6},
        {"rung": "breaks", "error": "out of memory"},
        {"rung": "came", "ms": 2.0},
    ]
    a.write_text(json.dumps(result(old)))
    b.write_text(json.dumps(result(new, torch="2")))
    assert main(["compare", str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert "1.060 ×" in said and said.count("absent") == 3 and "torch: absent → 2" in said
    assert main(["compare", str(a), str(b), "--fail-above", "1.05"]) == 1
    said = capsys.readouterr().err
    assert (
        "jit" in said
        and "1.060" in said
        and "breaks · gpt2 · 4: out of memory" in said
        and "came" not in said
    )
    assert "gone · gpt2 · 4: absent" in said
    a.write_text(json.dumps(result(old[:1])))
    b.write_text(json.dumps(result([new[0], new[2]])))
    assert main(["compare", str(a), str(b), "--fail-above", "1.07"]) == 0
    b.write_text(json.dumps(result([{"rung": "came", "ms": 2.0}])))
    assert main(["compare", str(a), str(b)]) == 1
    assert "no measured row in common" in capsys.readouterr().err
    b.write_text("{}")
    assert main(["compare", str(a), str(b)]) == 1
    assert "expected JSON of bench step" in capsys.readouterr().err


def test_steps_that_differ_in_an_option_are_not_the_same_row():
    row = {"system": "gptjax", "ms": 1.0, "asked": {"attention": "xla"}}
    found = compare([row], [row | {"asked": {}, "ms": 2.0}, row | {"ms": 3.0}])
    assert [r.get("ratio") for r in found] == [3.0, None]


def test_contradictions(card, capsys):
    for command, word in (
        (["step", "--config", card, "--preset", "gpt2"], "both name a model"),
        (["step", "--batch", "4", "--largest"], "give one of them"),
        (["step", "--config", str(OTHER), "--torch"], "PyTorch's models are those of"),
        (["step", "--config", str(OTHER), "--mlp", "xla"], "RotaryConfig has no option mlp"),
        (["step", "--forward", "--recompute", "block"], "no backward pass"),
        (
            ["step", "--config", card, "--sequence-length", "16"],
            "longer than the model's block size",
        ),
    ):
        assert main(command) == 1
        assert word in capsys.readouterr().err


def test_several_devices(tmp_path, capsys):
    card, out = tmp_path / "card.py", tmp_path / "several.json"
    card.write_text(CARD)
    command = f"step --config {card} --seconds 0.01 --devices 1 2 --parallel data fsdp"
    assert main([*command.split(), "--reduce-dtype", "bf16", "--out", str(out)]) == 0
    assert "2 devices · fsdp · bf16" in capsys.readouterr().out
    one, data, fsdp = json.loads(out.read_text())["rows"]
    assert "parallel" not in one and (data["parallel"], fsdp["parallel"]) == ("data", "fsdp")
    assert data["scaling"] == data["tokens/s"] / (2 * one["tokens/s"])
    assert main(["step", "--config", str(card), "--devices", "3"]) == 1
    assert "--devices 3: expected 1 to 2" in capsys.readouterr().err
