"""gptjax.bench startup: the parts of a start add up, and train.py is measured as its users run
it."""

import json
from pathlib import Path

import pytest

from gptjax.bench import startup
from gptjax.bench.__main__ import main

TRAIN = str(Path(__file__).parents[1] / "train.py")
CARD = """
from gptjax.config import Config
from gptjax.models.gpt2 import GPT2Config

model = GPT2Config(
    vocab_size=256, padded_vocab_size=256, block_size=16, n_layer=1, n_head=1, n_embd=16
)
config = Config(
    device="cpu", model=model, sequence_length=16, batch_tokens=128, micro_batch=4, val_tokens=128,
)
"""


def test_what_the_log_does_not_know_of_is_pythons_own():
    first = {
        "time": 107.0,
        "seconds": {"imports": 2.0, "state": 4.5},
        "executables": [],
        "cache_hits": 3,
        "cache_misses": 0,
    }
    row = startup.row_of("cold", 100.0, first)
    assert row == {
        "start": "cold",
        "total": 7.0,
        "parts": {"python": 0.5, "imports": 2.0, "state": 4.5},
        "executables": [],
        "cache_hits": 3,
        "cache_misses": 0,
    }


def test_three_starts(tmp_path, capsys):
    """Cold finds nothing and warm everything; resumed goes on from the checkpoint,
    without a validation."""
    card, out = tmp_path / "card.py", tmp_path / "results" / "startup.json"
    card.write_text(CARD)
    command = ["startup", "--train", TRAIN, "--config", str(card)]
    assert main([*command, "--options=--name-of-nothing 1"]) == 1
    told = capsys.readouterr().err
    assert "the cold start failed" in told and "name-of-nothing" in told
    assert main([*command, "--options='x"]) == 1
    assert "No closing quotation" in capsys.readouterr().err

    assert main([*command, "--options=--val-tokens 128", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "train_step: traced and lowered" in shown and "total" in shown
    result = json.loads(out.read_text())
    assert result["command"].endswith("'--options=--val-tokens 128'")
    cold, warm, resumed = result["rows"]
    for row in result["rows"]:
        assert row["total"] == pytest.approx(sum(row["parts"].values()))
        assert {"imports", "data", "compilation", "state", "first step"} <= row["parts"].keys()
        assert row["device"] == "cpu" and "jax" in row["versions"]
    for row in result["rows"]:
        found = "compiled" if row is cold else "JAX's cache"
        sources = {e["name"]: e["source"] for e in row["executables"]}
        assert sources == {"train_step": found, "eval_step": found}
        assert all(e["lower"] > 0 for e in row["executables"])
    # The counts may differ: two threads that need the same executable at once both ask the cache.
    assert cold["cache_hits"] == 0 and cold["cache_misses"] >= 2
    assert warm["cache_hits"] >= 2 and warm["cache_misses"] == 0
    assert "validation" in warm["parts"] and "validation" not in resumed["parts"]


@pytest.mark.parametrize(
    "options, steps",
    [
        ("max_steps=20", 1000),
        ("max_steps=3000, optimizer=OptimizerConfig(cooldown_steps=2000)", 3000),
        ("max_steps=2, optimizer=OptimizerConfig(cooldown_steps=2000, schedule_steps=4000)", 4000),
    ],
)
def test_the_schedule_has_room_for_the_cooldown_of_the_config(
    tmp_path, monkeypatch, options, steps
):
    card = tmp_path / "card.py"
    of_run = CARD.replace("device=", f"{options}, device=")
    card.write_text(f"from gptjax.optim import OptimizerConfig\n{of_run}")
    given = []
    monkeypatch.setattr(startup, "_write_random_tokens", lambda *_: None)
    monkeypatch.setattr(startup, "_start", lambda *words: given.append(words[2]) or {})
    startup.starts(Path(TRAIN), card, [])
    for words in given:
        assert words[words.index("--optimizer.schedule-steps") + 1] == str(steps)
    assert len(given) == 3


def test_without_the_repository(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["startup", "--config", "card.py"]) == 1
    assert "give the path of the repository's train.py with --train" in capsys.readouterr().err
