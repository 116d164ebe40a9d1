"""gptjax.bench step, ladder and compare on a tiny model: each row is the step that its name says,
failures are rows, tables show every figure, and bad files are refused."""

import dataclasses
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
import tyro
from bench_tools import CARD, TINY

from gptjax import cli
from gptjax.bench import (
    compare,
    jax_step,
    kernels,
    ladder,
    measuring,
    profile,
    results,
    startup,
    step,
    table,
)
from gptjax.bench.__main__ import main
from gptjax.bench.configs import ModelOptions, one_micro_batch
from gptjax.bench.errors import BenchError
from gptjax.bench.jax_step import JaxStep
from gptjax.bench.table import Row
from gptjax.models.gpt2 import PRESETS
from gptjax.precision import Precision

# The fixture `card`.
pytest_plugins = ["bench_tools"]
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
# A model that is not GPT-2.
OTHER = Path(__file__).parents[1] / "examples" / "new_model" / "config.py"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(measuring, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(ladder, "SECONDS", 0.0)


# -------------------------------------------------------------------------------- rungs and steps


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


@pytest.mark.usefixtures("optax_promotion")
def test_every_rung_is_measured_and_one_that_fails_is_named(card, tmp_path, monkeypatch, capsys):
    rungs = ladder.rungs

    def with_one_that_fails(model):
        *others, last = rungs(model)
        yield from others
        yield "nowhere to run", dataclasses.replace(model, attention="triton"), True
        yield last

    monkeypatch.setattr(ladder, "rungs", with_one_that_fails)
    out = tmp_path / "results" / "ladder.json"
    assert main(["ladder", "--config", card, "--batch", "2", "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert "did not run:\ngptjax · nowhere to run · tiny" in said and "needs an NVIDIA GPU" in said
    result = json.loads(out.read_text())
    rows, device = result["rows"], jax.devices()[0].device_kind
    assert result["command"].endswith("--batch 2") and result["device"] == device
    assert [row["rung"] for row in rows if "error" in row] == ["nowhere to run"]
    measured = [row for row in rows if "ms" in row]
    assert len(measured) == 9 == len(rows) - 1
    for before, row in itertools.pairwise(measured):
        assert row["factor"] == pytest.approx(before["ms"] / row["ms"])
    assert measured[-1]["since_start"] == pytest.approx(measured[0]["ms"] / measured[-1]["ms"])
    assert all(row["tokens/s"] == pytest.approx(16 / row["ms"] * 1e3) for row in measured)
    assert main(["draw", str(out.parent), str(tmp_path)]) == 0
    assert (tmp_path / "ladder.png").stat().st_size > 5000


@pytest.mark.usefixtures("optax_promotion")
def test_a_step(card, tmp_path, capsys):
    out = tmp_path / "step.json"
    command = ["step", "--config", card, "--batch", "1", "--norm", "xla", "--seconds", "0.01"]
    assert main([*command, "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["asked"] == {"norm": "xla"} and row["batch"] == 1
    assert row["kernels"]["attention"] == "xla"
    assert row["needed_gib"] > 0 and row["compile_s"] > 0.05
    assert "gptjax · tiny" in capsys.readouterr().out
    assert main(["compare", str(out), str(out), "--fail-above", "1.0"]) == 0


def test_our_step_trains(card):
    """The program that is timed is the training step: it updates its state, from call to call."""
    config = one_micro_batch(ModelOptions().base(), 2, 8)
    config = dataclasses.replace(config, model=TINY)
    with jax.numpy_dtype_promotion("standard"):
        ours = JaxStep(config, measuring.one_device(), jit=False)
        ours.run(2)
    assert int(ours._state.step) == 2 and ours.compiled is None


def test_a_step_that_does_not_fit(card, monkeypatch, capsys):
    monkeypatch.setattr(jax_step, "available_bytes", lambda device: 1000)
    assert main(["step", "--config", card, "--forward"]) == 1
    assert "nothing was allocated" in capsys.readouterr().err


def test_rounds_follow_a_warm_up_and_fill_the_time(monkeypatch):
    monkeypatch.setattr(measuring, "WARM_UP_SECONDS", 1.0)
    calls = []
    found = measuring.sustained(lambda steps: calls.append(steps) or 0.1 * steps, seconds=3.0)
    assert calls == [1, 1, 10] + [6] * 5 and found == pytest.approx([0.1] * 5)


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


def test_a_stage_of_a_config_is_measured(tmp_path):
    file = tmp_path / "two.py"
    file.write_text(
        "from gptjax.config import Config, Stage\n"
        "from gptjax.models.registry import PRESETS\n"
        "stages = (Stage(until=3), Stage(sequence_length=32, batch_tokens=64, micro_batch=2))\n"
        "config = Config(model=PRESETS['gpt2'], sequence_length=16, micro_batch=4, stages=stages)\n"
    )
    options = step.Step(config=file, stage=2)
    ((config, _),) = options.configs()
    assert options.name == "two stage 2"
    assert (config.sequence_length, config.micro_batch, config.batch_tokens) == (32, 2, 64)
    assert step.Step(config=file).configs()[0][0].sequence_length == 16
    with pytest.raises(BenchError, match="--stage 3: the config has 2 stages"):
        step.Step(config=file, stage=3).configs()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "x.py", "--preset", "gpt2"], "both name a model"),
        (["--config", str(OTHER), "--mlp", "xla"], "RotaryConfig has no option mlp"),
        (["--sequence-length", "2048"], "longer than the model's block size"),
        (["--devices"], "--devices must be numbers of at least 1"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--sequence-length", "-1"], "--sequence-length must be at least 1, got -1"),
    ],
)
@pytest.mark.parametrize("command", ["step", "profile"])
def test_options_that_are_refused(command, options, message, tmp_path, capsys):
    assert main([command, "--out", str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize(
    "command, option",
    [
        (["compare", str(RESULTS / "ladder.json"), str(RESULTS / "ladder.json")], "--fail-above"),
        (["step"], "--seconds"),
    ],
    ids=lambda part: part[0],
)
def test_a_number_out_of_range_is_refused(command, option, value, capsys):
    assert main([*command, option, value]) == 1
    assert re.search(f"{option} must be .* and finite in fp32, got", capsys.readouterr().err)


# ----------------------------------------------------------------------------------------- tables


def result(name):
    return json.loads((RESULTS / name).read_text())


def show_compare():
    before, after = (result(f"step/gpt2_xl_{batch}.json") for batch in (24, 36))
    after["rows"][0] |= {"batch": 24}
    compare.show(compare.compare(before["rows"], after["rows"]), before, after)


SHOWS = {
    "ladder": lambda: step.show(result("ladder.json")),
    "step": lambda: step.show(result("step/gpt2_xl_36.json")),
    "profile": lambda: profile.show(result("profile/gpt2_xl_24.json"), 4),
    "startup": lambda: startup.show(result("startup.json")),
    "kernels": lambda: kernels.show(result("kernels/attention.json")),
    "compare": show_compare,
}


FIGURE = re.compile(r"\d[\d.,]*%?")


def shown(name, width, monkeypatch, capsys):
    """What a command prints on a terminal of this width, or into a file if None."""
    monkeypatch.setattr(table.sys.stdout, "isatty", lambda: width is not None, raising=False)
    monkeypatch.setattr(
        table.shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((width, 24))
    )
    SHOWS[name]()
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", SHOWS)
def test_a_terminal_shows_every_figure(name, width, monkeypatch, capsys):
    in_a_file = shown(name, None, monkeypatch, capsys)
    text = shown(name, width, monkeypatch, capsys)
    # Compare prints commands, dates and versions above its table: the terminal wraps those.
    rows = text.splitlines()[text.count("→") if name == "compare" else 0 :]
    assert max(map(len, rows)) <= width
    assert sorted(FIGURE.findall(text)) == sorted(FIGURE.findall(in_a_file))
    assert len(FIGURE.findall(text)) >= 6


def test_the_figures_are_those_of_the_rows(monkeypatch, capsys):
    text = shown("ladder", None, monkeypatch, capsys)
    for row in result("ladder.json")["rows"]:
        figures = (f"{row['ms']:.2f}", f"{row['tokens/s']:,.0f}", f"{row['mfu']:.1%}")
        (line,) = [line for line in text.splitlines() if figures[0] in line.split()]
        assert row["rung"] in line and set(figures) <= set(line.split())


def test_a_layout():
    rows = [
        Row("a", ("1.0", "22"), "first"),
        Row("longer", ("333.0", ""), "second note"),
        Row(),
        Row("b", note="failed"),
    ]
    assert table.lines(("ms", "GiB"), rows, 80) == [
        "           ms  GiB",
        "a         1.0   22  first",
        "longer  333.0       second note",
        "",
        "b  failed",
    ]
    assert table.lines(("ms", "GiB"), rows, 24) == [
        "           ms  GiB",
        "a         1.0   22",
        "    first",
        "longer  333.0",
        "    second note",
        "",
        "b  failed",
    ]
    assert table.lines(("ms", "GiB"), rows[:2], 17) == [
        "     ms  GiB",
        "a",
        "    1.0   22",
        "    first",
        "longer",
        "  333.0",
        "    second note",
    ]


def test_texts_of_a_file_do_not_act_on_the_terminal(capsys):
    table.print_table("\x1b[2J[b]title", ("ms",), [Row("\x1b]0;x\x07 [/b]", ("1",), "\ud800")])
    assert capsys.readouterr().out.splitlines() == [
        "\ufffd[2J[b]title",
        "             ms",
        "\ufffd]0;x\ufffd [/b]   1  \ufffd",
    ]


# ---------------------------------------------------------------------------------------- results


GOOD = {
    "date": "d",
    "device": "a GPU",
    "command": "c",
    "versions": {},
    "rows": [{"system": "gptjax", "ms": 1.0}],
}


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "Expecting value"),
        ("[]", "no date"),
        (json.dumps(GOOD | {"rows": []}), "row 0 has neither ms nor error"),
        (json.dumps(GOOD | {"rows": [1]}), "row 0 has neither ms nor error"),
        (json.dumps(GOOD | {"rows": [{"ms": 0}]}), "row 0 has ms 0, not a positive number"),
        (json.dumps(GOOD | {"rows": [{"ms": float("nan")}]}), "row 0 has ms nan"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "versions"}), "no versions"),
        (json.dumps(GOOD | {"date": 7}), "no date"),
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
    for pair in ((good, bad), (bad, good)):
        assert main(["compare", *map(str, pair)]) == 1
        told = capsys.readouterr().err
        assert told.startswith("error: ") and len(told.splitlines()) == 1
        assert "bad\ufffd.json: expected a result of gptjax.bench" in told and said in told


def test_the_stored_results_have_the_schema():
    for file in RESULTS.rglob("*.json"):
        stored = results.read(file)
        assert {"date", "device", "versions", "commit", "command", "rows"} <= stored.keys()


def test_rows_that_differ_in_the_moments_are_compared(tmp_path, capsys):
    rows = [GOOD["rows"][0], GOOD["rows"][0] | {"moments": "bf16, bf16"}]
    slower = [rows[0] | {"ms": 3.0}, rows[1]]
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(GOOD | {"rows": rows}))
    after.write_text(json.dumps(GOOD | {"rows": slower}))
    assert main(["compare", str(before), str(after), "--fail-above", "1.02"]) == 1
    said = capsys.readouterr()
    assert "gptjax: 3.000 ×" in said.err and "gptjax · moments bf16, bf16" in said.out


def test_a_result_is_read_as_it_was_written(tmp_path):
    rows = [{"ms": 1.5, "asked": {}, "kernels": {"norm": "triton"}, "runs": [[1, None], []]}, {}]
    new = results.new("a command", rows, device="a GPU", packages=("pytest", "none"), note="µ")
    file = tmp_path / "folder" / "result.json"
    results.write(file, new)
    assert results.read(file) == new and "µ" in file.read_text()
    assert "pytest" in new["versions"] and "none" not in new["versions"]


@pytest.mark.parametrize(
    "name, options",
    [
        ("profile", profile.Profile(out=Path("out"), forward=True, top=2)),
        ("step", step.Step(batch=(1, 2), config=Path("a b.py"), devices=(1, 2))),
        ("ladder", ladder.Ladder(batch=2)),
        ("startup", startup.Startup(config=Path("x.py"), options="--val-every 0")),
    ],
)
def test_the_command_of_a_result_repeats_its_options(name, options):
    python, _, module, command, *arguments = shlex.split(results.bench_command(name, options))
    assert (python, module, command) == ("python", "gptjax.bench", name)
    out = ["--out", "out"] if name == "profile" else []
    assert tyro.cli(type(options), args=[*arguments, *out]) == options


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_result_that_is_no_file_is_refused(tmp_path, capsys, make):
    make(tmp_path / "x.json")
    file = str(tmp_path / "x.json")
    for command in (["compare", file, file], ["draw", str(tmp_path), str(tmp_path)]):
        assert main(command) == 1
        assert "expected a JSON file of bench, found a folder" in capsys.readouterr().err


def test_a_picture_needs_a_result_of_its_kind(tmp_path, capsys):
    (tmp_path / "step.json").write_text(json.dumps(GOOD))
    assert main(["draw", str(tmp_path), str(tmp_path)]) == 1
    assert "expected a result of kernels, ladder or profile (no 'bar')" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- compare


def of_rows(rows, **versions):
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
    a.write_text(json.dumps(of_rows(old)))
    b.write_text(json.dumps(of_rows(new, torch="2")))
    assert main(["compare", str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert "1.060 ×" in said and said.count("absent") == 3 and "torch: absent → 2" in said
    assert main(["compare", str(a), str(b), "--fail-above", "1.05"]) == 1
    said = capsys.readouterr().err
    assert (
        "jit" in said
        and "1.060" in said
        and "breaks · gpt2 · batch 4: out of memory" in said
        and "came" not in said
    )
    assert "gone · gpt2 · batch 4: absent" in said
    a.write_text(json.dumps(of_rows(old[:1])))
    b.write_text(json.dumps(of_rows([new[0], new[2]])))
    assert main(["compare", str(a), str(b), "--fail-above", "1.07"]) == 0
    b.write_text(json.dumps(of_rows([{"rung": "came", "ms": 2.0}])))
    assert main(["compare", str(a), str(b)]) == 1
    assert "no measured row in common" in capsys.readouterr().err
    b.write_text("{}")
    assert main(["compare", str(a), str(b)]) == 1
    assert "expected a result of gptjax.bench" in capsys.readouterr().err


def test_steps_that_differ_in_an_option_are_not_the_same_row():
    row = {"system": "gptjax", "ms": 1.0, "asked": {"attention": "xla"}}
    found = compare.compare([row], [row | {"asked": {}, "ms": 2.0}, row | {"ms": 3.0}])
    assert [r.get("ratio") for r in found] == [3.0, None]


def test_rows_of_several_devices_are_not_those_of_one():
    row = {"system": "torch", "ms": 1.0}
    fsdp = {"devices": 2, "parallel": "fsdp2", "reshard_after_forward": True}
    old = [row, row | fsdp, row | fsdp | {"reduce_dtype": "bf16"}]
    new = [row | {"devices": 1, "ms": 2.0}]
    new += [row | fsdp | {"ms": 3.0}, row | fsdp | {"reshard_after_forward": False}]
    pairs = compare.compare(old, new)
    assert [(pair["name"], pair.get("ratio")) for pair in pairs] == [
        ("torch", 2.0),
        ("torch · 2 devices · fsdp2", 3.0),
        ("torch · 2 devices · fsdp2 · bf16", None),
        ("torch · 2 devices · fsdp2 · gathered once", None),
    ]


# ------------------------------------------------------------------------------- the command line


def test_help_tells_the_two_files_apart(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    told = capsys.readouterr().out
    assert "step, ladder or kernels" in told
    assert "BEFORE.json AFTER.json" in told and "the reference" in told and "PATH" not in told


@pytest.mark.parametrize(
    "options", [["compare", "--help"], ["compare", *2 * [str(RESULTS / "ladder.json")]]]
)
def test_a_reader_that_ends_early_ends_the_command_quietly(options):
    """As in `python -m gptjax.bench compare --help | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    code = [sys.executable, "-m", "gptjax.bench", *options]
    done = subprocess.run(code, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_ends_with_a_line(number, code, tmp_path):
    train = tmp_path / "train.py"
    train.write_text("import time; open('go', 'w'); time.sleep(60)")
    (tmp_path / "tiny.py").write_text(CARD)
    options = ["startup", "--train", str(train), "--config", str(tmp_path / "tiny.py")]
    process = subprocess.Popen(
        [sys.executable, "-m", "gptjax.bench", *options], stderr=subprocess.PIPE
    )
    while not (tmp_path / "go").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate()
    assert (process.returncode, error) == (code, b"interrupted\n")


def test_results_are_on_the_disk_before_the_table_is_printed(tmp_path, monkeypatch):
    """The reader of the table may have ended, and the measurement took minutes."""

    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr(step.Step, "measure", lambda *_: GOOD["rows"])
    monkeypatch.setattr(step, "show", closed)
    with pytest.raises(BrokenPipeError):
        step.Step(out=tmp_path / "step.json").run()
    assert json.loads((tmp_path / "step.json").read_text())["rows"] == GOOD["rows"]


@pytest.mark.parametrize("command", [["step"], ["ladder"], ["startup", "--config", "none.py"]])
def test_a_place_that_cannot_be_written_is_refused_before_the_measurement(
    command, tmp_path, monkeypatch, capsys
):
    def measure(*_):
        raise AssertionError("measured")

    monkeypatch.setattr(ladder, "rungs", measure)
    monkeypatch.setattr(step.Step, "configs", measure)
    monkeypatch.setattr(startup, "starts", measure)
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file" / "out.json"):
        assert main([*command, "--out", str(out)]) == 1
        assert str(tmp_path) in capsys.readouterr().err
