"""Stages: batch, sequence length and learning rate that change at given steps of a run."""

import dataclasses
import json
import threading

import jax
import numpy as np
import optax
import pytest
from dataset_tools import tokens_of
from train_tools import losses, rows, run, same_as

from gptjax import config as configuration
from gptjax.cli import from_command_line
from gptjax.config import Config, ConfigError, Stage
from gptjax.optim import NorMuonConfig
from gptjax.parallel import Parallel
from gptjax.precision import Precision
from gptjax.timeline import Timeline
from gptjax.training import compilation, status_line
from gptjax.training.compilation import StagedStep
from gptjax.training.inputs import Inputs
from gptjax.training.step import init_state
from gptjax.weights import checkpoint_files

BF16 = Precision("bf16")
# Steps 0–5 as a run without stages, 6–8 with another batch in the same order of windows, 9–11 with
# another sequence length and model.
STAGES = (
    Stage(until=6),
    Stage(until=9, batch_tokens=256, learning_rate_factor=1.5),
    Stage(sequence_length=16, micro_batch=8, learning_rate_factor=0.5, model={"precision": BF16}),
)


@pytest.fixture
def staged(config):
    """A run of 12 steps in three stages."""
    optimizer = dataclasses.replace(config.optimizer, schedule_steps=20)
    never = {"val_every": 0, "sample_every": 0, "checkpoint_every": 0}
    return dataclasses.replace(config, optimizer=optimizer, stages=STAGES, max_steps=12, **never)


@pytest.fixture
def whole(staged, program_folder, monkeypatch):
    """The complete run, which the tests share: only the first runs it."""
    monkeypatch.setattr(status_line, "LOG_EVERY", 1)
    whole = dataclasses.replace(staged, runs_dir=program_folder / "runs", name="staged")
    shown = program_folder / "shown"
    code, text = run(whole)
    assert code == 0
    if not shown.exists():
        shown.write_text(text)
    return whole, shown.read_text()


def test_a_run_in_stages(staged, whole):
    whole, shown = whole
    plain = dataclasses.replace(staged, name="plain", stages=(), max_steps=6)
    assert run(plain)[0] == 0
    train, schedule = rows(whole, "train"), plain.schedules()["learning_rate"]
    assert list(train) == list(range(1, 13))
    for step, row in train.items():
        stage = 1 if step <= 6 else 2 if step <= 9 else 3
        tokens = {1: 512 * step, 2: 3072 + 256 * (step - 6), 3: 3840 + 512 * (step - 9)}
        factor = {1: 1.0, 2: 1.5, 3: 0.5}
        assert (row["stage"], row["tokens"]) == (stage, tokens[stage])
        assert row["lr"] == pytest.approx(factor[stage] * float(schedule(step - 1)), rel=1e-6)
        # The first step of a stage has no time: it also began a loader.
        assert (row["ms"] is None) == (step in (1, 7, 10))
    # The first stage is a run without stages.
    assert losses(plain) == {step: losses(whole)[step] for step in range(1, 7)}
    assert "stage" not in rows(plain, "train")[1]
    for line in (
        "stages      1: steps 0–5, 512 tokens: 4 × 4 sequences of 32 on each device, recompute",
        " 2: steps 6–8, 256 tokens: 2 × 4 sequences of 32 on each device, lr × 1.5\n",
        " 3: steps 9–11, 512 tokens: 4 × 8 sequences of 16 on each device, lr × 0.5, precision ",
        "stage       2, from step 6: 0.0",
        "step 6/12 ",
        " · stage 1/3\n",
        " · stage 3/3\n",
    ):
        assert line in shown, line


def test_a_run_resumes_at_and_inside_a_stage_bit_for_bit(staged, whole):
    for end in (8, 9):
        code, shown = run(dataclasses.replace(staged, max_steps=end))
        assert code == 0 and "the run ends before the last" in shown
        place = checkpoint_files.read_meta(staged.run_dir / "checkpoints" / str(end))["data"]
        assert place["stage"] == 2
    same_as(whole[0], staged, "resuming from step 9")


def test_the_windows_of_a_stage(staged):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])
    inputs = Inputs.find(staged, mesh)

    def read(step, count):
        batches = inputs.train_batches(step)
        windows = [tokens_of(next(batches)) for _ in range(count)]
        batches.close()
        return windows

    every = read(0, 12)
    shapes = [(4, 4, 33)] * 6 + [(2, 4, 33)] * 3 + [(4, 8, 17)] * 3
    assert [windows.shape for windows in every] == shapes
    for step in (5, 6, 7, 9, 11):
        for ours, theirs in zip(read(step, 12 - step), every[step:], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    # The second stage continues in the order of the first; the third has another one.
    plain = Inputs.find(dataclasses.replace(staged, stages=()), mesh).loader(0)
    first = np.concatenate([tokens_of(next(plain)) for _ in range(8)])[: 6 * 16 + 3 * 8]
    plain.close()
    np.testing.assert_array_equal(np.concatenate([x.reshape(-1, 33) for x in every[:9]]), first)
    short = Inputs.find(dataclasses.replace(staged, stages=(), sequence_length=16), mesh).loader(0)
    assert not np.array_equal(tokens_of(next(short)).reshape(4, 8, 17), every[9])
    short.close()
    timeline = inputs.timeline
    assert [(timeline.at(step).order, timeline.position(step)) for step in (6, 9, 11)] == [
        (0, 96),
        (1, 0),
        (1, 64),
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages": (Stage(), Stage())}, r"expected an increasing until, .* got \[None\]"),
        ({"stages": (Stage(until=5), Stage(until=5))}, r"expected an increasing .* got \[5, 5\]"),
        ({"stages": (Stage(until=11),)}, "last stage ends at step 11, before --max-steps 12"),
        ({"stages": (Stage(sequence_length=64),)}, "stage 1: --sequence-length 64 is longer"),
        (
            {"stages": (Stage(until=3), Stage(sequence_length=24))},
            "stage 2 of 2: --batch-tokens 512 is not a multiple of .* 24 ",
        ),
        ({"stages": (Stage(micro_batch=0),)}, "--stages.micro-batch must be at least 1"),
        ({"stages": (Stage(learning_rate_factor=-1.0),)}, "factor must be above 0 and finite"),
        (
            {"stages": (Stage(until=3), Stage(model={"n_layer": 2}))},
            "stage 2: expected changes of the model that keep the shapes .*, got n_layer",
        ),
        ({"stages": (Stage(model={"windows": 2}),)}, "stage 1: GPT2Config has no fields 'windows'"),
        (
            {"data_order": "sequential", "separate_documents": True}
            | {"stages": (Stage(until=3), Stage(max_document_length=8))},
            "--data-order sequential needs max_document_length in all stages, or in none",
        ),
        (
            {"stages": (Stage(until=6), Stage(batch_tokens=320))},
            "stage 2 of 2: --batch-tokens 320 is not a multiple",
        ),
    ],
)
def test_stages_that_cannot_be_are_refused(staged, changes, says):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])
    with pytest.raises(ConfigError, match=says):
        Inputs.find(dataclasses.replace(staged, **changes), mesh)


def test_the_config_of_a_step_and_its_json(staged):
    for step, expected in ((0, (512, 32, 4)), (8, (256, 32, 4)), (9, (512, 16, 8))):
        at = Timeline(staged).at(step).config
        assert at.model.precision == (BF16 if step == 9 else staged.model.precision)
        assert (at.batch_tokens, at.sequence_length, at.micro_batch, at.stages) == (*expected, ())
    plain = dataclasses.replace(staged, stages=())
    assert Timeline(plain).at(3).config is plain
    # A run without stages fits the checkpoints of a version without them.
    saved = configuration.to_json(plain)
    del saved["stages"]
    assert configuration.differences(saved, plain) == []

    saved = json.loads(json.dumps(configuration.to_json(staged)))
    assert saved["stages"][2]["model"] == {"precision": "bf16"}
    assert saved["stages"][1] == {"until": 9, "batch_tokens": 256, "learning_rate_factor": 1.5}
    other = dataclasses.replace(STAGES[2], micro_batch=4, model={"precision": "bf16"})
    other = dataclasses.replace(staged, stages=(*STAGES[:2], other))
    assert configuration.differences(saved, other) == []
    other = dataclasses.replace(staged, stages=(*STAGES[:2], Stage(sequence_length=16)))
    assert configuration.differences(saved, other)[0].startswith("--stages: the checkpoint has [{")


def test_stages_on_the_command_line():
    command = ["--config", "configs/gpt2_tiny.py", "--stages"]
    stages = ['{"until": 5, "batch_tokens": 2048}', '{"learning_rate_factor": 0.5}']
    expected = (Stage(until=5, batch_tokens=2048), Stage(learning_rate_factor=0.5))
    assert from_command_line([*command, *stages]).stages == expected
    with pytest.raises(ConfigError, match="--stages: expected the fields .* micro_batch, .*, got"):
        from_command_line([*command, '{"untill": 5}'])


def test_schedules_that_cannot_be_are_refused():
    optimizer = NorMuonConfig(
        schedule="linear", cooldown_steps=870, final_steps=40, warmup_steps=0, final_fraction=0.15
    )
    with pytest.raises(ConfigError, match="learning_rate_factor of at least final_fraction, 0.15"):
        stages = (Stage(until=483), Stage(learning_rate_factor=0.1))
        Config(optimizer=optimizer, stages=stages, max_steps=1490)
    with pytest.raises(ConfigError, match="0 steps of warm-up, 870 of cooldown and 40 final ones"):
        Config(optimizer=optimizer, max_steps=900)


def test_the_factor_multiplies_every_learning_rate_and_nothing_else():
    optimizer = NorMuonConfig(matrix_decay_form="lr_squared", matrix_weight_decay=0.5)
    stages = (Stage(until=400), Stage(learning_rate_factor=2.0))
    config = Config(optimizer=optimizer, stages=stages, max_steps=1000)
    staged = config.schedules()
    plain = optimizer.schedules(1000)
    for step, factor in ((399, 1), (400, 2), (900, 2)):
        step = np.int32(step)
        for name in ("learning_rate", "matrix_learning_rate", "matrix_weight_decay"):
            assert float(staged[name](step)) == pytest.approx(factor * float(plain[name](step)))
        assert float(staged["momentum"](step)) == float(plain["momentum"](step))


@pytest.fixture
def begin(staged, monkeypatch):
    """Return `StagedStep` with another function that compiles a stage."""

    def begin(compile_stage, step=0, say=lambda *line: None):
        monkeypatch.setattr(StagedStep, "_start", lambda *stage: None)
        monkeypatch.setattr(StagedStep, "_compile", lambda self, config: compile_stage(config))
        one, tx = Parallel.of(jax.devices("cpu")[:1]), optax.identity()
        state = jax.eval_shape(lambda: init_state(staged.model, tx, 0))
        inputs = Inputs.find(staged, one.mesh)
        steps = StagedStep(compilation.Compiler(None), inputs, tx, state, one, step, say)
        return steps, steps.at(step)

    return begin


def test_an_error_of_a_later_stage_is_raised_as_soon_as_it_is_known(begin, monkeypatch):
    def compile_stage(config):
        if config.sequence_length == 16 and fails:
            raise ValueError("expected a multiple of 96\nDetails")
        return compiled

    def compile_all():
        steps, _ = begin(compile_stage)
        steps._thread.shutdown()  # after all stages
        return steps

    says = "^stage 3 of 3: ValueError: expected a multiple of 96$"
    compiled, fails = (jax.jit(lambda x: x).lower(0).compile(), max), True
    with pytest.raises(ConfigError, match=says):
        compile_all().at(1)
    # With several processes, at the first step of the stage and in all processes.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(compilation.processes, "exchange", lambda value: [value, others])
    fails, others = False, None
    steps = compile_all()
    assert steps.at(5) == steps.at(6) == compiled
    others = "ValueError: expected a multiple of 96"
    assert steps.at(8) == compiled
    with pytest.raises(ConfigError, match=says):
        steps.at(9)


def test_later_stages_are_compiled_while_the_first_runs(staged, begin):
    started, may_end, said = [], threading.Event(), []
    timeline = Timeline(staged)

    def compile_stage(config):
        number = 1 + [span.config for span in timeline.spans].index(config)
        started.append(number)
        assert number == 1 or may_end.wait(60)
        return jax.jit(lambda x: x + number).lower(0).compile(), max

    steps, _ = begin(compile_stage, say=lambda *line: said.append(line))
    assert [int(steps.at(step)[0](0)) for step in range(6)] == [1] * 6
    may_end.set()
    assert [int(steps.at(step)[0](0)) for step in range(6, 12)] == [2] * 3 + [3] * 3
    assert started == [1, 2, 3]
    assert [text[:14] for _, text in said] == ["2, from step 6", "3, from step 9"]
    # A run that resumes does not compile the stages before its own.
    started.clear()
    steps, (first, _) = begin(compile_stage, step=9)
    assert int(first(0)) == 3 and started == [3]
    # Unless the newest checkpoint is damaged and the one before is of an earlier stage.
    assert int(steps.at(8)[0](0)) == 2 and int(steps.at(9)[0](0)) == 3
