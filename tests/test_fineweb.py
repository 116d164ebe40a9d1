"""python -m gptjax.data fineweb10B: downloads, repeated and damaged, without a network."""

import hashlib
import json
import sys

import huggingface_hub
import numpy as np
import pytest

from gptjax.data import PrepareError, find_dataset, open_shard, prepare_fineweb, write_shard

VAL, FIRST, SECOND, THIRD = (
    "fineweb_val_000000.bin",
    *(f"fineweb_train_{number:06d}.bin" for number in (1, 2, 3)),
)


@pytest.fixture
def hub(monkeypatch):
    """Fake hub with shards of 50 tokens; records requests and runs `hub.on[file]`."""

    class Hub:
        fetched: list[str]
        on: dict[str, object]

    def hf_hub_download(repo_id, filename, *, repo_type, local_dir):
        assert (repo_id, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
        # or the hub's client might use the old file
        assert not (local_dir / filename).exists()
        Hub.fetched.append(filename)
        (local_dir / ".cache").mkdir(exist_ok=True)  # as the hub's client does
        if filename in Hub.on:
            Hub.on[filename](local_dir / filename)
        else:
            write_shard(local_dir / filename, np.arange(50, dtype=np.uint16) + len(filename))

    Hub.fetched, Hub.on = [], {}
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    return Hub


def refuse(_):
    raise ConnectionError("no route to host")


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


def fetch(data_dir, shards):
    lines = []
    return prepare_fineweb(data_dir, shards=shards, log=lines.append), lines


def test_it_downloads_and_becomes_a_dataset(tmp_path, hub):
    made, lines = fetch(tmp_path, 2)
    assert made == tmp_path / "fineweb10B" and hub.fetched == [VAL, FIRST, SECOND]
    assert sorted(path.name for path in made.iterdir()) == ["dataset.json", FIRST, SECOND, VAL]
    dataset = find_dataset("auto", tmp_path, "auto")
    assert (dataset.name, dataset.tokenizer, dataset.train_tokens, dataset.note) == (
        "fineweb10B",
        "gpt2",
        100,
        None,
    )
    dataset.validate(50257, 49)
    assert (
        lines[0].startswith("1/3 fineweb_val_000000.bin: downloading")
        and "3 of them downloaded now" in lines[-1]
    )


def test_whole_shards_are_not_fetched_again_and_more_join_them(tmp_path, hub):
    fetch(tmp_path, 1)
    hub.fetched.clear()
    _, lines = fetch(tmp_path, 1)
    assert hub.fetched == [] and "already there (50 tokens)" in lines[0]
    made, _ = fetch(tmp_path, 3)
    assert hub.fetched == [SECOND, THIRD]
    assert find_dataset("fineweb10B", tmp_path, "gpt2").train_tokens == 150
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path != made]


def test_a_truncated_shard_is_fetched_again(tmp_path, hub):
    made, _ = fetch(tmp_path, 2)
    cut(made / FIRST)
    hub.fetched.clear()
    fetch(tmp_path, 2)
    assert hub.fetched == [FIRST] and open_shard(made / FIRST).size == 50


def test_dataset_json_has_the_digests_of_the_downloads(tmp_path, hub):
    made, _ = fetch(tmp_path, 2)
    said = json.loads((made / "dataset.json").read_text())["shards"]
    for file in (VAL, FIRST, SECOND):
        assert (
            said[file]["sha256"]
            == hashlib.sha256((made / file).read_bytes()).hexdigest()
            == said[file]["sample"]
        )


def test_a_changed_shard_is_fetched_again(tmp_path, hub):
    made, _ = fetch(tmp_path, 2)
    write_shard(made / FIRST, np.zeros(50, dtype=np.uint16))
    hub.fetched.clear()
    fetch(tmp_path, 2)
    assert hub.fetched == [FIRST] and open_shard(made / FIRST)[1] != 0
    find_dataset("fineweb10B", tmp_path, "gpt2").validate(50257, 49)


def test_an_interrupted_download_is_no_dataset_and_goes_on_where_it_stopped(tmp_path, hub):
    hub.on[SECOND] = refuse
    says = (
        "fineweb_train_000002.bin: could not download .*"
        "ConnectionError: no route to host.*same command again.*stdlib"
    )
    with pytest.raises(PrepareError, match=says):
        fetch(tmp_path, 2)
    assert not (tmp_path / "fineweb10B").exists()
    cut(tmp_path / ".fineweb10B.partial" / VAL)  # killed while the client was copying, say
    hub.on.clear()
    hub.fetched.clear()
    fetch(tmp_path, 2)
    assert hub.fetched == [VAL, SECOND]
    find_dataset("fineweb10B", tmp_path, "gpt2").validate(50257, 49)


def test_a_download_that_is_not_a_shard_is_an_error(tmp_path, hub):
    hub.on[FIRST] = lambda path: path.write_bytes(b"<html>" * 400)
    with pytest.raises(
        PrepareError,
        match="downloaded shard is damaged: .*fineweb_train_000001.bin: at byte 0: expected magic",
    ):
        fetch(tmp_path, 1)
    assert not (tmp_path / "fineweb10B").exists()


@pytest.mark.parametrize("shards", [0, 104])
def test_a_number_of_shards_that_there_are_not_is_refused(tmp_path, shards):
    with pytest.raises(PrepareError, match=f"expected shards in 1..103, found {shards}"):
        fetch(tmp_path, shards)


def test_without_huggingface_hub_the_error_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        PrepareError, match=r"needs huggingface_hub, found none; pip install -e '.\[hub\]'"
    ):
        fetch(tmp_path, 1)
