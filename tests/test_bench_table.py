"""The tables of gptjax.bench show every figure at 80 columns; bad files are refused."""

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
from bench_tools import CARD

from gptjax.bench import compare, generate, kernels, ladder, profile, results, startup, step, table
from gptjax.bench.__main__ import main
from gptjax.bench.errors import BenchError
from gptjax.bench.harness import Ceilings
from gptjax.bench.table import Row
from gptjax.config import Config

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
DEVICE = jax.devices()[0]


def result(name):
    return json.loads((RESULTS / name).read_text())


def show_kernels():
    found = result("kernels/attention.json")
    kernels.show(found["rows"], Ceilings(**found["ceilings"]))


def show_compare():
    before, after = (result(f"step/gpt2_xl_{batch}.json") for batch in (24, 36))
    after["rows"][0] |= {"batch": 24}
    compare.show(compare.compare(before["rows"], after["rows"]), before, after)


SHOWS = {
    "ladder": lambda: ladder.show(result("ladder.json")["rows"], DEVICE),
    "step": lambda: step.show(result("step/gpt2_xl_36.json")["rows"], DEVICE),
    "profile": lambda: profile.show(result("profile/gpt2_xl_24.json")["rows"][0], 4),
    "startup": lambda: startup.show(result("startup.json")["rows"]),
    "kernels": show_kernels,
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
    text = shown("ladder", 80, monkeypatch, capsys)
    for row in result("ladder.json")["rows"]:
        figures = (
            f"{row['ms']:.2f}",
            f"{row['tokens/s']:,.0f}",
            f"{row['mfu']:.1%}",
            f"{row['gib']:.1f}",
        )
        (line,) = [line for line in text.splitlines() if figures[0] in line.split()]
        assert line.split("  ")[1].strip() == row["rung"] and set(figures) <= set(line.split())


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


# -------------------------------------------------------------------------------------------- files

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
        ("[]", "no rows"),
        ("{}", "no rows"),
        (json.dumps(GOOD | {"rows": []}), "no rows"),
        (json.dumps(GOOD | {"rows": [1]}), "row 0 has neither ms nor error"),
        (
            json.dumps(GOOD | {"rows": [{"ms": "fast"}]}),
            "row 0 has ms 'fast', expected a positive number",
        ),
        (json.dumps(GOOD | {"rows": [{"ms": 0}]}), "row 0 has ms 0"),
        (json.dumps(GOOD | {"rows": [{"ms": float("nan")}]}), "row 0 has ms nan"),
        (json.dumps(GOOD | {"rows": [{"ms": 1, "asked": []}]}), "options that are not an object"),
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
        assert (
            "bad\ufffd.json: expected JSON of bench step, ladder, kernels or generate" in told
            and said in told
        )


@pytest.mark.parametrize("file", sorted(RESULTS.rglob("*.json")), ids=lambda file: file.stem)
def test_every_stored_result_has_the_schema(file):
    stored = results.read(file)
    assert {"date", "device", "versions", "commit", "command", "rows"} <= stored.keys()


def test_no_stored_result_has_two_rows_of_one_measurement():
    for file in RESULTS.rglob("*.json"):
        compare.check_distinct(file, results.read(file)["rows"])


def test_two_rows_of_one_measurement_are_refused(tmp_path, capsys):
    """PyTorch's rows repeat if --moment-dtype has two values."""
    theirs = {"system": "torch", "ms": 1.0}
    good, twice = tmp_path / "good.json", tmp_path / "twice.json"
    good.write_text(json.dumps(GOOD | {"rows": [*GOOD["rows"], theirs, theirs]}))
    twice.write_text(json.dumps(GOOD | {"rows": 2 * GOOD["rows"]}))
    assert main(["compare", str(good), str(good)]) == 0
    for pair in ((good, twice), (twice, good)):
        assert main(["compare", *map(str, pair)]) == 1
        assert "twice.json: expected each measurement once" in capsys.readouterr().err


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
        ("profile", profile.Profile(out=Path("out"), overlap_reduce=True, forward=True)),
        ("profile", profile.Profile(out=Path("out"), overlap_reduce=False, top=2)),
        ("step", step.Step(overlap_reduce=(True, False), batch=(1, 2), config=Path("a b.py"))),
        ("ladder", ladder.Ladder(torch=False, batch=2)),
        ("generate", generate.Generate(top_k=None, temperature=(0.5,), torch=True)),
    ],
)
def test_the_command_of_a_result_repeats_its_options(name, options):
    python, _, module, command, *arguments = shlex.split(results.bench_command(name, options))
    assert (python, module, command) == ("python", "gptjax.bench", name)
    out = ["--out", "out"] if name == "profile" else []
    assert tyro.cli(type(options), args=[*arguments, *out]) == options


@pytest.mark.parametrize("change", [{"rows": []}, {"rows": [1]}, {"commit": 7}, {"device": None}])
def test_a_result_without_the_schema_is_refused(tmp_path, change):
    (tmp_path / "result.json").write_text(json.dumps(GOOD | change))
    with pytest.raises(BenchError, match="expected a result of"):
        results.read(tmp_path / "result.json")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_result_that_is_no_file_is_refused(tmp_path, capsys, make):
    make(tmp_path / "x.json")
    for command in (
        ["compare", str(tmp_path / "x.json"), str(tmp_path / "x.json")],
        ["draw", str(tmp_path), str(tmp_path)],
        ["ladder", "--draw", str(tmp_path / "x.json"), "--picture", str(tmp_path / "bars.png")],
    ):
        assert main(command) == 1
        assert (
            "expected a JSON file of bench, found a folder or a device" in capsys.readouterr().err
        )


def test_a_picture_needs_rows_of_its_own_kind(tmp_path, capsys):
    file = tmp_path / "step.json"
    file.write_text(json.dumps(GOOD))
    assert main(["draw", str(tmp_path), str(tmp_path)]) == 1
    assert "row 0 has no kernel" in capsys.readouterr().err
    row = dict.fromkeys(("kernel", "case", "implementation", "bound", "bar"), "softmax") | {
        "ms": 1,
        "ceiling": 0.5,
    }
    file.write_text(json.dumps(GOOD | {"rows": [row]}))
    assert main(["draw", str(tmp_path), str(tmp_path)]) == 1
    assert "expected results of bench kernels, with ceilings" in capsys.readouterr().err
    file.write_text(json.dumps(GOOD))
    assert main(["ladder", "--draw", str(file), "--picture", str(tmp_path / "bars.png")]) == 1
    assert "row 0 has no rung" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bars.foo", "bars", ".png"])
@pytest.mark.parametrize("draw", [["--draw", str(RESULTS / "ladder.json")], []])
def test_a_picture_of_no_format_is_refused_before_the_measurement(
    name, draw, tmp_path, monkeypatch, capsys
):
    def measure(*_):
        raise AssertionError("measured")

    monkeypatch.setattr(ladder, "one_device", measure)
    assert main(["ladder", *draw, "--picture", str(tmp_path / name)]) == 1
    told = capsys.readouterr().err
    assert f"{name}: expected a picture's name that ends in one of ." in told
    assert ".pdf" in told and ".png" in told and ".svg" in told
    assert not list(tmp_path.iterdir())


def test_help_tells_the_two_files_apart(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    told = capsys.readouterr().out
    assert "step, ladder, kernels or generate" in told
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


@pytest.mark.parametrize(
    "command, said",
    [
        (["step", "--devices"], "--devices must be numbers of at least 1"),
        (["generate", "--implementation"], "--implementation must be auto, triton or xla"),
        (["startup", "--config", "x.py", "--options=--device 'cpu"], "No closing quotation"),
    ],
)
def test_an_option_without_a_value_is_refused(command, said, capsys):
    assert main(command) == 1
    assert said in capsys.readouterr().err


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

    monkeypatch.setattr(step.Step, "configs", lambda self: [Config()])
    monkeypatch.setattr(step.Step, "_measure", lambda *_: GOOD["rows"])
    monkeypatch.setattr(step, "show", closed)
    with pytest.raises(BrokenPipeError):
        step.Step(out=tmp_path / "step.json").run()
    assert json.loads((tmp_path / "step.json").read_text())["rows"] == GOOD["rows"]


def test_the_table_is_printed_if_the_results_cannot_be_written(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(step.Step, "configs", lambda self: [Config()])
    monkeypatch.setattr(step.Step, "_measure", lambda *_: (tmp_path / "out").mkdir() or [{}])
    monkeypatch.setattr(step, "show", lambda rows, device: shown.append(rows))
    with pytest.raises(OSError, match="expected a regular file, found a directory"):
        step.Step(out=tmp_path / "out").run()
    assert shown == [[{}]] and [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "command, out",
    [
        (["step"], "folder"),
        (["step"], "file/step.json"),
        (["generate"], "folder"),
        (["ladder"], "folder"),
        (["ladder", "--picture"], "folder.png"),
        (["startup", "--config", "none.py"], "folder"),
        (["profile"], "file"),
        (["profile"], "file/profile"),
        (["kernels", str(RESULTS.parent / "kernels" / "norm.py")], "file"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_measurement(
    command, out, tmp_path, monkeypatch, capsys
):
    def measure(*_):
        raise AssertionError("measured")

    for module in (generate, ladder, profile, step):
        monkeypatch.setattr(module, "one_device", measure)
    monkeypatch.setattr(startup, "starts", measure)
    (tmp_path / "file").touch()
    for name in ("folder", "folder.png"):
        (tmp_path / name).mkdir()
    option = [] if "--picture" in command else ["--out"]
    assert main([*command, *option, str(tmp_path / out)]) == 1
    told = capsys.readouterr().err
    assert str(tmp_path / out).split("/step.json")[0] in told and "give another name" in told
    assert sorted(file.name for file in tmp_path.iterdir()) == [*("file", "folder", "folder.png")]


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize("option", ["--batch", "--sequence-length"])
@pytest.mark.parametrize("command", ["step", "ladder", "profile"])
def test_a_size_below_1_is_refused(command, option, value, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    assert main([command, *out, option, value]) == 1
    assert f"{option} must be at least 1, got {value}" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize(
    "command, option",
    [
        (["compare", str(RESULTS / "ladder.json"), str(RESULTS / "ladder.json")], "--fail-above"),
        (["step"], "--seconds"),
        (["generate"], "--seconds"),
    ],
    ids=lambda part: part[0],
)
def test_a_number_out_of_range_is_refused(command, option, value, capsys):
    assert main([*command, option, value]) == 1
    assert re.search(f"{option} must be .* and finite in fp32, got", capsys.readouterr().err)


def test_a_stage_of_a_config_is_measured(tmp_path):
    file = tmp_path / "two.py"
    file.write_text(
        "from gptjax.config import Config, Stage\n"
        "from gptjax.models.registry import PRESETS\n"
        "stages = (Stage(until=3), Stage(sequence_length=32, batch_tokens=64, micro_batch=2))\n"
        "config = Config(model=PRESETS['gpt2'], sequence_length=16, micro_batch=4, stages=stages)\n"
    )
    options = step.Step(config=file, stage=2)
    (config,) = options.configs()
    assert options.name == "two stage 2"
    assert (config.sequence_length, config.micro_batch, config.batch_tokens) == (32, 2, 64)
    assert step.Step(config=file).configs()[0].sequence_length == 16
    with pytest.raises(BenchError, match="--stage 3: the config has 2 stages"):
        step.Step(config=file, stage=3).configs()
