"""python -m gptjax.data fineweb10B: downloads, repeated and damaged, without a network."""

import hashlib
import json
import sys

import huggingface_hub
import numpy as np
import pytest

from gptjax.data import (
    PrepareError,
    ShardError,
    find_dataset,
    open_shard,
    prepare_fineweb,
    write_shard,
)

VAL, FIRST, SECOND, THIRD = (
    "fineweb_val_000000.bin",
    *(f"fineweb_train_{number:06d}.bin" for number in (1, 2, 3)),
)


@pytest.fixture
def hub(monkeypatch):
    """Fake hub with shards of 50 tokens; records requests and runs `hub.on[file]`."""

    class Hub:
        fetched: list[str] = []
        on: dict[str, object] = {}

    def hf_hub_download(repo_id, filename, *, repo_type, local_dir):
        assert (repo_id, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
        assert not (local_dir / filename).exists()  # or the hub's client might keep the old file
        Hub.fetched.append(filename)
        (local_dir / ".cache").mkdir(exist_ok=True)  # as the hub's client does
        if filename in Hub.on:
            Hub.on[filename](local_dir / filename)
        else:
            write_shard(local_dir / filename, np.arange(50, dtype=np.uint16) + len(filename))

    Hub.fetched, Hub.on = [], {}
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    return Hub


def fetch(data_dir, shards):
    lines = []
    return prepare_fineweb(data_dir, shards=shards, log=lines.append), lines


def test_it_downloads_and_becomes_a_dataset(tmp_path, hub):
    made, lines = fetch(tmp_path, 2)
    assert made == tmp_path / "fineweb10B" and hub.fetched == [VAL, FIRST, SECOND]
    assert sorted(path.name for path in made.iterdir()) == ["dataset.json", FIRST, SECOND, VAL]
    dataset = find_dataset("auto", tmp_path, "auto")
    assert (dataset.name, dataset.tokenizer, dataset.train_tokens, dataset.note) == (
        *("fineweb10B", "gpt2", 100),
        None,
    )
    dataset.validate(50257, 49)
    listed = json.loads((made / "dataset.json").read_text())["shards"]
    for file in (VAL, FIRST, SECOND):
        digest = hashlib.sha256((made / file).read_bytes()).hexdigest()
        assert listed[file]["sha256"] == digest == listed[file]["sample"]
    assert "1/3 fineweb_val_000000.bin: downloading" in lines[0]
    assert "3 of them downloaded now" in lines[-1]


def test_complete_shards_are_kept_and_more_join_them(tmp_path, hub):
    fetch(tmp_path, 1)
    hub.fetched.clear()
    _, lines = fetch(tmp_path, 1)
    assert hub.fetched == [] and "already there" in lines[0]
    made, _ = fetch(tmp_path, 3)
    assert hub.fetched == [SECOND, THIRD]
    assert find_dataset("fineweb10B", tmp_path, "gpt2").train_tokens == 150
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path != made]
    # Shards of another program are kept, too.
    (made / "dataset.json").unlink()
    hub.fetched.clear()
    fetch(tmp_path, 3)
    assert hub.fetched == [] and find_dataset("fineweb10B", tmp_path, "gpt2").note is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-10]),
        lambda path: write_shard(path, np.zeros(50, dtype=np.uint16)),
    ],
)
def test_a_damaged_shard_is_fetched_again(tmp_path, hub, damage):
    made, _ = fetch(tmp_path, 2)
    damage(made / FIRST)
    hub.fetched.clear()
    fetch(tmp_path, 2)
    assert hub.fetched == [FIRST] and open_shard(made / FIRST)[1] != 0
    find_dataset("fineweb10B", tmp_path, "gpt2").validate(50257, 49)


def test_an_interrupted_download_is_no_dataset_and_resumes(tmp_path, hub):
    def refuse(_):
        raise ConnectionError("no route to host")

    hub.on[SECOND] = refuse
    says = (
        "fineweb_train_000002.bin: could not download .*"
        "ConnectionError: no route to host.*same command again.*stdlib"
    )
    with pytest.raises(PrepareError, match=says):
        fetch(tmp_path, 2)
    hub.on[SECOND] = lambda path: path.write_bytes(b"<html>" * 400)
    with pytest.raises(ShardError, match="fineweb_train_000002.bin: at byte 0: expected magic"):
        fetch(tmp_path, 2)
    assert not (tmp_path / "fineweb10B").exists()
    hub.on.clear()
    hub.fetched.clear()
    fetch(tmp_path, 2)
    assert hub.fetched == [SECOND]
    find_dataset("fineweb10B", tmp_path, "gpt2").validate(50257, 49)


def test_refusals(tmp_path, monkeypatch):
    for shards in (0, 104):
        with pytest.raises(PrepareError, match=f"expected shards in 1..103, found {shards}"):
            fetch(tmp_path, shards)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    says = r"needs huggingface_hub, found none; pip install -e '.\[hub\]'"
    with pytest.raises(PrepareError, match=says):
        fetch(tmp_path, 1)
