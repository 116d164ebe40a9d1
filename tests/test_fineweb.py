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
def fetch(monkeypatch, tmp_path):
    """Return a function that prepares FineWeb from a fake hub with shards of 50 tokens.

    It returns the downloaded files. `on` holds functions that the hub calls for a file instead.
    """

    def fetch(shards, **on):
        fetched = []

        def hf_hub_download(repo_id, filename, *, repo_type, local_dir):
            assert (repo_id, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
            path = local_dir / filename
            assert not path.exists()  # or the hub's client might keep the old file
            fetched.append(filename)
            (local_dir / ".cache").mkdir(exist_ok=True)  # as the hub's client does
            if write := on.get(path.stem):
                write(path)
            else:
                write_shard(path, np.arange(50) + len(filename))

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
        assert prepare_fineweb(tmp_path, shards=shards, log=str) == tmp_path / "fineweb10B"
        dataset = find_dataset("auto", tmp_path, "auto")
        assert (dataset.name, dataset.tokenizer, dataset.note) == ("fineweb10B", "gpt2", None)
        assert dataset.train_tokens == 50 * len(dataset.train)
        dataset.validate(50257, 49)
        return fetched

    return fetch


def test_it_downloads_and_becomes_a_dataset(tmp_path, fetch):
    assert fetch(2) == [VAL, FIRST, SECOND]
    (made,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert sorted(path.name for path in made.iterdir()) == ["dataset.json", FIRST, SECOND, VAL]
    listed = json.loads((made / "dataset.json").read_text())["shards"]
    for file in (VAL, FIRST, SECOND):
        digest = hashlib.sha256((made / file).read_bytes()).hexdigest()
        assert listed[file]["sha256"] == digest == listed[file]["sample"]


def test_complete_shards_are_kept_and_more_join_them(tmp_path, fetch):
    fetch(1)
    assert fetch(1) == [] and fetch(3) == [SECOND, THIRD]
    # Shards of another program are kept, too.
    (tmp_path / "fineweb10B" / "dataset.json").unlink()
    assert fetch(3) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-10]),
        lambda path: write_shard(path, np.zeros(50, dtype=np.uint16)),
    ],
)
def test_a_damaged_shard_is_fetched_again(tmp_path, fetch, damage):
    fetch(2)
    damage(tmp_path / "fineweb10B" / FIRST)
    assert fetch(2) == [FIRST] and open_shard(tmp_path / "fineweb10B" / FIRST)[1] != 0


def test_an_interrupted_download_is_no_dataset_and_resumes(tmp_path, fetch):
    def refuse(_):
        raise ConnectionError("no route to host")

    says = "000002.bin: could not download .*ConnectionError: no route to host.*same command again"
    with pytest.raises(PrepareError, match=says):
        fetch(2, fineweb_train_000002=refuse)
    with pytest.raises(ShardError, match="fineweb_train_000002.bin: at byte 0: expected magic"):
        fetch(2, fineweb_train_000002=lambda path: path.write_bytes(b"<html>" * 400))
    assert not (tmp_path / "fineweb10B").exists()
    assert fetch(2) == [SECOND]


def test_refusals(fetch, monkeypatch):
    for shards in (0, 104):
        with pytest.raises(PrepareError, match=f"expected shards in 1..103, found {shards}"):
            fetch(shards)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PrepareError, match=r"needs huggingface_hub, found none; pip install"):
        prepare_fineweb("none", shards=1)
