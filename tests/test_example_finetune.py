"""examples/finetune/: pre-train, fine-tune on pairs with a loss mask, ask."""

import dataclasses
import importlib.util
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest
from train_tools import losses, rows, run

import gptjax
from gptjax import cli
from gptjax.data.__main__ import main
from gptjax.models.gpt2 import GPT2Config

FOLDER = Path(__file__).parents[1] / "examples" / "finetune"
FIELDS = ["--prompt-field", "prompt", "--answer-field", "answer", "--tokenizer", "byte"]
FIELDS += ["--name", "facts"]


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


def load_ask(monkeypatch):
    spec = importlib.util.spec_from_file_location("ask", FOLDER / "ask.py")
    ask = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ask)
    monkeypatch.setattr(ask, "NEW_TOKENS", 4)
    return ask


# Options of the config, which the pages and the data command do not set.
SHORT = {"max_steps": 1, "val_every": 0, "sample_every": 1}


def follow(command, monkeypatch):
    """Run a command as printed, in this process; training has one step."""
    script, *words = shlex.split(command)[1:]
    if script == "-m":
        assert words.pop(0) == "gptjax.data" and main(words) == 0
    elif script in ("train.py", "train"):
        config = dataclasses.replace(cli.from_command_line(words), **SHORT)
        assert run(config)[0] == 0
    else:
        assert script == "examples/finetune/ask.py"
        load_ask(monkeypatch).main(*words)


@pytest.fixture
def newcomer(tmp_path, monkeypatch, one_device, program_cache, optax_promotion):
    """A working directory with a checkout's files and own text, and an empty cache."""
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(FOLDER.parents[1] / name)
    (tmp_path / "book.txt").write_text("A text of one's own.\n" * 500)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "note.txt").write_text("Another text.\n" * 500)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("page, count", [("data.md", 2), ("finetuning.md", 6)])
def test_the_commands_of_a_page_work(newcomer, program_folder, monkeypatch, page, count):
    """Those before the list of corpora that need no GPU and no download."""
    text = (FOLDER.parents[1] / "docs" / page).read_text().split("## Prepare a dataset")[0]
    commands = re.findall(r"^    (python (?!.*(?:gpt2_124m|--tokenizer gpt2|llama)).*)", text, re.M)
    assert len(commands) == count
    for command in commands:
        follow(command, monkeypatch)


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_the_command_that_data_prints_works(
    newcomer, program_folder, monkeypatch, capsys, tokenizer
):
    try:
        gptjax.data.get_tokenizer(tokenizer)
    except gptjax.data.TokenizerUnavailable as error:
        pytest.skip(str(error))
    options = ["--tokenizer", tokenizer, "--name", "own", "--data-dir", "my data"]
    assert main(["text", "book.txt", "notes", *options]) == 0
    shown = capsys.readouterr().out
    follow(shown.split("next: ")[1], monkeypatch)


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
    shards = sorted(Path(tuned.dataset).glob("*_val_*.bin"))
    batches = gptjax.data.fixed_batches(shards, sequence_length=32, batch=2, count=8)
    tokens, targets = (np.concatenate(parts) for parts in [*zip(*batches, strict=True)][:2])
    loss = jax.jit(gptjax.loss_fn)(model, *map(jax.numpy.asarray, (tokens, targets)))
    assert (targets == -1).mean() > 0.5
    np.testing.assert_allclose(val[2]["loss"], loss, rtol=1e-5)

    capsys.readouterr()
    load_ask(monkeypatch).main(str(tuned.run_dir), "Who?")
    assert capsys.readouterr().out.startswith("Who?  ")
