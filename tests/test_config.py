"""Configs: files, the command line, what a checkpoint remembers of them, and every error's text."""

import dataclasses
import json
from pathlib import Path

import pytest

from gptjax import config as configuration
from gptjax.config import Config, ConfigError, OptimizerConfig, from_command_line, load, to_json
from gptjax.models.gpt2 import GPT2Config

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.py"))
TINY = str(next(path for path in CONFIGS if path.stem == "gpt2_tiny"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_divides_on_one_to_eight_gpus(path):
    config = load(path)
    assert config.name == path.stem
    for devices in (1, 2, 4, 8):
        if config.batch_tokens >= config.micro_batch * config.sequence_length * devices:
            assert config.micro_batches(devices) >= 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_an_experiment_card(path):
    card = path.read_text().split('"""')[1]
    for heading in ("Command", "Hardware", "Time", "Loss"):
        assert f"{heading}:" in card, f"{path.name}'s docstring has no line `{heading}:`"
    assert f"python train.py --config configs/{path.name}" in card


def test_published_sizes():
    sizes = {"gpt2_124m": 124_439_808, "gpt2_350m": 354_823_168, "gpt2_774m": 774_030_080, "gpt2_1558m": 1_557_611_200}
    for path in CONFIGS:
        if path.stem in sizes:
            assert load(path).model.num_params == sizes[path.stem]


def test_the_flagship_is_llm_c_s_recipe():
    config = load(Path(TINY).with_name("gpt2_124m.py"))
    o = config.optimizer
    assert (config.batch_tokens, o.learning_rate, o.warmup_steps) == (524_288, 6e-4, 700)
    assert (o.schedule, o.final_fraction, o.weight_decay, o.clip_norm) == ("cosine", 0.0, 0.1, 1.0)
    assert (o.b1, o.b2, o.eps) == (0.9, 0.95, 1e-8)


def test_every_field_can_be_overridden():
    config = from_command_line(
        ["--model.n-layer", "6", "--config", TINY, "--model.precision", "bf16_residual_fp32", "--max-steps", "7"]
        + ["--optimizer.skip-loss-z", "3", "--optimizer.clip-norm", "None", "--runs-dir", "elsewhere", "--name", "x"]
    )
    assert config.model.n_layer == 6 and config.model.precision.name == "bf16_residual_fp32"
    assert config.optimizer.skip_loss_z == 3.0 and config.optimizer.clip_norm is None
    assert config.run_dir == Path("elsewhere/x") and config.max_steps == 7
    assert config.model.n_embd == load(Path(TINY)).model.n_embd  # what was not named stays


def test_help_shows_every_field_with_its_meaning(capsys):
    with pytest.raises(SystemExit) as exit_info:
        from_command_line(["--config", TINY, "--help"])
    assert exit_info.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for kind, prefix in ((Config, ""), (GPT2Config, "model."), (OptimizerConfig, "optimizer.")):
        for field in dataclasses.fields(kind):
            if field.name not in ("model", "optimizer"):
                assert f"--{prefix}{field.name.replace('_', '-')}" in shown
    assert (
        "Sequences on each device at a time" in shown
        and "The optimizer, its learning-rate schedule, and when an update is skipped" in shown
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model.precision", "fp8"], "fp32.*tf32.*bf16"),
        (["--resume", "maybe"], "auto.*never.*must"),
        (["--optimizer.schedule", "cos"], "cosine.*linear.*constant.*wsd"),
        (["--model.recompute", "all"], "none.*block.*sublayer"),
        (["--modl.n-layer", "3"], "--model.n-layer"),
        (["--max-steps", "many"], "invalid literal"),
        (["--max-steps", "0"], "at least 1"),
        (["--model.n-head", "3"], "n_embd=128 is not a multiple of n_head=3"),
        (["--sequence-length", "4096"], "longer than the model's block size 128"),
        (["--name", "a/b"], "plain folder name"),
    ],
)
def test_a_bad_option_is_an_error_that_names_the_choices(arguments, says, capsys):
    import re

    with pytest.raises(SystemExit) as exit_info:
        from_command_line(["--config", TINY, *arguments])
    assert exit_info.value.code == 2
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert re.search(says, shown), shown


def test_a_missing_config_names_those_that_there_are():
    with pytest.raises(ConfigError, match=r"no config file .*gpt2_giant\.py; there are: .*gpt2_tiny\.py"):
        from_command_line(["--config", str(Path(TINY).with_name("gpt2_giant.py"))])
    with pytest.raises(ConfigError, match=r"--config FILE is missing.*configs/gpt2_tiny\.py"):
        from_command_line([])


@pytest.mark.parametrize(("text", "says"), [("", "is missing"), ("config = {'a': 1}", "is a dict")])
def test_a_file_without_a_config_says_what_it_must_define(tmp_path, text, says):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"must define `config = gptjax.config.Config\(...\)`; its `config` {says}"):
        load(path)


def test_a_batch_that_does_not_divide_names_the_nearest_that_does():
    config = dataclasses.replace(Config(), sequence_length=1024, batch_tokens=100_000, micro_batch=8)
    with pytest.raises(ConfigError, match=r"100000 is not a multiple.*8 × 1024 × 4 = 32768; take 131072 or 98304"):
        config.micro_batches(4)
    assert dataclasses.replace(config, batch_tokens=98304).micro_batches(4) == 3


def test_differences_are_found_and_operational_ones_are_not():
    config = load(Path(TINY))
    saved = json.loads(json.dumps(to_json(config)))  # as a checkpoint gives it back
    assert configuration.differences(saved, config) == []
    moved = dataclasses.replace(config, name="other", micro_batch=1, val_every=7, runs_dir=Path("x"))
    assert configuration.differences(saved, moved) == []
    model = dataclasses.replace(config.model, n_layer=5)
    assert configuration.differences(saved, dataclasses.replace(config, model=model, seed=3)) == [
        "--model.n-layer: the checkpoint has 4, now 5",
        "--seed: the checkpoint has 0, now 3",
    ]
    # More steps stretch a schedule that ends with the run …
    longer = dataclasses.replace(config, max_steps=2 * config.max_steps)
    assert "--optimizer.schedule-steps" in configuration.differences(saved, longer)[0]
    # … and not one whose end is given.
    fixed = dataclasses.replace(longer.optimizer, schedule_steps=config.max_steps)
    assert configuration.differences(saved, dataclasses.replace(longer, optimizer=fixed)) == []


def test_an_unusable_kernel_is_a_config_error():
    config = dataclasses.replace(Config(), model=GPT2Config(attention="flash9"))
    with pytest.raises(ConfigError, match="unknown implementation 'flash9'.*auto.*xla"):
        config.kernels()
