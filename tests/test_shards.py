"""gptjax.data.shards: llm.c's format, and damaged files."""

import os

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from gptjax.data import ShardError, open_shard, write_shard
from gptjax.data import shards as module
from gptjax.data.shards import Shard

TOKENS = np.array([50256, 0, 1, 65535, 7], dtype=np.uint16)


def shard_bytes(tokens=TOKENS, magic=20240520, version=1, count=None):
    """Return a shard as llm.c's data scripts write it, without the code under test."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "docs_train_000001.bin"


@given(
    st.lists(st.integers(0, 65535), min_size=1, max_size=300),
    st.sampled_from([np.uint16, np.int32, np.int64]),
)
@settings(max_examples=30, deadline=None)
def test_written_bytes_are_those_of_llm_c(tmp_path_factory, ids, dtype):
    path = tmp_path_factory.mktemp("shards") / "a_train_000001.bin"
    write_shard(path, np.array(ids, dtype=dtype))
    assert path.read_bytes() == shard_bytes(ids) and os.listdir(path.parent) == [path.name]
    tokens = open_shard(path)
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16
    assert tokens.tolist() == ids and not tokens.flags.writeable


def test_a_vocabulary_above_65536_ids_is_in_llm_cs_llama_form(path):
    ids = np.array([0, 128_255, 70_000, 1, 2**31 - 1])
    write_shard(path, ids, vocab_size=128_256)
    header = shard_bytes([], magic=20240801, version=7, count=5)
    assert path.read_bytes() == header + ids.astype("<u4").tobytes()
    assert open_shard(path).dtype == np.uint32 and open_shard(path).tolist() == ids.tolist()
    np.testing.assert_array_equal(Shard(path).read(1, 2), [128_255, 70_000])
    with pytest.raises(ShardError, match=r"at byte 1028: .* found id 128255 \(token 1\)"):
        Shard(path).check_ids(0, Shard(path).read(0, 3), 100_000)
    with pytest.raises(ShardError, match="expected ids in 0..2147483647, found 2147483648"):
        write_shard(path, ids + 1, vocab_size=128_256)


@pytest.mark.parametrize("mask", [False, True])
def test_a_shard_is_read_by_position_or_in_chunks(tmp_path, monkeypatch, mask):
    path = tmp_path / ("a.mask" if mask else "a.bin")
    tokens = TOKENS % 2 if mask else TOKENS
    write_shard(path, tokens)
    shard = Shard(path)
    assert path.stat().st_size == 1024 + (5 if mask else 10) and shard.size == 5
    np.testing.assert_array_equal(shard.read(1, 3), tokens[1:4])
    assert shard.read(1, 3).dtype == (np.uint8 if mask else np.uint16)
    monkeypatch.setattr(module, "_CHUNK_TOKENS", 2)
    chunks = [(begin, tokens.tolist()) for begin, tokens in shard.chunks()]
    assert chunks == [(i, tokens[i : i + 2].tolist()) for i in (0, 2, 4)]


CUT = shard_bytes()
FAULTS = {
    "no header": (CUT[:100], 8, "token count above 0, found 5 in a file of 100 bytes"),
    "magic": (shard_bytes(magic=7), 0, "magic 20240520, found 7 .*; prepare the"),
    "version of Llama": (shard_bytes(magic=20240801), 4, "version 7, found 1"),
    "a mask": (shard_bytes(magic=20261122), 0, "magic 20240520, found 20261122"),
    "version": (shard_bytes(version=2), 4, "version 1, found 2"),
    "count": (shard_bytes(count=4), 8, "token count 5.0, found 4 in a file of 1"),
    "negative": (shard_bytes(count=-3), 8, "token count 5.0, found -3"),
    "no tokens": (shard_bytes([]), 8, "token count above 0, found 0"),
    "cut short": (CUT[:-2], 8, "token count 4.0, found 5 in a file of 1032 bytes"),
    "too long": (CUT + b"x", 8, "token count 5.5, found 5 in a file of 1035"),
    "empty": (b"", 0, "magic .* in a file of 0 bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_file_is_an_error_that_names_the_problem(tmp_path, fault):
    content, byte, says = FAULTS[fault]
    path = tmp_path / "red\x1b[31m.bin"
    path.write_bytes(content)
    for open_ in (open_shard, Shard):
        # No control characters of a name reach the terminal.
        with pytest.raises(
            ShardError, match=rf"red\ufffd\[31m.bin: at byte {byte}: expected {says}"
        ):
            open_(path)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (np.array([], dtype=np.uint16), r"expected 1 to .* found uint16 of shape \(0,\)"),
        (np.array([1, 2, 65536]), r"expected ids in 0..65535, found 65536"),
        (np.array([1, -1]), "found -1"),
        (np.array([1.0, 2.0]), r"integers of shape \(tokens,\), found float64"),
        (np.zeros((2, 2), dtype=np.uint16), r"found uint16 of shape \(2, 2\)"),
    ],
)
def test_write_shard_refuses(path, tokens, says):
    with pytest.raises(ShardError, match=says):
        write_shard(path, tokens)
    assert not os.listdir(path.parent)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.truncate(path, 1030),
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, 1035),
        lambda path: path.write_bytes(shard_bytes(TOKENS[::-1])),
    ],
)
def test_a_shard_that_changes_while_it_is_open_is_an_error(path, change):
    """A memory map of a truncated file would end the process with SIGBUS."""
    path.write_bytes(shard_bytes())
    os.utime(path, ns=(0, 0))  # the time's resolution is some milliseconds
    shard = Shard(path)
    shard.read(0, 5)
    change(path)
    says = "at byte 1024: expected the file of 1034 bytes .*, found a file of .* written to since"
    with pytest.raises(ShardError, match=f"docs_train_000001.bin: {says}"):
        shard.read(0, 5)


def test_a_shard_closes_its_file(path):
    path.write_bytes(shard_bytes())
    before = len(os.listdir("/proc/self/fd"))
    shard = Shard(path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del shard
    path.write_bytes(b"no shard")
    with pytest.raises(ShardError):
        Shard(path)
    assert len(os.listdir("/proc/self/fd")) == before
