"""benchmarks/experiments/learning.py: both optimizers start from the same weights and read the data
in the same order, each run is recorded once, and the comparison follows from the numbers."""

import dataclasses
import importlib
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from gptjax import cli, data, parallel
from gptjax import config as configuration
from gptjax.models.base import graph
from gptjax.training.step import init_state, make_train_step

EXPERIMENTS = Path(__file__).parents[1] / "benchmarks" / "experiments"
RECIPE = """
from gptjax import optim
from gptjax.config import Config
from gptjax.models.gpt2 import GPT2Config
config = Config(
    model=GPT2Config(
        vocab_size=61, padded_vocab_size=64, block_size=16, n_layer=1, n_head=2, n_embd=16
    ),
    sequence_length=16,
    optimizer=optim.ALGORITHMS["{}"](),
)
"""

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.fixture
def learning(monkeypatch):
    # As when it is run: the modules that it imports are in the same folder.
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("learning")


@pytest.fixture
def options(learning, corpus, tmp_path):
    for name in ("adamw", "normuon"):
        (tmp_path / f"{name}.py").write_text(RECIPE.format(name))
    return learning.Options(
        out=tmp_path / "out",
        adamw=tmp_path / "adamw.py",
        normuon=tmp_path / "normuon.py",
        dataset=str(corpus),
        device="cpu",
        seeds=2,
        steps=8,
        sequence_length=16,
        batch_tokens=64,
        micro_batch=4,
        adamw_rates=(1e-2, 3e-2),
        matrix_rates=(0.02, 0.04),
        rest_rates=(1e-2,),
        val_every=4,
        val_tokens=512,
    )


def records(o):
    return [json.loads(line) for line in (o.out / "runs.jsonl").read_text().splitlines()]


def test_trains_once_and_compares(learning, options, monkeypatch, capsys):
    assert learning.main(options, []) == 0
    made = records(options)
    assert len(made) == 2 + 1 + 2 + 1
    # One seed is one start and one order of the data, whatever trains on it.
    firsts = {
        seed: {
            r["train"][0]
            for r in made
            if r["settings"]["seed"] == seed and "0.02" not in r["label"]
        }
        for seed in (0, 1)
    }
    assert len(firsts[0]) == len(firsts[1]) == 1 and firsts[0] != firsts[1]
    assert [step for step, _ in made[0]["val"]] == [4, 8] and [
        step for step, _ in made[-1]["val"]
    ] == [4, 6]
    result = json.loads((options.out / "learning.json").read_text())
    assert result["rows"] == made and set(result["result"]) == {"adamw", "normuon 0.75×"}
    assert (options.out / "learning.png").stat().st_size > 10_000

    # Nothing is made again, and no device is asked for.
    monkeypatch.setattr(learning.Runs, "train", lambda *_: pytest.fail("made a second time"))
    assert learning.main(dataclasses.replace(options, device="gpu"), []) == 0
    assert json.loads((options.out / "learning.json").read_text())["result"] == result["result"]
    assert "AdamW, best at learning rate" in capsys.readouterr().out

    # The tables train as the schedules do that train.py has.
    (last,) = [r for r in made if r["label"] == "normuon lr 0.04, rest 0.01, 6 steps seed 0"]
    recipe = cli.load(options.normuon)
    config = learning.config_of(
        recipe, options, 6, 0, matrix_learning_rate=0.04, learning_rate=1e-2
    )
    mesh = parallel.data_mesh(jax.devices("cpu")[:1])
    tx = config.build_optimizer(mesh)
    step = jax.jit(make_train_step(graph(config.model), tx))
    state, dataset = (
        init_state(config.model, tx, 0),
        data.find_dataset(options.dataset, options.data_dir),
    )
    losses = []
    with data.Loader(dataset.train, sequence_length=16, batch=4, seed=0, vocab_size=61) as loader:
        for _ in range(6):
            batch = jax.tree.map(lambda x: x[None], next(loader))
            state, metrics = step(state, batch)
            losses.append(metrics["loss"].item())
    np.testing.assert_allclose(last["train"], losses, rtol=1e-6)


def test_stops_in_time_and_goes_on(learning, options, monkeypatch, capsys):
    made = []

    def train(self, config, label):
        made.append(label)
        o = config.optimizer
        matrix = o.matrix_learning_rate if o.name == "normuon" else None
        # AdamW is best at 3e-2, which is the last, and NorMuon at 0.02; a rate of 0.04 breaks off.
        end = (
            None
            if matrix == 0.04
            else 3.0 - o.learning_rate - 0.5 * (matrix is not None) + 0.25 * config.seed
        )
        if len(made) == 4 and self.o.limit_s < math.inf:
            raise learning.OutOfTime
        steps = [4, config.max_steps] if end is not None else [4]
        val = [
            [step, end if step == config.max_steps else (None if end is None else 4.0)]
            for step in steps
        ]
        return {
            "label": label,
            "val": val,
            "train": [],
            "ms": 1.0,
            "date": "d",
            "device": "cpu",
            "versions": {},
        }

    monkeypatch.setattr(learning.Runs, "train", train)
    assert learning.main(dataclasses.replace(options, limit_s=1e6), []) == 1
    assert "3 runs are in" in capsys.readouterr().out and len(records(options)) == 3
    assert learning.main(options, []) == 0
    # the one that was stopped was begun again
    assert len(records(options)) == 6 and len(set(made)) == 6
    result = json.loads((options.out / "learning.json").read_text())
    assert result["result"]["adamw"] == {
        "learning_rate": 0.03,
        "warmup": 0.1,
        "steps": 8,
        "final": 3.095,
        "seeds": [2.97, 3.22],
    }
    normuon = result["result"]["normuon 0.75×"]
    # From 4 at step 4 to 2.615 at step 6 in the mean: 3.095 is reached at 5.307 of 8.
    assert normuon["final"] == pytest.approx(2.615) and normuon["learning_rates"] == [0.02, 0.01]
    assert normuon["fraction_of_steps"] == pytest.approx(
        (4 + 2 * (4 - 3.095) / (4 - 2.615)) / 8, abs=1e-4
    )
    assert normuon["fraction_of_each_seed"] == pytest.approx(
        [(4 + 2 * (4 - adamw) / (4 - ours)) / 8 for adamw, ours in ((2.97, 2.49), (3.22, 2.74))],
        abs=1e-4,
    )
    assert result["normuon_tuning"] == [[0.02, 0.01, 2.49], [0.04, 0.01, None]]
    assert [line.split(" is at the edge")[0] for line in result["said"][2:]] == [
        "The best of AdamW's learning rate",
        "The best of NorMuon's matrix learning rate",
    ]


def test_other_warmups_are_tried_at_the_best_rate_and_the_next(learning, options, monkeypatch):
    def train(self, config, label):
        o = config.optimizer
        end = abs(o.learning_rate - (1e-2 if o.warmup_steps == 1 else 3e-2)) + (
            3.0 if o.warmup_steps == 1 else 2.0
        )
        val = [[4, 9.0], [config.max_steps, end]]
        return {
            "label": label,
            "val": val,
            "train": [],
            "ms": 1.0,
            "date": "d",
            "device": "cpu",
            "versions": {},
        }

    monkeypatch.setattr(learning.Runs, "train", train)
    assert learning.main(dataclasses.replace(options, adamw_warmups=(0.5,), seeds=1), []) == 0
    result = json.loads((options.out / "learning.json").read_text())
    assert [pair[:2] for pair in result["adamw_tuning"]] == [
        [0.01, 0.1],
        [0.03, 0.1],
        [0.01, 0.5],
        [0.03, 0.5],
    ]
    assert (result["result"]["adamw"]["learning_rate"], result["result"]["adamw"]["warmup"]) == (
        0.03,
        0.5,
    )


def test_a_record_that_is_older_than_an_option_counts(learning, options, monkeypatch):
    def train(self, config, label):
        val = [[4, 9.0], [config.max_steps, 3.0]]
        return {
            "label": label,
            "val": val,
            "train": [],
            "ms": 1.0,
            "date": "d",
            "device": "cpu",
            "versions": {},
        }

    monkeypatch.setattr(learning.Runs, "train", train)
    assert learning.main(options, []) == 0
    older = records(options)
    for record in older:
        del record["settings"]["optimizer.b2"]
        record["settings"].pop("optimizer.neuron_b2", None)
    (options.out / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in older))
    monkeypatch.setattr(learning.Runs, "train", lambda *_: pytest.fail("made a second time"))
    assert learning.main(options, []) == 0


@pytest.mark.usefixtures("learning")
def test_where_a_curve_reaches_a_loss():
    reached = importlib.import_module("_learning_report").reached
    steps = np.array([10, 20, 30])
    assert reached(steps, np.array([5.0, 4.0, 3.0]), 3.5) == 25
    assert reached(steps, np.array([5.0, 4.0, 3.0]), 2.5) is None
    assert reached(steps, np.array([3.0, 4.0, 3.0]), 3.5) == 10
    assert reached(steps, np.array([np.inf, 4.0, 3.0]), 4.0) == 20


def test_what_cannot_be_compared_is_refused(learning, options):
    with pytest.raises(configuration.ConfigError, match=r"unknown variants \['x'\]"):
        learning.main(dataclasses.replace(options, variants=("x",)), [])
    options.normuon.write_text(options.normuon.read_text().replace("n_layer=1", "n_layer=2"))
    with pytest.raises(configuration.ConfigError, match="different models"):
        learning.main(options, [])
