"""The contents of a dataset: its fingerprint, and the checks of its shards."""

import hashlib
import json

import numpy as np
import pytest
from dataset_tools import make_folder

from gptjax.data import ShardError, find_dataset, write_shard
from gptjax.data import dataset as module
from gptjax.data import manifest as manifest_module


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
        "gone_train_000002.bin: expected training tokens 60, found None",
        "some_train_000001.bin: expected training tokens 99, found 100",
        "some_train_000002.bin: expected training tokens None, found 60",
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
        r"some_train_000001.bin: at byte 0: expected sample .*, "
        r"as dataset.json lists, found .*; "
    )
    with pytest.raises(ShardError, match=says + ".*python -m gptjax.data check"):
        dataset.validate(257, 4)
    first.write_bytes(whole)
    dataset.validate(257, 4)
    write_shard(second, np.zeros(100, dtype=np.uint16))
    with pytest.raises(ShardError, match="some_train_000002.bin: at byte 0: expected sample"):
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
