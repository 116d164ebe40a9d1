"""benchmarks/experiments/fast_and_plain.py: both runs have the same weights and batches, and the
verdict follows from the numbers."""

import dataclasses
import importlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from gptjax import cli, data, parallel
from gptjax import config as configuration
from gptjax.models.base import graph
from gptjax.models.gpt2 import GPT2Config
from gptjax.training.step import init_state, make_eval_step, make_train_step

CARD = """
from gptjax.config import Config, OptimizerConfig
from gptjax.models.gpt2 import GPT2Config
from gptjax.precision import Precision
config = Config(
    model=GPT2Config(
        vocab_size=61, padded_vocab_size=64, block_size=16, n_layer=1, n_head=2, n_embd=16,
        precision=Precision("bf16"),
    ),
    sequence_length=16,
    optimizer=OptimizerConfig(learning_rate=1e-2),
)
"""
TINY = GPT2Config(
    vocab_size=61, padded_vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=16
)

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.fixture
def bench(monkeypatch):
    # As when it is run: the modules that it imports are in the same folder.
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks" / "experiments")
    return importlib.import_module("fast_and_plain")


@pytest.fixture
def options(bench, corpus, tmp_path):
    (tmp_path / "card.py").write_text(CARD)
    return bench.Options(
        out=tmp_path / "out",
        config=tmp_path / "card.py",
        dataset=str(corpus),
        device="cpu",
        seeds=2,
        steps=8,
        warmup_steps=2,
        sequence_length=16,
        batch_tokens=64,
        micro_batch=4,
        smooth_steps=3,
        val_tokens=512,
        size_steps=6,
    )


def records(o):
    return [json.loads(line) for line in (o.out / "runs.jsonl").read_text().splitlines()]


def result(o):
    return json.loads((o.out / "fast_and_plain.json").read_text())


def test_trains_both_and_compares(bench, options, monkeypatch, capsys):
    # On a CPU "auto" is "xla", too: another back end stands in for the plain one.
    monkeypatch.setitem(bench.BACK_ENDS, "plain", "reference")
    monkeypatch.setattr(bench, "PROGRESS_EVERY", 4)
    monkeypatch.setattr(bench, "PROGRESS_LAG", 1)
    monkeypatch.setitem(bench.PRESETS, "gpt2-medium", TINY)
    options = dataclasses.replace(options, sizes=("gpt2-medium:4:block",))
    assert bench.main(options, ["--given"]) == 0
    made = records(options)
    assert [r["label"] for r in made] == [
        *("plain, seed 0", "plain, seed 1", "fast, seed 0", "fast, seed 1"),
        "gpt2-medium:4:block at 0.0003",
    ]
    plain, fast, medium = (
        np.array([r["loss"] for r in made[:2]]),
        np.array([r["loss"] for r in made[2:4]]),
        made[4],
    )
    # One seed is one start and one order of the data; the back ends round differently.
    assert plain.shape == fast.shape == (2, 8) and 0 < np.abs(plain - fast).max() < 0.02
    assert np.abs(plain - fast)[:, 0].max() < 1e-3 and abs(plain[0, 0] - plain[1, 0]) > 1e-2
    assert {r["kernels"]["norm"] for r in made[:2]} == {"reference"} and made[2]["kernels"][
        "norm"
    ] == "xla"
    assert len(medium["loss"]) == len(medium["grad_norm"]) == 6 and medium["val"] is None

    found = result(options)
    comparison, (row,) = found["result"]["comparison"], found["result"]["sizes"]
    assert (
        found["rows"] == made
        and found["command"] == "python benchmarks/experiments/fast_and_plain.py --given"
    )
    assert comparison["within"] and comparison["kernels"]["plain"]["attention"] == "reference"
    assert comparison["validation"]["fast"] == [r["val"] for r in made[2:4]]
    assert row["finite"] and (row["learning_rate"], row["micro_batch"], row["recompute"]) == (
        3e-4,
        4,
        "block",
    )
    assert (row["first_loss"], row["last_loss"]) == (medium["loss"][0], medium["loss"][-1])
    assert (
        medium["settings"]["optimizer.warmup_steps"] == 10
        and medium["settings"]["model.precision"] == "bf16"
    )
    assert (options.out / "fast_and_plain.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert f"fast, seed 1: step 7, loss {fast[1, 6]:.4f}" in said
    assert (
        "\nwithin the spread between seeds" in said
        and "every loss and gradient norm finite" in said
    )

    # The losses are those of train.py's step.
    config = bench.config_of_seed(cli.load(options.config), options, "fast", 1)
    tx = config.build_optimizer(parallel.data_mesh(jax.devices("cpu")[:1]))
    step = jax.jit(make_train_step(graph(config.model), tx))
    state, dataset = (
        init_state(config.model, tx, 1),
        data.find_dataset(options.dataset, options.data_dir),
    )
    losses = []
    with data.Loader(dataset.train, sequence_length=16, batch=4, seed=1, vocab_size=61) as loader:
        for _ in range(8):
            batch = jax.tree.map(lambda x: x[None], next(loader))
            state, metrics = step(state, batch)
            losses.append(metrics["loss"].item())
    np.testing.assert_allclose(fast[1], losses, rtol=1e-6)
    (batch,) = data.fixed_batches(dataset.val, sequence_length=16, batch=32, count=1, vocab_size=61)
    val = make_eval_step(graph(config.model))(state.params, batch)
    # the same 512 tokens; compiled, bf16 rounds elsewhere
    np.testing.assert_allclose(made[3]["val"], val, rtol=1e-3)

    # Nothing is made again, and no device is asked for.
    monkeypatch.setattr(bench.Runs, "train", lambda *_: pytest.fail("made a second time"))
    assert bench.main(dataclasses.replace(options, device="gpu"), []) == 0
    assert result(options)["result"] == found["result"]


def made_up(config, label, loss, val):
    losses = [loss] * config.max_steps
    norms = [1.0] * config.max_steps
    return {"label": label, "kernels": {}, "loss": losses, "grad_norm": norms, "val": val} | {
        "ms": 1.0,
        "date": "d",
        "device": "cpu",
        "versions": {},
    }


def test_stops_in_time_and_goes_on(bench, options, monkeypatch, capsys):
    made = []

    def train(self, config, label):
        made.append(label)
        if len(made) == 4 and self.o.limit_s == 1e6:
            raise bench.OutOfTime
        # Seeds 0.2 apart; fast 0.5 higher: not within.
        loss = 3 + 0.2 * config.seed + 0.5 * label.startswith("fast")
        return made_up(config, label, loss, loss)

    monkeypatch.setattr(bench.Runs, "train", train)
    assert bench.main(dataclasses.replace(options, limit_s=1e6), []) == 1
    assert "3 runs are in" in capsys.readouterr().out and len(records(options)) == 3
    assert not (options.out / "fast_and_plain.json").exists()
    assert bench.main(options, []) == 1
    assert made == [
        "plain, seed 0",
        "plain, seed 1",
        "fast, seed 0",
        "fast, seed 1",
        "fast, seed 1",
    ]
    assert "NOT within the spread" in capsys.readouterr().out
    assert not result(options)["result"]["comparison"]["within"]


def test_a_rate_that_is_too_high_is_not_finite(bench, options, monkeypatch, capsys):
    monkeypatch.setitem(bench.PRESETS, "gpt2", TINY)
    monkeypatch.setitem(bench.RATES, "gpt2", 1e25)
    assert (
        bench.main(dataclasses.replace(options, seeds=0, sizes=("gpt2",), micro_batch=1), []) == 1
    )
    (row,) = result(options)["result"]["sizes"]
    assert not row["finite"] and row["last_loss"] is None
    # The first loss knows nothing of the learning rate.
    assert (
        row["first_loss"] == pytest.approx(np.log(61), abs=0.2)
        and 2 <= row["not_finite_at_step"] <= 6
    )
    assert f"NOT finite at step {row['not_finite_at_step']}" in capsys.readouterr().out
    assert not (options.out / "fast_and_plain.png").exists()


def runs_of(losses_SK, vals_S):
    return [
        {
            "label": f"seed {seed}",
            "loss": list(losses),
            "grad_norm": [1.0] * len(losses),
            "val": val,
        }
        for seed, (losses, val) in enumerate(zip(losses_SK, vals_S, strict=True))
    ]


class TestJudge:
    """Three seeds 0.1 apart: their standard deviation is 0.1 at each step."""

    plain_SK = np.array([[2.9], [3.0], [3.1]]) - 0.001 * np.arange(200)
    val_S = (2.9, 3.0, 3.1)

    def judge(self, bench, apart_SK, val_apart_S=(0, 0, 0)):
        fast = runs_of(self.plain_SK + apart_SK, np.add(self.val_S, val_apart_S).tolist())
        return bench.judge(runs_of(self.plain_SK, self.val_S), fast, 11)

    def test_the_numbers(self, bench):
        found = self.judge(bench, np.array([[0.03], [0.0], [-0.04]]), (0.05, 0.0, 0.0))
        assert found["within"] and found["finite"] and found["steps_outside_of_seeds"] == 0
        assert found["means_apart_of_spread"] == pytest.approx(0.01 / 3 / 0.1)
        assert found["training"] == {
            "spread": pytest.approx(0.1),
            "apart": pytest.approx((0.0025 / 3) ** 0.5),
            "apart_largest": pytest.approx(0.04),
            "apart_of_spread": pytest.approx((0.25 / 3) ** 0.5),
            "apart_largest_of_spread": pytest.approx(0.4),
        }
        assert found["validation"]["apart_largest_of_spread"] == pytest.approx(0.5)
        assert found["validation"]["apart_of_spread"] == pytest.approx(0.5 / 3**0.5)

    def test_no_seed_far_from_its_own_is_within(self, bench):
        # The means agree, and each seed has become another.
        found = self.judge(bench, np.array([[0.2], [0.0], [-0.2]]))
        assert found["means_apart_of_spread"] < 1e-6 and not found["within"]

    def test_no_short_stretch_that_is_off_is_within(self, bench):
        apart_K = np.where(abs(np.arange(200) - 150) <= 7, 0.11, 0.0)
        found = self.judge(bench, apart_K)
        assert found["training"]["apart_of_spread"] < 0.5 and found["steps_outside_of_seeds"] > 0
        assert not found["within"] and 147 <= found["at_step"] <= 155
        assert self.judge(bench, apart_K * 0.8)["within"]

    def test_no_other_validation_loss_is_within(self, bench):
        assert not self.judge(bench, 0.0, (0.11, 0.11, 0.11))["within"]
        assert self.judge(bench, 0.0, (0.09, -0.09, 0.09))["within"]

    @pytest.mark.parametrize("name", ["loss", "grad_norm"])
    def test_nothing_that_breaks_off_is_within(self, bench, name):
        plain, fast = runs_of(self.plain_SK, self.val_S), runs_of(self.plain_SK, self.val_S)
        assert bench.judge(plain, fast, 11)["within"]
        fast[1][name][41] = None
        found = bench.judge(plain, fast, 11)
        assert not found["within"] and found["not_finite"] == {"seed 1": 42}
        fast = runs_of(self.plain_SK, [2.9, None, 3.1])
        assert not bench.judge(plain, fast, 11)["within"]


def test_a_run_that_breaks_off_is_drawn_all_the_same(bench, options, monkeypatch, capsys):
    def train(self, config, label):
        record = made_up(config, label, 3.0 + 0.1 * config.seed, 3.0)
        if label == "fast, seed 1":
            record |= {"loss": record["loss"][:4] + [None] * 4, "val": None}
        return record

    monkeypatch.setattr(bench.Runs, "train", train)
    assert bench.main(options, []) == 1
    assert result(options)["result"]["comparison"]["not_finite"] == {"fast, seed 1": 5}
    assert "not finite: {'fast, seed 1': 5}: NOT within" in capsys.readouterr().out
    assert (options.out / "fast_and_plain.png").stat().st_size > 10_000


def test_fast_and_plain_differ_in_their_back_ends_alone(bench, options):
    card = cli.load(Path(__file__).parents[1] / "configs" / "gpt2_124m.py")
    plain, fast = (
        bench.config_of_seed(card, bench.Options(out=options.out), side, 2)
        for side in ("plain", "fast")
    )
    assert {getattr(plain.model, part) for part in bench.PARTS} == {"xla"}
    assert {getattr(fast.model, part) for part in bench.PARTS} == {"auto"}
    assert dataclasses.replace(plain, model=fast.model) == fast
    assert dataclasses.replace(plain.model, **dict.fromkeys(bench.PARTS, "auto")) == fast.model
    assert (
        fast.model.precision.name == "bf16"
        and fast.optimizer.learning_rate == 6e-4
        and fast.micro_batches(1) == 1
    )
    run = bench.Runs(options)
    assert run.settings(plain) != run.settings(fast)


def test_what_cannot_be_compared_is_refused(bench, options):
    for wrong, said in (
        ({"seeds": 1}, "a spread needs two"),
        ({"seeds": 0}, "and then --sizes is needed"),
        ({"smooth_steps": 10}, "expected an odd number"),
        ({"sizes": ("gpt2-tiny",)}, r"--sizes gpt2-tiny: expected one of \['gpt2', 'gpt2-medium'"),
        ({"sizes": ("gpt2:all",)}, "--sizes gpt2:all: expected"),
        ({"sizes": ("gpt2:4:layer",)}, "--sizes gpt2:4:layer: .*none, block or sublayer"),
    ):
        with pytest.raises(configuration.ConfigError, match=said):
            bench.main(dataclasses.replace(options, **wrong), [])
