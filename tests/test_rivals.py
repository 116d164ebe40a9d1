"""benchmarks/rivals: PyTorch's step is the reference's, on one device and several; llm.c and
transformers run what the config says; two programs take turns."""

import dataclasses
import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import generate
import jax
import ladder
import llmc_side
import numpy as np
import pytest
import step
import torch
import torch_fp8
import torch_side
import torch_worker
import turns
from bench_tools import TINY
from llmc_side import LlmcStep, find_program, why_no_llmc
from reference.torch_gpt2 import TorchGPT2
from reference.torch_train import train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_generate import TorchGeneration
from torch_gpt2 import How, TorchStep
from torch_several import Spec, TorchSeveral

from gptjax import load_llmc
from gptjax.bench import BenchError, harness, results
from gptjax.bench import __main__ as bench
from gptjax.config import Config
from gptjax.data.shards import open_shard
from gptjax.models.gpt2 import GPT2Config
from gptjax.models.llama3 import Llama3Config
from gptjax.optim import switch_algorithm
from gptjax.precision import Precision
from gptjax.terminal import first_line


def run(script, *options):
    """Run a script of benchmarks/rivals in this process; return its exit code."""
    commands = generate.Generate if script is generate else script.Beside
    return bench.main([*map(str, options)], commands, prog="rival")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(harness, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(turns, "REST_SECONDS", 0.0)
    monkeypatch.setattr(turns, "TURNS", 1)
    monkeypatch.setattr(ladder, "SECONDS", 0.0)
    monkeypatch.setattr(generate, "FIRST_TOKENS", 1)


# --------------------------------------------------------------------------------- PyTorch's step


@pytest.mark.parametrize("flash, fused", [(True, True), (False, False)])
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


def test_a_forward_pass_alone_trains_nothing():
    how = How(precision="bf16", compiled=False)
    sizes = {"batch": 1, "sequence_length": 4, "device": "cpu"}
    ours = TorchStep(TINY, how, forward=True, **sizes)
    assert ours.model.wte.shape == (64, 16) and int(ours.tokens_BT.max()) < 61
    before = [p.detach().clone() for p in ours.model.parameters()]
    assert ours.run(2) > 0 and not ours.step().requires_grad
    assert all(torch.equal(a, b) for a, b in zip(before, ours.model.parameters(), strict=True))
    trained = TorchStep(TINY, dataclasses.replace(how, fused=False), like=ours, **sizes)
    trained.run(1)
    assert trained.model is ours.model and not torch.equal(before[0], trained.model.wte)


LLAMA = Llama3Config(
    vocab_size=61, padded_vocab_size=64, block_size=8, n_layer=2, n_head=2, n_kv_head=1, n_embd=32
)


class Matmuls(TorchDispatchMode):
    """Count PyTorch's matmuls while active."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name == "_scaled_mm":
            fast = (*args[7:], (kwargs or {}).get("use_fast_accum", False))[0]
            name += " fast" if fast else " slow"
        if name.startswith("_scaled_mm") or name in ("mm", "addmm", "linear"):
            self.calls[name] += 1
        return function(*args, **kwargs or {})


def rounded(x, dtype):
    inverse = x.abs().max().float() / torch.finfo(dtype).max
    return (x.float() / inverse).to(dtype).double() * inverse.double()


def test_a_linear_layer():
    """y, dx, dw and db are those of operands rounded to FP8, rounded to bf16."""
    torch.manual_seed(0)
    layer = torch_fp8.Linear(32, 48)
    x = torch.randn(2, 16, 32, requires_grad=True)
    dy = torch.randn(2, 16, 48).mul(1e-6).to(torch.bfloat16)
    y = layer(x)
    assert y.dtype == torch.bfloat16 and y.shape == (2, 16, 48)
    y.backward(dy)
    (w, b), (e4m3, e5m2) = layer.parameters(), (torch_fp8.E4M3, torch_fp8.E5M2)
    xq, wq, dyq = (rounded(a, d) for a, d in ((x.detach(), e4m3), (w.detach(), e4m3), (dy, e5m2)))
    right = {
        "y": (y, xq @ wq.T + b.double()),
        "dx": (x.grad, dyq @ wq),
        "dw": (w.grad, dyq.flatten(0, 1).T @ xq.flatten(0, 1)),
        "db": (b.grad, dy.double().sum((0, 1))),
    }
    for name, (found, expected) in right.items():
        error = (found.double() - expected).norm() / expected.norm()
        assert error < 0.004, f"{name}: relative error {error:.3g}"
    # Unlike those of the arrays themselves.
    error = (y.double() - (x.double() @ w.double().T + b)).norm() / y.double().norm()
    assert 0.01 < error < 0.06


@pytest.mark.parametrize("model, precision", [(TINY, "fp8"), (LLAMA, "fp8"), (LLAMA, "fp8_head")])
def test_every_linear_layer_is_in_fp8(model, precision):
    """Three matmuls of each layer, the first with fast sums; the loss of bf16, nearly."""
    model = dataclasses.replace(model, n_embd=32)
    steps = {
        name: TorchStep(
            model, How(precision=name, compiled=False), batch=4, sequence_length=8, device="cpu"
        )
        for name in ("bf16", precision)
    }
    with torch.no_grad():
        for ours, theirs in zip(*(step.model.parameters() for step in steps.values()), strict=True):
            ours.add_(0.1 * torch.randn_like(ours))
            theirs.copy_(ours)
    with Matmuls() as counted:
        loss = steps[precision].step().item()
    layers = sum(isinstance(module, nn.Linear) for module in steps[precision].model.modules())
    assert layers == 4 * model.n_layer
    in_fp8 = 1 + (layers if precision == "fp8" else 0)
    assert counted.calls["_scaled_mm fast"] == in_fp8
    assert counted.calls["_scaled_mm slow"] == 2 * in_fp8
    others = sum(n for name, n in counted.calls.items() if name in ("mm", "addmm", "linear"))
    assert others == 3 * (layers + 1 - in_fp8), counted.calls
    expected = steps["bf16"].step().item()
    assert 0 < abs(loss - expected) < 0.02 * expected
    grown = [p.detach().norm().item() for p in steps[precision].model.parameters()]
    assert np.isfinite(grown).all()


def test_precision_and_strategy_of_pytorch_are_the_configs():
    """Not bf16 under the name of FP8; FSDP2 keeps the gathered parameters for zero1, and gathers
    them again for fsdp."""
    expected = {"bf16_residual_fp32": "bf16", "fp8_head": "fp8_head", "fp8": "fp8", "tf32": "tf32"}
    for name, theirs in expected.items():
        how = torch_side.how_of(config_of(MODEL, name), harness.one_device())
        assert how.precision == theirs
        assert ("FP8" in str(how)) == ("fp8" in theirs) and how.autocast == (theirs != "tf32")
    expected = {"data": ("ddp", None), "zero1": ("fsdp2", False), "fsdp": ("fsdp2", True)}
    for ours, theirs in expected.items():
        config, device = config_of(MODEL, parallel=ours), harness.one_device()
        several = torch_side.torch_several(config, How(), device, 2, forward=False)
        fields = several.spec.fields()
        assert (fields["parallel"], fields.get("reshard_after_forward")) == theirs


# ---------------------------------------------------------------------------- a ladder, and turns


@pytest.mark.usefixtures("optax_promotion")
def test_pytorchs_ladder(card, tmp_path):
    """On a CPU, where nothing is compiled. Its rows follow gptjax's."""
    hows = dict(ladder.rungs(compiled=True, fp8=True))
    assert len(set(hows.values())) == 8 and hows["fused AdamW"] == How()
    assert hows["FP8"] == How(precision="fp8")
    assert ladder.same_model(hows["FP8"]) != ladder.same_model(hows["fused AdamW"])
    assert ladder.same_model(hows["bf16 autocast"]) == ladder.same_model(hows["TF32"])
    ours, out = tmp_path / "ours.json", tmp_path / "both.json"
    row = {"system": "gptjax", "rung": "jit", "model": "tiny", "precision": "fp32", "pass": "train"}
    row |= {"batch": 2, "sequence_length": 8, "error": "none"}
    results.write(ours, results.new("python -m gptjax.bench ladder", [row], device="cpu"))
    assert run(ladder, ours, "--config", card, "--out", out) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["system"] for row in rows] == ["gptjax"] + ["torch"] * 7
    assert rows[-1]["precision"] == "fp8" and "FP8 matmuls" in rows[-1]["kernels"]
    assert rows[-1]["since_start"] == pytest.approx(rows[1]["ms"] / rows[-1]["ms"])


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

        def make_room(self, needed):
            assert (self.name, needed) == ("torch", 7)
            order.append("makes room")

    monkeypatch.setattr(turns, "TURNS", 2)
    monkeypatch.setattr(turns, "room", lambda step: 7)
    order, fits = [], True
    sides = {"torch": Side("torch"), "gptjax": Side("gptjax")}
    found = turns.take_turns(sides, seconds=1.0)
    changes = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert changes == ["torch", "rest", "makes room", "gptjax", "torch", "rest"]
    assert found["torch"] == [1.0, 1.0]
    assert first_line(found["gptjax"]) == "RuntimeError: out of memory"
    monkeypatch.setattr(Side, "make_room", lambda *_: None)
    order, fits = [], False
    assert turns.take_turns(sides, seconds=1.0) == {"torch": [1.0], "gptjax": [1.0]}


@pytest.mark.usefixtures("optax_promotion")
def test_a_step_beside_pytorch(card, tmp_path):
    out = tmp_path / "step.json"
    options = ("--config", card, "--batch", 1, "--seconds", 0.01, "--out", out)
    assert run(step, *options) == 0
    result = json.loads(out.read_text())
    ours, theirs = result["rows"]
    assert result["command"].startswith("python benchmarks/rivals/step.py")
    assert ours["asked"] == {"norm": "xla"} and ours["batch"] == 1
    assert ours["of_torch"] == pytest.approx(theirs["ms"] / ours["ms"])
    assert theirs["system"] == "torch" and "eager" in theirs["kernels"]
    with pytest.raises(BenchError, match="one micro-batch"):
        step.Beside(config=Path(card), micro_batches=2).configs()


# -------------------------------------------------------------------------------- several devices


SPEC = Spec(
    model=TINY,
    how=How(precision="fp32", compiled=False),
    strategy="ddp",
    devices=2,
    batch=2,
    sequence_length=8,
    device="cpu",
)


@pytest.mark.parametrize(("strategy", "reshard"), [("ddp", True), ("fsdp2", False)])
def test_the_step_is_that_of_one_process_on_the_whole_batch(strategy, reshard):
    """The loss of the fourth step: the gradients, the clip and the update are the same, too."""
    one = TorchStep(TINY, SPEC.how, batch=4, sequence_length=8, device="cpu")
    torch.manual_seed(0)
    torch_worker.fill(one.model, "cpu")
    expected = [one.step().item() for _ in range(4)]
    spec = dataclasses.replace(SPEC, strategy=strategy, reshard_after_forward=reshard)
    several = TorchSeveral(spec)
    assert several.run(4) > 0
    np.testing.assert_allclose(several.loss, expected[3], rtol=5e-7)
    assert expected[0] - several.loss > 0.05
    assert several.peak is None and several.has_room()


def test_a_process_that_fails_ends_all():
    several = TorchSeveral(dataclasses.replace(SPEC, sequence_length=9))
    with pytest.raises(BenchError, match=r"process [01] of 2: RuntimeError: The size of tensor a"):
        several.rounds(0.0)


# ------------------------------------------------------------------------------------------ llm.c


PLAYER = """
import json, shutil, sys
words = sys.argv[1:]
assert len(words) % 2 == 0
given = dict(zip(words[::2], words[1::2]))
unknown = given.keys() - set("-i -j -e -b -t -d -x -v -m -s -g -w -f -r".split())
assert not unknown, unknown
with open(LOG, "a") as file:
    print(json.dumps(given), file=file)
for name in {given["-i"], given["-e"]}:
    if name.endswith(".bin"):
        shutil.copy(name, COPIES)
print("| device                | NVIDIA H200                                        |")
print("| precision             | %-50s |" % PRECISION)
if FAILURE:
    exec(FAILURE)
print("allocated 237 MiB for model parameters")
print("=> setting grad_accum_steps=1")
print("allocating 237 MiB for parameter gradients")
print("allocating 1000 MiB for activations")
print("device memory usage: 60000 MiB / 143000 MiB")
print("val loss 10.9")
steps = int(given["-x"])
for n in range(1, steps + 1):
    ms = 900.0 if n == 1 else 4.0 if n == steps else 2.0
    print("step %4d/%d | loss 10.9 (+0.10z)| norm 1.2 (-1.00z)| lr 3.00e-04 | %.2f ms | "
          "45.1%% bf16 MFU | 16000 tok/s" % (n, steps, ms))
print("total average iteration time: 2.0 ms")
"""


MODEL = GPT2Config(vocab_size=61, block_size=8, n_layer=1, n_head=1, n_embd=16)


def config_of(model, precision="bf16", **changes):
    model = dataclasses.replace(model, precision=Precision(precision))
    length = min(model.block_size, 64)
    sizes: dict[str, Any] = {"sequence_length": length, "batch_tokens": 4 * length}
    return Config(model=model, micro_batch=4, **sizes | changes)


@pytest.fixture
def llmc(tmp_path):
    """Return a function that writes the script, and the list of the arguments of its runs."""
    log = tmp_path / "log.jsonl"

    def write(precision="BF16", failure=""):
        settings = {"LOG": str(log), "COPIES": str(tmp_path)}
        settings |= {"PRECISION": precision, "FAILURE": failure}
        program = tmp_path / "train_gpt2cu"
        head = [f"{name} = {value!r}" for name, value in settings.items()]
        program.write_text("\n".join([f"#!{sys.executable} -SI", *head, PLAYER]))
        program.chmod(0o755)
        return program

    runs = lambda: [json.loads(line) for line in log.read_text().splitlines()]
    return SimpleNamespace(write=write, runs=runs)


def test_a_turn_is_one_run_whose_first_steps_are_left_out(llmc, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "WARM_UP_SECONDS", 0.006)
    model = GPT2Config(block_size=64, n_layer=1, n_head=1, n_embd=16)
    theirs = LlmcStep(llmc.write(), config_of(model), jax.devices()[0])
    theirs.start()
    rounds = theirs.rounds(0.02)
    assert theirs.peak == (237 + 237 + 1000) * 2**20
    # 3 steps of warm-up and 10 steps in 5 rounds; the last step of the last one is slower.
    assert rounds == pytest.approx([0.002] * 4 + [0.003])
    first, turn = llmc.runs()
    same = {"-i": "tokens.bin", "-j": "tokens.bin", "-e": "model.bin", "-b": "4", "-t": "64"}
    same |= {"-d": "256", "-m": "1", "-g": "1", "-w": "1", "-r": "0"}
    assert first == same | {"-x": "10", "-v": "11", "-s": "11"}
    assert turn == same | {"-x": "13", "-v": "14", "-s": "14"}
    tokens = open_shard(tmp_path / "tokens.bin")
    assert len(tokens) == llmc_side.BATCHES * 256 + 1
    assert 50_000 < tokens.max() < 50257 and len(np.unique(tokens)) > 10_000


def test_the_weights_are_a_checkpoint_in_the_dtype_of_the_build(llmc, tmp_path):
    theirs = LlmcStep(llmc.write("TF32"), config_of(MODEL, "tf32"), jax.devices()[0])
    theirs.start()
    (run,) = llmc.runs()
    assert run["-e"] == "model.bin" and (run["-w"], run["-f"]) == ("0", "1")
    assert load_llmc(tmp_path / "model.bin").config == MODEL
    assert np.fromfile(tmp_path / "model.bin", "<i4", 2)[1] == 3


ENDS = "raise SystemExit('Error: Failed to open file\\n  File: utils.h\\n---> HINT: none')"
MANAGED = "print('WARNING: Fell back to cudaMallocManaged when initializing m,v on 1 GPUs')"


@pytest.mark.parametrize(
    ("precision", "failure", "message"),
    [
        ("BF16", ENDS, "with exit code 1 .*: Error: Failed to open file / File: utils.h$"),
        (
            "BF16",
            r"raise SystemExit('\x1b[2Jgone: an error')",
            "steps: \ufffd\\[2Jgone: an error / ",
        ),
        ("BF16", MANAGED, "needs more memory than the GPU has free.* smaller --batch$"),
        ("BF16", "given['-x'] = '9'", "the times of 9 of 10 steps: .* 2.0 ms$"),
        ("FP32", ENDS, "in FP32, expected BF16: run `make train_gpt2cu PRECISION=BF16"),
    ],
)
def test_a_failure_is_one_line(llmc, precision, failure, message):
    theirs = LlmcStep(llmc.write(precision, failure), config_of(MODEL), jax.devices()[0])
    with pytest.raises(BenchError, match=message) as raised:
        theirs.start()
    assert "\n" not in str(raised.value)


def test_what_llmc_does_not_have_is_refused(tmp_path):
    with pytest.raises(BenchError, match="no file .*/train_gpt2cu: run `make train_gpt2cu USE"):
        find_program(tmp_path)
    assert why_no_llmc(config_of(MODEL)) is None
    normuon = switch_algorithm(Config().optimizer, "normuon")
    refused = {
        "GPT-2, not Llama3Config": config_of(LLAMA),
        "not fp8: ": config_of(MODEL, "fp8"),
        "AdamW, not normuon": config_of(MODEL, optimizer=normuon),
        "separate documents": config_of(MODEL, separate_documents=True),
        "multiple of 128, not 64": config_of(dataclasses.replace(MODEL, padded_vocab_size=64)),
    }
    for message, config in refused.items():
        assert message in (why_no_llmc(config) or ""), message


def test_rows_of_llmc(llmc, card, tmp_path, monkeypatch, capsys):
    row = {"compile_s": 1.0, "needed_gib": 1.0, "kernels": {}, "program": {"fusions": 1}}
    monkeypatch.setattr(harness, "WARM_UP_SECONDS", 0.002)
    monkeypatch.setattr(turns, "TURNS", 2)
    monkeypatch.setattr(step, "why_no_llmc", lambda config: None)
    # Steps of 1 ms: nothing is compiled.
    monkeypatch.setattr(step, "compiled", lambda described, side: described | row)
    side = SimpleNamespace(run=lambda steps: 1e-3 * steps, peak=None)
    monkeypatch.setattr(step, "JaxStep", lambda *_, **__: side)
    program, out = llmc.write(), tmp_path / "step.json"
    options = ("--config", card, "--precision", "bf16", "--seconds", 0.02, "--out", out)
    assert run(step, *options, "--llmc", program) == 0
    ours, theirs = json.loads(out.read_text())["rows"]
    assert (ours["system"], theirs["system"]) == ("gptjax", "llm.c")
    # 2 turns of 5 rounds, of which the last one of each turn is slower.
    expected = {"ms": 2, "ms_highest": 3, "tokens/s": 2 * 8 / 2e-3, "peak_gib": 1474 / 1024}
    assert {key: theirs[key] for key in expected} == pytest.approx(expected)
    assert ours["of_llmc"] == pytest.approx(2)
    assert [run["-x"] for run in llmc.runs()] == ["10", "11", "11"]
    printed = capsys.readouterr()
    assert "of llm.c" in printed.out and "of torch" not in printed.out
    order = [line.split(":")[0] for line in printed.err.splitlines() if "turn" in line]
    assert order == ["llm.c", "gptjax"] * 2


# ------------------------------------------------------------------------------------- generation


def test_a_row_for_each_system_back_end_and_draw(card, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = f"--config {card} --prompt 3 --new 4 --batch 2 --temperature 1 --top-k 5"
    options += f" --seconds 0 --out {out} --implementation triton auto"
    assert run(generate, *options.split()) == 1
    result = results.read(out)
    rows = result["rows"]
    case = "3 + 4 tokens, top-k 5"
    systems = [(system, case) for system in ("gptjax", "gptjax", "transformers")]
    assert [(row["system"], row["case"]) for row in rows] == systems
    # The named back end needs a GPU; the others are measured.
    assert "triton" in rows[0]["error"] and "ms" not in rows[0]
    ours, theirs = rows[1:]
    assert ours["kernels"] == "xla" and theirs["kernels"] == "static cache, eager"
    assert ours["tokens/s"] == pytest.approx(2 * 4 / (ours["ms"] / 1e3))
    assert ours["of_torch"] == pytest.approx(theirs["ms"] / ours["ms"])
    printed = capsys.readouterr()
    assert "first token ms" in printed.out and "error: did not run:" in printed.err
    # A line of progress as soon as a row is complete.
    assert printed.err.count("tokens/s, step") == 2


def test_the_figures_of_a_row():
    """The first of all calls also compiles; a step is what remains after the first token."""
    calls = itertools.chain([30.0], itertools.repeat(10.0))
    side = SimpleNamespace(all_tokens=lambda: next(calls), first_token=lambda: 1.0)
    row = generate.measure(side, {}, batch=4, new=10, seconds=0.0)
    expected = {"ms": 10e3, "tokens/s": 4.0, "first_token_ms": 1e3, "step_us": 1e6}
    expected |= {"compile_s": 20.0}
    assert {key: row[key] for key in expected} == pytest.approx(expected)


@pytest.mark.parametrize("config", [TINY, LLAMA], ids=["gpt2", "llama3"])
def test_transformers_continues_as_with_its_own_cache(config):
    """Twice: the cache of the first call is reset."""
    side = TorchGeneration(config, batch=2, prompt=3, new=5, device="cpu")
    side.model.apply(spread)
    alone_BT = side.model.generate(side.prompt_BT, max_new_tokens=5, do_sample=False)
    for _ in range(2):
        assert torch.equal(side.generate(5, temperature=0.0, top_k=None), alone_BT)
    assert len({tuple(row) for row in alone_BT[:, 3:].tolist()}) == 2  # prompts matter
    # The draws of the likeliest token alone.
    assert torch.equal(side.generate(5, temperature=1.0, top_k=1), alone_BT)
    assert side.all_tokens(temperature=1.0, top_k=None) > 0
    side.free()


def spread(module):
    """Enlarge the matrices: with the initial ones every prompt has the same continuation."""
    for parameter in module.parameters(recurse=False):
        if parameter.ndim == 2:
            parameter.data *= 10
