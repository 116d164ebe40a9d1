"""The command line and config files: options and help. test_attacks_command_lines.py has errors."""

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest

from gptjax import precision
from gptjax.cli import config_option, from_command_line, load
from gptjax.config import Config, to_json
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


def test_help_is_wrapped_between_words_at_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        from_command_line(["--config", TINY, "--help"])
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


def test_commands_need_the_file_of_a_precision(tmp_path, monkeypatch):
    path = tmp_path / "its own.py"
    path.write_text(
        "from gptjax import Config, GPT2Config, Precision, precision\n"
        "precision.PRECISIONS['own'] = precision.PRECISIONS['bf16']\n"
        "config = Config(model=GPT2Config(precision=Precision('own')))\n"
    )
    monkeypatch.setattr(sys, "argv", ["train.py", f"--config={path}"])
    try:
        config = load(path)
    finally:
        del precision.PRECISIONS["own"]
    assert config_option(config) == f" --config '{path}'" and config_option(Config()) == ""


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
