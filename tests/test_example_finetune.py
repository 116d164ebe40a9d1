"""examples/finetune/: pre-train, fine-tune on pairs with a loss mask, ask."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import jax
import numpy as np
from train_tools import losses, rows, run

import gptjax
from gptjax import cli
from gptjax.data.__main__ import main
from gptjax.models.gpt2 import GPT2Config

pytest_plugins = ["train_tools"]

FOLDER = Path(__file__).parents[1] / "examples" / "finetune"
FIELDS = ["--prompt-field", "prompt", "--answer-field", "answer", "--tokenizer", "byte"]
FIELDS += ["--name", "facts"]


def test_the_pairs_are_different_and_the_readme_is_short():
    pairs = [json.loads(line) for line in (FOLDER / "pairs.jsonl").read_text().splitlines()]
    assert 50 <= len(pairs) <= 100 and all({*pair} == {"prompt", "answer"} for pair in pairs)
    assert len({pair["prompt"] for pair in pairs}) == len(pairs)
    assert len((FOLDER / "README.md").read_text().splitlines()) <= 42


def test_the_options_of_the_readme_exist():
    """Those of training are parsed, those of the data command are in `prepare`."""
    text = (FOLDER / "README.md").read_text().replace("\\\n", "")
    prepared, *trained, asked = re.findall(r"^    python (.*)", text, re.MULTILINE)
    for option in FIELDS:
        assert f" {option} " in f" {prepared} "
    assert len(trained) == 2 and asked.startswith("examples/finetune/ask.py runs/facts ")
    for command in trained:
        script, *options = command.split()
        assert script == "train.py" and cli.from_command_line(options).model.n_layer == 4


def prepare(tmp_path) -> str:
    options = [*FIELDS, "--data-dir", str(tmp_path)]
    assert main(["jsonl", str(FOLDER / "pairs.jsonl"), *options, "--val-fraction", "0.2"]) == 0
    return str(tmp_path / "facts")


def test_fine_tuning(config, tmp_path, monkeypatch, capsys):
    model = dataclasses.replace(config.model, n_layer=1)
    quiet = {"sample_every": 0, "checkpoint_every": 2, "val_every": 0}
    first = dataclasses.replace(config, model=model, max_steps=2, **quiet)
    assert run(first)[0] == 0
    tuned = dataclasses.replace(
        first,
        name="facts",
        model=GPT2Config(),
        init_from=first.run_dir,
        dataset=prepare(tmp_path),
        val_every=2,
        micro_batch=2,
        val_tokens=512,
    )
    code, text = run(tuned)
    assert code == 0 and re.search(r"loss on \d+ of these tokens: the others are prompts", text)
    val = rows(tuned, "val")
    assert len(losses(tuned)) == 2 and val[2]["loss"] < val[0]["loss"]

    # The mean over the tokens with a loss of all validation batches, as from the model itself.
    model, tokenizer = gptjax.load(tuned.run_dir)
    windows = np.concatenate(
        gptjax.data.fixed_batches(
            sorted(Path(tuned.dataset).glob("*_val_*.bin")),
            sequence_length=32,
            batch=2,
            count=8,
            masked=True,
        )
    )
    tokens, targets = np.maximum(windows, ~windows)[:, :-1], np.maximum(windows, -1)[:, 1:]
    loss = jax.jit(gptjax.loss_fn)(model, *map(jax.numpy.asarray, (tokens, targets)))
    assert (targets == -1).mean() > 0.5
    np.testing.assert_allclose(val[2]["loss"], loss, rtol=1e-5)

    spec = importlib.util.spec_from_file_location("ask", FOLDER / "ask.py")
    ask = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ask)
    monkeypatch.setattr(ask, "NEW_TOKENS", 4)
    capsys.readouterr()
    ask.main(str(tuned.run_dir), "Who?")
    assert capsys.readouterr().out.startswith("Who?  ")
