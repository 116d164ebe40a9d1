"""Preparing texts as shards of tokens: splits, options, interruptions, and the command line."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from prepare_tools import documents_of, prepare_texts, tokens_of, write_texts

import gptjax
from gptjax.data import (
    DatasetError,
    Options,
    PrepareError,
    corpora,
    find_dataset,
    get_tokenizer,
    open_shard,
    prepare_corpus,
    prepare_stdlib,
)
from gptjax.data import prepare as module
from gptjax.data.__main__ import main
from gptjax.data.prepare import choose_validation, preparing

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(gptjax.__file__).parents[1])}


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


def folders(path):
    return [found for found in path.iterdir() if found.is_dir()]


# ----------------------------------------------------------------------------------------- shards


def test_every_document_comes_back_once_in_order_with_an_eot_before_it(texts, tmp_path):
    folder, contents = texts
    made = prepare_texts(folder, tmp_path / "data", shard_tokens=10_000)
    assert made == tmp_path / "data" / "mine_byte"
    train, val = documents_of(made, "train"), documents_of(made, "val")
    assert len(val) == 2 and sorted(train + val) == sorted(contents)
    assert train == [content for content in contents if content not in val]
    manifest = json.loads((made / "dataset.json").read_text())
    shards = manifest.pop("shards")
    assert manifest == {
        "format": 2,
        "tokenizer": "byte",
        "vocab_size": 257,
        "eot": 256,
        "source": f"text: {folder}",
        "options": {"val_fraction": 0.05, "seed": 0, "shard_tokens": 10_000},
    }
    names = [f"mine_byte_train_{n:06d}.bin" for n in range(1, len(shards))]
    names += ["mine_byte_val_000000.bin"]
    assert sorted(shards) == names and len(names) > 3
    assert sorted(path.name for path in made.iterdir()) == ["dataset.json", *names]
    sizes = [shards[name]["tokens"] for name in names[:-1]]
    assert {*sizes[:-1]} == {10_000} and 0 < sizes[-1] <= 10_000
    for name, info in shards.items():
        tokens, digest = open_shard(made / name), hashlib.sha256((made / name).read_bytes())
        assert (info["tokens"], info["max_token"]) == (tokens.size, tokens.max())
        assert info["sha256"] == info["sample"] == digest.hexdigest()


def test_the_tokens_depend_neither_on_shards_nor_on_pieces(texts, tmp_path, monkeypatch):
    whole = prepare_texts(texts[0], tmp_path / "data", name="whole")
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 500)
    monkeypatch.setattr(module, "_PIECES_AT_ONCE", 3)
    made = prepare_texts(texts[0], tmp_path / "data", shard_tokens=1000)
    assert len(list(made.glob("*_train_*.bin"))) > 20 and len(list(made.glob("*_val_*.bin"))) > 1
    for split in ("train", "val"):
        np.testing.assert_array_equal(tokens_of(made, split), tokens_of(whole, split))


# ------------------------------------------------------------------------------------ the splits


@given(
    sizes=st.lists(st.integers(1, 10**6), min_size=2, max_size=60),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_the_split_has_documents_on_both_sides_and_is_decided_by_the_seed(sizes, fraction, seed):
    is_val = choose_validation(np.array(sizes), fraction, seed)
    assert is_val.any() and not is_val.all()
    np.testing.assert_array_equal(is_val, choose_validation(np.array(sizes), fraction, seed))


def test_the_size_of_the_validation_split():
    sizes = np.random.default_rng(0).integers(1, 2000, 3000)
    splits = [choose_validation(sizes, 0.05, seed) for seed in range(5)]
    for is_val in splits:
        assert 0.049 < sizes[is_val].sum() / sizes.sum() < 0.0501
    assert (splits[0] != splits[1]).any()
    # A tiny document alone is no validation split.
    is_val = choose_validation(np.array([1000, 1000, 1]), 0.05, 0).tolist()
    assert is_val in ([True, False, True], [False, True, True])
    assert choose_validation(np.array([10**9, 10]), 0.05, 0).tolist() == [False, True]


@pytest.mark.parametrize(("fraction", "size", "validation"), [(0.05, 9, 1), (0.9, 3000, 2700)])
def test_the_end_of_a_single_document_is_for_validation(tmp_path, fraction, size, validation):
    (tmp_path / "a.txt").write_text(text := ("line\n" * size)[:size])
    made = prepare_texts(tmp_path / "a.txt", tmp_path / "data", val_fraction=fraction)
    train, val = documents_of(made, "train", "val")
    assert train + val == text and len(val) == validation


@pytest.mark.parametrize("rows", [["one " * 40, "two " * 40, ""], ["", "one\n" * 40, ""]])
def test_an_empty_text_is_no_validation_split(tmp_path, rows):
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    for seed in range(5):
        options = Options(data_dir=tmp_path, name=f"d{seed}", tokenizer="byte", seed=seed)
        made = prepare_corpus("jsonl", corpora.jsonl([tmp_path / "a.jsonl"]), options)
        assert all(documents_of(made, "train", "val")) and tokens_of(made, "val").size > 5


def test_a_stream_is_split_while_it_is_read(tmp_path):
    rows = [{"text": f"row {i}"} for i in range(100)]
    rows[7]["text"] = ""
    corpus = corpora.rows(iter(rows), source="rows")  # an iterator can be read once only
    options = Options(tmp_path, "rows", "byte", val_fraction=0.1)
    made = prepare_corpus("rows", corpus, options)
    train, val = documents_of(made, "train"), documents_of(made, "val")
    number = {f"row {i}": i - (i > 7) for i in range(100)}
    assert [number[text] // 10 for text in val] in ([*range(10)], [*range(9)])
    expected = [row["text"] for row in rows if row["text"] and row["text"] not in val]
    assert train == expected and val != [f"row {i}" for i in range(0, 100, 10)]
    with pytest.raises(PrepareError, match="expected text for training and for validation"):
        prepare_corpus(
            "one", corpora.rows(rows[:1], source="one"), Options(tmp_path, "one", "byte")
        )


@pytest.mark.parametrize("count", [1, 3])
def test_byte_order_marks_are_not_tokenized(tmp_path, count):
    contents = [f"text {number} \ufeff\n" * 99 for number in range(count)]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.txt").write_text("\ufeff" + content, encoding="utf-8")
    made = prepare_texts(tmp_path / "*.txt", tmp_path / "data")
    found = documents_of(made, "train", "val")
    assert (["".join(found)] if count == 1 else sorted(found)) == contents


# --------------------------------------------------------------------------------- the same again


def test_a_prepared_dataset_is_kept_unless_overwritten(texts, tmp_path):
    made, lines = prepare_texts(texts[0], tmp_path / "data"), []
    before = (made / "dataset.json").stat().st_mtime_ns
    prepare_texts(texts[0], tmp_path / "data", lines.append)
    assert len(lines) == 1 and "already prepared; --overwrite" in lines[0]
    (texts[0] / "00.txt").write_text("DOCUMENT 0")
    for options in ({"seed": 3}, {"val_fraction": 0.5}, {"shard_tokens": 9000}, {"text": "00.txt"}):
        text = texts[0] / options.pop("text", "")
        with pytest.raises(PrepareError, match="mine_byte holds something else: .*--overwrite"):
            prepare_texts(text, tmp_path / "data", **options)
    assert (made / "dataset.json").stat().st_mtime_ns == before
    prepare_texts(texts[0], tmp_path / "data", overwrite=True, seed=3)
    assert "DOCUMENT 0" in documents_of(made, "train", "val")
    # Options that an earlier version did not record are as requested.
    manifest = json.loads((made / "dataset.json").read_text())
    (made / "dataset.json").write_text(json.dumps(manifest | {"options": None}))
    prepare_texts(texts[0], tmp_path / "data", seed=4)
    find_dataset("mine", tmp_path / "data").validate(257, 64)


def test_a_link_to_a_dataset_is_followed(texts, tmp_path):
    link, target = tmp_path / "data" / "mine_byte", tmp_path / "other" / "notes"
    link.parent.mkdir()
    target.parent.mkdir()
    link.symlink_to(target)
    for _ in range(2):  # new, replaced
        prepare_texts(texts[0], tmp_path / "data", overwrite=True)
        assert link.is_symlink() and (target / "dataset.json").is_file()
    assert [*link.parent.iterdir()] == [link]


def test_a_folder_that_is_not_ours_is_never_touched(texts, tmp_path):
    (tmp_path / "data" / "mine").mkdir(parents=True)
    (tmp_path / "data" / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(PrepareError, match="mine exists and was not made by gptjax"):
        prepare_texts(texts[0], tmp_path / "data", name="mine", overwrite=True)
    assert (tmp_path / "data" / "mine" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"val_fraction": 0.0}, "val-fraction between 0 and 1, .* found 0.0, "),
        ({"val_fraction": 1.0}, "found 1.0"),
        ({"shard_tokens": 1}, "shard-tokens in 2..2147483647 .*, 1 and 0"),
        ({"seed": -1}, "seed of at least 0, .* and -1"),
        ({"name": "a/b"}, "expected a plain folder name .* found 'a/b'"),
        ({"name": ".hidden"}, "found '.hidden'"),
        ({"name": ""}, "found ''"),
        ({"name": "a\x9bb"}, r"without control characters .*, found 'a\\x9bb'"),
        ({}, "expected text for training and for validation, found none for"),
    ],
)
def test_refused_options_and_a_text_too_small_to_split_leave_nothing(tmp_path, options, says):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(PrepareError, match=says):
        prepare_texts(tmp_path / "a.txt", tmp_path / "data", **options)
    assert not (tmp_path / "data").exists() or not folders(tmp_path / "data")


# ----------------------------------------------------------------------------------- interruptions


def test_an_interrupted_preparation_leaves_nothing_and_an_old_dataset_as_it_was(
    texts, tmp_path, monkeypatch
):
    made = prepare_texts(texts[0], tmp_path / "data")
    before = tokens_of(made, "train").copy()
    real, calls = module.write_shard, []

    def breaks(path, tokens, **how):
        calls.append(path)
        if len(calls) in (3, 6):
            raise KeyboardInterrupt
        real(path, tokens, **how)

    monkeypatch.setattr(module, "write_shard", breaks)
    for options in ({"overwrite": True}, {"name": "fresh"}):
        with pytest.raises(KeyboardInterrupt):
            prepare_texts(texts[0], tmp_path / "data", shard_tokens=5000, **options)
    np.testing.assert_array_equal(tokens_of(made, "train"), before)
    assert folders(tmp_path / "data") == [made]


# The command line with a preparation that hangs after its second shard.
HANGS = """
import runpy, sys, time
from gptjax.data import prepare
real, calls = prepare.write_shard, []
def write_shard(path, tokens, **how):
    real(path, tokens, **how)
    calls.append(path)
    if len(calls) == 2:
        print("hanging", flush=True)
        time.sleep(60)
prepare.write_shard = write_shard
sys.argv[0] = "gptjax.data"
runpy.run_module("gptjax.data", run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_preparation_that_ends_in_the_middle_is_never_seen(texts, tmp_path, capsys, number):
    data, (folder, contents) = tmp_path / "data", texts
    command = ["text", str(folder), "--name", "mine", "--data-dir", str(data)]
    command += ["--tokenizer", "byte", "--shard-tokens", "5000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HANGS, *command], env=ENVIRONMENT, **pipes) as run:
        assert run.stdout.readline() == b"hanging\n"
        run.send_signal(number)
        _, error = run.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert (run.returncode, error) == (143, b"interrupted; no partial dataset is left\n")
        assert not folders(data)
    with pytest.raises(DatasetError, match="'mine' is not prepared"):
        find_dataset("mine", data, "auto")

    if number == signal.SIGKILL:  # the same command again waits for another process
        with preparing(data, "mine", print):
            again = [sys.executable, "-u", "-m", "gptjax.data", *command]
            waiting = subprocess.Popen(again, env=ENVIRONMENT, stdout=subprocess.PIPE)
            assert b"waiting for another process that is preparing" in waiting.stdout.readline()
            assert not (data / "mine").exists()
        waiting.communicate(timeout=60)
        assert waiting.returncode == 0
    assert main(command) == 0 and folders(data) == [data / "mine"]
    assert ("already prepared" in capsys.readouterr().out) == (number == signal.SIGKILL)
    assert sorted(documents_of(data / "mine", "train", "val")) == sorted(contents)
    find_dataset("mine", data, "auto").validate(257, 64)


# -------------------------------------------------------------------------------- the command line


def test_prepare_stdlib(tmp_path, monkeypatch):
    """In bytes with a note where GPT-2's files are not available."""
    byte = get_tokenizer("byte")
    monkeypatch.setattr(
        module, "choose_tokenizer", lambda choice, eot: (byte, f"NOTE for {choice}")
    )
    lines = []
    made = prepare_stdlib(tmp_path / "data", log=lines.append)
    assert made == tmp_path / "data" / "stdlib_byte" and lines[0] == "NOTE for auto"
    train, val = tokens_of(made, "train").size, tokens_of(made, "val").size
    assert train > 3e6 and 0.045 < val / (train + val) < 0.055
    says = f"{train:,} tokens for training, {val:,} for validation"
    assert f"tokenizer byte: {says}" in lines[-1]


def test_the_command_line_prepares_each_kind(texts, tmp_path, capsys):
    folder, contents = texts
    data = ["--data-dir", str(tmp_path / "data"), "--tokenizer", "byte"]
    lines = "".join(json.dumps({"body": content}) + "\n" for content in contents)
    (tmp_path / "a.jsonl").write_text(lines)
    for command in (
        ["tinyshakespeare", "--file", str(folder / "00.txt")],
        ["text", str(folder / "*.txt")],
        ["jsonl", str(tmp_path / "a.jsonl"), "--field", "body", "--val-fraction", "0.5"],
    ):
        assert main([*command, *data]) == 0
        name = f"{command[0]}_byte"
        assert f"--name {name} --dataset {name} --data-dir" in capsys.readouterr().out
        find_dataset(name, tmp_path / "data", "byte").validate(257, 32)
    assert 18 < len(documents_of(tmp_path / "data" / "jsonl_byte", "val")) < 23


def test_an_output_that_nobody_reads_ends_the_command_without_a_traceback():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "gptjax.data", "check", "tests/fixtures/letters"],
        env=ENVIRONMENT,
        cwd=Path(__file__).parents[1],
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
