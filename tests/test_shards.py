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
    """Write a shard as llm.c's data scripts do, without the code under test."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "docs_train_000001.bin"


def test_write_shard_writes_the_bytes_of_llm_c(path):
    write_shard(path, TOKENS)
    assert path.read_bytes() == shard_bytes()
    assert os.listdir(path.parent) == [path.name]


def test_open_shard_maps_read_only_uint16(path):
    path.write_bytes(shard_bytes())
    tokens = open_shard(path)
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16 and tokens.shape == (5,)
    np.testing.assert_array_equal(tokens, TOKENS)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@given(
    st.lists(st.integers(0, 65535), min_size=1, max_size=300),
    st.sampled_from([np.uint16, np.int32, np.int64]),
)
@settings(max_examples=50, deadline=None)
def test_round_trip(tmp_path_factory, ids, dtype):
    path = tmp_path_factory.mktemp("shards") / "a_train_000001.bin"
    write_shard(path, np.array(ids, dtype=dtype))
    assert open_shard(path).tolist() == ids


@given(st.integers(0, 255), st.integers(-(2**31), 2**31 - 1))
@settings(max_examples=200, deadline=None)
def test_a_changed_header_is_refused(tmp_path_factory, field, value):
    header_and_tokens = bytearray(shard_bytes())
    before = bytes(header_and_tokens)
    header_and_tokens[4 * field : 4 * field + 4] = np.array([value], dtype="<i4").tobytes()
    path = tmp_path_factory.mktemp("shards") / "a_train_000001.bin"
    path.write_bytes(header_and_tokens)
    if bytes(header_and_tokens) == before:
        np.testing.assert_array_equal(open_shard(path), TOKENS)
    else:
        with pytest.raises(
            ShardError, match="a_train_000001.bin: at byte .* expected .* found .*; "
        ):
            open_shard(path)


@given(st.integers(0, 1024 + 2 * TOKENS.size + 5))
@settings(max_examples=60, deadline=None)
def test_a_file_of_another_length_is_refused(tmp_path_factory, length):
    whole = shard_bytes() + b"\0" * 5
    path = tmp_path_factory.mktemp("shards") / "a_train_000001.bin"
    path.write_bytes(whole[:length])
    if length == len(shard_bytes()):
        np.testing.assert_array_equal(open_shard(path), TOKENS)
    else:
        with pytest.raises(ShardError, match="a_train_000001.bin: at byte"):
            open_shard(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (shard_bytes()[:100], "at byte 100: expected a header of 1024 bytes, found 100 bytes"),
        (
            shard_bytes(magic=7),
            "at byte 0: expected magic 20240520 .* found 7; .*python -m gptjax.data",
        ),
        (shard_bytes(magic=20240801), "found 20240801 .llm.c's shards of uint32 tokens"),
        (shard_bytes(version=2), "at byte 4: expected version 1, found version 2"),
        (shard_bytes(count=0), "at byte 8: expected a token count above 0, found 0"),
        (shard_bytes(count=-3), "at byte 8: expected a token count above 0, found -3"),
        (
            shard_bytes()[:-2],
            r"at byte 1032: expected 1034 bytes for the 5 tokens .* found .* 1032 bytes \(cut "
            r"short\)",
        ),
        (
            shard_bytes() + b"x",
            r"at byte 1034: expected 1034 bytes .* found .* 1035 bytes \(too long\)",
        ),
        (
            shard_bytes()[:12] + b"\1" + shard_bytes()[13:],
            "at byte 12: expected 0 in the unused header fields, found 1",
        ),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_problem(path, content, says):
    path.write_bytes(content)
    with pytest.raises(ShardError, match=says) as error:
        open_shard(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_an_error(path):
    with pytest.raises(
        ShardError, match="docs_train_000001.bin.* expected a readable shard, found No such file"
    ):
        open_shard(path)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (np.array([], dtype=np.uint16), "expected at least one token, found none"),
        (np.array([1, 2, 65536]), r"expected ids in 0..65535 \(uint16\), found 65536 at token 2"),
        (np.array([1, -1, 3]), "found -1 at token 1"),
        (np.array([1.0, 2.0]), r"expected integers of shape \(tokens,\), found float64"),
        (np.zeros((2, 2), dtype=np.uint16), r"found uint16 of shape \(2, 2\)"),
    ],
)
def test_write_shard_refuses(path, tokens, says):
    with pytest.raises(ShardError, match=says):
        write_shard(path, tokens)
    assert not os.listdir(path.parent)


def test_write_shard_refuses_more_than_the_header_can_count(path, monkeypatch):
    monkeypatch.setattr(module, "MAX_TOKENS", 4)
    with pytest.raises(ShardError, match="expected at most 4 tokens .* found 5; split them"):
        write_shard(path, TOKENS)


@pytest.mark.parametrize("breaks", ["fsync", "replace"])
def test_an_interrupted_write_keeps_the_old_shard_and_leaves_no_other(path, monkeypatch, breaks):
    write_shard(path, TOKENS)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, breaks, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_shard(path, np.arange(9, dtype=np.uint16))
    monkeypatch.undo()
    np.testing.assert_array_equal(open_shard(path), TOKENS)
    assert os.listdir(path.parent) == [path.name]


def test_a_shard_is_read_by_position_in_one_piece_or_in_chunks(path, monkeypatch):
    path.write_bytes(shard_bytes())
    shard = Shard(path)
    assert shard.size == 5
    assert shard.read(1, 3).tolist() == [0, 1, 65535] and shard.read(1, 3).dtype == np.uint16
    monkeypatch.setattr(module, "_CHUNK_TOKENS", 2)
    chunks = [(begin, tokens.tolist()) for begin, tokens in shard.chunks()]
    assert chunks == [(0, [50256, 0]), (2, [1, 65535]), (4, [7])]


def test_a_read_that_returns_less_than_was_asked_for_is_continued(path, monkeypatch):
    """Linux returns at most 2 GiB."""
    path.write_bytes(shard_bytes())
    shard, real = Shard(path), os.pread
    monkeypatch.setattr(
        os, "pread", lambda descriptor, count, offset: real(descriptor, min(count, 3), offset)
    )
    np.testing.assert_array_equal(shard.read(0, 5), TOKENS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda path: os.truncate(path, 1030),
            "at byte 1024: expected the file of 1034 bytes .*, found .* 1030 bytes that was",
        ),
        (
            lambda path: os.truncate(path, 0),
            "at byte 1024: .*, found a file of 0 bytes .*; .*same command again",
        ),
        (
            lambda path: os.truncate(path, 1035),
            "at byte 1024: .*, found a file of 1035 bytes that was written to",
        ),
        (
            lambda path: path.write_bytes(shard_bytes(TOKENS[::-1])),
            "found a file of 1034 bytes that was written to",
        ),
    ],
)
def test_a_shard_that_changes_while_it_is_open_is_an_error(path, change, says):
    """A memory map of a truncated file would end the process with SIGBUS."""
    path.write_bytes(shard_bytes())
    os.utime(path, ns=(0, 0))  # the time's resolution is some milliseconds
    shard = Shard(path)
    shard.read(0, 5)
    change(path)
    with pytest.raises(ShardError, match="docs_train_000001.bin: .*" + says):
        shard.read(0, 5)


def test_a_read_error_has_its_offset(path, monkeypatch):
    path.write_bytes(shard_bytes())
    shard = Shard(path)

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(
        ShardError, match="at byte 1028: expected a readable shard, found Input/output error"
    ):
        shard.read(2, 1)


@pytest.mark.parametrize("open_", [open_shard, Shard])
def test_a_file_that_is_not_regular_is_an_error_without_waiting(path, open_):
    os.mkfifo(path)
    with pytest.raises(ShardError, match="found a FIFO instead of a regular file"):
        open_(path)
    with pytest.raises(ShardError, match="found a directory instead"):
        open_(path.parent)
    with pytest.raises(ShardError, match="found a device instead"):
        open_("/dev/zero")
    with pytest.raises(ShardError, match="expected a readable shard, found embedded null byte"):
        open_("a\0b")


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


def test_control_characters_of_a_name_do_not_reach_the_terminal(tmp_path):
    with pytest.raises(ShardError) as error:
        open_shard(tmp_path / "red\x1b[31m.bin")
    assert "red\ufffd[31m.bin" in str(error.value)
