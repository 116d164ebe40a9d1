"""Configs: types and ranges of options, their JSON, and the differences from a checkpoint's."""

import copy
import dataclasses
import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import get_type_hints

import jax
import pytest

from gptjax import config as configuration
from gptjax.cli import load
from gptjax.config import Config, ConfigError, to_json
from gptjax.fields import ranges
from gptjax.models.gpt2 import GPT2Config
from gptjax.optim import ALGORITHMS, NorMuonConfig, OptimizerConfig, switch_algorithm
from gptjax.training.step import init_state
from gptjax.user_folders import cache_folder

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.py"))
TINY = str(next(path for path in CONFIGS if path.stem == "gpt2_tiny"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_an_experiment_card_and_divides_on_one_to_eight_gpus(path):
    config, card = load(path), path.read_text().split('"""')[1]
    assert config.name == path.stem
    for heading in ("Command", "Hardware", "Time", "Loss"):
        assert f"{heading}:" in card, f"{path.name}'s docstring has no line `{heading}:`"
    assert f"python train.py --config configs/{path.name}" in card
    for devices in (1, 2, 4, 8):
        if config.batch_tokens >= config.micro_batch * config.sequence_length * devices:
            assert config.micro_batches(devices) >= 1


def test_published_sizes_and_the_recipe_of_llm_c():
    configs = {path.stem: load(path) for path in CONFIGS}
    sizes = {"124m": 124_439_808, "350m": 354_823_168, "774m": 774_030_080, "1558m": 1_557_611_200}
    for name, size in sizes.items():
        assert configs[f"gpt2_{name}"].model.num_params == size
    config = configs["gpt2_124m"]
    o = config.optimizer
    assert (config.batch_tokens, o.learning_rate, o.warmup_steps) == (524_288, 6e-4, 700)
    assert (o.schedule, o.final_fraction, o.weight_decay, o.clip_norm) == ("cosine", 0.0, 0.1, 1.0)
    assert (o.b1, o.b2, o.eps) == (0.9, 0.95, 1e-8)


@pytest.mark.parametrize("kind", [Config, *ALGORITHMS.values()])
def test_every_number_has_a_range(kind):
    types = get_type_hints(kind)
    numbers = {
        f.name
        for f in dataclasses.fields(kind)
        if types[f.name] in (int, float, int | None, float | None)
    }
    assert numbers and numbers == ranges(kind).keys()


OUT_OF_RANGE = [
    *((f"optimizer.{name}", value)
      for name in ("learning_rate", "matrix_learning_rate", "eps", "clip_norm")
      for value in (0, -1, 1e-46, 1e39)),
    *((f"optimizer.{name}", value)
      for name in ("skip_loss_z", "skip_grad_norm_z") for value in (0, -1)),
    *((f"optimizer.{name}", -100) for name in ("weight_decay", "matrix_weight_decay")),
    *((f"optimizer.{name}", value) for name in ("b1", "b2", "momentum", "momentum_low", "neuron_b2")
      for value in (-0.1, 1, 1.5, 1 - 1e-9)),
    *((f"optimizer.{name}", value)
      for name in ("final_fraction", "powercool_start", "ema_nesterov_stop", "tail_ema_weight",
                   "radial_pin")
      for value in (-3, 50)),
    *((f"optimizer.{name}", -1) for name in ("ema_nesterov_beta", "row_floor", "tail_ema_steps")),
    *((f"optimizer.{name}", -5)
      for name in ("warmup_steps", "schedule_steps", "momentum_warmup_steps")),
    *(("optimizer.schedule_steps", 0), ("optimizer.adam_every", 0)),
    *((name, value)
      for name in ("max_steps", "batch_tokens", "val_tokens", "keep_last",
                   "keep_every")
      for value in (0, -1, 2**31)),
    *((name, -1) for name in ("val_every", "sample_every", "checkpoint_every", "seed")),
    ("seed", 2**32),
]  # fmt: skip


NORMUON = Config(optimizer=NorMuonConfig())


def with_option(name: str, value: object) -> Config:
    """A config with one field changed; the optimizer's are named optimizer.FIELD."""
    config = copy.copy(NORMUON)
    options = config
    if name.startswith("optimizer."):
        options = copy.copy(config.optimizer)
        object.__setattr__(config, "optimizer", options)
    # `dataclasses.replace` would be stopped by the tests' own type checker.
    object.__setattr__(options, name.removeprefix("optimizer."), value)
    config.__post_init__()
    return config


def test_a_number_out_of_its_range_is_refused():
    for name, value in OUT_OF_RANGE:
        option = "--" + name.replace("_", "-")
        says = rf"^{option} must be (at least|above|in) .*, got {re.escape(str(value))}$"
        with pytest.raises(ConfigError, match=says):
            with_option(name, value)
    allowed = ranges(Config) | {f"optimizer.{n}": r for n, r in ranges(NorMuonConfig).items()}
    floats = [name for name, interval in allowed.items() if isinstance(interval.low, float)]
    assert len(floats) == 26
    for name, value in itertools.product(floats, (math.nan, math.inf, -math.inf)):
        with pytest.raises(
            ConfigError, match=f"{name.replace('_', '-')} must be .*got -?(nan|inf)"
        ):
            with_option(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("optimizer.b1", 0), ("optimizer.b2", 1 - 2**-24), ("optimizer.final_fraction", 1)],
        *[("seed", 2**32 - 1), ("optimizer.weight_decay", 0), ("optimizer.clip_norm", None)],
        *[("val_every", 0), ("max_steps", 2**31 - 1), ("optimizer.learning_rate", 1e30)],
        *[("keep_every", None)],
        ("model", GPT2Config(loss_chunk=1024)),
    ],
)
def test_the_ends_of_a_range_are_allowed(name, value):
    with_option(name, value)


def test_the_default_cache_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "gptjax"
    assert Config().data_dir == tmp_path / "gptjax" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "gptjax"
    # as where no home folder is known
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_folder() is None and Config().data_dir == Path("data")
    for folder, expected in (("/x", Path("/x")), ("", None)):
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", folder)
        assert cache_folder() == expected


@pytest.mark.parametrize(
    ("batch_tokens", "says"),
    [
        (100_000, "= 8 × 1024 × 4 = 32768; choose 131072 or 98304$"),
        (8192, "choose 32768 or --micro-batch 2$"),
    ],
)
def test_a_batch_that_does_not_divide_names_the_nearest_that_does(batch_tokens, says):
    config = Config(sequence_length=1024, batch_tokens=batch_tokens, micro_batch=8)
    with pytest.raises(ConfigError, match=f"{batch_tokens} is not a multiple.*{says}"):
        config.micro_batches(4)


def test_differences_are_found_and_operational_ones_are_not():
    config = load(Path(TINY))
    saved = json.loads(json.dumps(to_json(config)))  # as a checkpoint gives it back
    assert configuration.differences(saved, config) == []
    # A task that an older version had.
    assert configuration.differences(saved | {"eval_tasks": "mmlu"}, config) == []
    other = {"name": "other", "micro_batch": 1, "val_every": 7, "runs_dir": Path("x")}
    moved = dataclasses.replace(config, **other)
    assert configuration.differences(saved, moved) == []
    model = dataclasses.replace(config.model, n_layer=5)
    assert configuration.differences(saved, dataclasses.replace(config, model=model, seed=3)) == [
        "--model.n-layer: the checkpoint has 4, now 5",
        "--seed: the checkpoint has 0, now 3",
    ]
    # More steps stretch a schedule that ends with the run …
    longer = dataclasses.replace(config, max_steps=2 * config.max_steps)
    offer = "--resume with_changes allows such changes"
    assert configuration.differences(saved, longer) == [
        f"--max-steps {longer.max_steps}: the checkpoint's cosine schedule ends at step "
        f"{config.max_steps}; add --resume with_changes to end it at step {longer.max_steps}, or "
        f"--optimizer.schedule-steps {config.max_steps} to keep it, or choose --max-steps "
        f"{config.max_steps}, or start a new run: --name NEW --init-from {config.run_dir}",
        offer,
    ]
    replanned = dataclasses.replace(longer, resume="with_changes")
    assert configuration.differences(saved, replanned) == []
    ends = config.max_steps, longer.max_steps
    assert configuration.changes(saved, replanned) == {"optimizer.schedule_steps": ends}
    # An end that was given is named by its option.
    fixed = other_optimizer(longer, schedule_steps=longer.max_steps)
    assert configuration.differences(saved, fixed) == [
        f"--optimizer.schedule-steps: the checkpoint has {config.max_steps}, now "
        f"{longer.max_steps}",
        offer,
    ]
    # … and not one whose end is given.
    saved |= {"optimizer.schedule_steps": longer.max_steps}
    shorter = dataclasses.replace(fixed, max_steps=config.max_steps)
    assert [configuration.differences(saved, each) for each in (fixed, shorter)] == [[], []]


@pytest.mark.parametrize(
    "options, allowed",
    [
        ({"schedule": "constant"}, True),
        ({"schedule": "wsd"}, True),
        ({"schedule": "linear", "cooldown_steps": 100}, True),
        ({"schedule": "linear"}, False),
    ],
)
def test_more_steps_extend_a_schedule_that_stays_the_same_before_its_cooldown(options, allowed):
    config = other_optimizer(load(Path(TINY)), **options)
    saved = json.loads(json.dumps(to_json(config)))
    longer = dataclasses.replace(config, max_steps=2 * config.max_steps)
    assert (configuration.differences(saved, longer) == []) == allowed
    rates = [each.schedules()["learning_rate"] for each in (config, longer)]
    assert (rates[0](700) == rates[1](700)) == allowed
    # Not an earlier end, and not together with another change.
    for other in (dataclasses.replace(config, max_steps=900), other_optimizer(longer, b1=0.5)):
        assert configuration.differences(saved, other) != []


@pytest.mark.parametrize(
    ("options", "zero_from"),
    [
        ({"schedule_steps": 1000}, 1000),
        ({"final_steps": 20}, 990),
        ({"schedule_steps": 1005, "final_steps": 5, "cooldown_steps": 9}, 1000),
    ],
)
def test_steps_with_learning_rate_0_are_refused(options, zero_from):
    message = f"--max-steps 1010 with .* trains with learning rate 0 from step {zero_from} on"
    with pytest.raises(ConfigError, match=message):
        Config(max_steps=1010, optimizer=OptimizerConfig(**options))
    # The last step of a schedule that decays to 0 has a learning rate above 0.
    config = Config(max_steps=zero_from, optimizer=OptimizerConfig(**options | {"final_steps": 0}))
    assert config.schedules()["learning_rate"](zero_from - 1) > 0
    for kept in ({"final_fraction": 0.1}, {"schedule": "constant", "cooldown_steps": None}):
        Config(max_steps=1010, optimizer=OptimizerConfig(**options | kept))


def other_optimizer(config: Config, **optimizer) -> Config:
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **optimizer))


CHANGED = {"learning_rate": 1e-4, "matrix_learning_rate": 1e-3, "final_fraction": 0.5}
CHANGED |= {"schedule_steps": 2000, "clip_norm": None, "skip_loss_z": 3.0, "skip_grad_norm_z": 4.0}


def tiny_with(algorithm: str) -> Config:
    config = load(Path(TINY))
    return dataclasses.replace(config, optimizer=switch_algorithm(config.optimizer, algorithm))


def test_changes_are_allowed_on_purpose_only():
    config = tiny_with("normuon")
    saved = json.loads(json.dumps(to_json(config)))
    changed = other_optimizer(config, **CHANGED)
    assert {f"optimizer.{name}" for name in CHANGED} == configuration.changeable(changed)
    lines = configuration.differences(saved, changed)
    assert lines[2] == "--optimizer.learning-rate: the checkpoint has 0.003, now 0.0001"
    assert len(lines) == 8 and lines[-1] == "--resume with_changes allows such changes"
    allowed = dataclasses.replace(changed, resume="with_changes")
    assert configuration.differences(saved, allowed) == []
    found = configuration.changes(saved, allowed)
    assert found["optimizer.clip_norm"] == (1.0, None)
    assert found.keys() == configuration.changeable(config)
    assert configuration.changes(saved, config) == {}
    # Nothing else is allowed, and the option is not offered for it.
    other = other_optimizer(allowed, b1=0.5)
    assert configuration.differences(saved, other) == [
        "--optimizer.b1: the checkpoint has 0.9, now 0.5"
    ]
    assert len(configuration.differences(saved, dataclasses.replace(other, resume="auto"))) == 8


def test_the_optimizers_state_has_one_form_for_all_allowed_changes():
    """Else a resumed run could not restore it."""
    for algorithm in ("adamw", "normuon", "muon"):
        config = tiny_with(algorithm)
        changed = {name: CHANGED[name] for name in config.optimizer.changeable}
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])
        forms = [
            jax.eval_shape(lambda c=c, mesh=mesh: init_state(c.model, c.build_optimizer(mesh), 0))
            for c in (config, other_optimizer(config, **changed))
        ]
        assert forms[0] == forms[1]


def test_another_algorithm_is_refused_in_one_line():
    """Also with --resume with_changes. The options that only one of them has do not matter."""
    for old, new in itertools.permutations(ALGORITHMS, 2):
        saved = json.loads(json.dumps(to_json(tiny_with(old))))
        now = dataclasses.replace(tiny_with(new), resume="with_changes")
        wanted = [f"--optimizer: the checkpoint has {old}, now {new}"]
        assert configuration.differences(saved, now) == wanted
    # As written before each algorithm had options of its own.
    saved = json.loads(json.dumps(to_json(tiny_with("normuon"))))
    saved["optimizer.algorithm"] = "adamw"
    assert configuration.differences(saved, tiny_with("adamw")) == []


def test_former_options():
    """They do not matter, unless one changed what a run learned."""
    saved = to_json(Config()) | {"tokenizer": "byte", "log_every": 3, "overfit_one_batch": False}
    assert configuration.differences(saved, Config()) == []
    (line,) = configuration.differences(saved | {"overfit_one_batch": True}, Config())
    assert line.startswith("--overfit-one-batch: the checkpoint has True, now (no such option); ")


def test_any_json_can_be_compared():
    config = Config()
    assert configuration.differences({}, config) == []
    with pytest.raises(ConfigError, match="expected the checkpoint's config as a JSON object"):
        configuration.differences([], config)
    saved = {"optimizer.b1": {"a": [1]}, "seed": None, "no\x1b[31m such": float("nan")}
    error = ConfigError("\n".join(configuration.differences(saved, config)))
    assert str(error).splitlines() == [
        "--no\ufffd[31m such: the checkpoint has nan, now (no such option); gptjax of "
        "commit 6811bb8 may resume the run",
        "--optimizer.b1: the checkpoint has {'a': [1]}, now 0.9",
        "--seed: the checkpoint has None, now 0",
    ]
