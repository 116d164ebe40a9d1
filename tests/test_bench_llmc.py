"""gptjax.bench step --llmc: llm.c receives the options of the config's step, its times become a
row, and its failures are reported. A script replaces train_gpt2cu: the script checks its arguments
and prints llm.c's lines."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from gptjax import load_llmc
from gptjax.bench import llmc_side, measuring, step
from gptjax.bench.__main__ import main
from gptjax.bench.errors import BenchError
from gptjax.bench.llmc_side import LlmcStep, find_program, why_no_llmc
from gptjax.bench.rows import describe
from gptjax.config import Config
from gptjax.data.shards import open_shard
from gptjax.models.gpt2 import PRESETS, GPT2Config
from gptjax.models.llama3 import Llama3Config
from gptjax.optim import switch_algorithm
from gptjax.precision import Precision

# A step of 2 ms, except the first and the last one of a run.
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
CARD = """
from gptjax.config import Config
from gptjax.models.gpt2 import GPT2Config
model = GPT2Config(vocab_size=61, block_size=8, n_layer=1, n_head=1, n_embd=16)
config = Config(model=model, sequence_length=8, batch_tokens=32, micro_batch=2)
"""


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
        settings = {
            "LOG": str(log),
            "COPIES": str(tmp_path),
            "PRECISION": precision,
            "FAILURE": failure,
        }
        program = tmp_path / "train_gpt2cu"
        head = [f"{name} = {value!r}" for name, value in settings.items()]
        program.write_text("\n".join([f"#!{sys.executable} -SI", *head, PLAYER]))
        program.chmod(0o755)
        return program

    runs = lambda: [json.loads(line) for line in log.read_text().splitlines()]
    return SimpleNamespace(write=write, runs=runs)


def test_a_turn_is_one_run_whose_first_steps_are_left_out(llmc, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "WARM_UP_SECONDS", 0.006)
    config = config_of(PRESETS["gpt2"])
    theirs = LlmcStep(llmc.write(), config, jax.devices()[0])
    theirs.start()
    rounds = theirs.rounds(0.02)
    assert theirs.peak == (237 + 237 + 1000) * 2**20
    # 3 steps of warm-up and 10 steps in 5 rounds; the last step of the last one is slower.
    assert rounds == pytest.approx([0.002] * 4 + [0.003])
    first, turn = llmc.runs()
    same = {"-i": "tokens.bin", "-j": "tokens.bin", "-e": "d12", "-b": "4", "-t": "64"}
    same |= {"-d": "256", "-m": "1", "-g": "1", "-w": "1", "-r": "0"}
    assert first == same | {"-x": "10", "-v": "11", "-s": "11"}
    assert turn == same | {"-x": "13", "-v": "14", "-s": "14"}
    tokens = open_shard(tmp_path / "tokens.bin")
    assert len(tokens) == llmc_side.BATCHES * 256 + 1
    assert 50_000 < tokens.max() < 50257 and len(np.unique(tokens)) > 10_000


@pytest.mark.parametrize(
    ("precision", "build", "options"),
    [("fp32", "FP32", {"-w": "0", "-f": "0"}), ("tf32", "TF32", {"-w": "0", "-f": "1"})],
)
def test_another_shape_is_a_checkpoint_in_the_dtype_of_the_build(
    llmc, tmp_path, precision, build, options
):
    theirs = LlmcStep(llmc.write(build), config_of(MODEL, precision), jax.devices()[0])
    theirs.start()
    (run,) = llmc.runs()
    assert run["-e"] == "model.bin" and options.items() <= run.items()
    assert load_llmc(tmp_path / "model.bin").config == MODEL
    assert np.fromfile(tmp_path / "model.bin", "<i4", 2)[1] == 3


def test_the_presets_are_shapes_of_llmc():
    names = [llmc_side.descriptor(PRESETS[f"gpt2{size}"]) for size in ("", "-medium", "-large")]
    assert [*names, llmc_side.descriptor(PRESETS["gpt2-xl"])] == ["d12", "d24", "d36", "d48"]
    assert llmc_side.descriptor(dataclasses.replace(PRESETS["gpt2"], block_size=2048)) is None


def test_room_beside_the_memory_of_jax():
    stats = {"bytes_limit": 100 * 2**30, "pool_bytes": 60 * 2**30, "bytes_in_use": 0}
    theirs = LlmcStep(Path("train_gpt2cu"), config_of(MODEL), jax.devices()[0])
    theirs.device = SimpleNamespace(memory_stats=lambda: stats)
    assert theirs.has_room()
    theirs.peak = 39 * 2**30
    assert theirs.has_room()
    theirs.peak += 1
    assert not theirs.has_room()


# ------------------------------------------------------------------------------------------- errors


ENDS = "raise SystemExit('Error: Failed to open file\\n  File: utils.h\\n---> HINT: none')"
CUDA = "print('[CUDA ERROR] at file t.cu:7:\\nout of memory'); sys.exit('a warning')"
ASSERTS = "import os; os.write(2, b'Assertion `T % 4 == 0` failed.'); os.abort()"
MANAGED = "print('WARNING: Fell back to cudaMallocManaged when initializing m,v on 1 GPUs')"
SHORT = "given['-x'] = '9'"


@pytest.mark.parametrize(
    ("precision", "failure", "message"),
    [
        ("BF16", ENDS, "ended with exit code 1: Error: Failed to open file / File: utils.h$"),
        ("BF16", CUDA, r"exit code 1: \[CUDA ERROR\] at file t.cu:7: / out of memory$"),
        ("BF16", ASSERTS, "ended with SIGABRT: Assertion `T % 4 == 0` failed.$"),
        ("BF16", r"raise SystemExit('\x1b[2Jgone')", "exit code 1: \ufffd\\[2Jgone$"),
        ("BF16", MANAGED, "needs more memory than the GPU has free.* smaller --batch$"),
        ("BF16", "raise SystemExit", r"time of each of 10 steps .* found: \| device .* BF16 +\|$"),
        ("BF16", SHORT, "time of each of 10 steps .* 2.0 ms$"),
        ("", "", "expected a line with its precision in the output of llm.c"),
        (
            "FP32",
            ENDS,
            "in FP32, expected BF16: run `make train_gpt2cu USE_CUDNN=1 PRECISION=BF16`",
        ),
        ("FP16", "", "computes in FP16, expected BF16"),
    ],
)
def test_a_failure_is_one_line(llmc, precision, failure, message):
    theirs = LlmcStep(llmc.write(precision, failure), config_of(PRESETS["gpt2"]), jax.devices()[0])
    with pytest.raises(BenchError, match=message) as raised:
        theirs.start()
    assert "\n" not in str(raised.value)


def test_output_that_cannot_be_read():
    line = "step    1/1 | loss 1.0 (+nanz)| norm 1.0 (+nanz)| lr 3.00e-04 | {} ms | 1.0% bf16 MFU"
    assert llmc_side.step_seconds(line.format("12.50"), 1) == [0.0125]
    for ms in ("0.00", "1.2.3"):
        with pytest.raises(BenchError, match="positive times of steps in the output"):
            llmc_side.step_seconds(line.format(ms), 1)
    with pytest.raises(BenchError, match="each of 1 steps in the output of llm.c, found: no outpu"):
        llmc_side.step_seconds("", 1)


def test_a_run_that_does_not_end_is_stopped(llmc, monkeypatch):
    monkeypatch.setattr(llmc_side, "START_SECONDS", 0.2)
    program = llmc.write(failure="import time; time.sleep(60)")
    with pytest.raises(BenchError, match="did not end within 0.2 s: it was stopped"):
        LlmcStep(program, config_of(PRESETS["gpt2"]), jax.devices()[0]).start()


def test_a_path_without_a_program_is_refused(llmc, tmp_path):
    with pytest.raises(BenchError, match="no file .*/train_gpt2cu: run `make train_gpt2cu USE"):
        find_program(tmp_path)
    program = llmc.write()
    assert find_program(tmp_path) == find_program(program) == program
    program.write_bytes(b"\x7fELF")
    with pytest.raises(BenchError, match="train_gpt2cu cannot run: Exec format error"):
        LlmcStep(program, config_of(PRESETS["gpt2"]), jax.devices()[0]).start()
    program.chmod(0o644)
    with pytest.raises(BenchError, match="is not executable"):
        find_program(program)


def test_what_llmc_does_not_have_is_refused():
    assert why_no_llmc(config_of(MODEL)) is None
    normuon = switch_algorithm(Config().optimizer, "normuon")
    refused = {
        "trains GPT-2, not Llama3Config": config_of(
            Llama3Config(block_size=8, n_layer=1, n_head=2, n_kv_head=1, n_embd=16)
        ),
        "not fp8: ": config_of(MODEL, "fp8"),
        "not bf16_residual_fp32: ": config_of(MODEL, "bf16_residual_fp32"),
        "AdamW, not normuon": config_of(MODEL, optimizer=normuon),
        "recompute a sublayer": config_of(dataclasses.replace(MODEL, recompute="sublayer")),
        "separate documents": config_of(MODEL, separate_documents=True),
        "uint16": config_of(dataclasses.replace(MODEL, vocab_size=70000, padded_vocab_size=None)),
        "multiple of 128, got 64": config_of(dataclasses.replace(MODEL, padded_vocab_size=64)),
    }
    for message, config in refused.items():
        assert message in (why_no_llmc(config) or ""), message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--torch"], "--torch and --llmc both name a program to compare with"),
        (["--forward"], "leave out --forward or --llmc"),
        (["--devices", "2"], "--llmc measures one device"),
        ([], "llm.c needs a GPU"),
    ],
)
def test_options_that_do_not_go_with_it(llmc, options, message, capsys):
    assert main(["step", "--llmc", str(llmc.write()), *options]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# --------------------------------------------------------------------------------------------- rows


def compiled(self, config, device, count):
    """Return gptjax's row, and a side with steps of 1 ms: nothing is compiled."""
    row = describe(self.name, config, forward=False)
    row |= {"compile_s": 1.0, "needed_gib": 1.0, "kernels": {}, "program": {"fusions": 1}}
    return row, SimpleNamespace(config=config, run=lambda steps: 1e-3 * steps, peak=None)


def test_rows(llmc, tmp_path, monkeypatch, capsys):
    for name, value in {"WARM_UP_SECONDS": 0.002, "REST_SECONDS": 0.0}.items():
        monkeypatch.setattr(measuring, name, value)
    monkeypatch.setattr(step, "require_gpu", lambda device: None)
    monkeypatch.setattr(step.Step, "_compile", compiled)
    program, out, card = llmc.write(), tmp_path / "step.json", tmp_path / "small.py"
    card.write_text(CARD)
    command = ["step", "--config", str(card), "--precision", "bf16", "--seconds", "0.02"]
    assert main([*command, "--llmc", str(program), "--out", str(out)]) == 0
    ours, theirs = json.loads(out.read_text())["rows"]
    assert (ours["system"], theirs["system"]) == ("gptjax", "llm.c")
    # 2 turns of 5 rounds, of which the last one of each turn is slower.
    assert theirs["ms"] == pytest.approx(2) and theirs["ms_highest"] == pytest.approx(3)
    assert theirs["tokens/s"] == pytest.approx(2 * 8 / theirs["ms"] * 1e3)
    assert theirs["peak_gib"] == pytest.approx(1474 / 1024)
    assert ours["of_llmc"] == pytest.approx(2)
    assert [run["-x"] for run in llmc.runs()] == ["10", "11", "11"]
    printed = capsys.readouterr()
    assert "of llm.c" in printed.out and "2.000 ×" in printed.out and "of torch" not in printed.out
    turns = [line.split(":")[0] for line in printed.err.splitlines() if "turn" in line]
    assert turns == ["llm.c", "gptjax"] * 2

    llmc.write(failure=ENDS)
    assert main([*command, "--llmc", str(program), "--out", str(out)]) == 1
    ours, theirs = json.loads(out.read_text())["rows"]
    assert ours["ms"] == pytest.approx(1) and "of_llmc" not in ours and "ms" not in theirs
    assert (
        "did not run:\nllm.c · small · bf16 · 2 × 8: BenchError: llm.c ended with exit code 1"
        in (capsys.readouterr().err)
    )
