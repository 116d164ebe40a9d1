import dataclasses
import errno
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from gptjax.data import (
    DataError,
    DatasetError,
    ShardError,
    few_tokens_note,
    find_dataset,
    get_tokenizer,
    write_shard,
)
from gptjax.data import dataset as module
from gptjax.data import manifest as manifest_module

KINDS = {"byte": {"vocab_size": 257, "eot": 256}, "gpt2": {"vocab_size": 50257, "eot": 50256}}


def make_folder(
    folder, *, tokenizer="byte", train=(100, 60), val=(50,), manifest=True, version=2, **extra
):
    """Write a dataset folder with the given shard sizes, without gptjax's writer."""
    folder.mkdir(parents=True)
    shards = {}
    for split, first, sizes in (("train", 1, train), ("val", 0, val)):
        for number, size in enumerate(sizes, start=first):
            file = f"some_{split}_{number:06d}.bin"
            write_shard(folder / file, np.arange(size, dtype=np.uint16) % 200)
            shards[file] = {"tokens": size, "max_token": min(size - 1, 199)}
            if version == 2:
                digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
                shards[file] |= {"sha256": digest, "sample": digest}
    said = {
        "format": version,
        "tokenizer": tokenizer,
        **KINDS[tokenizer],
        "source": "test",
        "shards": shards,
    }
    if manifest:
        (folder / "dataset.json").write_text(json.dumps(said | extra))
    return folder


@pytest.fixture
def no_bpe(monkeypatch):
    def choose(choice):
        assert choice in ("auto", "byte")
        return get_tokenizer("byte"), "NOTE: bytes" if choice == "auto" else None

    monkeypatch.setattr(module, "choose_tokenizer", choose)


@pytest.fixture
def quick_stdlib(monkeypatch):
    """Replace prepare_stdlib by a fast one; test_prepare.py tests the real one."""
    made = []

    def prepare_stdlib(data_dir, tokenizer):
        made.append(tokenizer)
        return make_folder(data_dir / f"stdlib_{tokenizer}", tokenizer=tokenizer)

    monkeypatch.setattr(module, "prepare_stdlib", prepare_stdlib)
    return made


def test_a_prepared_dataset_is_found_by_name_with_its_shards_in_order(tmp_path):
    folder = make_folder(tmp_path / "mine", train=(10,) * 11)
    dataset = find_dataset("mine", tmp_path, "auto")
    assert (dataset.name, dataset.path, dataset.tokenizer, dataset.note) == (
        "mine",
        folder,
        "byte",
        None,
    )
    assert [path.name for path in dataset.train] == [
        f"some_train_{number:06d}.bin" for number in range(1, 12)
    ]
    assert [path.name for path in dataset.val] == ["some_val_000000.bin"]
    assert (dataset.train_tokens, dataset.val_tokens) == (110, 50)
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataset.name = "other"


def test_the_suffix_of_the_tokenizer_may_be_left_out(tmp_path):
    make_folder(tmp_path / "plays_byte")
    assert find_dataset("plays", tmp_path, "auto").name == "plays_byte"
    assert find_dataset("plays", tmp_path, "byte").name == "plays_byte"
    make_folder(tmp_path / "plays_gpt2", tokenizer="gpt2")
    assert find_dataset("plays", tmp_path, "auto").name == "plays_gpt2"
    assert find_dataset("plays", tmp_path, "byte").name == "plays_byte"


def test_a_folder_is_found_by_its_path(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "elsewhere" / "mine")
    assert find_dataset(str(folder), tmp_path / "data", "auto").path == folder
    monkeypatch.chdir(tmp_path)
    assert find_dataset("elsewhere/mine", tmp_path / "data", "auto").train_tokens == 160
    monkeypatch.chdir(folder)
    assert find_dataset(".", tmp_path / "data", "auto").train_tokens == 160


@pytest.mark.parametrize(
    "names",
    [("fineweb_train_000001.bin", "fineweb_val_000000.bin"), ("tiny_train.bin", "tiny_val.bin")],
)
def test_a_folder_of_llm_c_is_assumed_to_be_gpt2_with_a_note(tmp_path, names):
    for name in names:
        write_shard(tmp_path / name, np.arange(20, dtype=np.uint16))
    dataset = find_dataset(str(tmp_path), tmp_path, "gpt2")
    assert (
        dataset.tokenizer == "gpt2"
        and "no dataset.json" in dataset.note
        and "GPT-2 BPE" in dataset.note
    )


def test_auto_is_fineweb_where_it_is_prepared(tmp_path, no_bpe, quick_stdlib):
    make_folder(tmp_path / "fineweb10B", tokenizer="gpt2")
    for tokenizer in ("auto", "gpt2"):
        assert find_dataset("auto", tmp_path, tokenizer).name == "fineweb10B"
    assert find_dataset("auto", tmp_path, "byte").name == "stdlib_byte"


def test_auto_is_else_the_embedded_stdlib_prepared_on_the_spot_once(tmp_path, no_bpe, quick_stdlib):
    for _ in range(2):  # the note is repeated when the dataset exists
        dataset = find_dataset("auto", tmp_path, "auto")
        assert (dataset.name, dataset.tokenizer, dataset.note) == (
            "stdlib_byte",
            "byte",
            "NOTE: bytes",
        )
    assert find_dataset("stdlib", tmp_path, "byte").note is None
    assert quick_stdlib == ["byte"]


def test_stdlib_in_bytes_is_replaced_by_bpe_once_available(tmp_path, monkeypatch, quick_stdlib):
    class Gpt2:
        name = "gpt2"

    make_folder(tmp_path / "stdlib_byte")
    monkeypatch.setattr(module, "choose_tokenizer", lambda choice: (Gpt2, None))
    assert find_dataset("stdlib", tmp_path, "auto").name == "stdlib_gpt2"
    assert quick_stdlib == ["gpt2"]
    monkeypatch.setattr(module, "choose_tokenizer", lambda choice: pytest.fail("no need to ask"))
    assert find_dataset("stdlib", tmp_path, "auto").name == "stdlib_gpt2"


def test_stdlib_is_a_reserved_name_in_any_working_directory(
    tmp_path, monkeypatch, no_bpe, quick_stdlib
):
    make_folder(tmp_path / "stdlib")
    monkeypatch.chdir(tmp_path)
    assert (
        find_dataset("stdlib", tmp_path / "data", "byte").path == tmp_path / "data" / "stdlib_byte"
    )


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("fineweb10B", "fineweb10B --data-dir {}"),
        ("stdlib_byte", "stdlib --tokenizer byte --data-dir {}"),
        ("stdlib_gpt2", "stdlib --tokenizer gpt2 --data-dir {}"),
        ("tinyshakespeare", "tinyshakespeare --tokenizer auto --data-dir {}"),
        ("mine", "text PATH... --name mine --tokenizer auto --data-dir {}"),
    ],
)
def test_an_unprepared_dataset_is_an_error_with_the_command_that_prepares_it(
    tmp_path, name, command
):
    make_folder(tmp_path / "other")
    with pytest.raises(DatasetError) as error:
        find_dataset(name, tmp_path, "auto")
    assert f"{name!r} is not prepared" in str(error.value) and "found only other prepared" in str(
        error.value
    )
    assert str(error.value).endswith(f"python -m gptjax.data {command.format(tmp_path)}")


def test_an_empty_data_dir_is_an_error(tmp_path):
    with pytest.raises(DatasetError, match="found nothing prepared in"):
        find_dataset("mine", tmp_path / "none", "auto")
    with pytest.raises(DatasetError, match="found an empty name"):
        find_dataset("", tmp_path, "auto")


def test_another_tokenizer_than_the_shards_is_refused(tmp_path):
    make_folder(tmp_path / "mine")
    with pytest.raises(
        DatasetError,
        match="mine: expected shards made with tokenizer 'gpt2', found 'byte'; .*--tokenizer gpt2",
    ):
        find_dataset("mine", tmp_path, "gpt2")
    with pytest.raises(
        DatasetError, match="unknown tokenizer 'gpt4'; choose one of auto, gpt2, byte"
    ):
        find_dataset("mine", tmp_path, "gpt4")


@pytest.mark.parametrize(("train", "val", "missing"), [((), (9,), "train"), ((9,), (), "val")])
def test_a_folder_without_a_split_is_refused(tmp_path, train, val, missing):
    make_folder(tmp_path / "mine", train=train, val=val)
    with pytest.raises(
        DatasetError,
        match=rf"mine: expected token shards .* found no \*_{missing}_\*.bin; .*gptjax.data",
    ):
        find_dataset("mine", tmp_path, "auto")


def test_a_missing_listed_shard_is_an_error(tmp_path):
    folder = make_folder(tmp_path / "mine")
    (folder / "some_train_000002.bin").unlink()
    with pytest.raises(
        DatasetError,
        match="mine: expected the 3 shards .* found some_train_000002.bin missing; remove",
    ):
        find_dataset("mine", tmp_path, "auto")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "JSONDecodeError"),
        (b"[" * 200_000, "RecursionError"),
        (b'{"format": ' + b"9" * 5000 + b"}", "ValueError: Exceeds the limit"),
        (b'{"format": 1e999}', "ValueError: format inf instead of an integer in 1..2"),
        (b'{"a": "\xe9"}', "UnicodeDecodeError"),
        (b"", "JSONDecodeError"),
        (b"[]", "ValueError: list instead of an object for the file"),
        (b" " * 3000, "ValueError: more than 2000 bytes"),
    ],
)
def test_a_dataset_json_that_cannot_be_parsed_is_an_error(tmp_path, monkeypatch, content, says):
    if content.isspace():
        monkeypatch.setattr(manifest_module, "_MAX_BYTES", 2000)
    folder = make_folder(tmp_path / "mine")
    (folder / "dataset.json").write_bytes(content)
    says = f"dataset.json: expected a description of shards, format 1 or 2, found {says}.*; restore"
    with pytest.raises(DatasetError, match=says):
        find_dataset("mine", tmp_path, "auto")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 3}, "format 3 instead of an integer in 1..2"),
        ({"format": True}, "format True instead"),
        ({"tokenizer": "gpt4"}, "tokenizer 'gpt4'; known are gpt2, byte"),
        ({"tokenizer": "gpt2"}, "vocab_size 257 instead of 50257"),
        ({"tokenizer": ["byte"]}, r"tokenizer \['byte'\] instead of a text"),
        ({"tokenizer": "\x1b[31mred"}, r"tokenizer '\\x1b\[31mred'"),
        ({"vocab_size": 257.0}, "vocab_size 257.0 instead of 257"),
        ({"eot": None}, "eot None instead of 256"),
        ({"source": 5}, "source 5 instead of a text"),
        ({"source_digest": "abc"}, "source_digest 'abc' instead of 64 hexadecimal digits"),
        ({"shards": None}, "NoneType instead of an object for shards"),
        ({"shards": [1]}, "list instead of an object for shards"),
        ({"tokens": -5}, "tokens -5 instead of an integer in 1..2147483647"),
        ({"tokens": 10**400}, "tokens 1000.* instead of an integer"),
        ({"tokens": "100"}, "tokens '100' instead"),
        ({"tokens": True}, "tokens True instead"),
        ({"tokens": 100.0}, "tokens 100.0 instead"),
        ({"tokens": float("nan")}, "tokens nan instead"),
        ({"max_token": -1}, "max_token -1 instead of an integer in 0..256"),
        ({"max_token": 300}, "max_token 300 instead of an integer in 0..256"),
        ({"sha256": "g" * 64}, "sha256 'ggg.* instead of 64 hexadecimal digits"),
        ({"sample": None}, "sample None instead of a text"),
    ],
)
def test_a_field_of_dataset_json_of_a_wrong_type_or_range_is_an_error(tmp_path, change, says):
    folder = make_folder(tmp_path / "mine")
    said = json.loads((folder / "dataset.json").read_text())
    (name, value) = next(iter(change.items()))
    where = (
        said["shards"]["some_train_000001.bin"]
        if name in ("tokens", "max_token", "sha256", "sample")
        else said
    )
    where[name] = value
    (folder / "dataset.json").write_text(json.dumps(said))
    with pytest.raises(
        DatasetError,
        match=f"dataset.json: expected a description of shards.* found ValueError: {says}",
    ):
        find_dataset("mine", tmp_path, "auto")


@pytest.mark.parametrize(
    "name", ["../some_train_000001.bin", "/etc/passwd", "..", "", "\x1b[2Jx_train_1.bin"]
)
def test_a_listed_name_without_a_shard_is_an_error_without_control_characters(tmp_path, name):
    folder = make_folder(tmp_path / "mine")
    said = json.loads((folder / "dataset.json").read_text())
    said["shards"][name] = said["shards"]["some_train_000001.bin"]
    (folder / "dataset.json").write_text(json.dumps(said))
    with pytest.raises(DatasetError, match="expected the 4 shards .* missing; remove") as error:
        find_dataset("mine", tmp_path, "auto")
    assert "\x1b" not in str(error.value) and name.replace("\x1b", "\ufffd") in str(error.value)


@pytest.mark.parametrize("file", ["dataset.json", "some_train_000001.bin"])
@pytest.mark.parametrize(
    ("replace", "says"),
    [
        (os.mkdir, "a directory instead of a regular file"),
        (os.mkfifo, "a FIFO instead of a regular file"),  # opening a FIFO waits for a writer
        (lambda path: os.symlink("/dev/zero", path), "a device instead of a regular file"),
        (lambda path: os.symlink(path, path), "Too many levels of symbolic links"),
    ],
)
def test_a_file_that_is_no_regular_file_is_refused(tmp_path, file, replace, says):
    folder = make_folder(tmp_path / "mine")
    (folder / file).unlink()
    replace(folder / file)
    with pytest.raises(DataError, match=rf"{file}: .*found .*{says}.*; "):
        find_dataset("mine", tmp_path, "auto").validate(257, 4)


@pytest.mark.parametrize("file", ["dataset.json", "some_train_000001.bin"])
def test_a_file_without_permission_is_an_error(tmp_path, monkeypatch, file):
    """`os.open` is patched to refuse, because root ignores permissions."""
    folder, real = make_folder(tmp_path / "mine"), os.open

    def refuse(path, *rest):
        if Path(path) == folder / file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DataError, match=f"{file}: .*found .*Permission denied"):
        find_dataset("mine", tmp_path, "auto").validate(257, 4)


def test_an_unreadable_folder_is_an_error(tmp_path, monkeypatch):
    make_folder(tmp_path / "mine")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(
        DatasetError,
        match="dataset 'mine' in .* found .*Permission denied.*choose another --dataset",
    ):
        find_dataset("mine", tmp_path, "auto")
    with pytest.raises(DatasetError, match="File name too long"):
        find_dataset("m" * 400, tmp_path, "auto")


def test_control_characters_of_a_folder_do_not_reach_the_note(tmp_path):
    folder = make_folder(tmp_path / "red\x1b[31m", manifest=False)
    assert "red\ufffd[31m has no dataset.json" in find_dataset(str(folder), tmp_path, "auto").note


def test_the_fingerprint_survives_json_and_tells_datasets_apart(tmp_path):
    prints = [
        find_dataset(make_folder(tmp_path / name, **options).name, tmp_path, "auto").fingerprint()
        for name, options in {
            "a": {},
            "b": {},
            "c": {"train": (100, 61)},
            "d": {"tokenizer": "gpt2"},
        }.items()
    ]
    assert json.loads(json.dumps(prints)) == prints
    assert prints[0]["train"] == {"some_train_000001.bin": 100, "some_train_000002.bin": 60}
    assert prints[0]["val"] == {"some_val_000000.bin": 50}
    assert prints[0] == prints[1] and prints[0] != prints[2] and prints[0] != prints[3]


@pytest.mark.parametrize("manifest", [True, False])
def test_changed_tokens_under_the_same_names_and_counts_are_other_data(tmp_path, manifest):
    """Without dataset.json, only the digest in the checkpoint differs."""
    folder = make_folder(tmp_path / "mine", manifest=manifest)
    dataset = find_dataset("mine", tmp_path, "auto")
    saved = json.loads(json.dumps(dataset.fingerprint()))
    assert (
        dataset.differences(saved)
        == []
        == find_dataset("mine", tmp_path, "auto").differences(saved)
    )
    write_shard(folder / "some_train_000002.bin", np.arange(60, dtype=np.uint16) + 1)
    changed = find_dataset("mine", tmp_path, "auto")
    (line,) = changed.differences(saved)
    assert line.startswith("some_train_000002.bin: expected SHA-256 of a sample '")
    assert changed.fingerprint() != saved
    assert dataset.fingerprint() == saved  # the files are read once, at the start


def test_a_digest_of_dataset_json_that_changed_outside_of_the_sample_is_other_data(tmp_path):
    folder = make_folder(tmp_path / "mine")
    saved = find_dataset("mine", tmp_path, "auto").fingerprint()
    said = json.loads((folder / "dataset.json").read_text())
    said["shards"]["some_val_000000.bin"]["sha256"] = "0" * 64
    (folder / "dataset.json").write_text(json.dumps(said))
    dataset = find_dataset("mine", tmp_path, "auto")
    (line,) = dataset.differences(saved)
    assert line.startswith("some_val_000000.bin: expected SHA-256 in dataset.json '")
    assert dataset.differences({name: saved[name] for name in saved if name != "sha256"}) == []


def test_many_differences_are_cut_short(tmp_path):
    make_folder(tmp_path / "mine", train=(9,) * 30)
    dataset = find_dataset("mine", tmp_path, "auto")
    lines = dataset.differences(dataset.fingerprint() | {"train": {}})
    assert len(lines) == 10 and lines[-1] == "and 21 more"


def test_a_fingerprint_of_an_older_version_has_names_and_counts_only(tmp_path):
    make_folder(tmp_path / "mine")
    dataset = find_dataset("mine", tmp_path, "auto")
    saved = {name: dataset.fingerprint()[name] for name in ("tokenizer", "train", "val")}
    assert dataset.differences(saved) == []
    saved["train"] = {"some_train_000001.bin": 99, "gone_train_000002.bin": 60}
    assert dataset.differences(saved) == [
        "gone_train_000002.bin: expected this shard, which the checkpoint was trained on, found "
        "none",
        "some_train_000001.bin: expected tokens 99, found 100",
        "some_train_000002.bin: expected no such shard in the train shards, "
        + "found one that the checkpoint was not trained on",
    ]
    assert (
        dataset.differences(saved | {"tokenizer": "gpt2"})[0]
        == "tokenizer: expected 'gpt2', found 'byte'"
    )


@pytest.mark.parametrize(
    "saved",
    [
        None,
        5,
        "x",
        [],
        {},
        {"train": 5},
        {"train": {"\x1b[2J": None}},
        {"samples": None},
        {"samples": {"a": []}},
    ],
)
def test_a_malformed_fingerprint_differs_and_never_raises(tmp_path, saved):
    make_folder(tmp_path / "mine")
    dataset = find_dataset("mine", tmp_path, "auto")
    if isinstance(saved, dict) and "samples" in saved:
        saved = dataset.fingerprint() | saved
    lines = dataset.differences(saved)
    assert lines and "\x1b" not in "".join(lines)


def test_validate_accepts_an_exact_fit(tmp_path):
    make_folder(tmp_path / "mine")
    find_dataset("mine", tmp_path, "auto").validate(100, 49)


def test_validate_refuses_a_shard_that_is_not_the_listed_one(tmp_path):
    folder = make_folder(tmp_path / "mine", train=(100, 100))
    dataset = find_dataset("mine", tmp_path, "auto")
    first, second = (folder / f"some_train_00000{number}.bin" for number in (1, 2))
    whole = first.read_bytes()
    first.write_bytes(whole[:1100] + bytes([whole[1100] ^ 1]) + whole[1101:])
    says = (
        r"some_train_000001.bin: at byte 8: expected content of digest .*, "
        r"as dataset.json lists, found .*; "
    )
    with pytest.raises(ShardError, match=says + ".*python -m gptjax.data check"):
        dataset.validate(257, 4)
    first.write_bytes(whole)
    dataset.validate(257, 4)
    write_shard(second, np.zeros(100, dtype=np.uint16))
    with pytest.raises(
        ShardError, match="some_train_000002.bin: at byte 8: expected content of digest"
    ):
        dataset.validate(257, 4)


def test_a_sample_reads_the_same_blocks_of_a_large_shard_the_first_and_last_bytes_among_them(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(manifest_module, "_SAMPLE_WHOLE", 4000)
    monkeypatch.setattr(manifest_module, "_SAMPLE_BLOCKS", 3)
    monkeypatch.setattr(manifest_module, "_SAMPLE_BLOCK_BYTES", 100)
    write_shard(tmp_path / "a.bin", np.arange(4000, dtype=np.uint16))
    content = (tmp_path / "a.bin").read_bytes()  # 9024 bytes
    expected = hashlib.sha256(content[:100] + content[4462:4562] + content[-100:]).hexdigest()
    assert manifest_module.sample(module.Shard(tmp_path / "a.bin")) == expected


def test_an_older_dataset_json_without_digests_is_read_with_a_note(tmp_path):
    folder = make_folder(tmp_path / "mine", version=1)
    before = (folder / "dataset.json").read_bytes()
    dataset = find_dataset("mine", tmp_path, "auto")
    assert "older format without digests" in dataset.note and "--overwrite" in dataset.note
    dataset.validate(257, 49)
    assert dataset.fingerprint()["sha256"] == {} and len(dataset.fingerprint()["samples"]) == 3
    assert (folder / "dataset.json").read_bytes() == before


def test_shards_that_dataset_json_does_not_list_are_noted(tmp_path):
    folder = make_folder(tmp_path / "mine")
    write_shard(folder / "other_train_000001.bin", np.arange(9, dtype=np.uint16))
    note = find_dataset("mine", tmp_path, "auto").note
    assert "has 1 shards that dataset.json does not list (other_train_000001.bin)" in note


@pytest.mark.parametrize("file", ["some_train_000002.bin", "some_val_000000.bin"])
def test_validate_refuses_a_shard_too_short_for_a_window(tmp_path, file):
    folder = make_folder(tmp_path / "mine", manifest=False)
    write_shard(folder / file, np.zeros(40, dtype=np.uint16))
    dataset = find_dataset("mine", tmp_path, "auto")
    dataset.validate(257, 39)
    with pytest.raises(
        ShardError,
        match=rf"{file}: at byte 8: expected at least 41 tokens \(one window .* 40\), found 40",
    ):
        dataset.validate(257, 40)


def test_validate_refuses_a_bad_header(tmp_path):
    folder = make_folder(tmp_path / "mine")
    (folder / "some_val_000000.bin").write_bytes(b"\0" * 2000)
    with pytest.raises(ShardError, match="some_val_000000.bin: at byte 0: expected magic"):
        find_dataset("mine", tmp_path, "auto").validate(257, 4)


@pytest.mark.parametrize("manifest", [True, False])
def test_validate_names_the_first_id_outside_the_vocabulary(tmp_path, manifest, monkeypatch):
    monkeypatch.setattr("gptjax.data.shards._CHUNK_TOKENS", 16)
    make_folder(tmp_path / "mine", tokenizer="gpt2", manifest=manifest)
    dataset = find_dataset("mine", tmp_path, "auto")
    dataset.validate(100, 4)
    says = (
        r"some_train_000001.bin: at byte 1204: expected ids below .* 90, "
        r"found id 90 \(token 90\); .*vocab_size"
    )
    with pytest.raises(ShardError, match=says):
        dataset.validate(90, 4)


def test_validate_scans_only_unlisted_shards(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "mine")
    dataset = find_dataset("mine", tmp_path, "auto")
    scanned = []
    real = module.scan_ids
    monkeypatch.setattr(
        module,
        "scan_ids",
        lambda shard, *rest: scanned.append(shard.path.name) or real(shard, *rest),
    )
    dataset.validate(257, 4)
    assert scanned == []
    # the manifest does not list it
    write_shard(folder / "some_train_000003.bin", np.full(61, 300, dtype=np.uint16))
    with pytest.raises(ShardError, match="some_train_000003.bin: at byte 1024: .* found id 300"):
        find_dataset("mine", tmp_path, "auto").validate(257, 4)
    assert scanned == ["some_train_000003.bin"]


@pytest.mark.parametrize(("epochs", "shards"), [(8.5, 1), (2e6, 4), (1e12, 103)])
def test_more_than_a_few_epochs_are_warned_of_with_the_command_that_prepares_data(
    tmp_path, epochs, shards
):
    make_folder(tmp_path / "mine")  # 160 tokens
    dataset = find_dataset("mine", tmp_path, "auto")
    note = few_tokens_note(dataset, epochs)
    assert note.startswith("WARNING: ") and "160 training tokens of mine" in note
    assert note.endswith(f"python -m gptjax.data fineweb10B --shards {shards}")
    assert few_tokens_note(dataset, epochs, tmp_path).endswith(
        f"--shards {shards} --data-dir {tmp_path}"
    )
    assert few_tokens_note(dataset, 8.0) is None
