"""The command line and config files: options, help, and every error's text."""

import dataclasses
import itertools
import os
import re
from pathlib import Path

import pytest

from gptjax.cli import from_command_line, load
from gptjax.config import Config, ConfigError, to_json
from gptjax.data.__main__ import main as data_main
from gptjax.models.gpt2 import GPT2Config
from gptjax.optim import ALGORITHMS, MuonConfig, NorMuonConfig, OptimizerConfig

TINY = str(Path(__file__).parent.parent / "configs" / "gpt2_tiny.py")


def test_every_field_can_be_overridden():
    options = (
        f"--model.n-layer 6 --config {TINY} --model.precision bf16_residual_fp32 --max-steps 7 "
        "--optimizer.skip-loss-z 3 --optimizer.clip-norm None --runs-dir elsewhere --name x"
    )
    config = from_command_line(options.split())
    assert config.model.n_layer == 6 and config.model.precision.name == "bf16_residual_fp32"
    assert config.optimizer.skip_loss_z == 3.0 and config.optimizer.clip_norm is None
    assert config.run_dir == Path("elsewhere/x") and config.max_steps == 7
    assert config.model.n_embd == load(Path(TINY)).model.n_embd  # what was not named stays


@pytest.mark.parametrize(
    "command", [from_command_line, data_main], ids=["train.py", "gptjax.data text"]
)
def test_help_is_wrapped_between_words_at_80_columns(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        command([*(["--config", TINY] if command is from_command_line else ["text"]), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    texts = [line.replace("│", " ").rstrip() for line in lines]
    for text, following in itertools.pairwise(texts):
        if text.startswith(" " * 8) and following.startswith(" " * 8):
            # The first word of the next line does not fit into this line.
            assert len(text) + 1 + len(following.split()[0]) > 78


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_help_shows_every_field_with_its_meaning(algorithm, capsys):
    with pytest.raises(SystemExit) as exit_info:
        from_command_line(["--config", TINY, "--optimizer", algorithm, "--help"])
    assert exit_info.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    kind_of_optimizer = ALGORITHMS[algorithm]
    for kind, prefix in ((Config, ""), (GPT2Config, "model."), (kind_of_optimizer, "optimizer.")):
        for field in dataclasses.fields(kind):
            if field.name not in ("model", "optimizer"):
                assert f"--{prefix}{field.name.replace('_', '-')}" in shown
    options = {field.name for kind in ALGORITHMS.values() for field in dataclasses.fields(kind)}
    for name in options - {field.name for field in dataclasses.fields(kind_of_optimizer)}:
        assert f"--optimizer.{name.replace('_', '-')} " not in shown
    assert "--optimizer {adamw,normuon,muon}" in shown and f"(default: {algorithm})" in shown
    assert "--config PATH Python file that defines `config`." in shown
    assert "Sequences on each device at a time" in shown
    assert "The optimizer, its learning-rate schedule, and when an update is skipped" in shown
    # Everyday options come first, the others below headings.
    order = ["--name", "--model.n-layer", "--optimizer.learning-rate", "data options", "--data-dir"]
    order += ["model options", "--model.block-size", "optimizer options", "--optimizer.warmup"]
    assert sorted(order, key=shown.index) == order


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model.precision", "fp4"], "fp32.*tf32.*bf16.*fp8"),
        (["--resume", "maybe"], "auto.*never.*must"),
        (["--optimizer.schedule", "cos"], "cosine.*linear.*constant.*wsd"),
        (["--model.recompute", "all"], "none.*block.*sublayer"),
        (["--modl.n-layer", "3"], "--model.n-layer"),
        (["--max-steps", "many"], "invalid literal"),
    ],
)
def test_a_bad_option_is_an_error_that_names_the_choices(arguments, says, capsys):
    with pytest.raises(SystemExit) as exit_info:
        from_command_line(["--config", TINY, *arguments])
    assert exit_info.value.code == 2
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert re.search(says, shown), shown


def test_an_option_out_of_its_range_is_one_sentence():
    for option, says in (
        (
            ["--optimizer.eps", "-1"],
            "^--optimizer.eps must be above 0 and finite in fp32, got -1.0$",
        ),
        (["--model.n-head", "3"], "n_embd=128 is not a multiple of n_head=3"),
        (["--stages", "{}x"], "--stages: expected a JSON object, got '{}x'"),
    ):
        with pytest.raises(ConfigError, match=says):
            from_command_line(["--config", TINY, *option])


def test_a_missing_config_names_those_that_there_are():
    giant = str(Path(TINY).with_name("gpt2_giant.py"))
    for arguments, says in (
        (["--config", giant], r"no config file .*gpt2_giant\.py; there are: .*gpt2_tiny\.py"),
        ([], r"--config FILE is missing.*configs/gpt2_tiny\.py"),
        (["--config", TINY, "--config=other.py"], "expected one --config, got .*, other.py"),
    ):
        with pytest.raises(ConfigError, match=says):
            from_command_line(arguments)


IMPORTS = (
    "from gptjax.config import Config, OptimizerConfig\nfrom gptjax.models.gpt2 import GPT2Config\n"
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "x = 1\nraise RuntimeError('no\x1b[31m GPU\\nsecond line')",
            ", line 2: RuntimeError: no\ufffd\\[31m GPU$",
        ),
        ("def f():\n    raise KeyError('k')\nf()", ", line 2: KeyError: 'k'"),
        ("assert False", ", line 1: AssertionError: no message"),
        ("config = Config(\n", r", line 1: SyntaxError: '\(' was never closed"),
        (
            IMPORTS + "config = Config(learning_rat=1)",
            r", line 3: TypeError: .*'learning_rat'.*--help` lists",
        ),
        (
            IMPORTS + "config = Config(optimizer=OptimizerConfig(eps=-1.0))",
            ", line 3: --optimizer.eps must be above 0",
        ),
        (
            IMPORTS + "config = Config(model=GPT2Config(n_head=7))",
            ", line 3: ValueError: GPT2Config: n_embd=768",
        ),
        ("import sys\nsys.exit(3)", ", line 2: SystemExit: 3"),
        ("def __getattr__(name):\n    raise RuntimeError(name)", ", line 2: RuntimeError: config"),
        ("\0\1", ": SyntaxError: source code string cannot contain null bytes"),
        ("", r" must define `config = gptjax.config.Config\(...\)`; its `config` is missing"),
        ("config = {'a': 1}", ".*its `config` is a dict"),
    ],
)
def test_a_config_file_that_cannot_be_executed_is_a_sentence(tmp_path, monkeypatch, text, says):
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^mine.py{says}") as error:
        load(Path("mine.py"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("config.json", "must be a Python file, NAME.py, got .*config.json"),
        ("folder.py", "must be a Python file, NAME.py, got .*folder.py"),
        ("fifo.py", "must be a Python file, NAME.py, got .*fifo.py"),
        ("x" * 300 + ".py", "cannot be read: File name too long"),
    ],
)
def test_what_is_not_a_python_file_is_a_sentence(tmp_path, name, says):
    path = tmp_path / name
    if name == "fifo.py":
        os.mkfifo(path)
    elif name == "folder.py":
        path.mkdir()
    elif len(name) < 200:
        path.write_text("{}")
    with pytest.raises(ConfigError, match=says):
        load(path)


def test_the_command_line_switches_the_algorithm():
    config = from_command_line(["--config", TINY, "--optimizer=normuon"])
    tiny = load(Path(TINY)).optimizer
    assert config.optimizer == NorMuonConfig(learning_rate=3e-3, warmup_steps=50)
    command = ["--config", TINY, "--optimizer.adam-every", "2", "--optimizer", "muon"]
    muon = from_command_line([*command, "--optimizer.learning-rate=1e-3"]).optimizer
    assert muon == MuonConfig(learning_rate=1e-3, warmup_steps=50, adam_every=2)
    assert from_command_line(["--config", TINY, "--optimizer", "adamw"]).optimizer == tiny
    normuon = str(Path(TINY).with_name("gpt2_124m_normuon.py"))
    config = from_command_line(["--config", normuon, "--optimizer.momentum-low", "0.5"])
    assert config.optimizer == dataclasses.replace(load(Path(normuon)).optimizer, momentum_low=0.5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--optimizer", "sgd"], "--optimizer must be one of adamw, normuon, muon, got 'sgd'"),
        (["--optimizer", "muon", "--optimizer=adamw"], "expected one --optimizer, got muon, adamw"),
        (
            ["--optimizer.adam-every", "2"],
            "--optimizer.adam-every is an option of normuon and muon, but the optimizer is adamw; "
            "set --optimizer normuon too",
        ),
        (
            ["--optimizer", "muon", "--optimizer.neuron_b2=0.9"],
            "--optimizer.neuron_b2 is an option of normuon, but the optimizer is muon",
        ),
        (
            ["--optimizer", "normuon", "--optimizer.neuron-b2", "1"],
            "--optimizer.neuron-b2 must be at least 0 and below 1 in fp32, got 1.0",
        ),
    ],
)
def test_a_contradictory_optimizer_is_one_sentence(arguments, says):
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}[^\n]*$"):
        from_command_line(["--config", TINY, *arguments])


OWN = """
import dataclasses
from typing import ClassVar
from gptjax.config import Config
from gptjax.optim import OptimizerConfig

@dataclasses.dataclass(frozen=True)
class Mine(OptimizerConfig):
    name: ClassVar[str] = "mine"
    strength: float = 2.0

config = Config(optimizer=Mine(b1=0.5))
"""


def test_a_config_file_may_define_its_own_optimizer(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    config = from_command_line(["--config", str(path), "--optimizer.strength", "3"])
    assert config.optimizer.strength == 3.0 and config.optimizer.b1 == 0.5
    assert to_json(config)["optimizer.algorithm"] == "mine"
    same = from_command_line(["--config", str(path), "--optimizer", "mine"])
    assert same.optimizer == load(path).optimizer or same.optimizer.name == "mine"
    adamw = from_command_line(["--config", str(path), "--optimizer", "adamw"]).optimizer
    assert adamw == OptimizerConfig(b1=0.5)
