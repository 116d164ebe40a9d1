"""Finding a prepared dataset, its dataset.json, its fingerprint, and the checks of its files."""

import hashlib
import json
import os

import jax
import numpy as np
import pytest
from dataset_tools import edit_manifest, make_folder

from gptjax import Config, GPT2Config
from gptjax.data import (
    DataError,
    DatasetError,
    ShardError,
    check_dataset,
    find_dataset,
    get_tokenizer,
    write_shard,
)
from gptjax.data import dataset as module
from gptjax.data import shards as shards_module
from gptjax.data.__main__ import main
from gptjax.parallel import data_mesh
from gptjax.training.inputs import Inputs

TRAIN_1, TRAIN_2, VAL = "some_train_000001.bin", "some_train_000002.bin", "some_val_000000.bin"


# -------------------------------------------------------------------------------- finding a dataset


def test_a_prepared_dataset_is_found_by_name_or_path_with_its_shards_in_order(
    tmp_path, monkeypatch
):
    folder = make_folder(tmp_path / "data" / "mine_byte", train=(10,) * 11)
    monkeypatch.chdir(tmp_path)
    for name, tokenizer in (
        *(("mine_byte", "auto"), ("mine", "auto"), ("mine", "byte")),
        *((str(folder), "auto"), ("data/mine_byte", "auto")),
    ):
        dataset = find_dataset(name, tmp_path / "data", tokenizer)
        assert dataset.path.absolute() == folder and dataset.name == "mine_byte"
    assert (dataset.tokenizer, dataset.note) == ("byte", None)
    assert [path.name for path in dataset.train] == [
        f"some_train_{number:06d}.bin" for number in range(1, 12)
    ]
    assert (dataset.train_tokens, dataset.val_tokens) == (110, 50)
    monkeypatch.chdir(folder)
    assert find_dataset(".", tmp_path / "data", "auto").train_tokens == 110
    make_folder(tmp_path / "data" / "mine_gpt2", tokenizer="gpt2")
    for tokenizer, name in (("auto", "mine_gpt2"), ("byte", "mine_byte")):
        assert find_dataset("mine", tmp_path / "data", tokenizer).name == name


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("fineweb_train_000001.bin", "fineweb_val_000000.bin"),
        ("tiny_train.bin", "tiny_val.bin"),
        ("wiki_train_small_train_000001.bin", "my_val_set_val_000000.bin"),
        ("line\n_val_train_1.bin", "a_train_val_1.bin"),  # the underscore in the middle is shared
    ],
)
def test_a_folder_of_llm_c_is_gpt2_with_a_note(tmp_path, train, val):
    """The last split in a file name decides."""
    folder = tmp_path / "red\x1b[31m"
    folder.mkdir()
    for name in (train, val):
        write_shard(folder / name, np.arange(20, dtype=np.uint16))
    dataset = find_dataset(str(folder), tmp_path, "gpt2")
    assert (dataset.train, dataset.val) == ((folder / train,), (folder / val,))
    assert dataset.tokenizer == "gpt2"
    assert "red\ufffd[31m has no dataset.json: assuming GPT-2 BPE" in dataset.note


def test_auto_is_fineweb_where_it_is_prepared_else_stdlib(tmp_path, monkeypatch):
    byte, made = get_tokenizer("byte"), []
    auto = (byte, "NOTE: bytes")

    def prepare_stdlib(data_dir, tokenizer):  # test_prepare.py tests the real one
        made.append(tokenizer)
        make_folder(data_dir / f"stdlib_{tokenizer}", tokenizer=tokenizer)

    choose = lambda choice: auto if choice == "auto" else (byte, None)
    monkeypatch.setattr(module, "prepare_stdlib", prepare_stdlib)
    monkeypatch.setattr(module, "choose_tokenizer", choose)
    for _ in range(2):  # the note is repeated when the dataset exists
        dataset = find_dataset("auto", tmp_path, "auto")
        assert (dataset.name, dataset.note) == ("stdlib_byte", "NOTE: bytes")
    assert find_dataset("stdlib_byte", tmp_path).note is None and made == ["byte"]
    auto = (type("GPT2", (), {"name": "gpt2"}), None)  # replaces bytes once available
    for _ in range(2):
        assert find_dataset("stdlib", tmp_path, "auto").name == "stdlib_gpt2"
    assert made == ["byte", "gpt2"]
    make_folder(tmp_path / "fineweb10B", tokenizer="gpt2")
    for tokenizer in ("auto", "gpt2"):
        assert find_dataset("auto", tmp_path, tokenizer).name == "fineweb10B"
    assert find_dataset("auto", tmp_path, "byte").name == "stdlib_byte"
    model = GPT2Config(vocab_size=257, block_size=16, n_layer=1, n_head=1, n_embd=32)
    sizes = {"sequence_length": 16, "micro_batch": 1, "batch_tokens": 16}
    config = Config(model=model, data_dir=tmp_path, sample_every=0, **sizes)
    assert Inputs.find(config, data_mesh(jax.devices("cpu")[:1])).dataset.name == "stdlib_byte"
    # A reserved name, also where the current folder has such a folder.
    make_folder(tmp_path / "stdlib")
    monkeypatch.chdir(tmp_path)
    dataset = find_dataset("stdlib", tmp_path / "data", "byte")
    assert dataset.path == tmp_path / "data" / "stdlib_byte"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("fineweb10B", "fineweb10B --data-dir {}"),
        ("tinyshakespeare_byte", "tinyshakespeare --tokenizer byte --data-dir {}"),
        ("mine", "text PATH... --name mine --tokenizer auto --data-dir {}"),
    ],
)
def test_an_unprepared_dataset_is_an_error_with_the_command_that_prepares_it(
    tmp_path, name, command
):
    with pytest.raises(DatasetError, match="found nothing prepared in"):
        find_dataset(name, tmp_path / "none", "auto")
    make_folder(tmp_path / "other")
    with pytest.raises(DatasetError, match=f"{name!r} is not prepared.*only other prep") as error:
        find_dataset(name, tmp_path, "auto")
    assert str(error.value).endswith(f"python -m gptjax.data {command.format(tmp_path)}")


def test_what_is_no_dataset_of_the_run_is_refused(tmp_path):
    make_folder(tmp_path / "mine")
    with pytest.raises(DatasetError, match="mine: expected shards .* 'gpt2', found 'byte'"):
        find_dataset("mine", tmp_path, "gpt2")
    for name in ("train", "val"):
        make_folder(tmp_path / name, **{name: ()})
        with pytest.raises(DatasetError, match=rf"{name}: expected token shards .*\b0 for"):
            find_dataset(name, tmp_path)


# ----------------------------------------------------------------- dataset.json and the fingerprint


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[" * 200_000, "RecursionError"),
        (b'{"a": "\xe9"}', "UnicodeDecodeError"),
        (b"[]", "TypeError"),
        ({"format": 4}, "ValueError: format 4, tokenizer 'byte'"),
        ({"tokenizer": "\x1b[31mred"}, r"ValueError: format 2, tokenizer '\\x1b\[31mred'"),
        ({"shards": {TRAIN_1: {"max_token": float("inf")}}}, "OverflowError"),
        ({"shards": {TRAIN_1: {}}}, "KeyError: 'max_token'"),
        ({"options": [1]}, "TypeError"),
    ],
)
def test_a_dataset_json_that_cannot_be_parsed_is_an_error(tmp_path, content, says):
    folder = make_folder(tmp_path / "mine")
    if isinstance(content, bytes):
        (folder / "dataset.json").write_bytes(content)
    else:
        edit_manifest(folder, content)
    says = f"dataset.json: expected a description of shards, format 1 to 3, found {says}.*; restore"
    with pytest.raises(DatasetError, match=says):
        find_dataset("mine", tmp_path, "auto")


@pytest.mark.parametrize("name", ["../" + TRAIN_1, "", "\x1b[2Jx_train_1.bin"])
def test_a_listed_shard_that_is_missing_is_an_error(tmp_path, name):
    def add(content):
        content["shards"][name] = content["shards"][TRAIN_1]

    edit_manifest(make_folder(tmp_path / "mine"), add)
    says = f"mine: expected the 4 files that .*{name.replace('\x1b[', '\ufffd.')} missing; remove"
    with pytest.raises(DatasetError, match=says):
        find_dataset("mine", tmp_path, "auto")


def test_the_fingerprint_survives_json_and_names_each_difference(tmp_path):
    folder = make_folder(tmp_path / "mine")
    dataset = find_dataset("mine", tmp_path, "auto")
    saved = dataset.fingerprint()
    assert json.loads(json.dumps(saved)) == saved and dataset.differences(saved) == []
    assert (saved["train"], saved["val"]) == ({TRAIN_1: 100, TRAIN_2: 60}, {VAL: 50})
    other = saved | {"train": {TRAIN_1: 99, "gone_train_000002.bin": 60}, "tokenizer": "gpt2"}
    assert dataset.differences(other) == [
        "gone_train_000002.bin, training tokens: expected 60, found None",
        f"{TRAIN_1}, training tokens: expected 99, found 100",
        f"{TRAIN_2}, training tokens: expected None, found 60",
        "tokenizer: expected gpt2, found byte",
    ]
    assert len(dataset.differences(None)) == 7
    for manifest in (True, False):  # the same names and counts
        write_shard(folder / TRAIN_2, np.arange(60, dtype=np.uint16) + 1)
        (line,) = find_dataset("mine", tmp_path, "auto").differences(saved)
        assert line.startswith(f"{TRAIN_2}, SHA-256 of a sample: expected ")
        if manifest:
            (folder / "dataset.json").unlink()
            saved["tokenizer"] = "gpt2"
    assert dataset.fingerprint() == saved | {"tokenizer": "byte"}  # the files are read once
    many = find_dataset(make_folder(tmp_path / "many", train=(9,) * 30).name, tmp_path)
    lines = many.differences(many.fingerprint() | {"train": {}})
    assert len(lines) == 10 and lines[-1] == "and 21 more"


# --------------------------------------------------------------------- the checks before a training


def test_validate_names_a_split_that_is_too_short_and_an_id_out_of_range(tmp_path, monkeypatch):
    monkeypatch.setattr("gptjax.data.shards._CHUNK_TOKENS", 16)
    for manifest in (True, False):
        folder = make_folder(tmp_path / f"m{manifest}", tokenizer="gpt2", manifest=manifest)
        dataset = find_dataset(folder.name, tmp_path)
        dataset.validate(100, 49)  # an exact fit
        with pytest.raises(ShardError, match="expected at least 51 tokens .* found 50"):
            dataset.validate(100, 50)
        says = rf"{TRAIN_1}: at byte 1204: expected ids below .* 90, found id 90 \(token 90\); .*vo"
        with pytest.raises(ShardError, match=says):
            dataset.validate(90, 4)


def test_only_shards_that_are_not_listed_are_scanned_and_noted(tmp_path, monkeypatch):
    folder, scanned, real = make_folder(tmp_path / "mine"), [], module._check_ids
    check = lambda path, ids: scanned.append(path.name) or real(path, ids)
    monkeypatch.setattr(module, "_check_ids", check)
    write_shard(folder / "some_train_000003.bin", np.full(61, 300, dtype=np.uint16))
    dataset = find_dataset("mine", tmp_path)
    assert "has 1 files that dataset.json does not list (some_train_000003.bin)" in dataset.note
    with pytest.raises(ShardError, match="some_train_000003.bin: at byte 1024: .* found id 300"):
        dataset.validate(257, 4)
    assert scanned == ["some_train_000003.bin"]


def test_a_sample_reads_the_same_blocks_of_a_large_shard_the_first_and_last_bytes_among_them(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(shards_module, "_SAMPLE_WHOLE", 4000)
    monkeypatch.setattr(shards_module, "_SAMPLE_BLOCKS", 3)
    monkeypatch.setattr(shards_module, "_SAMPLE_BLOCK_BYTES", 100)
    write_shard(tmp_path / "a.bin", np.arange(4000, dtype=np.uint16))
    content = (tmp_path / "a.bin").read_bytes()  # 9024 bytes
    expected = hashlib.sha256(content[:100] + content[4462:4562] + content[-100:]).hexdigest()
    assert shards_module.Shard(tmp_path / "a.bin").sample() == expected


def flip(path, byte=1500):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def replace(path, by):
    path.unlink()
    by(path)


# Changes of a file, and what the checks say about a shard.
FAULTS = {
    "a bit": (flip, "at byte 0: expected s.* .*, as dataset.json lists, found"),
    "magic": (lambda path: flip(path, 0), "at byte 0: expected magic"),
    "cut short": (lambda path: os.truncate(path, 1500), "at byte 8: expected token count"),
    "another": (lambda path: write_shard(path, np.zeros(999, int)), "at byte 0: expected s"),
    "folder": (lambda path: replace(path, os.mkdir), "a directory instead of a regular file"),
    "fifo": (lambda path: replace(path, os.mkfifo), "a FIFO instead of a regular file"),
    "device": (
        lambda path: replace(path, lambda p: os.symlink("/dev/zero", p)),
        "a device instead of a regular file",
    ),
    "loop": (
        lambda path: replace(path, lambda p: os.symlink(p, p)),
        "Too many levels of symbolic links",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_damaged_shard_is_named_and_the_others_are_still_checked(tmp_path, capsys, fault):
    damage, says = FAULTS[fault]
    folder = make_folder(tmp_path / "mine", train=(999, 999, 999))
    names = [TRAIN_1, TRAIN_2, "some_train_000003.bin", VAL]
    intact = [f"{n}/4 {name}: as dataset.json lists" for n, name in enumerate(names, start=1)]
    assert main(["check", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [*intact, f"{folder}: all files are intact"]
    for name in names[:2]:
        damage(folder / name)
    with pytest.raises(ShardError, match=f"{TRAIN_1}: .*{says}.*; "):
        find_dataset("mine", tmp_path).validate(257, 4)
    assert main(["check", str(folder)]) == 1
    out, error = capsys.readouterr()
    assert out.splitlines() == [f"1/4 {TRAIN_1}: DAMAGED", f"2/4 {TRAIN_2}: DAMAGED", *intact[2:]]
    assert f"error: {folder}: 2 damaged files:" in error
    assert all(any(name in line for line in error.splitlines()) for name in names[:2])
    if "regular" in says:
        damage(folder / "dataset.json")
        with pytest.raises(DataError, match=rf"dataset.json: .*found .*{says}.*; "):
            find_dataset("mine", tmp_path)


def test_without_dataset_json_headers_and_ids_are_checked(tmp_path):
    for name in ("a_train_1.bin", "a_val_1.bin"):
        write_shard(tmp_path / name, np.full(9, 50256, dtype=np.uint16))
    lines = []
    assert check_dataset(tmp_path, log=lines.append) == []
    assert "has no dataset.json" in lines[0] and lines[1].endswith("not listed")
    write_shard(tmp_path / "a_val_1.bin", np.full(9, 50257, dtype=np.uint16))
    (problem,) = check_dataset(tmp_path, log=str)
    assert "a_val_1.bin: at byte 1024: expected ids below" in problem
    with pytest.raises(DatasetError, match="none: expected token shards"):
        check_dataset(tmp_path / "none")
