import dataclasses
import json

import numpy as np
import pytest

from gptjax.data import DatasetError, ShardError, find_dataset, get_tokenizer, write_shard
from gptjax.data import dataset as module


def make_folder(folder, *, tokenizer="byte", train=(100, 60), val=(50,), sidecar=True, **extra):
    """A dataset folder with the given shard sizes, by hand."""
    folder.mkdir(parents=True)
    shards = {}
    for split, first, sizes in (("train", 1, train), ("val", 0, val)):
        for number, size in enumerate(sizes, start=first):
            file = f"some_{split}_{number:06d}.bin"
            write_shard(folder / file, np.arange(size, dtype=np.uint16) % 200)
            shards[file] = {"tokens": size, "max_token": min(size - 1, 199)}
    said = {"format": 1, "tokenizer": tokenizer, "vocab_size": 257, "eot": 256, "source": "test", "shards": shards}
    if sidecar:
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
    """prepare_stdlib without the work; the real one is tested in test_prepare.py."""
    made = []

    def prepare_stdlib(data_dir, tokenizer):
        made.append(tokenizer)
        return make_folder(data_dir / f"stdlib_{tokenizer}", tokenizer=tokenizer)

    monkeypatch.setattr(module, "prepare_stdlib", prepare_stdlib)
    return made


def test_a_prepared_dataset_is_found_by_name_with_its_shards_in_order(tmp_path):
    folder = make_folder(tmp_path / "mine", train=(10,) * 11)
    dataset = find_dataset("mine", tmp_path, "auto")
    assert (dataset.name, dataset.path, dataset.tokenizer, dataset.note) == ("mine", folder, "byte", None)
    assert [path.name for path in dataset.train] == [f"some_train_{number:06d}.bin" for number in range(1, 12)]
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
    "names", [("fineweb_train_000001.bin", "fineweb_val_000000.bin"), ("tiny_train.bin", "tiny_val.bin")]
)
def test_a_folder_of_llm_c_is_taken_as_gpt2_and_that_is_said(tmp_path, names):
    for name in names:
        write_shard(tmp_path / name, np.arange(20, dtype=np.uint16))
    dataset = find_dataset(str(tmp_path), tmp_path, "gpt2")
    assert dataset.tokenizer == "gpt2" and "no dataset.json" in dataset.note and "GPT-2 BPE" in dataset.note


def test_auto_is_fineweb_where_it_is_prepared(tmp_path, no_bpe, quick_stdlib):
    make_folder(tmp_path / "fineweb10B", tokenizer="gpt2")
    for tokenizer in ("auto", "gpt2"):
        assert find_dataset("auto", tmp_path, tokenizer).name == "fineweb10B"
    assert find_dataset("auto", tmp_path, "byte").name == "stdlib_byte"


def test_auto_is_else_the_embedded_stdlib_prepared_on_the_spot_once(tmp_path, no_bpe, quick_stdlib):
    for _ in range(2):  # the note is not lost once the dataset is there
        dataset = find_dataset("auto", tmp_path, "auto")
        assert (dataset.name, dataset.tokenizer, dataset.note) == ("stdlib_byte", "byte", "NOTE: bytes")
    assert find_dataset("stdlib", tmp_path, "byte").note is None
    assert quick_stdlib == ["byte"]


def test_stdlib_in_bytes_gives_way_to_bpe_once_that_can_be_had(tmp_path, monkeypatch, quick_stdlib):
    class Gpt2:
        name = "gpt2"

    make_folder(tmp_path / "stdlib_byte")
    monkeypatch.setattr(module, "choose_tokenizer", lambda choice: (Gpt2, None))
    assert find_dataset("stdlib", tmp_path, "auto").name == "stdlib_gpt2"
    assert quick_stdlib == ["gpt2"]
    monkeypatch.setattr(module, "choose_tokenizer", lambda choice: pytest.fail("no need to ask"))
    assert find_dataset("stdlib", tmp_path, "auto").name == "stdlib_gpt2"


def test_stdlib_is_ours_whatever_lies_in_the_current_directory(tmp_path, monkeypatch, no_bpe, quick_stdlib):
    make_folder(tmp_path / "stdlib")
    monkeypatch.chdir(tmp_path)
    assert find_dataset("stdlib", tmp_path / "data", "byte").path == tmp_path / "data" / "stdlib_byte"


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
def test_what_is_not_prepared_is_said_with_the_command_that_prepares_it(tmp_path, name, command):
    make_folder(tmp_path / "other")
    with pytest.raises(DatasetError) as error:
        find_dataset(name, tmp_path, "auto")
    assert f"{name!r} is not prepared" in str(error.value) and "found only other prepared" in str(error.value)
    assert str(error.value).endswith(f"python -m gptjax.data {command.format(tmp_path)}")


def test_an_empty_data_dir_is_said(tmp_path):
    with pytest.raises(DatasetError, match="found nothing prepared in"):
        find_dataset("mine", tmp_path / "none", "auto")
    with pytest.raises(DatasetError, match="found an empty name"):
        find_dataset("", tmp_path, "auto")


def test_another_tokenizer_than_the_shards_is_refused(tmp_path):
    make_folder(tmp_path / "mine")
    with pytest.raises(
        DatasetError, match="mine: expected shards made with tokenizer 'gpt2', found 'byte'; .*--tokenizer gpt2"
    ):
        find_dataset("mine", tmp_path, "gpt2")
    with pytest.raises(DatasetError, match="unknown tokenizer 'gpt4'; choose one of auto, gpt2, byte"):
        find_dataset("mine", tmp_path, "gpt4")


@pytest.mark.parametrize(("train", "val", "missing"), [((), (9,), "train"), ((9,), (), "val")])
def test_a_folder_without_a_split_is_refused(tmp_path, train, val, missing):
    make_folder(tmp_path / "mine", train=train, val=val)
    with pytest.raises(
        DatasetError, match=rf"mine: expected token shards .* found no \*_{missing}_\*.bin; .*gptjax.data"
    ):
        find_dataset("mine", tmp_path, "auto")


def test_a_listed_shard_that_is_gone_is_said(tmp_path):
    folder = make_folder(tmp_path / "mine")
    (folder / "some_train_000002.bin").unlink()
    with pytest.raises(
        DatasetError, match="mine: expected the 3 shards .* found some_train_000002.bin missing; remove"
    ):
        find_dataset("mine", tmp_path, "auto")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "JSONDecodeError"),
        ('{"format": 2}', "ValueError: format 2"),
        ('{"format": 1}', "KeyError: 'tokenizer'"),
        ("[]", "TypeError"),
    ],
)
def test_a_dataset_json_that_cannot_be_understood_is_said(tmp_path, content, says):
    folder = make_folder(tmp_path / "mine")
    (folder / "dataset.json").write_text(content)
    with pytest.raises(
        DatasetError, match=f"dataset.json: expected a description of shards, format 1, found {says}.*; remove"
    ):
        find_dataset("mine", tmp_path, "auto")


def test_the_fingerprint_survives_json_and_tells_datasets_apart(tmp_path):
    prints = [
        find_dataset(make_folder(tmp_path / name, **options).name, tmp_path, "auto").fingerprint()
        for name, options in {"a": {}, "b": {}, "c": {"train": (100, 61)}, "d": {"tokenizer": "gpt2"}}.items()
    ]
    assert json.loads(json.dumps(prints)) == prints
    assert prints[0]["train"] == {"some_train_000001.bin": 100, "some_train_000002.bin": 60}
    assert prints[0]["val"] == {"some_val_000000.bin": 50}
    assert prints[0] == prints[1] and prints[0] != prints[2] and prints[0] != prints[3]


def test_validate_accepts_what_fits_exactly(tmp_path):
    make_folder(tmp_path / "mine")
    find_dataset("mine", tmp_path, "auto").validate(100, 49)


@pytest.mark.parametrize("file", ["some_train_000002.bin", "some_val_000000.bin"])
def test_validate_refuses_a_shard_too_short_for_a_window(tmp_path, file):
    folder = make_folder(tmp_path / "mine")
    write_shard(folder / file, np.zeros(40, dtype=np.uint16))
    dataset = find_dataset("mine", tmp_path, "auto")
    dataset.validate(257, 39)
    with pytest.raises(
        ShardError, match=rf"{file}: at byte 8: expected at least 41 tokens \(one window .* 40\), found 40"
    ):
        dataset.validate(257, 40)


def test_validate_refuses_a_bad_header(tmp_path):
    folder = make_folder(tmp_path / "mine")
    (folder / "some_val_000000.bin").write_bytes(b"\0" * 2000)
    with pytest.raises(ShardError, match="some_val_000000.bin: at byte 0: expected magic"):
        find_dataset("mine", tmp_path, "auto").validate(257, 4)


@pytest.mark.parametrize("sidecar", [True, False])
def test_validate_names_the_first_id_outside_the_vocabulary(tmp_path, sidecar, monkeypatch):
    monkeypatch.setattr(module, "_SCAN_TOKENS", 16)
    make_folder(tmp_path / "mine", tokenizer="gpt2", sidecar=sidecar)
    dataset = find_dataset("mine", tmp_path, "auto")
    dataset.validate(100, 4)
    says = r"some_train_000001.bin: at byte 1204: expected ids below .* 90, found id 90 \(token 90\); .*vocab_size"
    with pytest.raises(ShardError, match=says):
        dataset.validate(90, 4)


def test_validate_reads_only_what_the_sidecar_does_not_vouch_for(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "mine")
    dataset = find_dataset("mine", tmp_path, "auto")
    scanned = []
    real = module._scan
    monkeypatch.setattr(module, "_scan", lambda path, *rest: scanned.append(path.name) or real(path, *rest))
    dataset.validate(257, 4)
    assert scanned == []
    write_shard(folder / "some_train_000002.bin", np.full(61, 300, dtype=np.uint16))  # not what the sidecar lists
    with pytest.raises(ShardError, match="some_train_000002.bin: at byte 1024: .* found id 300"):
        dataset.validate(257, 4)
    assert scanned == ["some_train_000002.bin"]
