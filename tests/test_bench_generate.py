"""gptjax.bench generate: rows, figures and refusals on a tiny model; transformers' side generates
what transformers generates by itself."""

import itertools
import json

import jax
import pytest
import torch
from bench_tools import TINY
from flax import nnx

from gptjax.bench import generate, measuring, results
from gptjax.bench.__main__ import main
from gptjax.bench.torch_side import torch_generation
from gptjax.models.gpt2 import PRESETS
from gptjax.models.llama3 import Llama3Config
from gptjax.precision import Precision

# The fixture `card`.
pytest_plugins = ["bench_tools"]
SHORT = ["--prompt", "3", "--new", "4", "--seconds", "0"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(measuring, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(generate, "FIRST_TOKENS", 1)


def test_a_row_for_each_system_back_end_and_draw(card, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--batch", "2", "--top-k", "5", "--implementation", "triton", "auto", "--torch"]
    assert main(["generate", "--config", card, *SHORT, *options, "--out", str(out)]) == 1
    result = results.read_times(out)
    rows = result["rows"]
    draws = ["3 + 4 tokens, greedy", "3 + 4 tokens, top-k 5"]
    assert [(row["system"], row["case"]) for row in rows] == [
        *itertools.product(["gptjax", "gptjax", "transformers"], draws)
    ]
    # The named back end needs a GPU; the others are measured.
    assert all("triton" in row["error"] and "ms" not in row for row in rows[:2])
    for ours, theirs in zip(rows[2:4], rows[4:], strict=True):
        assert ours["kernels"] == "xla" and theirs["kernels"] == "static cache, eager"
        assert ours["tokens/s"] == pytest.approx(2 * 4 / (ours["ms"] / 1e3))
        assert ours["of_torch"] == pytest.approx(theirs["ms"] / ours["ms"])
        assert ours["limit_us"] is ours["of_limit"] is None  # the bandwidth of a CPU is unknown
    assert result["command"] == (
        f"python -m gptjax.bench generate --config {card} --batch 2 --prompt 3 --new 4 --top-k 5 "
        "--implementation triton auto --torch --seconds 0.0"
    )
    printed = capsys.readouterr()
    assert "unknown memory bandwidth" in printed.out and "error: did not run:" in printed.err
    # A line of progress as soon as a row is complete.
    assert printed.err.count("tokens/s, step") == 4


def test_the_figures_of_a_row():
    """The first of all calls also compiles; a step is what remains after the first token."""
    calls = itertools.chain([30.0], itertools.repeat(10.0))
    row = generate.measure(
        lambda: next(calls), lambda: 1.0, batch=4, new=10, seconds=0.0, limit=0.25
    )
    expected = {"ms": 10e3, "tokens/s": 4.0, "first_token_ms": 1e3, "step_us": 1e6}
    expected |= {"limit_us": 0.25e6, "of_limit": 0.25, "compile_s": 20.0}
    assert {key: row[key] for key in expected} == pytest.approx(expected)


def test_the_bytes_of_a_step():
    """Weights that enter a matmul, and the keys and values of prompt + new/2 positions."""
    assert generate.step_bytes(abstract(TINY), 3, 4, 2) == (
        4 * (TINY.num_params - 8 * 16) + 3 * (4 + 2 / 2) * 2 * 2 * 16 * 4
    )
    config = Llama3Config(
        vocab_size=61, block_size=16, n_layer=3, n_head=4, n_kv_head=2, n_embd=32,
        precision=Precision("bf16"), tie_embeddings=False,
    )  # fmt: skip
    assert generate.step_bytes(abstract(config), 5, 6, 8) == (
        2 * (config.num_params - 61 * 32) + 5 * (6 + 8 / 2) * 3 * 2 * (2 * 8) * 2
    )


def abstract(config):
    """A model without arrays."""
    return nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_transformers_continues_as_with_its_own_cache(name):
    """Twice: the cache of the first call is reset."""
    config = TINY
    if name == "llama3":
        config = Llama3Config(
            vocab_size=61, block_size=8, n_layer=1, n_head=2, n_kv_head=1, n_embd=16
        )
    side = torch_generation(config, jax.devices("cpu")[0], batch=2, prompt=3, new=5)
    side.model.apply(spread)
    alone_BT = side.model.generate(side.prompt_BT, max_new_tokens=5, do_sample=False)
    for _ in range(2):
        assert torch.equal(side.generate(5, temperature=0.0, top_k=None), alone_BT)
    assert len({tuple(row) for row in alone_BT[:, 3:].tolist()}) == 2  # prompts matter
    # The draws of the likeliest token alone.
    assert torch.equal(side.generate(5, temperature=1.0, top_k=1), alone_BT)
    assert side.all_tokens(temperature=1.0, top_k=None) > 0
    side.free()


def spread(module):
    """Enlarge the matrices: with the initial ones every prompt has the same continuation."""
    for parameter in module.parameters(recurse=False):
        if parameter.ndim == 2:
            parameter.data *= 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--new", "1"], "--new must be at least 2"),
        (["--prompt", "0"], "--prompt must be at least 1"),
        (["--top-k", "0"], "--top-k must be at least 1"),
        (["--batch", "2", "0"], "--batch must be numbers of at least 1"),
        (["--temperature", "-1"], "--temperature must be at least 0"),
        (["--new", "1020"], "--prompt 32 and --new 1020 are 1052 tokens, and the model has 1024"),
    ],
)
def test_refusals(options, message, capsys, monkeypatch):
    model = type(PRESETS["gpt2"])
    monkeypatch.setattr(model, "build", lambda *_: pytest.fail("built a model"))
    assert main(["generate", *options]) == 1
    assert f"error: {message}" in capsys.readouterr().err


def test_torch_without_transformers(monkeypatch, capsys):
    monkeypatch.setattr(results, "is_installed", lambda package: package != "transformers")
    assert main(["generate", "--torch"]) == 1
    assert "--torch needs transformers" in capsys.readouterr().err


def test_results_can_be_compared(tmp_path, capsys):
    """Rows of one measurement are found by system, batch, case and back end."""
    row = {"system": "gptjax", "model": "gpt2", "precision": "bf16", "batch": 1, "ms": 2.0}
    rows = [
        row | {"case": case, "asked": {"implementation": name}, "ms": n + 1.0}
        for n, (case, name) in enumerate(itertools.product(["greedy", "top-k 50"], ["xla", "auto"]))
    ]
    result = results.new("python -m gptjax.bench generate", rows, device="cpu")
    (tmp_path / "a.json").write_text(json.dumps(result))
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert capsys.readouterr().out.count("1.000 ×") == 4
