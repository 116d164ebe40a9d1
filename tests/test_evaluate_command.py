"""The command `python -m gptjax.evaluate`, and gptjax as a model of lm-evaluation-harness."""

import dataclasses
import functools
import json
import sys

import jax
import numpy as np
import pytest
import torch
from dataset_tools import make_folder
from evaluation_tools import (
    BYTES,
    CONFIG,
    hellaswag_items,
    models,
    torch_log_probs,
    torch_text,
    words,
    write_core,
    write_jsonl,
)

from gptjax import devices, evaluate, model_options, save_hf
from gptjax.evaluation import EvaluationError, Scorer, read_hellaswag, score_choices, tasks
from gptjax.weights import sources

BLOCK = CONFIG.block_size


@pytest.fixture(scope="module")
def both():
    return models()


@pytest.fixture(scope="module")
def folder(both, tmp_path_factory):
    """A model on disk, and the files of every task."""
    folder = tmp_path_factory.mktemp("evaluate")
    save_hf(both[0], folder / "model")
    write_jsonl(folder / "hellaswag_val.jsonl", hellaswag_items(9, seed=2))
    write_core(folder / "eval_bundle", 5)
    (folder / "text.txt").write_text(words(np.random.default_rng(0), 9))
    return folder


@pytest.fixture
def command(folder, monkeypatch, capsys):
    """Run the command on one device without a cache; return exit code, output and errors."""
    monkeypatch.setattr(devices, "select", lambda kind: (jax.devices("cpu")[:1], None))
    monkeypatch.setattr(model_options, "cache_folder", lambda: None)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments, tokenizer="byte"):
        fixed = ["--data-dir", str(folder), "--tokenizer", tokenizer]
        code = evaluate.main([str(folder / "model"), *fixed, *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def test_all_tasks(command, folder, both, tmp_path):
    """The metrics are those of the functions, which tests/test_evaluation.py compares."""
    out = tmp_path / "results.json"
    code, shown, errors = command("--task", "hellaswag", "core", "--out", out)
    assert (code, errors) == (0, "")
    result = json.loads(out.read_text())
    assert {"date", "device", "versions", "commit", "command", "rows"} <= result.keys()
    assert result["command"].startswith("python -m gptjax.evaluate ") and "--out" not in shown
    assert result["command"].endswith(f"--out {out}") and result["precision"] == "fp32"
    rows = {row.pop("task"): row for row in result["rows"]}
    scorer, expected = Scorer.of(both[0], jax.devices("cpu")[:1]), {}
    for task in ("hellaswag", "core"):
        expected |= tasks.score(task, tasks.read(task, folder), scorer, BYTES)
        assert rows[task].pop("seconds") > 0
    assert [*rows] == ["hellaswag", "core/choices", "core/winograd", "core/lambada", "core"]
    assert rows == expected
    assert f"{rows['hellaswag']['acc']:.4f}" in shown and "core/winograd" in shown
    assert "  9 items\n" in shown and " tokens" not in shown


def test_texts(command, folder, both, tmp_path):
    text, out = folder / "text.txt", tmp_path / "results.json"
    code, shown, errors = command("--task", "loss", "bits-per-byte", "--file", text, "--out", out)
    assert (code, errors) == (0, "")
    ids = [256, *text.read_bytes()]
    assert len(ids) <= BLOCK
    nats = -float(torch_log_probs(both[1], ids, 1)[0].mean())
    assert f"text: {text}" in shown
    assert f"  {len(ids) - 1:,} tokens\n" in shown and "items" not in shown
    loss, bits = json.loads(out.read_text())["rows"]
    assert loss["dataset"] == bits["dataset"] == str(text)
    assert loss["value"] == pytest.approx(nats, rel=1e-5) and loss["tokens"] == len(ids) - 1
    assert bits["value"] == pytest.approx(nats / np.log(2), rel=1e-5)


def test_the_scored_dataset_is_named(command, tmp_path):
    words, out = make_folder(tmp_path / "words"), tmp_path / "results.json"
    code, shown, errors = command("--task", "loss", "--dataset", words, "--out", out)
    assert code == 0, errors
    (row,) = json.loads(out.read_text())["rows"]
    assert row["dataset"] == str(words)
    assert shown.count(f"text: {words}") == 1


def test_the_default_is_the_dataset_of_the_run(command, monkeypatch, tmp_path):
    words, find = make_folder(tmp_path / "words"), sources.find
    meta = {"config": {"dataset": str(words)}}

    def run(path, **options):
        return dataclasses.replace(find(path, **options), meta=meta)

    monkeypatch.setattr(sources, "find", run)
    code, shown, errors = command("--task", "loss")
    assert code == 0, errors
    assert f"text: {words}" in shown


def test_progress_without_a_terminal(command, monkeypatch, folder):
    """A line after each window, because no time passes between lines."""
    text = folder / "text.txt"
    options = ("--task", "loss", "--file", text, "--stride", 8, "--limit", 20)
    for seconds, lines in ((0, [f"{i} of 3" for i in (1, 2, 3)]), (60, [])):
        monkeypatch.setattr(evaluate, "LINE_SECONDS", seconds)
        shown = [line for line in command(*options)[1].splitlines() if " of 3" in line]
        assert shown == [f"windows: {line}" for line in lines]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "expected --task or --harness, got neither"),
        (["--task", "hellaswag", "core", "--file", "x"], "--file is the file of one task"),
        (["--task", "loss", "--limit", "0"], "--limit must be at least 1, got 0"),
        (
            ["--task", "loss", "--file", "x", "--dataset", "y"],
            "file of one task, without --dataset",
        ),
        (["--task", "loss", "--out", "none/x.json"], "must be a file in a folder that exists"),
        (["--task", "loss", "--file", "none.txt"], "none.txt: No such file or directory"),
        (["--task", "core", "mmlu"], "other tasks: python -m gptjax.evaluate RUN --harness mmlu"),
        (["--task", "core", "--file", "none"], "none/core.yaml: No such file or directory; unpack"),
    ],
)
def test_errors_are_one_sentence(arguments, message, command):
    code, shown, errors = command(*arguments)
    assert code == 1 and errors.startswith("error: ") and message in errors
    assert errors.count("\n") == 1 and "Traceback" not in errors


def test_full_memory_is_a_sentence(command, folder, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(evaluate.Scorer, "rows_of_batch", full)
    code, _, errors = command("--task", "loss", "--file", folder / "text.txt")
    assert code == 1 and errors.startswith("error: the device has no memory for batches of 4,096 ")


def test_an_unknown_tokenizer_is_asked_for(command, monkeypatch):
    monkeypatch.setattr(sources, "_TOKENIZERS", {})
    code, _, errors = command("--task", "hellaswag", tokenizer="auto")
    assert code == 1 and "set --tokenizer gpt2 or --tokenizer byte" in errors


# ------------------------------------------------------------------------- lm-evaluation-harness
def test_the_package_is_imported_without_lm_eval(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "gptjax.evaluation.harness", raising=False)
    names = {}
    exec("from gptjax.evaluation import *", names)
    assert "Scorer" in names
    with pytest.raises(EvaluationError, match=r"pip install 'gptjax\[eval\]'"):
        exec("from gptjax.evaluation import LM", names)


TASK = """
task: letters
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{ctx}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: label
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def lm(both):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is in the extra `eval`")
    from gptjax.evaluation import LM

    return LM(both[0], BYTES, devices=jax.devices()[:1])


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, 0) for each in arguments]


def test_harness_log_probabilities(lm, both):
    pairs = [("hello there", " you"), ("", "abc"), ("ab", " cd"), ("x" * 100, "y" * 20)]
    found = lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for (context, continuation), (log_prob, greedy) in zip(pairs, found, strict=True):
        ids = [*(context.encode() or [256]), *continuation.encode()]
        ids, count = ids[-BLOCK - 1 :], len(continuation)
        expected, likeliest = torch_log_probs(both[1], ids, len(ids) - count)
        assert log_prob == pytest.approx(float(expected.sum()), rel=1e-5)
        assert greedy == bool(likeliest.all())
    text = words(np.random.default_rng(0), 40)
    (found,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    ids = [256, *text.encode()]
    expected = torch_text(both[1], ids).sum()
    assert len(ids) > 2 * BLOCK and found == pytest.approx(expected, rel=1e-5)


def test_harness_generation(lm, both):
    """Greedy tokens by PyTorch, cut before the stop text; a long prompt loses its beginning."""
    prompts, expected = ["z" * 100, "y" * 30], []
    for prompt in prompts:
        ids = [*prompt.encode()][6 - BLOCK :]
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(both[1](torch.tensor([ids]))[0, -1].argmax()))
        expected.append(BYTES.decode([i for i in ids[-6:] if i != 256]))
    stop = expected[1][2]
    given = [
        (prompts[0], {"until": ["\0never", ""], "max_gen_toks": 6}),
        (prompts[1], {"until": stop, "max_gen_toks": 6, "do_sample": False}),
    ]
    found = lm.generate_until(requests("generate_until", *given))
    assert found == [expected[0], expected[1].split(stop)[0]] and len(found[1]) <= 2
    with pytest.raises(EvaluationError, match=r"unknown options of generation \['beams'\]"):
        lm.generate_until(requests("generate_until", ("a", {"beams": 3})))


@pytest.mark.filterwarnings("ignore")
def test_a_harness_task_from_files(command, folder, both, lm, monkeypatch, tmp_path):
    import lm_eval.tasks

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "letters.yaml").write_text(TASK.format(file=folder / "hellaswag_val.jsonl"))
    out = tmp_path / "results.json"
    monkeypatch.setattr(evaluate, "LINE_SECONDS", 0)
    code, shown, errors = command("--harness", "letters", "--harness-path", tmp_path, "--out", out)
    assert code == 0, errors
    assert "harness: 36 of 36" in shown
    (row,) = json.loads(out.read_text())["rows"]
    questions = read_hellaswag(folder / "hellaswag_val.jsonl")
    found = score_choices(Scorer.of(both[0], jax.devices("cpu")[:1]), BYTES, questions).metrics()
    assert row["task"] == "harness/letters" and row["acc,none"] == pytest.approx(found["acc"])
    only_local = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", only_local)  # 10 seconds less
    code, _, errors = command("--harness", "lettres", "--harness-path", tmp_path)
    assert code == 1 and "unknown tasks of lm-evaluation-harness: lettres" in errors
