"""Finding a prepared dataset, and reading its dataset.json."""

import dataclasses
import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from dataset_tools import make_folder

from gptjax.data import (
    DataError,
    DatasetError,
    few_tokens_note,
    find_dataset,
    get_tokenizer,
    write_shard,
)
from gptjax.data import dataset as module
from gptjax.data import manifest as manifest_module
from gptjax.user_folders import data_folder


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


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("wiki_train_small_train_000001.bin", "wiki_train_small_val_000000.bin"),
        ("my_val_set_train_000001.bin", "my_val_set_val_000000.bin"),
        ("a_val_train.bin", "a_train_val.bin"),
        ("a_val_train_1.bin", "a_train_val_1.bin"),  # the underscore in the middle is shared
        ("line\n_val_x_train_1.bin", "line\n_train_x_val_1.bin"),
    ],
)
def test_the_last_split_in_a_file_name_decides(tmp_path, train, val):
    for name in (train, val):
        write_shard(tmp_path / name, np.arange(20, dtype=np.uint16))
    dataset = find_dataset(str(tmp_path), tmp_path)
    assert [path.name for path in dataset.train] == [train]
    assert [path.name for path in dataset.val] == [val]


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
    assert find_dataset("stdlib_byte", tmp_path).note is None
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
        ("tinyshakespeare_byte", "tinyshakespeare --tokenizer byte --data-dir {}"),
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
        (b'{"format": 1e999}', "ValueError: format inf instead of an integer in 1..3"),
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
    says = f"dataset.json: expected a description of shards, format 1 to 3, found {says}.*; restore"
    with pytest.raises(DatasetError, match=says):
        find_dataset("mine", tmp_path, "auto")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 4}, "format 4 instead of an integer in 1..3"),
        ({"format": True}, "format True instead"),
        ({"tokenizer": "gpt4"}, "tokenizer 'gpt4'; known are gpt2, byte"),
        ({"tokenizer": "gpt2"}, "vocab_size 257 instead of 50257"),
        ({"tokenizer": ["byte"]}, r"tokenizer \['byte'\] instead of a text"),
        ({"tokenizer": "\x1b[31mred"}, r"tokenizer '\\x1b\[31mred'"),
        ({"vocab_size": 257.0}, "vocab_size 257.0 instead of 257"),
        ({"eot": None}, "eot None instead of 256"),
        ({"source": 5}, "source 5 instead of a text"),
        ({"source_digest": "abc"}, "source_digest 'abc' instead of 64 hexadecimal digits"),
        ({"options": [1]}, "list instead of an object for options"),
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


@pytest.mark.parametrize(("epochs", "shards"), [(8.5, 1), (2e6, 4), (1e12, 103)])
def test_more_than_a_few_epochs_are_warned_of_with_the_command_that_prepares_data(
    tmp_path, epochs, shards
):
    make_folder(tmp_path / "mine")  # 160 tokens
    dataset = find_dataset("mine", tmp_path, "auto")
    note = few_tokens_note(dataset, epochs, data_folder())
    assert note.startswith("WARNING: ") and "160 training tokens of mine" in note
    assert note.endswith(f"python -m gptjax.data fineweb10B --shards {shards}")
    assert few_tokens_note(dataset, epochs, tmp_path).endswith(
        f"--shards {shards} --data-dir {tmp_path}"
    )
    assert few_tokens_note(dataset, 8.0, data_folder()) is None
