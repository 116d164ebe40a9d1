"""gptjax.bench step, ladder and compare on a tiny model: each row is the step that its name says,
failures are rows, tables show every figure, and bad files are refused."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest
from bench_tools import TINY

from gptjax import cli
from gptjax.bench import BenchError, compare, harness, jax_step, kernels, ladder, profile, results
from gptjax.bench import step as bench_step
from gptjax.bench.__main__ import main
from gptjax.bench.configs import ModelOptions, one_micro_batch
from gptjax.bench.jax_step import JaxStep
from gptjax.bench.results import Row, print_table
from gptjax.models.gpt2 import PRESETS
from gptjax.precision import Precision

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
# A model that is not GPT-2.
OTHER = Path(__file__).parents[1] / "examples" / "new_model" / "config.py"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(harness, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(ladder, "SECONDS", 0.0)


def test_a_ladder_goes_from_plain_fp32_to_the_model_as_it_is():
    model = dataclasses.replace(PRESETS["gpt2"], recompute="block", precision=Precision("tf32"))
    found = list(ladder.rungs(model))
    names = ["fp32, no jit", "jit", "TF32", "bf16", "flash attention", "padded vocabulary"]
    names += ["fused classifier", "fused norms and MLP", "the rest", "FP8"]
    assert [name for name, _, _ in found] == names
    assert [jit for _, _, jit in found] == [False] + [True] * 9
    models = [model for _, model, _ in found]
    assert models[0] == models[1] and len(set(models[1:])) == 9
    assert models[0].padded_vocab_size == 50257 and models[0].attention == models[0].mlp == "xla"
    for last, name in zip(models[-2:], ("bf16", "fp8"), strict=True):
        assert last == dataclasses.replace(model, precision=Precision(name))
    # Without anything left for "the rest" there is none: no measurement comes twice.
    assert len(list(ladder.rungs(PRESETS["gpt2"]))) == 9
    # Another architecture has the rungs that change it.
    names = ["fp32, no jit", "jit", "TF32", "bf16", "padded vocabulary", "fused classifier"]
    assert [name for name, _, _ in ladder.rungs(cli.load(OTHER).model)] == names


@pytest.mark.usefixtures("optax_promotion")
def test_every_rung_is_measured_and_one_that_fails_is_named(card, tmp_path, monkeypatch, capsys):
    rungs = ladder.rungs

    def with_one_that_fails(model):
        _, jit, *_ = rungs(model)
        yield jit
        yield "nowhere to run", dataclasses.replace(model, attention="triton"), True

    monkeypatch.setattr(ladder, "rungs", with_one_that_fails)
    out = tmp_path / "results" / "ladder.json"
    assert main(["ladder", "--config", card, "--batch", "2", "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert "did not run:\ngptjax · nowhere to run · tiny" in said and "needs an NVIDIA GPU" in said
    measured, failed = json.loads(out.read_text())["rows"]
    assert failed["rung"] == "nowhere to run" and "error" in failed and "factor" not in failed
    assert measured["tokens/s"] == pytest.approx(16 / measured["ms"] * 1e3)
    rows = [{"ms": 8.0}, failed, {"ms": 4.0}, {"ms": 1.0}]
    ladder.compare(rows)
    assert [row.get("factor") for row in rows] == [1.0, None, 2.0, 4.0]
    assert [row.get("since_start") for row in rows] == [1.0, None, 2.0, 8.0]


@pytest.mark.usefixtures("optax_promotion")
def test_steps_of_one_and_several_devices(card, tmp_path, capsys):
    out = tmp_path / "step.json"
    command = f"step --config {card} --batch 1 --seconds 0.01 --devices 1 2"
    command += f" --micro-batches 3 --parallel fsdp --reduce-dtype bf16 --out {out}"
    assert main(command.split()) == 0
    shown = capsys.readouterr().out
    assert "gptjax · tiny" in shown and "3 micro-batches · 2 devices · fsdp · bf16" in shown
    result = json.loads(out.read_text())
    one, two = result["rows"]
    assert one["asked"] == {"norm": "xla"} and one["batch"] == 1
    assert one["kernels"]["flash_attention"] == "xla"
    assert one["needed_gib"] > 0 and one["compile_s"] > 0.05
    assert "parallel" not in one and two["parallel"] == "fsdp"
    assert two["tokens/s"] == pytest.approx(3 * 2 * 8 / two["ms"] * 1e3)
    assert result["device"] == jax.devices()[0].device_kind
    assert main(["compare", str(out), str(out), "--fail-above", "1.0"]) == 0
    assert main(["step", "--config", card, "--devices", "3"]) == 1
    assert "--devices 3: expected 1 to 2" in capsys.readouterr().err


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("jit", [True, False])
def test_our_step_trains(jit, monkeypatch):
    """The program that is timed is the training step: it updates its state, from call to call."""
    config = one_micro_batch(ModelOptions().base(), 2, 8)
    config = dataclasses.replace(config, model=dataclasses.replace(TINY, n_layer=1))
    ours = JaxStep(config, harness.one_device(), jit=jit)
    if not jit:  # each operation would be compiled by itself
        step = lambda state, batch: (dataclasses.replace(state, step=state.step + 1), {})
        monkeypatch.setattr(ours, "_function", lambda: step)
    ours.run(2)
    assert int(ours._state.step) == 2 and (ours.compiled is None) == (not jit)


def test_a_step_that_does_not_fit(card, monkeypatch, capsys):
    monkeypatch.setattr(jax_step, "available_bytes", lambda device: 1000)
    assert main(["step", "--config", card, "--forward"]) == 1
    assert "nothing was allocated" in capsys.readouterr().err


def test_rounds_follow_a_warm_up_and_fill_the_time(monkeypatch):
    monkeypatch.setattr(harness, "WARM_UP_SECONDS", 1.0)
    calls = []
    found = harness.sustained(lambda steps: calls.append(steps) or 0.1 * steps, seconds=3.0)
    assert calls == [1, 1, 10] + [6] * 5 and found == pytest.approx([0.1] * 5)


def test_a_stage_of_a_config_is_measured(tmp_path):
    file = tmp_path / "two.py"
    file.write_text(
        "from gptjax.config import Config, Stage\n"
        "from gptjax.models.registry import PRESETS\n"
        "stages = (Stage(until=3), Stage(sequence_length=32, batch_tokens=64, micro_batch=2))\n"
        "config = Config(model=PRESETS['gpt2'], sequence_length=16, micro_batch=4, stages=stages)\n"
    )
    options = bench_step.Step(config=file, stage=2)
    ((config, _),) = options.configs()
    assert options.name == "two stage 2"
    assert (config.sequence_length, config.micro_batch, config.batch_tokens) == (32, 2, 64)
    assert bench_step.Step(config=file).configs()[0][0].sequence_length == 16
    ((long, _),) = bench_step.Step(config=file, sequence_length=2048).configs()
    assert (long.sequence_length, long.model.block_size) == (2048, 2048)
    assert config.model.block_size == 1024
    with pytest.raises(BenchError, match="--stage 3: the config has 2 stages"):
        bench_step.Step(config=file, stage=3).configs()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "must be at least 1"),
        (
            ["--out", "/dev/null", "--batch", "0"],
            "a device instead of a regular file",
        ),  # before the rest
    ],
)
def test_options_that_are_refused(options, message, capsys):
    assert main(["step", *options]) == 1
    assert message in capsys.readouterr().err


# ----------------------------------------------------------------------------- tables and results


def result(name):
    return json.loads((RESULTS / name).read_text())


def show_compare():
    before, after = (result(f"step/gpt2_xl_{batch}.json") for batch in (24, 36))
    after["rows"][0] |= {"batch": 24}
    compare.show(compare.compare(before["rows"], after["rows"]), before, after)


@pytest.mark.parametrize(
    "show, texts",
    [
        (lambda: bench_step.show(result("ladder.json")), ("ms", "MFU", "since start")),
        (lambda: bench_step.show(result("step/gpt2_xl_36.json")), ("of torch", "gpt2-xl")),
        (lambda: profile.show(result("profile/gpt2_xl_24.json"), 4), ("backward", "idle")),
        (lambda: kernels.show(result("kernels/attention.json")), ("of ceiling", "TB/s")),
        (show_compare, ("after / before", "commit: 54c5449 → e5b32e9")),
    ],
)
def test_a_stored_result_is_shown(show, texts, capsys):
    show()
    shown = capsys.readouterr().out
    assert all(text in shown for text in texts)
    if "since start" in texts:
        for row in result("ladder.json")["rows"]:
            figures = (f"{row['ms']:.2f}", f"{row['tokens/s']:,.0f}", f"{row['mfu']:.1%}")
            (line,) = [line for line in shown.splitlines() if figures[0] in line.split()]
            assert row["rung"] in line and set(figures) <= set(line.split())


def test_texts_of_a_file_do_not_act_on_the_terminal(capsys):
    print_table("[b]title", ("ms", "GiB"), [Row("a", ("1.0", "22"), "\x1b[2Jfirst")])
    assert capsys.readouterr().out.splitlines() == [
        "[b]title",
        "    ms  GiB",
        "a  1.0   22  \ufffd[2Jfirst",
    ]


GOOD = {"date": "d", "device": "a GPU", "command": "c", "versions": {}}
GOOD |= {"rows": [{"system": "gptjax", "ms": 1.0}]}


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "Expecting value"),
        ("[]", "list"),
        (json.dumps(GOOD | {"rows": []}), "no rows"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "versions"}), "no versions"),
        (10_000 * "[" + 10_000 * "]", "recursion"),
        ("\xff", "decode"),
    ],
)
def test_a_file_with_other_contents_is_refused(tmp_path, capsys, text, said):
    good, bad = tmp_path / "good.json", tmp_path / "bad\x1b.json"
    good.write_text(json.dumps(GOOD))
    bad.write_bytes(text.encode("latin1"))
    assert main(["compare", str(good), str(good)]) == 0
    capsys.readouterr()
    assert main(["compare", str(good), str(bad)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ") and len(told.splitlines()) == 1
    assert "bad\ufffd.json: expected a result of gptjax.bench" in told and said in told


def test_a_result_is_read_as_it_was_written(tmp_path):
    rows = [{"ms": 1.5, "asked": {}, "kernels": {"norm": "triton"}, "runs": [[1, None], []]}, {}]
    new = results.new("a command", rows, device="a GPU", packages=("pytest", "none"), note="µ")
    file = tmp_path / "folder" / "result.json"
    results.write(file, new)
    assert results.read(file) == new and "µ" in file.read_text()
    assert "pytest" in new["versions"] and "none" not in new["versions"]
    command = results.command("-m gptjax.bench", ["step", "--config", "a b.py"])
    assert command == "python -m gptjax.bench step --config 'a b.py'"


# ---------------------------------------------------------------------------------------- compare


def of_rows(rows, **versions):
    rows = [{"system": "gptjax", "model": "gpt2", "batch": 4} | row for row in rows]
    return GOOD | {"versions": {"jax": "1"} | versions, "rows": rows}


def test_two_results_beside_each_other(tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    rung = {"rung": "jit", "ms": 10.0}
    old = [rung | {"asked": {"attention": "xla"}}, {"rung": "gone", "ms": 1.0}]
    old += [{"rung": "breaks", "ms": 1.0}]
    new = [rung | {"ms": 10.6}, {"rung": "breaks", "error": "out of memory"}]
    new += [{"rung": "came", "ms": 2.0}]
    a.write_text(json.dumps(of_rows(old)))
    b.write_text(json.dumps(of_rows(new, torch="2")))
    assert main(["compare", str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert "1.060 ×" in said and said.count("absent") == 3 and "torch: absent → 2" in said
    assert main(["compare", str(a), str(b), "--fail-above", "1.05"]) == 1
    said = capsys.readouterr().err
    assert "jit · gpt2 · batch 4: 10 ms → 10.6 ms" in said and "came" not in said
    assert "breaks · gpt2 · batch 4: 1 ms → out of memory" in said
    assert "gone · gpt2 · batch 4: 1 ms → absent" in said
    a.write_text(json.dumps(of_rows(old[:1])))
    b.write_text(json.dumps(of_rows([new[0], new[2]])))
    assert main(["compare", str(a), str(b), "--fail-above", "1.07"]) == 0
    b.write_text(json.dumps(of_rows([{"rung": "came", "ms": 2.0}])))
    assert main(["compare", str(a), str(b)]) == 1
    assert "no measured row in common" in capsys.readouterr().err


def test_steps_that_differ_in_an_option_are_not_the_same_row():
    row = {"system": "torch", "ms": 1.0}
    fsdp = {"devices": 2, "parallel": "fsdp2", "reshard_after_forward": True}
    old = [row | {"asked": {"attention": "xla"}}, row, row | {"moments": "bf16, bf16"}]
    old += [row | fsdp, row | fsdp | {"reduce_dtype": "bf16"}]
    new = [row | {"asked": {}, "devices": 1, "ms": 2.0}, row | {"moments": "bf16, bf16"}]
    new += [row | fsdp | {"ms": 3.0}, row | fsdp | {"reshard_after_forward": False}]
    pairs = compare.compare(old, new)
    assert [(pair["name"], pair.get("ratio")) for pair in pairs] == [
        ("torch · attention=xla", None),
        ("torch", 2.0),
        ("torch · moments bf16, bf16", 1.0),
        ("torch · 2 devices · fsdp2", 3.0),
        ("torch · 2 devices · fsdp2 · bf16", None),
        ("torch · 2 devices · fsdp2 · gathered once", None),
    ]
