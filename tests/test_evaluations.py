"""Evaluation tasks during training: `--eval-tasks` and `--eval-every`."""

import dataclasses

import jax
import pytest
from evaluation_tools import BYTES, hellaswag_items, write_core, write_jsonl
from train_tools import rows, run

from gptjax import load
from gptjax.evaluation import (
    EvaluationError,
    Scorer,
    core_metric,
    read_core,
    read_hellaswag,
    score_choices,
    score_core,
)


@pytest.fixture
def evaluating(config, tmp_path):
    """A run of three steps; two evaluations of two tasks."""
    write_jsonl(tmp_path / "hellaswag_val.jsonl", hellaswag_items(5))
    write_core(tmp_path / "eval_bundle", 5)
    model = dataclasses.replace(config.model, block_size=96, n_layer=1)
    options = {"eval_tasks": "hellaswag,core", "eval_every": 2, "max_steps": 3}
    return dataclasses.replace(
        config, model=model, data_dir=tmp_path, sample_every=0, val_every=0, **options
    )


def test_results_are_those_of_the_saved_model(evaluating):
    code, shown = run(evaluating)
    assert code == 0
    found = rows(evaluating, "eval")
    assert [*found] == [2, 3]  # and at the last step
    scorer = Scorer.of(load(evaluating.run_dir).model, jax.devices()[:1], 128)
    questions = read_hellaswag(evaluating.data_dir / "hellaswag_val.jsonl")
    metrics = score_choices(scorer, BYTES, questions).metrics()
    core = score_core(scorer, BYTES, read_core(evaluating.data_dir / "eval_bundle"))
    expected = {f"hellaswag_{name}": metrics[name] for name in ("acc", "acc_norm")}
    expected |= {"core": core_metric(core)}
    expected |= {f"core_{name}": each["acc"] for name, each in core.items()}
    line = {name: x for name, x in found[3].items() if name not in ("kind", "step", "tokens")}
    assert line == pytest.approx(expected)
    assert f"step 3: hellaswag_acc {metrics['acc']:.4f}, " in shown


def test_a_missing_file_ends_the_run_before_it_starts(evaluating):
    (evaluating.data_dir / "hellaswag_val.jsonl").unlink()
    with pytest.raises(EvaluationError, match="hellaswag_val.jsonl: No such file or directory; ht"):
        run(evaluating)
    assert not evaluating.run_dir.exists()
