"""Preparing texts as shards of tokens."""

import dataclasses
import hashlib
import json
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from prepare_tools import documents_of, prepare_texts, tokens_of, write_texts

from gptjax.data import (
    Options,
    PrepareError,
    TokenizerUnavailable,
    corpora,
    find_dataset,
    get_tokenizer,
    open_shard,
    prepare_corpus,
    prepare_stdlib,
)
from gptjax.data import prepare as module
from gptjax.data.__main__ import main
from gptjax.data.prepare import choose_validation


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


def test_every_document_comes_back_once_in_order_with_an_eot_before_it(texts, tmp_path):
    folder, contents = texts
    made = prepare_texts(folder, tmp_path / "data")
    assert made == tmp_path / "data" / "mine_byte"
    train, val = documents_of(made, "train"), documents_of(made, "val")
    assert len(val) == 2 and sorted(train + val) == sorted(contents)
    assert train == [content for content in contents if content not in val]
    assert sorted(path.name for path in made.iterdir()) == [
        "dataset.json",
        "mine_byte_train_000001.bin",
        "mine_byte_val_000000.bin",
    ]


def test_the_manifest_describes_the_shards(texts, tmp_path):
    made = prepare_texts(texts[0], tmp_path / "data", shard_tokens=10_000)
    said = json.loads((made / "dataset.json").read_text())
    shards = said.pop("shards")
    # The SHA-256 of the documents' SHA-256 digests.
    documents = [hashlib.sha256(content.encode()).digest() for content in texts[1]]
    assert said.pop("source_digest") == hashlib.sha256(b"".join(documents)).hexdigest()
    assert said == {
        "format": 2,
        "tokenizer": "byte",
        "vocab_size": 257,
        "eot": 256,
        "source": f"text: {texts[0]}",
        "options": {"val_fraction": 0.05, "seed": 0, "shard_tokens": 10_000},
    }
    assert sorted(shards) == sorted(path.name for path in made.glob("*.bin"))
    for name, info in shards.items():
        tokens = open_shard(made / name)
        digest = hashlib.sha256((made / name).read_bytes()).hexdigest()
        assert info == {
            "tokens": tokens.size,
            "max_token": tokens.max(),
            "sha256": digest,
            "sample": digest,
        }


@given(st.integers(2, 12), st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any))
@settings(max_examples=60, deadline=None)
def test_shards_are_full_and_the_last_is_never_a_stub(tmp_path_factory, shard_tokens, sizes):
    folder, written = tmp_path_factory.mktemp("split"), np.arange(sum(sizes), dtype=np.uint16)
    writer = module._SplitWriter(folder, "mine", module.TRAIN, shard_tokens)
    for part in np.split(written, np.cumsum(sizes)[:-1]):
        writer.add(part[None])
    writer.finish()
    np.testing.assert_array_equal(tokens_of(folder, "train"), written)
    *full, last = [open_shard(path).size for path in sorted(folder.glob("*_train_*.bin"))]
    assert full == [shard_tokens] * len(full)
    assert last <= 1.5 * shard_tokens and (not full or last >= shard_tokens // 2)


def test_many_shards_hold_the_tokens_of_one(texts, tmp_path):
    whole = prepare_texts(texts[0], tmp_path / "data", name="whole")
    made = prepare_texts(texts[0], tmp_path / "data", shard_tokens=1000)
    assert len(list(made.glob("*_train_*.bin"))) > 20 and len(list(made.glob("*_val_*.bin"))) > 1
    for split in ("train", "val"):
        np.testing.assert_array_equal(tokens_of(made, split), tokens_of(whole, split))


def test_the_result_does_not_depend_on_the_number_of_workers(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 500)
    one, many = (
        prepare_texts(texts[0], tmp_path / "data", name=f"n{n}", workers=n) for n in (1, 7)
    )
    for split in ("train", "val"):
        np.testing.assert_array_equal(tokens_of(one, split), tokens_of(many, split))
    assert len(documents_of(one, "train")) == 38


def test_a_batch_is_read_when_the_one_before_was_used(monkeypatch):
    read = []
    pieces = (read.append(n) or module._Piece("x" * 5, 0, True, 5) for n in range(100))
    batches = module._batches(pieces, 20)
    assert len(next(batches)) == 4 == len(read)
    assert sum(map(len, batches)) == 96


def test_pieces_of_a_long_document_have_the_tokens_of_the_whole(monkeypatch, tmp_path):
    try:
        gpt2 = get_tokenizer("gpt2")
    except TokenizerUnavailable:
        pytest.skip(
            "GPT-2's BPE files are not to be had: no network, and TIKTOKEN_CACHE_DIR names no copy "
            "of them"
        )
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 7)
    strange = (
        "a\n\nb  \n c\n\n\nd\r\ne \nf\ng\u2028\nh\n\u00a0i\n" * 40
        + "don't\nstop   \n\n   \nnow 's\n'll\n" * 40
    )
    whole = Path(module.__file__).read_text(encoding="utf-8") + strange
    (tmp_path / "a.txt").write_text(whole, encoding="utf-8")
    (tmp_path / "b.txt").write_text("x", encoding="utf-8")
    corpus = corpora.text([tmp_path / "a.txt", tmp_path / "b.txt"])
    pieces = [
        piece
        for piece in module._pieces(corpus, corpus.measure(), Options())
        if piece.split == module.TRAIN
    ]
    assert len(pieces) > 100 and [piece.first for piece in pieces] == [True] + [False] * (
        len(pieces) - 1
    )
    np.testing.assert_array_equal(
        np.concatenate([gpt2.encode(piece.text) for piece in pieces]), gpt2.encode(whole)
    )


@given(
    sizes=st.lists(st.integers(1, 10**6), min_size=2, max_size=60),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_the_split_has_documents_on_both_sides_and_is_decided_by_the_seed(sizes, fraction, seed):
    sizes = np.array(sizes)
    is_val = choose_validation(sizes, fraction, seed)
    assert is_val.any() and not is_val.all()
    np.testing.assert_array_equal(is_val, choose_validation(sizes, fraction, seed))


def test_the_split_keeps_to_the_fraction_where_documents_are_small():
    sizes = np.random.default_rng(0).integers(1, 2000, 3000)
    for seed in range(5):
        is_val = choose_validation(sizes, 0.05, seed)
        assert 0.049 < sizes[is_val].sum() / sizes.sum() < 0.0501
    assert (choose_validation(sizes, 0.05, 0) != choose_validation(sizes, 0.05, 1)).any()


def test_a_tiny_document_alone_is_no_validation_split():
    assert choose_validation(np.array([1000, 1000, 1]), 0.05, 0).tolist() in (
        [True, False, True],
        [False, True, True],
    )
    assert choose_validation(np.array([10**9, 10]), 0.05, 0).tolist() == [False, True]


@pytest.mark.parametrize(("fraction", "lines"), [(0.05, 5), (0.1, 10)])
def test_the_end_of_a_single_document_is_for_validation(tmp_path, fraction, lines):
    play = "".join(f"line {number:04d}\n" for number in range(100))
    (tmp_path / "play.txt").write_text(play)
    made = prepare_texts(tmp_path / "play.txt", tmp_path / "data", val_fraction=fraction)
    (train,), (val,) = documents_of(made, "train"), documents_of(made, "val")
    assert train + val == play and train.endswith("\n") and val.count("\n") == lines


@pytest.mark.parametrize("text", ["no line at all here", "\nx", "x\n" + "y" * 99, "x" * 99 + "\ny"])
def test_a_single_document_with_few_lines_is_cut_all_the_same(tmp_path, text):
    (tmp_path / "play.txt").write_text(text)
    made = prepare_texts(tmp_path / "play.txt", tmp_path / "data")
    assert documents_of(made, "train")[0] + documents_of(made, "val")[0] == text


@pytest.mark.parametrize(
    ("fraction", "lines", "validation"),
    [
        (0.05, ["title", "y" * 9993], 500),  # a newline far before the end of the training text
        (0.05, ["y" * 9993, "title"], 500),  # a newline near the end of the text
        (0.9, ["title", "y" * 9993], 9000),
        (0.05, ["y" * 9199, "y" * 549, "y" * 249], 250),
        (0.05, ["y" * 9249, "y" * 749], 750),
        (0.05, ["y" * 9248, "y" * 750], 500),
        (0.05, ["y" * 9749, "y" * 249], 250),
        (0.05, ["y" * 9750, "y" * 248], 500),
    ],
)
def test_a_distant_newline_does_not_change_the_size_of_the_validation_split(
    tmp_path, fraction, lines, validation
):
    text = "\n".join(lines) + "\n"
    (tmp_path / "a.txt").write_text(text)
    made = prepare_texts(tmp_path / "a.txt", tmp_path / "data", val_fraction=fraction)
    (train,), (val,) = documents_of(made, "train"), documents_of(made, "val")
    assert train + val == text and len(val) == validation


@pytest.mark.parametrize("rows", [["one " * 40, "two " * 40, ""], ["", "one\n" * 40, ""]])
def test_an_empty_text_is_no_validation_split(tmp_path, rows):
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    for seed in range(5):
        options = Options(data_dir=tmp_path, name=f"d{seed}", tokenizer="byte", seed=seed)
        made = prepare_corpus("jsonl", corpora.jsonl([tmp_path / "a.jsonl"]), options)
        assert all(documents_of(made, "train") + documents_of(made, "val"))
        assert tokens_of(made, "val").size > 5


def test_empty_texts_are_in_the_digest_as_in_earlier_versions(tmp_path):
    rows = ["one\n" * 99, "", "two\n" * 99]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    corpus = corpora.jsonl([tmp_path / "a.jsonl"])
    made = prepare_corpus("jsonl", corpus, Options(data_dir=tmp_path, tokenizer="byte"))
    digests = b"".join(hashlib.sha256(row.encode()).digest() for row in rows)
    said = json.loads((made / "dataset.json").read_text())
    assert said["source_digest"] == hashlib.sha256(digests).hexdigest()


@pytest.mark.parametrize("count", [1, 3])
def test_byte_order_marks_are_not_tokenized_and_stay_in_the_digest(tmp_path, count):
    contents = [f"text {number} \ufeff\n" * 99 for number in range(count)]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.txt").write_text("\ufeff" + content, encoding="utf-8")
    made = prepare_texts(tmp_path / "*.txt", tmp_path / "data")
    train, val = documents_of(made, "train"), documents_of(made, "val")
    if count == 1:
        assert train[0] + val[0] == contents[0]
    else:
        assert sorted(train + val) == contents
    # Earlier versions tokenized the marks: the same text is still the same.
    digests = [hashlib.sha256(f"\ufeff{content}".encode()).digest() for content in contents]
    said = json.loads((made / "dataset.json").read_text())
    assert said["source_digest"] == hashlib.sha256(b"".join(digests)).hexdigest()


def test_a_text_too_small_to_split_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(
        PrepareError, match="expected text for training and for validation, found none for "
    ):
        prepare_texts(tmp_path / "a.txt", tmp_path / "data")
    assert not [path for path in (tmp_path / "data").iterdir() if path.is_dir()]


def test_a_link_to_a_dataset_is_followed(texts, tmp_path):
    link, target = tmp_path / "data" / "mine_byte", tmp_path / "other" / "notes"
    link.parent.mkdir()
    target.parent.mkdir()
    link.symlink_to(target)
    for _ in range(2):  # new, replaced
        prepare_texts(texts[0], tmp_path / "data", overwrite=True)
        assert link.is_symlink() and (target / "dataset.json").is_file()
    assert [*link.parent.iterdir()] == [link]


def test_a_prepared_dataset_is_not_prepared_again_unless_overwritten(texts, tmp_path):
    folder, _ = texts
    made = prepare_texts(folder, tmp_path / "data")
    before = (made / "dataset.json").stat().st_mtime_ns
    lines = []
    options = Options(data_dir=tmp_path / "data", tokenizer="byte")
    prepare_corpus("mine", corpora.text([folder]), options, log=lines.append)
    assert (made / "dataset.json").stat().st_mtime_ns == before
    assert len(lines) == 1 and "already prepared; --overwrite" in lines[0]
    text = (folder / "00.txt").read_text(encoding="utf-8")
    # of the same length
    (folder / "00.txt").write_text(text.replace("document", "DOCUMENT"), encoding="utf-8")
    with pytest.raises(
        PrepareError,
        match="mine_byte holds something else: expected text .*--name, .*--overwrite",
    ):
        prepare_corpus("mine", corpora.text([folder]), options)
    assert (made / "dataset.json").stat().st_mtime_ns == before
    prepare_texts(folder, tmp_path / "data", overwrite=True)
    assert "DOCUMENT 0" in "".join(documents_of(made, "train") + documents_of(made, "val"))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"val_fraction": 0.5}, "expected val-fraction 0.5, found val-fraction 0.05"),
        ({"seed": 3}, "expected seed 3, found seed 0"),
        (
            {"seed": 3, "shard_tokens": 9000},
            "expected seed 3, shard-tokens 9000, found seed 0, shard-tokens 100000000",
        ),
    ],
)
def test_other_options_of_a_prepared_dataset_are_refused(texts, tmp_path, changed, says):
    made = prepare_texts(texts[0], tmp_path / "data")
    with pytest.raises(
        PrepareError,
        match=f"mine_byte holds something else: {says}; .*--name, or .*--overwrite",
    ):
        prepare_texts(texts[0], tmp_path / "data", **changed)
    # Threads and folders do not change the dataset.
    prepare_texts(texts[0], tmp_path / "data", workers=1)
    prepare_texts(texts[0], tmp_path / "data", overwrite=True, **changed)
    prepare_texts(texts[0], tmp_path / "data", **changed)
    said = json.loads((made / "dataset.json").read_text())
    assert said["options"].items() >= changed.items()


@pytest.mark.parametrize("options", [None, {}, {"seed": 0}, "absent"])
def test_options_that_an_earlier_version_did_not_record_count_as_equal(texts, tmp_path, options):
    made = prepare_texts(texts[0], tmp_path / "data")
    said = json.loads((made / "dataset.json").read_text())
    said["options"] = options
    if options == "absent":
        del said["options"]
    (made / "dataset.json").write_text(json.dumps(said))
    before = (made / "dataset.json").stat().st_mtime_ns
    prepare_texts(texts[0], tmp_path / "data", val_fraction=0.5)
    assert (made / "dataset.json").stat().st_mtime_ns == before
    find_dataset("mine", tmp_path / "data").validate(257, 64)


def test_a_dataset_without_a_digest_of_the_text_is_kept(texts, tmp_path):
    made = prepare_texts(texts[0], tmp_path / "data")
    said = json.loads((made / "dataset.json").read_text())
    del said["source_digest"]
    (made / "dataset.json").write_text(json.dumps(said))
    lines = []
    options = Options(data_dir=tmp_path / "data", tokenizer="byte")
    prepare_corpus("mine", corpora.text([texts[0]]), options, log=lines.append)
    assert len(lines) == 1 and "already prepared" in lines[0]


@pytest.mark.parametrize("count", [1, 3])
def test_a_text_that_changes_during_preparation_is_an_error(tmp_path, count):
    rows = [json.dumps({"text": f"document {number}\n" * 9}) for number in range(count)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    corpus = corpora.jsonl([tmp_path / "a.jsonl"])
    sizes = corpus.measure()
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, rows[0]]))
    changed = dataclasses.replace(corpus, measure=lambda: sizes)
    with pytest.raises(
        PrepareError, match="found another number: the text changed during preparation"
    ):
        prepare_corpus("mine", changed, Options(data_dir=tmp_path / "data", tokenizer="byte"))
    assert not [path for path in (tmp_path / "data").iterdir() if path.is_dir()]


def test_another_text_under_the_same_name_is_refused(texts, tmp_path):
    prepare_texts(texts[0], tmp_path / "data")
    with pytest.raises(
        PrepareError,
        match="holds something else: .*00.txt', .*choose another --name, or .*--overwrite",
    ):
        prepare_texts(texts[0] / "00.txt", tmp_path / "data")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_not_ours_is_never_touched(texts, tmp_path, overwrite):
    (tmp_path / "data" / "mine").mkdir(parents=True)
    (tmp_path / "data" / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(
        PrepareError, match="mine exists and was not made by gptjax .*choose another --name"
    ):
        prepare_texts(texts[0], tmp_path / "data", name="mine", overwrite=overwrite)
    assert (tmp_path / "data" / "mine" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"val_fraction": 0.0}, "expected val-fraction between 0 and 1, found 0.0"),
        ({"val_fraction": 1.0}, "found 1.0"),
        ({"shard_tokens": 1}, "expected shard-tokens in 2..1073741823, found 1"),
        ({"workers": 0}, "expected workers of at least 1, found 0"),
        ({"seed": -1}, "expected seed of at least 0, found -1"),
        ({"name": "a/b"}, "expected a plain folder name .* found 'a/b'"),
        ({"name": ".hidden"}, "found '.hidden'"),
        ({"name": ""}, "found ''"),
        ({"name": "a\nb"}, r"without control characters as the dataset's name, found 'a\\nb'"),
        ({"name": "a\x9bb"}, r"found 'a\\x9bb'"),
        ({"name": "a\udcff"}, r"found 'a\\udcff'"),
    ],
)
def test_options_that_make_no_sense_are_refused(texts, tmp_path, options, says):
    with pytest.raises(PrepareError, match=says):
        prepare_texts(texts[0], tmp_path / "data", **options)


@pytest.mark.parametrize("below", ["", "data"])
def test_a_file_as_data_dir_is_an_error(texts, tmp_path, below):
    (tmp_path / "file").write_text("x")
    data_dir = tmp_path / "file" / below
    with pytest.raises(
        PrepareError,
        match=f"{data_dir}: expected a folder, or a path where one can be created, found a file; "
        "choose another --data-dir",
    ):
        prepare_texts(texts[0], data_dir)
    assert (tmp_path / "file").read_text() == "x"


def test_auto_without_bpe_uses_bytes_with_a_note(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(
        module, "choose_tokenizer", lambda choice: (get_tokenizer("byte"), f"NOTE for {choice}")
    )
    lines = []
    prepare_corpus(
        "mine", corpora.text([texts[0]]), Options(data_dir=tmp_path / "data"), log=lines.append
    )
    assert lines[0] == "NOTE for auto" and "tokenizer byte" in lines[-1]


def test_prepare_stdlib(tmp_path):
    lines = []
    made = prepare_stdlib(tmp_path / "data", "byte", log=lines.append)
    assert made == tmp_path / "data" / "stdlib_byte"
    train, val = tokens_of(made, "train").size, tokens_of(made, "val").size
    assert train > 3e6 and 0.045 < val / (train + val) < 0.055
    assert (
        f"{train:,} tokens in 1 shard for training, {val:,} tokens in 1 shard for validation"
        in lines[-1]
    )


def test_progress_is_a_line_every_ten_seconds(texts, tmp_path, monkeypatch):
    clock, lines = iter([0.0, 4.0, 11.0, 11.0, *[12.0] * 99]), []
    monkeypatch.setattr(module, "_batches", lambda pieces, _: ([piece] for piece in pieces))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    options = Options(data_dir=tmp_path / "data", tokenizer="byte")
    prepare_corpus("mine", corpora.text([texts[0]]), options, log=lines.append)
    assert lines[:-1] == ["tokenizing mine_byte: 0 of 0 MB"]


@pytest.mark.parametrize("kind", ["stdlib", "tinyshakespeare", "text", "jsonl", "fineweb10B"])
def test_the_help_names_every_option(kind, capsys):
    with pytest.raises(SystemExit) as stop:
        main([kind, "--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0 and "--data-dir" in shown and "--name" in shown
    for option in {
        "tinyshakespeare": ["--file"],
        "jsonl": ["--field", "PATH..."],
        "text": ["PATH..."],
        "fineweb10B": ["--shards"],
    }.get(kind, []):
        assert option in shown
    if kind != "fineweb10B":
        for option in [
            "--tokenizer {auto,gpt2,byte}",
            "--val-fraction",
            "--shard-tokens",
            "--workers",
            "--seed",
            "--overwrite",
        ]:
            assert option in shown


def test_the_command_line_prepares_each_kind(texts, tmp_path, capsys):
    folder, contents = texts
    common = ["--data-dir", str(tmp_path / "data"), "--tokenizer", "byte"]
    lines = "".join(json.dumps({"body": content}) + "\n" for content in contents)
    (tmp_path / "a.jsonl").write_text(lines)
    assert main(["stdlib", *common, "--shard-tokens", "4_000_000"]) == 0
    assert main(["tinyshakespeare", *common, "--file", str(folder / "00.txt")]) == 0
    assert main(["text", str(folder / "*.txt"), *common]) == 0
    assert (
        main(
            [
                "jsonl",
                str(tmp_path / "a.jsonl"),
                "--field",
                "body",
                *common,
                "--val-fraction",
                "0.5",
            ]
        )
        == 0
    )
    made = {path.name for path in (tmp_path / "data").iterdir() if path.is_dir()}
    assert made == {"stdlib_byte", "tinyshakespeare_byte", "text_byte", "jsonl_byte"}
    for name in made:
        find_dataset(name, tmp_path / "data", "byte").validate(257, 32)
    assert 18 < len(documents_of(tmp_path / "data" / "jsonl_byte", "val")) < 23
    assert capsys.readouterr().err == ""


def test_the_command_line_says_errors_in_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 9)
    assert main(["text", "no.txt", "--tokenizer", "byte"]) == 1
    assert capsys.readouterr().err.startswith("error: no.txt: expected a file")
    assert main(["text", "--tokenizer", "byte"]) == 1
    assert "expected at least one PATH" in capsys.readouterr().err
    for kind in ("text", "jsonl"):
        assert main([kind, "", "--tokenizer", "byte"]) == 1
        assert "expected a file, a folder or a glob, found an empty " in capsys.readouterr().err
    arguments = ["jsonl", "a.jsonl", "--separator", "X", "--tokenizer", "byte"]
    assert main(arguments) == 1
    assert "--prompt-field and --answer-field together, and both with" in capsys.readouterr().err

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("gptjax.data.__main__.prepare_corpus", interrupted)
    assert main(["stdlib", "--tokenizer", "byte"]) == 130
    assert "no partial dataset is left" in capsys.readouterr().err
