"""benchmarks/experiments/speedrun.py: the record's stages in proportion, each idea left out, and
the numbers of the report."""

import functools
import importlib
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gptjax.config import Config, ConfigError, Stage
from gptjax.models.base import graph, init_params
from gptjax.models.speedrun import Speedrun, SpeedrunConfig
from gptjax.models.speedrun import Stage as ModelStage
from gptjax.optim import NorMuonConfig
from gptjax.timeline import Timeline

EXPERIMENTS = Path(__file__).parents[1] / "benchmarks" / "experiments"
# One layer of each kind, as in test_speedrun.py.
SMALL = SpeedrunConfig(
    vocab_size=257,
    padded_vocab_size=260,
    block_size=64,
    n_layer=3,
    n_head=2,
    n_embd=24,
    n_inner=16,
    bigram_rows=23,
    paired_layers=(0,),
    long_layers=(2,),
    value_layers=(2,),
    skip=(0, 1),
    lanes_from=2,
    stage=ModelStage(3, 6, (6,), (1.0, 0.5), True, (1.0, 0.0), (0, 4)),
)
# The record's steps, batches and multi-token weights.
RECORD = tuple(
    Stage(
        until=until,
        batch_tokens=batch,
        learning_rate_factor=factor,
        max_document_length=length,
        model={"stage": stage},
    )
    for until, batch, factor, length, stage in (
        (483, 131_072, 1.0, 20, ModelStage(2, 4, (4,), (1.0, 0.5), True, (1.0, 0.0), (0, 483))),
        (967, 262_144, 1.52, 40, ModelStage(3, 5, (4, 5), (1.0,), True, None, (483, 967))),
        (1450, 393_216, 1.73, 40, ModelStage(4, 6, (4, 5, 6), (1.0,), False, None, (967, 1450))),
        (None, 393_216, 0.15, 40, ModelStage(5, 7, (4, 5, 6, 7), evaluation_window=9)),
    )
)
CONFIG = Config(
    max_steps=1490,
    model=SMALL,
    optimizer=NorMuonConfig(momentum_warmup_steps=300, momentum_cooldown_steps=50, warmup_steps=0),
    batch_tokens=131_072,
    sequence_length=64,
    micro_batch=1,
    separate_documents=True,
    stages=RECORD,
)

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.fixture(autouse=True)
def _experiments(monkeypatch):
    # As when it is run: the modules that it imports are in the same folder.
    monkeypatch.syspath_prepend(EXPERIMENTS)


def test_stages_keep_their_proportions_and_the_tokens_are_exact():
    plan = importlib.import_module("_speedrun_plan")
    tokens = 400 * 512
    config = plan.scaled(CONFIG, tokens, batch_tokens=512, sequence_length=64)
    spans = Timeline(config).spans
    # Batches of 253, 505, 758 and 758 tokens in proportion, in whole sequences.
    assert [span.config.batch_tokens for span in spans] == [256, 512, 768, 768]
    assert [span.config.micro_batch for span in spans] == [4, 8, 12, 12]
    steps = [span.end - span.begin for span in spans]
    assert steps[1:] == [128, 128, 11] and 126 <= steps[0] <= 129
    assert Timeline(config).tokens(config.max_steps) == tokens
    assert [s.config.model.stage.steps for s in spans] == [(s.begin, s.end) for s in spans]
    assert spans[1].config.model.stage.rotary_windows == (4, 5)
    assert config.optimizer.momentum_warmup_steps == round(300 * 128 / 484)
    assert [s.learning_rate_factor for s in config.stages] == [1.0, 1.52, 1.73, 0.15]
    assert {s.config.max_document_length for s in Timeline(plan.without_cuts(config)).spans} == {
        None
    }
    short = Timeline(plan.with_sequences(config, 32)).spans
    assert [s.config.batch_tokens for s in short] == [s.config.batch_tokens for s in spans]
    assert [s.config.micro_batch for s in short] == [8, 16, 24, 24]
    for wrong in (tokens + 64, 4 * 256):
        with pytest.raises(ConfigError, match="multiple of 256, and enough for the 4 stages"):
            plan.scaled(CONFIG, wrong, batch_tokens=512, sequence_length=64)


def test_one_learning_rate_beyond_the_edge_is_tried():
    rates = importlib.import_module("_speedrun_plan").rates_to_try
    assert rates({}, (1, 2, 4)) == [1, 2, 4] and rates({1: 3.0}, (1, 2, 4)) == [2, 4]
    assert rates({1: 3.0, 2: 2.0, 4: 2.5}, (1, 2, 4)) == []
    assert rates({1: 3.0, 2: 2.0, 4: 1.5}, (1, 2, 4)) == [8]
    assert rates({1: 1.0, 2: 2.0, 4: math.inf}, (1, 2, 4)) == [0.5]
    assert rates({1: 3.0, 2: 2.0, 4: 1.5, 8: 1.0}, (1, 2, 4)) == []


def hidden(config, params, functions):
    ideas = importlib.import_module("_speedrun_ideas")
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 257, (1, 12)), jnp.int32)
    with ideas.replaced(functions):
        return nnx.merge(graph(config), params).hidden(tokens)


def test_each_idea_is_left_out():
    ideas = importlib.import_module("_speedrun_ideas")

    def traced(idea):
        config = idea.without(SMALL)
        params = idea.start(jax.eval_shape(lambda: init_params(config, 0)))
        return str(jax.make_jaxpr(lambda params: hidden(config, params, idea.functions))(params))

    whole, originals = traced(ideas.ALL), {**vars(Speedrun)}
    assert ideas.IDEAS[0] == ideas.ALL and len(ideas.IDEAS) >= 9
    for idea in ideas.IDEAS:
        if idea.name.startswith(ideas.ALL.name):
            continue
        unchanged = idea.values or idea.stage or idea.rounded
        assert (traced(idea) == whole) == bool(unchanged), idea.name
    assert {**vars(Speedrun)} == originals
    alone, untied = (idea.without(SMALL) for idea in ideas.IDEAS if idea.stage)
    assert SMALL.loss_options(jnp.int32(0)) and not alone.loss_options(jnp.int32(0))
    assert SMALL.tied_parameters() and not untied.tied_parameters()


def test_one_lane_is_two_equal_lanes():
    ideas = importlib.import_module("_speedrun_ideas")
    params, rng = init_params(SMALL, 0), np.random.default_rng(0)
    for name, p in params.items():
        params[name] = p + 0.3 * rng.standard_normal(p.shape).astype(np.float32)
    params["lane_lambdas"] = jnp.ones_like(params["lane_lambdas"])
    for name in ("x0_lambdas", "bigram_lambdas"):
        params[name] = params[name].at[SMALL.lanes_from :].set(0)
    (idea,) = [idea for idea in ideas.IDEAS if idea.name == "second lane"]
    one, two = (
        jax.jit(functools.partial(hidden, SMALL, functions=functions))(params)
        for functions in (idea.functions, {})
    )
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_a_held_parameter_keeps_its_value():
    ideas = importlib.import_module("_speedrun_ideas")
    idea = ideas.Idea("x", values={"a": 2.0})
    params = idea.start({"a": jnp.zeros(3), "b": jnp.zeros(2)})
    tx = idea.hold(optax.sgd(0.5))
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert params["a"].tolist() == [2, 2, 2]
    assert updates["a"].tolist() == [0, 0, 0] and updates["b"].tolist() == [-0.5, -0.5]
    # 256 − 0.5 is a tie in bf16.
    rounded = ideas.Idea("y", rounded=("b",)).hold(optax.sgd(0.5))
    params = {"a": jnp.full(3, 256.0), "b": jnp.array([256.0, 1.0])}
    updates, _ = rounded.update(grads, rounded.init(params), params)
    assert updates["a"].tolist() == [-0.5] * 3 and updates["b"].tolist() == [0, -0.5]


def record(label, *val, ms=10.0, part=0):
    run = {"date": "2026-01-01", "device": "cpu", "versions": {}}
    return {"label": label, "val": [list(point) for point in val], "ms": ms, "part": part, **run}


def test_costs_until_the_loss_that_all_reach(tmp_path):
    report = importlib.import_module("_speedrun_report")
    slow = record("a", (100, 1.0, 5.0), (200, 2.0, 4.0))
    other = record("a", (100, 1.0, 5.2), (200, 2.4, 4.2))
    fast = record("b", (100, 3.0, 4.6), (200, 6.0, 3.6))
    others = {"documents cut": slow}
    models = {
        "adamw": {"rate": 0.1, "tuning": [[0.1, 4.0]], "records": [slow, other]},
        "speedrun": {"rate": 0.2, "tuning": [[0.2, 3.6]], "records": [fast], "others": others},
    }
    fields, table = report.report_comparison(models, tmp_path / "x.png")
    result = fields["result"]
    assert result["target"] == pytest.approx(4.1)  # the mean of 4.0 and 4.2
    assert result["adamw"]["tokens"] == 200 and result["adamw"]["seconds"] == pytest.approx(2.2)
    own = result["speedrun"]
    assert [own["tokens"], own["seconds"]] == pytest.approx([150, 4.5])
    assert own["others"] == {"documents cut": 4.0} and own["tokens_per_second"] == 33
    assert table[-1] == "With documents cut, the speedrun's model ends at 4.000 (seed 0)."
    assert table[2].startswith(
        "| GPT-2 124M, AdamW | 0.1 | 4.100 (4.000, 4.200) | 91 | 0.00 M | 2.2"
    )
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_table_of_the_ablation(tmp_path):
    report = importlib.import_module("_speedrun_report")
    records = {
        "all ideas": record("all", (1, 1.0, 4.0), ms=10),
        "smear": record("smear", (1, 1.0, 4.01), ms=9.5),
        "all ideas, again": record("again", (1, 1.0, 4.001), ms=11, part=1),
        "tying": record("tying", (1, 1.0, 3.999), ms=11.5, part=1),
        "lane": record("lane", (1, 1.0, 3.995), ms=11.5, part=2),
        "backout": record("backout", (1, 1.0, 3.99), ms=10),
        "gates": record("gates", (1, 1.0, None), ms=10),
    }
    fields, table = report.report_ablation(records, tmp_path / "x.png")
    names = ["all ideas", "gates", "smear", "all ideas, again", "tying", "lane", "backout"]
    assert [row["without"] for row in fields["result"]] == names
    assert table[2] == "| nothing | 4.0000 | +0.0000 | 10.0 | +0.0 |"
    assert table[3] == "| gates | not finite |  | 10.0 | +0.0 |"
    assert table[4] == "| smear | 4.0100 | +0.0100 | 9.5 | -0.5 |"
    assert table[5] == "| nothing, again | 4.0010 | +0.0010 | 11.0 | +0.0 |"
    assert table[6] == "| tying | 3.9990 | -0.0010 | 11.5 | +0.5 |"
    assert table[7] == "| lane | 3.9950 | -0.0050 | 11.5 |  |"
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- ablate: generated -->\nold\n<!-- ablate: end -->\nb\n")
    report.write_part(page, "ablate", table[:2])
    text = page.read_text()
    assert text.startswith("a\n") and text.endswith("<!-- ablate: end -->\nb\n")
    assert "old" not in text and table[0] in text
    with pytest.raises(ConfigError, match="compare: generated"):
        report.write_part(page, "compare", table)
